"""FedBABU: a shared body trained under a fixed head, then heads that every client tunes.

Use it when clients share a representation and you need a simple rival with own heads: the body
never sees a head that moves. x is the shared body and y the head of each client, so the lower level
must be local. It measures the tuned heads and never uses the upper loss. It costs one round of d_x
floats per outer iteration.

The body is trained with the initial head y_0 of all clients, and the heads are tuned from y_0 under
the new body:

    x_i <- x_i - eta * g_x,i(x_i, y_0)   from x_i = x, for I body steps;   x = mean of x_i
    v_i <- v_i - gamma * g_y,i(x, v_i)   from v_i = y_0, for T tuning steps

v_i never leaves its client, and no other value depends on it.

Reference: Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image
Classification", ICLR 2022. Written from memory of the literature, not from the paper's text: no
faithful reproduction is claimed.

Deviations: (1) The paper tunes once, at the end. Here heads are tuned in every outer iteration, so
that a measurement at any time shows them; the x of the run is the same as without tuning. (2) The
paper tunes the whole network of a client; here x is shared, and the head alone is tuned. (3) Steps
are counted in minibatches, not in epochs, and tuning has a step of its own. (4) Clients are
averaged by the problem's weights. A client outside the cohort keeps the head of its last round (at
first y_0). (5) With a private x nothing is averaged: every client trains its own body alone.

Bias: x minimises the mean of g_i(x, y_0), not the upper loss at tuned heads. An initial head of
zeros gives no gradient to the body, which then never moves. With I > 1, constant steps and
heterogeneous clients, x converges to a point at a distance proportional to eta.

Cost per outer iteration: 1 round; d_x floats up, d_x down (2 d_x if the client was not in the last
cohort, or at first); per client I of g_x and T of g_y.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fedbilevel.algorithms.fedrep import REFUSES
from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, Variable, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.settings import StepSize, setting, step_size


@dataclass(frozen=True, kw_only=True)
class FedBABU(ServerAlgorithm):
    lr_upper: StepSize = step_size(0.1, "step of the body x", symbol="eta")
    lr_lower: StepSize = step_size(0.1, "step of the tuned heads", symbol="gamma")
    num_local_steps: int | tuple[int, ...] = setting(5, "local steps of the body between rounds", symbol="I", least=1)
    num_tuning_steps: int = setting(10, "steps of every client on its head under the new body", symbol="T", least=0)

    decays = ("lr_upper",)  # heads are tuned anew in every outer iteration
    one_level = True
    uses_products = False
    lower_space = ("y", "head")
    refuses = REFUSES

    class State(NamedTuple):
        x: Variable
        y: Variable  # the tuned heads, which are measured
        head: Variable  # the initial head

    def init(self, fed: Federation) -> State:
        return self.State(*fed.initial(), fed.start("head"))

    def round(self, fed: Federation, state: State) -> State:
        x = fed.mean(self.body_steps, x=state.x, head=state.head).x
        return self.State(x, fed.mean(self.tune, x=x, head=state.head).y, state.head)

    @phase
    def body_steps(self, clients: Clients, x: Tensor, head: Tensor) -> dict[str, Tensor]:
        x = clients.rows(x)
        for step in clients.steps(self.num_local_steps):
            x = step.where(x - self.lr_upper * clients.lower_grad_x(x, head, step.batch("train", "body")), x)
        return {"x": x}

    @phase
    def tune(self, clients: Clients, x: Tensor, head: Tensor) -> dict[str, Tensor]:
        y = clients.rows(head)
        for step in clients.steps(self.num_tuning_steps):
            y = y - self.lr_lower * clients.lower_grad(x, y, step.batch("train", "tune"))
        return {"y": y}
