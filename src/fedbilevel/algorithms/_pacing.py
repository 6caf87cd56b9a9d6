"""Steps of x, y and u whose lengths follow from measurements, for `self_tuned`.

Every function takes rows, one per owner of a variable: one row at the server, or one per client for
a variable that stays at its client. Norms of residuals are taken in the metric 1/D, so that no
result depends on the units of y.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Rows = dict[str, Tensor]
_TINY = 1e-30  # avoids a division by zero
_FADING = 0.7  # share of a running mean that stays in a step


class Gait(NamedTuple):
    """How fast one candidate moves.

    lower, system: share of the step 1 / curvature that y and u take.
    momentum: largest share of the last step that is added to the next.
    promise: largest share of the range of losses by which a step of x promises to lower the loss.
    brake: lag of y and u above which the steps of x are shortened.
    wait: outer iterations after which x moves although y is not warmed up.
    """

    lower: float = 0.9
    system: float = 0.9
    momentum: float = 0.9
    promise: float = 0.05
    brake: float = 0.15
    wait: int = 10


GAITS = {  # by the ending of the names of a candidate's variables
    "": Gait(),
    "_slow": Gait(lower=0.2, system=0.15, momentum=0.0),
    "_eager": Gait(promise=0.2, brake=0.5, wait=3),
}


REFITS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)  # lengths of a step of y along -u, as shares of |y| / |u|


class Controls(NamedTuple):
    """Numbers that pace y and u, one column (k, 1) each.

    curvature: largest curvature of the lower level in the metric D.
    safe: share of the gait's step that is taken; noise reduces it.
    damping: share of curvature that is added to the system of u where the lower level is concave.
    cos_y, cos_u: running mean of the cosine of successive residuals; noise makes it small, steps
        that are too long make it negative.
    lag_y, lag_u: running mean of the product of successive residuals, in which noise cancels.
    top_y, top_u: largest lag so far.
    bound: largest norm of u in the metric D, from the residuals of the first 20 steps.
    steps: steps taken.
    """

    curvature: Tensor
    safe: Tensor
    damping: Tensor
    cos_y: Tensor
    cos_u: Tensor
    lag_y: Tensor
    lag_u: Tensor
    top_y: Tensor
    top_u: Tensor
    bound: Tensor
    steps: Tensor

    @classmethod
    def start(cls, curvature: Tensor) -> Tensor:
        zero, one = torch.zeros_like(curvature), torch.ones_like(curvature)
        return cls(curvature, one, *[zero] * (len(cls._fields) - 2)).joined()

    @classmethod
    def of(cls, joined: Tensor) -> Controls:
        return cls(*joined.split(1, dim=-1))

    def joined(self) -> Tensor:
        return torch.cat(list(self), dim=-1)


def lower_step(rows: Rows, g_y: Tensor, g_u: Tensor | None, gait: Gait = GAITS[""]) -> Rows:
    """Take one step of y and u with momentum, and update their controls and the average of y.

    g_y, g_u: the residuals grad_y g and H u - f_y; None leaves u unchanged.
    """
    d, c = rows["diagonal"], Controls.of(rows["controls"])
    first = c.steps == 0
    cos_y, lag_y = _agreement(g_y, rows["g_y"], d, c.cos_y, c.lag_y, first)
    cos_u, lag_u, bound = c.cos_u, c.lag_u, c.bound
    if g_u is not None:
        g_u = g_u + c.damping * c.curvature * d * rows["u"]
        cos_u, lag_u = _agreement(g_u, rows["g_u"], d, c.cos_u, c.lag_u, first)
        bound = torch.where(c.steps < 20, torch.maximum(bound, 100 * norm(g_u, 1 / d) / c.curvature), bound)
    worse = cos_y if g_u is None else torch.minimum(cos_y, cos_u)
    safe = (c.safe * torch.where(worse < 0, (0.15 * worse).exp(), 1.05)).clamp(0.02, 1.0)
    step = safe / c.curvature
    v_y = gait.momentum * cos_y.clamp(min=0) * rows["v_y"] + g_y / d
    y = rows["z_y"] - gait.lower * step * v_y
    new = {**rows, "z_y": y, "v_y": v_y, "g_y": g_y, "a_y": _averaged(rows["a_y"], y, c.steps, cos_y)}
    if g_u is not None:
        v_u = gait.momentum * cos_u.clamp(min=0) * rows["v_u"] + g_u / d
        u = rows["u"] - gait.system * step * v_u
        new |= {"u": u * (bound / norm(u, d)).clamp(max=1.0), "v_u": v_u, "g_u": g_u}
    controls = Controls(
        c.curvature, safe, c.damping, cos_y, cos_u, lag_y, lag_u,
        torch.maximum(c.top_y, lag_y), torch.maximum(c.top_u, lag_u), bound, c.steps + 1,
    )  # fmt: skip
    return {**new, "controls": controls.joined()}


def _agreement(
    new: Tensor, old: Tensor, d: Tensor, cosine: Tensor, lag: Tensor, first: Tensor
) -> tuple[Tensor, Tensor]:
    """Return running means of the cosine and of the product of successive residuals."""
    product = dot(new / d, old)
    now = product / (norm(new, 1 / d) * norm(old, 1 / d)).clamp(min=_TINY)
    lag = torch.where(first, dot(new / d, new), _FADING * lag + (1 - _FADING) * product)
    return torch.where(first, 0.0, _FADING * cosine + (1 - _FADING) * now), lag


def _averaged(average: Tensor, z: Tensor, count: Tensor | float, cosine: Tensor | float) -> Tensor:
    """Return the new average of iterates, over an eighth of the steps where residuals are noise.

    Where residuals agree, the average is the last iterate.
    """
    agreed = cosine.clamp(0.0, 1.0) if isinstance(cosine, Tensor) else min(max(cosine, 0.0), 1.0)
    share = count / (count + 8) * (1 - agreed)
    return share * average + (1 - share) * z


def lags(joined: Tensor) -> Tensor:
    """Return how far y and u lag behind, as shares of their largest lags, (k, 2)."""
    c = Controls.of(joined)
    shares = [lag.clamp(min=0) / top.clamp(min=_TINY) for lag, top in ((c.lag_y, c.top_y), (c.lag_u, c.top_u))]
    return torch.cat(shares, dim=-1).sqrt()


def reach(y: Tensor, u: Tensor, d: Tensor) -> Tensor:
    """Return |y| / |u| in the metric D, the unit of REFITS, (k, 1)."""
    return norm(y, d) / norm(u, d)


def refitted(rows: Mapping[str, Any], length: float) -> Any:
    """Return the average of y after a step along -u; no step returns it as it is."""
    return rows["a_y"] - length * reach(rows["z_y"], rows["u"], rows["diagonal"]) * rows["u"] if length else rows["a_y"]


def with_curvature(rows: Rows, product: Tensor) -> Rows:
    """Take one power iteration for the largest curvature.

    product: H times the unit vector `ray`.
    """
    d, c = rows["diagonal"], Controls.of(rows["controls"])
    found = norm(product, 1 / d) / norm(unit(rows["ray"]), d)
    controls = c._replace(curvature=torch.maximum(found, 0.8 * c.curvature))
    return {**rows, "ray": unit(product / d), "controls": controls.joined()}


def with_damping(rows: Rows, bent: Tensor) -> Rows:
    """Damp u by twice the curvature along u where it is negative.

    bent: u' H u.
    """
    c = Controls.of(rows["controls"])
    along = bent / (norm(rows["u"], rows["diagonal"]) ** 2 * c.curvature).clamp(min=_TINY)
    controls = c._replace(damping=torch.maximum(0.7 * c.damping, (-2 * along).clamp(min=0.0)))
    return {**rows, "controls": controls.joined()}


def with_diagonal(rows: Rows, d: Tensor) -> Rows:
    return {**rows, "diagonal": (0.5 * rows["diagonal"] ** 2 + 0.5 * d**2).sqrt()}


def equilibrated(product: Callable[[Tensor], Tensor], d: Tensor, times: int, seed: int) -> Tensor:
    """Return D for which all rows of D^-1/2 H D^-1/2 have similar norms, from estimates of them.

    For a vector z of random signs, the mean square of (H z)_i is the squared norm of row i. All
    clients use the same signs.
    """
    signs = torch.Generator().manual_seed(seed)
    for _ in range(times):
        squares = torch.zeros_like(d)
        for _ in range(2):
            z = random_signs(d, signs)
            squares = squares + product(z / d.sqrt()) ** 2 / d
        size = (squares / 2).sqrt()
        d = d * size.clamp(min=1e-6 * size.amax(1, keepdim=True)).clamp(min=_TINY)
    return d


def random_signs(like: Tensor, draw: torch.Generator) -> Tensor:
    return (torch.randint(0, 2, (like.shape[1],), generator=draw).to(like) * 2 - 1).expand_as(like)


def upper_step(rows: Rows, h: Tensor, length: float, count: int, cosine: float) -> tuple[Rows, Tensor]:
    """Take one step of x, and return figures (k, 4) for the next length.

    The direction is the mean of the last hypergradients divided, entry by entry, by the largest so
    far. The figures are h'd, h'd of the last direction, h'h and d'd of the last direction.
    """
    before = rows["d_x"]
    m, s = 0.5 * rows["m_x"] + 0.5 * h, torch.maximum(0.99 * rows["s_x"], h**2)
    d = m / (1 - 0.5**count) / (s.sqrt() + _TINY)
    z = rows["z_x"] - length * d
    figures = torch.cat([dot(h, d), dot(h, before), dot(h, h), dot(before, before)], dim=-1)
    return {"z_x": z, "m_x": m, "s_x": s, "d_x": d, "a_x": _averaged(rows["a_x"], z, count, cosine)}, figures


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
        """Return the held-out loss of the answer that this candidate offers."""
        return self.loss + (0.0, *self.changes)[self.refit]

    def after(self, held: float, lags: list[float], figures: list[float], gait: Gait = GAITS[""]) -> Pace:
        """Return the pace after an outer iteration.

        The promise of a step of x is limited by the gait. Steps grow while successive
        hypergradients agree and shrink when they disagree.
        """
        slope, along, hh, dd = figures
        iteration, fading = self.age + 1, _FADING
        first = iteration == 1
        before = held if first else self.loss
        loss = fading * before + (1 - fading) * held
        noise = 0.9 * self.noise + 0.1 * abs(held - before)
        low, high = (loss, loss) if first else (min(self.low, loss), max(self.high, loss))
        cosine = fading * self.cosine + (1 - fading) * along / max(math.sqrt(hh * dd), _TINY)
        fall = along if iteration <= 2 else 0.8 * self.fall + 0.2 * along
        steepest = max(fall, 0.1 * slope, self.steepest if self.moved else 0.0)
        behind = max(lags)
        lost = self.lost or (self.best is not None and held > self.high + 10 * self.span)
        new = self._replace(loss=loss, noise=noise, low=low, high=high, age=iteration, lost=lost)
        if self.best is not None or lags[0] < 0.3 or iteration >= 30:  # y is warmed up
            new = new._replace(best=new.answer if self.best is None else min(self.best, new.answer))
        limit = gait.promise * new.span / max(steepest, _TINY)
        moved, length = self.moved, self.length
        if moved:
            moved, length = moved + 1, min(length * math.exp(0.3 * cosine if cosine > 0 else cosine), limit)
        elif behind < 0.5 or iteration >= gait.wait:
            moved, length = 1, 0.2 * limit
        brake = min(1.0, gait.brake / max(behind, _TINY))
        return new._replace(moved=moved, length=length, cosine=cosine, fall=fall, steepest=steepest, brake=brake)

    def tried(self, changes: list[float], squares: list[float], num_clients: int) -> Pace:
        """Return the pace after steps along -u were tried, which precedes `after`.

        changes, squares: mean over clients of the change of the held-out loss, and of its square.
        """
        faded = lambda old, new: [_FADING * a + (1 - _FADING) * b for a, b in zip(old or new, new, strict=True)]
        spread = [max(0.0, b - a * a) / max(1, num_clients - 1) for a, b in zip(changes, squares, strict=True)]
        errors = faded(self.errors, [math.sqrt(value) for value in spread])
        return self._replace(changes=tuple(faded(self.changes, changes)), errors=tuple(errors))


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


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of every row, (k, 1)."""
    return (a * b).sum(-1, keepdim=True)


def norm(v: Tensor, metric: Tensor) -> Tensor:
    return dot(v * metric, v).sqrt().clamp(min=_TINY)


def unit(v: Tensor) -> Tensor:
    return v / torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp(min=_TINY)
