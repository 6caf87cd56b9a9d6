"""Local-BSGVRM: variance-reduced local steps on x and y; variables and estimators are averaged.

Use it when every client has its own lower level and gradients are noisy, or as a baseline of local
hypergradients. Do not use it for one model across clients that differ: it is biased there. It costs
one round of 2 d_x + 2 d_y floats per outer iteration.

w_i and v_i are STORM estimators of client i's own hypergradient and of g_y. Averages are taken
every p steps. The p steps t, the first from the means of x, y, w, v, are

    x_i+ = x_i - gamma eta_t w_i,    y_i+ = y_i - lambda eta_t v_i
    v_i <- g_y,i(x_i+, y_i+) + (1 - c_1 eta_t^2) [v_i - g_y,i(x_old, y_old)]
    w_i <- h_i(x_i+, y_i+) + (1 - c_2 eta_t^2) [w_i - h_i(x_old, y_old)]
    h_i = f_x,i - J_i K theta prod_{j=1..k} (I - theta H_i) f_y,i,   k uniform in {0..K-1}

with the same sample in both gradients, and the same samples and k in both h_i.

Reference: Gao, "On the Convergence of Momentum-Based Algorithms for Federated Stochastic Bilevel
Optimization Problems", 2022. The update is written from memory of the literature, as AdaFBiO with
A = B = I, and does not claim a faithful reproduction.

Deviations: (1) eta_t is AdaFBiO's schedule; a large `offset` with a matching `step_scale` makes it
constant. (2) As in AdaFBiO the old point of the first step after a sync is the client's own, before
averaging. (3) `hypergradient="local-neumann-sum"` is this project's own: the mean over k.
(4) Values that a scope keeps at the client are neither averaged nor sent, and the factor 1/m of a
private x is dropped.

Bias: every client inverts its own Hessian. So with a global lower level and heterogeneous clients
the method converges to the point where the mean of local hypergradients vanishes. With p > 1
clients also drift by about c_2 eta^2 times their heterogeneity.

Cost per outer iteration: 1 round; 2 d_x + 2 d_y floats each way; per client and step 2 of each of
g_y, f_x, f_y, J v and 2k of H v (sum: 2K - 2). Before the first outer iteration: 1 round, d_x + d_y
floats up, p estimates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from fedbilevel.algorithms import _local_neumann, adafbio
from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, Variable
from fedbilevel.settings import StepSize, setting, step_size


@dataclass(frozen=True, kw_only=True)
class LocalBSGVRM(ServerAlgorithm):
    lr_upper: StepSize = step_size(0.1, "step of x, before eta", symbol="gamma")
    lr_lower: StepSize = step_size(0.5, "step of y, before eta", symbol="lambda")
    lr_system: StepSize = step_size(0.1, "step of the Neumann series; at most 1/L", symbol="theta")
    num_local_steps: int = setting(5, "local steps between rounds", symbol="p", least=1)
    num_terms: int = setting(10, "terms of the Neumann series", symbol="K", least=1)
    hypergradient: Literal["local-neumann", "local-neumann-sum"] = setting(
        "local-neumann", "one random number of factors, or the mean over that number"
    )
    step_scale: float = setting(1.0, "eta_t = step_scale * (m / (offset + t))^(1/3)", symbol="k_0", above=0)
    offset: int | None = setting(None, "offset of the schedule; None: max(100, number of clients)", symbol="n", least=0)
    c1: float = setting(1.0, "the estimator of y forgets by c1 eta^2", symbol="c_1", above=0)
    c2: float = setting(1.0, "the estimator of the hypergradient forgets by c2 eta^2", symbol="c_2", above=0)

    adaptive = "none"
    decays = ("lr_upper", "lr_lower")  # theta is the step of a series, not of a descent
    upper_space = ("x", "w")
    lower_space = ("y", "v")
    warns = {"global": _local_neumann.BIAS}

    class State(NamedTuple):
        x: Variable
        y: Variable
        w: Variable
        v: Variable

    auto_steps = adafbio.scheduled_steps

    def init(self, fed: Federation) -> State:
        adafbio.check_steps(self, fed.num_clients)
        x, y = fed.initial()
        new = fed.mean(self.initial_estimates, x=x, y=y)
        return self.State(x, y, new.w, new.v)

    def round(self, fed: Federation, state: State) -> State:
        new = fed.mean(self.local_steps, **state._asdict())
        return self.State(new.x, new.y, new.w, new.v)

    initial_estimates = adafbio.initial_estimates
    local_steps = adafbio.local_steps
