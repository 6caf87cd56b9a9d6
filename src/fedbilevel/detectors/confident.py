"""Confident learning between clients: as many labels are flagged as the counts of mistakes say.

Use it when you need the rival of label_em with sums only. It needs no clean samples, except for the
guard. It costs three rounds more than `as_given`.

With p_j = softmax(b S_j), the leave-one-out probabilities of `own_loss`:

    t_c = mean of p_jc over the samples with the label c
    J_lc = number of samples with the label l and c = argmax of p_jk over k with p_jk >= t_k
    n_lc = (number of labels l) J_lc / sum_k J_lk

For each pair l != c, the n_lc samples with the label l and the largest margin p_jc - p_jl are
flagged. The server finds this cut from counts of margins in 200 bins, so samples in the bin of the
cut are flagged all or not at all. x has q[label] = p[label] / 2 for flagged samples and
(1 + p[label]) / 2 for others: it holds flags and a ranking, and no probabilities.

Reference: Northcutt, Jiang, Chuang, "Confident Learning: Estimating Uncertainty in Dataset Labels",
JAIR 2021 (prune by noise rate).

Deviations: (1) Probabilities are those of a ridge regression without the sample itself, instead of
cross validation. (2) Cuts are rounded to bins, towards fewer flags.

Bias: counts at the thresholds t are biased where the classifier is, and with most labels wrong they
break down unless the scores are regularised (`ridge`).

Cost of a whole run: the rounds of `as_given`, in which a client sends D (D + 1) / 2 + O(C D) floats,
and three more, with 200 C^2 counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedbilevel.detectors import _rows
from fedbilevel.detectors._state import State
from fedbilevel.detectors.detector import Detector
from fedbilevel.detectors.own_loss import OwnLoss
from fedbilevel.federation.algorithm import Federation, phase
from fedbilevel.federation.clients import Clients

MARGINS = 200  # bins of the margin, from -1 to 1


@dataclass(frozen=True, kw_only=True)
class Confident(OwnLoss):
    statistics = (*Detector.statistics, "thresholds", "cuts")

    def detect(self, fed: Federation, state: State) -> State:
        state = self.scored(fed, state)
        now = {"score": state.score, "heat": state.heat}
        means = fed.mean(self.confidences, **now)
        thresholds = means.sums / means.counts.clamp(min=1e-12)
        joint = fed.mean(self.joint_counts, thresholds=thresholds, **now)
        num_classes = len(thresholds)
        counts = joint.counts.double().view(num_classes, num_classes)
        share = counts / counts.sum(1, keepdim=True).clamp(min=1e-12)
        asked = share * means.counts.double()[:, None]  # n_lc, per client
        margins = joint.margins.double().view(num_classes, num_classes, MARGINS)
        above = margins.flip(2).cumsum(2).flip(2)
        fits = above <= asked[:, :, None] + 1e-9  # bins from which on no more than n_lc samples lie
        first = torch.where(fits.any(2), fits.double().argmax(2), MARGINS)
        first[range(num_classes), range(num_classes)] = MARGINS
        cuts = (first / MARGINS * 2 - 1).flatten().to(state.y.dtype)
        # without W there is no cut at a false-discovery rate, because x holds no probabilities
        return state._replace(x=fed.mean(self.flagged, cuts=cuts, **now).x, weights=torch.zeros_like(state.weights))

    @phase
    def confidences(self, clients: Clients, score: Tensor, heat: float) -> dict[str, Tensor]:
        """Return sums of p[label] and numbers of samples by given label."""
        sums, counts = [], []
        for p, label in _probabilities(clients, score, heat):
            given = _rows.given(label, p.shape[1], p)
            sums.append((given * p).sum(0))
            counts.append(given.sum(0))
        return {"sums": torch.stack(sums), "counts": torch.stack(counts)}

    @phase
    def joint_counts(self, clients: Clients, score: Tensor, heat: float, thresholds: Tensor) -> dict[str, Tensor]:
        """Return J, and numbers of samples by label, class and margin."""
        counts, margins = [], []
        for p, label in _probabilities(clients, score, heat):
            num = p.shape[1]
            sure = p >= thresholds
            guess, some = torch.where(sure, p, torch.zeros_like(p)).argmax(1), sure.any(1)
            place = label.long() * num + guess
            counts.append(place[some].bincount(minlength=num**2).to(p.dtype))
            bins = _bin(p - p.gather(1, label.long()[:, None]))
            flat = (label.long()[:, None] * num + torch.arange(num, device=p.device)) * MARGINS + bins
            margins.append(flat.flatten().bincount(minlength=num**2 * MARGINS).to(p.dtype))
        return {"counts": torch.stack(counts), "margins": torch.stack(margins)}

    @phase
    def flagged(self, clients: Clients, score: Tensor, heat: float, cuts: Tensor) -> dict[str, Any]:
        """Keep flags and ranks as x."""
        x = []
        for p, label in _probabilities(clients, score, heat):
            own = p.gather(1, label.long()[:, None])
            edges = torch.round((cuts.view(p.shape[1], -1)[label.long()] + 1) / 2 * MARGINS)
            bad = (_bin(p - own) >= edges).any(1, keepdim=True)
            x.append(marked(p, label, bad))
        return {"x": clients.padded(x)}


def marked(p: Tensor, label: Tensor, bad: Tensor) -> Tensor:
    """Return x, flat, with flags (n, 1) and a ranking by the probability of the label."""
    own = p.gather(1, label.long()[:, None])
    right = torch.where(bad, own / 2, (1 + own) / 2).clamp(1e-6, 1 - 1e-6)
    return _rows.x_with_right(p, label, right)


def _bin(margin: Tensor) -> Tensor:
    return ((margin + 1) / 2 * MARGINS).long().clamp(0, MARGINS - 1)


def _probabilities(clients: Clients, score: Tensor, heat: float) -> list[tuple[Tensor, Tensor]]:
    return [
        ((heat * own.view(len(train["label"]), -1)).softmax(1), train["label"])
        for train, own in zip(clients.samples("train"), clients.unpadded(score), strict=True)
    ]
