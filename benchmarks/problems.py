"""The problem of most sections: a network pixels - hidden - classes.

x is the hidden layer and y the head, as in the task hyper_representation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from benchmarks.clock import Setup
from fedbilevel.errors import DataError
from fedbilevel.problem.problem import Problem
from fedbilevel.tasks.hyper_representation import HyperRepresentation
from fedbilevel.tasks.task import Built

L2 = 0.01
CLASSES = 10


class Images(NamedTuple):
    """A problem and where its images come from."""

    built: Built
    source: str

    @property
    def shape(self) -> tuple[int, int]:
        """Pixels and hidden units."""
        hidden, pixels = self.built.problem.initial_x({})["hidden.weight"].shape
        return pixels, hidden


def mnist(setup: Setup, num_clients: int, *, share: float = 1.0) -> Images:
    """Shards of MNIST, with 480 images for training and 120 for validation per 600.

    Without the files, random images of the same number and shape.
    """
    if setup.small:
        return Images(random(4, 12, 6, pixels=20, hidden=8), "random numbers")
    try:
        return Images(
            HyperRepresentation(data="mnist", pixels="standard", num_clients=num_clients, share=share, l2=L2).build(),
            "MNIST",
        )
    except DataError:
        each = round(60_000 * share) // num_clients
        return Images(
            random(num_clients, each - each // 5, each // 5),
            "random images in place of MNIST, whose files are not here",
        )


def random(
    num_clients: int, num_train: int, num_val: int, *, pixels: int = 784, hidden: int = 200, seed: int = 0
) -> Built:
    """Random images and labels, as views of one array, which saves memory with thousands of clients."""
    rng = np.random.default_rng(seed)
    each = num_train + num_val
    images, labels = (
        rng.standard_normal((num_clients * each, pixels), dtype=np.float32),
        rng.integers(0, CLASSES, num_clients * each),
    )

    def part(start: int, num: int) -> dict[str, Any]:
        return {"image": images[start : start + num], "label": labels[start : start + num]}

    clients = [
        {"train": part(i * each, num_train), "val": part(i * each + num_train, num_val)} for i in range(num_clients)
    ]
    draw = torch.Generator().manual_seed(seed)
    layer = lambda units, inputs: (torch.rand(units, inputs + 1, generator=draw) * 2 - 1) / inputs**0.5
    inner, head = layer(hidden, pixels), layer(CLASSES, hidden)
    problem = Problem(
        upper=entropy,
        lower=lambda x, y, batch: entropy(x, y, batch) + 0.5 * L2 * sum((leaf**2).sum() for leaf in y.values()),
        x0={"hidden.weight": inner[:, 1:].clone(), "hidden.bias": inner[:, 0].clone()},
        y0={"head.weight": head[:, 1:].clone(), "head.bias": head[:, 0].clone()},
        features=lambda x, batch: linear(batch["image"], x["hidden.weight"], x["hidden.bias"]).relu(),
        name="hyper_representation",
    )
    return Built(problem, clients)


def entropy(x: Any, y: Any, batch: Any) -> Tensor:
    scores = linear(batch["features"], y["head.weight"], y["head.bias"])
    return (batch["weight"] * cross_entropy(scores, batch["label"], reduction="none")).sum()
