"""Vocabulary of an algorithm: phases at clients, verbs that reach clients, and kept values.

A server algorithm is a frozen dataclass with an immutable State and two methods: `init(fed)` and
`round(fed, state)`. It communicates with clients only through `fed.mean(self.some_phase,
**values)`: broadcast the values, run the phase on the cohort, and average the results by name. This
module does not depend on how or where the clients run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from torch import Tensor

from fedbilevel.errors import ScopeError, ScopeWarning, SettingError
from fedbilevel.federation.ledger import Ledger
from fedbilevel.federation.phases import linear_phase as linear_phase
from fedbilevel.federation.phases import phase as phase
from fedbilevel.federation.probing import LOWER, UPPER, Found, Probing
from fedbilevel.problem.problem import Problem, Scopes
from fedbilevel.settings import AUTO, Settings

LEVELS = {"global": "lower level", "local": "lower level", "shared": "upper variable", "private": "upper variable"}


class Kept:
    """Placeholder for one row per client that never left its client.

    It can only be broadcast back to the clients.
    """

    def __init__(self, name: str, version: int, iteration: int = -1) -> None:
        self.name, self.version, self.iteration = name, version, iteration  # the outer iteration that made it

    def __repr__(self) -> str:
        return f"Kept({self.name!r})"

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(
            f"{self.name!r} is kept at the clients (its scope is private or local), so the server cannot "
            "compute with it: do that inside a phase."
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __neg__ = __abs__ = __getitem__ = __len__ = __iter__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __float__ = __int__ = __pos__ = _refuse
    __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = _refuse


class Sparse(NamedTuple):
    """Rows with only `num_kept` non-zero entries each.

    A message holds those values and their indices (four bytes each).
    """

    rows: Tensor
    num_kept: int


Variable = Tensor | Kept  # a vector at the server, or rows that stay at the clients: the scope of the problem decides
Value = Variable | int | float | str | None  # numbers and words travel in the header; None is not sent


class Cohort(NamedTuple):
    """Share of the clients that take part in a round, and the way they are drawn.

    Clients are drawn in proportion to their weight in a mean, so that the expectation of a cohort's
    mean is the weighted mean over all clients. With equal weights the draw is uniform.
    `redraw="per_factor"` draws a new cohort at every `fed.resample()` of an algorithm.
    `redraw="per_iteration"` keeps one cohort for the whole outer iteration, which is cheaper but
    biases products of client Hessians (see the pages of algorithms that multiply them).

    >>> import fedbilevel as fb
    >>> from fedbilevel.tasks.quadratic import Quadratic
    >>> cohorts = (fb.Cohort(1.0), fb.Cohort(0.4))
    >>> runs = [fb.solve(*Quadratic().build(), "fedbio", num_rounds=2, cohort=c) for c in cohorts]
    >>> runs[0].ledger["floats_up"], runs[1].ledger["floats_up"]
    (160, 64)
    """

    fraction: float = 1.0
    replacement: bool = False
    redraw: str = "per_factor"

    def size(self, num_clients: int) -> int:
        return max(1, round(self.fraction * num_clients))

    def checked(self) -> Cohort:
        if not isinstance(self.fraction, int | float) or not 0 < self.fraction <= 1:
            raise SettingError(f"the cohort's fraction is {self.fraction!r}, expected a value above 0 and at most 1.")
        if self.redraw not in ("per_factor", "per_iteration"):
            raise SettingError(f"the cohort's redraw is {self.redraw!r}, expected 'per_factor' or 'per_iteration'.")
        return self


class Federation(Protocol):
    """Verbs of a server algorithm."""

    num_clients: int
    iteration: int
    num_answers: int  # clients that answered the last call
    ledger: Ledger
    weights: Tensor  # (n,) how much each client counts in a mean over all clients, by client number
    problem: Problem  # for the shapes of its variables

    def initial(self) -> tuple[Any, Any]:
        """Return the initial x and y, each placed by its scope, without a round."""

    def start(self, name: str) -> Any:
        """Return the initial point of the space of `name` as a separate sequence, without a round."""

    def zeros(self, name: str) -> Any:
        """Return a zero vector of the space that the algorithm declares `name` in, without a round."""

    def mean(self, phase: Callable[..., Any], /, **broadcast: Value) -> SimpleNamespace:
        """Broadcast, run the phase on the cohort and average each result by name.

        This is one round, or none if no result is sent up.
        """

    def gather(self, phase: Callable[..., Any], /, **broadcast: Value) -> SimpleNamespace:
        """Return every client's own answer, as rows in the order of client numbers, in one round.

        This verb is for methods that compare clients with each other; prefer `mean` if a sum is
        enough. A matrix in `broadcast` sends each client its own row.
        """

    def resample(self) -> None:
        """Allow a new cohort to be drawn, because the next factor does not depend on the last one."""

    def draw(self, purpose: str, high: int) -> int:
        """Draw an integer in [0, high) from the server's own stream."""


