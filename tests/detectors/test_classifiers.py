"""The choice of l2 and the classifiers, against dense Newton steps on the pooled samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax

import fedbilevel as fb
from fedbilevel.detectors._classifiers import L2_GRID
from fedbilevel.detectors.as_given import AsGiven
from fedbilevel.detectors.label_em import LabelEM
from fedbilevel.detectors.robust_loss import RobustLoss
from fedbilevel.errors import SettingError
from fedbilevel.problem.draws import Stream
from fedbilevel.settings import made
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.task import Built
from support.numeric.labels import CLASSES, ByHand, posteriors, small
from support.numeric.yardstick import check_continues, drive

EYE = np.eye(CLASSES)


def fold_of(built, seed=0):
    """Marks of the pooled training samples that the choice of l2 does not train on."""
    marks = []
    for i, client in enumerate(built.clients):
        num = len(client["train"]["label"])
        marks.append(np.isin(range(num), Stream(seed).order("fold", i, num, iteration=0)[: num // 10]))
    return np.concatenate(marks)


def newton(z, target, mass, l2):
    """The minimiser of the weighted mean cross-entropy + l2/2 |W|^2, and its slope there."""
    W, total = np.zeros((z.shape[1], CLASSES)), mass.sum()
    for _ in range(40):
        p = softmax(z @ W, axis=1)
        slope = z.T @ (mass[:, None] * (p - target)) / total + l2 * W
        curved = mass[:, None, None] * (p[:, :, None] * EYE - p[:, :, None] * p[:, None, :]) / total
        H = np.einsum("nd,ncb,ne->dceb", z, curved, z).reshape(W.size, W.size) + l2 * np.eye(W.size)
        step = np.linalg.solve(H, slope.ravel()).reshape(W.shape)
        value = lambda V: -(mass[:, None] * target * log_softmax(z @ V, axis=1)).sum() / total + l2 / 2 * (V**2).sum()
        size = 1.0
        while value(W - size * step) > value(W) + 1e-14:
            size /= 2
        W = W - size * step
    assert np.abs(slope).max() < 1e-9
    return W


def cases(hand, q, targets):
    """Targets and weights of training samples of both classifiers."""
    given, one = EYE[hand.label], np.ones(len(q))
    right = (q * given).sum(1)
    return {"kept": (given, 1.0 * (right >= 0.5)), "soft": (q, one), "weighted": (given, right)}[targets], (given, one)


@pytest.mark.parametrize("seed", [0, 4])
@pytest.mark.parametrize("targets", ["kept", "soft", "weighted"])
def test_l2_and_both_classifiers_are_those_of_dense_minimisers(targets, seed):
    built, em = small(), LabelEM(ridge=0.02, num_fit_rounds=1200, targets=targets)
    fed, state = drive(em, built, em.num_detections() + em.num_fit_rounds, seed=seed)
    hand, q, fold = ByHand(built, em, seed), posteriors(fed, state, built), fold_of(built, seed)
    assert fold.sum() == 3 + 4 + 2
    for k, (target, mass) in enumerate(cases(hand, q, targets)):

        def fitted(some, l2, target=target, mass=mass):
            rows, wanted = np.concatenate([hand.z[some], hand.zc]), np.concatenate([target[some], EYE[hand.yc]])
            return newton(rows, wanted, np.concatenate([mass[some], np.ones(len(hand.zc))]), l2)

        def loss(model, target=target, mass=mass):
            return -(mass[fold] * (target[fold] * log_softmax(hand.z[fold] @ model, axis=1)).sum(1)).sum()

        losses = [loss(fitted(~fold, l2)) for l2 in L2_GRID]
        best = L2_GRID[int(np.argmin(losses))]
        assert state.found["l2"][("cleaned", "plain")[k]] == best
        assert np.sort(losses)[1] - np.min(losses) > 1e-4  # a choice by rounding errors would say nothing
        model = state.models.view(2, 5, CLASSES)[k]
        np.testing.assert_allclose(model, fitted(fold | ~fold, best), atol=1e-7)


def test_classifiers_may_have_another_l2_and_none_is_always_chosen():
    chosen = set()
    for seed in range(6):
        em = LabelEM(ridge=0.02, num_fit_rounds=60)
        chosen.add(tuple(drive(em, small(), em.num_detections() + 60, seed=seed)[1].found["l2"].values()))
    assert any(one != other for one, other in chosen)
    assert len({one for pair in chosen for one in pair}) > 1


def test_a_number_takes_the_steps_of_that_l2_and_chooses_nothing():
    """Accelerated steps on the bound of both classifiers, which restart together."""
    built, detector = small(), LabelEM(ridge=0.02, l2=0.003, num_fit_rounds=9, targets="weighted")
    fed, state = drive(detector, built, detector.num_detections() + 9)
    hand, q = ByHand(built, detector), posteriors(fed, state, built)
    last = ahead = np.zeros((2, 5, CLASSES))
    age = 0
    for _ in range(9):
        new, uphill = [], 0.0
        for k, (target, mass) in enumerate(cases(hand, q, "weighted")):
            gap = mass[:, None] * (softmax(hand.z @ ahead[k], axis=1) - target)
            rest = softmax(hand.zc @ ahead[k], axis=1) - EYE[hand.yc]
            weight = mass.sum() + len(hand.zc)
            slope = (hand.z.T @ gap + hand.zc.T @ rest) / weight + 0.003 * ahead[k]
            new.append(ahead[k] - np.linalg.solve(hand.gram / (2 * weight) + 0.003 * np.eye(5), slope))
            uphill += (slope * (new[k] - last[k])).sum()
        age = 0 if uphill > 0 else age + 1
        last, ahead = np.stack(new), np.stack(new) + age / (age + 3) * (np.stack(new) - last)
    np.testing.assert_allclose(state.models.view(2, 5, CLASSES), last, atol=1e-10)
    done = drive(detector, built, detector.num_iterations())[1]
    assert done.found["l2"] == {"cleaned": 0.003, "plain": 0.003}


@pytest.mark.parametrize("loss", ["gce", "sce"])
def test_the_fold_of_a_robust_classifier_has_the_loss_that_it_minimises(loss):
    built, detector = small(), RobustLoss(loss=loss, num_fit_rounds=12)
    fed, state = drive(detector, built, 4)
    hand, fold = ByHand(built, LabelEM()), fold_of(built)
    models = state.models.view(4, 2, 5, CLASSES)
    z, target = torch.tensor(hand.z[fold]), torch.tensor(EYE[hand.label[fold]])
    wanted = [
        [float(detector.robust().losses(z @ model, target).sum()), float(-(target * (z @ plain).log_softmax(1)).sum())]
        for model, plain in models
    ]
    fed.begin(5)
    np.testing.assert_allclose(3 * detector.fold_losses(fed, state).view(4, 2), wanted, rtol=1e-10)
    entropy = [float(-(target * (z @ model).log_softmax(1)).sum()) for model, _ in models]
    assert np.abs(np.array(wanted)[:, 0] - entropy).min() > 0.1


def test_the_fold_is_drawn_so_that_it_has_all_classes_of_labels_in_turn():
    """Every tenth sample of these clients has the class 2."""
    built = small()
    label = np.where(np.arange(60) % 10 == 9, 2, np.arange(60) % 2)
    train = {"image": np.random.default_rng(0).normal(size=(60, 4)), "label": label, "wrong": np.zeros(60, bool)}
    built = Built(built.problem, [{**one, "train": train} for one in built.clients])
    fold = fold_of(built).reshape(3, 60)
    assert fold.sum(1).tolist() == [6, 6, 6]
    assert (fold[0] != fold[1]).any()
    shown = np.tile(label, (3, 1))[fold]
    assert {*shown} == {0, 1, 2}
    detector = AsGiven(num_fit_rounds=2)
    fed, state = drive(detector, built, 0)
    models = state.models.view(8, 5, CLASSES).clone()
    models[:, -1] = torch.tensor([0.0, 1.0, 3.0])  # biases alone, so a loss depends on the label alone
    found = fed.mean(detector.folded, models=models.flatten(), x=state.x, targets="kept", **state.units)
    wanted = -log_softmax([0.0, 1.0, 3.0])[shown].sum() / 3
    assert found.losses.tolist() == pytest.approx([wanted] * 8)


def test_without_a_fold_l2_is_the_smallest():
    built = small()
    few = [{**one, "train": {k: v[:9] for k, v in one["train"].items()}} for one in built.clients]
    detector = AsGiven(num_fit_rounds=4)
    _, state = drive(detector, Built(built.problem, few), 4)
    assert state.found["l2"] == {"cleaned": 0.001, "plain": 0.001}


@pytest.mark.parametrize("rounds", [1, 2, 3, 7])
def test_the_first_half_of_the_rounds_chooses(rounds):
    detector = AsGiven(num_fit_rounds=rounds)
    fed, state = drive(detector, small(), max(1, rounds // 2) - 1)
    assert "l2" not in state.found
    assert len(state.models) == 4 * 2 * len(state.y)
    fed.begin(max(1, rounds // 2))
    state = detector.round(fed, state)
    assert state.found["l2"].keys() == {"cleaned", "plain"}
    assert len(state.models) == 2 * len(state.y)
    assert state.age == [0]  # steps with all samples begin without extrapolation
    assert torch.equal(state.ahead, state.models)
    assert torch.equal(state.y, detector.classifier(state, 0))


@pytest.mark.parametrize("rounds", [2, 4, 9])
def test_a_resumed_run_chooses_the_same_bit_for_bit(rounds):
    """The checkpoint is written after two rounds: after, at and before the choice."""
    check_continues(AsGiven(num_fit_rounds=rounds), small())


def test_labels_as_given_are_a_strong_rival_at_20_percent_noise():
    clients = DataCleaning(noise=0.2, num_clean=40).build().clients
    images, labels = (np.concatenate([one["test"][name] for one in clients]) for name in ("image", "label"))
    right = {}
    for l2 in (0.001, None):
        found = fb.clean_labels(clients, detector="as_given", features="convolutional", l2=l2)
        right[l2] = (found.predict(images) == labels).mean()
    assert found.found["l2"]["plain"] == 0.1
    assert right[None] > right[0.001] + 0.05
    assert right[None] > 0.95


def test_an_l2_that_is_no_number_is_refused():
    with pytest.raises(SettingError, match="expected a number or None"):
        made(AsGiven, {"l2": "auto"})
    with pytest.raises(SettingError, match="greater than 0"):
        AsGiven(l2=0.0)
