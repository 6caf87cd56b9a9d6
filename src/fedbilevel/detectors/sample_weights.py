"""One weight per training sample, learned by the hypergradient of the clean loss.

Use it when you need the plain bilevel way beside the other detectors. It fits as many numbers as
there are training samples to a few clean samples, so it overfits them; `shared_weights` is the
repair.

    w_j = sigmoid(v_j), started at v = 0, where the renormalised weights are all one
    v_j <- v_j - step g_j / r,   g_j = S dF/dw_j w_j (1 - w_j),   r = root mean square of all g

with F, its derivative and S of `_bilevel`. x has q[label] = w_j, and the other classes share the rest
by the probabilities of the classifier. A label is flagged if its weight fell below one half. Both
classifiers of `Detector` follow, the cleaned one weighted by w. Without clean samples, labels stay as
they are given.

Reference: Franceschi, Frasconi, Salzo, Grazzi, Pontil, "Bilevel Programming for Hyperparameter
Optimization and Meta-Learning", ICML 2018 (data hyper-cleaning).

Deviations: (1) Weights are renormalised by their sum, so that the regulariser counts the same
throughout. (2) The step is relative to r.

Bias: weights that help the clean samples which are used need not help others; a cut at one half is
not calibrated.

Cost of a whole run: num_steps times at most num_lower_rounds + num_system_rounds + 2 rounds of C D
floats, and the rounds of `as_given`. A client also sends one number per step, the sum of squares of g.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedbilevel.detectors import _rows
from fedbilevel.detectors._bilevel import Bilevel
from fedbilevel.detectors._classifiers import TARGETS
from fedbilevel.detectors._state import State
from fedbilevel.federation.algorithm import Federation, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.settings import setting


@dataclass(frozen=True, kw_only=True)
class SampleWeights(Bilevel):
    targets: Literal["auto", "kept", "soft", "weighted"] = setting("weighted", TARGETS)
    num_steps: int = setting(20, "steps of the weights", least=1)
    step: float = setting(0.5, "root mean square of the first change of v", above=0)
    num_passes: ClassVar[int] = 1

    def detect(self, fed: Federation, state: State) -> State:
        score, fit = fed.zeros("score"), None
        for _ in range(self.num_steps):
            target = fed.mean(self.weighed, score=score).target
            fit = self.trained(fed, state, target, fit)
            u = self.adjoint(fed, state, target, fit).u[0]
            found = fed.mean(self.weight_slopes, score=score, pull=self.pulls(fed, state, fit, u))
            size = float((found.squares / state.counts[0]).sqrt())
            if not size:  # there are no clean samples
                return state
            trial = fed.mean(self.moved, score=score, pull=found.pull, step=self.step / size).trial
            score = fed.mean(self.adopted, trial=trial).score
        target = fed.mean(self.weighed, score=score).target
        fit = self.trained(fed, state, target, fit)
        x = fed.mean(self.as_labels, score=score, model=self.sent(state, fit.model), **state.units).x
        return state._replace(x=x, score=score)

    @phase
    def weighed(self, clients: Clients, score: Tensor) -> dict[str, Tensor]:
        """Keep w e_label as targets; a score is v, once for every class."""
        rows = []
        for train, own in zip(clients.samples("train"), clients.unpadded(score), strict=True):
            v = own.view(len(train["label"]), -1)
            rows.append((v.sigmoid() * _rows.given(train["label"], v.shape[1], v)).flatten())
        return {"target": clients.padded(rows)}

    @phase
    def weight_slopes(self, clients: Clients, score: Tensor, pull: Tensor) -> dict[str, Tensor]:
        """Keep g, once for every class, and return the sum of its squares."""
        rows, squares = [], []
        for train, own, slope in zip(
            clients.samples("train"), clients.unpadded(score), clients.unpadded(pull), strict=True
        ):
            v = own.view(len(train["label"]), -1)
            g = slope.view(v.shape).gather(1, train["label"].long()[:, None]) * v.sigmoid() * (1 - v.sigmoid())
            rows.append(g.flatten())
            squares.append(g[:, 0].square().sum()[None])
        return {"pull": clients.padded(rows), "squares": torch.stack(squares)}

    @phase
    def as_labels(
        self, clients: Clients, score: Tensor, model: Tensor, centre: Tensor, scale: Tensor
    ) -> dict[str, Any]:
        """Keep x with q[label] = w."""
        rows = []
        for train, own in zip(clients.samples("train"), clients.unpadded(score), strict=True):
            z = _rows.standardised(train, centre, scale)
            p = (z @ model.view(z.shape[1], -1)).softmax(1)
            w = own.view(p.shape)[:, :1].sigmoid().clamp(1e-6, 1 - 1e-6)
            rows.append(_rows.x_with_right(p, train["label"], w))
        return {"x": clients.padded(rows)}
