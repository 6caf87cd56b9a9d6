"""FedAvg on the lower level alone: local SGD on y and one average; x stays at its initial value.

Use it when there is only a model y to train, or as the baseline that a bilevel method must beat. It
works for all scopes and never uses the upper loss. It costs one round of d_y floats per outer
iteration.

    y_i <- y_i - gamma * g_y,i(x_0, y_i)   for I local steps;   y = mean of y_i

With `num_local_epochs`, a client takes as many steps as make this number of passes over its samples,
so clients with more samples take more steps. With `momentum`, the direction is v_i <- beta v_i +
g_y,i, from zero in every round.

Reference: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017.

Deviations: (1) Clients are averaged by the problem's weights, which are equal by default. (2) With
a local lower level there is no average, so every client trains alone.

Bias: with I > 1, constant steps and heterogeneous clients, y converges to a point at a distance
proportional to the step.

Cost per outer iteration: 1 round; d_y floats up, d_y down (and d_x once, for the constant x); per
client I of g_y, or as many as its epochs have batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, Variable, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.federation.probing import Found
from fedbilevel.settings import StepSize, setting, step_size


@dataclass(frozen=True, kw_only=True)
class FedAvg(ServerAlgorithm):
    lr_lower: StepSize = step_size(0.1, "step of y", symbol="gamma")
    num_local_steps: int | tuple[int, ...] = setting(5, "local steps between rounds", symbol="I", least=1)
    num_local_epochs: int | None = setting(
        None, "passes over a client's samples between rounds, instead of local steps", symbol="E", least=1
    )
    momentum: float = setting(0.0, "momentum of the local steps of a round", symbol="beta", least=0, most=0.9999)

    learns_x = uses_products = False

    class State(NamedTuple):
        x: Variable
        y: Variable

    def init(self, fed: Federation) -> State:
        return self.State(*fed.initial())

    def round(self, fed: Federation, state: State) -> State:
        return self.State(state.x, fed.mean(self.local_steps, x=state.x, y=state.y).y)

    def auto_steps(self, found: Found) -> dict[str, float]:
        return {name: (1 - self.momentum) * step for name, step in super().auto_steps(found).items()}

    @phase
    def local_steps(self, clients: Clients, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"y": self.descend(clients, x, y)}

    def descend(self, clients: Clients, x: Tensor, y: Tensor, prox_weight: float = 0.0) -> Tensor:
        """Return each client's y after its local steps, with a pull towards the y that was sent."""
        y = sent = clients.rows(y)
        v: Tensor | None = None
        num = self.num_local_epochs
        for step in clients.steps(self.num_local_steps) if num is None else clients.passes(num, "train"):
            g = clients.lower_grad(x, y, step.batch("train", "B"))
            g = g + prox_weight * (y - sent) if prox_weight else g
            if self.momentum:
                v = g if v is None else step.where(self.momentum * v + g, v)
            y = step.where(y - self.lr_lower * (g if v is None else v), y)
        return y
