"""Own loss and confident learning between clients, against plain numpy on pooled samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax

from fedbilevel.detectors.as_given import AsGiven
from fedbilevel.detectors.confident import MARGINS, Confident
from fedbilevel.detectors.label_em import HEATS, LabelEM
from fedbilevel.detectors.own_loss import OwnLoss
from support.numeric.labels import CLASSES, ByHand, posteriors, small
from support.numeric.yardstick import check_continues, drive


def left_out(built, detector):
    """Probabilities of every sample by a ridge regression of the given labels without it."""
    hand = ByHand(built, LabelEM(ridge=detector.ridge))
    given = np.eye(CLASSES)[hand.label]
    S = np.stack([hand.refit_without(j, given) for j in range(len(given))])
    every = range(len(given))
    heat = max(HEATS, key=lambda b: log_softmax(b * S, axis=1)[every, hand.label].sum())
    return hand.label, softmax(heat * S, axis=1)


def test_own_loss_keeps_the_probabilities_without_the_sample():
    built, detector = small(), OwnLoss(ridge=0.02)
    fed, state = drive(detector, built, 1)
    _, p = left_out(built, detector)
    np.testing.assert_allclose(posteriors(fed, state, built), p, atol=1e-9)
    assert state.transition.tolist() == pytest.approx([1 / CLASSES] * CLASSES**2)  # no model of the noise
    assert drive(detector, built, 2)[1].found["cut"] is None


def test_confident_learning_flags_as_many_labels_of_a_pair_as_it_counts():
    built, detector = small(), Confident(ridge=0.02)
    fed, state = drive(detector, built, 1)
    label, p = left_out(built, detector)
    t = np.array([p[label == c, c].mean() for c in range(CLASSES)])
    J = np.zeros((CLASSES, CLASSES))
    for l, row in zip(label, p, strict=True):
        sure = [c for c in range(CLASSES) if row[c] >= t[c]]
        if sure:
            J[l, max(sure, key=lambda c: row[c])] += 1
    wanted = np.zeros(len(label), bool)
    for l in range(CLASSES):
        mine = np.flatnonzero(label == l)
        for c in range(CLASSES):
            if c == l:
                continue
            asked = J[l, c] / J[l].sum() * len(mine)
            bins = ((p[mine, c] - p[mine, l] + 1) / 2 * MARGINS).astype(int)
            first = next((b for b in range(MARGINS) if (bins >= b).sum() <= asked + 1e-9), MARGINS)
            wanted[mine[bins >= first]] = True
    q = posteriors(fed, state, built)
    flags = q[range(len(label)), label] < 0.5
    assert 0 < wanted.sum() < len(label)
    assert flags.tolist() == wanted.tolist()
    own, kept = p[range(len(label)), label], q[range(len(label)), label]
    np.testing.assert_allclose(kept, np.where(wanted, own / 2, (1 + own) / 2), atol=1e-5)
    assert (q[wanted].argmax(1) != label[wanted]).all()
    assert drive(detector, built, 2)[1].found["cut"] is None  # x holds no probabilities


@pytest.mark.parametrize("kind", [OwnLoss, Confident, AsGiven])
def test_other_detectors_train_check_and_resume_as_well(kind):
    detector = kind(
        ridge=0.02, num_fit_rounds=4 - kind.num_passes
    )  # the choice of l2 is before or after the checkpoint
    check_continues(detector, small())
    _, state = drive(detector, small(), detector.num_iterations())
    assert state.found["verdict"] == "unchecked"
    assert torch.isfinite(state.y).all()


def test_labels_as_they_are_given_have_one_classifier():
    _, state = drive(AsGiven(num_fit_rounds=10), small(), 10)
    cleaned, plain = state.models.view(2, -1)
    assert torch.equal(cleaned, plain) or torch.allclose(cleaned, plain, atol=1e-12)
    assert state.found["cut"] is None
