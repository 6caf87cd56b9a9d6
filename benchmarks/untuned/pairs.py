"""Pairs of a task and its data, each with a figure, a number of rounds and options of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedbilevel.errors import DataError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.few_shot import FewShot
from fedbilevel.tasks.hyper_representation import HyperRepresentation
from fedbilevel.tasks.imbalance import Imbalance
from fedbilevel.tasks.mixing import Mixing
from fedbilevel.tasks.personalisation import Personalisation
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.regularisation import Regularisation
from fedbilevel.tasks.task import Task


@dataclass(frozen=True)
class Pair:
    """A task with its data, and how methods are compared on it.

    figure: the measured figure by which methods are compared, on test data where there are any.
    maximise: whether a higher figure is better.
    lr_upper: the centre of the searched steps of x; None: the step that the task suggests.
    options: further options of `solve`.
    """

    task: Task
    figure: str
    num_rounds: int
    about: str
    maximise: bool = True
    lr_upper: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def centre(self) -> float:
        return self.lr_upper or self.task.suggestions("fedbio")["lr_upper"]

    def missing(self) -> str | None:
        """Return why the data cannot be read, or None."""
        try:
            self.task.build()
        except DataError as error:
            return str(error)
        return None


BALANCED, ACCURACY, LOSS = "balanced_test_accuracy", "test_accuracy", "test_loss"

PAIRS: dict[str, Pair] = {
    "imbalance-digits": Pair(Imbalance(), BALANCED, 200, "linear model, full batches"),
    "imbalance-digits-batches": Pair(
        Imbalance(),
        BALANCED,
        200,
        "batches of 32, half of the clients in a round",
        options={"batch_size": 32, "cohort": Cohort(0.5)},
    ),
    "imbalance-digits-small-batches": Pair(
        Imbalance(),
        BALANCED,
        200,
        "batches of 4, a fifth of the clients in a round",
        options={"batch_size": 4, "cohort": Cohort(0.2)},
    ),
    "imbalance-mnist-mlp": Pair(
        Imbalance(data="mnist", share=0.05, model="mlp", num_hidden=16, imbalance_ratio=20.0, num_val=2),
        BALANCED,
        200,
        "5 % of MNIST, a network with one hidden layer below",
    ),
    "imbalance-fashion": Pair(Imbalance(data="fashion", share=0.1, num_val=2), BALANCED, 200, "10 % of Fashion-MNIST"),
    "imbalance-hapt": Pair(Imbalance(data="hapt", share=0.5), BALANCED, 200, "movements of people, tested on others"),
    "regularisation-mixture": Pair(Regularisation(), LOSS, 400, "synthetic, private penalties", maximise=False),
    "regularisation-a9a": Pair(
        Regularisation(data="a9a", num_clients=5, num_train=100, num_val=100, num_test=1000),
        LOSS,
        400,
        "census data in 123 binary features, private penalties",
        maximise=False,
    ),
    "regularisation-w8a": Pair(
        Regularisation(data="w8a", num_clients=5, num_train=300, num_val=300, num_test=1000),
        LOSS,
        400,
        "web pages in 300 binary features, 3 % positive, private penalties",
        maximise=False,
    ),
    "regularisation-adult": Pair(
        Regularisation(data="adult", num_clients=7, num_train=200, num_val=200, num_test=400, upper="shared"),
        LOSS,
        400,
        "census data, clients are work classes, shared penalties",
        maximise=False,
    ),
    "cleaning-digits": Pair(DataCleaning(), ACCURACY, 400, "private weights of samples, 40 % wrong labels"),
    "cleaning-mnist": Pair(
        DataCleaning(data="mnist", share=0.1, num_train=100, num_clean=10),
        ACCURACY,
        300,
        "private weights of samples, 40 % wrong labels, linear model",
    ),
    "cleaning-cifar10-mlp": Pair(
        DataCleaning(data="cifar10", share=0.2, num_train=60, num_clean=20, noise=0.5, model="mlp", num_hidden=16),
        ACCURACY,
        150,
        "half of the labels wrong, a network with two hidden layers below",
    ),
    "representation-digits-local": Pair(
        HyperRepresentation(lower="local", num_hidden=64, split="iid", val_share=0.5),
        ACCURACY,
        200,
        "one head per client",
    ),
    "representation-mnist-cohort": Pair(
        HyperRepresentation(data="mnist", share=0.05, num_clients=100, num_hidden=64),
        ACCURACY,
        200,
        "100 clients with two shards each, a tenth of them in a round",
        options={"cohort": Cohort(0.1)},
    ),
    "personalisation-digits": Pair(
        Personalisation(num_clients=20), ACCURACY, 200, "private masks, a network below", lr_upper=0.1
    ),
    "few-shot-digits": Pair(
        FewShot(num_tasks=8),
        ACCURACY,
        40,
        "a convolutional backbone, one head per task and client",
        options={"measure_every": 20},  # new heads are trained in every measurement
    ),
    "mixing-chains": Pair(Mixing(kl=0.01), LOSS, 200, "weights of sources, a network below", maximise=False),
    "mixing-shakespeare": Pair(
        Mixing(data="shakespeare", num_train=100, num_val=100, kl=0.01),
        LOSS,
        200,
        "weights of roles and of corrupted texts, a network below",
        maximise=False,
    ),
    "quadratic": Pair(
        Quadratic(heterogeneity=1.0), "exact_upper_loss", 200, "clients that differ, closed form known", maximise=False
    ),
}