class Algorithm(Settings):
    """Common part of server and peer algorithms.

    upper_space, lower_space: names of the sequences in the spaces of x and y; the engine keeps them
        at the client if the problem declares the space private or local.
    decays: names of the step sizes that a schedule scales.
    warns: by scope, the reason why the method is biased for such a problem.
    refuses: by scope, the reason why the method is meaningless for such a problem.
    needs_everyone: whether every client must answer every call, so that cohorts are refused.
    learns_x: whether the method changes x, so that x must have an effect on the upper loss.
    one_level: whether x and y descend the lower loss together, so that the upper loss is not used.
    minimises: whether the losses of a problem should fall during a run, so that a run whose losses
        rise is judged as failed.
    lengths: by name, lengths of declared sequences that differ from the length of their space.
    statistics: names of vectors that the server makes from sums and sends back, which are in neither
        space and have any length; clients accept no other array.
    exact: names of rows that are measurements, so that they are neither clipped nor compressed.
    gathers: whether the method reads single rows by `gather`.
    reads_samples: whether phases use samples or losses beside derivatives.
    uses_products: whether phases use products with second derivatives, so that they are tried
        before a run.
    """

    upper_space: ClassVar[tuple[str, ...]] = ("x",)
    lower_space: ClassVar[tuple[str, ...]] = ("y",)
    decays: ClassVar[tuple[str, ...]] = ("lr_upper", "lr_lower", "lr_system")
    warns: ClassVar[Mapping[str, str]] = {}
    refuses: ClassVar[Mapping[str, str]] = {}
    needs_everyone: ClassVar[bool] = False
    learns_x: ClassVar[bool] = True
    one_level: ClassVar[bool] = False
    minimises: ClassVar[bool] = True
    lengths: ClassVar[Mapping[str, int]] = {}
    statistics: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[tuple[str, ...]] = ()
    gathers: ClassVar[bool] = False
    reads_samples: ClassVar[bool] = False
    uses_products: ClassVar[bool] = True

    @classmethod
    def name(cls) -> str:
        return cls.__module__.rsplit(".", 1)[-1]

    def scaled(self, factor: float) -> Self:
        """Return the algorithm with scaled step sizes."""
        names = [name for name in self.decays if hasattr(self, name)]
        return (
            self if factor == 1 else dataclasses.replace(self, **{name: factor * getattr(self, name) for name in names})
        )

    def held_share(self) -> float:
        """Return the share of the validation samples that phases see in the role `held`."""
        return 0.0

    def row_lengths(self, y0: Mapping[str, Tensor]) -> dict[str, int]:
        """Return lengths of rows in neither space that clients send, by name."""
        return {}

    def auto_names(self) -> list[str]:
        """Return the names of the step sizes that are to be measured."""
        steps = [spec.name for spec in dataclasses.fields(self) if spec.metadata.get("step")]
        return [name for name in steps if getattr(self, name) == AUTO]

    def auto_steps(self, found: Found) -> dict[str, float]:
        """Return a value for every step size, from figures of the problem at its start.

        Here, y and u take plain steps, and x takes one plain step in every local step. An algorithm
        overrides this method if its settings have another meaning.
        """
        num = getattr(self, "num_local_steps", 1)
        return {
            "lr_upper": found.upper / most_steps(num),
            "lr_lower": found.between(num),
            "lr_system": found.between(num),
        }

    def space(self, name: str) -> str | None:
        """Return the space of a sequence, "upper" or "lower", or None if it is not declared."""
        if name in self.upper_space or name in UPPER:
            return "upper"
        return "lower" if name in self.lower_space or name in LOWER else None

    def scope_warnings(self, scopes: Scopes) -> Mapping[str, str]:
        """Return warnings by scope; an algorithm overrides this if a setting changes them."""
        return self.warns

    def _repr_html_(self) -> str:
        from fedbilevel import displays  # notebooks only

        return displays.algorithm(self, self.scope_warnings(Scopes()))

    def check_scopes(self, scopes: Scopes) -> list[Warning]:
        for scope in scopes:
            if scope in self.refuses:
                raise ScopeError(
                    f"{self.name()} cannot solve a problem with a {scope} {LEVELS[scope]}: {self.refuses[scope]}."
                )
        found = {scope: text for scope, text in self.scope_warnings(scopes).items() if scope in scopes}
        return [
            ScopeWarning(f"{self.name()} on a problem with a {scope} {LEVELS[scope]}: {text}.")
            for scope, text in found.items()
        ]

    def kept_names(self, scopes: Scopes) -> set[str]:
        return {
            *(self.upper_space if scopes.upper == "private" else ()),
            *(self.lower_space if scopes.lower == "local" else ()),
        }

    State: ClassVar[type[Any]]

    def init(self, engine: Any) -> Any:
        raise NotImplementedError

    def round(self, engine: Any, state: Any) -> Any:
        raise NotImplementedError


