"""A step of mixture weights that does not depend on the scale of the losses and cannot collapse them.

With logits x, weights w = softmax(x) and the hypergradient h of a round of the first-order penalty
method, the server takes a mirror step of bounded length:

    e = h / w, without its mean           the derivative by the weights, up to a constant
    m = beta m + (1 - beta) e
    s = s + max |e|^2                     so that sqrt(s / t) is the usual size of e
    x <- x - radius * m / max(max |m|, sqrt(s / t))

No logit moves by more than `radius` in a round, whatever the unit of the losses; when the signal
falls below what it was, steps become shorter. In the first `num_waiting` rounds x rests, while the
points of the penalty method move apart: their difference is noise before.

Adam's second moment is that of the directions of all points together, not that of y alone: where an
offset begins to oscillate, its steps become shorter, as those of y do.

The mirror step is that of DoReMi and DoGE, the hypergradient that of `penalty`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms._adaptive import Moments
from fedbilevel.algorithms.penalty import Penalty
from fedbilevel.federation.algorithm import Federation, Variable
from fedbilevel.settings import setting

_LEAST = 1e-4  # a smaller weight has no derivative that float32 resolves


@dataclass(frozen=True, kw_only=True)
class Mixture(Penalty):
    radius: float = setting(0.1, "largest change of a logit in a round", above=0)
    inertia: float = setting(0.9, "how much of the last direction stays", symbol="beta", least=0, most=0.999)
    num_waiting: int = setting(20, "rounds in which x rests", least=0)

    decays = ("radius",)  # type: ignore[assignment]
    upper_space = ("x", "direction")  # type: ignore[assignment]
    refuses = {"private": "the server takes the steps of x"}

    class State(NamedTuple):
        x: Variable
        y: Variable
        d: Variable
        e_plus: Variable | None = None
        e_minus: Variable | None = None
        m_y: Variable | None = None
        m_d: Variable | None = None
        m_e_plus: Variable | None = None
        m_e_minus: Variable | None = None
        s_y: Variable | None = None
        t_y: Variable | None = None
        direction: Tensor | None = None
        squares: float = 0.0

    def init(self, fed: Federation) -> Any:
        state: Any = super().init(fed)
        return state._replace(direction=fed.zeros("direction"))

    def round(self, fed: Federation, state: Any) -> Any:
        t = fed.iteration - self.num_waiting
        new: Any = super().round(fed, state)
        if t <= 0:
            return new._replace(x=state.x, direction=state.direction, squares=state.squares)
        x, m, squares = self.step(state.x, (state.x - new.x) / self.lr_upper, state.direction, state.squares, t)
        return new._replace(x=x, direction=m, squares=squares)

    def adam(
        self, points: Sequence[Tensor], directions: Sequence[Tensor], moments: Moments, lr: Any
    ) -> tuple[list[Tensor], Moments]:
        others = torch.stack([q.square() for q in directions[1:]]).sum(0)
        second = moments.second + (1 - self.adam_beta2) / self.adam_beta2 * others
        return super().adam(points, directions, moments._replace(second=second), lr)

    def step(self, x: Tensor, h: Tensor, m: Tensor, squares: float, t: int) -> tuple[Tensor, Tensor, float]:
        """Return x, the direction and the sum of squares after step t = 1, 2, ..."""
        e = h / torch.softmax(x, 0).clamp(min=_LEAST)
        e = e - e.mean()
        m, squares = self.inertia * m + (1 - self.inertia) * e, squares + float(e.abs().max()) ** 2
        size = max(float(m.abs().max()), math.sqrt(squares / t))
        x = x - self.radius * m / size if size > 0 else x
        return x - x.mean(), m, squares
