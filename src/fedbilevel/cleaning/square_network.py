"""What networks for small square images have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import group_norm

from fedbilevel.data.random_features import RandomConvolutions

GROUP = 16  # channels that are normalised together


class SquareNetwork(NamedTuple):
    """A network as a function of its weights.

    standardise: every filter is used with mean zero and unit norm (Qiao et al., "Micro-batch training with
        batch-channel normalization and weight standardization", 2019), for networks with norms over groups.
    """

    side: int
    channels: int
    width: int
    num_classes: int
    standardise: bool = False

    @classmethod
    def of(cls, num_pixels: int, width: int, num_classes: int, standardise: bool = False) -> Self:
        """Return the network for images with this many numbers, which are square."""
        shape = RandomConvolutions.of(num_pixels)
        return cls(shape.side, shape.channels, width, num_classes, standardise)

    def used(self, y: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the weights with filters as the network uses them."""
        if not self.standardise:
            return y
        return {name: _standardised_filters(leaf) if leaf.ndim == 4 else leaf for name, leaf in y.items()}

    def images(self, flat: Tensor) -> Tensor:
        """Return flat images (n, pixels) as squares (n, channels, side, side)."""
        return flat.reshape(-1, self.channels, self.side, self.side)


def standardised(images: Tensor) -> Tensor:
    """Return images as rows, each standardised by its own mean and deviation."""
    rows = images.flatten(1)
    return (rows - rows.mean(1, keepdim=True)) / (rows.var(1, correction=0, keepdim=True) + 1e-6).sqrt()


def _standardised_filters(filters: Tensor) -> Tensor:
    rows = filters.flatten(1)
    rows = rows - rows.mean(1, keepdim=True)
    return (rows / (rows.square().sum(1, keepdim=True) + 1e-8).sqrt()).view_as(filters)


def normed(y: Mapping[str, Tensor], name: str, images: Tensor) -> Tensor:
    """Return images (n, channels, side, side), normalised over groups of channels, with a layer's scale and shift."""
    groups = max(1, images.shape[1] // GROUP)
    scale, shift = (y[f"{name}.{part}"].to(images.dtype) for part in ("scale", "shift"))
    with torch.autocast(images.device.type, enabled=False):  # would write norms in float32, at twice the traffic
        return group_norm(images, groups, scale, shift)
