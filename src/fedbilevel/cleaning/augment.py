"""Images shifted and mirrored by given random numbers, for the training of networks."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_DRAWS = 3  # random numbers that one image needs


def moved(images: Tensor, draw: Tensor, *, shift: float, mirror: bool) -> Tensor:
    """Return images (n, channels, side, side), each shifted and mirrored by its own draws (n, 3).

    An image is shifted by up to `shift` of its side in both directions, and what enters at an edge is
    reflected. With `mirror`, half of the images are mirrored.
    """
    side = images.shape[-1]
    most = round(shift * side)
    steps = (draw[:, :2] * (2 * most + 1)).floor().long() - most
    place = torch.arange(side, device=images.device)
    down, right = (_reflected(place + steps[:, i : i + 1], side) for i in range(2))
    if mirror:
        right = torch.where(draw[:, 2:] < 0.5, right.flip(1), right)
    pixels = (down[:, :, None] * side + right[:, None, :]).flatten(1)
    flat = images.flatten(2)
    return flat.gather(2, pixels[:, None].expand_as(flat)).view_as(images)


def _reflected(place: Tensor, side: int) -> Tensor:
    """Return places in [0, side) by reflection at both ends."""
    return side - 1 - (side - 1 - place.abs()).abs()
