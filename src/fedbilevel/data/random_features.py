"""Random convolutional features of images, the same at every client by a shared seed.

    filters of k x k with entries of mean zero and norm one, stride s; ReLU(response - threshold);
    ten times the mean over squares of 2 x 2, so that features of ordinary images vary by about one

For images of 28 x 28, 48 filters of 7 x 7 with stride 2 give 48 * 5 * 5 = 1200 features. Smaller
images have filters of 3 x 3 with stride 1. The filters are drawn from addressed words, so that they
do not depend on the machine, and nothing about them has to be sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, conv2d

from fedbilevel.errors import ProblemError
from fedbilevel.problem.draws import SERVER, Stream

_LARGE = 20  # sides from which filters are 7 x 7
_AT_ONCE = 1024  # images whose responses are in memory at the same time


@dataclass(frozen=True)
class RandomConvolutions:
    """Features of images with rows of `channels * side * side` pixels, channel after channel."""

    side: int
    channels: int = 1
    num_filters: int = 48
    seed: int = 0
    _drawn: list[Tensor] = field(init=False, repr=False, compare=False, default_factory=list)

    def __post_init__(self) -> None:
        self._drawn.extend(self.filters())  # here, because a loss may be evaluated under a transform

    @classmethod
    def of(cls, num_pixels: int, **settings: int) -> RandomConvolutions:
        """Return features for square images of one or three channels with so many pixels."""
        for channels in (1, 3):
            side = round((num_pixels / channels) ** 0.5)
            if channels * side**2 == num_pixels and side >= 6:
                return cls(side, channels, **settings)
        raise ProblemError(
            f"samples have {num_pixels} numbers, expected square images of at least 6 x 6 with one or three channels: "
            "use features='pixels'."
        )

    @property
    def kernel(self) -> int:
        return 7 if self.side >= _LARGE else 3

    @property
    def stride(self) -> int:
        return 2 if self.side >= _LARGE else 1

    @property
    def num_features(self) -> int:
        pooled = ((self.side - self.kernel) // self.stride + 1) // 2
        return int(self.num_filters * pooled**2)

    def filters(self) -> tuple[Tensor, Tensor]:
        """Return filters (f, channels, k, k) and thresholds (f,)."""
        size = self.channels * self.kernel**2
        words = Stream(self.seed).bits(
            "random filters", torch.tensor([SERVER]), iteration=0, call=0, steps=range(self.num_filters), width=size + 1
        )[0]
        unit = words.double() / 2**31 - 1  # uniform on [-1, 1)
        rows = unit[:, :size] - unit[:, :size].mean(1, keepdim=True)
        rows = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        return rows.view(-1, self.channels, self.kernel, self.kernel), unit[:, size].abs() / 4

    def __call__(self, images: Tensor) -> Tensor:
        """Return features (n, num_features) of images (n, pixels)."""
        filters, thresholds = (part.to(images) for part in self._drawn)
        parts = [images.new_zeros(0, self.num_features)]
        for some in images.reshape(-1, self.channels, self.side, self.side).split(_AT_ONCE):
            responses = (conv2d(some, filters, stride=self.stride) - thresholds[:, None, None]).relu()
            parts.append(10 * avg_pool2d(responses, 2).flatten(1))
        return torch.cat(parts)
