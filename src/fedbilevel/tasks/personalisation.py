"""Personalisation: one network trained by all clients, and a few numbers of each client's own.

Clients hold images whose labels are spread unevenly and whose inputs are normalised differently. y
holds the weights of one network, or of several, and is trained by all; lambda_i never leaves its
client:

    g_i(lambda_i, y) = CE(lambda_i, y; train_i) + l2/2 |y|^2
    f_i(lambda_i, y) = CE(lambda_i, y; train_i) + l2_upper/2 |lambda_i|^2

    mask      one network; its logits are multiplied, class by class, by softmax(lambda_i) (HGP-PL)
    ensemble  several networks; their logits are averaged with the weights softmax(lambda_i)
              (HGP-MTL)
    mixture   several networks; their probabilities are averaged with the weights exp(lambda_i).
              In g_i the weights are not scaled, so that - d g_i / d lambda_im is the mean
              responsibility of network m (FedEM); in f_i and in predictions they sum to one
    output    one network; its logits are multiplied by the matrix I + lambda_i (classes, classes)
    none      one network; only the regulariser depends on lambda_i
    head      the hidden layers are x, shared by all; y_i, the last layer, is the client's own

With `head` the levels change places: the lower level is local, and x is trained on the upper loss.

Clients form clusters, which differ in one of three ways (`shift`):

    normalisation   inputs have another mean and spread, which standardisation at the client undoes
    labels          labels have another meaning: each cluster but the first permutes the classes
    rotations       images are turned by quarters of a circle, and mirrored beyond the fourth cluster

No label prior and no normalisation undoes the last two: the same input has another label.

Roles: `train` and `val` are the same samples (the upper level has no data of its own) unless
`val_share` gives the upper level samples that the lower level does not see. `stop` is for early
stopping, `test` for testing.

Setting of Terashita and Hara, "Decentralized Hyper-Gradient Computation over Time-Varying Directed
Networks", section 5.3, appendix A.3 and Tables 2 and 5, by default on embedded digits. Choices that
the paper leaves open: the "outputs" of the networks of the ensemble are taken as logits; the
"variance" of the normalisation is taken as the divisor of the inputs, drawn from U[0, 1] and raised
to `least_spread` if it is smaller; hidden layers and convolutions are followed by GELU, which
resembles the usual ReLU and has the second derivatives that hypergradients need. The accuracy of
the bottom decile is the quantile 0.1 of the clients' test accuracies, with linear interpolation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax, nll_loss, softmax

from fedbilevel.data.partition import dirichlet, split_validation
from fedbilevel.data.sets import idx
from fedbilevel.data.sets.digits import digits
from fedbilevel.data.sets.images import turned
from fedbilevel.errors import ProblemError
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem, Scopes
from fedbilevel.settings import setting
from fedbilevel.tasks.findings import Finding, accuracies
from fedbilevel.tasks.initial import uniform
from fedbilevel.tasks.networks import NETWORKS, Network, split_off
from fedbilevel.tasks.personal_rivals import Score, across_clients, answers, graded_clients, network_rivals
from fedbilevel.tasks.rival import Rival
from fedbilevel.tasks.task import Built, Shapes, Task


class _Sizes(NamedTuple):
    """Sizes of a network for images of one size; `width` scales channels and hidden units."""

    kernels: tuple[int, int]
    channels: tuple[int, int]
    hidden: int  # of the convolutional network


_SIZES = {8: _Sizes((3, 2), (16, 32), 64), 28: _Sizes((5, 5), (32, 64), 2048)}  # 28 x 28: Table 5
_HIDDEN = 64  # of the network with one hidden layer


@dataclass(frozen=True, kw_only=True)
class Personalisation(Task):
    personalise: Literal["mask", "ensemble", "mixture", "output", "head", "none"] = setting(
        "mask", "use of a client's own numbers"
    )
    num_clients: int = setting(100, "clients", symbol="n", least=1)
    data: Literal["digits", "mnist", "emnist", "fashion"] = setting(
        "digits", "images; all but the embedded digits are read from idx files"
    )
    share: float = setting(1.0, "share of all images that is used; the paper uses 0.1 of EMNIST", above=0, most=1)
    data_dir: str | None = setting(
        None, "folder of the idx files; None: $FEDBILEVEL_DATA, or shared/data in or beside the checkout"
    )
    split: Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"] = setting(
        "byclass", "split of EMNIST; byclass has the paper's 62 classes"
    )
    alpha: float = setting(
        0.4, "spread of labels over clients by a Dirichlet distribution; smaller: more uneven", symbol="alpha", above=0
    )
    least: int = setting(
        5, "samples that every client has at least; 5 is the fewest that can be split into the three parts", least=3
    )
    num_clusters: int = setting(3, "groups of clients that are alike", least=1)
    shift: Literal["normalisation", "labels", "rotations"] = setting(
        "normalisation", "what differs between clusters: mean and spread of inputs, meaning of labels, turned images"
    )
    val_share: float = setting(
        0.0, "share of the training samples that only the upper level sees; 0: both levels see all", least=0, most=0.9
    )
    least_spread: float = setting(0.2, "smallest number that inputs are divided by", above=0, most=1)
    model: Literal["linear", "mlp", "cnn"] = setting(
        "mlp", "linear, one hidden layer, or two convolutions and a hidden layer (Table 5)"
    )
    width: float = setting(1.0, "factor of the numbers of hidden units and channels", above=0)
    num_networks: int = setting(3, "networks of the ensemble and the mixture", least=1)
    mask_scale: Literal["classes", "paper"] = setting(
        "classes", "softmax(lambda) times the number of classes, so that zeros mean no mask, or as in the paper"
    )
    lower: Literal["global", "local"] = setting(
        "global", "one y for all clients, or every client trains alone; own heads are always local"
    )
    l2: float = setting(1e-3, "weight of the squared norm of y in the lower level", least=0)
    l2_upper: float = setting(1e-2, "weight of the squared norm of lambda in the upper level", least=0)
    data_seed: int = setting(0, "seed of the split, the normalisation and the initial weights", least=0)

    # The same mask without the factor needs about ten times the step of y for the same progress. At 0.3 some
    # normalisations make the network with one hidden layer unstable; images of 28 x 28 have longer inputs and need
    # 0.03. The networks of an ensemble or a mixture share the gradient.
    suggested = {"*": {"lr_lower": 0.1}, "fedavg": {"lr_lower": 0.1, "num_local_steps": 5}}
    suggested_iterations = {"*": 100}
    avoid = "clients differ only in label frequencies or in the scale of inputs, which each client corrects by itself"
    classes = True
    headline = ("test_accuracy", "test_accuracy_bottom_decile")
    needs = {
        "train": {"image": "one row of numbers per sample", "label": "its class from 0"},
        "val": {"image": "the same samples as in train", "label": "as in train"},
    }
    measures = {
        "stop": {"image": "as in train", "label": "its class: for stop_accuracy"},
        "test": {"image": "as in train", "label": "its class: for test_accuracy and how it differs between clients"},
    }

    def build(self) -> Built:
        images, labels, num_classes = self._images()
        clients = self._clients(images, labels, num_classes)
        return Built(self.problem(Shapes.of(clients[0], num_classes)), clients)

    def problem(self, shapes: Shapes) -> Problem:
        self.check(shapes)
        shapes.sample("label", "train", "val", "stop", "test", kinds=("int",), ndim=0)
        (num_pixels,) = shapes.sample("image", "train", "val", "stop", "test", ndim=1)
        num_classes, side, several = (
            shapes.classes(),
            round(num_pixels**0.5),
            self.personalise in ("ensemble", "mixture"),
        )
        if self.model == "cnn" and (side not in _SIZES or num_pixels != side * side):
            raise ProblemError(
                f"images have {num_pixels} pixels, expected 64 or 784 (8 x 8 or 28 x 28) for the model cnn: use the "
                "model mlp or linear."
            )
        measured = [role for role in ("test", "stop") if shapes.has(role, "image", "label")]
        score = self._score(NETWORKS[self.model], side, num_classes)
        lengths = {"mask": (num_classes,), "none": (1,), "output": (num_classes, num_classes)}
        length, start = lengths.get(self.personalise, (self.num_networks,)), 0.0
        if self.personalise == "mixture":
            start = -math.log(self.num_networks)
        y0 = uniform(
            self._layers(num_pixels, num_classes),
            torch.Generator().manual_seed(self.data_seed),
            num_networks=self.num_networks if several else None,
        )
        if self.personalise == "head":
            if self.model == "linear":
                raise ProblemError("a linear model has no hidden layers to share: use the model mlp or cnn.")
            body, head = split_off(y0, "out")
            return self.classified(score, body, head, Scopes(lower="local"), measured)
        scopes = Scopes(lower=self.lower, upper="private")
        return self.classified(score, lambda sizes: {"lambda": torch.full(length, start)}, y0, scopes, measured)

    def classified(
        self, score: Score, x0: Any, y0: Mapping[str, Tensor], scopes: Scopes, measured: Sequence[str]
    ) -> Problem:
        """Return the problem of a score, with the regularisers and the figures of this task.

        measured: the roles whose accuracy is measured.
        """
        # cross_entropy scales the weights of the mixture to sum to one, nll_loss takes them as they are
        fit = nll_loss if self.personalise == "mixture" else cross_entropy
        return Problem(
            upper=lambda x, y, batch: (
                cross_entropy(score(x, y, batch), batch["label"], reduction="none")
                + (0.5 * self.l2_upper * (x["lambda"] ** 2).sum() if "lambda" in x else 0)
            ),
            lower=lambda x, y, batch: (
                fit(score(x, y, batch), batch["label"], reduction="none")
                + 0.5 * self.l2 * sum((leaf**2).sum() for leaf in y.values())
            ),
            x0=x0,
            y0=y0,
            scopes=scopes,
            statistics={role: answers(score, role) for role in measured},
            metrics=_metrics,
            across=across_clients if "test" in measured else None,
            name="personalisation",
        )

    def rivals(self) -> Mapping[str, Rival]:
        """Return plain ways on the same network, which take the same regulariser."""
        own, clients = self.build()
        num_pixels, num_classes = clients[0]["train"]["image"].shape[1], own.y0["out.bias"].shape[-1]
        plain = dataclasses.replace(self, personalise="none", lower="global")
        given = Shapes.of(clients[0], num_classes)
        shared = plain.problem(given)
        side, network, measured = math.isqrt(num_pixels), NETWORKS[self.model], tuple(shared.statistics)
        adjusted = plain.classified(
            lambda x, y, batch: network(y, batch["image"], side) + batch["prior"],
            shared.x0, shared.y0, shared.scopes, measured,
        )  # fmt: skip
        heads = None if self.model == "linear" else dataclasses.replace(self, personalise="head").problem(given)
        found = dict(network_rivals(shared, adjusted, heads, clients, num_classes, refit=self.val_share > 0))
        if self.personalise == "head":
            return found
        return {name: rival._replace(start=None) for name, rival in found.items()}  # x is another variable

    def graded(self, scores: np.ndarray, labels: np.ndarray, owners: np.ndarray) -> dict[str, float]:
        return {**super().graded(scores, labels, owners), **graded_clients(scores, labels, owners)}

    def findings(self, problem: Problem, clients: Sequence[Holdings], result: Any) -> list[Finding]:
        return accuracies(problem, clients, result, role="test", right="test_right", of="test_samples")

    def _images(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Return images (n, pixels) in [0, 1], labels from 0, and the number of labels overall.

        The labels are counted before a share of the images is drawn.
        """
        if self.data == "digits":
            images, labels = digits()
        else:
            folder = idx.folder_of(self.data, self.data_dir)
            parts = [idx.images(folder, kind, self.split, emnist=self.data == "emnist") for kind in ("train", "test")]
            images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            images = images.reshape(len(images), -1)
        names, labels = np.unique(labels, return_inverse=True)  # the letters of EMNIST are numbered from 1
        rng = np.random.default_rng([self.data_seed, 0])
        used = np.sort(rng.choice(len(labels), max(1, round(self.share * len(labels))), replace=False))
        scale = np.float32(1 / 255 if images.dtype == np.uint8 else 1)
        return images[used] * scale, labels[used], len(names)

    def normalisation(self) -> list[tuple[float, float]]:
        """Return the mean and the divisor by which each cluster normalises its inputs."""
        rng = np.random.default_rng([self.data_seed, 1])
        return [
            (mean, max(spread, self.least_spread)) for mean, spread in rng.uniform(size=(self.num_clusters, 2)).tolist()
        ]

    def meanings(self, num_classes: int) -> list[np.ndarray]:
        """Return the label that each cluster gives to every class."""
        rng = np.random.default_rng([self.data_seed, 3])
        return [np.arange(num_classes), *(rng.permutation(num_classes) for _ in range(self.num_clusters - 1))]

    def _shifted(self, images: np.ndarray, labels: np.ndarray, cluster: int, num_classes: int) -> dict[str, Any]:
        """Return samples as the clients of a cluster hold them."""
        if self.shift == "labels":
            return {"image": images, "label": self.meanings(num_classes)[cluster][labels]}
        if self.shift == "rotations":
            return {"image": turned(images, cluster), "label": labels}
        mean, spread = self.normalisation()[cluster]
        return {"image": ((images - mean) / spread).astype(np.float32), "label": labels}

    def _clients(self, images: np.ndarray, labels: np.ndarray, num_classes: int) -> Sequence[Holdings]:
        rng, clients = np.random.default_rng([self.data_seed, 2]), []
        held = np.random.default_rng([self.data_seed, 4])  # other draws are those without validation samples
        for i, mine in enumerate(dirichlet(labels, self.num_clients, self.alpha, rng, self.least)):
            mine = rng.permutation(mine)
            num_test = round(0.2 * len(mine))  # at least one, as `least` is three or more
            num_stop = max(1, round(0.25 * (len(mine) - num_test)))
            test, stop, train = np.split(mine, [num_test, num_test + num_stop])
            parts = {"train": train, "stop": stop, "test": test}
            if self.val_share and len(train) > 1:
                parts["train"], parts["val"] = split_validation(train, self.val_share, held)
            roles = {
                role: self._shifted(images[own], labels[own], i % self.num_clusters, num_classes)
                for role, own in parts.items()
            }
            clients.append({**roles, "val": roles.get("val", roles["train"])})
        return clients

    def _layers(self, num_pixels: int, num_classes: int) -> dict[str, tuple[int, ...]]:
        scaled = lambda number: max(1, round(self.width * number))
        if self.model == "linear":
            return {"out": (num_classes, num_pixels)}
        if self.model == "mlp":
            return {"hidden": (scaled(_HIDDEN), num_pixels), "out": (num_classes, scaled(_HIDDEN))}
        side = math.isqrt(num_pixels)
        sizes = _SIZES[side]
        (first, second), (one, two), hidden = map(scaled, sizes.channels), sizes.kernels, scaled(sizes.hidden)
        rest = ((side - one + 1) // 2 - two + 1) // 2
        return {
            "conv1": (first, 1, one, one),
            "conv2": (second, first, two, two),
            "hidden": (hidden, second * rest * rest),
            "out": (num_classes, hidden),
        }

    def _score(self, network: Network, side: int, num_classes: int) -> Score:
        """Return the function (x, y, batch) -> scores (samples, classes).

        The class with the largest score is the prediction. For a mixture, the scores are logarithms
        of probabilities.
        """
        scale = num_classes if self.mask_scale == "classes" else 1

        def each(y: Any, batch: Any) -> Tensor:
            return torch.stack(
                [
                    network({name: leaf[m] for name, leaf in y.items()}, batch["image"], side)
                    for m in range(self.num_networks)
                ]
            )

        kinds: dict[str, Score] = {
            "mask": lambda x, y, batch: scale * softmax(x["lambda"], 0) * network(y, batch["image"], side),
            "ensemble": lambda x, y, batch: torch.tensordot(softmax(x["lambda"], 0), each(y, batch), 1),
            "mixture": lambda x, y, batch: torch.logsumexp(
                x["lambda"][:, None, None] + log_softmax(each(y, batch), -1), 0
            ),
            "output": lambda x, y, batch: (z := network(y, batch["image"], side)) + z @ x["lambda"].T,
            "head": lambda x, y, batch: network({**x, **y}, batch["image"], side),
            "none": lambda x, y, batch: network(y, batch["image"], side),
        }
        return kinds[self.personalise]


def _metrics(sums: Any) -> dict[str, float]:
    """Divide sums over all clients: each client counts in proportion to its samples."""
    return {
        f"{role}_accuracy": sums[f"{role}_right"] / sums[f"{role}_samples"]
        for role in ("test", "stop")
        if f"{role}_samples" in sums
    }
