"""FedNoRo, compact: noisy clients by their losses per class, and training that trusts them less.

Use it when you need the published rival that models noisy clients instead of noisy samples. It
assumes that some clients have right labels; it needs no clean samples, except for the guard. Every
client's gradient reaches the server, so secure sums cannot be used.

First stage: W is trained on the given labels with adjusted scores for num_warm_rounds rounds. Then

    l_ic = mean loss of the samples of client i with the label c; the least of all clients if none
    scaled to [0, 1] over clients for each c;  noisy clients: upper part of a mixture of two Gaussians

Second stage, in the rounds that train the `cleaned` classifier, with scores s at the common model,
a_i = log of the shares of the labels at the client i, and lambda rising to its largest value:

    gradient at a clean client:  softmax(s + a_i) - e_label
    at a noisy client:           (1 - lambda) (softmax(s + a_i) - e_label)
                                 + lambda (softmax(s) - softmax(s / tau))      distillation
    weight of client i:          n_i exp(-d_i / max d),  d_i = distance of its model from the nearest
                                 model of a clean client, and 0 at clean clients

l2 is chosen by the losses of the given labels with these scores on the fold, which count 1 - lambda at
noisy clients: their other part follows the model itself. The first stage has the smallest l2 then.

At the end x has the labels that noisy clients learned from, q = (1 - lambda) e_label + lambda
softmax(s / tau), and the given labels of clean clients, ranked by 0.001 softmax(s).

Reference: Wu, Yu, Jiang, Cheng, Yan, "FedNoRo: Towards Noise-Robust Federated Learning by Addressing
Class Imbalance and Label Noise Heterogeneity", IJCAI 2023. Thresholds and the ramp of lambda,
exp(-5 (1 - t / num_fit_rounds)^2), follow the published code.

Deviations: (1) Models are linear in given features and take one step per round on a bound of the
loss, so local models differ by their gradients, and the teacher is the student before its step.
(2) One mixture with diagonal covariances from two means, not the majority of nine. (3) The method
flags nothing; the flags here are those of q. (4) Clean samples of all clients count as further
samples, with cross-entropy, in the gradient of their client. (5) Shares of labels count one sample
more of each class.

Bias: where all clients are equally noisy, half of them are taken for clean, and their labels are
learned as they are.

Cost of a whole run: num_warm_rounds + 1 rounds of C D floats; then the rounds of `as_given`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedbilevel.detectors import _rows
from fedbilevel.detectors._classifiers import Part, numbers
from fedbilevel.detectors._mixture import upper_part
from fedbilevel.detectors._state import State
from fedbilevel.detectors._training import trained
from fedbilevel.detectors.detector import Detector
from fedbilevel.federation.algorithm import Federation, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.settings import setting
from fedbilevel.tasks import soft_labels

RANKED = 0.001  # share of the probabilities in x of clean clients


@dataclass(frozen=True, kw_only=True)
class FedNoRo(Detector):
    statistics = (*Detector.statistics, "noisy")
    num_passes: ClassVar[int] = 1
    num_warm_rounds: int = setting(10, "rounds of training before noisy clients are sought", least=1)
    distil: float = setting(0.8, "largest weight of distillation at noisy clients", symbol="lambda", least=0, most=1)
    heat: float = setting(0.8, "temperature of the teacher", symbol="tau", above=0)
    targets: ClassVar[Literal["soft"]] = "soft"  # type: ignore[misc]  # every sample is used

    def detect(self, fed: Federation, state: State) -> State:
        weights = trained(fed.mean, self.adjusted, state, self.num_warm_rounds, self.fixed_l2())
        found = fed.gather(self.indicators, weights=weights, centre=state.centre, scale=state.scale)
        noisy = (upper_part(scaled_losses(found.losses.double(), found.numbers.double())) > 0.5).to(weights)
        return state._replace(found={"noisy": [int(one) for one in noisy]})

    def summed(self, fed: Federation, state: State) -> Any:
        noisy = state.y.new_tensor(state.found["noisy"])
        part: Part = "rest" if self.choosing(state) else "all"
        doubt = self._doubt(fed.iteration)
        rows = fed.gather(self.distilled, ahead=state.ahead, noisy=noisy, doubt=doubt, part=part, **state.units)
        slopes, weights = [], []
        for slope in rows.slope.double().view(len(noisy), -1, 2, len(state.y)).unbind(1):
            trust = nearness(slope[:, 0] / rows.weight.double()[:, :1], noisy.bool())
            both = torch.stack([trust, torch.ones_like(trust)], dim=1)
            slopes.append((both[:, :, None] * slope).mean(0).flatten())
            weights.append((both * rows.weight.double()).mean(0))
        return SimpleNamespace(slope=torch.cat(slopes), weight=torch.cat(weights))

    def fold_losses(self, fed: Federation, state: State) -> Tensor:
        noisy = state.y.new_tensor(state.found["noisy"])
        doubt = self._doubt(fed.iteration)
        losses: Tensor = fed.mean(
            self.adjusted_fold, models=state.models, noisy=noisy, doubt=doubt, **state.units
        ).losses
        return losses

    def _guarded(self, fed: Federation, state: State) -> State:
        noisy = state.y.new_tensor(state.found["noisy"])
        x = fed.mean(self.answers, models=state.models, noisy=noisy, **state.units).x
        estimated = self._estimated(fed, state._replace(x=x))  # of the labels that only now are there
        return super()._guarded(fed, estimated._replace(found={**estimated.found, **state.found}))

    def _doubt(self, iteration: int) -> float:
        """Return lambda in an outer iteration."""
        left = 1 - (iteration - self.num_passes) / self.num_fit_rounds
        return self.distil * math.exp(-5 * left**2)

    @phase
    def adjusted(self, clients: Clients, weights: Tensor, centre: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Return the slope of cross-entropies of adjusted scores, and the number of samples."""
        slopes, counts = [], []
        for z, label, zc, clean in _both(clients, centre, scale):
            model = weights.view(z.shape[1], -1)
            given = _rows.given(label, model.shape[1], z)
            gap = (z @ model + _log_shares(given)).softmax(1) - given
            rest = (zc @ model).softmax(1) - _rows.given(clean, model.shape[1], z)
            slopes.append((z.T @ gap + zc.T @ rest).flatten())
            counts.append(z.new_tensor([len(z) + len(zc)]))
        return {"slope": torch.stack(slopes), "weight": torch.stack(counts)}

    @phase
    def indicators(self, clients: Clients, weights: Tensor, centre: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Return sums of losses and numbers of training samples by label."""
        losses, numbers = [], []
        for z, label, _, _ in _both(clients, centre, scale):
            model = weights.view(z.shape[1], -1)
            given = _rows.given(label, model.shape[1], z)
            losses.append(-(given * (z @ model).log_softmax(1)).sum(0))
            numbers.append(given.sum(0))
        return {"losses": torch.stack(losses), "numbers": torch.stack(numbers)}

    @phase
    def distilled(
        self, clients: Clients, ahead: Tensor, noisy: Tensor, centre: Tensor, scale: Tensor, doubt: float, part: Part
    ) -> dict[str, Tensor]:
        """Return the slopes of all classifiers, and the numbers of samples of both kinds."""
        slopes, counts = [], []
        for number, (z, label, zc, clean), used in zip(
            clients.ids.tolist(), _both(clients, centre, scale), numbers(clients, part), strict=True
        ):
            models = ahead.view(-1, z.shape[1], len(clients.host.y0) // z.shape[1])
            given, checked = (_rows.given(some, models.shape[2], z) for some in (label, clean))
            shares, z, given = _log_shares(given), z[used], given[used]
            own = []
            for i, model in enumerate(models):
                score = z @ model
                gap = (score if i % 2 else score + shares).softmax(1) - given  # the second of each pair is plain
                if bool(noisy[number]) and i % 2 == 0:
                    gap = (1 - doubt) * gap + doubt * (score.softmax(1) - (score / self.heat).softmax(1))
                own.append((z.T @ gap + zc.T @ ((zc @ model).softmax(1) - checked)).flatten())
            slopes.append(torch.cat(own))
            counts.append(z.new_tensor([len(z) + len(zc)] * 2))
        return {"slope": torch.stack(slopes), "weight": torch.stack(counts)}

    @phase
    def adjusted_fold(
        self, clients: Clients, models: Tensor, noisy: Tensor, centre: Tensor, scale: Tensor, doubt: float
    ) -> dict[str, Tensor]:
        """Return sums of losses on the fold: those of given labels, weighted as in training."""
        rows = []
        for number, (z, label, _, _), used in zip(
            clients.ids.tolist(), _both(clients, centre, scale), numbers(clients, "fold"), strict=True
        ):
            given = _rows.given(label, len(clients.host.y0) // z.shape[1], z)
            own = []
            for i, model in enumerate(models.view(-1, z.shape[1], given.shape[1])):
                score = z[used] @ model
                logs = (score if i % 2 else score + _log_shares(given)).log_softmax(1)
                weight = 1 - doubt if bool(noisy[number]) and i % 2 == 0 else 1.0
                own.append(-weight * (given[used] * logs).sum())
            rows.append(torch.stack(own))
        return {"losses": torch.stack(rows)}

    @phase
    def answers(self, clients: Clients, models: Tensor, noisy: Tensor, centre: Tensor, scale: Tensor) -> dict[str, Any]:
        """Keep the labels that were learned from as x."""
        x = []
        for number, (z, label, _, _) in zip(clients.ids.tolist(), _both(clients, centre, scale), strict=True):
            score = z @ models.view(2, z.shape[1], -1)[0]
            given = _rows.given(label, score.shape[1], z)
            doubt = bool(noisy[number])
            part, other = (self.distil, (score / self.heat).softmax(1)) if doubt else (RANKED, score.softmax(1))
            x.append(soft_labels.as_x(((1 - part) * given + part * other).clamp(min=1e-30).log(), label))
        return {"x": clients.padded(x)}


def scaled_losses(losses: Tensor, numbers: Tensor) -> Tensor:
    """Return mean losses (clients, C) by label, scaled to [0, 1] over clients; equal ones become 0."""
    means = torch.where(numbers > 0, losses / numbers.clamp(min=1), torch.full_like(losses, torch.inf))
    least = means.min(0).values
    least = torch.where(least.isfinite(), least, torch.zeros_like(least))  # a label that no client has
    above = torch.where(numbers > 0, means, least) - least
    return above / above.max(0).values.clamp(min=1e-12)


def nearness(models: Tensor, noisy: Tensor) -> Tensor:
    """Return exp(-d_i / max d) (n,): d_i is the distance of a noisy client from the nearest clean one."""
    if not bool(noisy.any()) or bool(noisy.all()):
        return models.new_ones(len(models))
    gaps = torch.cdist(models, models[~noisy], compute_mode="donot_use_mm_for_euclid_dist").min(1).values
    gaps = torch.where(noisy, gaps, torch.zeros_like(gaps))
    return (-gaps / gaps.max().clamp(min=1e-30)).exp()


def _log_shares(given: Tensor) -> Tensor:
    """Return log of the shares of the labels at a client, with one sample more of each class."""
    counts = given.sum(0) + 1
    return (counts / counts.sum()).log()


def _both(clients: Clients, centre: Tensor, scale: Tensor) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return rows and labels of training samples, and of clean samples, of every client."""
    found = []
    for train, val in zip(clients.samples("train"), clients.samples("val"), strict=True):
        checked = _rows.trusted(val)
        found.append(
            (
                _rows.standardised(train, centre, scale),
                train["label"],
                _rows.standardised(checked, centre, scale),
                checked["label"],
            )
        )
    return found
