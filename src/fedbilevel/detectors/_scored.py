"""Detectors whose scores are those of a ridge regression without the scored sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbilevel.detectors import _rows
from fedbilevel.detectors._state import State
from fedbilevel.detectors.detector import Detector
from fedbilevel.federation.algorithm import Federation, phase
from fedbilevel.federation.clients import Clients


@dataclass(frozen=True, kw_only=True)
class Scored(Detector):
    def inverse(self, fed: Federation, state: State) -> Tensor:
        """Return A = (sum z z' over all samples of all clients + lam n)^-1."""
        gram = _rows.unpacked(state.gram.double())
        diagonal = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        return torch.linalg.inv(gram + self.ridge * float(state.counts[0]) * diagonal) / fed.num_clients

    def first(self, fed: Federation, state: State, sums: Tensor, loose: Tensor) -> State:
        """Return the state with W = A sums, its scores and the leverages h.

        sums: mean over clients of sum z target', (D, C). loose: marks the classes whose targets are
        the given labels; the sample itself is left out of their scores.
        """
        inverse = self.inverse(fed, state)
        weights = (fed.num_clients * inverse @ sums).flatten().to(state.y.dtype)
        sent = _rows.packed(inverse).to(state.y.dtype)
        found = fed.mean(
            self.first_scores, inverse=sent, weights=weights, loose=loose, centre=state.centre, scale=state.scale
        )
        return state._replace(score=found.score, leverage=found.leverage, inverse=sent, weights=weights)

    @phase
    def first_scores(
        self, clients: Clients, inverse: Tensor, weights: Tensor, loose: Tensor, centre: Tensor, scale: Tensor
    ) -> dict[str, Tensor]:
        """Keep h, once for every class, and the scores of the first W.

        loose: marks the classes without clean samples, whose scores come from the given labels.
        """
        matrix = _rows.unpacked(inverse)
        score, leverage = [], []
        for train in clients.samples("train"):
            z = _rows.standardised(train, centre, scale)
            model = weights.view(z.shape[1], -1)
            h = ((z @ matrix) * z).sum(1, keepdim=True).expand(-1, model.shape[1])
            own = _rows.given(train["label"], model.shape[1], z)
            score.append(torch.where(loose.bool(), _rows.leave_one_out(z, model, h, own), z @ model).flatten())
            leverage.append(h.flatten())
        return {"score": clients.padded(score), "leverage": clients.padded(leverage)}

    def clean_scores(
        self, clients: Clients, inverse: Tensor, weights: Tensor, copies: Tensor | None, centre: Tensor, scale: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Return scores of W and labels of the clean samples of every client, each scored without itself.

        copies: by class, how often a clean sample is counted in W; None: once.
        """
        matrix, found = _rows.unpacked(inverse), []
        for val in clients.samples("val"):
            checked = _rows.trusted(val)
            z = _rows.standardised(checked, centre, scale)
            model = weights.view(z.shape[1], -1)
            h = ((z @ matrix) * z).sum(1, keepdim=True)
            own = _rows.given(checked["label"], model.shape[1], z)
            score = _rows.leave_one_out(z, model, h, own if copies is None else copies * own)
            found.append((score, checked["label"]))
        return found
