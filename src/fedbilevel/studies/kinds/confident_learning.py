"""Confident learning: find wrong labels in pooled data, and train a classifier without them.

This is a reference for data cleaning, not a federated method: the noisy training data of all
clients are pooled. The clean samples are not used, except with `keep` = "validation".

    1. k-fold cross validation: every sample gets class probabilities from a logistic regression
       that was not trained on it
    2. cleanlab estimates how many samples of each given label have which true label: a sample
       counts as class c if its probability of c is at least the mean probability of c over the
       samples labelled c. `filter_by` selects the rule that flags samples
    3. logistic regression on the samples that were not flagged

`keep` selects the training samples:

    confident   samples that were not flagged, as above
    clean       samples with right labels; this needs the truth, and is an upper bound for any
                method that drops samples
    all         all noisy samples; this is the baseline
    validation  only the few clean samples of all clients, and nothing is flagged; a method with
                clean samples gains from the noisy ones only if it does better than this

All use one classifier, the minimiser of mean CE + l2/2 |weights|^2. It is the task's linear model
at sample weights of one, except that the bias is not regularised here.

Row: {"task": {"name": "data_cleaning", ...its settings}, ...the settings below}. The task's
functions compute the figures: test_accuracy, precision, recall, f1. There are no rounds, so the
curve is empty. The study runs on the CPU.

Reference: Northcutt, Jiang, Chuang, "Confident Learning: Estimating Uncertainty in Dataset Labels",
JAIR 2021.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedbilevel.errors import FedBilevelError, ProblemError, SettingError
from fedbilevel.problem.contraction import counted
from fedbilevel.settings import Settings, made, setting
from fedbilevel.studies import given
from fedbilevel.studies.outcome import RowOutcome

try:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold
except ImportError as missing:
    raise FedBilevelError(
        "the study confident_learning needs scikit-learn, which is not installed: "
        "install it with pip install 'fedbilevel[reference]'."
    ) from missing

TOLERANCE = 3e-4  # largest entry of the gradient at which the classifier's solver stops


@dataclass(frozen=True, kw_only=True)
class ConfidentLearning(Settings):
    keep: Literal["confident", "clean", "all", "validation"] = setting(
        "confident",
        "train on samples that are not flagged, on right labels, on all samples, or on validation samples only",
    )
    num_folds: int = setting(5, "parts of the cross validation", symbol="k", least=2)
    filter_by: Literal[
        "prune_by_noise_rate",
        "prune_by_class",
        "both",
        "confident_learning",
        "predicted_neq_given",
        "low_normalized_margin",
    ] = setting("prune_by_noise_rate", "cleanlab's rule that flags labels")
    l2: float | None = setting(None, "weight of the squared norm of the weights; None: the task's l2", above=0)
    max_iterations: int = setting(300, "limit of iterations of the classifier's solver", least=1)


def run(
    row: Mapping[str, Any], *, repetition: int, folder: Path, device: str, say: Callable[[str], None]
) -> RowOutcome:
    """Run one repetition; its number determines the data of the task and the folds.

    `folder` and `device` are not used.
    """
    if not isinstance(row.get("task"), Mapping):
        raise SettingError(
            f"the task is {row.get('task')!r}, expected a table with its name and settings, "
            "e.g. {name = 'data_cleaning', noise = 0.4}."
        )
    settings = made(ConfidentLearning, {name: value for name, value in row.items() if name != "task"})
    task = given.task(row["task"]).repeated(repetition)
    begun = time.perf_counter()
    built = task.build()
    if "wrong" not in built.clients[0]["train"] or "test" not in built.clients[0]:
        raise ProblemError(
            f"the task {task.name()} does not mark wrong labels: "
            "this study needs a task that does, such as data_cleaning."
        )
    train, val, test = (
        {name: np.concatenate([client[role][name] for client in built.clients]) for name in built.clients[0][role]}
        for role in ("train", "val", "test")
    )
    l2 = settings.l2 if settings.l2 is not None else float(task.asdict()["l2"])

    def fitted(image: np.ndarray, label: np.ndarray) -> LogisticRegression:
        return logistic(image, label, l2, settings.max_iterations, say)

    flagged = train["wrong"] if settings.keep == "clean" else np.zeros(len(train["label"]), dtype=bool)
    if settings.keep == "confident":
        flagged = label_issues(
            train["label"],
            out_of_sample(train["image"], train["label"], settings.num_folds, repetition, fitted),
            settings.filter_by,
        )
    image, label = (
        val[name] if settings.keep == "validation" else train[name][~flagged] for name in ("image", "label")
    )
    num_kinds = len(np.unique(label))
    if num_kinds < 2:
        raise ProblemError(
            f"{len(label)} samples of {num_kinds} classes are left to train on, expected two classes: "
            "use less noise, more data or more clients."
        )
    model = fitted(image, label)
    figures = _figures(built.problem, train, test, flagged, model)
    say(
        f"{settings.keep}: {flagged.sum()} of {len(flagged)} samples flagged, "
        f"trained on {len(label)}, {time.perf_counter() - begun:.1f} s"
    )
    return RowOutcome(figures, [])


def out_of_sample(
    image: np.ndarray,
    label: np.ndarray,
    num_folds: int,
    seed: int,
    fitted: Callable[[np.ndarray, np.ndarray], LogisticRegression],
) -> np.ndarray:
    """Return class probabilities (n, classes) of samples, from models trained without their fold.

    The columns are in the order of the labels that occur.
    """
    classes, counts = np.unique(label, return_counts=True)
    if len(classes) < 2 or counts.min() < num_folds:
        few = (
            f"label {classes[counts.argmin()]} has {counts.min()} samples"
            if len(classes) > 1
            else f"all {len(label)} samples have the label {classes[0]}"
        )
        raise ProblemError(
            f"{few}, but cross validation needs two labels with at least num_folds = {num_folds} samples each: "
            "use more data or fewer folds."
        )
    probabilities = np.zeros((len(label), len(classes)))
    for seen, unseen in StratifiedKFold(num_folds, shuffle=True, random_state=seed).split(image, label):
        probabilities[unseen] = fitted(image[seen], label[seen]).predict_proba(image[unseen])
    return probabilities / probabilities.sum(1, keepdims=True)  # predict_proba rounds to float32, so sums differ from 1


def label_issues(label: np.ndarray, probabilities: np.ndarray, filter_by: str = "prune_by_noise_rate") -> np.ndarray:
    """Flag labels by confident learning.

    probabilities: class probabilities with one column for each label that occurs.
    """
    check_cleanlab()
    from cleanlab.filter import find_label_issues  # an optional dependency

    places = np.unique(label, return_inverse=True)[1]
    return np.asarray(find_label_issues(places, probabilities, filter_by=filter_by, n_jobs=1), dtype=bool)


def check_cleanlab() -> None:
    if find_spec("cleanlab") is None:
        raise FedBilevelError(
            "this study needs the package cleanlab, which is not installed: "
            "install it with pip install 'fedbilevel[reference]'."
        )


def logistic(
    image: np.ndarray, label: np.ndarray, l2: float, max_iterations: int, say: Callable[[str], None]
) -> LogisticRegression:
    """Return the minimiser of mean CE + l2/2 |weights|^2.

    scikit-learn minimises C times the sum of the losses plus half the squared norm.
    """
    model = LogisticRegression(C=1 / (l2 * len(label)), max_iter=max_iterations, tol=TOLERANCE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # reported below
        model.fit(image, label)
    if model.n_iter_.max() >= max_iterations:
        say(f"the classifier was stopped after {max_iterations} iterations, before it had converged")
    return model


def _figures(
    problem: Any,
    train: Mapping[str, np.ndarray],
    test: Mapping[str, np.ndarray],
    flagged: np.ndarray,
    model: LogisticRegression,
) -> dict[str, float]:
    """Return the figures, computed by the task's statistics.

    A flagged sample has a negative logit. The model is the task's linear model; labels that do not
    occur have zero weights and a bias of minus infinity.
    """
    num_classes = 1 + max(int(part["label"].max()) for part in (train, test))
    weight, bias = (
        torch.zeros(train["image"].shape[1], num_classes, dtype=torch.float64),
        torch.full((num_classes,), -torch.inf, dtype=torch.float64),
    )
    coef, intercept = (
        torch.tensor(model.coef_, dtype=torch.float64),
        torch.tensor(model.intercept_, dtype=torch.float64),
    )
    if len(model.classes_) == 2:  # scikit-learn has one row then, for the second class
        coef, intercept = torch.cat([-coef, coef]) / 2, torch.cat([-intercept, intercept]) / 2
    weight[:, model.classes_], bias[model.classes_] = coef.T, intercept
    x, y, sums = {"logit": torch.tensor(np.where(flagged, -1.0, 1.0))}, {"weight": weight, "bias": bias}, {}
    for role, part in (("train", train), ("test", test)):
        num = len(part["label"])
        batch = {name: torch.tensor(values) for name, values in part.items()} | {
            "index": torch.arange(num),
            "weight": torch.full((num,), 1 / num),
        }
        batch["image"] = batch["image"].double()
        sums.update(
            {
                name: float(value)
                for name, value in counted(problem.statistics[role](x, y, batch), batch["weight"]).items()
            }
        )
    return problem.metrics(sums)
