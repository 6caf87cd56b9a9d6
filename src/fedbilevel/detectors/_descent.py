"""Computations of the server: steps of a linear classifier on a bound, and conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def bound_of(gram: Tensor, weight: Tensor, l2: float | Tensor) -> Tensor:
    """Return a matrix that is nowhere below the Hessian of a mean cross-entropy, sum z z' / 2w + l2.

    The Hessian of a sum of cross-entropies is at most half of that of squares (Boehning, 1992), also
    if samples count with a weight of at most one each.

    gram: sum z z'. weight: w, the sum of the weights, as (..., 1, 1).
    """
    return gram / (2 * weight) + l2 * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)


def bounded_step(bound: Tensor, slope: Tensor, now: Tensor, last: Tensor, age: int) -> tuple[Tensor, Tensor, int]:
    """Return the next point, its extrapolation and the new age of the extrapolation.

    The step bound^-1 slope cannot increase the loss. After a step that went uphill from the last
    point, the extrapolation starts anew.
    """
    new = now - torch.cholesky_solve(slope, torch.linalg.cholesky(bound))
    age = 0 if bool((slope * (new - last)).sum() > 0) else age + 1
    return new, new + age / (age + 3) * (new - last), age


def conjugate(
    product: Callable[[Tensor], Tensor], right: Tensor, bound: Tensor, num_rounds: int, residual: float
) -> Tensor:
    """Return u of H u = right by conjugate gradients, preconditioned by the bound of H.

    product: H times k directions at once, in one round. right: (k, d, C), k systems that are solved
    side by side. residual: the norm, relative to that of the right side, at which the last one ends.
    """
    dot = lambda one, other: (one * other).sum((1, 2), keepdim=True)
    u, rest, goal = torch.zeros_like(right), right, residual**2 * dot(right, right)
    factor = torch.linalg.cholesky(bound)
    ahead = direction = torch.cholesky_solve(rest, factor)
    for _ in range(num_rounds):
        if bool((dot(rest, rest) <= goal).all()):
            break
        image, old = product(direction), dot(rest, ahead)
        length = old / dot(direction, image).clamp(min=1e-300)
        u, rest = u + length * direction, rest - length * image
        ahead = torch.cholesky_solve(rest, factor)
        direction = ahead + dot(rest, ahead) / old.clamp(min=1e-300) * direction
    return u
