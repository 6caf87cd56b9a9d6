"""LFedNest: FedNest without rounds for the hypergradient; every client takes its own steps on x.

Use it when every client has its own lower level, or as the baseline of local hypergradients. Do not
use it for one model across clients that differ: it is biased there. It costs T + 1 rounds per outer
iteration and no round for the linear system.

From x and y:

    T times   local SGD on y, v = 0..tau_i-1:                                        1 round each
              y_i <- y_i - (beta/tau_i) g_y,i(x, y_i)                                -> y = mean
    once      local, v = 0..tau_i-1:                                                 1 round
              p_i = lam sum_{j=0..N} (I - lam H_i(x_i, y))^j f_y,i(x_i, y)
              x_i <- x_i - (alpha/tau_i) (f_x,i(x_i, y) - J_i(x_i, y) p_i)           -> x = mean

`lower_solver="svrg"` takes FedNest's FedInn instead of the first step: q = mean g_y,i, then SVRG
steps around it, 2 rounds each.

Reference: Tarzanagh, Li, Thrampoulidis, Oymak, "FedNest: Federated Bilevel, Minimax, and
Compositional Optimization", ICML 2022, and the released code's description of its two variants
(repeats of a local Neumann series and a local step on x).

Deviations: (1) lam is a separate setting and multiplies the series; the released code uses the
upper step. (2) Steps are divided by tau_i, as in FedNest. (3) The released variant with SVRG in the
steps on x (one more round) is not offered. (4) With a private x nothing is sent in the last phase
and the factor 1/m is dropped; with a local lower level y stays at its client. (5) tau on x may
differ from tau on y (`num_upper_steps`), as in the released code.

Bias: every client inverts its own Hessian. So with a global lower level and heterogeneous clients
the method converges to the point where the mean of local hypergradients vanishes. With tau > 1 and
constant steps the clients also drift.

Cost per outer iteration: T + 1 rounds. Floats up: T d_y + d_x. Per client: g_y: T tau, H v:
N tau_x, J v, f_x and f_y: tau_x (svrg: 2T + 1 rounds, 2T d_y + d_x floats, g_y: T (1 + 2 tau)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from fedbilevel.algorithms import _local_neumann, fbo_aggitd, fednest
from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, Variable, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.federation.probing import Found
from fedbilevel.settings import StepSize, setting, step_size


@dataclass(frozen=True, kw_only=True)
class LFedNest(ServerAlgorithm):
    lr_upper: StepSize = step_size(0.01, "step of x", symbol="alpha")
    lr_lower: StepSize = step_size(0.01, "step of y", symbol="beta")
    lr_system: StepSize = step_size(0.01, "step of the Neumann series; at most 1/L", symbol="lambda")
    num_lower_rounds: int = setting(1, "rounds of local steps on y per outer iteration", symbol="T", least=0)
    num_local_steps: int | tuple[int, ...] = setting(5, "local steps on y and on x", symbol="tau", least=1)
    num_upper_steps: int | None = setting(
        None, "local steps on x alone; nothing: as many as on y", symbol="tau_x", least=1
    )
    num_factors: int = setting(5, "products H v of the Neumann series, which has one term more", symbol="N", least=0)
    lower_solver: Literal["sgd", "svrg"] = setting("sgd", "plain or variance-reduced local steps on y")

    decays = ("lr_upper", "lr_lower")  # lambda is the step of a series, not of a descent
    upper_space = ("x",)
    lower_space = ("y", "q")
    warns = {"global": _local_neumann.BIAS}

    class State(NamedTuple):
        x: Variable
        y: Variable

    def auto_steps(self, found: Found) -> dict[str, float]:
        return {**fbo_aggitd.nested_steps(self, found), "lr_system": found.lower}

    def init(self, fed: Federation) -> State:
        return self.State(*fed.initial())

    def round(self, fed: Federation, state: State) -> State:
        x, y = state
        for _ in range(self.num_lower_rounds):
            fed.resample()
            q = fed.mean(self.lower_gradient, x=x, y=y).q if self.lower_solver == "svrg" else None
            y = fed.mean(self.lower_steps, x=x, y=y, q=q).y
        fed.resample()
        return self.State(fed.mean(self.upper_steps, x=x, y=y).x, y)

    lower_gradient = fednest.lower_gradient
    lower_steps = fbo_aggitd.lower_steps

    @phase
    def upper_steps(self, clients: Clients, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Take local steps on x, each along the client's own hypergradient."""
        x = clients.rows(x)
        for step in clients.steps(self.num_upper_steps or self.num_local_steps):
            h = _local_neumann.summed(clients, step, x, y, self.num_factors + 1, self.lr_system)
            x = step.where(x - self.lr_upper / step.count * h, x)
        return {"x": x}
