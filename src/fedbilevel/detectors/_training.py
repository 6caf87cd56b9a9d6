"""Training of linear classifiers by sums over the clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fedbilevel.detectors import _rows
from fedbilevel.detectors._descent import bound_of, bounded_step


def trained(
    mean: Callable[..., Any], phase: Callable[..., Any], state: Any, num_rounds: int, l2: float, **values: Any
) -> Tensor:
    """Return W, flat, after `num_rounds` accelerated steps from the W of the state.

    phase: returns `slope`, the sum of the gradients of the cross-entropies of a client in W, and
    `weight`, the number of its samples.
    """
    gram = _rows.unpacked(state.gram.double())
    last = ahead = state.weights.double().view(len(gram), -1)
    age = 0
    for _ in range(num_rounds):
        sent = ahead.flatten().to(state.y.dtype)
        found = mean(phase, weights=sent, centre=state.centre, scale=state.scale, **values)
        weight = found.weight.double()
        slope = found.slope.double().view(last.shape) / weight + l2 * ahead
        last, ahead, age = bounded_step(bound_of(gram, weight, l2), slope, ahead, last, age)
    return last.flatten().to(state.y.dtype)
