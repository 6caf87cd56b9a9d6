"""Few-shot episodes that are drawn anew in every step: their images, a network, and heads on features.

A batch holds characters: sample r has the images of character r, and random numbers choose the
characters and images of the episodes. Only the chosen images are gathered and go through the
network. A head is made from the support of an episode, as a formula or by a few gradient steps
inside the loss, so no head outlives its episode.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv2d, max_pool2d

from fedbilevel.errors import ProblemError
from fedbilevel.tasks.initial import uniform

_GROUP = 8  # channels of a group that is normalised together


class Network(NamedTuple):
    """Blocks of a 3 x 3 convolution, a normalisation of groups of channels, a ReLU and a 2 x 2 maximum.

    Each image is normalised alone, so no answer depends on other queries.
    """

    side: int
    num_layers: int
    num_filters: int

    @classmethod
    def of(cls, num_pixels: int, num_filters: int | None) -> Network:
        """Return the network for square images: 4 blocks of 64 filters, or 2 of 16 for 8 x 8."""
        side = math.isqrt(num_pixels)
        if side not in (8, 28) or num_pixels != side * side:
            raise ProblemError(f"images have {num_pixels} pixels, expected 64 or 784 (8 x 8 or 28 x 28).")
        return cls(side, 4, num_filters or 64) if side == 28 else cls(side, 2, num_filters or 16)

    @property
    def width(self) -> int:
        """Return the number of features."""
        return self.num_filters * (self.side >> self.num_layers) ** 2

    def initial(self, seed: int) -> dict[str, Tensor]:
        sizes = {
            f"conv{i}": (self.num_filters, 1 if i == 1 else self.num_filters, 3, 3)
            for i in range(1, self.num_layers + 1)
        }
        drawn = uniform(sizes, torch.Generator().manual_seed(seed))
        weights = {name: leaf for name, leaf in drawn.items() if name.endswith("weight")}
        scales = {f"{name}.scale": torch.ones(self.num_filters) for name in sizes}
        shifts = {f"{name}.shift": torch.zeros(self.num_filters) for name in sizes}
        return {**weights, **scales, **shifts}

    def features(self, weights: Any, image: Tensor) -> Tensor:
        """Map images (..., pixels), as bytes, to features (..., width) of squared length about 1."""
        z = image.reshape(-1, 1, self.side, self.side).to(weights["conv1.weight"].dtype) / 255
        for i in range(1, self.num_layers + 1):
            z = self._normalised(conv2d(z, weights[f"conv{i}.weight"], padding=1))
            z = z * weights[f"conv{i}.scale"][:, None, None] + weights[f"conv{i}.shift"][:, None, None]
            z = max_pool2d(z.relu(), 2)
        return z.reshape(*image.shape[:-1], -1) * self.width**-0.5

    def _normalised(self, z: Tensor) -> Tensor:
        groups = z.reshape(len(z), -1, math.gcd(_GROUP, z.shape[1]), *z.shape[2:])
        centred = groups - groups.mean((2, 3, 4), keepdim=True)
        return (centred * (centred.square().mean((2, 3, 4), keepdim=True) + 1e-5).rsqrt()).reshape(z.shape)


class Draw(NamedTuple):
    """Sizes of the episodes of one batch."""

    num_episodes: int
    num_ways: int
    num_each: int  # images of a character: the support first, then the queries
    num_images: int  # images of a character in the data

    @property
    def numbers(self) -> int:
        """Return the random numbers per character: a key per episode, and a key per image."""
        return self.num_episodes + self.num_images

    def images(self, batch: Any) -> Tensor:
        """Return the images (episodes, images of a character, ways, pixels) of the drawn episodes.

        Characters with the smallest keys take part. A batch with fewer characters than ways, as in
        the checks before a run, repeats them. Measurements have no random numbers and use fixed
        ones.
        """
        image, real = batch["image"], batch["weight"] > 0
        keys = batch["draw"] if "draw" in batch else self._fixed(batch["weight"])
        own = keys[:, : self.num_episodes].masked_fill(~real[:, None], 2.0)  # padding comes last
        order = own.argsort(dim=0, stable=True)
        place = torch.arange(self.num_ways, device=image.device) % real.sum()
        who = order[place]  # (ways, episodes)
        which = keys[:, self.num_episodes :][who].argsort(dim=-1, stable=True)[..., : self.num_each]
        found = image.flatten(0, 1)[who[..., None] * self.num_images + which]
        return found.permute(1, 2, 0, 3)

    def _fixed(self, weight: Tensor) -> Tensor:
        place = torch.arange(1, len(weight) + 1, device=weight.device, dtype=torch.float64)[:, None]
        slopes = torch.as_tensor(np.random.default_rng(0).random(self.numbers), device=weight.device)
        return (997 * place * slopes % 1).to(weight.dtype)


class Features(NamedTuple):
    """Features of episodes: support (e, shots, ways, d) and queries (e, images, ways, d)."""

    support: Tensor
    query: Tensor

    @classmethod
    def of(cls, network: Network, weights: Any, images: Tensor, num_shots: int) -> Features:
        z = network.features(weights, images)
        return cls(z[:, :num_shots], z[:, num_shots:])


def ridge(z: Features, penalty: Tensor) -> Tensor:
    """Return scores (e, images, ways, ways) of the linear head that fits one-hot labels with this penalty.

    The head minimises |Z w - Y|^2 + penalty |w|^2, here by the equations of the images of the
    support, of which there are fewer than features.
    """
    num_ways = z.support.shape[2]
    flat = z.support.flatten(1, 2)
    truth = torch.eye(num_ways, dtype=flat.dtype, device=flat.device).repeat(z.support.shape[1], 1)
    gram = flat @ flat.mT + penalty * torch.eye(len(truth), dtype=flat.dtype, device=flat.device)
    dual, _ = torch.linalg.solve_ex(gram, truth.expand(len(flat), -1, -1))  # no check, for which a GPU would wait
    return z.query @ (flat.mT @ dual)[:, None]


def prototypes(z: Features) -> Tensor:
    """Return minus the squared distances of queries from the mean of each character's support."""
    centre = z.support.mean(1)[:, None]  # (e, 1, ways, d)
    lengths = z.query.square().sum(-1, keepdim=True) + centre.square().sum(-1)[:, :, None]
    return 2 * z.query @ centre.mT - lengths


