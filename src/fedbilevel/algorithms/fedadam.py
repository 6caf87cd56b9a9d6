"""FedAdam on the lower level alone: local SGD on y, and a step of Adam at the server.

Use it when y is a deep network that FedAvg trains slowly; x stays at its initial value. The server
takes the change of the averaged y as a gradient, so layers whose gradients are small move as far as
the others. It costs one round of d_y floats per outer iteration, as FedAvg does.

    y_i <- y_i - gamma * g_y,i(x_0, y_i)   for I local steps from y;   d = mean of y_i - y
    m = beta_1 m + (1 - beta_1) d,   s = beta_2 s + (1 - beta_2) d^2
    y <- y + eta * m / (sqrt(s) + tau)

All operations are per entry; m and s start at zero and at tau^2.

Reference: Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan, "Adaptive Federated
Optimization", ICLR 2021, Algorithm 2 (FedAdam).

Deviations: (1) Clients are averaged by the problem's weights, which are equal by default. (2) The
schedule of a run scales eta, not gamma, because the length of a step of Adam does not depend on the
local one.

Bias: as FedAvg, with I > 1 and heterogeneous clients, d is zero at a point whose distance from the
minimiser is proportional to gamma; a falling eta does not change that point.

Cost per outer iteration: 1 round; d_y floats up, d_y down (and d_x once, for the constant x); per
client I of g_y. The server keeps two more vectors of d_y floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fednest import lower_gradient
from fedbilevel.federation.algorithm import Federation, Variable
from fedbilevel.settings import setting


@dataclass(frozen=True, kw_only=True)
class FedAdam(FedAvg):
    server_lr: float = setting(0.01, "the server's step", symbol="eta", above=0)
    server_momentum: float = setting(
        0.9, "how much of the momentum stays in a round", symbol="beta_1", least=0, most=0.9999
    )
    server_decay: float = setting(
        0.99, "how much of the second moment stays in a round", symbol="beta_2", least=0, most=0.9999
    )
    server_damping: float = setting(0.001, "added to the root of the second moment", symbol="tau", above=0)

    decays = ("server_lr",)
    lower_space = ("y", "momentum", "second")
    refuses = {"local": "the server takes the steps of Adam, on one y of all clients: use fedavg"}

    class State(NamedTuple):
        x: Variable
        y: Tensor
        momentum: Tensor
        second: Tensor

    def init(self, fed: Federation) -> Any:
        x, y = fed.initial()
        return self.State(x, y, torch.zeros_like(y), torch.full_like(y, self.server_damping**2))

    def round(self, fed: Federation, state: Any) -> Any:
        change = self.change(fed, state)
        momentum = self.server_momentum * state.momentum + (1 - self.server_momentum) * change
        second = self.server_decay * state.second + (1 - self.server_decay) * change**2
        step = momentum / (second.sqrt() + self.server_damping)
        return self.State(state.x, state.y + self.server_lr * step, momentum, second)

    def change(self, fed: Federation, state: Any) -> Tensor:
        """Return d. One local step is linear in the gradients, so engines may compute one of their mean."""
        if self.num_local_steps == 1 and self.num_local_epochs is None:
            return -self.lr_lower * fed.mean(self.lower_gradient, x=state.x, y=state.y).q
        return fed.mean(self.local_steps, x=state.x, y=state.y).y - state.y

    lower_gradient = lower_gradient
