"""FedAvg on the lower level alone: local SGD on y and one average; x stays at its initial value.

Use it when there is only a model y to train, or as the baseline that a bilevel method must beat. It
works for all scopes and never uses the upper loss. It costs one round of d_y floats per outer
iteration.

    y_i <- y_i - gamma * g_y,i(x_0, y_i)   for I local steps;   y = mean of y_i

Reference: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017.

Deviations: (1) Clients are averaged by the problem's weights, which are equal by default. (2) With
a local lower level there is no average, so every client trains alone.

Bias: with I > 1, constant steps and heterogeneous clients, y converges to a point at a distance
proportional to the step.

Cost per outer iteration: 1 round; d_y floats up, d_y down (and d_x once, for the constant x); per
client I of g_y.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, Variable, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.settings import StepSize, setting, step_size


@dataclass(frozen=True, kw_only=True)
class FedAvg(ServerAlgorithm):
    lr_lower: StepSize = step_size(0.1, "step of y", symbol="gamma")
    num_local_steps: int | tuple[int, ...] = setting(5, "local steps between rounds", symbol="I", least=1)

    learns_x = False

    class State(NamedTuple):
        x: Variable
        y: Variable

    def init(self, fed: Federation) -> State:
        return self.State(*fed.initial())

    def round(self, fed: Federation, state: State) -> State:
        return self.State(state.x, fed.mean(self.local_steps, x=state.x, y=state.y).y)

    @phase
    def local_steps(self, clients: Clients, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        y = clients.rows(y)
        for step in clients.steps(self.num_local_steps):
            y = step.where(y - self.lr_lower * clients.lower_grad(x, y, step.batch("train", "B")), y)
        return {"y": y}
