"""Refinement of label EM: classifiers that have not seen the sample's fold, against plain optimisation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax

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


def minimiser(z: np.ndarray, target: np.ndarray, l2: float) -> np.ndarray:
    """W of a mean cross-entropy with a squared norm, by Newton steps with the dense Hessian."""
    rows, wanted = torch.tensor(z), torch.tensor(target)

    def loss(flat: torch.Tensor) -> torch.Tensor:
        model = flat.view(z.shape[1], CLASSES)
        return -(wanted * (rows @ model).log_softmax(1)).sum(1).mean() + 0.5 * l2 * (model**2).sum()

    flat = torch.zeros(z.shape[1] * CLASSES, dtype=torch.float64)
    for _ in range(30):
        slope, hessian = torch.func.grad(loss)(flat), torch.autograd.functional.hessian(loss, flat)
        flat = flat - torch.linalg.solve(hessian, slope)
    assert float(torch.func.grad(loss)(flat).norm()) < 1e-12
    return flat.view(z.shape[1], CLASSES).numpy()


@pytest.mark.parametrize("least_clean", [2, 99], ids=["b-by-clean-samples", "b-by-training-samples"])
def test_refined_posteriors_are_those_of_classifiers_without_the_fold_of_the_sample(least_clean):
    built = small()
    em = LabelEM(
        ridge=0.02, num_passes=3, num_refinements=2, num_folds=3, num_fold_rounds=600, num_steps=4, l2=0.03,
        least_clean=least_clean,
    )  # fmt: skip
    fed, state = drive(em, built, em.num_detections())
    hand = ByHand(built, em)
    q = hand.passes()
    used = tuple(num - round(0.5 * num) for num in CLEAN)
    assert sum(used) == len(hand.yc)
    fold, clean_fold = folds("train", SIZES, 3), folds("val", used, 3)
    for _ in range(em.num_refinements):
        S, Sc = np.zeros((len(q), CLASSES)), np.zeros((len(hand.yc), CLASSES))
        models = []
        for k in range(3):
            z = np.concatenate([hand.z[fold != k], hand.zc[clean_fold != k]])
            target = np.concatenate([q[fold != k], np.eye(CLASSES)[hand.yc[clean_fold != k]]])
            models.append(minimiser(z, target, 0.03))
            S[fold == k], Sc[clean_fold == k] = hand.z[fold == k] @ models[k], hand.zc[clean_fold == k] @ models[k]
        each = lambda b, own=Sc: log_softmax(b * own, axis=1)[range(len(own)), hand.yc].sum()
        hand.heat = max(FOLD_HEATS, key=each) if least_clean == 2 else 1.0
        hand.steps(S)
        q = hand.posterior(S)
    np.testing.assert_allclose(state.weights.view(3, 5, CLASSES), np.stack(models), atol=1e-8)
    np.testing.assert_allclose(posteriors(fed, state, built), q, atol=1e-8)
    assert state.heat == hand.heat
    assert len({*fold}) == len({*clean_fold}) == 3
    assert np.abs(q - hand.passes()).max() > 0.01  # the refinement changes something


def test_samples_of_the_guard_are_scored_by_the_classifier_of_one_fold():
    """So their scores are spread as those of training samples are, which the false-discovery rate needs."""
    built, em = small(), LabelEM(ridge=0.02, num_folds=4, num_fold_rounds=5)
    fed, state = drive(em, built, em.num_detections() + 1)
    hand = ByHand(built, em)
    sizes = tuple(round(0.5 * num) for num in CLEAN)
    models = state.weights.view(4, 5, CLASSES).numpy()
    S = np.stack([z @ models[k] for z, k in zip(hand.zh, folds("held", sizes, 4), strict=True)])
    T = normed(state.transition.view(CLASSES, CLASSES).numpy())
    q = softmax(log_softmax(state.heat * S, axis=1) + np.log(T[:, hand.yh].T), axis=1)
    odds = np.log(1 / q[range(len(S)), hand.yh] - 1)
    wanted = np.histogram(odds, bins=np.linspace(-16, 16, 201))[0]
    phase = {"x": state.x, "weights": state.weights, "transition": state.transition, "heat": state.heat}
    found = fed.mean(em.odds, **phase, **state.units).unseen * fed.num_clients
    np.testing.assert_allclose(found, wanted, atol=1e-9)
