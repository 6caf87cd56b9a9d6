"""Robust means of rows, weighted, in float64.

A share of the weight may belong to attackers, which send any rows. References: Yin et al.,
"Byzantine-robust distributed learning", ICML 2018 (trimmed mean, median); Blanchard et al.,
"Machine learning with adversaries", NeurIPS 2017 (Krum); Karimireddy, He, Jaggi, "Learning from
history for Byzantine robust optimization", ICML 2021 (centred clipping); Pillutla, Kakade,
Harchaoui, "Robust aggregation for federated learning", IEEE TSP 2022 (geometric median); Allouah et al.,
"Fixing by mixing: a recipe for optimal Byzantine ML under heterogeneity", AISTATS 2023 (means of
nearest rows before a rule).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedbilevel.aggregation.settings import Choice
from fedbilevel.errors import FedBilevelError

CLIPPINGS = 5  # steps of centred clipping
_STEPS, _NEAR, _SMOOTH = 100, 1e-10, 1e-9  # of Weiszfeld's method; the last two are relative


def robust_mean(choice: Choice, rows: Tensor, weights: Tensor, outside: float | None = None) -> Tensor:
    """Return one row from rows (k, d) of clients with these weights.

    outside: before the rule, each row becomes the mean of its nearest rows, without this share of
        all rows; None leaves rows as they are.
    """
    rules: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "trimmed": lambda rows, shares: trimmed(rows, shares, choice.number),
        "median": median,
        "krum": lambda rows, shares: krum(rows, shares, int(choice.number), one=True),
        "multikrum": lambda rows, shares: krum(rows, shares, int(choice.number), one=False),
        "centred": lambda rows, shares: centred(rows, shares, choice.number),
        "geometric": geometric,
    }
    shares = (weights.double() / weights.sum()).to(rows.device)
    rows = rows.double() if outside is None else mixed(rows.double(), shares, outside)
    return rules[choice.kind](rows, shares)


def mixed(rows: Tensor, shares: Tensor, outside: float) -> Tensor:
    """Return, for each row, the weighted mean of its nearest rows without a share of all rows.

    Honest clients that differ become alike, so that a rule cannot take them for attackers.
    """
    num = len(rows) - int(outside * len(rows) + 1e-9)
    near = squares(rows).argsort(dim=1, stable=True)[:, :num]
    return torch.stack([(shares[some, None] * rows[some]).sum(0) / shares[some].sum() for some in near])


def squares(rows: Tensor) -> Tensor:
    """Return the squared distances of all pairs of rows."""
    return torch.stack([((rows - row) ** 2).sum(1) for row in rows])


def trimmed(rows: Tensor, shares: Tensor, beta: float) -> Tensor:
    """Return, by entry, the mean without the share `beta` of the weight at both ends.

    A client at the limit counts with a part of its weight.
    """
    values, order = rows.sort(dim=0)
    ends = shares[order].cumsum(0)
    inside = ends.clamp(beta, 1 - beta)
    part = inside - torch.cat([inside.new_full((1, rows.shape[1]), beta), inside[:-1]])
    return (part * values).sum(0) / part.sum(0)


def median(rows: Tensor, shares: Tensor) -> Tensor:
    """Return the weighted median by entry, the middle of two values if both are medians."""
    values, order = rows.sort(dim=0)
    ends = shares[order].cumsum(0)
    tie = 1e-12  # rounding of the cumulative sum
    low = (ends < 0.5 - tie).sum(0, keepdim=True)
    high = (ends <= 0.5 + tie).sum(0, keepdim=True).clamp(max=len(rows) - 1)
    return ((values.gather(0, low) + values.gather(0, high)) / 2)[0]


def krum(rows: Tensor, shares: Tensor, num_attackers: int, *, one: bool) -> Tensor:
    """Return the row that is nearest to its k - f - 2 nearest rows, or the mean of the best k - f."""
    num = len(rows)
    if num < 2 * num_attackers + 3:
        raise FedBilevelError(
            f"{num} clients answered, and krum against {num_attackers} attackers needs {2 * num_attackers + 3}: wait "
            "for more clients and resume, or assume fewer attackers."
        )
    nearest = squares(rows).sort(dim=1).values[:, 1 : num - num_attackers - 1]  # without the row itself
    best = nearest.sum(1).argsort(stable=True)[: num - num_attackers]
    if one:
        return rows[best[0]]
    return (rows[best] * shares[best, None]).sum(0) / shares[best].sum()


def centred(rows: Tensor, shares: Tensor, radius: float) -> Tensor:
    """Return the centre after steps towards all rows, none of which counts from further than `radius`.

    The first centre is the median, because a start at zero would take many steps to reach rows that
    are longer than the radius.
    """
    centre = median(rows, shares)
    for _ in range(CLIPPINGS):
        away = rows - centre
        norms = torch.linalg.vector_norm(away, dim=1)
        centre = centre + ((shares * (radius / norms.clamp(min=1e-300)).clamp(max=1.0))[:, None] * away).sum(0)
    return centre


def geometric(rows: Tensor, shares: Tensor) -> Tensor:
    """Return the point with the least weighted sum of distances, by smoothed Weiszfeld steps."""
    point = median(rows, shares)
    size = torch.linalg.vector_norm(rows - point, dim=1).max()
    if not bool(size > 0):
        return point
    for _ in range(_STEPS):
        pull = shares / (((rows - point) ** 2).sum(1) + (_SMOOTH * size) ** 2).sqrt()
        new = (pull[:, None] * rows).sum(0) / pull.sum()
        moved, point = torch.linalg.vector_norm(new - point), new
        if bool(moved <= _NEAR * size):
            break
    return point
