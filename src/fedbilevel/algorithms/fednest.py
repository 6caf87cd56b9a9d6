"""FedNest: lower rounds, then a federated Neumann series for the hypergradient, then upper steps.

Use it when an outer iteration may take many rounds: it solves the lower level and the linear system
anew each time and carries no u. It works for all scopes and for clients that differ. It costs
2T + N' + 3 rounds per outer iteration.

From x and y:

    FedInn, T times      q = mean g_y,i(x, y);  local SVRG as in FBO-AggITD         2 rounds each
    FedIHGP              p = lam N mean f_y,i(x, y);  N' uniform in {0..N-1}        1 round
                         N' times: p <- mean (p - lam * H_i p)                      1 round each
                         h = mean (f_x,i - J_i p)                                   1 round
    FedOut               local SVRG steps on x around h                             1 round

The expectation of p over N' is lam * sum_{j<N} (I - lam H)^j f_y with the mean Hessian H, because p
is averaged at every factor.

Reference: Tarzanagh, Li, Thrampoulidis, Oymak, "FedNest: Federated Bilevel, Minimax, and
Compositional Optimization", ICML 2022.

Deviations: (1) This is the paper's FedIHGP. The released code applies each client's own Hessian
powers, never clears its list of terms, and has no lam (its error is a scale error at the published
step). (2) lam is a separate setting; the released code uses the upper step. (3) With a private x,
h and x stay at their clients and the factor 1/m is dropped; with a local lower level q, y, p stay.
(4) `lower_solver="sgd"` (FedNest-SGD in the released code) replaces SVRG on y by plain local SGD:
no q, T rounds fewer, and a drift. (5) In the paper f_x in h_i shares its sample with the local
steps; here it has its own. In the first local step the two local f_x cancel, so only later steps
could show a difference. (6) tau on x may differ from tau on y (`num_upper_steps`): the released
code takes epochs on y and tau steps on x.

Cost per outer iteration: 2T + N' + 3 rounds. Floats up: (2T + N' + 1) d_y + 2 d_x. Per client:
g_y: T (1 + 2 tau), f_y: 1, H v: N', J v: 1, f_x: 1 + 2 tau_x (sgd: T + N' + 3 rounds,
(T + N' + 1) d_y + 2 d_x floats, g_y: T tau).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fedbilevel.algorithms import fbo_aggitd
from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, Variable, linear_phase
from fedbilevel.federation.clients import Clients
from fedbilevel.federation.probing import SAMPLED, Found
from fedbilevel.settings import StepSize, setting, step_size


@linear_phase
def lower_gradient(self: Any, clients: Clients, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"q": clients.lower_grad(x, y, clients.batch("train", "q"))}


@dataclass(frozen=True, kw_only=True)
class FedNest(ServerAlgorithm):
    lr_upper: StepSize = step_size(0.01, "step of x", symbol="alpha")
    lr_lower: StepSize = step_size(0.01, "step of y", symbol="beta")
    lr_system: StepSize = step_size(0.01, "step of the Neumann series; at most 1/L", symbol="lambda")
    num_lower_rounds: int = setting(1, "FedInn calls per outer iteration", symbol="T", least=0)
    num_local_steps: int | tuple[int, ...] = setting(5, "local steps on y and on x", symbol="tau", least=1)
    num_upper_steps: int | None = setting(
        None, "local steps on x alone; nothing: as many as on y", symbol="tau_x", least=1
    )
    num_terms: int = setting(5, "terms of the Neumann series", symbol="N", least=1)
    lower_solver: Literal["svrg", "sgd"] = setting("svrg", "variance-reduced or plain local steps on y")

    decays = ("lr_upper", "lr_lower")  # lambda is the step of a series, not of a descent
    upper_space = ("x", "h")
    lower_space = ("y", "q", "p")

    class State(NamedTuple):
        x: Variable
        y: Variable

    def auto_steps(self, found: Found) -> dict[str, float]:
        steps = fbo_aggitd.nested_steps(self, found)
        return {**steps, "lr_upper": SAMPLED * found.upper, "lr_system": found.lower}

    def init(self, fed: Federation) -> State:
        return self.State(*fed.initial())

    def round(self, fed: Federation, state: State) -> State:
        h, y = self.estimate(fed, state.x, state.y)
        return self.State(fed.mean(self.upper_steps, x=state.x, y=y, h=h).x, y)

    def estimate(self, fed: Federation, x: Any, y: Any) -> tuple[Any, Any]:
        """Return the hypergradient at x and the lower iterate behind it.

        The lower level starts at y.
        """
        num_factors = fed.draw("N'", self.num_terms)
        for _ in range(self.num_lower_rounds):
            fed.resample()
            q = fed.mean(self.lower_gradient, x=x, y=y).q if self.lower_solver == "svrg" else None
            y = fed.mean(self.lower_steps, x=x, y=y, q=q).y
        fed.resample()
        p = fed.mean(self.system_start, x=x, y=y).p
        for _ in range(num_factors):
            fed.resample()
            p = fed.mean(self.system_factor, x=x, y=y, p=p).p
        fed.resample()
        return fed.mean(self.hypergradient, x=x, y=y, p=p).h, y

    lower_gradient = lower_gradient
    lower_steps = fbo_aggitd.lower_steps

    @linear_phase
    def system_start(self, clients: Clients, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"p": self.lr_system * self.num_terms * clients.upper_grad_y(x, y, clients.batch("val", "p"))}

    @linear_phase
    def system_factor(self, clients: Clients, x: Tensor, y: Tensor, p: Tensor) -> dict[str, Tensor]:
        return {"p": clients.rows(p) - self.lr_system * clients.hessian_product(x, y, p, clients.batch("train", "p"))}

    @linear_phase
    def hypergradient(self, clients: Clients, x: Tensor, y: Tensor, p: Tensor) -> dict[str, Tensor]:
        fx = clients.upper_grad_x(x, y, clients.batch("val", "h"))
        return {"h": fx - clients.jacobian_product(x, y, p, clients.batch("train", "h"))}

    upper_steps = fbo_aggitd.upper_steps
