"""A federated bilevel problem: two losses on the user's own tensors, an initial point, and who owns which variable.

    min_x  mean_i f_i(x, y*(x))   subject to   y*(x) = argmin_y mean_i g_i(x, y)

`upper(x, y, batch)` is f_i and `lower(x, y, batch)` is g_i on a batch of one client. x and y are dicts of named tensors.
A batch holds the client's fields plus `index` (position of each sample within its client) and `weight` (1/n, zero on padding).
A loss returns one value per sample, shape (n,), and the library sums them with the weights: a penalty added to every entry counts
once, because the weights sum to one. Or it returns that sum itself, `(batch["weight"] * loss_per_sample).sum()`.
A loss is a function of its arguments: it may read constants, but nothing that changes during a run, because it is not called anew
for every derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedbilevel.columns import BESIDE, COLUMNS, DIAGNOSTICS
from fedbilevel.errors import ProblemError
from fedbilevel.problem.client_data import ClientData
from fedbilevel.problem.contraction import contracted, counted

Tree = Mapping[str, Tensor]
Fields = Mapping[str, Any]
Loss = Callable[[Any, Any, Fields], Tensor]
Statistics = Callable[[Any, Any, Fields], dict[str, Tensor]]


class Scopes(NamedTuple):
    """Who owns what. `global`: one y for all; `local`: a y_i per client. `shared`: one x; `private`: a block x_i that never leaves its client.

    >>> import fedbilevel as fb
    >>> fb.Scopes(upper="private")
    Scopes(lower='global', upper='private')
    """

    lower: Literal["global", "local"] = "global"
    upper: Literal["shared", "private"] = "shared"


class Layout:
    """How named tensors lie in one flat vector. A ragged leaf (its length differs between clients) comes last, so padding is a tail."""

    def __init__(self, tree: Tree, ragged: str | None = None) -> None:
        self.shapes = {name: tuple(leaf.shape) for name, leaf in tree.items() if name != ragged}
        self.ragged = ragged
        self.num_fixed = sum(leaf.numel() for name, leaf in tree.items() if name != ragged)

    def ravel(self, tree: Tree) -> Tensor:
        names = [*self.shapes, *([self.ragged] if self.ragged else [])]
        if set(tree) != set(names):
            raise ProblemError(
                f"expected tensors named {', '.join(names)}, got {', '.join(tree)}: use the same names as in the initial point."
            )
        return torch.cat([tree[name].reshape(-1) for name in names])

    def unravel(self, vector: Tensor) -> dict[str, Tensor]:
        """Views into `vector`; what lies beyond the fixed leaves belongs to the ragged one."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        parts = vector.split([*sizes, vector.shape[0] - self.num_fixed] if self.ragged else sizes)
        tree = {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=False)}
        if self.ragged:
            tree[self.ragged] = parts[-1]
        return tree

    def describe(self) -> dict[str, Any]:
        return {
            **{name: list(shape) for name, shape in self.shapes.items()},
            **({self.ragged: "ragged"} if self.ragged else {}),
        }


def _empty(_sums: Mapping[str, float]) -> dict[str, float]:
    return {}


def check_tree(label: str, tree: Any) -> None:
    if (
        isinstance(tree, Mapping)
        and tree
        and all(isinstance(leaf, Tensor) and not leaf.is_complex() for leaf in tree.values())
    ):
        return
    wrong = (
        [
            f"{name!r} of type {leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__}"
            for name, leaf in tree.items()
            if not isinstance(leaf, Tensor) or leaf.is_complex()
        ]
        if isinstance(tree, Mapping)
        else []
    )
    got = f"an entry {wrong[0]}" if wrong else type(tree).__name__ if not isinstance(tree, Mapping) else "an empty one"
    raise ProblemError(f"{label} must be a dict of named tensors with at least one entry, got {got}.")


def reason(error: Exception) -> str:
    """What the user's own function raised, short and on one line."""
    text = " ".join(str(error).split()).split(". ", 1)[0]
    return f"{type(error).__name__}: {text if len(text) < 200 else text[:200] + ' ...'}".rstrip(".: ")


