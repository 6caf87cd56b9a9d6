"""Confident learning: known answers, the confident joint by hand, cross validation and figures.

A fold never trains on the samples that it judges, and the figures equal the task's."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, precision_score, recall_score

from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import FedBilevelError, ProblemError, SettingError, UnknownNameError
from fedbilevel.studies.kinds import confident_learning
from fedbilevel.tasks.data_cleaning import DataCleaning
from support.data import write_idx

needs_cleanlab = pytest.mark.skipif(
    confident_learning.find_spec("cleanlab") is None,
    reason="cleanlab is not installed: pip install 'fedbilevel[reference]'",
)
FIGURES = {"test_accuracy", "precision", "recall", "f1"}


def study(tmp_path, *, repetition=0, task=None, say=None, **row):
    said = []
    outcome = confident_learning.run(
        {"task": {"name": "data_cleaning", **(task or {})}, **row},
        repetition=repetition,
        folder=tmp_path,
        device="cpu",
        say=say or said.append,
    )
    assert outcome.curve == []
    assert outcome.figures.keys() == FIGURES
    return outcome.figures


def separated(folder, num_classes: int, num_train: int = 600, num_test: int = 100) -> dict:
    """Write 28 x 28 images as idx files and return the task's settings.

    Every class lights its own pixels, so no two classes are alike."""
    rng = np.random.default_rng(0)
    for stem, num in (("train", num_train), ("t10k", num_test)):
        labels = rng.permutation(np.arange(num) % num_classes)
        pixels = rng.integers(0, 60, (num, 784))
        for pixel, label in zip(pixels, labels, strict=True):
            pixel[40 * label : 40 * label + 40] = rng.integers(200, 256, 40)
        write_idx(folder, stem, pixels.reshape(-1, 28, 28), labels)
    return {"data": "mnist", "data_dir": str(folder), "num_clients": 4, "num_clean": 5, "l2": 0.001}


# ---- known answers -------------------------------------------------------------------------------


@needs_cleanlab
@pytest.mark.parametrize(
    (
        "num_classes",
        "noise",
        "filter_by",
    ),  # with two classes an estimated number of wrong labels is not whole, so that the default may leave one
    [(2, 0.2, "predicted_neq_given"), (10, 0.4, "prune_by_noise_rate"), (10, 0.4, "confident_learning")],
)
@pytest.mark.parametrize("flip", ["wrong", "uniform"])
def test_in_separated_classes_exactly_the_wrong_labels_are_found(tmp_path, num_classes, noise, filter_by, flip):
    task = {**separated(tmp_path, num_classes), "noise": noise, "flip": flip, "l2": 0.01}
    assert study(tmp_path, task=task, filter_by=filter_by) == {
        "test_accuracy": 1.0,
        "precision": 1.0,
        "recall": 1.0,
        "f1": 1.0,
    }


@needs_cleanlab
@pytest.mark.parametrize("names", [[0, 1, 2], [3, 7, 8]], ids=str)
def test_the_flags_are_those_of_the_confident_joint_counted_by_hand(names):
    """A sample is flagged if its confident class differs from its given label.

    The confident class is the most probable class whose probability is at least its threshold: the
    mean probability of the class over the samples with that label."""
    rng = np.random.default_rng(3)
    given = rng.integers(0, 3, 200)
    probabilities = rng.dirichlet(np.ones(3), 200)
    probabilities[np.arange(200), given] += 0.4
    probabilities /= probabilities.sum(1, keepdims=True)
    thresholds = [probabilities[given == c, c].mean() for c in range(3)]
    expected = []
    for p, label in zip(probabilities, given, strict=True):
        sure = [c for c in range(3) if p[c] >= thresholds[c]]
        expected.append(bool(sure) and max(sure, key=lambda c: p[c]) != label)
    found = confident_learning.label_issues(np.array(names)[given], probabilities, "confident_learning")
    assert 10 < sum(expected) < 190
    assert found.tolist() == expected


# ---- cross validation ----------------------------------------------------------------------------


def test_every_sample_is_judged_once_by_a_model_that_has_not_seen_it():
    label = np.array([4] * 13 + [6] * 8 + [9] * 9)
    image = np.arange(30)[:, None]
    judged, folds = [], []

    def fitted(seen, its_labels):
        assert np.array_equal(its_labels, label[seen[:, 0]])
        assert set(its_labels) == {4, 6, 9}

        def predict_proba(unseen):
            assert not set(unseen[:, 0]) & set(seen[:, 0])
            assert len(unseen) + len(seen) == 30
            judged.extend(unseen[:, 0])
            folds.append(tuple(unseen[:, 0]))
            return np.stack([unseen[:, 0], unseen[:, 0], np.full(len(unseen), 1)], axis=1)

        return SimpleNamespace(predict_proba=predict_proba)

    probabilities = confident_learning.out_of_sample(image, label, 4, 0, fitted)
    assert sorted(judged) == list(range(30))
    assert len(folds) == 4
    np.testing.assert_allclose(
        probabilities[:, 0] / probabilities[:, 2], np.arange(30)
    )  # every row where its sample stands
    np.testing.assert_allclose(probabilities.sum(1), 1)
    first = folds[:]
    confident_learning.out_of_sample(image, label, 4, 1, fitted)
    assert folds[4:] != first


def test_the_classifier_is_stationary_for_mean_entropy_plus_half_the_squared_norm():
    train = DataCleaning(num_clients=1, noise=0.2).build().clients[0]["train"]
    image, label, l2 = train["image"].astype(float), train["label"], 0.02
    model = confident_learning.logistic(image, label, l2, 1000, pytest.fail)
    assert isinstance(model, LogisticRegression)
    gradient = (model.predict_proba(image) - np.eye(10)[label]).T @ image / len(label) + l2 * model.coef_
    assert 30 * np.abs(gradient).max() < np.abs(l2 * model.coef_).max()
    assert np.abs((model.predict_proba(image) - np.eye(10)[label]).mean(0)).max() < 1e-3


def test_a_classifier_that_has_not_converged_is_said(tmp_path):
    said = []
    study(tmp_path, keep="all", max_iterations=2, say=said.append)
    assert said[0] == "the classifier was stopped after 2 iterations, before it had converged"
    said.clear()
    study(tmp_path, keep="all", say=said.append)
    assert [text.split(",")[0] for text in said] == ["all: 0 of 1148 samples flagged"]


# ---- figures -------------------------------------------------------------------------------------


def pooled(task: DataCleaning) -> tuple[dict, dict]:
    clients = task.build().clients
    return tuple(
        {name: np.concatenate([client[role][name] for client in clients]) for name in clients[0][role]}
        for role in ("train", "test")
    )


@needs_cleanlab
def test_figures_are_those_of_plain_scikit_learn_and_cleanlab():
    from cleanlab.filter import find_label_issues
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    train, test = pooled(DataCleaning(data_seed=2, noise=0.5, l2=0.003))
    model = lambda num: LogisticRegression(C=1 / (0.003 * num), max_iter=300, tol=confident_learning.TOLERANCE)
    num_seen = len(train["label"]) * 2 // 3  # to within one sample, which a regression does not notice
    folds = StratifiedKFold(3, shuffle=True, random_state=2)
    probabilities = cross_val_predict(model(num_seen), train["image"], train["label"], cv=folds, method="predict_proba")
    flagged = find_label_issues(train["label"], probabilities.astype(float), n_jobs=1)
    rest = model((~flagged).sum()).fit(train["image"][~flagged], train["label"][~flagged])
    figures = study(None, repetition=2, task={"noise": 0.5, "l2": 0.003}, num_folds=3)
    for name, score in (("precision", precision_score), ("recall", recall_score), ("f1", f1_score)):
        assert figures[name] == pytest.approx(score(train["wrong"], flagged), abs=0.01)
        assert 0.4 < figures[name] < 1
    assert figures["test_accuracy"] == pytest.approx(rest.score(test["image"], test["label"]), abs=0.01)


@needs_cleanlab
def test_figures_are_those_that_a_federation_measures_for_the_same_flags_and_model(tmp_path, monkeypatch):
    seen = {}
    genuine = confident_learning._figures
    monkeypatch.setattr(
        confident_learning,
        "_figures",
        lambda problem, train, test, flagged, model: (
            seen.update(flagged=flagged, model=model) or genuine(problem, train, test, flagged, model)
        ),
    )
    figures = study(tmp_path, task={"num_clients": 7, "noise": 0.3})
    fed = Simulation(FedAvg(), *DataCleaning(num_clients=7, noise=0.3).build(), dtype=torch.float64)
    sizes = fed.host.data.sizes["train"].tolist()
    assert len(set(sizes)) > 1  # padded, so that a mistake in the order would show
    x = torch.zeros(7, max(sizes), dtype=torch.float64)
    for row, mine in zip(x, np.split(seen["flagged"], np.cumsum(sizes)[:-1]), strict=True):
        row[: len(mine)] = torch.tensor(np.where(mine, -1.0, 1.0))
    y = torch.tensor(np.concatenate([seen["model"].coef_.T.ravel(), seen["model"].intercept_]), dtype=torch.float64)
    measured = fed.measure(x, y)
    assert {name: measured[name] for name in FIGURES} == pytest.approx(figures, rel=1e-12)


@needs_cleanlab
def test_a_reference_lies_between_training_on_everything_and_on_clean_labels_only(tmp_path):
    floor, found, ceiling = (study(tmp_path, task={"noise": 0.4}, keep=keep) for keep in ("all", "confident", "clean"))
    assert [floor[name] for name in ("precision", "recall", "f1")] == [0, 0, 0]
    assert [ceiling[name] for name in ("precision", "recall", "f1")] == [1, 1, 1]
    assert 0.7 < found["f1"] < 1
    assert floor["test_accuracy"] < found["test_accuracy"] < ceiling["test_accuracy"]


def test_the_clean_samples_alone_are_a_bound_too(tmp_path):
    clients = DataCleaning(noise=0.9).build().clients
    image, label = (np.concatenate([client["val"][name] for client in clients]) for name in ("image", "label"))
    _, test = pooled(DataCleaning(noise=0.9))
    model = LogisticRegression(C=1 / (0.01 * len(label)), max_iter=300, tol=confident_learning.TOLERANCE).fit(
        image, label
    )
    figures = study(tmp_path, task={"noise": 0.9}, keep="validation")
    assert figures["test_accuracy"] == pytest.approx(model.score(test["image"], test["label"]), abs=0.005)
    assert [figures[name] for name in ("precision", "recall", "f1")] == [0, 0, 0]
    assert study(tmp_path, task={"noise": 0.1}, keep="validation") == figures  # noise does not touch them


def test_a_label_that_no_training_sample_has_is_never_the_answer(tmp_path):
    task = {**separated(tmp_path, 10), "num_clients": 2, "num_train": 3, "noise": 0.0}
    known = len(set(pooled(DataCleaning(**task))[0]["label"].tolist()))
    assert 2 < known < 10
    assert study(tmp_path, task=task, keep="all")["test_accuracy"] == pytest.approx(
        known / 10
    )  # separated: right on what it knows


def test_repetitions_use_the_tasks_of_their_number(tmp_path):
    one, other = (study(tmp_path, task={"data_seed": 3}, repetition=r, keep="all") for r in (0, 1))
    assert study(tmp_path, task={"data_seed": 4}, keep="all") == other != one


def test_the_l2_of_the_row_comes_before_that_of_the_task(tmp_path):
    weak, strong = (study(tmp_path, task={"l2": l2}, keep="all") for l2 in (0.001, 1.0))
    assert study(tmp_path, task={"l2": 0.001}, keep="all", l2=1.0) == strong != weak


# ---- errors --------------------------------------------------------------------------------------


def test_without_cleanlab_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(confident_learning, "find_spec", lambda name: None)
    with pytest.raises(
        FedBilevelError,
        match=(
            r"needs the package cleanlab, which is not installed: "
            r"install it with pip install 'fedbilevel\[reference\]'"
        ),
    ):
        study(tmp_path)
    assert study(tmp_path, keep="clean")["f1"] == 1  # the bounds need no cleanlab


def test_without_scikit_learn_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.exceptions", None)
    monkeypatch.delitem(sys.modules, confident_learning.__name__)
    with pytest.raises(
        FedBilevelError,
        match=r"needs scikit-learn, which is not installed: install it with pip install 'fedbilevel\[reference\]'",
    ):
        importlib.import_module(confident_learning.__name__)


@pytest.mark.parametrize(
    ("row", "kind", "message"),
    [
        ({"keeps": "all"}, UnknownNameError, "no setting of ConfidentLearning named 'keeps'. Did you mean 'keep'"),
        ({"keep": "none"}, SettingError, "keep is 'none', expected 'confident' or 'clean' or 'all' or 'validation'"),
        ({"num_folds": 1}, SettingError, "num_folds is 1, expected a value at least 2"),
        (
            {"task": {"noises": 0.1}},
            UnknownNameError,
            "no setting of DataCleaning named 'noises'. Did you mean 'noise'",
        ),
        ({"task": {"name": "cleaning"}}, UnknownNameError, "no task named 'cleaning'"),
        ({"task": {"name": "hyper_representation"}}, ProblemError, "hyper_representation does not mark wrong labels"),
        (
            {"num_folds": 200},
            ProblemError,
            r"label \d has \d+ samples, but cross validation needs two labels with at least num_folds = 200",
        ),
        ({"task": {"num_clients": 1, "num_train": 1}}, ProblemError, "all 1 samples have the label"),
        (
            {"task": {"noise": 1.0}, "keep": "clean"},
            ProblemError,
            "0 samples of 0 classes are left to train on, expected two classes",
        ),
    ],
)
def test_mistakes_are_clear_errors(tmp_path, row, kind, message):
    with pytest.raises(kind, match=message):
        study(tmp_path, **row)


def test_a_row_without_a_task_is_a_clear_error(tmp_path):
    with pytest.raises(SettingError, match="the task is None, expected a table with its name and settings"):
        confident_learning.run({}, repetition=0, folder=tmp_path, device="cpu", say=print)
