"""FedAvg+: FedAvg on the lower level, then every client tunes its own copy of y.

Use it when you need a simple baseline for personalisation: a common model and some tuning steps on
each client's own data. It measures the tuned copies and never uses the upper loss. It costs one
round of d_y floats per outer iteration and T more gradients per client.

    y_i <- y_i - gamma * g_y,i(x_0, y_i)   for I local steps;   y = mean of y_i
    v_i <- v_i - gamma * g_y,i(x_0, v_i)   from v_i = y, for T tuning steps

v_i never leaves its client, and no other value depends on it.

Reference: Jiang, Konecny, Rush, Kannan, "Improving Federated Learning Personalization via Model
Agnostic Meta Learning", arXiv:1909.12488, 2019, which the HGP paper cites for this baseline.
Written from memory of the literature: no faithful reproduction is claimed.

Deviations: (1) Copies are tuned in every outer iteration, so that a measurement at any time shows
them; the y of the run is the same as without tuning. (2) Tuning uses the step of training and plain
gradient steps. (3) A client outside the cohort keeps the copy of its last round (at first the
initial point). (4) With a local lower level there is no average, and the copy is T steps ahead of a
client that trains alone.

Bias: y has the bias of FedAvg. With many tuning steps v_i tends to the minimiser of client i's own
loss, whatever y is.

Cost per outer iteration: 1 round; d_y floats up, d_y down (2 d_y if the client was not in the last
cohort, or at first; d_x once); per client I + T of g_y.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.federation.algorithm import Federation, Variable, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.problem.problem import Scopes
from fedbilevel.settings import setting


@dataclass(frozen=True, kw_only=True)
class FedAvgPlus(FedAvg):
    num_tuning_steps: int = setting(5, "steps of every client on its own copy of the new y", symbol="T", least=0)

    lower_space = ("y", "tuned")

    class State(NamedTuple):
        x: Variable
        y: Variable  # the tuned copies, which are measured
        sent: Variable  # the y that travels

    def kept_names(self, scopes: Scopes) -> set[str]:
        return {*super().kept_names(scopes), "tuned"}

    def init(self, fed: Federation) -> State:  # type: ignore[override]
        x, y = fed.initial()
        return self.State(x, fed.start("tuned"), y)

    def round(self, fed: Federation, state: State) -> State:  # type: ignore[override]
        y = fed.mean(self.local_steps, x=state.x, y=state.sent).y
        return self.State(state.x, fed.mean(self.tune, x=state.x, y=y).tuned, y)

    @phase
    def tune(self, clients: Clients, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        tuned = clients.rows(y)
        for step in clients.steps(self.num_tuning_steps):
            tuned = tuned - self.lr_lower * clients.lower_grad(x, tuned, step.batch("train", "tune"))
        return {"tuned": tuned}
