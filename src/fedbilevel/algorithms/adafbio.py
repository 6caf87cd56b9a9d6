"""AdaFBiO: variance-reduced local steps on x and y with adaptive step sizes.

Use it when every client has its own lower level, gradients are noisy, and the entries of x need
steps of very different sizes. For one model across clients that differ, set
`hypergradient="shared-u"`: the default estimator is biased there. It costs one round per outer
iteration, with messages of 2 d_x + 2 d_y floats, and two estimates per local step.

w_i and v_i are STORM estimators of the hypergradient and of g_y. The server's averages set the step
sizes: at a sync, x, y, w, v <- means and

    a <- r a + (1 - r) w^2,    A = diag(sqrt(a) + rho)                                   (line 6)
    b <- r b + (1 - r) |v|,    B = (b + rho) I                                           (line 6)

where the square and the root are elementwise. `adabelief` takes w and v minus their values at the
sync before (eq. 6-7), and `none` takes A = B = I. Then follow q steps t, the first from the means:

    eta_t = k_0 (m / (n + t))^(1/3),    alpha = c_1 eta_t^2,    beta = c_2 eta_t^2
    x_i+ = x_i - gamma eta_t A^-1 w_i,    y_i+ = y_i - lambda eta_t B^-1 v_i             (12)
    v_i <- g_y,i(x_i+, y_i+; zeta) + (1 - alpha) [v_i - g_y,i(x_old, y_old; zeta)]       (8)
    w_i <- h_i(x_i+, y_i+; xi, k) + (1 - beta) [w_i - h_i(x_old, y_old; xi, k)]          (9)
    h_i = f_x,i - J_i(zeta_0) K theta prod_{j=1..k} (I - theta H_i(zeta_j)) f_y,i        (13)

with k uniform in {0..K-1}.

`hypergradient="local-neumann-sum"` (this project's own) replaces (13) by its mean over k, for twice
the products. `hypergradient="shared-u"` (this project's own, AdaFBiO-G) takes h_i = f_x,i - J_i u_i
with the averaged u of FedBiO: u_i+ = u_i - theta eta_t s_i, where s_i is a STORM estimator of
H_i u_i - f_y,i with weight alpha.

Reference: Huang, "Fast Adaptive Federated Bilevel Optimization", 2022, Algorithm 1 and
eq. (6)-(13).

Deviations: (1) The loop is rotated: clients take the step of the sync themselves, from the
averages, so a sync is one message up and one down. The first step follows a round for the means of
the initial w and v. (2) Line 5 averages v and w, and lines 18-19 continue with the local values.
Here v_i, w_i <- means, while the old point of the first step is the client's own, before averaging,
so that mean w and mean v track exactly. A client that never took part uses the averages. (3) k and
the samples are shared by both evaluations of (9). (4) theta is a setting instead of 1/L. (5) Values
that a scope keeps at the client (private: x and w with their moments; local: y, v, u and s) are
neither averaged nor sent, and the factor 1/m of a private x is dropped.

Bias: (13) inverts each client's own Hessian. So with a global lower level and heterogeneous clients
the method converges to the point where the mean of local hypergradients vanishes. "shared-u" does
not have this bias. With q > 1 clients also drift by about beta times their heterogeneity.
Estimates that stay at a client are zero until it first takes part; this error decays by the factor
1 - alpha or 1 - beta per step.

Cost per outer iteration: 1 round. Floats up: 2 d_x + 2 d_y (shared-u: 2 d_y more). Floats down:
3 d_x + 2 d_y + 1 (shared-u: 2 d_y more; `adaptive="none"`: d_x + 1 less). Per client and step:
2 of each of g_y, f_x, f_y, J v and 2k of H v (sum: 2K - 2; shared-u: 2). Before the first outer
iteration: 1 round, d_x + d_y floats up (shared-u: d_y more), q estimates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms import _local_neumann
from fedbilevel.algorithms.fedbio import step_directions
from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, Variable, phase
from fedbilevel.federation.clients import Clients, Step
from fedbilevel.federation.probing import ADAPTIVE, Found
from fedbilevel.problem.problem import Scopes
from fedbilevel.settings import StepSize, setting, step_size


class Point(NamedTuple):
    """Rows of x, y and u; u is None if the algorithm has no shared u."""

    x: Tensor
    y: Tensor
    u: Tensor | None


class Estimates(NamedTuple):
    """Rows of the directions of x, y and u."""

    w: Tensor
    v: Tensor
    s: Tensor | None


def directions(self: Any, clients: Clients, step: Step, point: Point) -> Estimates:
    """Return the directions at a point, on the samples of this step."""
    x, y, u = point
    if u is not None:
        return Estimates(*step_directions(clients, step, x, y, u, "independent"))
    estimate = _local_neumann.sampled if self.hypergradient == "local-neumann" else _local_neumann.summed
    w = estimate(clients, step, x, y, self.num_terms, self.lr_system)
    return Estimates(w, clients.lower_grad(x, y, step.batch("train", "zeta")), None)


def eta(self: Any, t: Any, num_clients: int) -> Any:
    n = max(100, num_clients) if self.offset is None else self.offset
    return self.step_scale * (num_clients / (n + t)) ** (1 / 3)


def scheduled_steps(self: Any, found: Found) -> dict[str, float]:
    """Return plain steps divided by the first eta; adaptive steps are relative to the sizes of x and g_y.

    The accumulator b starts at the share 1 - r of |g_y|, and grows to |g_y|: B is between the two.
    """
    first, lower = eta(self, 1, found.num_clients), found.between(self.num_local_steps)
    upper = found.upper
    if self.adaptive != "none":
        slope = (1 - self.decay) ** 0.5 * found.gradient * found.width**0.5
        upper, lower = ADAPTIVE * found.size * (1 + self.damping / max(found.h, 1e-30)), lower * (slope + self.damping)
    shared = getattr(self, "hypergradient", "") == "shared-u"
    return {
        "lr_upper": upper / (first * self.num_local_steps),
        "lr_lower": lower / first,
        "lr_system": found.between(self.num_local_steps) / first if shared else found.lower,
    }


def check_steps(self: Any, num_clients: int) -> None:
    """Raise if the first eta, which is the largest, is too large for the estimators."""
    first = eta(self, 1, num_clients)
    if first > 1 or max(self.c1, self.c2) * first**2 >= 1:
        raise SettingError(
            f"{type(self).__name__}: with {num_clients} clients the first eta is {first:.3g} "
            f"and the estimators forget by c1 eta^2 = {self.c1 * first**2:.3g} and c2 eta^2 = "
            f"{self.c2 * first**2:.3g}, "
            "expected eta at most 1 and both weights below 1: lower step_scale, c1 or c2, or raise offset."
        )


def accumulated(self: Any, past: Any, size: Callable[[Any], Any], now: Any, before: Any) -> Any:
    """Return the accumulator a or b after a synchronisation, or None if the method is not adaptive.

    The update is line 6, or eq. (6)-(7) with the estimator of the previous synchronisation.

    before: estimator of the previous synchronisation, or None at the first one.
    """
    if self.adaptive == "none":
        return None
    new = (1 - self.decay) * size(now if before is None or self.adaptive == "adam" else now - before)
    return new if past is None else self.decay * past + new


def norm(v: Tensor) -> Tensor:
    return torch.linalg.vector_norm(v, dim=-1, keepdim=True)


@phase
def initial_estimates(
    self: Any, clients: Clients, x: Tensor, y: Tensor, u: Tensor | None = None
) -> dict[str, Tensor | None]:
    """Return the initial estimates, and the accumulators of variables that stay at the clients.

    Each estimate is the mean over q local steps.
    """
    point = Point(clients.rows(x), clients.rows(y), None if u is None else clients.rows(u))
    w, v = torch.zeros_like(point.x), torch.zeros_like(point.y)
    s = None if point.u is None else torch.zeros_like(point.u)
    for step in clients.steps(self.num_local_steps):
        new = directions(self, clients, step, point)
        w, v = w + new.w / self.num_local_steps, v + new.v / self.num_local_steps
        if s is not None and new.s is not None:
            s = s + new.s / self.num_local_steps
    kept_a = accumulated(self, None, torch.square, w, None) if x.ndim == 2 else None
    kept_b = accumulated(self, None, norm, v, None) if y.ndim == 2 else None
    return {"w": w, "v": v, "s": s, "a": kept_a, "b": kept_b}


@phase
def local_steps(
    self: Any,
    clients: Clients,
    x: Tensor,
    y: Tensor,
    w: Tensor,
    v: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    u: Tensor | None = None,
    s: Tensor | None = None,
) -> dict[str, Tensor | None]:
    """Take q local steps from the averages.

    The old point of the first step is the client's point before averaging.
    """
    point = Point(clients.rows(x), clients.rows(y), None if u is None else clients.rows(u))
    est = Estimates(clients.rows(w), clients.rows(v), None if s is None else clients.rows(s))
    b = None if b is None else b[..., :1]  # a client that joins late finds zeros as wide as y
    A, B = (1.0, 1.0) if a is None or b is None else (a.sqrt() + self.damping, b + self.damping)
    old = Point(
        clients.memory.read("x", default=point.x),
        clients.memory.read("y", default=point.y),
        None if point.u is None else clients.memory.read("u", default=point.u),
    )
    for step in clients.steps(self.num_local_steps):
        eta_t = eta(self, (clients.iteration - 1) * self.num_local_steps + step.index + 1, clients.num_clients)
        point = stepped(self, eta_t, A, B, point, est)
        est = storm(self, eta_t, est, directions(self, clients, step, point), directions(self, clients, step, old))
        old = point
    clients.memory.write(x=point.x, y=point.y, **({} if point.u is None else {"u": point.u}))
    kept_a = accumulated(self, a, torch.square, est.w, w) if x.ndim == 2 else None
    kept_b = accumulated(self, b, norm, est.v, v) if y.ndim == 2 else None
    return {**point._asdict(), **est._asdict(), "a": kept_a, "b": kept_b}


def stepped(self: Any, eta_t: float, A: Tensor | float, B: Tensor | float, point: Point, est: Estimates) -> Point:
    """Return the point after one step along the estimates."""
    u = point.u
    if u is not None and est.s is not None:
        u = u - eta_t * self.lr_system * est.s
    return Point(
        x=point.x - eta_t * self.lr_upper / A * est.w,
        y=point.y - eta_t * self.lr_lower / B * est.v,
        u=u,
    )


def storm(self: Any, eta_t: float, est: Estimates, new: Estimates, before: Estimates) -> Estimates:
    """Return the estimates at the new point.

    new: directions at the new point.
    before: directions at the old point, on the same samples as `new`.
    """
    keep_w, keep = 1 - self.c2 * eta_t**2, 1 - self.c1 * eta_t**2
    s = new.s
    if new.s is not None and est.s is not None and before.s is not None:
        s = new.s + keep * (est.s - before.s)
    return Estimates(
        w=new.w + keep_w * (est.w - before.w),
        v=new.v + keep * (est.v - before.v),
        s=s,
    )


@dataclass(frozen=True, kw_only=True)
class AdaFBiO(ServerAlgorithm):
    lr_upper: StepSize = step_size(0.01, "step of x, before eta / (sqrt(a) + damping)", symbol="gamma")
    lr_lower: StepSize = step_size(0.01, "step of y, before eta / (b + damping)", symbol="lambda")
    lr_system: StepSize = step_size(
        0.1, "step of the Neumann series, at most 1/L; with shared-u the step of u, before eta", symbol="theta"
    )
    num_local_steps: int = setting(5, "local steps between rounds", symbol="q", least=1)
    num_terms: int = setting(10, "terms of the Neumann series; unused with shared-u", symbol="K", least=1)
    hypergradient: Literal["local-neumann", "local-neumann-sum", "shared-u"] = setting(
        "local-neumann", "each client alone by eq. (13) or its mean, or one u"
    )
    adaptive: Literal["adam", "adabelief", "none"] = setting("adam", "how the adaptive matrices are generated")
    step_scale: float = setting(1.0, "eta_t = step_scale * (m / (offset + t))^(1/3)", symbol="k_0", above=0)
    offset: int | None = setting(None, "offset of the schedule; None: max(100, number of clients)", symbol="n", least=0)
    c1: float = setting(1.0, "the estimators of y and u forget by c1 eta^2", symbol="c_1", above=0)
    c2: float = setting(1.0, "the estimator of the hypergradient forgets by c2 eta^2", symbol="c_2", above=0)
    damping: float = setting(0.01, "added to the adaptive matrices", symbol="rho", above=0)
    decay: float = setting(0.9, "how much of the adaptive matrices stays at a sync", symbol="r", least=0, most=1)

    decays = ("lr_upper", "lr_lower")  # theta is the step of a series; eta shortens it where it is that of u
    upper_space = ("x", "w", "a")
    lower_space = ("y", "v", "b", "u", "s")
    lengths = {"b": 1}
    warns = {"global": _local_neumann.BIAS}

    class State(NamedTuple):
        x: Variable
        y: Variable
        u: Variable | None
        w: Variable
        v: Variable
        s: Variable | None
        a: Variable | None
        b: Variable | None

    auto_steps = scheduled_steps

    def scope_warnings(self, scopes: Scopes) -> Mapping[str, str]:
        return {} if self.hypergradient == "shared-u" else self.warns

    def init(self, fed: Federation) -> State:
        check_steps(self, fed.num_clients)
        x, y = fed.initial()
        u = fed.zeros("u") if self.hypergradient == "shared-u" else None
        new = fed.mean(self.initial_estimates, x=x, y=y, u=u)
        return self.State(x, y, u, new.w, new.v, new.s, *self.matrices(new, None, None, None, None))

    def round(self, fed: Federation, state: State) -> State:
        new = fed.mean(self.local_steps, **state._asdict())
        return self.State(
            new.x, new.y, new.u, new.w, new.v, new.s, *self.matrices(new, state.a, state.b, state.w, state.v)
        )

    def matrices(self, new: Any, a: Any, b: Any, w: Any, v: Any) -> tuple[Any, Any]:
        """Return the accumulators of averaged estimators.

        The accumulators of estimators that stay at the clients come from the clients.
        """
        return (
            accumulated(self, a, torch.square, new.w, w) if new.a is None else new.a,
            accumulated(self, b, norm, new.v, v) if new.b is None else new.b,
        )

    initial_estimates = initial_estimates
    local_steps = local_steps
