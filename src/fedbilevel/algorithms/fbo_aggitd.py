"""FBO-AggITD: the hypergradient is aggregated inside the lower loop and needs no loop of its own.

Use it when an outer iteration may take many rounds and x should take few, exact steps: it solves
the lower level and the linear system anew each time and carries no u. It works for all scopes and
for clients that differ. It costs 2N + 3 rounds per outer iteration.

Outer iteration k starts from x and y^0 = y_k, with Q uniform in {0..N}. For t = 0..N:

    R1(t)  if t < N: q_i = g_y,i(x, y^t)
           if t = Q: z_i = f_y,i(x, y^t)
           if t > Q: z_i = z - lam * H_i(x, y^t) z                                 -> q, z = means
    R2(t)  if t < N: local SVRG from y^t, v = 0..tau_i-1, the same sample in both gradients
           y_i <- y_i - (beta/tau_i) [g_y,i(y_i) - g_y,i(y^t) + q]                 -> y^{t+1} = mean
    R(h)   p = lam (N+1) z;   h_i = f_x,i(x, y^N) - J_i(x, y^N) p                  -> h = mean
    R(x)   local, v = 0..tau_i-1:
           x_i <- x_i - (alpha/tau_i) [h - f_x,i(x, y^N) + f_x,i(x_i, y^N)]        -> x = mean

`estimator="sum"` (the default, this project's own) sends lam * f_y,i + s - lam * H_i s at every t
and uses p = s^N. It equals the expectation over Q exactly and has none of its variance, for N more
gradients f_y and about N/2 more products H v.

Reference: Xiao, Ji, "Communication-Efficient Federated Hypergradient Computation via Aggregated
Iterative Differentiation", ICML 2023, Algorithm 1 and eq. (5).

Deviations: (1) Line 6 as printed lacks lam in front of the product H z. (2) Line 15 as printed
returns z^{N-1} for Q < N, which leaves a permanent bias lam * f_y in p; z^N is right for every Q.
(3) q^N is not computed, because no step uses it. `literal=True` follows the print in (1) and (2).
(4) `lower_solver="sgd"` replaces SVRG by plain local SGD. This needs no q, so the Q rounds of R1
that carry only q vanish (with the sum no round vanishes), and it adds a drift. (5) With a private
x, h and x stay at their clients and the factor 1/m is dropped; with a local lower level q, y, z
stay. (6) tau on x may differ from tau on y (`num_upper_steps`): the published experiments take
epochs on y and tau steps on x.

Cost per outer iteration: 2N + 3 rounds. Floats up: (3N - Q + 1) d_y + 2 d_x (sum:
(3N + 1) d_y + 2 d_x). Per client: g_y: N + 2 N tau, f_y: 1 (sum: N + 1), H v: N - Q (sum: N),
J v: 1, f_x: 1 + 2 tau_x. `lower_solver="sgd"` saves N d_y floats and N + N tau of g_y.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, Variable, linear_phase, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.federation.probing import NESTED, Found
from fedbilevel.settings import StepSize, setting, step_size


def nested_steps(self: Any, found: Found) -> dict[str, float]:
    """Return step sizes of methods that divide the step of y among local steps, and solve before x moves."""
    tau = getattr(self, "num_local_steps", 1)
    return {
        "lr_upper": NESTED * found.upper,
        "lr_lower": (min(tau) if isinstance(tau, tuple) else tau) * found.between(tau),
        "lr_system": found.averaged,
    }


@phase
def lower_steps(self: Any, clients: Clients, x: Tensor, y: Tensor, q: Tensor | None) -> dict[str, Tensor]:
    """Take local steps on y: SVRG around the cohort's gradient q, or plain SGD without q."""
    start, y = y, clients.rows(y)
    for step in clients.steps(self.num_local_steps):
        batch = step.batch("train", "zeta")
        gy = clients.lower_grad(x, y, batch)
        if q is not None:
            gy = gy - clients.lower_grad(x, start, batch) + q
        y = step.where(y - self.lr_lower / step.count * gy, y)
    return {"y": y}


