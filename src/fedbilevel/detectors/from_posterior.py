"""Posteriors of label_em, improved by the hypergradient where clean samples agree.

Use it when label_em is nearly right and clean samples may know more. In the experiment `cleaning-bilevel`
it hardly changes the posteriors, also where noise depends on the image. It costs the rounds of label_em
and more than a hundred others.

The targets of `_bilevel` are the posteriors themselves, T_j = q_j = softmax(s_j), and start at those
of label_em. The clean samples that are not held for the guard are divided into two halves. Step by
step, the halves taking turns, one half proposes and the other one decides:

    g_jk = q_jk (d_jk - sum_l q_jl d_jl),   d = S dF/dT for the loss F of the proposing half
    s'   = s - step g / r,                  r = root mean square of all g
    accepted if t >= 2 for the paired fall of the loss of W(T) on the deciding half

After a refusal the step is halved. After `num_refusals` refusals in a row the last accepted posteriors
are x. If no step is accepted, x is that of label_em.

Reference: none; the posteriors are those of label_em, the hypergradient that of data hyper-cleaning
(Franceschi and others, ICML 2018).

Deviations: (1) W(T) is regularised more than the classifiers of `Detector` are, so that it is solved
before it is compared: otherwise longer training would look like a better posterior.

Bias: that of label_em where no step is accepted. Each half decides several times, so the last steps
are accepted a little too easily; the guard has samples of its own. q after a step is no probability
by the model of label_em, and there is no cut at a false-discovery rate.

Cost of a whole run: that of label_em, and per proposed step up to num_lower_rounds +
num_system_rounds + 3 rounds of at most 2 C D floats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbilevel.detectors import _rows
from fedbilevel.detectors._bilevel import LOWER_L2, Bilevel, Fit, halves
from fedbilevel.detectors._state import State
from fedbilevel.detectors.label_em import LabelEM
from fedbilevel.federation.algorithm import Federation, Variable, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.settings import setting
from fedbilevel.tasks import soft_labels


@dataclass(frozen=True, kw_only=True)
class FromPosterior(LabelEM, Bilevel):  # fields of the first base count
    lower_l2: float = setting(0.1, LOWER_L2, symbol="lam_W", above=0)
    num_upper_steps: int = setting(12, "proposed steps of the posteriors, at most", least=1)
    step: float = setting(1.0, "root mean square of the first change of log q", above=0)
    num_refusals: int = setting(4, "refused steps in a row after which the steps end", least=1)
    least_t: float = setting(2.0, "t of the fall of the deciding half's loss that a step needs")

    statistics = (*Bilevel.statistics, "copies", "before", "after")

    def detect(self, fed: Federation, state: State) -> State:
        state = super().detect(fed, state)
        return state if fed.iteration < self.num_detections() else self.improved(fed, state)

    def improved(self, fed: Federation, state: State) -> State:
        """Return the state with the last accepted posteriors."""
        score = fed.mean(self.logits, x=state.x).score
        fit = self.trained(fed, state, fed.mean(self.as_targets, score=score).target)
        step, refused, taken = self.step, 0, 0
        for number in range(self.num_upper_steps):
            trial = self.proposed(fed, state, score, fit, number % 2, step)
            new = self.trained(fed, state, fed.mean(self.as_targets, score=trial).target, fit)
            if self.agreed(fed, state, fit, new, 1 - number % 2):
                score, fit, refused, taken = fed.mean(self.adopted, trial=trial).score, new, 0, taken + 1
            else:
                step, refused = step / 2, refused + 1
            if refused == self.num_refusals:
                break
        if not taken:
            return state
        x = fed.mean(self.as_labels, score=score).x
        return state._replace(x=x, score=score, weights=torch.zeros_like(state.weights))

    def proposed(self, fed: Federation, state: State, score: Variable, fit: Fit, half: int, step: float) -> Variable:
        """Return the scores after one step for the loss of a half."""
        target = fed.mean(self.as_targets, score=score).target
        u = self.adjoint(fed, state, target, fit, halves=True).u[half]
        found = fed.mean(self.logit_slopes, score=score, pull=self.pulls(fed, state, fit, u))
        size = float((found.squares / state.counts[0]).sqrt())
        return fed.mean(self.moved, score=score, pull=found.pull, step=step / max(size, 1e-12)).trial

    def agreed(self, fed: Federation, state: State, before: Fit, after: Fit, half: int) -> bool:
        """Return whether the loss of a half falls surely from one classifier to the other."""
        both = {"before": self.sent(state, before.model), "after": self.sent(state, after.model)}
        sums = fed.mean(self.falls, half=half, centre=state.centre, scale=state.scale, **both).sums
        num, fall, squares = (sums.double() * fed.num_clients).tolist()
        if num < 2:
            return False
        error = math.sqrt(max(squares / num - (fall / num) ** 2, 0.0) / (num - 1))
        return fall / num > self.least_t * error

    @phase
    def logits(self, clients: Clients, x: Tensor) -> dict[str, Tensor]:
        """Keep log q as scores."""
        rows = [
            soft_labels.posterior(own, train["label"]).clamp(min=1e-12).log().flatten()
            for train, own in zip(clients.samples("train"), clients.unpadded(x), strict=True)
        ]
        return {"score": clients.padded(rows)}

    @phase
    def as_targets(self, clients: Clients, score: Tensor) -> dict[str, Tensor]:
        """Keep q as targets."""
        return {"target": clients.padded([log_q.exp().flatten() for log_q, _ in _posteriors(clients, score)])}

    @phase
    def as_labels(self, clients: Clients, score: Tensor) -> dict[str, Tensor]:
        """Keep q as x."""
        return {"x": clients.padded([soft_labels.as_x(log_q, label) for log_q, label in _posteriors(clients, score)])}

    @phase
    def logit_slopes(self, clients: Clients, score: Tensor, pull: Tensor) -> dict[str, Tensor]:
        """Keep g, and return the sum of its squares."""
        rows, squares = [], []
        for (log_q, _), own in zip(_posteriors(clients, score), clients.unpadded(pull), strict=True):
            q, slope = log_q.exp(), own.view(log_q.shape)
            g = q * (slope - (q * slope).sum(1, keepdim=True))
            rows.append(g.flatten())
            squares.append(g.square().sum()[None])
        return {"pull": clients.padded(rows), "squares": torch.stack(squares)}

    @phase
    def falls(
        self, clients: Clients, before: Tensor, after: Tensor, half: int, centre: Tensor, scale: Tensor
    ) -> dict[str, Tensor]:
        """Return number, sum and squares of the falls of the loss of a half of the clean samples."""
        rows = []
        for val in clients.samples("val"):
            checked = _rows.trusted(val)
            own = halves(checked["label"])[half]
            z, label = _rows.standardised(checked, centre, scale)[own], checked["label"].long()[own][:, None]
            logs = [(z @ one.view(z.shape[1], -1)).log_softmax(1).gather(1, label) for one in (before, after)]
            fall = logs[1] - logs[0]
            rows.append(torch.stack([torch.ones_like(fall).sum(), fall.sum(), fall.square().sum()]))
        return {"sums": torch.stack(rows)}


def _posteriors(clients: Clients, score: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return log q and the given labels of every client."""
    return [
        (own.view(len(train["label"]), -1).log_softmax(1), train["label"])
        for train, own in zip(clients.samples("train"), clients.unpadded(score), strict=True)
    ]