@dataclass(frozen=True, kw_only=True, repr=False)
class Problem:
    """Two losses, an initial point and the scopes.

    x0: dict of tensors; for a private x, a function of the client's sizes (`{"train": 40, ...}`) that returns that client's dict,
        in which at most one 1-D tensor may differ in length between clients.
    features: optional `features(x, batch) -> Tensor` with one entry per sample; losses then find it as `batch["features"]`, and the
        library computes it once per x instead of once per call. It never changes a result.
    weights: how clients are averaged: `mean` (every client counts the same, as in the papers) or `by_samples` (by training samples).
    upper, lower: functions (x, y, batch) -> one value per sample, shape (n,), or a scalar that sums them with `batch["weight"]`.
    statistics: per role, a function (x, y, batch) -> dict of values per sample, shape (n,), which the library sums over real samples, or of scalars
        that count nothing where `batch["weight"]` is 0; `metrics` turns their sums over all clients into figures.
    across: figures from the statistics of the clients one by one, each a tensor with one entry per client, e.g. the accuracy of the worst tenth.
    diagnostics: figures the server can compute from a shared x and global y alone, e.g. the distance to a known solution.

    >>> import torch
    >>> import fedbilevel as fb
    >>> fb.Problem(
    ...     upper=lambda x, y, batch: (batch["a"] @ y["w"] - batch["b"]) ** 2,
    ...     lower=lambda x, y, batch: (batch["a"] @ y["w"] - batch["b"]) ** 2 + x["penalty"].exp() * (y["w"] ** 2).sum(),
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
    weights: Literal["mean", "by_samples"] = "mean"
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
            ("weights", self.weights, ("mean", "by_samples")),
        ):
            if value not in known:
                raise ProblemError(f"{label} is {value!r}, expected {' or '.join(map(repr, known))}.")
        if callable(self.x0) and self.scopes.upper == "shared":
            raise ProblemError(
                "x0 is a function of the client's sizes, which only a private x can be: give a dict of tensors, or scopes=Scopes(upper='private')."
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
                f"statistics is {self.statistics!r}, expected a function of (x, y, batch) for each role, e.g. {{'val': accuracy}}."
            )
        for label, tree in (("x0", self.x0), ("y0", self.y0)):
            if not (label == "x0" and callable(tree)):
                check_tree(label, tree)

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

    @classmethod
    def from_modules(
        cls,
        upper_module: nn.Module,
        lower_module: nn.Module,
        *,
        upper: Loss,
        lower: Loss,
        features: Callable[[Any, Fields], Tensor] | None = None,
        statistics: Mapping[str, Statistics] = MappingProxyType({}),
        **options: Any,
    ) -> Problem:
        """x = parameters of `upper_module`, y = parameters of `lower_module`.

        The losses and statistics receive the two modules as calls that use the current x and y: `upper(net, head, batch)` may write
        `head(net(batch["image"]))` and `net.parameters["0.weight"]`. Frozen parameters stay as they are; the modules themselves are never changed.
        """
        for module, label in ((upper_module, "upper_module"), (lower_module, "lower_module")):
            if not isinstance(module, nn.Module):
                raise ProblemError(
                    f"{label} is of type {type(module).__name__}, expected a torch.nn.Module: use Problem(...) for plain tensors."
                )
            for name, layer in module.named_modules():
                _refuse_layer(layer, f"{label}.{name}" if name else label)
            if not any(parameter.requires_grad for parameter in module.parameters()):
                raise ProblemError(
                    f"{label} has no parameters that require gradients, so there is nothing to optimise at that level: pass a module with parameters."
                )

        def bind(function: Callable[[Any, Any, Fields], Any]) -> Callable[[Any, Any, Fields], Any]:
            return lambda x, y, batch: function(BoundModule(upper_module, x), BoundModule(lower_module, y), batch)

        return cls(
            upper=bind(upper),
            lower=bind(lower),
            x0={name: p.detach().clone() for name, p in upper_module.named_parameters() if p.requires_grad},
            y0={name: p.detach().clone() for name, p in lower_module.named_parameters() if p.requires_grad},
            features=None if features is None else (lambda x, batch: features(BoundModule(upper_module, x), batch)),
            statistics={role: bind(function) for role, function in statistics.items()},
            **options,
        )


class BoundModule:
    """A module called with parameters from outside."""

    def __init__(self, module: nn.Module, parameters: Tree) -> None:
        self._module, self.parameters = module, parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        like = next(iter(self.parameters.values()))
        fixed = {
            name: value
            for name, value in (*self._module.named_parameters(), *self._module.named_buffers())
            if name not in self.parameters
        }
        cast = {
            name: value.detach().to(like.device, like.dtype if value.is_floating_point() else None)
            for name, value in fixed.items()
        }
        return torch.func.functional_call(self._module, {**cast, **self.parameters}, args, kwargs)


_WHY = {
    "dropout": "its random mask differs between the two evaluations that variance reduction and second derivatives must share; "
    "remove it or put the module in eval mode",
    "batch norm": "its output for one sample depends on the other samples of the batch, so a client's gradient is not a mean over its samples "
    "and statistics of one client leak into the shared model; use GroupNorm or LayerNorm, or put a module that tracks running statistics in eval mode",
}


def _refuse(what: str, where: str) -> None:
    raise ProblemError(
        f"{where} uses {what} in training mode, which has no place inside a bilevel derivative: {_WHY[what]}."
    )


def _refuse_layer(layer: nn.Module, where: str) -> None:
    if layer.training and isinstance(layer, nn.modules.batchnorm._BatchNorm):
        _refuse("batch norm", where)
    if layer.training and isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
        _refuse("dropout", where)


class _RefuseNoise(TorchFunctionMode):
    """Finds dropout and batch norm inside a plain function, where no module can be inspected."""

    DROPOUT = (
        functional.dropout,
        functional.dropout1d,
        functional.dropout2d,
        functional.dropout3d,
        functional.alpha_dropout,
        functional.feature_alpha_dropout,
        torch.dropout,
    )

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func in self.DROPOUT
            and (kwargs.get("training", args[2] if len(args) > 2 else True))
            and (kwargs.get("p", args[1] if len(args) > 1 else 0.5)) > 0
        ):
            _refuse("dropout", self.where)
        if func is functional.batch_norm and kwargs.get("training", args[5] if len(args) > 5 else False):
            _refuse("batch norm", self.where)
        return func(*args, **kwargs)


def check_kind(problem: Any) -> None:
    """That it is a problem at all."""
    if not isinstance(problem, Problem):
        raise ProblemError(
            f"problem is of type {type(problem).__name__}, expected a Problem, e.g. Problem(upper=..., lower=..., x0=..., y0=...)."
        )


@torch.enable_grad()
def check_losses(
    problem: Problem, data: ClientData, layout_x: Layout, layout_y: Layout, x: Tensor, y: Tensor
) -> set[str]:
    """Evaluate both losses on a few samples of the first client, and say what is wrong with them.

    Returns which of the two (`upper`, `lower`) give one value per sample instead of a scalar.
    """
    per_sample = set()
    for label, loss, role in (("lower", problem.lower, "train"), ("upper", problem.upper, "val")):
        few = torch.arange(min(4, int(data.sizes[role][0])), device=x.device)
        fields = data.batch(data.positions[:1], role, few[None]).row(0)
        filler = data.batch(data.positions[-1:], role, torch.zeros(1, 2, dtype=torch.int64, device=x.device)).row(
            0
        )  # padding may hold anything
        padded = {name: torch.cat([value, filler[name]]) for name, value in fields.items()}
        padded["index"], padded["weight"] = (
            torch.cat([few, few[:1], few[:1]]),
            torch.cat([fields["weight"], torch.zeros_like(filler["weight"])]),
        )
        xs, ys = x.clone().requires_grad_(), y.clone().requires_grad_()
        tree_x, tree_y = layout_x.unravel(xs), layout_y.unravel(ys)
        with _RefuseNoise(f"{label}()"):
            value, _ = _evaluate(
                problem, loss, tree_x, tree_y, fields, f"{label}() failed on a batch of the first client"
            )
        again, _ = _evaluate(problem, loss, tree_x, tree_y, fields, f"{label}() failed on a batch of the first client")
        if not torch.equal(value, again):
            raise ProblemError(
                f"{label}() gave {value:.6g} and then {again:.6g} for the same input: a loss must not draw random numbers; move them into the data."
            )
        # away from the start, where symmetry may hide what padding does (at y = 0 every sample may have the same loss)
        point: tuple[Tree, Tree] = (layout_x.unravel(away(xs)), layout_y.unravel(away(ys)))
        try:
            plain, _ = _evaluate(problem, loss, *point, fields, f"{label}() failed away from the initial point")
        except ProblemError:  # the loss is not defined there
            point, plain = (tree_x, tree_y), value
        other, has_samples = _evaluate(
            problem,
            loss,
            *point,
            padded,
            f"{label}() failed on a batch of the first client padded with samples of the last",
        )
        if has_samples:
            per_sample.add(label)
            _check_per_sample(label, plain, other, (xs, ys))
            twice = {name: torch.cat([value, value]) for name, value in fields.items()}
            twice["weight"] = twice["weight"] / 2
            doubled, _ = _evaluate(
                problem, loss, *point, twice, f"{label}() failed on a batch that holds every sample twice"
            )
            if not _near(plain, doubled):
                raise ProblemError(
                    f"{label}() returns one value per sample, and their mean was {plain:.6g} on a batch and {doubled:.6g} on a batch with "
                    "every sample twice: return the loss of each sample by itself, without batch['weight'], which the library multiplies with."
                )
        elif not _near(plain, other):
            raise ProblemError(
                f"{label}() gave {plain:.6g} on a batch and {other:.6g} on the same batch with two padded samples of weight 0: "
                "write (batch['weight'] * loss_per_sample).sum() instead of a mean over samples."
            )
        if label == "lower":
            used = (
                torch.autograd.grad(value, list(tree_y.values()), allow_unused=True)
                if value.requires_grad
                else [None] * len(tree_y)
            )
            unused = [name for name, gradient in zip(tree_y, used, strict=True) if gradient is None]
            if unused:
                raise ProblemError(
                    f"lower() does not depend on y[{unused[0]!r}], so y*(x) is not determined: use it in the lower loss or leave it out of y0."
                )
    return per_sample


def _near(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def _check_per_sample(label: str, plain: Tensor, padded: Tensor, at: tuple[Tensor, Tensor]) -> None:
    """Padding changes neither the mean of the losses of real samples nor its gradient."""
    if not _near(plain, padded):
        raise ProblemError(
            f"{label}() returns one value per sample, and the mean over real samples was {plain:.6g} on a batch and {padded:.6g} on the "
            "same batch with two padded samples: the loss of a sample may depend on other samples only through sums with batch['weight']."
        )
    if not padded.requires_grad:
        return
    finite = [
        all(
            bool(torch.isfinite(part).all())
            for part in torch.autograd.grad(value, at, allow_unused=True, retain_graph=True)
            if part is not None
        )
        for value in (plain, padded)
    ]
    if finite == [True, False]:
        raise ProblemError(
            f"{label}() has a gradient that is not finite on padded samples, whose batch['weight'] is 0: "
            "return the loss of each sample by itself, and divide by no weight."
        )


_ENOUGH = (
    32  # samples on which statistics are tried: of so many some answer is right, and a count of right answers is not 0
)


@torch.no_grad()
def check_statistics(
    problem: Problem, data: ClientData, layout_x: Layout, layout_y: Layout, own_x: Callable[[int], Tensor], y: Tensor
) -> None:
    """Evaluate the statistics of every role on some samples of the first client that has any, with and without padding."""
    for role, statistics in problem.statistics.items():
        if role not in data.sizes:
            raise ProblemError(
                f"there are statistics for the role {role!r}, expected one that the clients have: {', '.join(data.sizes)}."
            )
        if not int(data.sizes[role].max()):
            continue
        first = int((data.sizes[role] > 0).nonzero()[0])
        some = torch.arange(min(_ENOUGH, int(data.sizes[role][first])), device=y.device)
        fields = data.batch(data.positions[first : first + 1], role, some[None]).row(0)
        padded = {name: torch.cat([value, value]) for name, value in fields.items()}
        padded["weight"] = torch.cat([fields["weight"], torch.zeros_like(fields["weight"])])
        x = own_x(first)
        for start_x, start_y in ((x, y), (away(x), away(y))):  # at the start a symmetry may hide what padding does
            point = layout_x.unravel(start_x), layout_y.unravel(start_y)
            try:
                plain = _count(problem, role, statistics, *point, fields)
            except ProblemError:
                if start_x is x:
                    raise
                continue  # they are not defined away from the start
            other = _count(problem, role, statistics, *point, padded)
            for name in plain:
                if name in other and not torch.allclose(
                    plain[name].double(), other[name].double(), rtol=1e-4, atol=1e-6, equal_nan=True
                ):
                    raise ProblemError(
                        f"the statistics of {role!r} gave {name!r} = {plain[name]:.6g} on a batch and {other[name]:.6g} on the same "
                        "batch with padded samples of weight 0: return one value per sample, which the library sums over real samples, "
                        "or count only where batch['weight'] > 0."
                    )


def _count(problem: Problem, role: str, statistics: Statistics, x: Tree, y: Tree, fields: Fields) -> dict[str, Tensor]:
    """Statistics of one batch, summed over its real samples."""
    try:
        found = statistics(x, y, with_features(problem, x, fields))
    except Exception as error:  # the user's function may raise anything; name it, keep the cause
        shapes = {name: tuple(value.shape) for name, value in fields.items()}
        raise ProblemError(
            f"the statistics of {role!r} failed on a batch of shapes {shapes}: {reason(error)}."
        ) from error
    if not isinstance(found, Mapping):
        raise ProblemError(
            f"the statistics of {role!r} returned {type(found).__name__}, expected a dict of tensors: one value per sample each, or a scalar."
        )
    shape = tuple(fields["weight"].shape)
    for name, value in found.items():
        if not isinstance(value, Tensor) or tuple(value.shape) not in ((), shape):
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ProblemError(
                f"the statistics of {role!r} returned {name!r} as {got} on {shape[0]} samples, expected a tensor with one value per sample, "
                f"shape {shape}, or a scalar: sum over everything but the samples."
            )
    return counted(found, fields["weight"])


_TAKEN = {
    *BESIDE,
    *COLUMNS,
    *DIAGNOSTICS,
    "upper_loss",
    "lower_loss",
    "num_sites",
}  # columns that every measurement may have


def own_figures(label: str, function: Callable[..., Any], *given: Any) -> dict[str, float]:
    """What the user's own function makes of a measurement."""
    try:
        found = function(*given)
    except Exception as error:  # the user's function may raise anything; name it, keep the cause
        raise ProblemError(f"{label}() failed: {reason(error)}.") from error
    if not isinstance(found, Mapping) or not all(isinstance(value, int | float) for value in found.values()):
        raise ProblemError(f"{label}() returned {found!r:.80}, expected a dict of numbers: use float(...) for tensors.")
    if twice := _TAKEN & set(found):
        raise ProblemError(
            f"{label}() gives a figure named {min(twice)!r}, which is the name of a column that every run has: choose another name."
        )
    return dict(found)


