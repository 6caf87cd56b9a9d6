"""Own loss: the probability of each label by a classifier of the given labels without that sample.

Use it when you need the simplest ranking of suspects beside a detector that models the noise. It
needs no clean samples, except for the guard. It costs one round more than `as_given`.

    W = A (sum z e_label' + B_c),   S_j the scores of W without sample j (as in label_em)
    b = argmax of sum_j log softmax(b S_j)_label,   q_j = softmax(b S_j)

A label is flagged if its own probability is below one half.

Reference: none; ranking by training loss is common practice, here without the sample itself.

Deviations: none.

Bias: the classifier learns from wrong labels, so its probabilities are too flat, and it flags many
right labels: on the digits, half of its flags are false with 20 % noise (`cleaning-digits`).

Cost of a whole run: the rounds of `as_given`, in which a client sends D (D + 1) / 2 + O(C D) floats,
and one more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbilevel.detectors._scored import Scored
from fedbilevel.detectors._state import State
from fedbilevel.detectors.label_em import HEATS
from fedbilevel.federation.algorithm import Federation, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.tasks import soft_labels


@dataclass(frozen=True, kw_only=True)
class OwnLoss(Scored):
    num_passes: ClassVar[int] = 1

    def detect(self, fed: Federation, state: State) -> State:
        state = self.scored(fed, state)
        # without W there is no cut at a false-discovery rate: these q estimate too many wrong labels for it
        x = fed.mean(self.probabilities, score=state.score, heat=state.heat).x
        return state._replace(x=x, weights=torch.zeros_like(state.weights))

    def scored(self, fed: Federation, state: State) -> State:
        """Return the state with W, leave-one-out scores, and b, which maximises the likelihood.

        There is no model of the noise: with a uniform T, posteriors are those of the classifier.
        """
        if self.reads == "probabilities":
            uniform = torch.full_like(state.transition, len(state.transition) ** -0.5)
            return self.read(fed, state)._replace(heat=1.0, transition=uniform)
        sums = (state.given + state.clean).double().view(len(state.centre) + 1, -1)
        num_classes = sums.shape[1]
        state = self.first(fed, state, sums, state.y.new_ones(num_classes))
        heat = HEATS[int(fed.mean(self.fit, score=state.score).fit.argmax())]
        return state._replace(heat=heat, transition=state.y.new_full((num_classes**2,), 1 / num_classes))

    @phase
    def fit(self, clients: Clients, score: Tensor) -> dict[str, Tensor]:
        """Return the log-likelihood of the given labels at every b."""
        rows = []
        for train, own in zip(clients.samples("train"), clients.unpadded(score), strict=True):
            scores, label = own.view(len(train["label"]), -1), train["label"].long()[:, None]
            rows.append(torch.stack([(b * scores).log_softmax(1).gather(1, label).sum() for b in HEATS]))
        return {"fit": torch.stack(rows)}

    @phase
    def probabilities(self, clients: Clients, score: Tensor, heat: float) -> dict[str, Any]:
        """Keep q as x."""
        x = [
            soft_labels.as_x((heat * own.view(len(train["label"]), -1)).log_softmax(1), train["label"])
            for train, own in zip(clients.samples("train"), clients.unpadded(score), strict=True)
        ]
        return {"x": clients.padded(x)}
