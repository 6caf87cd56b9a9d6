"""FedCorr, compact: noisy clients by the dimension of their predictions, noisy samples by their loss.

Use it when you need the published rival that corrects labels. It assumes that some clients have
right labels; it needs no clean samples, except for the guard. It costs 65 rounds of detection, in
which clients send sums, and one number each by which the server tells noisy clients from others.

First stage, in each outer iteration but the last: train W on the present labels for a few rounds.
Each client takes num_local_steps steps more on its own labels. Let p_j be the probabilities of W and
o_j those of the client's own model.

    LID_j = - k / sum over the k nearest o_i of log(|o_j - o_i| / r),   r = distance of the k-th
    noisy clients: upper part of a mixture of two Gaussians of the clients' mean LID, summed so far
    noisy samples of a noisy client: upper part of a mixture of the losses -log p_j[label_j]
    noise level m_i: share of noisy samples; 0 at other clients
    the noisy samples with the largest losses (share pi), if max p_j >= theta: label_j <- argmax p_j

Second stage, in the last of these outer iterations: train W on clients with m_i <= kappa alone; then
at all other clients label_j <- argmax p_j where max p_j >= theta. Third stage: the `cleaned`
classifier of `Detector` is trained on the labels of all clients.

Where l2 is chosen, it is that of the third stage; the others have the smallest one of the grid.

x holds q = (1 - 0.001) e_label + 0.001 p for the corrected labels: a label is flagged if it was
changed. It holds flags and a ranking, and no probabilities.

Reference: Xu, Chen, Quek, Chong, "FedCorr: Multi-Stage Federated Learning for Label Noise
Correction", CVPR 2022. The second stage and the default thresholds follow the published code.

Deviations: (1) Models are linear in given features and take steps on a bound of the loss from sums
of all clients, one step per round; the clients' own models serve to find noisy clients only, so the
proximal term, which keeps them near the common model, is absent. (2) There is no mixup. (3) All
clients take part in every round. (4) The mixtures start from two means and have diagonal
covariances. (5) Losses are those of the common model in one outer iteration; the published code sums
losses of the clients' own models, which here fit the wrong labels of few samples exactly. (6) Clean
samples of all clients count as further training samples.

Bias: where all clients are equally noisy, half of them are taken for clean, and their labels stay.
With few features a linear model cannot follow wrong labels, so the dimension does not tell noisy
clients from others.

Cost of a whole run: with P = num_passes, (P - 1) (num_warm_rounds + 1) + num_tune_rounds rounds of
C D floats, P - 1 of them of one float; then the rounds of `as_given`. The k nearest rows cost n_i^2
distances per outer iteration at a client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedbilevel.detectors import _rows
from fedbilevel.detectors._descent import bound_of, bounded_step
from fedbilevel.detectors._mixture import upper_part
from fedbilevel.detectors._state import State
from fedbilevel.detectors._training import trained
from fedbilevel.detectors.detector import Detector
from fedbilevel.federation.algorithm import Federation, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.settings import setting
from fedbilevel.tasks import soft_labels

RANKED = 0.001  # share of the probabilities in x, which ranks samples of equal labels


@dataclass(frozen=True, kw_only=True)
class FedCorr(Detector):
    statistics = (*Detector.statistics, "noisy")
    num_passes: int = setting(6, "passes that correct labels; the last is stage two", least=2)  # type: ignore[misc]
    num_warm_rounds: int = setting(8, "rounds of training in each of the others", least=1)
    num_local_steps: int = setting(1, "steps of each client's own model after them", least=0)
    num_tune_rounds: int = setting(20, "rounds of training in the second stage", least=1)
    num_neighbours: int = setting(20, "nearest predictions in the local dimension", symbol="k", least=2)
    confidence: float = setting(0.5, "least probability of a new label", symbol="theta", above=0, most=1)
    relabel_share: float = setting(0.5, "share of the noisy samples that may change", symbol="pi", above=0, most=1)
    clean_level: float = setting(0.1, "noise level up to which a client trains the model", symbol="kappa", least=0)

    def detect(self, fed: Federation, state: State) -> State:
        last = fed.iteration == self.num_passes
        weights = trained(
            fed.mean, self.pulls, state, self.num_tune_rounds if last else self.num_warm_rounds, self.fixed_l2(),
            x=state.x, chosen=last,
        )  # fmt: skip
        if last:
            x = fed.mean(self.finished, x=state.x, weights=weights, **state.units).x
            return state._replace(x=x, weights=torch.zeros_like(weights))  # x holds no probabilities: no cut by rate
        dimension = fed.gather(self.dimensions, x=state.x, weights=weights, **state.units).dimension
        noisy = (upper_part(dimension[:, 0]) > 0.5).to(weights)
        x = fed.mean(self.corrected, x=state.x, weights=weights, noisy=noisy, **state.units).x
        return state._replace(x=x, weights=weights)

    def labels_of(self, state: State) -> str:
        return "soft" if self.targets == "auto" else self.targets  # corrected labels are trained on

    @phase
    def pulls(
        self, clients: Clients, x: Tensor, weights: Tensor, centre: Tensor, scale: Tensor, chosen: bool
    ) -> dict[str, Tensor]:
        """Return sum z (p - e_label)' over samples, and their number.

        chosen: only training samples of clients with little noise count.
        """
        slopes, counts = [], []
        levels = self._levels(clients)
        for train, val, own, level in zip(
            clients.samples("train"), clients.samples("val"), clients.unpadded(x), levels, strict=True
        ):
            num_classes = len(own) // len(train["label"])
            used = 0 if chosen and float(level) > self.clean_level else len(train["label"])
            label = torch.cat([_present(own, train["label"])[:used], _rows.trusted(val)["label"]])
            z = torch.cat(
                [
                    _rows.standardised(train, centre, scale)[:used],
                    _rows.standardised(_rows.trusted(val), centre, scale),
                ]
            )
            p = (z @ weights.view(z.shape[1], -1)).softmax(1)
            slopes.append((z.T @ (p - _rows.given(label, num_classes, z))).flatten())
            counts.append(z.new_tensor([len(z)]))
        return {"slope": torch.stack(slopes), "weight": torch.stack(counts)}

    @phase
    def dimensions(
        self, clients: Clients, x: Tensor, weights: Tensor, centre: Tensor, scale: Tensor
    ) -> dict[str, Tensor]:
        """Return the mean local dimension of a client's predictions, summed over outer iterations."""
        found = []
        for train, own in zip(clients.samples("train"), clients.unpadded(x), strict=True):
            label = _present(own, train["label"])
            found.append(local_dimensions(self._own(train, label, weights, centre, scale), self.num_neighbours).mean())
        now = torch.stack(found).to(weights.dtype)[:, None]
        total = now + clients.memory.read("dimension", default=torch.zeros_like(now))
        clients.memory.write(dimension=total)
        return {"dimension": total}

    @phase
    def corrected(
        self, clients: Clients, x: Tensor, weights: Tensor, noisy: Tensor, centre: Tensor, scale: Tensor
    ) -> dict[str, Any]:
        """Keep x with new labels at noisy clients, and each client's noise level.

        noisy: 1 for every noisy client of the federation, by client number.
        """
        kept, levels = [], []
        for number, train, own in zip(clients.ids.tolist(), clients.samples("train"), clients.unpadded(x), strict=True):
            p, label = self._predicted(train, weights, centre, scale), _present(own, train["label"])
            level = 0.0
            if bool(noisy[number]):
                loss = -p.gather(1, label[:, None])[:, 0].clamp(min=1e-30).log()
                num = int((upper_part(loss) > 0.5).sum())
                level = num / len(loss)
                first = loss.argsort(descending=True, stable=True)[: int(self.relabel_share * num)]
                sure = first[p[first].max(1).values >= self.confidence]
                label = label.clone()
                label[sure] = p[sure].argmax(1)
            kept.append(soft_labels.as_x(_ranked(p, label), train["label"]))
            levels.append(p.new_tensor([level]))
        clients.memory.write(level=torch.stack(levels))
        return {"x": clients.padded(kept)}

    @phase
    def finished(self, clients: Clients, x: Tensor, weights: Tensor, centre: Tensor, scale: Tensor) -> dict[str, Any]:
        """Keep x with new labels wherever a noisy client's prediction is confident."""
        kept = []
        for train, own, level in zip(clients.samples("train"), clients.unpadded(x), self._levels(clients), strict=True):
            p, label = self._predicted(train, weights, centre, scale), _present(own, train["label"])
            if float(level) > self.clean_level:
                label = torch.where(p.max(1).values >= self.confidence, p.argmax(1), label)
            kept.append(soft_labels.as_x(_ranked(p, label), train["label"]))
        return {"x": clients.padded(kept)}

    def _levels(self, clients: Clients) -> Tensor:
        nothing = torch.zeros(len(clients), 1, dtype=clients.dtype, device=clients.device)
        return clients.memory.read("level", default=nothing)

    def _predicted(self, train: dict[str, Tensor], weights: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
        z = _rows.standardised(train, centre, scale)
        return (z @ weights.view(z.shape[1], -1)).softmax(1)

    def _own(self, train: dict[str, Tensor], label: Tensor, weights: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
        """Return the probabilities of the client's own model."""
        z = _rows.standardised(train, centre, scale).double()
        last = ahead = weights.double().view(z.shape[1], -1)
        given = _rows.given(label, last.shape[1], z)
        bound = bound_of(z.T @ z, z.new_tensor(len(z)), self.fixed_l2())
        age = 0
        for _ in range(self.num_local_steps):
            slope = z.T @ ((z @ ahead).softmax(1) - given) / len(z) + self.fixed_l2() * ahead
            last, ahead, age = bounded_step(bound, slope, ahead, last, age)
        return (z @ last).softmax(1).to(weights.dtype)


def local_dimensions(rows: Tensor, num_neighbours: int) -> Tensor:
    """Return the local intrinsic dimension (n,) of every row, by its nearest rows."""
    num = min(num_neighbours, len(rows) - 1)
    if num < 2:
        return rows.new_zeros(len(rows))
    some = rows.double()
    gaps = torch.cdist(some, some, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(torch.inf)
    near = gaps.topk(num, largest=False, sorted=True).values.clamp(min=1e-12)
    return -num / (near / near[:, -1:]).log().sum(1).clamp(max=-1e-12)


def _present(own: Tensor, label: Tensor) -> Tensor:
    """Return the corrected labels that x stands for."""
    return soft_labels.posterior(own, label).argmax(1)


def _ranked(p: Tensor, label: Tensor) -> Tensor:
    """Return log q of labels, ranked by p."""
    return ((1 - RANKED) * _rows.given(label, p.shape[1], p) + RANKED * p).log()