def away(vector: Tensor) -> Tensor:
    """A fixed point near `vector` without its symmetries."""
    return vector + 0.1 * torch.arange(1, vector.shape[-1] + 1, dtype=vector.dtype, device=vector.device).cos()


def _evaluate(problem: Problem, loss: Loss, x: Tree, y: Tree, fields: Fields, failed: str) -> tuple[Tensor, bool]:
    """The loss of a batch as a scalar, and whether the function returned one value per sample."""
    label = failed.split(" ", 1)[0]
    try:
        value = loss(x, y, with_features(problem, x, fields))
    except ProblemError:
        raise
    except Exception as error:  # the user's function may raise anything; name it, keep the cause
        shapes = {name: tuple(value.shape) for name, value in fields.items()}
        raise ProblemError(f"{failed} of shapes {shapes}: {reason(error)}.") from error
    shape = tuple(fields["weight"].shape)
    if not isinstance(value, Tensor) or tuple(value.shape) not in ((), shape) or not value.is_floating_point():
        got = (
            f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
            if isinstance(value, Tensor)
            else type(value).__name__
        )
        raise ProblemError(
            f"{label} returned {got} on {shape[0]} samples, expected a tensor of floats with one value per sample, shape {shape}, "
            "or a scalar: return the loss of each sample, e.g. with reduction='none'."
        )
    mean = contracted(value, fields["weight"])
    if not torch.isfinite(mean):
        raise ProblemError(
            f"{label} is {mean:.6g} at the initial point on the first client: check the data and the initial values."
        )
    return mean, value.ndim > 0


def with_features(problem: Problem, x: Any, fields: Fields) -> Fields:
    """The one place where features enter a batch."""
    if problem.features is None or "features" in fields:
        return fields
    return {**fields, "features": problem.features(x, fields)}
