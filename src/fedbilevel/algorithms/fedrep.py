"""FedRep: own heads under a shared body, both trained on the lower loss; the body is averaged.

Use it when clients share a representation but need heads of their own, as where each client holds
few classes, and as the plain rival of a bilevel method on such a problem. x is the shared body and
y the head of each client, so the lower level must be local. It never uses the upper loss. It costs
one round of d_x floats per outer iteration.

Client i has the body x and its own head y_i:

    y_i <- y_i - gamma * g_y,i(x, y_i)   for T head steps
    x_i <- x_i - eta * g_x,i(x_i, y_i)   from x_i = x, for I body steps;   x = mean of x_i

Reference: Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for
Personalized Federated Learning", ICML 2021, Algorithm 1. Written from memory of the literature, not
from the paper's text: no faithful reproduction is claimed.

Deviations: (1) Steps are counted in minibatches, not in epochs. (2) The paper's Algorithm 1 takes
one body step; its experiments take an epoch of them. (3) Clients are averaged by the problem's
weights. A client outside the cohort keeps its head. (4) With a private x nothing is averaged: every
client trains its own network alone.

Bias: it minimises the mean of the training losses over the body and all heads. That is not the
upper loss: where they differ, x is not the solution of the bilevel problem. With I > 1, constant
steps and heterogeneous clients, x converges to a point at a distance proportional to eta.

Cost per outer iteration: 1 round; d_x floats each way; per client T of g_y and I of g_x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, Variable, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.settings import StepSize, setting, step_size

REFUSES = {
    "global": "y holds the heads, of which every client has its own: use scopes with a local lower level, or fedavg "
    "for one network of all clients"
}


@dataclass(frozen=True, kw_only=True)
class FedRep(ServerAlgorithm):
    lr_upper: StepSize = step_size(0.1, "step of the body x", symbol="eta")
    lr_lower: StepSize = step_size(0.1, "step of the heads y", symbol="gamma")
    num_head_steps: int = setting(10, "steps of every client on its head before the body moves", symbol="T", least=1)
    num_local_steps: int | tuple[int, ...] = setting(5, "local steps of the body between rounds", symbol="I", least=1)

    one_level = True
    uses_products = False
    refuses = REFUSES

    class State(NamedTuple):
        x: Variable
        y: Variable

    def init(self, fed: Federation) -> State:
        return self.State(*fed.initial())

    def round(self, fed: Federation, state: State) -> State:
        new = fed.mean(self.local_steps, x=state.x, y=state.y)
        return self.State(new.x, new.y)

    @phase
    def local_steps(self, clients: Clients, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x, y = clients.rows(x, y)
        for step in clients.steps(self.num_head_steps):
            y = y - self.lr_lower * clients.lower_grad(x, y, step.batch("train", "head"))
        for step in clients.steps(self.num_local_steps):
            x = step.where(x - self.lr_upper * clients.lower_grad_x(x, y, step.batch("train", "body")), x)
        return {"x": x, "y": y}
