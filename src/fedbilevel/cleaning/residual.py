"""A residual network for small square images, as a function of its weights.

    3 x 3 filters, w of them; then three stages of 3 x 3 filters and 2 x 2 maxima with 2 w, 4 w and
    8 w filters; after the first and the last stage, two layers whose output is added to their input;
    maxima over what is left of the image; a linear layer

Every layer is normalised over groups of 16 channels and has a ReLU. Groups need no statistics of other
samples, so clients whose data differ do not disturb each other.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import conv2d, linear, max_pool2d

from fedbilevel.cleaning.square_network import SquareNetwork, normed, standardised

_CALM = 0.125  # factor of the scores, so that the first steps are short


class Residual(SquareNetwork):
    def layers(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of filters and of their channels, by layer."""
        w = self.width
        return {
            "first": (w, self.channels), "stage1": (2 * w, w), "add1a": (2 * w, 2 * w), "add1b": (2 * w, 2 * w),
            "stage2": (4 * w, 2 * w), "stage3": (8 * w, 4 * w), "add3a": (8 * w, 8 * w), "add3b": (8 * w, 8 * w),
        }  # fmt: skip

    def initial(self, seed: int) -> dict[str, Tensor]:
        """Return random filters of unit gain, and a last layer of zeros."""
        rng, y = torch.Generator().manual_seed(seed), {}
        for name, (out, into) in self.layers().items():
            y[f"{name}.weight"] = torch.randn(out, into, 3, 3, generator=rng) * (2 / (9 * into)) ** 0.5
            y[f"{name}.scale"], y[f"{name}.shift"] = torch.ones(out), torch.zeros(out)
        y["head.weight"], y["head.bias"] = torch.zeros(self.num_classes, 8 * self.width), torch.zeros(self.num_classes)
        return y

    def scores(self, y: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Return the scores (n, C) of images, flat or square, each standardised by itself."""
        y = self.used(y)
        found = _layer(y, "first", self.images(standardised(images)))
        found = _added(y, "add1", _layer(y, "stage1", found, halve=True))
        found = _layer(y, "stage2", found, halve=True)
        found = _added(y, "add3", _layer(y, "stage3", found, halve=True))
        return _CALM * linear(found.amax((2, 3)), y["head.weight"], y["head.bias"])


def _layer(y: Mapping[str, Tensor], name: str, images: Tensor, *, halve: bool = False) -> Tensor:
    found = conv2d(images, y[f"{name}.weight"], padding=1)
    if halve and found.shape[-1] > 1:
        found = max_pool2d(found, 2)
    return normed(y, name, found).relu()


def _added(y: Mapping[str, Tensor], name: str, images: Tensor) -> Tensor:
    return images + _layer(y, f"{name}b", _layer(y, f"{name}a", images))
