"""Representation: hidden layers that all clients share, and a head of each client's own.

Each client has a few labels, or is one person. x holds the hidden layers and is the same for all;
y_i holds the last layer and never leaves its client:

    g_i(x, y_i) = CE(x, y_i; train_i) + l2/2 |y_i|^2          f_i(x, y_i) = CE(x, y_i; val_i)

So the body is judged by samples that the heads have not seen. A body that is trained on the samples
of the heads, as in FedRep, may make heads that fit a few samples by heart.

The losses and networks are those of `hyper_representation` with a local lower level. The data
differ: a client's test samples are like its training samples, because its own head is judged.

    labels   each client has `num_labels` of the classes; the images of a class are divided among
             the clients that have it, in training and in testing (FedRep: 100 clients of CIFAR-10
             with two classes each)
    people   the windows of HAPT: each client is a person. Windows are split in time within each
             activity: the first are for training, then for validation, the last for testing.
             Neighbouring windows overlap, so the window before each border is left out

Use it when clients differ in their labels or in the meaning of labels, and each has too few samples
for a network of its own. Do not use it when all clients share one distribution: FedAvg on the whole
network then trains one head on all samples. Compare with the plain ways first. In the records of
`worth`, a bilevel run from the usual start beats Ditto, FedBABU and FedAvg, also with own label priors
and standardised inputs, on people of HAPT (five repetitions), but neither FedRep nor own heads nor
fine-tuning. On a tenth of CIFAR-10 (five repetitions) it beats FedAvg alone.

Compare Collins et al., "Exploiting Shared Representations for Personalized Federated Learning",
ICML 2021. Choices of this project: the bilevel form, the sizes and the split of HAPT.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from fedbilevel.data.partition import by_id, split_validation
from fedbilevel.data.sets.hapt import hapt, summaries
from fedbilevel.data.sets.images import NUM_CHANNELS, Images, standardised, train_and_test
from fedbilevel.errors import ProblemError
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem, Scopes
from fedbilevel.settings import setting
from fedbilevel.tasks.findings import Finding, accuracies
from fedbilevel.tasks.hyper_representation import HyperRepresentation
from fedbilevel.tasks.personal_rivals import across_clients, graded_clients, network_rivals
from fedbilevel.tasks.rival import Rival
from fedbilevel.tasks.task import Built, Shapes, Task


@dataclass(frozen=True, kw_only=True)
class Representation(Task):
    num_clients: int = setting(10, "clients; FedRep: 100; HAPT has 30 people", symbol="m", least=1)
    data: Literal["digits", "mnist", "fashion", "cifar10", "hapt"] = setting(
        "digits", "samples; all but the embedded digits are read from files"
    )
    data_dir: str | None = setting(
        None, "folder of the files; None: $FEDBILEVEL_DATA, or shared/data beside the checkout"
    )
    share: float = setting(
        0.3, "share of all samples that is used; of HAPT, windows at equal distances", above=0, most=1
    )
    num_labels: int = setting(2, "classes of each client; not for HAPT", least=1)
    val_share: float = setting(0.3, "share of a client's training samples for the upper level", above=0, most=0.9)
    test_share: float = setting(0.25, "share kept for testing, of sets without a test part", above=0, most=0.9)
    model: Literal["mlp", "cnn"] = setting("mlp", "one hidden layer, or two convolutions and a hidden layer")
    num_hidden: int | None = setting(50, "units of the hidden layer; None: as in hyper_representation", least=1)
    l2: float = setting(0.01, "weight of the squared norm of a head", above=0)
    data_seed: int = setting(0, "seed of the split and of the initial weights", least=0)

    suggested = {
        "*": {"lr_lower": 0.5, "lr_system": 0.2, "lr_upper": 0.2, "num_local_steps": 5},
        "fedbio_local": {"u": "local"},
    }
    suggested_iterations = {"*": 100}
    avoid = "all clients share one distribution: FedAvg on the whole network then trains one head on all samples"
    classes = True
    headline = ("test_accuracy", "test_accuracy_bottom_decile")
    needs = HyperRepresentation.needs
    measures = {"test": {"image": "as in train", "label": "its class: for test_accuracy and how it differs by client"}}

    def build(self) -> Built:
        rng = np.random.default_rng([self.data_seed, 0])
        clients, num_classes = self._people(rng) if self.data == "hapt" else self._by_label(rng)
        return Built(self.problem(Shapes.of(clients[0], num_classes)), clients)

    def problem(self, shapes: Shapes) -> Problem:
        self.check(shapes)
        across = across_clients if shapes.has("test", "image", "label") else None
        return dataclasses.replace(self._network().problem(shapes), across=across, name="representation")

    def graded(self, scores: np.ndarray, labels: np.ndarray, owners: np.ndarray) -> dict[str, float]:
        return {**super().graded(scores, labels, owners), **graded_clients(scores, labels, owners)}

    def findings(self, problem: Problem, clients: Sequence[Holdings], result: Any) -> list[Finding]:
        return accuracies(problem, clients, result, role="test", right="test_right", of="test_samples")

    def rivals(self) -> Mapping[str, Rival]:
        """Return plain ways on the same network; where all of it is trained, l2 is still that of the head."""
        own, clients = self.build()
        num_pixels, num_classes = clients[0]["train"]["image"].shape[1], len(own.y0["head.bias"])
        assert isinstance(own.x0, Mapping)
        whole = {**own.x0, **own.y0}
        unused = {"unused": torch.zeros(1)}
        score = self._network().score(num_pixels)
        plain, adjusted = (
            self._network().classified(of, unused, whole, Scopes(), ("test", "train"), across_clients)
            for of in (
                lambda x, y, batch: score(y, batch),
                lambda x, y, batch: score(y, batch) + batch["prior"],
            )
        )
        return network_rivals(plain, adjusted, own, clients, num_classes, refit=True)

    def _network(self) -> HyperRepresentation:
        return HyperRepresentation(
            model=self.model, num_hidden=self.num_hidden, l2=self.l2, lower="local", data_seed=self.data_seed
        )

    def _by_label(self, rng: np.random.Generator) -> tuple[list[Holdings], int]:
        train, test = train_and_test(
            self.data, rng, share=self.share, test_share=self.test_share, data_dir=self.data_dir
        )
        train, test = standardised(train, test, NUM_CHANNELS.get(self.data, 1))
        num_classes = int(train.label.max()) + 1
        if self.num_labels > num_classes:
            raise ProblemError(
                f"num_labels is {self.num_labels}, but there are {num_classes} classes: use fewer labels."
            )
        # classes in a random order, over and over, so that each has as many clients as the others
        dealt = np.concatenate([rng.permutation(num_classes) for _ in range(self.num_clients * self.num_labels)])
        labels = [dealt[i * self.num_labels : (i + 1) * self.num_labels] for i in range(self.num_clients)]
        mine, testing = (_among(part, labels, rng) for part in (train, test))
        clients: list[Holdings] = []
        for own, rest in zip(mine, testing, strict=True):
            first, second = split_validation(own, self.val_share, rng)
            clients.append({"train": train.some(first).fields(), "val": train.some(second).fields(),
                            "test": test.some(rest).fields()})  # fmt: skip
        return clients, num_classes

    def _people(self, rng: np.random.Generator) -> tuple[list[Holdings], int]:
        found = hapt(self.data_dir)
        people = by_id(found.subject)
        if self.num_clients > len(people):
            raise ProblemError(
                f"num_clients is {self.num_clients}, but HAPT has {len(people)} people: use fewer clients."
            )
        parts = []
        for person in rng.permutation(list(people))[: self.num_clients]:
            cut = [_in_time(own, self.share, self.val_share, self.test_share)
                   for own in _by_activity(people[person], found.label)]  # fmt: skip
            parts.append([np.concatenate(some) for some in zip(*cut, strict=True)])
        rows = summaries(found.x)
        known = rows[np.concatenate([train for train, _, _ in parts])]
        scaled = Images(((rows - known.mean(0)) / np.maximum(known.std(0), 1e-6)).astype(np.float32), found.label)
        clients: list[Holdings] = [
            {role: scaled.some(own).fields() for role, own in zip(("train", "val", "test"), some, strict=True)}
            for some in parts
        ]
        return clients, len(found.label_names)


def _among(images: Images, labels: Sequence[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
    """Divide the images of each class among the clients that have it."""
    parts: list[list[np.ndarray]] = [[] for _ in labels]
    for label in np.unique(np.concatenate(list(labels))):
        # a client may have a class twice, at the border of two orders, and then gets two parts
        owners = [i for i, own in enumerate(labels) for one in own if one == label]
        places = rng.permutation(np.flatnonzero(images.label == label))
        if len(places) < 2 * len(owners):
            raise ProblemError(
                f"class {label} has {len(places)} samples for {len(owners)} clients, expected two for each: use fewer "
                "clients or a larger share."
            )
        for i, some in zip(owners, np.array_split(places, len(owners)), strict=True):
            parts[i].append(some)
    return [np.sort(np.concatenate(own)) for own in parts]


def _by_activity(places: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
    return [places[labels[places] == label] for label in np.unique(labels[places])]


def _in_time(places: np.ndarray, share: float, val_share: float, test_share: float) -> tuple[np.ndarray, ...]:
    """Split the windows of one activity, which are in order, into training, validation and test parts.

    The last window of a part is left out if the next window that another part uses overlaps with it.
    """
    used = places[np.unique((np.arange(0, len(places), 1 / share)).astype(int))]
    num_test = round(test_share * len(used))
    num_val = round(val_share * (len(used) - num_test))
    first, middle, last = np.split(used, [len(used) - num_test - num_val, len(used) - num_test])
    apart = lambda one, after: one[:-1] if len(one) and len(after) and after[0] - one[-1] == 1 else one
    return apart(first, np.concatenate([middle, last])), apart(middle, last), last
