"""ResNet-18 for small square images, as a function of its weights, with norms over groups of channels.

    3 x 3 filters, w of them; then four stages of two blocks with w, 2 w, 4 w and 8 w filters, which
    halve the side from the second stage on; the mean over what is left of the image; a linear layer

A block is two layers whose output is added to its input; where the shape changes, the input passes
through 1 x 1 filters and a norm first. With w = 64, this is the network of He et al., CVPR 2016, in its
usual form for CIFAR-10, but for its norms: groups of channels instead of batches, as in residual.py.
The last norm of every block starts at zero, so that a block starts as the identity.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import conv2d, linear

from fedbilevel.cleaning.square_network import SquareNetwork, normed, standardised

_NUM_STAGES, _NUM_BLOCKS = 4, 2


class ResNet18(SquareNetwork):
    def layers(self) -> dict[str, tuple[int, int, int]]:
        """Return the numbers of filters and of their channels, and the side of a filter, by layer."""
        found, into = {"first": (self.width, self.channels, 3)}, self.width
        for stage in range(_NUM_STAGES):
            out = self.width * 2**stage
            for block in range(_NUM_BLOCKS):
                name = f"stage{stage}.{block}"
                found[f"{name}.a"], found[f"{name}.b"] = (out, into, 3), (out, out, 3)
                if into != out:
                    found[f"{name}.past"] = (out, into, 1)
                into = out
        return found

    def initial(self, seed: int) -> dict[str, Tensor]:
        """Return random filters of unit gain, and a last layer of zeros."""
        rng, y = torch.Generator().manual_seed(seed), {}
        for name, (out, into, side) in self.layers().items():
            y[f"{name}.weight"] = torch.randn(out, into, side, side, generator=rng) * (2 / (side**2 * into)) ** 0.5
            y[f"{name}.scale"] = torch.zeros(out) if name.endswith(".b") else torch.ones(out)
            y[f"{name}.shift"] = torch.zeros(out)
        last = self.width * 2 ** (_NUM_STAGES - 1)
        y["head.weight"], y["head.bias"] = torch.zeros(self.num_classes, last), torch.zeros(self.num_classes)
        return y

    def scores(self, y: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Return the scores (n, C) of images, flat or square, each standardised by itself."""
        y = self.used(y)
        found = _layer(y, "first", self.images(standardised(images))).relu()
        for stage in range(_NUM_STAGES):
            for block in range(_NUM_BLOCKS):
                found = _block(y, f"stage{stage}.{block}", found, stride=2 if stage and not block else 1)
        return linear(found.mean((2, 3)), y["head.weight"], y["head.bias"])


def _block(y: Mapping[str, Tensor], name: str, images: Tensor, *, stride: int) -> Tensor:
    found = _layer(y, f"{name}.b", _layer(y, f"{name}.a", images, stride=stride).relu())
    past = _layer(y, f"{name}.past", images, stride=stride) if f"{name}.past.weight" in y else images
    return (found + past).relu()


def _layer(y: Mapping[str, Tensor], name: str, images: Tensor, *, stride: int = 1) -> Tensor:
    weight = y[f"{name}.weight"]
    found = conv2d(images, weight, stride=stride, padding=weight.shape[-1] // 2)
    return normed(y, name, found)
