"""Robust losses: the classifier is trained on all labels as given, with a loss that doubts them.

Use it when you need the rival that changes the loss instead of the labels: generalised or symmetric
cross-entropy. It needs no clean samples, except for the guard, and no detection.

The `cleaned` classifier of `Detector` is the minimiser of

    (sum of losses of training and clean samples) / number + l2/2 |W|^2

with the losses of tasks/robust_losses.py; `plain` has cross-entropy. The same losses choose l2 on
the fold: a likelihood would ask for probabilities as flat as the noise, which these losses avoid.
At the end x has the
probabilities of the `cleaned` classifier, so a label is flagged if its own probability is below one
half.

References: Zhang, Sabuncu, NeurIPS 2018 (loss="gce"). Wang, Ma, Chen, Luo, Yi, Bailey, ICCV 2019
(loss="sce").

Deviations: (1) The papers flag nothing; the flags here are those of the trained classifier.
(2) Training takes steps on a bound of the loss of all clients, and therefore ends near the minimum
that FedAvg with short steps approaches. FedAvg itself is `fedavg` on the task data_cleaning with
the same setting `loss`. (3) Truncation of gce is omitted.

Bias: both losses are not convex, so the minimum depends on the start, W = 0. Where a wrong label is
more frequent than the right one, the loss trusts the wrong label.

Cost of a whole run: the rounds of `as_given`. No round is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from fedbilevel.detectors import _rows
from fedbilevel.detectors._state import State
from fedbilevel.detectors.detector import Detector
from fedbilevel.federation.algorithm import Federation, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.settings import setting
from fedbilevel.tasks import soft_labels
from fedbilevel.tasks.robust_losses import Robust


@dataclass(frozen=True, kw_only=True)
class RobustLoss(Detector):
    loss: Literal["gce", "sce"] = setting("gce", "generalised or symmetric cross-entropy")
    gce_power: float = setting(0.7, "exponent of gce: near 0 cross-entropy, 1 linear", symbol="q", above=0, most=1)
    sce_forward: float = setting(0.1, "weight of cross-entropy in sce", symbol="alpha", above=0)
    sce_reverse: float = setting(1.0, "weight of reverse cross-entropy in sce", symbol="beta", above=0)
    sce_floor: float = setting(-4.0, "logarithm of zero in sce", symbol="A", most=-0.01)
    targets: ClassVar[Literal["kept"]] = "kept"  # type: ignore[misc]  # all labels are used as they are given

    def robust(self) -> Robust:
        return Robust(self.loss, self.gce_power, self.sce_forward, self.sce_reverse, self.sce_floor)

    def losses(self, scores: Tensor, target: Tensor) -> Tensor:
        return self.robust().losses(scores, target)

    def gap(self, p: Tensor, target: Tensor) -> Tensor:
        return self.robust().share((p * target).sum(1, keepdim=True)) * (p - target)

    def steepest(self) -> float:
        return self.robust().steepest

    def _guarded(self, fed: Federation, state: State) -> State:
        x = fed.mean(self.answers, models=state.models, centre=state.centre, scale=state.scale).x
        return super()._guarded(fed, state._replace(x=x))

    @phase
    def answers(self, clients: Clients, models: Tensor, centre: Tensor, scale: Tensor) -> dict[str, Any]:
        """Keep the probabilities of the cleaned classifier as x."""
        x = []
        for train in clients.samples("train"):
            z = _rows.standardised(train, centre, scale)
            x.append(soft_labels.as_x((z @ models.view(2, z.shape[1], -1)[0]).log_softmax(1), train["label"]))
        return {"x": clients.padded(x)}
