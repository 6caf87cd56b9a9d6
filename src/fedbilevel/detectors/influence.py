"""Influence: the derivative of the clean loss by the weight of each training sample.

Use it when you ask which samples hurt, whether or not their labels are wrong, or when most of the
cost must be one hypergradient. It needs clean samples of every class. It costs 16 to 57 rounds more
than `as_given`.

The classifier W is trained on the given labels, each with the weight one. Then

    H u = grad F,   I_j = n dF/dw_j = -u' grad CE(W; z_j, label_j) = a_j,label - a_j' p_j

with the symbols of `_bilevel` and n, the sum of the weights, as a constant. A label with I_j > 0 is
harmful, because more weight on it raises the clean loss, and is flagged. x has the log-odds
8 asinh(I_j / r) of a wrong label, with r the root mean square of I over all training samples: x holds
flags and a ranking, and no probabilities, but their sum is close to the number of flags. The other
classes share the rest by the probabilities p of W. Without clean samples, I = 0 and the
labels stay as they are given.

Reference: Koh, Liang, "Understanding Black-box Predictions via Influence Functions", ICML 2017.

Deviations: (1) u is solved by conjugate gradients on all samples, preconditioned by a bound of H.
(2) The classifier is regularised strongly (`lower_l2`). With as little regularisation as a classifier
for use needs, W fits wrong labels too, and the ranking is much worse.

Bias: right labels of hard or rare samples can be harmful by chance with few clean samples; classes
that the clean samples lack look harmful as a whole. A derivative at w = 1 does not say what the
removal of many samples does at once.

Cost of a whole run: up to num_lower_rounds + num_system_rounds rounds of C D floats, one round of
2 C D + 4 floats and one of one float for detection, and the rounds of `as_given`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbilevel.detectors import _rows
from fedbilevel.detectors._bilevel import LOWER_L2, Bilevel
from fedbilevel.detectors._state import State
from fedbilevel.federation.algorithm import Federation, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.settings import setting

SHARP = 8.0


@dataclass(frozen=True, kw_only=True)
class Influence(Bilevel):
    lower_l2: float = setting(3.0, LOWER_L2, symbol="lam_W", above=0)
    num_passes: ClassVar[int] = 1

    def detect(self, fed: Federation, state: State) -> State:
        target = fed.mean(self.given_targets, x=state.x).target
        fit = self.trained(fed, state, target)
        u = self.adjoint(fed, state, target, fit).u[0]
        found = fed.mean(self.influences, pull=self.pulls(fed, state, fit, u, renormalised=False))
        size = float((found.squares / state.counts[0]).sqrt())
        if not size:
            return state._replace(score=found.score)
        x = fed.mean(self.ranked, score=found.score, size=size, model=self.sent(state, fit.model), **state.units).x
        return state._replace(x=x, score=found.score)

    @phase
    def influences(self, clients: Clients, pull: Tensor) -> dict[str, Tensor]:
        """Keep I, once for every class, and return the sum of its squares."""
        rows, squares = [], []
        for train, own in zip(clients.samples("train"), clients.unpadded(pull), strict=True):
            every = own.view(len(train["label"]), -1)
            score = every.gather(1, train["label"].long()[:, None])
            rows.append(score.expand(every.shape).flatten())
            squares.append(score.square().sum()[None])
        return {"score": clients.padded(rows), "squares": torch.stack(squares)}

    @phase
    def ranked(
        self, clients: Clients, score: Tensor, size: float, model: Tensor, centre: Tensor, scale: Tensor
    ) -> dict[str, Any]:
        """Keep x with the log-odds 8 asinh(I / size) of a wrong label."""
        rows = []
        for train, own in zip(clients.samples("train"), clients.unpadded(score), strict=True):
            z = _rows.standardised(train, centre, scale)
            p = (z @ model.view(z.shape[1], -1)).softmax(1)
            right = (-SHARP * (own.view(p.shape)[:, :1] / size).asinh()).sigmoid().clamp(min=1e-30)
            rows.append(_rows.x_with_right(p, train["label"], right))
        return {"x": clients.padded(rows)}
