"""Steps of y and u whose lengths follow from measurements, for `self_tuned`.

Every function takes rows, one per owner of a variable: one row at the server, or one per client for
a variable that stays at its client. Norms of residuals are taken in the metric 1/D, so that no
result depends on the units of y.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms._gaits import GAITS, Gait

Rows = dict[str, Tensor]
TINY = 1e-30  # avoids a division by zero
FADING = 0.7  # share of a running mean that stays in a step


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
    rows = _stiffened(rows, {"y": g_y} if g_u is None else {"y": g_y, "u": g_u})
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
    new = {**rows, "z_y": y, "v_y": v_y, "g_y": g_y, "a_y": averaged(rows["a_y"], y, c.steps, cos_y)}
    if g_u is not None:
        v_u = gait.momentum * cos_u.clamp(min=0) * rows["v_u"] + g_u / d
        u = rows["u"] - gait.system * step * v_u
        new |= {"u": u * (bound / norm(u, d)).clamp(max=1.0), "v_u": v_u, "g_u": g_u}
    controls = Controls(
        c.curvature, safe, c.damping, cos_y, cos_u, lag_y, lag_u,
        torch.maximum(c.top_y, lag_y), torch.maximum(c.top_u, lag_u), bound, c.steps + 1,
    )  # fmt: skip
    return {**new, "controls": controls.joined()}


def _stiffened(rows: Rows, residuals: Mapping[str, Tensor]) -> Rows:
    """Return rows with a larger diagonal, and no momentum, at entries whose steps became too long.

    A step of a single entry of y changes its residual by the factor 1 - a, where a = 1 is the exact
    step. An entry whose residual turns around and grows has a = 1 + |new / old| > 2: x made it stiffer
    since D was measured. Noise does so too, so the residual as a whole must turn around and be twice
    the largest so far, and the entry alone must be above the largest.
    """
    c = Controls.of(rows["controls"])
    for name, new, top in zip(residuals, residuals.values(), (c.top_y, c.top_u), strict=False):
        d, old = rows["diagonal"], rows[f"g_{name}"]
        size, before = norm(new, 1 / d), norm(old, 1 / d)
        turned = (dot(new / d, old) < -0.5 * size * before) & (size > before) & (size**2 > 4 * top)
        there = turned & (new * old < 0) & (new.abs() > old.abs()) & (new**2 / d > top)
        longer = torch.where(there, 1 + (new / old).abs(), 1.0).clamp(max=100.0)
        rows = {**rows, "diagonal": d * longer}
        rows |= {f"v_{one}": torch.where(there, 0.0, rows[f"v_{one}"]) for one in residuals}
    return rows


def _agreement(
    new: Tensor, old: Tensor, d: Tensor, cosine: Tensor, lag: Tensor, first: Tensor
) -> tuple[Tensor, Tensor]:
    """Return running means of the cosine and of the product of successive residuals."""
    product = dot(new / d, old)
    now = product / (norm(new, 1 / d) * norm(old, 1 / d)).clamp(min=TINY)
    lag = torch.where(first, dot(new / d, new), FADING * lag + (1 - FADING) * product)
    return torch.where(first, 0.0, FADING * cosine + (1 - FADING) * now), lag


def averaged(average: Tensor, z: Tensor, count: Tensor | float, cosine: Tensor | float) -> Tensor:
    """Return the new average of iterates, over an eighth of the steps where residuals are noise.

    Where residuals agree, the average is the last iterate.
    """
    agreed = cosine.clamp(0.0, 1.0) if isinstance(cosine, Tensor) else min(max(cosine, 0.0), 1.0)
    share = count / (count + 8) * (1 - agreed)
    return share * average + (1 - share) * z


def lags(joined: Tensor) -> Tensor:
    """Return how far y and u lag behind, as shares of their largest lags, (k, 2)."""
    c = Controls.of(joined)
    shares = [lag.clamp(min=0) / top.clamp(min=TINY) for lag, top in ((c.lag_y, c.top_y), (c.lag_u, c.top_u))]
    return torch.cat(shares, dim=-1).sqrt()


def reach(y: Tensor, u: Tensor, d: Tensor) -> Tensor:
    """Return |y| / |u| in the metric D, the unit of REFITS, (k, 1)."""
    return norm(y, d) / norm(u, d)


def balance(own: Mapping[str, Any]) -> float:
    """Return |g_y| / |f_y| in the metric 1/D, from residuals at u = 0; without f_y, return 0."""
    g_y, f_y = (float(norm(own[name], 1 / own["diagonal"])) for name in ("residual_y", "residual_u"))
    return g_y / f_y if f_y > TINY else 0.0


def refitted(rows: Mapping[str, Any], length: float) -> Any:
    """Return the average of y after a step along -u; no step returns it as it is."""
    return rows["a_y"] - length * reach(rows["z_y"], rows["u"], rows["diagonal"]) * rows["u"] if length else rows["a_y"]


def with_curvature(rows: Rows, product: Tensor) -> Rows:
    """Take one power iteration for the largest curvature.

    product: H times the unit vector `ray`.
    """
    c = Controls.of(rows["controls"])
    found, ray = _power_step(product, unit(rows["ray"]), rows["diagonal"])
    controls = c._replace(curvature=torch.maximum(found, 0.8 * c.curvature))
    return {**rows, "ray": ray, "controls": controls.joined()}


def _power_step(product: Tensor, ray: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Return the curvature along a ray in the metric D, and the next ray, from H times the ray."""
    return norm(product, 1 / d) / norm(ray, d), unit(product / d)


def first_metric(product: Callable[[Tensor], Tensor], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a diagonal, the largest curvature in its metric, and its ray, by 17 products with H."""
    d = equilibrated(product, torch.ones_like(like), 6, seed=0)
    ray = unit(random_signs(d, torch.Generator().manual_seed(1)) / d.sqrt())
    for _ in range(5):
        curvature, ray = _power_step(product(ray), ray, d)
    return d, curvature, ray


def with_damping(rows: Rows, bent: Tensor) -> Rows:
    """Damp u by twice the curvature along u where it is negative.

    bent: u' H u.
    """
    c = Controls.of(rows["controls"])
    along = bent / (norm(rows["u"], rows["diagonal"]) ** 2 * c.curvature).clamp(min=TINY)
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
        d = d * size.clamp(min=1e-6 * size.amax(1, keepdim=True)).clamp(min=TINY)
    return d


def random_signs(like: Tensor, draw: torch.Generator) -> Tensor:
    return (torch.randint(0, 2, (like.shape[1],), generator=draw).to(like) * 2 - 1).expand_as(like)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of every row, (k, 1)."""
    return (a * b).sum(-1, keepdim=True)


def norm(v: Tensor, metric: Tensor) -> Tensor:
    return dot(v * metric, v).sqrt().clamp(min=TINY)


def unit(v: Tensor) -> Tensor:
    return v / torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp(min=TINY)
