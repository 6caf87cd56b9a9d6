"""A mixture of two Gaussians: which rows belong to the part with the larger mean."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_STEPS = 200
TOLERANCE = 1e-8  # change of the mean log-likelihood at which EM ends
FLOOR = 1e-6  # of the variances, in units of the variance of all rows


def upper_part(values: Tensor) -> Tensor:
    """Return the probability (n,) that a row belongs to the part whose mean has the larger sum.

    values: (n,) or (n, d); the parts have diagonal covariances. EM starts from two means (Lloyd's
    iteration), which start from the rows with the smallest and the largest sum. Equal rows and
    single rows belong to the lower part.
    """
    rows = values.double()[:, None] if values.ndim == 1 else values.double()
    spread = (rows - rows.mean(0)).square().mean()
    if not float(spread) > 1e-12 * float(rows.square().mean()):  # also for no rows, whose spread is NaN
        return rows.new_zeros(len(rows))
    share = _split(rows)
    last = -torch.inf
    for _ in range(NUM_STEPS):
        mass = torch.stack([1 - share, share])  # (2, n)
        total = mass.sum(1, keepdim=True).clamp(min=1e-12)
        mean = mass @ rows / total
        variance = (mass @ rows.square() / total - mean.square()).clamp(min=0) + FLOOR * spread
        gap = (rows - mean[:, None]).square() / variance[:, None]
        logs = (total / len(rows)).log() - 0.5 * (gap + variance[:, None].log()).sum(2)  # up to a constant
        whole = logs.logsumexp(0)
        share = (logs[1] - whole).exp()
        if abs(float(whole.mean()) - last) < TOLERANCE:
            break
        last = float(whole.mean())
    return share if float(mean[1].sum()) >= float(mean[0].sum()) else 1 - share


def _split(rows: Tensor) -> Tensor:
    """Return 1 for the rows that are nearer to the upper one of two means."""
    order = rows.sum(1).argsort(stable=True)
    means = rows[order[[0, -1]]]
    for _ in range(50):
        gap = torch.cdist(rows, means)
        share = (gap[:, 1] < gap[:, 0]).to(rows.dtype)
        mass = torch.stack([1 - share, share])
        new = mass @ rows / mass.sum(1, keepdim=True).clamp(min=1e-12)
        if torch.equal(new, means):
            break
        means = new
    return share