def adapted(z: Features, weight: Tensor, bias: Tensor, step: Tensor, num_steps: int) -> Tensor:
    """Return scores of a head after gradient steps on the support, from a common start.

    Features have squared length about 1, where the usual networks have about their width.
    """
    flat = z.support.flatten(1, 2)
    truth = torch.eye(len(bias), dtype=flat.dtype, device=flat.device).repeat(z.support.shape[1], 1)
    weight, bias = weight.expand(len(flat), *weight.shape), bias.expand(len(flat), *bias.shape)
    for _ in range(num_steps):
        wrong = ((flat @ weight.mT + bias[:, None]).softmax(-1) - truth) / flat.shape[1]
        weight, bias = weight - step * (wrong.mT @ flat), bias - step * wrong.sum(1)
    return z.query @ weight.mT[:, None] + bias[:, None, None]


def loss(scores: Tensor) -> Tensor:
    """Return the cross-entropy of every episode; query n shows character n."""
    return -scores.log_softmax(-1).diagonal(dim1=-2, dim2=-1).mean((1, 2))


def counted(name: str, scores: Tensor) -> dict[str, Tensor]:
    """Count the right answers and all answers of every episode."""
    right = (scores.argmax(-1) == torch.arange(scores.shape[-1], device=scores.device)).flatten(1)
    return {f"{name}_right": right.sum(1), f"{name}_answers": torch.ones_like(right).sum(1)}
