"""Imbalance: learn a loss under which training on a long tail of classes serves all classes.

Class c has about imbalance_ratio^(-c/(C-1)) times as many training images as class 0, validation
images are equally many of every class, and y is a classifier that all clients share. x = (delta,
ell) holds two numbers per class, shared by all, which adjust logits z = z(y) in training only:

    g_i(x, y) = CE(s * z + ell; train_i) + l2/2 |y|^2,   s_c = 2 sigmoid(delta_c)
    f_i(y)    = CE(z; val_i)

This is the vector-scaling loss: s_c multiplies and ell_c shifts the logit of class c. At the start
x = 0, s = 1 and the loss is plain cross-entropy, so FedAvg with x at its start is ordinary
training. s lies in (0, 2), so x can raise the curvature of the lower level four times and no more.
Every client has `num_val` validation images of every class, which makes the plain mean f_i the
class-balanced one. `start = "adjusted"` starts ell at the logarithm of the class priors of the long
tail, so that training at the start is logit adjustment instead of plain training.

Rivals, on training and validation images together, each image counting the same: `plain`
cross-entropy; `logit_adjustment` (Menon et al., ICLR 2021), cross-entropy of z + log prior;
`class_balanced` (Cui et al., CVPR 2019), cross-entropy weighted by (1 - beta) / (1 - beta^n_c) with
beta = 1 - 1/n. Priors and counts n_c need one sum over clients, n is the number of all images.

Figures: balanced test accuracy is the mean over classes of the share of right answers, and
the accuracy of the rarest class is that of the last class.

The long-tail task of Tarzanagh et al., "FedNest", ICML 2022, whose published code has two numbers
per class and sizes 0.01^(c/9) on MNIST (imbalance_ratio 100), by default on embedded digits, which
are too few for such a ratio. Choices of this project: delta enters through 2 sigmoid; the
classifier is linear by default, so that the lower level is strongly convex; labels are spread
unevenly over clients. Plain training never sees the validation images, so part of the gain of
learning x is the gain of using them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu, linear

from fedbilevel.data.partition import dirichlet, iid, take_per_class
from fedbilevel.data.sets.images import Images, train_and_test
from fedbilevel.errors import ProblemError
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.settings import setting
from fedbilevel.tasks.findings import Finding, by_client, counted, of_client, ranking, share
from fedbilevel.tasks.initial import uniform
from fedbilevel.tasks.rival import Rival, Way, with_validation
from fedbilevel.tasks.task import Built, Shapes, Task

Loss = Callable[[Tensor, Any], Tensor]  # of logits and a batch

_SPREAD = 0.5  # deviation of x from logit adjustment that a bilevel run expects


@dataclass(frozen=True, kw_only=True)
class Imbalance(Task):
    num_clients: int = setting(10, "clients", symbol="m", least=1)
    data: Literal["digits", "mnist", "fashion", "hapt"] = setting(
        "digits", "images, or windows of movements (hapt); all but the embedded digits are read from files"
    )
    data_dir: str | None = setting(
        None, "folder of the files; None: $FEDBILEVEL_DATA, or shared/data beside the checkout"
    )
    share: float = setting(
        1.0, "share of all images from which training, validation and test images are taken", above=0, most=1
    )
    test_share: float = setting(
        0.25,
        "share of the digits, or of the people of hapt, kept for testing; other sets have a test part",
        above=0,
        most=0.9,
    )
    imbalance_ratio: float = setting(
        20.0, "training images of the commonest class for each one of the rarest", symbol="rho", least=1
    )
    num_val: int = setting(3, "validation images of every class at each client", least=1)
    split: Literal["iid", "dirichlet"] = setting(
        "dirichlet", "training images at random, or labels spread unevenly over clients"
    )
    alpha: float = setting(
        1.0, "how evenly a Dirichlet distribution spreads labels over clients; smaller: less", symbol="alpha", above=0
    )
    model: Literal["linear", "mlp"] = setting(
        "linear", "the classifier: linear, or with one hidden layer and GELU, whose lower level is not convex"
    )
    num_hidden: int = setting(32, "units of the hidden layer", least=1)
    l2: float = setting(0.01, "weight of the squared norm of y in the lower level", above=0)
    start: Literal["plain", "adjusted"] = setting(
        "plain", "initial x: plain cross-entropy, or logit adjustment by the priors of the long tail"
    )
    data_seed: int = setting(0, "seed of the split and of the initial weights", least=0)

    suggested = {
        "*": {"lr_lower": 0.5, "lr_system": 0.3, "lr_upper": 0.5, "num_local_steps": 1},
        "fedavg": {"num_local_steps": 5},
        "fbo_aggitd": {"lr_upper": 3.0, "num_lower_rounds": 5},
        "fednest": {"lr_upper": 3.0, "num_lower_rounds": 3, "num_terms": 5},
        "lfednest": {"lr_upper": 1.0, "num_lower_rounds": 3},
    }
    suggested_iterations = {"*": 200, "fedavg": 100, "fbo_aggitd": 60, "fednest": 60, "lfednest": 100}
    avoid = (
        "the frequencies of the classes are known and only they differ: logit adjustment corrects them in closed form"
    )
    classes = True
    headline = ("balanced_test_accuracy", "rarest_test_accuracy")
    needs = {
        "train": {"image": "one row of numbers per sample", "label": "its class from 0, the commonest first"},
        "val": {"image": "as in train", "label": "its class; about as many samples of every class"},
    }
    measures = {"test": {"image": "as in train", "label": "its class: for the accuracies"}}

    def build(self) -> Built:
        rng = np.random.default_rng([self.data_seed, 0])
        pool, test = train_and_test(
            self.data, rng, share=self.share, test_share=self.test_share, data_dir=self.data_dir
        )
        num_classes = int(pool.label.max()) + 1
        val = take_per_class(pool.label, self.num_clients * self.num_val, rng)
        train = pool.some(self._tail(pool, np.concatenate(list(val.values())), rng))
        clients: list[Holdings] = []
        for i, (mine, testing) in enumerate(
            zip(self._dealt(train.label, rng), iid(len(test), self.num_clients, rng), strict=True)
        ):
            own = np.concatenate([places[i * self.num_val : (i + 1) * self.num_val] for places in val.values()])
            clients.append(
                {
                    "train": train.some(mine).fields(),
                    "val": pool.some(own).fields(),
                    "test": test.some(testing).fields(),
                }
            )
        return Built(self.problem(Shapes.of(clients[0], num_classes)), clients)

    def problem(self, shapes: Shapes) -> Problem:
        self.check(shapes)
        shapes.sample("label", "train", "val", "test", kinds=("int",), ndim=0)
        (num_pixels,) = shapes.sample("image", "train", "val", "test", ndim=1)
        num_classes, tested = shapes.classes(), shapes.has("test", "image", "label")
        return Problem(
            upper=lambda x, y, batch: _entropy(_logits(y, batch), batch),
            lower=lambda x, y, batch: _entropy(_adjusted(x, y, batch), batch) + self._decay(y),
            x0={"delta": torch.zeros(num_classes), "ell": self._shifts(num_classes)},
            y0=self._weights(num_pixels, num_classes),
            statistics={"test": _tested(num_classes)} if tested else {},
            metrics=_metrics(num_classes) if tested else lambda sums: {},
            name="imbalance",
        )

    def _shifts(self, num_classes: int) -> Tensor:
        """Return the initial ell: the log priors of the long tail with mean zero, or zeros."""
        if self.start == "plain":
            return torch.zeros(num_classes)
        places = torch.arange(num_classes) / max(1, num_classes - 1)
        return (0.5 - places) * math.log(self.imbalance_ratio)

    def rivals(self) -> dict[str, Rival]:
        built = self.build()
        num_classes = len(built.problem.y0["out.bias"])

        def way(loss: Callable[[Tensor], Loss], clients: Sequence[Holdings]) -> Way:
            """Return training of y alone; the loss depends on the numbers of training images by class."""
            labels = np.concatenate([client["train"]["label"] for client in clients])
            counts = torch.as_tensor(np.bincount(labels, minlength=num_classes).clip(1), dtype=torch.float32)
            own = loss(counts)
            lower = lambda x, y, batch: own(_logits(y, batch), batch) + self._decay(y)
            return Way(replace(built.problem, lower=lower, client_weights="by_samples"), clients)

        def rival(title: str, loss: Callable[[Tensor], Loss], **more: Any) -> Rival:
            last = lambda label: way(loss, with_validation(built.clients))
            return Rival(title, {"train": way(loss, built.clients)}, refit=last, **more)

        return {
            "plain": rival("cross-entropy on all images", lambda counts: _entropy),
            "logit_adjustment": rival(
                "cross-entropy of logits shifted by log priors",
                _shifted,
                start=lambda label, run: self._started(built, run.y),
            ),
            "class_balanced": rival("cross-entropy weighted by effective numbers of samples", _balanced),
        }

    def _started(self, built: Built, y: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return where a bilevel run begins: at logit adjustment of training images, with a prior around it.

        The prior is normal with the deviation _SPREAD, so that a few validation images move x a little
        and many move it far. Its weight is that of one image among all validation images.
        """
        shifts = _log_priors(built.clients, len(built.problem.y0["out.bias"]), "equal")
        x0 = {"delta": torch.zeros_like(shifts), "ell": shifts - shifts.mean()}
        weight = 1 / (_SPREAD**2 * sum(len(client["val"]["label"]) for client in built.clients))

        def upper(x: Any, y: Any, batch: Any) -> Tensor:
            moved = sum(((x[name] - x0[name].to(x[name])) ** 2).sum() for name in x0)
            return built.problem.upper(x, y, batch) + 0.5 * weight * moved

        return {"x0": x0, "y0": y, "upper": upper}

    def refits(self, problem: Problem, clients: Sequence[Holdings], x: Mapping[str, Tensor]) -> Mapping[str, Way]:
        """Return training on all images, each counting the same, as the rivals train.

        ell moves by as much as the log priors do, so that logit adjustment stays logit adjustment.
        """
        pooled, num_classes = with_validation(clients), len(x["ell"])
        moved = _log_priors(pooled, num_classes, "by_samples") - _log_priors(clients, num_classes, "equal")
        x0 = {**x, "ell": x["ell"] + moved.to(x["ell"])}
        return {"refitted": Way(replace(problem, x0=x0, client_weights="by_samples"), pooled)}

    def graded(self, scores: np.ndarray, labels: np.ndarray, owners: np.ndarray) -> dict[str, float]:
        num_classes, right = scores.shape[1], scores.argmax(1) == labels
        kinds = {"right": labels[right], "tested": labels}
        sums = {f"{name}_{c}": int((own == c).sum()) for name, own in kinds.items() for c in range(num_classes)}
        return _metrics(num_classes)(sums)

    def _decay(self, y: Any) -> Any:
        return 0.5 * self.l2 * sum((leaf**2).sum() for leaf in y.values())

    def findings(self, problem: Problem, clients: Sequence[Holdings], result: Any) -> list[Finding]:
        """Return accuracy, learned scale and shift of every class, and accuracies of clients."""
        found = counted(problem, clients, result, "test")
        if not found:
            return []
        classes = range(sum(name.startswith("tested_") for name in found[0]))
        own = [
            share(sum(one[f"right_{c}"] for c in classes), sum(one[f"tested_{c}"] for c in classes)) for one in found
        ]
        served = by_client(
            "Test accuracy of every client", "On the samples that the client itself holds.", {"test_accuracy": own}
        )
        if not isinstance(result.x, Mapping):  # every peer has its own x
            return [served]
        x, labels = of_client(result.x, 0), np.concatenate([np.asarray(client["train"]["label"]) for client in clients])
        scales, shifts = (2 * torch.sigmoid(x["delta"])).tolist(), x["ell"].tolist()
        accuracy = [
            share(sum(one[f"right_{c}"] for one in found), sum(one[f"tested_{c}"] for one in found)) for c in classes
        ]
        rows = [[c, int((labels == c).sum()), scales[c], shifts[c], accuracy[c]] for c in classes]
        about = (
            "In training, logits of a class are multiplied by its scale, and its shift is added; "
            "both start where they change nothing, at one and zero."
        )
        return [
            ranking(
                "Classes, the commonest first",
                about,
                ("class", "training_samples", "scale", "shift", "test_accuracy"),
                rows,
            ),
            served,
        ]

    def _tail(self, pool: Images, taken: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Choose n_c = n_0 ratio^(-c/(C-1)) training samples of each class c.

        Validation samples are excluded. n_0 is the largest number for which every class has enough
        samples.
        """
        left = [np.setdiff1d(np.flatnonzero(pool.label == label), taken) for label in range(int(pool.label.max()) + 1)]
        falls = self.imbalance_ratio ** (-np.arange(len(left)) / max(1, len(left) - 1))
        most = min(len(places) / fall for places, fall in zip(left, falls, strict=True))
        sizes = [int(most * fall + 1e-9) for fall in falls]
        if sizes[-1] < 1:
            raise ProblemError(
                f"with imbalance_ratio {self.imbalance_ratio:g} and {most:.0f} training images of the commonest "
                "class none is left of the rarest: use a smaller ratio, fewer validation images or more data."
            )
        return np.sort(
            np.concatenate([rng.choice(places, size, replace=False) for places, size in zip(left, sizes, strict=True)])
        )

    def _dealt(self, labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        return (
            iid(len(labels), self.num_clients, rng)
            if self.split == "iid"
            else dirichlet(labels, self.num_clients, self.alpha, rng)
        )

    def _weights(self, num_pixels: int, num_classes: int) -> dict[str, Tensor]:
        """Return zeros for the linear classifier, and uniform weights for a network.

        With zeros, all hidden units would stay equal.
        """
        if self.model == "linear":
            return {"out.weight": torch.zeros(num_classes, num_pixels), "out.bias": torch.zeros(num_classes)}
        shapes = {"hidden": (self.num_hidden, num_pixels), "out": (num_classes, self.num_hidden)}
        return uniform(shapes, torch.Generator().manual_seed(self.data_seed))


def _log_priors(clients: Sequence[Holdings], num_classes: int, weights: Literal["equal", "by_samples"]) -> Tensor:
    """Return the logarithms of class frequencies in a lower level that weighs clients like this.

    Every class counts one image at least.
    """
    counts = np.stack([np.bincount(one["train"]["label"], minlength=num_classes) for one in clients]).astype(float)
    sizes = counts.sum(1, keepdims=True)
    shares = counts / sizes if weights == "equal" else counts / sizes.mean()
    return torch.as_tensor(np.log(shares.mean(0).clip(1 / counts.sum())), dtype=torch.float32)


def _logits(y: Any, batch: Any) -> Tensor:
    z = batch["image"]
    if "hidden.weight" in y:
        z = gelu(linear(z, y["hidden.weight"], y["hidden.bias"]))
    return linear(z, y["out.weight"], y["out.bias"])


def _adjusted(x: Any, y: Any, batch: Any) -> Tensor:
    return 2 * torch.sigmoid(x["delta"]) * _logits(y, batch) + x["ell"]


def _entropy(logits: Tensor, batch: Any) -> Tensor:
    return cross_entropy(logits, batch["label"], reduction="none")


def _shifted(counts: Tensor) -> Loss:
    shifts = (counts / counts.sum()).log()
    return lambda logits, batch: _entropy(logits + shifts.to(logits), batch)


def _balanced(counts: Tensor) -> Loss:
    num = float(counts.sum())
    numbers = -torch.expm1(counts * math.log1p(-1 / num))  # of effective samples, times 1 - beta
    weights = (1 / numbers) / (counts / numbers).sum() * num
    return lambda logits, batch: weights.to(logits)[batch["label"]] * _entropy(logits, batch)


def _tested(num_classes: int) -> Callable[[Any, Any, Any], dict[str, Tensor]]:
    def tested(x: Any, y: Any, batch: Any) -> dict[str, Tensor]:
        right = _logits(y, batch).argmax(-1) == batch["label"]
        counts: dict[str, Tensor] = {}
        for label in range(num_classes):
            here = batch["label"] == label
            counts |= {f"right_{label}": here & right, f"tested_{label}": here}
        return counts

    return tested


def _metrics(num_classes: int) -> Callable[[Any], dict[str, float]]:
    """Return the function that divides right answers by samples, per class and over all clients.

    Classes without a test sample are skipped.
    """

    def metrics(sums: Any) -> dict[str, float]:
        each = {
            label: sums[f"right_{label}"] / sums[f"tested_{label}"]
            for label in range(num_classes)
            if sums[f"tested_{label}"]
        }
        return {
            "balanced_test_accuracy": sum(each.values()) / len(each),
            "rarest_test_accuracy": each.get(num_classes - 1, math.nan),
            "test_accuracy": sum(sums[f"right_{label}"] for label in range(num_classes))
            / sum(sums[f"tested_{label}"] for label in range(num_classes)),
        }

    return metrics
