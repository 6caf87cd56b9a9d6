"""Refinement of label EM: classifiers that have not seen the sample's fold, against plain optimisation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax

from fedbilevel.detectors import label_em
from fedbilevel.detectors._folds import FOLD_HEATS
from fedbilevel.detectors.label_em import LabelEM
from fedbilevel.problem.draws import Stream
from support.numeric.labels import CLASSES, CLEAN, SIZES, ByHand, normed, posteriors, small
from support.numeric.yardstick import drive


def folds(purpose: str, sizes: tuple[int, ...], num_folds: int) -> np.ndarray:
    """The k-th sample in the order of a client belongs to the fold k + client, modulo the number of folds."""
    found = []
    for client, num in enumerate(sizes):
        own = np.empty(num, int)
        own[Stream(0).order(f"folds {purpose}", client, num, iteration=0).numpy()] = np.arange(num) + client
        found.append(own % num_folds)
    return np.concatenate(found)


def minimiser(z: np.ndarray, target: np.ndarray, mass: np.ndarray, l2: float) -> np.ndarray:
    """W of a weighted mean cross-entropy with a squared norm, by Newton steps with the dense Hessian."""
    rows, wanted, share = torch.tensor(z), torch.tensor(target), torch.tensor(mass / mass.sum())

    def loss(flat: torch.Tensor) -> torch.Tensor:
        model = flat.view(z.shape[1], CLASSES)
        return -share @ (wanted * (rows @ model).log_softmax(1)).sum(1) + 0.5 * l2 * (model**2).sum()

    flat = torch.zeros(z.shape[1] * CLASSES, dtype=torch.float64)
    for _ in range(30):
        slope, hessian = torch.func.grad(loss)(flat), torch.autograd.functional.hessian(loss, flat)
        flat = flat - torch.linalg.solve(hessian, slope)
    assert float(torch.func.grad(loss)(flat).norm()) < 1e-12
    return flat.view(z.shape[1], CLASSES).numpy()


@pytest.mark.parametrize("targets", ["soft", "weighted"])
def test_refined_posteriors_are_those_of_classifiers_without_the_fold_of_the_sample(monkeypatch, targets):
    monkeypatch.setattr(label_em, "PER_FEATURE", {"soft": 100.0, "weighted": 0.0}[targets])
    monkeypatch.setattr(label_em, "WRONG", 0.0)
    built = small()
    em = LabelEM(
        ridge=2.0, num_passes=3, num_refinements=2, num_folds=3, num_fold_rounds=600, num_steps=4, l2=0.03,
        least_clean=2,
    )  # fmt: skip
    hand = ByHand(built, em)
    q, models, taken = hand.passes(), None, []
    used = tuple(num - round(0.5 * num) for num in CLEAN)
    assert sum(used) == len(hand.yc)
    fold, clean_fold = folds("train", SIZES, 3), folds("val", used, 3)
    likely = lambda b, S: log_softmax(b * S, axis=1)[range(len(S)), hand.yc].sum()
    best = likely(hand.heat, clean_scores(hand, q_before=hand.q_before))
    for _ in range(em.num_refinements):
        S, Sc = np.zeros((len(q), CLASSES)), np.zeros((len(hand.yc), CLASSES))
        found = []
        given = np.eye(CLASSES)[hand.label]
        aim, right = (q, np.ones(len(q))) if targets == "soft" else (given, (q * given).sum(1))
        for k in range(3):
            z = np.concatenate([hand.z[fold != k], hand.zc[clean_fold != k]])
            target = np.concatenate([aim[fold != k], np.eye(CLASSES)[hand.yc[clean_fold != k]]])
            mass = np.concatenate([right[fold != k], np.ones((clean_fold != k).sum())])
            found.append(minimiser(z, target, mass, 0.03))
            S[fold == k], Sc[clean_fold == k] = hand.z[fold == k] @ found[k], hand.zc[clean_fold == k] @ found[k]
        heat = max(FOLD_HEATS, key=lambda b, Sc=Sc: likely(b, Sc))
        taken.append(likely(heat, Sc) > best)
        if not taken[-1]:
            break
        best, hand.heat, models = likely(heat, Sc), heat, np.stack(found)
        hand.steps(S)
        q = hand.posterior(S)
    fed, state = drive(em, built, em.num_detections())
    assert taken == [True, True]
    np.testing.assert_allclose(state.weights.view(3, 5, CLASSES), models, atol=1e-8)
    np.testing.assert_allclose(posteriors(fed, state, built), q, atol=1e-8)
    assert state.heat == hand.heat
    assert float(state.learned[0]) * 3 == pytest.approx(best, abs=1e-9)
    assert em.fold_targets(state) == targets
    assert len({*fold}) == len({*clean_fold}) == 3
    assert np.abs(q - hand.passes()).max() > 0.01  # the refinement changes something


def test_folds_learn_from_given_labels_if_ten_per_feature_and_at_most_three_quarters_are_expected_to_be_right():
    """These clients have 4 features."""
    built, em = small(), LabelEM(ridge=2.0, l2=0.03, num_folds=3, least_clean=2)
    label = np.concatenate([client["train"]["label"] for client in built.clients])
    for iterations in (em.num_passes, em.num_detections()):
        fed, state = drive(em, built, iterations)
        expected = posteriors(fed, state, built)[range(len(label)), label].sum()
        assert float(state.learned[1]) == pytest.approx(expected, abs=0.5)  # a step of T lies between them
        assert float(state.learned[2]) == pytest.approx(len(label))
        for right, every, targets in ((40.0, 60.0, "weighted"), (39.9, 60.0, "soft"), (46.0, 60.0, "soft")):
            learned = torch.tensor([0.0, right, every], dtype=torch.float64)
            assert em.fold_targets(state._replace(learned=learned)) == targets


def clean_scores(hand: ByHand, q_before: np.ndarray) -> np.ndarray:
    """Scores of the clean samples by the last ridge regression, each without itself."""
    gram, sums = hand.gram + hand.em.ridge * len(hand.z) * np.eye(5), hand.z.T @ q_before + hand.B
    without = lambda z, y: np.linalg.solve(gram - np.outer(z, z), sums - np.outer(z, np.eye(CLASSES)[y]))
    return np.stack([z @ without(z, y) for z, y in zip(hand.zc, hand.yc, strict=True)])


@pytest.mark.parametrize("why", ["few clean samples", "less likely"])
def test_scores_that_are_not_more_likely_change_nothing(why):
    built = small()
    settings = {"least_clean": 99} if why == "few clean samples" else {"least_clean": 2, "l2": 100.0}  # W near zero
    refined, plain = (LabelEM(ridge=0.02, num_refinements=num, **settings) for num in (2, 0))
    fed, state = drive(refined, built, refined.num_detections())
    wanted = posteriors(*drive(plain, built, plain.num_passes), built)
    np.testing.assert_array_equal(posteriors(fed, state, built), wanted)
    state = drive(refined, built, refined.num_detections() + 1)[1]
    assert refined.labels_of(state) == "kept"


def test_samples_of_the_guard_are_scored_by_the_classifier_of_one_fold():
    """So their scores are spread as those of training samples are, which the false-discovery rate needs."""
    built, em = small(), LabelEM(ridge=2.0, l2=0.1, num_folds=3, num_fold_rounds=100, least_clean=2)
    fed, state = drive(em, built, em.num_detections() + 1)
    hand = ByHand(built, em)
    sizes = tuple(round(0.5 * num) for num in CLEAN)
    models = state.weights.view(3, 5, CLASSES).numpy()
    assert em.labels_of(state) == "soft"
    S = np.stack([z @ models[k] for z, k in zip(hand.zh, folds("held", sizes, 3), strict=True)])
    T = normed(state.transition.view(CLASSES, CLASSES).numpy())
    q = softmax(log_softmax(state.heat * S, axis=1) + np.log(T[:, hand.yh].T), axis=1)
    odds = np.log((1 / q[range(len(S)), hand.yh] - 1).clip(np.exp(-15.9), np.exp(15.9)))
    wanted = np.histogram(odds, bins=np.linspace(-16, 16, 201))[0]
    phase = {"x": state.x, "weights": state.weights, "transition": state.transition, "heat": state.heat}
    found = fed.mean(em.odds, **phase, **state.units).unseen * fed.num_clients
    np.testing.assert_allclose(found, wanted, atol=1e-9)
