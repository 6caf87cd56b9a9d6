"""Classification: one network for all clients, and the weight of its squared norm.

y holds all weights of the network, x the logarithm of the weight decay:

    g_i(x, y) = CE(y; train_i) + exp(x)/2 |y|^2          f_i(y) = CE(y; val_i)

Without a bilevel method this is plain federated learning, and the task on which FedAvg and its
relatives can be compared with published figures.

    cnn      convolutions of 6 and 16 channels, 5 x 5, each followed by a ReLU and a 2 x 2 maximum, then
             layers of 120, 84 and the classes; on digits of 8 x 8 the kernels are 3 x 3 and 2 x 2
    linear   logistic regression

Splits: `dirichlet` deals the images of every label in Dirichlet proportions, `shards` deals two
labels to each client, and `iid` deals at random. Clients count by their numbers of training images.

Setting of Li, Diao, Chen, He, "Federated learning on non-IID data silos: an experimental study",
ICDE 2022 (NIID-bench): 10 clients, alpha 0.5, the cnn. Differences: a small share of the training
images is for validation, which the benchmark does not have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv2d, cross_entropy, linear, max_pool2d

from fedbilevel.data.partition import dirichlet, iid, shards
from fedbilevel.data.sets.images import train_and_test
from fedbilevel.errors import ProblemError
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.settings import setting
from fedbilevel.tasks.findings import Finding, accuracies
from fedbilevel.tasks.initial import uniform
from fedbilevel.tasks.personal_rivals import whole_network
from fedbilevel.tasks.rival import Rival, with_validation
from fedbilevel.tasks.task import Built, Shapes, Task

_KERNELS = {8: (3, 2), 28: (5, 5)}  # by the side of an image
_LEAST = 10  # images of a client


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    num_clients: int = setting(10, "clients", symbol="m", least=1)
    data: Literal["digits", "mnist", "fashion"] = setting(
        "digits", "images; all but the embedded digits are read from files"
    )
    data_dir: str | None = setting(
        None, "folder of the files; None: $FEDBILEVEL_DATA, or shared/data beside the checkout"
    )
    share: float = setting(1.0, "share of all images that is used", above=0, most=1)
    split: Literal["dirichlet", "shards", "iid"] = setting("dirichlet", "how training images are dealt to clients")
    alpha: float = setting(0.5, "concentration of the Dirichlet proportions; small: clients differ more", above=0)
    val_share: float = setting(0.05, "share of a client's images for validation", above=0, most=0.9)
    model: Literal["cnn", "linear"] = setting("cnn", "two convolutions and three layers, or one layer")
    weight_decay: float = setting(1e-5, "initial weight of the squared norm of y", above=0)
    data_seed: int = setting(0, "seed of the split and of the initial weights", least=0)

    suggested = {
        "*": {"lr_upper": 0.1, "lr_lower": 0.1, "lr_system": 0.1, "num_local_steps": 1},
        "fedavg": {"num_local_steps": 10},
        "fedadam": {"num_local_steps": 10},
    }
    avoid = (
        "a small weight decay is known to be right: on the digits of `worth`, FedAdam has 96.2 % at the initial one "
        "and `self_tuned` has 95.9 %"
    )
    headline = ("test_accuracy",)
    needs = {role: {"image": "one row of numbers per sample", "label": "its class from 0"} for role in ("train", "val")}
    measures = {"test": {"image": "as in train", "label": "its class: for test_accuracy"}}

    def build(self) -> Built:
        rng = np.random.default_rng([self.data_seed, 0])
        train, test = train_and_test(self.data, rng, share=self.share, data_dir=self.data_dir)
        clients: list[Holdings] = []
        for mine, testing in zip(self._dealt(train.label, rng), iid(len(test), self.num_clients, rng), strict=True):
            num_val = min(max(1, round(self.val_share * len(mine))), len(mine) - 1)
            val, rest = np.split(rng.permutation(mine), [num_val])
            parts = {"train": train.some(rest), "val": train.some(val), "test": test.some(testing)}
            clients.append({role: part.fields() for role, part in parts.items()})
        return Built(self.problem(Shapes.of(clients[0], int(train.label.max()) + 1)), clients)

    def problem(self, shapes: Shapes) -> Problem:
        self.check(shapes)
        shapes.sample("label", "train", "val", "test", kinds=("int",), ndim=0)
        (num_pixels,) = shapes.sample("image", "train", "val", "test", ndim=1)
        side = math.isqrt(num_pixels)
        if self.model == "cnn" and (side not in _KERNELS or side * side != num_pixels):
            raise ProblemError(
                f"images have {num_pixels} numbers, expected 64 or 784 (8 x 8 or 28 x 28) for the model cnn: use the "
                "model linear."
            )
        sizes = self._layers(num_pixels, side, shapes.classes())
        losses = lambda y, batch: cross_entropy(self._logits(y, batch["image"], side), batch["label"], reduction="none")

        def lower(x: Any, y: Any, batch: Any) -> Tensor:
            return losses(y, batch) + 0.5 * x["log_decay"].exp() * sum((leaf**2).sum() for leaf in y.values())

        def answers(x: Any, y: Any, batch: Any) -> dict[str, Tensor]:
            right = self._logits(y, batch["image"], side).argmax(-1) == batch["label"]
            return {"test_right": right, "test_samples": torch.ones_like(right)}

        return Problem(
            upper=lambda x, y, batch: losses(y, batch),
            lower=lower,
            x0={"log_decay": torch.tensor(math.log(self.weight_decay))},
            y0=uniform(sizes, torch.Generator().manual_seed(self.data_seed)),
            client_weights="by_samples",
            statistics={"test": answers} if shapes.has("test", "image", "label") else {},
            metrics=lambda sums: (
                {"test_accuracy": sums["test_right"] / sums["test_samples"]} if "test_samples" in sums else {}
            ),
            name="classification",
        )

    def rivals(self) -> Mapping[str, Rival]:
        """Return FedAvg and FedAdam at the initial weight decay, tuned and then on all samples together."""
        built = self.build()
        return whole_network("at the initial weight decay", *built, with_validation(built.clients))

    def findings(self, problem: Problem, clients: Sequence[Holdings], result: Any) -> list[Finding]:
        return accuracies(problem, clients, result, role="test", right="test_right", of="test_samples")

    def _dealt(self, labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        if self.split == "dirichlet":
            return dirichlet(labels, self.num_clients, self.alpha, rng, least=_LEAST)
        return iid(len(labels), self.num_clients, rng) if self.split == "iid" else shards(
            labels, self.num_clients, 2, rng
        )  # fmt: skip

    def _layers(self, num_pixels: int, side: int, num_classes: int) -> dict[str, tuple[int, ...]]:
        if self.model == "linear":
            return {"out": (num_classes, num_pixels)}
        one, two = _KERNELS[side]
        rest = ((side - one + 1) // 2 - two + 1) // 2
        return {
            "conv1": (6, 1, one, one), "conv2": (16, 6, two, two), "hidden1": (120, 16 * rest * rest),
            "hidden2": (84, 120), "out": (num_classes, 84),
        }  # fmt: skip

    def _logits(self, y: Any, image: Tensor, side: int) -> Tensor:
        if self.model == "cnn":
            z = image.reshape(-1, 1, side, side)
            for name in ("conv1", "conv2"):
                z = max_pool2d(conv2d(z, y[f"{name}.weight"], y[f"{name}.bias"]).relu(), 2)
            image = z.flatten(1)
            for name in ("hidden1", "hidden2"):
                image = linear(image, y[f"{name}.weight"], y[f"{name}.bias"]).relu()
        return linear(image, y["out.weight"], y["out.bias"])
