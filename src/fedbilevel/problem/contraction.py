"""Contraction of values per sample: losses by the weights of a batch, statistics by sums over
samples.

Padding has weight 0. Its values are replaced by 0 before anything is multiplied or added, because 0
times infinity is not a number. A mask cannot do the same for the gradient at padding (0 times
infinity again, inside the loss). That gradient is finite because padding repeats the first sample
of the same client, see `ClientData`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def mean(values: Tensor, weight: Tensor) -> Tensor:
    """Return the mean loss of a batch without padding, whose weights sum to one."""
    return (weight * values).sum()


def weighted(values: Tensor, weight: Tensor) -> Tensor:
    """Return the mean loss of a batch that may have padding."""
    return mean(torch.where(weight > 0, values, 0.0), weight)


def counted(found: Mapping[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
    """Sum the statistics of one client over real samples, and keep scalars unchanged."""
    real = weight > 0
    return {
        name: torch.where(real, value, torch.zeros_like(value)).sum() if value.ndim else value
        for name, value in found.items()
    }


def contracted(value: Any, weight: Tensor) -> Any:
    """Contract a loss or the statistics of one client; leave a scalar loss unchanged."""
    if isinstance(value, Mapping):
        return counted(value, weight)
    return weighted(value, weight) if value.ndim else value