class ServerAlgorithm(Probing, Algorithm):
    def init(self, fed: Federation) -> Any:
        """Return the state before the first outer iteration."""
        raise NotImplementedError

    def round(self, fed: Federation, state: Any) -> Any:
        """Run one outer iteration and return the new state."""
        raise NotImplementedError


class Peers(Protocol):
    """Verbs of a peer algorithm, which runs at every peer at once.

    A value is a matrix with one row per peer hosted in this process. Rows are given by name,
    because the scopes decide by name which rows are sent: a private upper variable or a local lower
    variable is returned unchanged.
    """

    num_clients: int
    iteration: int
    ledger: Ledger
    clients: Any  # `clients.Clients`: derivatives of every hosted peer
    weights: Tensor  # (k, 1) float64: how much each peer counts in a mean; their mean is one
    scopes: Scopes

    def travels(self, name: str) -> bool:
        """Return whether rows of that name may leave their peer."""

    def initial(self) -> tuple[Tensor, Tensor]:
        """Return the initial x and y, each with one row per peer."""

    def zeros(self, name: str) -> Tensor:
        """Return zero rows of the space that the algorithm declares `name` in."""

    def steps(self, num: int) -> list[Any]:
        """Return `num` steps, each with its own minibatches."""

    def push(self, weights: Tensor, /, **rows: Tensor) -> tuple[Tensor, ...]:
        """Take one step of Push-Sum, and return weights, then rows.

        Every peer divides its rows and its weight among its receivers of this step.
        """

    def running_push(self, weights: Tensor, /, **rows: Tensor) -> tuple[Tensor, ...]:
        """Take one step of Push-Sum through running sums, which survives lost and late messages."""

    def gossip(self, **rows: Tensor) -> Any:
        """Take one doubly stochastic step, which needs an undirected network.

        Return a tensor, or a tuple for several names.
        """

    def mix(self, **rows: Tensor) -> Any:
        """Average with the engine's operator, weighted by `weights`.

        Return a tensor, or a tuple for several names.
        """


class PeerAlgorithm(Algorithm):
    """Algorithm between peers, whose `init` and `round` operate on rows.

    `uses` names the verbs, so that an engine can check its network first.
    """

    uses: ClassVar[tuple[str, ...]] = ("push",)

    def auto_steps(self, found: Found) -> dict[str, float]:
        return {"lr_upper": found.upper, "lr_lower": found.lower, "lr_system": found.lower}

    def verbs(self) -> tuple[str, ...]:
        """Return the verbs that this algorithm uses; override this if a setting determines them."""
        return self.uses

    def init(self, peers: Peers) -> Any:
        raise NotImplementedError

    def round(self, peers: Peers, state: Any) -> Any:
        raise NotImplementedError

    def regrouped(self, peers: Peers, state: Any) -> Any:
        """Return the state with which another group of peers resumes.

        It is a new state at the peers' present points, because weights and corrections that lost
        peers held are void.
        """
        return self.init(_At(peers, state.x, state.y))


class _At:
    """Peers whose initial point is their present point."""

    def __init__(self, peers: Peers, x: Tensor, y: Tensor) -> None:
        self._peers, self._point = peers, (x, y)

    def initial(self) -> tuple[Tensor, Tensor]:
        return self._point

    def __getattr__(self, name: str) -> Any:
        return getattr(self._peers, name)


def most_steps(num: int | tuple[int, ...]) -> int:
    """Return the largest number of local steps of a client."""
    return max(num) if isinstance(num, tuple) else num


def debiased(rows: Tensor, weights: Tensor) -> Tensor:
    """Divide Push-Sum rows by their weights, which are kept in float64."""
    return rows / weights.to(rows.dtype)
