"""Steps of x whose lengths follow from measurements, and the choice of an answer, for `self_tuned`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms._gaits import GAITS, Gait
from fedbilevel.algorithms._lower_pacing import FADING, TINY, Rows, averaged, dot

REFITS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)  # lengths of a step of y along -u, as shares of |y| / |u|


def upper_step(rows: Rows, h: Tensor, length: float, count: int, cosine: float) -> tuple[Rows, Tensor]:
    """Take one step of x, and return figures (k, 4) for the next length.

    The direction is the mean of the last hypergradients divided, entry by entry, by the largest so
    far. The figures are h'd, h'd of the last direction, h'h and d'd of the last direction.
    """
    before = rows["d_x"]
    m, s = 0.5 * rows["m_x"] + 0.5 * h, torch.maximum(0.99 * rows["s_x"], h**2)
    d = m / (1 - 0.5**count) / (s.sqrt() + TINY)
    z = rows["z_x"] - length * d
    figures = torch.cat([dot(h, d), dot(h, before), dot(h, h), dot(before, before)], dim=-1)
    return {"z_x": z, "m_x": m, "s_x": s, "d_x": d, "a_x": averaged(rows["a_x"], z, count, cosine)}, figures


class Pace(NamedTuple):
    """Numbers at the server that decide the length of the step of x.

    moved: outer iterations since x began to move.
    length: of the next step along a direction with entries of at most about one.
    cosine: running mean of the cosine of the hypergradient and the last direction.
    fall: running mean of the fall of the upper loss per length.
    steepest: largest fall so far.
    brake: share of the length that is taken while y and u lag behind.
    loss: running mean of the upper loss on held-out samples.
    noise: running mean of the change of that loss.
    low, high: range of `loss` so far.
    changes: running means of the change of that loss by steps along -u of the lengths in REFITS.
    errors: standard errors of these changes over clients.
    doubt: running mean of the standard error, over clients, of the difference between this loss and
        that of the safe candidate.
    blend: weight of f in the lower level of this candidate.
    best: smallest loss of an answer since y was warmed up; None before.
    age: outer iterations of this pace.
    lost: whether the held-out loss rose far above its range.
    """

    moved: int = 0
    length: float = 0.0
    cosine: float = 0.0
    fall: float = 0.0
    steepest: float = 0.0
    brake: float = 0.0
    loss: float = 0.0
    noise: float = 0.0
    low: float = 0.0
    high: float = 0.0
    changes: tuple[float, ...] = ()
    errors: tuple[float, ...] = ()
    doubt: float = 0.0
    blend: float = 0.0
    best: float | None = None
    age: int = 0
    lost: bool = False

    @property
    def step(self) -> float:
        return self.brake * self.length if self.moved else 0.0

    @property
    def span(self) -> float:
        return max(self.high - self.low, 0.01 * abs(self.loss))

    @property
    def tolerance(self) -> float:
        """Difference of losses below which two states count as equally good."""
        return max(0.01 * self.span, 0.5 * self.noise)

    @property
    def refit(self) -> int:
        """Return the place in REFITS of the step along -u that the answer takes, or 0 for no step.

        It is the shortest step with half of the largest sure gain on held-out samples. A gain is
        sure where it exceeds two standard errors over clients.
        """
        score = [0.0, *(change + 2 * error for change, error in zip(self.changes, self.errors, strict=True))]
        least = min(score)
        return next(place for place in range(len(score)) if score[place] <= least / 2) if least < -self.tolerance else 0

    @property
    def answer(self) -> float:
        """Return the held-out loss of the answer that this candidate offers, or its upper bound.

        It is a bound where the candidate is compared with the safe candidate.
        """
        return self.loss + (0.0, *self.changes)[self.refit] + 2 * self.doubt

    def after(self, held: float, lags: list[float], figures: list[float], gait: Gait = GAITS[""]) -> Pace:
        """Return the pace after an outer iteration.

        The promise of a step of x is limited by the gait. Steps grow while successive
        hypergradients agree and shrink when they disagree.
        """
        slope, along, hh, dd = figures
        iteration, fading = self.age + 1, FADING
        first = iteration == 1
        before = held if first else self.loss
        loss = fading * before + (1 - fading) * held
        noise = 0.9 * self.noise + 0.1 * abs(held - before)
        low, high = (loss, loss) if first else (min(self.low, loss), max(self.high, loss))
        norms = math.sqrt(hh * dd)
        cosine = fading * self.cosine + (1 - fading) * (along / norms if norms > TINY else 0.0)
        fall = along if iteration <= 2 else 0.8 * self.fall + 0.2 * along
        steepest = max(fall, 0.1 * slope, self.steepest if self.moved else 0.0)
        behind = max(lags)
        lost = self.lost or (self.best is not None and held > self.high + 10 * self.span)
        new = self._replace(loss=loss, noise=noise, low=low, high=high, age=iteration, lost=lost)
        if self.best is not None or lags[0] < 0.3 or iteration >= 30:  # y is warmed up
            new = new._replace(best=new.answer if self.best is None else min(self.best, new.answer))
        limit = gait.promise * new.span / max(steepest, TINY)
        moved, length = self.moved, self.length
        if moved:
            moved, length = moved + 1, min(length * math.exp(0.3 * cosine if cosine > 0 else cosine), limit)
        elif behind < 0.5 or iteration >= gait.wait:
            moved, length = 1, 0.2 * limit
        brake = min(1.0, gait.brake / max(behind, TINY))
        return new._replace(moved=moved, length=length, cosine=cosine, fall=fall, steepest=steepest, brake=brake)

    def tried(self, changes: list[float], squares: list[float], num_clients: int, reach: float = 0.0) -> Pace:
        """Return the pace after steps along -u were tried, which precedes `after`.

        changes, squares: mean over clients of the change of the held-out loss, and of its square.
        num_clients: clients in these means; one client alone shows no error.
        reach: unit of REFITS, by which f gets more weight in the lower level; 0: its weight stays.
        """
        errors = [_error(change, square, num_clients) for change, square in zip(changes, squares, strict=True)]
        new = self._replace(changes=_faded(self.changes, changes), errors=_faded(self.errors, errors))
        return new._replace(blend=new.blend + 0.2 * reach * REFITS[new.refit]) if new.moved else new

    def compared(self, difference: float, square: float, num_clients: int) -> Pace:
        """Return the pace after a comparison with the safe candidate, which precedes `after`.

        difference, square: mean over clients of the difference of held-out losses, and of its square.
        """
        error = _error(difference, square, num_clients)
        return self._replace(doubt=error if not self.age else FADING * self.doubt + (1 - FADING) * error)


def _error(mean: float, square: float, num: int) -> float:
    """Return the standard error of a mean of `num` values, from the mean of their squares."""
    return math.sqrt(max(0.0, square - mean * mean) / max(1, num - 1))


def _faded(old: Sequence[float], new: Sequence[float]) -> tuple[float, ...]:
    return tuple(FADING * a + (1 - FADING) * b for a, b in zip(old or new, new, strict=True))


def chosen(paces: Sequence[Pace]) -> int:
    """Return the place of the candidate whose average becomes the answer, or -1 to keep the answer.

    The candidate has the smallest held-out loss of all that are warmed up and not lost, and none
    was better before. Before any candidate is warmed up, the first candidate is the answer.
    """
    bests = [pace.best for pace in paces if pace.best is not None]
    ready = [place for place, pace in enumerate(paces) if pace.best is not None and not pace.lost]
    if not ready:
        return 0 if not bests else -1
    place = min(ready, key=lambda one: paces[one].answer)
    return place if paces[place].answer <= min(bests) + paces[place].tolerance else -1
