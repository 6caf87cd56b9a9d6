"""Initial weights of the networks in tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def uniform(
    shapes: Mapping[str, tuple[int, ...]], draw: torch.Generator, *, scale: float = 1.0, num_networks: int | None = None
) -> dict[str, Tensor]:
    """Draw a weight (outputs, inputs, ...) and a bias per layer.

    The entries are uniform on +-1/sqrt(inputs of a unit).

    scale: factor of the weights.
    num_networks: number of networks, which are stacked along a first dimension.
    """
    weights = {}
    for name, shape in shapes.items():
        bound = math.prod(shape[1:]) ** -0.5
        for part, size, factor in ((f"{name}.weight", shape, scale), (f"{name}.bias", shape[:1], 1.0)):
            size = size if num_networks is None else (num_networks, *size)
            weights[part] = factor * bound * (2 * torch.rand(size, generator=draw) - 1)
    return weights
