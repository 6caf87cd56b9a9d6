"""FedProx on the lower level alone: FedAvg with a proximal term; x stays at its initial value.

Use it when FedAvg drifts because clients differ, or as a baseline for personalisation. It trains y
only. It costs the same as FedAvg: one round of d_y floats per outer iteration.

    y_i <- y_i - gamma * (g_y,i(x_0, y_i) + mu (y_i - y))   from y_i = y, for I local steps
    y = mean of y_i

Reference: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous
Networks", MLSys 2020. Written from memory of the literature, not from the paper's text: no faithful
reproduction is claimed. The HGP paper takes mu = 0.01, which is the default.

Deviations: (1) I gradient steps on the local loss replace a solution up to a given inexactness.
(2) Clients are averaged by the problem's weights, and a cohort is drawn in proportion to
them. (3) With a local
lower level there is no average: every client trains alone, with steps that the proximal term
shortens.

Bias: mu > 0 reduces the drift of local steps but does not remove it. Where local problems are
solved exactly, y converges to the point where mean (H_i + mu I)^-1 g_y,i(y) = 0 (quadratic g_i),
which is not the point where mean g_y,i = 0. Steps are stable for gamma (L + mu) < 2.

Cost per outer iteration: 1 round; d_y floats up, d_y down (and d_x once, for the constant x); per
client I of g_y.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.federation.algorithm import phase
from fedbilevel.federation.clients import Clients
from fedbilevel.federation.probing import Found
from fedbilevel.settings import setting


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    prox_weight: float = setting(
        0.01, "weight of the squared distance to the point that was sent", symbol="mu", least=0
    )

    def auto_steps(self, found: Found) -> dict[str, float]:
        return {"lr_lower": (1 - self.momentum) / (1 / found.lower + self.prox_weight)}

    @phase
    def local_steps(self, clients: Clients, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"y": self.descend(clients, x, y, self.prox_weight)}
