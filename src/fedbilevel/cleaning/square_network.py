"""What networks for small square images have in common."""

from __future__ import annotations

from typing import NamedTuple, Self

from torch import Tensor

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