@phase
def upper_steps(self: Any, clients: Clients, x: Tensor, y: Tensor, h: Tensor) -> dict[str, Tensor]:
    """Take local SVRG steps on x around the cohort's hypergradient h."""
    start, x = x, clients.rows(x)
    for step in clients.steps(self.num_upper_steps or self.num_local_steps):
        batch = step.batch("val", "xi")
        fx = clients.upper_grad_x(x, y, batch) - clients.upper_grad_x(start, y, batch)
        x = step.where(x - self.lr_upper / step.count * (h + fx), x)
    return {"x": x}


@dataclass(frozen=True, kw_only=True)
class FBOAggITD(ServerAlgorithm):
    lr_upper: StepSize = step_size(0.01, "step of x", symbol="alpha")
    lr_lower: StepSize = step_size(0.003, "step of y", symbol="beta")
    lr_system: StepSize = step_size(0.01, "step of the linear system; at most 1/L", symbol="lambda")
    num_lower_rounds: int = setting(5, "aggregated lower steps per outer iteration", symbol="N", least=0)
    num_local_steps: int | tuple[int, ...] = setting(1, "local steps on y and on x", symbol="tau", least=1)
    num_upper_steps: int | None = setting(
        None, "local steps on x alone; nothing: as many as on y", symbol="tau_x", least=1
    )
    estimator: Literal["sum", "sampled"] = setting("sum", "the whole series, or one term drawn as in the paper")
    lower_solver: Literal["svrg", "sgd"] = setting("svrg", "variance-reduced or plain local steps on y")
    literal: bool = setting(False, "Algorithm 1 as printed, with its two misprints; needs estimator=sampled")

    decays = ("lr_upper", "lr_lower")  # lambda is the step of a series, not of a descent
    upper_space = ("x", "h")
    lower_space = ("y", "q", "z")

    class State(NamedTuple):
        x: Variable
        y: Variable

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.literal and self.estimator != "sampled":
            raise SettingError(
                "FBOAggITD: literal is the printed Algorithm 1, which samples Q: it needs estimator='sampled'."
            )

    auto_steps = nested_steps

    def init(self, fed: Federation) -> State:
        return self.State(*fed.initial())

    def round(self, fed: Federation, state: State) -> State:
        h, y = self.estimate(fed, state.x, state.y)
        return self.State(fed.mean(self.upper_steps, x=state.x, y=y, h=h).x, y)

    def estimate(self, fed: Federation, x: Any, y: Any) -> tuple[Any, Any]:
        """Return the hypergradient at x along the lower path from y, and the path's end y^N."""
        z, N = None, self.num_lower_rounds
        Q = fed.draw("Q", N + 1) if self.estimator == "sampled" else 0
        for t in range(N + 1):
            fed.resample()
            r = fed.mean(self.aggregate, x=x, y=y, z=z, t=t, Q=Q)
            z = r.z
            if t < N:
                y = fed.mean(self.lower_steps, x=x, y=y, q=r.q).y
        fed.resample()
        return fed.mean(self.hypergradient, x=x, y=y, z=z).h, y

    @linear_phase
    def aggregate(
        self, clients: Clients, x: Tensor, y: Tensor, z: Tensor | None, t: int, Q: int
    ) -> dict[str, Tensor | None]:
        q, lam, N = None, self.lr_system, self.num_lower_rounds
        if t < N and self.lower_solver == "svrg":
            q = clients.lower_grad(x, y, clients.batch("train", "q"))
        if z is not None and not (self.literal and t == N):
            factor = 1.0 if self.literal else lam
            z = clients.rows(z) - factor * clients.hessian_product(x, y, z, clients.batch("train", "z"))
        elif z is not None:
            z = clients.rows(z)
        if self.estimator == "sum":
            r = lam * clients.upper_grad_y(x, y, clients.batch("val", "r"))
            z = r if z is None else z + r
        elif t == Q:
            z = clients.upper_grad_y(x, y, clients.batch("val", "r"))
        return {"q": q, "z": z}

    lower_steps = lower_steps

    @linear_phase
    def hypergradient(self, clients: Clients, x: Tensor, y: Tensor, z: Tensor) -> dict[str, Tensor]:
        p = z if self.estimator == "sum" else self.lr_system * (self.num_lower_rounds + 1) * z
        fx = clients.upper_grad_x(x, y, clients.batch("val", "h"))
        return {"h": fx - clients.jacobian_product(x, y, p, clients.batch("train", "h"))}

    upper_steps = upper_steps
