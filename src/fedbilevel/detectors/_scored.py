"""Detectors whose scores come from a ridge regression without the scored sample, or from networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedbilevel.detectors import _rows
from fedbilevel.detectors._state import State
from fedbilevel.detectors.detector import Detector
from fedbilevel.federation.algorithm import Federation, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.settings import setting

LEAST = 1e-4  # class probabilities below it count as equal


@dataclass(frozen=True, kw_only=True)
class Scored(Detector):
    reads: Literal["features", "probabilities"] = setting(
        "features",
        "rows are features, scored by a ridge regression, or class probabilities by networks that have not seen the "
        "sample, whose logarithms are the scores",
    )

    def read(self, fed: Federation, state: State) -> State:
        """Return the state with the scores of networks."""
        num_classes = round(len(state.transition) ** 0.5)
        return state._replace(score=fed.mean(self.read_scores, num_classes=num_classes).score)

    @phase
    def read_scores(self, clients: Clients, num_classes: int) -> dict[str, Tensor]:
        """Keep the logarithms of the class probabilities, which are the first entries of a row."""
        return {"score": clients.padded([logs(rows, num_classes).flatten() for rows in clients.samples("train")])}

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
        found: list[tuple[Tensor, Tensor]] = []
        if self.reads == "probabilities":
            num_classes = len(weights) // (len(centre) + 1)
            checks = [_rows.trusted(val) for val in clients.samples("val")]
            return [(logs(checked, num_classes), checked["label"]) for checked in checks]
        matrix = _rows.unpacked(inverse)
        for val in clients.samples("val"):
            checked = _rows.trusted(val)
            z = _rows.standardised(checked, centre, scale)
            model = weights.view(z.shape[1], -1)
            h = ((z @ matrix) * z).sum(1, keepdim=True)
            own = _rows.given(checked["label"], model.shape[1], z)
            score = _rows.leave_one_out(z, model, h, own if copies is None else copies * own)
            found.append((score, checked["label"]))
        return found


def logs(fields: Mapping[str, Tensor], num_classes: int) -> Tensor:
    """Return logarithms of the class probabilities in the rows of a client."""
    return _rows.inputs(fields)[:, :num_classes].clamp(min=LEAST).log()
