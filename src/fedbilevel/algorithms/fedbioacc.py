"""FedBiOAcc: FedBiO with variance-reduced (STORM) directions for x, y and u; two rounds.

Use it when clients differ and minibatches are noisy. It works for all scopes. It costs twice the
rounds, floats and derivatives of FedBiO: two rounds and 2 d_x + 4 d_y floats per outer iteration.

Every client has its own point (x_i, y_i, u_i) and estimates (nu_i, om_i, q_i). For t = 1, 2, ...,
counted in local steps, and with a = delta / (u0 + t)^(1/3):

    x_i+ = x_i - eta a nu_i;   y_i+ = y_i - gamma a om_i;   u_i+ = P_r(u_i - tau a q_i)
    R1, every I steps:   x+, y+, u+ <- means
    nu_i+ = d_x(new) + (1 - c_nu a^2) (nu_i - d_x(old)),        d_x = f_x,i - J_i u
    om_i+ = d_y(new) + (1 - c_om a^2) (om_i - d_y(old)),        d_y = g_y,i
    q_i+ = d_u(new) + (1 - c_u a^2) (q_i - d_u(old)),           d_u = H_i u - f_y,i
    R2, every I steps:   nu, om, q <- means

The new point is (x+, y+, u+), averaged if there was a round. The old point is the client's own
(x_i, y_i, u_i) before the step, never averaged. Both use the same minibatches. Then the means of
nu, om, q follow the means of the directions, however much the clients drift.

Reference: Li, Huang, Huang, "Communication-Efficient Federated Bilevel Optimization with Global and
Local Lower Level Problems", NeurIPS 2023, Algorithm 1 and eqs. (7), (8).

Deviations: (1) The initial estimates are averaged like all later ones; the paper leaves them at the
clients until the first R2. (2) The paper gives no value for c_u and r: c_u equals the other two,
and r is off. (3) Clients with fewer local steps wait: t counts the steps of the longest. (4) With a
private x, d_x is without the factor 1/m of the stacked problem, and x and nu stay at their client;
with a local lower level y, u, om, q stay. (5) A client that missed R1 uses the averaged point as
its old point, or skips R2 if it keeps a part of the point. (6) `minibatches="shared"` uses two
minibatches per step instead of the paper's five.

Bias: with I > 2 the clients drift; with whole batches the distance to the solution is proportional
to c a^3 (FedBiO: to its step). Estimates that stay at a client are from the last time that it took
part (zero if it never did); their error decays by the factor 1 - c a^2 per step.

Cost per outer iteration: 2 rounds; 2 d_x + 4 d_y floats each way; per client 2 I of each of g_y,
f_x, f_y, H u, J u. Once, before the first: 1 round; d_x + 2 d_y floats each way; per client one of
each, on a batch of I times the size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fedbilevel.algorithms.fedbio import step_directions
from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, Variable, phase
from fedbilevel.federation.clients import Clients, Step
from fedbilevel.federation.probing import Found
from fedbilevel.oracle.hypergradient import project
from fedbilevel.settings import StepSize, setting, step_size

Point = tuple[Tensor, ...]  # rows of x and y, and of u where there is one; likewise of nu, om, q


def check_momenta(self: Any) -> None:
    for name in ("momentum_upper", "momentum_lower", "momentum_system"):
        weight = getattr(self, name) * step_factor(self, 1) ** 2
        if weight >= 1:
            raise SettingError(
                f"{type(self).__name__}: {name} * a^2 is {weight:.3g} in the first step, expected less than "
                f"1: lower {name} or delta, or raise offset."
            )


def longest(self: Any) -> int:
    return max(self.num_local_steps) if isinstance(self.num_local_steps, tuple) else self.num_local_steps


def step_factor(self: Any, t: int) -> float:
    return self.delta / (self.offset + t) ** (1 / 3)


def accelerated_steps(self: Any, found: Found) -> dict[str, float]:
    """Return plain steps divided by the factor a of the first step."""
    a, lower = step_factor(self, 1), found.between(self.num_local_steps)
    return {
        "lr_upper": found.upper / (a * longest(self)),
        "lr_lower": lower / a,
        "lr_system": found.lower if getattr(self, "u", "local") == "neumann" else lower / a,
    }


def named(names: tuple[str, str, str], rows: Point) -> dict[str, Tensor | None]:
    return dict(zip(names, (*rows, None), strict=False))


def joined(clients: Clients, *vectors: Tensor | None) -> Point:
    return clients.rows(*(vector for vector in vectors if vector is not None))


def advance(self: Any, t: int, point: Point, est: Point) -> Point:
    a, rates = step_factor(self, t), (self.lr_upper, self.lr_lower, self.lr_system)
    x, y, *u = (rows - rate * a * e for rows, rate, e in zip(point, rates, est, strict=False))
    return x, y, *(project(rows, self.radius) for rows in u)


def storm(self: Any, clients: Clients, step: Step, t: int, new: Point, old: Point, est: Point) -> Point:
    """Return the estimates at the new point, computed from the estimates at the old point.

    The directions at both points use the same minibatches.
    """
    a, momenta = step_factor(self, t), (self.momentum_upper, self.momentum_lower, self.momentum_system)
    there, here = self.directions(clients, step, *new), self.directions(clients, step, *old)
    return tuple(d + (1 - c * a**2) * (e - b) for d, c, e, b in zip(there, momenta, est, here, strict=False))


@phase
def initial_momenta(self: Any, clients: Clients, x: Tensor, y: Tensor, u: Tensor | None) -> dict[str, Tensor | None]:
    point = est = joined(clients, x, y, u)
    for step in clients.steps(1):  # none in a process that hosts no client of the cohort
        est = self.directions(clients, step, *point, times=longest(self))
    return named(("nu", "om", "q"), est)


@phase
def local_steps(
    self: Any, clients: Clients, x: Tensor, y: Tensor, u: Tensor | None, nu: Tensor, om: Tensor, q: Tensor | None
) -> dict[str, Tensor | None]:
    """Take local steps, with a STORM update between consecutive steps.

    The STORM update of the last step needs the averaged point, so `momenta` does it later.
    """
    old = point = joined(clients, x, y, u)
    est = joined(clients, nu, om, q)
    for step in clients.steps(self.num_local_steps):
        t = (clients.iteration - 1) * longest(self) + step.index + 1
        if step.index > 0:
            est = step.where(storm(self, clients, step, t - 1, point, old, est), est)
        old, point = step.where((point, advance(self, t, point, est)), (old, point))
    clients.scratch.write(old=old, est=est)
    return named(("x", "y", "u"), point)


@phase
def momenta(
    self: Any, clients: Clients, x: Tensor, y: Tensor, u: Tensor | None, nu: Tensor, om: Tensor, q: Tensor | None
) -> dict[str, Tensor | None]:
    """Do the STORM update of the last local step.

    The new point is the averaged point. The old point is the client's point before the last step.
    """
    new = joined(clients, x, y, u)
    old = clients.scratch.read("old", default=new)
    est = clients.scratch.read("est", default=joined(clients, nu, om, q))
    for step in clients.steps(1):
        est = storm(self, clients, step, clients.iteration * longest(self), new, old, est)
    return named(("nu", "om", "q"), est)


@dataclass(frozen=True, kw_only=True)
class FedBiOAcc(ServerAlgorithm):
    lr_upper: StepSize = step_size(0.01, "step of x, times a", symbol="eta")
    lr_lower: StepSize = step_size(0.1, "step of y, times a", symbol="gamma")
    lr_system: StepSize = step_size(0.1, "step of u, times a", symbol="tau")
    num_local_steps: int | tuple[int, ...] = setting(5, "local steps between rounds", symbol="I", least=1)
    delta: float = setting(30.0, "a = delta / (offset + t)^(1/3) scales every step", symbol="delta", above=0)
    offset: float = setting(1e4, "how late a begins to fall", symbol="u0", least=0)
    momentum_upper: float = setting(0.2, "weight of the newest direction of x, times a^2", symbol="c_nu", above=0)
    momentum_lower: float = setting(0.2, "weight of the newest direction of y, times a^2", symbol="c_om", above=0)
    momentum_system: float = setting(0.2, "weight of the newest direction of u, times a^2", symbol="c_u", above=0)
    radius: float | None = setting(
        None, "u is projected on the ball of this radius; at least max|f_y| / mu", symbol="r", above=0
    )
    minibatches: Literal["independent", "shared"] = setting(
        "independent", "five minibatches per local step as in the paper, or two"
    )

    upper_space = ("x", "nu")
    lower_space = ("y", "u", "om", "q")

    class State(NamedTuple):
        x: Variable
        y: Variable
        u: Variable
        nu: Variable
        om: Variable
        q: Variable

    def __post_init__(self) -> None:
        super().__post_init__()
        check_momenta(self)

    auto_steps = accelerated_steps

    def init(self, fed: Federation) -> State:
        (x, y), u = fed.initial(), fed.zeros("u")
        first = fed.mean(self.initial_momenta, x=x, y=y, u=u)
        return self.State(x, y, u, first.nu, first.om, first.q)

    def round(self, fed: Federation, state: State) -> State:
        new = fed.mean(self.local_steps, **state._asdict())
        est = fed.mean(self.momenta, **{**state._asdict(), **vars(new)})
        return self.State(new.x, new.y, new.u, est.nu, est.om, est.q)

    initial_momenta, local_steps, momenta = initial_momenta, local_steps, momenta

    def directions(self, clients: Clients, step: Step, x: Tensor, y: Tensor, u: Tensor, *, times: int = 1) -> Point:
        return step_directions(clients, step, x, y, u, self.minibatches, times=times)
