"""Training of linear classifiers by sums over the clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedbilevel.detectors import _rows


def bounded_step(now: Tensor, last: Tensor, slope: Tensor, bound: Tensor, age: int) -> tuple[Tensor, Tensor, int]:
    """Return the new point, its extrapolation, and the rounds since the last restart.

    bound: a matrix that exceeds the Hessian everywhere, so that the step without extrapolation
    cannot increase the loss. The extrapolation is restarted when it goes uphill.
    """
    new = now - torch.linalg.solve(bound, slope)
    age = 0 if bool((slope * (new - last)).sum() > 0) else age + 1
    return new, new + age / (age + 3) * (new - last), age


def trained(
    mean: Callable[..., Any], phase: Callable[..., Any], state: Any, num_rounds: int, l2: float, **values: Any
) -> Tensor:
    """Return W, flat, after `num_rounds` accelerated steps from the W of the state.

    phase: returns `slope`, the sum of the gradients of the cross-entropies of a client in W, and
    `weight`, the number of its samples.
    """
    gram = _rows.unpacked(state.gram.double())
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    last = ahead = state.weights.double().view(len(gram), -1)
    age = 0
    for _ in range(num_rounds):
        sent = ahead.flatten().to(state.y.dtype)
        found = mean(phase, weights=sent, centre=state.centre, scale=state.scale, **values)
        weight = float(found.weight)
        slope = found.slope.double().view(last.shape) / weight + l2 * ahead
        last, ahead, age = bounded_step(ahead, last, slope, gram / (2 * weight) + l2 * eye, age)
    return last.flatten().to(state.y.dtype)
