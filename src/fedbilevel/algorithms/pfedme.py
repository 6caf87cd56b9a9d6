"""pFedMe on the lower level alone: personal models near a common model; x stays as it starts.

Use it when you need a baseline for personalisation with one model per client near a common one. It
trains y only, and measures the personal models. It costs one round of d_y floats per outer
iteration, and I K gradients per client.

The common model descends the mean of Moreau envelopes. Client i starts from w_i = theta_i = w and
takes I local rounds, each on one minibatch:

    theta_i <- theta_i - gamma * (g_y,i(x_0, theta_i) + lambda (theta_i - w_i))   K times
    w_i <- w_i - eta lambda (w_i - theta_i)

The first line approximates argmin_t g_i(t) + lambda/2 |t - w_i|^2. Then one round:
w <- (1 - beta) w + beta mean w_i. theta_i is the personal model: it is measured, and it never
leaves its client.

Reference: T Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS
2020. Written from memory of the literature, not from the paper's text: no faithful reproduction is
claimed. The HGP paper takes lambda = 1, which is the default.

Deviations: (1) K gradient steps replace a solution up to a given accuracy; theta_i persists over
the local rounds and restarts at w in every outer iteration. (2) The server's step is computed at
the clients, as (1 - beta) w + beta w_i: the mean of these rows is the same number, and the same
source serves a lower level that stays at its client. (3) Clients are averaged by the problem's
weights. A client outside the cohort keeps the theta_i of its last round (at first the initial
point). (4) With a local lower level w is not averaged either.

Bias: theta_i differs from the prox by the factor (1 - gamma (mu + lambda))^K of its initial
distance. With I > 1 and constant steps w drifts by a distance proportional to eta. Steps are stable
for gamma (L + lambda) < 2 and eta lambda < 2.

Cost per outer iteration: 1 round; d_y floats up, d_y down (and d_x once, for the constant x); per
client I K of g_y.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, Variable, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.federation.probing import Found
from fedbilevel.problem.problem import Scopes
from fedbilevel.settings import StepSize, setting, step_size


@dataclass(frozen=True, kw_only=True)
class PFedMe(ServerAlgorithm):
    lr_lower: StepSize = step_size(0.1, "step of the personal models theta", symbol="gamma")
    lr_model: StepSize = step_size(0.1, "step of the common model w", symbol="eta")
    prox_weight: float = setting(1.0, "weight of the squared distance between theta and w", symbol="lambda", above=0)
    server_mix: float = setting(
        1.0, "how much of the mean of w replaces the old w; above 1 it steps beyond", symbol="beta", above=0
    )
    num_local_steps: int | tuple[int, ...] = setting(5, "local rounds between rounds", symbol="I", least=1)
    num_prox_steps: int = setting(5, "gradient steps on theta per local round", symbol="K", least=1)

    decays = ("lr_model",)  # theta solves a problem of its own in every local round
    learns_x = uses_products = False
    lower_space = ("w", "theta")

    class State(NamedTuple):
        x: Variable
        y: Variable  # theta, which is measured
        w: Variable

    def kept_names(self, scopes: Scopes) -> set[str]:
        return {*super().kept_names(scopes), "theta"}

    def auto_steps(self, found: Found) -> dict[str, float]:
        return {"lr_lower": 1 / (1 / found.lower + self.prox_weight), "lr_model": 1 / self.prox_weight}

    def init(self, fed: Federation) -> State:
        return self.State(fed.start("x"), fed.start("theta"), fed.start("w"))

    def round(self, fed: Federation, state: State) -> State:
        new = fed.mean(self.local_rounds, x=state.x, w=state.w)
        return self.State(state.x, new.theta, new.w)

    @phase
    def local_rounds(self, clients: Clients, x: Tensor, w: Tensor) -> dict[str, Tensor]:
        theta = w = sent = clients.rows(w)
        for step in clients.steps(self.num_local_steps):
            for _ in range(self.num_prox_steps):
                gradient = clients.lower_grad(x, theta, step.batch("train", "B")) + self.prox_weight * (theta - w)
                theta = step.where(theta - self.lr_lower * gradient, theta)
            w = step.where(w - self.lr_model * self.prox_weight * (w - theta), w)
        return {"w": (1 - self.server_mix) * sent + self.server_mix * w, "theta": theta}
