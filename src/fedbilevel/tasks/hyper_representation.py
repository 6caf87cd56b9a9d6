"""Hyper-representation: learn hidden layers on validation data and the last layer on training data.

x holds the hidden layers (the representation), y the last one (the head), and both are the same for
all clients:

    g_i(x, y) = CE(x, y; train_i) + l2/2 |y|^2          f_i(x, y) = CE(x, y; val_i)

For a fixed x the lower level is logistic regression on the features that x makes of the images. It
is strongly convex because the norm is squared. Only y changes in the lower level, so second
derivatives never pass through an activation: the kinks of ReLU do not affect H v, and J v
differentiates the features once. The library computes features once per x.

    mlp   pixels - 200 - classes; on images of 28 x 28 the hidden layer has 157,000 parameters and
          the head of ten classes 2,010
    cnn   two convolutions, each followed by an activation and 2 x 2 max pooling, then a hidden
          layer; the head is linear

`head_layers=2` puts a layer of 84 units between these and the last, and gives both to y. On
CIFAR-10 the cnn is then LeNet-5 (6 and 16 channels, 120, 84, 10), of which Xiao and Ji train the
last two layers in the lower level. That lower level is not convex: y*(x) is the minimum that is
found.

`pixels=standard` subtracts the mean of all used training images and divides by their standard
deviation, one number of each per channel. Both are computed across clients; between real sites this
takes one more average of a few numbers.

Splits: `shards` sorts the training images by label and deals two shards to each client, so most
clients have two to four labels; `iid` deals images at random. A random `val_share` of a client's
images is its validation part. The test part is dealt at random, for measuring only.

The benchmark of Tarzanagh et al., "FedNest", ICML 2022, and of Xiao and Ji,
"Communication-Efficient Federated Hypergradient Computation via Aggregated Iterative
Differentiation", ICML 2023, section 5, by default on embedded digits. The papers' setting:
data=mnist, num_clients=100, a cohort of 0.1, val_share 0.2 for shards and 0.5 for iid. Differences
from the published code: the squared norm (there the norm itself, which is neither strongly convex
nor smooth), and no dropout, whose masks would differ between evaluations that must agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv2d, cross_entropy, gelu, linear, max_pool2d, relu

from fedbilevel.data.partition import iid, shards
from fedbilevel.data.sets.images import NUM_CHANNELS, standardised, train_and_test
from fedbilevel.errors import ProblemError
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem, Scopes
from fedbilevel.settings import setting
from fedbilevel.tasks.findings import Finding, accuracies
from fedbilevel.tasks.initial import uniform
from fedbilevel.tasks.personal_rivals import Score, answers, whole_network
from fedbilevel.tasks.rival import Rival, with_validation
from fedbilevel.tasks.task import Built, Shapes, Task

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": relu, "gelu": gelu}
_HIDDEN = 200  # units of the hidden layer of the MLP
_MIDDLE = 84  # units of the layer before the last, where the head has two


class _Sizes(NamedTuple):
    """Sizes of the convolutional network for images of one size."""

    kernels: tuple[int, int]
    channels: tuple[int, int]
    hidden: int


_SIZES = {8: _Sizes((3, 2), (8, 16), 32), 28: _Sizes((5, 5), (10, 20), 50), 32: _Sizes((5, 5), (6, 16), 120)}
# channels and side by the number of values of an image
_IMAGES = {channels * side * side: (channels, side) for channels in (1, 3) for side in _SIZES}


@dataclass(frozen=True, kw_only=True)
class HyperRepresentation(Task):
    num_clients: int = setting(10, "clients; the papers use 100 on MNIST", symbol="m", least=1)
    data: Literal["digits", "mnist", "fashion", "cifar10"] = setting(
        "digits", "images; all but the embedded digits are read from files"
    )
    data_dir: str | None = setting(
        None, "folder of the files; None: $FEDBILEVEL_DATA, or shared/data beside the checkout"
    )
    pixels: Literal["unit", "standard"] = setting(
        "unit", "values from 0 to 1, or with mean 0 and deviation 1 over the training images, per channel"
    )
    share: float = setting(1.0, "share of all images that is used", above=0, most=1)
    test_share: float = setting(
        0.25, "share of the digits kept for testing; the other sets have a test part of their own", above=0, most=0.9
    )
    split: Literal["iid", "shards"] = setting(
        "shards", "images at random, or two shards of images sorted by label for each client"
    )
    val_share: float = setting(
        0.2,
        "share of a client's images for validation, the rest is for training; FedNest: 0.2 for shards, 0.5 for iid",
        above=0,
        most=0.9,
    )
    model: Literal["mlp", "cnn"] = setting("mlp", "one hidden layer, or two convolutions and a hidden layer")
    num_hidden: int | None = setting(
        None,
        "units of the hidden layer; None: 200 for the MLP; for the CNN 50, 32 on digits, 120 on cifar10",
        least=1,
    )
    head_layers: int = setting(
        1, "layers in y: the last one, or a layer of 84 units before it as well, which is not convex", least=1, most=2
    )
    activation: Literal["relu", "gelu"] = setting(
        "relu", "activation of hidden layers: relu as in the papers, or the smooth gelu"
    )
    lower: Literal["global", "local"] = setting("global", "one head for all clients, or one for each")
    l2: float = setting(0.01, "weight of the squared norm of y in the lower level", above=0)
    data_seed: int = setting(0, "seed of the split and of the initial weights", least=0)

    # The curvature of the lower level grows with the features during a run, so steps of y and u stay well below what
    # suits the start. LFedNest takes each client's own series at a y that is not that client's minimiser: with shards,
    # features then grow without bound where the steps of the series or of x are longer. These values are for the MLP.
    # The CNN needs steps of x, y and u of about 0.05, 0.2 and 0.1, and more iterations.
    suggested = {
        "*": {"lr_lower": 0.5, "lr_system": 0.2, "lr_upper": 0.2, "num_local_steps": 1},
        "fedavg": {"num_local_steps": 5},
        "fedrep": {"num_local_steps": 5},
        "fedbabu": {"num_local_steps": 5},
        "fbo_aggitd": {"lr_upper": 0.5, "num_lower_rounds": 5},
        "fednest": {"lr_upper": 0.5, "num_lower_rounds": 3, "num_terms": 5},
        "lfednest": {"lr_upper": 0.1, "lr_system": 0.01, "num_lower_rounds": 3},
    }
    suggested_iterations = {"*": 200, "fbo_aggitd": 60, "fednest": 60, "lfednest": 100}
    avoid = (
        "one network may serve all clients and be trained as a whole: on the digits of `worth`, FedAdam has 96.5 % and "
        "`self_tuned` has 94.6 %"
    )
    classes = True
    headline = ("test_accuracy", "train_accuracy")
    needs = {
        role: {"image": "one row of numbers per sample; channel after channel for the cnn", "label": "its class from 0"}
        for role in ("train", "val")
    }
    measures = {"test": {"image": "as in train", "label": "its class: for test_accuracy"}}

    def build(self) -> Built:
        rng = np.random.default_rng([self.data_seed, 0])
        train, test = train_and_test(
            self.data, rng, share=self.share, test_share=self.test_share, data_dir=self.data_dir
        )
        if self.pixels == "standard":
            train, test = standardised(train, test, NUM_CHANNELS.get(self.data, 1))
        clients: list[Holdings] = []
        for i, (mine, testing) in enumerate(
            zip(self._dealt(train.label, rng), iid(len(test), self.num_clients, rng), strict=True)
        ):
            if len(mine) < 2:
                raise ProblemError(
                    f"client {i} has {len(mine)} image, expected one for training and one for validation: use fewer "
                    "clients or more data."
                )
            num_val = min(max(1, round(self.val_share * len(mine))), len(mine) - 1)
            val, rest = np.split(rng.permutation(mine), [num_val])
            clients.append(
                {
                    "train": train.some(rest).fields(),
                    "val": train.some(val).fields(),
                    "test": test.some(testing).fields(),
                }
            )
        return Built(self.problem(Shapes.of(clients[0], int(train.label.max()) + 1)), clients)

    def problem(self, shapes: Shapes) -> Problem:
        self.check(shapes)
        shapes.sample("label", "train", "val", "test", kinds=("int",), ndim=0)
        (num_pixels,) = shapes.sample("image", "train", "val", "test", ndim=1)
        if self.model == "cnn" and num_pixels not in _IMAGES:
            known = ", ".join(f"{num} ({channels} x {side} x {side})" for num, (channels, side) in _IMAGES.items())
            raise ProblemError(
                f"images have {num_pixels} numbers, expected one of {known} for the model cnn: use the model mlp."
            )
        x0, y0 = self._weights(num_pixels, shapes.classes())
        measured = [role for role in ("test", "train") if shapes.has(role, "image", "label")]
        return Problem(
            upper=self._entropy,
            lower=lambda x, y, batch: (
                self._entropy(x, y, batch) + 0.5 * self.l2 * sum((leaf**2).sum() for leaf in y.values())
            ),
            x0=x0,
            y0=y0,
            scopes=Scopes(lower=self.lower),
            features=self.features(num_pixels),
            statistics={role: answers(lambda x, y, batch: self._logits(y, batch), role) for role in measured},
            metrics=_metrics,
            name="hyper_representation",
        )

    def rivals(self) -> Mapping[str, Rival]:
        """Return FedAvg and FedAdam on the whole network; l2 is still that of the head.

        The chosen run is repeated on training and validation samples together. A bilevel run can
        begin at the network of FedAvg.
        """
        own, clients = self.build()
        assert isinstance(own.x0, Mapping)
        body, head = list(own.x0), list(own.y0)
        score = self.score(clients[0]["train"]["image"].shape[1])
        plain = self.classified(
            lambda x, y, batch: score(y, batch), {"unused": torch.zeros(1)}, {**own.x0, **own.y0}, Scopes(),
            list(own.statistics), None,
        )  # fmt: skip
        found = whole_network("the whole network", plain, clients, with_validation(clients))
        begun = lambda label, run: {
            name: {leaf: run.y[leaf].detach().cpu().clone() for leaf in leaves}
            for name, leaves in (("x0", body), ("y0", head))
        }
        return {**found, "fedavg": found["fedavg"]._replace(start=begun)}

    def score(self, num_pixels: int) -> Callable[[Any, Any], Tensor]:
        """Return a function (all weights, batch) -> logits, for problems that train the whole network."""
        features = self.features(num_pixels)
        return lambda weights, batch: self._logits(weights, {"features": features(weights, batch)})

    def classified(
        self, score: Score, x0: Any, y0: Mapping[str, Tensor], scopes: Scopes, measured: Sequence[str], across: Any
    ) -> Problem:
        """Return a problem of one score (x, y, batch) -> logits; l2 weighs the layers of the head only."""
        entropy = lambda x, y, batch: cross_entropy(score(x, y, batch), batch["label"], reduction="none")
        head = [name for name in y0 if name.split(".")[0] in ("head", "middle")]
        return Problem(
            upper=entropy,
            lower=lambda x, y, batch: entropy(x, y, batch) + 0.5 * self.l2 * sum((y[name] ** 2).sum() for name in head),
            x0=x0,
            y0=y0,
            scopes=scopes,
            statistics={role: answers(score, role) for role in measured},
            metrics=_metrics,
            across=across,
            name="hyper_representation",
        )

    def findings(self, problem: Problem, clients: Sequence[Holdings], result: Any) -> list[Finding]:
        return accuracies(problem, clients, result, role="test", right="test_right", of="test_samples")

    def _dealt(self, labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        return (
            iid(len(labels), self.num_clients, rng) if self.split == "iid" else shards(labels, self.num_clients, 2, rng)
        )

    def _weights(self, num_pixels: int, num_classes: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return initial hidden layers and an initial head, uniform on +-1/sqrt(inputs of a unit).

        The weights of the CNN's three hidden layers are sqrt(6) times larger, because smaller
        weights shrink the signal of an image so much that learning hardly starts.
        """
        if self.model == "mlp":
            hidden = self.num_hidden or _HIDDEN
            shapes: dict[str, tuple[int, ...]] = {"hidden": (hidden, num_pixels)}
        else:
            num_channels, side = _IMAGES[num_pixels]
            sizes = _SIZES[side]
            hidden, (first, second), (one, two) = self.num_hidden or sizes.hidden, sizes.channels, sizes.kernels
            rest = ((side - one + 1) // 2 - two + 1) // 2
            shapes = {
                "conv1": (first, num_channels, one, one),
                "conv2": (second, first, two, two),
                "hidden": (hidden, second * rest * rest),
            }
        head = (
            {"head": (num_classes, hidden)}
            if self.head_layers == 1
            else {"middle": (_MIDDLE, hidden), "head": (num_classes, _MIDDLE)}
        )
        draw = torch.Generator().manual_seed(self.data_seed)
        return uniform(shapes, draw, scale=1.0 if self.model == "mlp" else math.sqrt(6)), uniform(head, draw)

    def features(self, num_pixels: int) -> Callable[[Any, Any], Tensor]:
        """Return a function (x, batch) -> (samples, hidden units)."""
        activation = ACTIVATIONS[self.activation]

        def features(x: Any, batch: Any) -> Tensor:
            z = batch["image"]
            if self.model == "cnn":
                z = z.reshape(-1, *_IMAGES[num_pixels], _IMAGES[num_pixels][1])
                for name in ("conv1", "conv2"):
                    z = max_pool2d(activation(conv2d(z, x[f"{name}.weight"], x[f"{name}.bias"])), 2)
                z = z.flatten(1)
            return activation(linear(z, x["hidden.weight"], x["hidden.bias"]))

        return features

    def _logits(self, y: Any, batch: Any) -> Tensor:
        z = batch["features"]
        if self.head_layers == 2:
            z = ACTIVATIONS[self.activation](linear(z, y["middle.weight"], y["middle.bias"]))
        return linear(z, y["head.weight"], y["head.bias"])

    def _entropy(self, x: Any, y: Any, batch: Any) -> Tensor:
        """Return the loss of each sample, which depends on x through the features only."""
        return cross_entropy(self._logits(y, batch), batch["label"], reduction="none")


def _metrics(sums: Any) -> dict[str, float]:
    """Divide sums over all clients."""
    return {
        f"{role}_accuracy": sums[f"{role}_right"] / sums[f"{role}_samples"]
        for role in ("test", "train")
        if f"{role}_samples" in sums
    }
