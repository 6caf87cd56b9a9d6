"""Data cleaning: find wrong labels without sharing data.

Every client holds images with noisy labels, and a few images of a single class with clean labels.
So no client can clean its data alone. x_i holds one logit per training sample and never leaves its
client. y is a classifier that all clients share:

    g_i(x_i, y) = 1/n_i sum_j sigmoid(x_ij) CE(y; noisy_ij) + l2/2 |y|^2
    f_i(y)      = CE(y; clean_i)

A sample whose weight falls below one half is flagged as wrong.

With learn="labels", x_i holds C logits per training sample, one per class, and corrects its label:

    g_i(x_i, y) = 1/n_i sum_j CE(y; q_ij) + l2/2 |y|^2,   q_ij = softmax(x_ij + 8 e_label)

so x = 0 stands for the labels as they are given. A sample is flagged if its given label has q below
one half. Detectors of wrong labels need this form.

With loss="gce" or "sce", the lower level has a robust loss (tasks/robust_losses.py) in place of CE,
for `fedavg` on labels as they are given; it is not convex then, even for a linear model.

Models: `linear` makes the lower level strongly convex. `mlp`, three fully connected layers as in
the paper, does not: l2 cannot outweigh the negative curvature of a network, so y*(x) need not be
unique, H need not be positive definite and no method has its guarantee there. Second derivatives of
ReLU are taken as zero.

Labels: a share `noise` of the training labels is corrupted. `wrong` replaces each of these labels
by another label. `uniform` replaces it by any label, as in the paper: with c classes, a share 1/c
of the new labels is still right. Precision and recall count only labels that are really wrong. With
`wrong` and noise above 1 - 1/c, the true label is the rarest label. At noise 0.95 and ten classes,
an image has its true label with probability 0.05 and each wrong label with probability 0.106, so
training on all labels does worse than guessing. With `uniform` the probabilities are 0.145 and
0.095.

Setting of Li, Huang, Huang (NeurIPS 2023), section 5.1 and appendix B.1, by default on embedded
digits. Settings of the paper: data=mnist, num_train=4500, num_clean=50, flip=uniform, noise 0.1,
0.4, 0.8 or 0.95, model=mlp (the paper does not state the widths), l2=0.001. Differences from the
paper: the weighted loss is a mean over samples and weights pass through a sigmoid (the paper's
weights are neither normalised nor bounded); by default the model is linear and a corrupted label is
always wrong; x is private, so the factor 1/m of a stacked x is absent (divide the paper's step of x
by m).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedbilevel.data.corruption import flip_by_client, flip_labels
from fedbilevel.data.partition import iid, spread, take_per_class
from fedbilevel.data.random_features import RandomConvolutions
from fedbilevel.data.sets.cifar10 import human_labels
from fedbilevel.data.sets.digits import digits
from fedbilevel.data.sets.images import Images, train_and_test
from fedbilevel.errors import ProblemError
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem, Scopes
from fedbilevel.settings import setting
from fedbilevel.tasks import cleaning_losses
from fedbilevel.tasks.cleaning_rivals import cleaning_rivals
from fedbilevel.tasks.findings import Finding, accuracies, histogram, images
from fedbilevel.tasks.initial import uniform
from fedbilevel.tasks.rival import Rival, Way
from fedbilevel.tasks.robust_losses import Robust
from fedbilevel.tasks.task import Built, Shapes, Task

_SUSPICIOUS = 24  # images that are shown


@dataclass(frozen=True, kw_only=True)
class DataCleaning(Task):
    num_clients: int = setting(10, "clients; client i has clean samples of class i mod 10 only", symbol="M", least=1)
    data: Literal["digits", "mnist", "fashion", "cifar10"] = setting(
        "digits", "images; all but the embedded digits are read from files"
    )
    data_dir: str | None = setting(
        None, "folder of the files; None: $FEDBILEVEL_DATA, or shared/data beside the checkout"
    )
    share: float = setting(1.0, "share of all images that is used, if they are read from files", above=0, most=1)
    noise: float = setting(0.4, "share of training labels that are corrupted", symbol="rho", least=0, most=1)
    noise_most: float | None = setting(
        None,
        "largest share of a client: each client draws its own from noise to this value; None: noise",
        above=0,
        most=1,
    )
    noisy_clients: float = setting(
        1.0, "probability of a client to have corrupted labels, with noise_most", above=0, most=1
    )
    flip: Literal["wrong", "uniform", "asymmetric", "instance", "human"] = setting(
        "wrong",
        "a corrupted label is a wrong one; any label, also the true one, as in the paper; the next one; one that "
        "depends on the image; or one of human annotators (cifar10)",
    )
    human: Literal["aggregate", "random1", "random2", "random3", "worst"] = setting(
        "worst", "annotators of CIFAR-10N, for flip=human"
    )
    partition: Literal["iid", "dirichlet", "shards", "presence"] = setting(
        "iid", "how training images are spread over clients"
    )
    alpha: float = setting(0.5, "concentration of partition=dirichlet and of presence", above=0)
    presence: float = setting(
        0.7, "probability of a class to be present at a client, for partition=presence", above=0, most=1
    )
    num_train: int | None = setting(
        None, "noisy training samples per client, 4500 in the paper; None: all that are left", least=1
    )
    num_clean: int = setting(20, "clean validation samples per client, 50 in the paper", least=1)
    test_share: float = setting(
        0.25, "share of the digits kept for testing; the other sets have a test part of their own", above=0, most=0.9
    )
    learn: Literal["weights", "labels"] = setting(
        "weights", "x is one weight per training sample, or one logit per sample and class"
    )
    features: Literal["pixels", "convolutional"] = setting(
        "pixels", "the model reads pixels, or random convolutional features by a shared seed"
    )
    model: Literal["linear", "mlp"] = setting("linear", "convex, or three fully connected layers, which are not")
    num_hidden: int = setting(100, "units of each of the two hidden layers of the MLP", least=1)
    l2: float = setting(0.01, "weight of the squared norm of y in the lower level", above=0)
    loss: Literal["cross_entropy", "gce", "sce"] = setting(
        "cross_entropy", "loss of the lower level: cross-entropy, or its generalised or symmetric robust form"
    )
    gce_power: float = setting(0.7, "exponent of gce: near 0 cross-entropy, 1 linear", symbol="q", above=0, most=1)
    sce_forward: float = setting(0.1, "weight of cross-entropy in sce", symbol="alpha", above=0)
    sce_reverse: float = setting(1.0, "weight of reverse cross-entropy in sce", symbol="beta", above=0)
    sce_floor: float = setting(-4.0, "logarithm of zero in sce", symbol="A", most=-0.01)
    data_seed: int = setting(0, "seed of the split, of the noise and of the initial weights of the MLP", least=0)

    # Single-class validation data make the clients' own systems H_i u = f_y,i very different: methods that step u
    # locally drift, so one local step is suggested for them. These values are for the digits.
    suggested = {
        "*": {"lr_lower": 1.0, "lr_system": 1.0, "lr_upper": 30.0, "num_local_steps": 1},
        "fedavg": {"num_local_steps": 5},
        "fednest": {"lr_upper": 2000.0, "num_lower_rounds": 3, "num_terms": 10, "num_local_steps": 5},
        "fbo_aggitd": {"lr_upper": 1000.0, "num_lower_rounds": 5, "num_local_steps": 5},
    }
    suggested_iterations = {
        "*": 400, "fedavg": 100, "fednest": 60, "fbo_aggitd": 60, "label_em": 51, "from_posterior": 51,
        "shared_weights": 71, **dict.fromkeys(("confident", "own_loss", "influence", "sample_weights"), 42),
    }  # fmt: skip
    avoid = "labels are known to be right: detection then costs its rounds for nothing, and may flag some right labels"
    headline = ("test_accuracy", "f1", "precision", "recall")
    needs = {
        "train": {
            "image": "one row of numbers per sample",
            "label": "its class as it is noted, right or wrong, from 0",
        },
        "val": {"image": "as in train", "label": "its true class"},
    }
    measures = {
        "train": {"wrong": "whether the noted class is wrong: for precision, recall and f1"},
        "test": {"image": "as in train", "label": "its true class: for test_accuracy"},
    }

    def build(self) -> Built:
        rng = np.random.default_rng(self.data_seed)
        images, rest, test = self._images(rng)
        labels = images.label
        num_classes = int(labels.max()) + 1
        holders = [sum(1 for i in range(self.num_clients) if i % num_classes == label) for label in range(num_classes)]
        clean = {
            label: rest[places]
            for label, places in take_per_class(labels[rest], self.num_clean * max(holders), rng).items()
        }
        train = self._some(
            np.setdiff1d(rest, np.concatenate([clean[label][: self.num_clean * holders[label]] for label in clean])),
            rng,
        )
        noisy, parts = self._noisy(images, train, num_classes, rng)
        wrong = noisy != labels[train]
        clients = []
        for i, (mine, testing) in enumerate(zip(parts, iid(len(test), self.num_clients, rng), strict=True)):
            start = i // num_classes * self.num_clean
            own = clean[i % num_classes][start : start + self.num_clean]
            clients.append(
                {
                    "train": {"image": images.image[train[mine]], "label": noisy[mine], "wrong": wrong[mine]},
                    "val": images.some(own).fields(),
                    "test": test.some(testing).fields(),
                }
            )
        return Built(self.problem(Shapes.of(clients[0], num_classes)), clients)

    def problem(self, shapes: Shapes) -> Problem:
        self.check(shapes)
        shapes.sample("label", "train", "val", "test", kinds=("int",), ndim=0)
        (dim,) = shapes.sample("image", "train", "val", "test", ndim=1)
        num_classes, random = shapes.classes(), None
        robust = Robust(self.loss, self.gce_power, self.sce_forward, self.sce_reverse, self.sce_floor)
        fit = partial(cleaning_losses.corrected if self.learn == "labels" else cleaning_losses.trusted, robust)
        if self.features == "convolutional":
            random = RandomConvolutions.of(dim)
            dim = random.num_features
        marked, tested = shapes.has("train", "wrong"), shapes.has("test", "image", "label")
        if marked:
            shapes.sample("wrong", "train", kinds=("bool", "int"), ndim=0)
        return Problem(
            upper=lambda x, y, batch: cleaning_losses.losses(y, batch),
            lower=lambda x, y, batch: fit(x, y, batch) + 0.5 * self.l2 * sum((leaf**2).sum() for leaf in y.values()),
            x0=lambda sizes: {"logit": torch.zeros(sizes["train"] * (num_classes if self.learn == "labels" else 1))},
            y0=self._start(dim, num_classes),
            scopes=Scopes(upper="private"),
            features=None if random is None else (lambda x, batch: random(batch["image"])),
            statistics={
                "val": cleaning_losses.validated,
                **(
                    {"train": partial(cleaning_losses.flagged, num_classes if self.learn == "labels" else None)}
                    if marked
                    else {}
                ),
                **({"test": cleaning_losses.tested} if tested else {}),
            },
            metrics=cleaning_losses.metrics,
            name="data_cleaning",
        )

    def rivals(self) -> Mapping[str, Rival]:
        """Return training on the labels as given, on these and the clean ones, and with a robust loss."""
        return cleaning_rivals(*self.build(), self.l2, self.gce_power)

    def refits(self, problem: Problem, clients: Any, x: Any) -> Mapping[str, Way]:
        """Return none: a weight belongs to a training sample, and clean samples have none."""
        return {}

    def findings(self, problem: Problem, clients: Sequence[Holdings], result: Any) -> list[Finding]:
        """Return weights of clean and corrupted samples, samples of least weight, and accuracy."""
        served = accuracies(problem, clients, result, role="test", right="right", of="tested")
        if result.x is None:  # weights never leave their site
            return served
        weights = [
            cleaning_losses.trust(
                tree["logit"].detach().double().cpu(), torch.as_tensor(np.asarray(client["train"]["label"]))
            ).numpy()
            for tree, client in zip(result.x, clients, strict=True)
        ]
        every = np.concatenate(weights)
        if every.min() == every.max():  # a method that learns no weights
            return served
        marked = all("wrong" in client["train"] for client in clients)
        field = lambda name: np.concatenate([np.asarray(client["train"][name]) for client in clients])
        wrong = field("wrong").astype(bool) if marked else np.zeros(len(every), bool)
        groups = {"clean": every[~wrong], "corrupted": every[wrong]} if marked else {"all samples": every}
        about = (
            "A sample whose weight falls below one half is flagged as wrong. "
            "The weights are learned at each client and never leave it."
        )
        found: list[Finding | None] = [
            histogram("Learned weights of training samples", about, "weight", groups, np.linspace(0, 1, 41))
        ]
        owner = np.repeat(np.arange(len(weights)), [len(own) for own in weights])
        place = np.concatenate([np.arange(len(own)) for own in weights])
        first, labels = np.argsort(every, kind="stable")[:_SUSPICIOUS], field("label")
        facts: list[dict[str, Any]] = [
            {
                "client": int(owner[i]),
                "sample": int(place[i]),
                "label": int(labels[i]),
                "weight": float(every[i]),
                "wrong": bool(wrong[i]),
            }
            for i in first
        ]
        facts = facts if marked else [{name: value for name, value in one.items() if name != "wrong"} for one in facts]
        about = "The samples with the smallest weights of all clients, and the label that is noted for them" + (
            f"; {int(wrong[first].sum())} of these {len(first)} labels are really wrong." if marked else "."
        )
        looks = np.stack([np.asarray(clients[owner[i]]["train"]["image"])[place[i]] for i in first])
        found.append(images("Most suspicious samples", about, looks, facts))
        return [*(one for one in found if one is not None), *served]

    def _noisy(
        self, images: Images, train: np.ndarray, num_classes: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the given labels of the training images, and the parts of the clients."""
        labels = images.label[train]
        if self.noisy_clients < 1 and (self.noise_most is None or self.flip == "human"):
            raise ProblemError(
                f"noisy_clients is {self.noisy_clients}, but noise is the same at all clients: set noise_most too, and "
                "another flip than 'human'."
            )
        parts = lambda: spread(labels, self.num_clients, self.partition, rng, alpha=self.alpha, share=self.presence)
        if self.flip == "human":
            if self.data != "cifar10" or self.share != 1:
                raise ProblemError(
                    f"flip is 'human' for a share of {self.share} of {self.data}, but annotators labelled all images "
                    "of cifar10: use data='cifar10' and share=1, or another flip."
                )
            return human_labels(self.human, self.data_dir)[train], parts()
        rows = images.image[train]
        if self.noise_most is not None:
            return flip_by_client(
                labels, parts(), (self.noise, self.noise_most), num_classes, rng, to=self.flip, rows=rows,
                chance=self.noisy_clients,
            )  # fmt: skip
        return flip_labels(labels, self.noise, num_classes, rng, to=self.flip, rows=rows)[0], parts()

    def _images(self, rng: np.random.Generator) -> tuple[Images, np.ndarray, Images]:
        """Return images, the positions of those that are not for testing, and the test images."""
        if self.data != "digits":
            train, test = train_and_test(self.data, rng, share=self.share, data_dir=self.data_dir)
            return train, np.arange(len(train)), test
        images = Images(*digits())
        testing, rest = np.split(rng.permutation(len(images)), [round(self.test_share * len(images))])
        return images, rest, images.some(testing)

    def _some(self, places: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Choose the requested number of positions for training."""
        if self.num_train is None:
            return places
        num = self.num_train * self.num_clients
        if len(places) < num:
            raise ProblemError(
                f"num_train is {self.num_train} for each of {self.num_clients} clients, but only {len(places)} "
                "images are left for training: use at most "
                f"{len(places) // self.num_clients}, or fewer clients."
            )
        return np.sort(rng.choice(places, num, replace=False))

    def _start(self, dim: int, num_classes: int) -> dict[str, Tensor]:
        """Return zeros for the convex linear model, and random weights for a network.

        A network that starts from zeros would never learn.
        """
        if self.model == "linear":
            return {"weight": torch.zeros(dim, num_classes), "bias": torch.zeros(num_classes)}
        hidden = self.num_hidden
        shapes = {"hidden1": (hidden, dim), "hidden2": (hidden, hidden), "head": (num_classes, hidden)}
        return uniform(shapes, torch.Generator().manual_seed(self.data_seed))
