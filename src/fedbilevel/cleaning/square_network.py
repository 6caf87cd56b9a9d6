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
    side: int
    channels: int
    width: int
    num_classes: int

    @classmethod
    def of(cls, num_pixels: int, width: int, num_classes: int) -> Self:
        """Return the network for images with this many numbers, which are square."""
        shape = RandomConvolutions.of(num_pixels)
        return cls(shape.side, shape.channels, width, num_classes)

    def images(self, flat: Tensor) -> Tensor:
        """Return flat images (n, pixels) as squares (n, channels, side, side)."""
        return flat.reshape(-1, self.channels, self.side, self.side)


def standardised(images: Tensor) -> Tensor:
    """Return images as rows, each standardised by its own mean and deviation."""
    rows = images.flatten(1)
    return (rows - rows.mean(1, keepdim=True)) / (rows.var(1, correction=0, keepdim=True) + 1e-6).sqrt()


def normed(y: Mapping[str, Tensor], name: str, images: Tensor) -> Tensor:
    """Return images (n, channels, side, side), normalised over groups of channels, with a layer's scale and shift."""
    groups = max(1, images.shape[1] // GROUP)
    scale, shift = (y[f"{name}.{part}"].to(images.dtype) for part in ("scale", "shift"))
    with torch.autocast(images.device.type, enabled=False):  # would write norms in float32, at twice the traffic
        return group_norm(images, groups, scale, shift)
