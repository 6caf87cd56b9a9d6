"""FedEM: every client mixes the same components in its own proportions.

Use it when clients draw from a few common distributions and you need a baseline for personalisation
with private proportions. The lower loss must be a mixture, and the upper loss is not used. It costs
one round of d_y floats per outer iteration, and one pass over each client's training samples.

    g_i(x_i, y) = -mean_s log sum_m exp(x_i,m) p_m(s; y_m)

where the mean is over samples s, x_i = log pi_i is private, and y holds all components. Client i
starts from the broadcast y; then one round: y <- mean of y_i.

    pi_i,m <- mean over its training samples of q_m(s) = - d g_i / d x_i,m      (E step, M step)
    y_i <- y_i - gamma * g_y,i(x_i, y_i)   for I local steps                    (gradient M step)

with q_m(s) proportional to pi_i,m p_m(s; y_m). The derivative of -log sum_m exp(x_m) p_m is minus
the responsibility, so the E step needs only the library's g_x. A loss with softmax(x_i) instead of
exp(x_i) has -g_x = mean q - pi, which sums to 0 instead of 1. The missing mass is added in the
proportions softmax(x_i), so both forms give the same pi_i.

Reference: Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated Multi-Task Learning under a Mixture of
Distributions", NeurIPS 2021. Written from memory of the literature, not from the paper's text: no
faithful reproduction is claimed.

Deviations: (1) The paper computes q once and trains the components on samples weighted by it. Here
every local step has the q of its own point, at the new pi_i. (2) pi_i,m is at least `least_share`
before it is normalised, so that no component is lost permanently. (3) Clients are averaged by the
problem's weights. (4) With a local lower level every client has its own components. (5) On a lower
loss that is not a mixture the steps have no meaning; shares below the floor are raised to it, so
x_i stays finite.

Bias: with I > 1, constant steps and heterogeneous clients, y converges to a point at a distance
proportional to the step.

Cost per outer iteration: 1 round; d_y floats up, d_y down, x is never sent; per client I of g_y,
and 1 of g_x on all its training samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, Variable, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.settings import StepSize, setting, step_size


@dataclass(frozen=True, kw_only=True)
class FedEM(ServerAlgorithm):
    lr_lower: StepSize = step_size(0.1, "step of the components y", symbol="gamma")
    num_local_steps: int | tuple[int, ...] = setting(5, "local steps between rounds", symbol="I", least=1)
    least_share: float = setting(1e-6, "least proportion of a component", above=0, most=0.1)

    learns_x = uses_products = False
    refuses = {
        "shared": "x holds the proportions in which each client mixes the components: use scopes with a private x"
    }

    class State(NamedTuple):
        x: Variable
        y: Variable

    def init(self, fed: Federation) -> State:
        return self.State(*fed.initial())

    def round(self, fed: Federation, state: State) -> State:
        new = fed.mean(self.em_steps, x=state.x, y=state.y)
        return self.State(new.x, new.y)

    @phase
    def em_steps(self, clients: Clients, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x, y = clients.rows(x, y)
        everything = clients.batch("train", "E").whole()
        share = -clients.lower_grad_x(x, y, everything)
        share = share + (1 - share.sum(1, keepdim=True)) * x.softmax(1)
        share = share.clamp(min=self.least_share)
        x = (share / share.sum(1, keepdim=True)).log()
        for step in clients.steps(self.num_local_steps):
            y = step.where(y - self.lr_lower * clients.lower_grad(x, y, step.batch("train", "B")), y)
        return {"x": x, "y": y}
