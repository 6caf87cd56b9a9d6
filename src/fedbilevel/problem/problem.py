"""A federated bilevel problem: two losses on named tensors, an initial point, and the owner of each
variable.

    min_x  mean_i f_i(x, y*(x))   subject to   y*(x) = argmin_y mean_i g_i(x, y)

`upper(x, y, batch)` is f_i and `lower(x, y, batch)` is g_i on a batch of one client.
x and y are dicts of named tensors.
A batch holds the client's fields and names that the library fills in: `index` (position of each
sample within its client), `weight` (1/n, zero on padding), if the problem has `features`, the values
of the features, and, if it has `draws`, random numbers.
A loss returns one value per sample, shape (n,), and the library sums them with the weights.
The weights sum to one, so a penalty added to every entry counts once.
A loss may also return that sum itself, `(batch["weight"] * loss_per_sample).sum()`.
A loss is a function of its arguments: it may read constants, but nothing that changes during a run,
because it is not called anew for every derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from fedbilevel.errors import ProblemError, reason
from fedbilevel.problem.dropout import NUM_DRAWS, drops, masked
from fedbilevel.problem.layout import Tree, check_tree
from fedbilevel.problem.modules import BoundModule, Frozen, initial_parameters

Fields = Mapping[str, Any]
Loss = Callable[[Any, Any, Fields], Tensor]
Statistics = Callable[[Any, Any, Fields], dict[str, Tensor]]


class Scopes(NamedTuple):
    """The owners of x and y.

    lower: `global` is one y for all clients, `local` a y_i per client.
    upper: `shared` is one x for all clients, `private` a block x_i that never leaves its client.

    >>> import fedbilevel as fb
    >>> fb.Scopes(upper="private")
    Scopes(lower='global', upper='private')
    """

    lower: Literal["global", "local"] = "global"
    upper: Literal["shared", "private"] = "shared"


def _empty(_sums: Mapping[str, float]) -> dict[str, float]:
    return {}


@dataclass(frozen=True, kw_only=True, repr=False)
class Problem:
    """Two losses, an initial point and the scopes.

    upper, lower: functions (x, y, batch) -> one value per sample, shape (n,), or a scalar that sums
        them with `batch["weight"]`.
    x0: dict of tensors; for a private x, a function of the client's sizes (`{"train": 40, ...}`)
        that returns that client's dict, in which at most one 1-D tensor may differ in length
        between clients.
    y0: dict of tensors.
    scopes: the owners of x and y, see `Scopes`.
    features: optional `features(x, batch) -> Tensor` with one entry per sample. Losses find it as
        `batch["features"]`, and the library computes it once per x instead of once per call.
        It never changes a result.
    draws: by role, how many random numbers from 0 to 1 every sample of a training batch gets, as
        `batch["draw"]` of shape (n, number). They are drawn anew for every batch, by address, for
        augmentations and resampled episodes. Measurements draw nothing and have no such field.
    client_weights: how clients are averaged: `equal` (every client counts the same, as in the
        papers) or `by_samples` (in proportion to its training samples).
    statistics: per role, a function (x, y, batch) -> dict of values per sample, shape (n,), which
        the library sums over real samples, or of scalars that count nothing where
        `batch["weight"]` is 0.
    metrics: turns the sums of the statistics over all clients into figures.
    across: figures from the statistics of the single clients, each a tensor with one entry per
        client, e.g. the accuracy of the worst tenth.
    diagnostics: figures that the server can compute from a shared x and global y alone, e.g. the
        distance to a known solution.

    A batch holds the client's own fields. The names `weight` (1/n, 0 on padding), `index` (position
    of the sample within its client and role), `features` and `draw` are reserved: the library fills
    them in, and a client with a field of that name is refused.

    >>> import torch
    >>> import fedbilevel as fb
    >>> fit = lambda y, batch: (batch["a"] @ y["w"] - batch["b"]) ** 2
    >>> fb.Problem(
    ...     upper=lambda x, y, batch: fit(y, batch),
    ...     lower=lambda x, y, batch: fit(y, batch) + x["penalty"].exp() * (y["w"] ** 2).sum(),
    ...     x0={"penalty": torch.tensor(0.0)}, y0={"w": torch.zeros(3)}, name="ridge",
    ... )
    <Problem ridge: x (shared) = {penalty: ()}, y (global) = {w: (3)}>
    """

    upper: Loss
    lower: Loss
    x0: Tree | Callable[[Mapping[str, int]], Tree]
    y0: Tree
    scopes: Scopes = Scopes()
    features: Callable[[Any, Fields], Tensor] | None = None
    draws: Mapping[str, int] = field(default_factory=dict)
    client_weights: Literal["equal", "by_samples"] = "equal"
    statistics: Mapping[str, Statistics] = field(default_factory=dict)
    metrics: Callable[[Mapping[str, float]], dict[str, float]] = _empty
    across: Callable[[Mapping[str, Tensor]], dict[str, float]] | None = None
    diagnostics: Callable[[Tree, Tree], dict[str, float]] | None = None
    name: str = "problem"

    def __post_init__(self) -> None:
        if not isinstance(self.scopes, Scopes):
            raise ProblemError(
                f"scopes is {self.scopes!r}, expected Scopes(lower='global' or 'local', upper='shared' or 'private')."
            )
        for label, value, known in (
            ("scopes.lower", self.scopes.lower, ("global", "local")),
            ("scopes.upper", self.scopes.upper, ("shared", "private")),
            ("client_weights", self.client_weights, ("equal", "by_samples")),
        ):
            if value not in known:
                raise ProblemError(f"{label} is {value!r}, expected {' or '.join(map(repr, known))}.")
        if callable(self.x0) and self.scopes.upper == "shared":
            raise ProblemError(
                "x0 is a function of the client's sizes, which only a private x can be: "
                "give a dict of tensors, or scopes=Scopes(upper='private')."
            )
        for label, function, takes in (
            ("upper", self.upper, "x, y, batch"),
            ("lower", self.lower, "x, y, batch"),
            ("features", self.features, "x, batch"),
            ("metrics", self.metrics, "sums"),
            ("across", self.across, "statistics"),
            ("diagnostics", self.diagnostics, "x, y"),
        ):
            if not callable(function) and not (function is None and label in ("features", "across", "diagnostics")):
                raise ProblemError(f"{label} is {function!r}, expected a function of ({takes}).")
        if not isinstance(self.statistics, Mapping) or not all(map(callable, self.statistics.values())):
            raise ProblemError(
                f"statistics is {self.statistics!r}, expected a function of (x, y, batch) for each role, "
                "e.g. {'val': accuracy}."
            )
        self._check_draws()
        if not callable(self.x0):
            check_tree("x0", self.x0)
        check_tree("y0", self.y0)

    def _check_draws(self) -> None:
        if not isinstance(self.draws, Mapping) or not all(type(num) is int and num > 0 for num in self.draws.values()):
            raise ProblemError(
                f"draws is {self.draws!r}, expected a number of random numbers per sample for each role, "
                "e.g. {'train': 3}."
            )
        if self.draws and self.features is not None:
            raise ProblemError(
                "the problem has features, which are computed once per sample, and draws, which change samples: "
                "compute the features inside the losses."
            )

    def __repr__(self) -> str:
        shapes = lambda tree: (
            "{" + ", ".join(f"{name}: ({', '.join(map(str, leaf.shape))})" for name, leaf in tree.items()) + "}"
        )
        x = "made for each client's sizes" if callable(self.x0) else shapes(self.x0)
        return f"<Problem {self.name}: x ({self.scopes.upper}) = {x}, y ({self.scopes.lower}) = {shapes(self.y0)}>"

    def _repr_html_(self) -> str:
        from fedbilevel import displays  # notebooks only

        return displays.problem(self)

    def initial_x(self, sizes: Mapping[str, int]) -> Tree:
        if not callable(self.x0):
            return self.x0
        try:
            tree = self.x0(sizes)
        except Exception as error:  # the user's function may raise anything; name it, keep the cause
            raise ProblemError(f"x0() failed for a client with the sizes {dict(sizes)}: {reason(error)}.") from error
        check_tree("what x0() returns", tree)
        return tree

    @classmethod  # long because its signature and examples are all that `help` shows
    def from_modules(
        cls,
        x_module: nn.Module | None = None,
        y_module: nn.Module | None = None,
        *,
        upper: Loss,
        lower: Loss,
        x0: Tree | Callable[[Mapping[str, int]], Tree] | None = None,
        y0: Tree | None = None,
        scopes: Scopes = Scopes(),
        features: Callable[[Any, Fields], Tensor] | None = None,
        draws: Mapping[str, int] = MappingProxyType({}),
        client_weights: Literal["equal", "by_samples"] = "equal",
        statistics: Mapping[str, Statistics] = MappingProxyType({}),
        metrics: Callable[[Mapping[str, float]], dict[str, float]] = _empty,
        across: Callable[[Mapping[str, Tensor]], dict[str, float]] | None = None,
        diagnostics: Callable[[Tree, Tree], dict[str, float]] | None = None,
        name: str = "problem",
    ) -> Problem:
        """Make a problem from a torch module for x, for y or for both.

        x_module: module whose parameters are x; alternatively, give tensors as `x0`.
        y_module: module whose parameters are y; alternatively, give tensors as `y0`.

        Losses, statistics and features receive a module as a call that uses the current parameters:
        `upper(net, head, batch)` may write `head(net(batch["image"]))` and
        `net.parameters["0.weight"]`. They receive tensors as a dict, and `diagnostics` receives
        dicts only. Frozen parameters stay as they are, and the modules themselves are never
        changed. Dropout in training mode acts in the lower loss, with masks that all evaluations of
        a batch share. All other arguments are those of `Problem`.

        Examples with two modules, with a module for y only, and with a module for x only:

        >>> import torch
        >>> import fedbilevel as fb
        >>> def fit(net, head, batch):
        ...     return (head(net(batch["a"]))[:, 0] - batch["b"]) ** 2
        >>> net, head = torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)
        >>> fb.Problem.from_modules(net, head, upper=fit, lower=fit)
        <Problem problem: x (shared) = {weight: (2, 3), bias: (2)}, y (global) = {weight: (1, 2), ...}>
        >>> def error(x, head, batch):
        ...     return (head(batch["a"])[:, 0] - batch["b"]) ** 2
        >>> def ridge(x, head, batch):
        ...     return error(x, head, batch) + x["penalty"].exp() * (head.parameters["weight"] ** 2).sum()
        >>> fb.Problem.from_modules(
        ...     y_module=torch.nn.Linear(3, 1), x0={"penalty": torch.tensor(0.0)}, upper=error, lower=ridge
        ... )
        <Problem problem: x (shared) = {penalty: ()}, y (global) = {weight: (1, 3), bias: (1)}>
        >>> def project(net, y, batch):
        ...     return (net(batch["a"]) @ y["w"] - batch["b"]) ** 2
        >>> fb.Problem.from_modules(x_module=net, y0={"w": torch.zeros(2)}, upper=project, lower=project)
        <Problem problem: x (shared) = {weight: (2, 3), bias: (2)}, y (global) = {w: (2)}>
        """
        if x_module is None and y_module is None:
            raise ProblemError(
                "x_module and y_module are both missing, expected a torch.nn.Module for one of them at least: "
                "use Problem(...) for plain tensors."
            )
        start_x, of_x = _start("x", x_module, x0)
        start_y, of_y = _start("y", y_module, y0)

        drawn, noisy = draws, drops(x_module) or drops(y_module)
        if noisy and features is not None:
            raise ProblemError(
                "a module with dropout in training mode was given with features, which are computed once for all "
                "batches: put the module in eval mode, or compute the features inside the losses."
            )
        if noisy:
            drawn = {**draws, "train": draws.get("train", 0) + NUM_DRAWS}

        def bind(function: Callable[[Any, Any, Fields], Any], own: int | None = None) -> Any:
            bound = lambda x, y, batch: function(of_x(x), of_y(y), batch)
            return masked(bound, own) if noisy else bound

        return cls(
            upper=bind(upper),
            lower=bind(lower, drawn["train"] - NUM_DRAWS if noisy else None),
            x0=start_x,
            y0=start_y,
            scopes=scopes,
            features=None if features is None else (lambda x, batch: features(of_x(x), batch)),
            draws=drawn,
            client_weights=client_weights,
            statistics={role: bind(function) for role, function in statistics.items()},
            metrics=metrics,
            across=across,
            diagnostics=diagnostics,
            name=name,
        )


def _start(variable: str, module: nn.Module | None, tensors: Any) -> tuple[Any, Callable[[Tree], Any]]:
    """Return the initial value of a variable, and the function that prepares a value for a loss."""
    if (module is None) == (tensors is None):
        names = f"{variable}_module and {variable}0"
        raise ProblemError(
            f"{names} are both {'missing' if module is None else 'given'}, expected one of them: "
            f"give a module as {variable}_module, or a dict of tensors as {variable}0."
        )
    if module is None:
        return tensors, lambda value: value
    frozen = Frozen(module)
    return initial_parameters(f"{variable}_module", module), lambda value: BoundModule(module, value, frozen)


def with_features(problem: Problem, x: Any, fields: Fields) -> Fields:
    """Add the problem's features to the fields of a batch; no other function adds them."""
    if problem.features is None or "features" in fields:
        return fields
    return {**fields, "features": problem.features(x, fields)}
