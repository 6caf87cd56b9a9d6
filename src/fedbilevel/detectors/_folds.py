"""Scores of training samples by logistic classifiers that have not seen the sample's fold.

The training samples of every client, and its clean samples that are not held for the guard, are
divided into K folds by address. For every fold k,

    W_k = argmin of (sum of w_j CE(W; z_j, t_j) over training and clean samples outside of k) / (sum of w_j)
          + l2/2 |W|^2,      S_j = z_j' W_k for the samples j of the fold k

with posteriors as targets t_j and w_j = 1, or with the given labels and their posteriors as weights
w_j. All W_k are trained side by side in the same rounds, from W = 0. The scores replace the present
ones only if the clean samples, each scored without itself, are more likely by them, at the best b of
each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbilevel.detectors import _rows
from fedbilevel.detectors._classifiers import learned_from, scores
from fedbilevel.detectors._descent import bound_of, bounded_step
from fedbilevel.detectors._scored import Scored
from fedbilevel.detectors._state import State
from fedbilevel.federation.algorithm import Federation, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.settings import setting
from fedbilevel.tasks import soft_labels

CLOSED = 1.0  # in place of a log-likelihood: no scores are compared with it any more
FOLD_HEATS = tuple(2.0 ** (i / 8) for i in range(-16, 25))  # 1/4 to 8


@dataclass(frozen=True, kw_only=True)
class Folds(Scored):
    num_folds: int = setting(5, "parts of the samples, of which each is scored by the others", symbol="K", least=2)
    num_fold_rounds: int = setting(20, "rounds that train the classifiers of the folds", least=1)

    def by_folds(self, fed: Federation, state: State, targets: str) -> State:
        """Return the state with W_k as weights, S and b, or the present ones if these are more likely.

        targets: "soft" or "weighted", what W_k learn from.
        """
        gram = _rows.unpacked(state.gram.double())
        last = now = gram.new_zeros(self.num_folds, len(gram), len(state.y) // len(gram))
        age, l2 = [0] * self.num_folds, self.fixed_l2()
        for _ in range(self.num_fold_rounds):
            flat = now.flatten().to(state.y.dtype)
            found = fed.mean(self.fold_slopes, weights=flat, x=state.x, targets=targets, **state.units)
            weight = found.weight.double()[:, None, None]
            slope = found.slope.double().view(now.shape) / weight + l2 * now
            steps = [bounded_step(*one) for one in zip(bound_of(gram, weight, l2), slope, now, last, age, strict=True)]
            new, further, age = (list(part) for part in zip(*steps, strict=True))
            last, now = torch.stack(new), torch.stack(further)
        weights = last.flatten().to(state.y.dtype)
        fit = fed.mean(self.fold_fit, weights=weights, **state.units).fit.double()
        if not float(fit.max()) > float(state.learned[0]):
            closed = torch.full_like(state.learned[:1], CLOSED)  # x stays, and so would this answer
            return state._replace(learned=torch.cat([closed, state.learned[1:]]))
        score = fed.mean(self.fold_scores, weights=weights, **state.units).score
        learned = torch.cat([fit.max()[None], state.learned[1:]])
        return state._replace(weights=weights, score=score, heat=FOLD_HEATS[int(fit.argmax())], learned=learned)

    @phase
    def fold_slopes(
        self, clients: Clients, weights: Tensor, x: Tensor, centre: Tensor, scale: Tensor, targets: str
    ) -> dict[str, Tensor]:
        """Return sum w z (p - t)' over the samples outside of every fold, and the sums of w."""
        slopes, counts = [], []
        for own, (z, label, fold), (zc, checked, clean_fold) in zip(
            clients.unpadded(x), self.divided(clients, "train", centre, scale),
            self.divided(clients, "val", centre, scale), strict=True,
        ):  # fmt: skip
            parts = [(z, *learned_from(soft_labels.posterior(own, label), label, targets), fold)]
            right = _rows.given(checked, parts[0][1].shape[1], z)
            parts.append((zc, right, torch.ones_like(right[:, :1]), clean_fold))
            sums, num = [], []
            for rows, target, mass, part in parts:
                outside = mass * (part[:, None] != torch.arange(self.num_folds, device=z.device))
                gaps = (scores(rows, weights, target.shape[1]).softmax(2) - target[:, None]) * outside[:, :, None]
                sums.append(gaps.flatten(1).T @ rows)
                num.append(outside.sum(0))
            slopes.append((sums[0] + sums[1]).view(self.num_folds, -1, z.shape[1]).transpose(1, 2).flatten())
            counts.append(num[0] + num[1])
        return {"slope": torch.stack(slopes), "weight": torch.stack(counts)}

    @phase
    def fold_fit(self, clients: Clients, weights: Tensor, centre: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Return the log-likelihood of the clean samples at every b."""
        fits = []
        for z, label, fold in self.divided(clients, "val", centre, scale):
            score, own = self.out_of_fold(z, weights, fold), label.long()[:, None]
            fits.append(torch.stack([(b * score).log_softmax(1).gather(1, own).sum() for b in FOLD_HEATS]))
        return {"fit": torch.stack(fits)}

    @phase
    def fold_scores(self, clients: Clients, weights: Tensor, centre: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Keep S."""
        rows = []
        for z, _, fold in self.divided(clients, "train", centre, scale):
            rows.append(self.out_of_fold(z, weights, fold).flatten())
        return {"score": clients.padded(rows)}

    def out_of_fold(self, z: Tensor, weights: Tensor, fold: Tensor) -> Tensor:
        """Return the scores (n, C) of samples, each by the classifier that has not seen its fold."""
        every = scores(z, weights, len(weights) // (self.num_folds * z.shape[1]))
        return every[torch.arange(len(z), device=z.device), fold]

    def divided(
        self, clients: Clients, role: str, centre: Tensor, scale: Tensor
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return z, labels and folds of the samples of every client; of "val", only clean samples."""
        found = []
        for client, fields in zip(clients.ids.tolist(), clients.samples(role), strict=True):
            used = fields if role == "train" else _rows.trusted(fields)
            fold = self.folds(clients, role, client, len(used["label"]))
            found.append((_rows.standardised(used, centre, scale), used["label"], fold))
        return found

    def folds(self, clients: Clients, purpose: str, client: int, num: int) -> Tensor:
        """Return the folds of the samples of a client, which its number and the seed determine."""
        place = clients.host.stream.order(f"folds {purpose}", client, num, iteration=0).argsort()
        return ((place + client) % self.num_folds).to(clients.device)
