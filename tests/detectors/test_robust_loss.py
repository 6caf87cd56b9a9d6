"""Training by robust losses on labels as given, against gradients of the pooled loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedbilevel.detectors.label_em import LabelEM
from fedbilevel.detectors.robust_loss import RobustLoss
from fedbilevel.errors import UnknownNameError
from fedbilevel.settings import made
from support.numeric.labels import CLASSES, ByHand, posteriors, small
from support.numeric.yardstick import check_continues, drive

KINDS = [RobustLoss(l2=0.05), RobustLoss(loss="gce", gce_power=0.3, l2=0.05), RobustLoss(loss="sce", l2=0.05)]


def pooled(hand, robust, l2):
    """The loss of all training and clean samples, as a function of a classifier."""
    z, zc = torch.tensor(hand.z), torch.tensor(hand.zc)
    target = lambda label: torch.eye(CLASSES, dtype=torch.float64)[label]

    def loss(model):
        total = robust.losses(z @ model, target(hand.label)).sum() + robust.losses(zc @ model, target(hand.yc)).sum()
        return total / (len(z) + len(zc)) + 0.5 * l2 * (model**2).sum()

    return loss


@pytest.mark.parametrize("detector", KINDS, ids=["gce", "gce-0.3", "sce"])
def test_the_classifier_is_a_stationary_point_of_the_pooled_robust_loss(detector):
    built = small()
    long = RobustLoss(**{**detector.asdict(), "num_fit_rounds": 600})
    _, state = drive(long, built, 600)
    loss = pooled(ByHand(built, LabelEM()), detector.robust(), detector.l2)
    cleaned, plain = state.models.view(2, 5, CLASSES)
    assert float(torch.func.grad(loss)(cleaned).norm()) < 1e-8
    assert float(torch.func.grad(loss)(plain).norm()) > 1e-3


@pytest.mark.parametrize("detector", KINDS, ids=["gce", "gce-0.3", "sce"])
def test_a_first_step_lowers_the_loss(detector):
    """Without extrapolation, a step on a bound cannot go uphill; a bound of cross-entropy is none of sce."""
    built = small()
    loss = pooled(ByHand(built, LabelEM()), detector.robust(), detector.l2)
    _, state = drive(detector, built, 1)
    first = state.models.view(2, 5, CLASSES)[0]
    assert float(loss(first)) < float(loss(torch.zeros_like(first)))
    assert detector.steepest() == (4.1 if detector.loss == "sce" else 1.0)


def test_x_has_the_probabilities_of_the_trained_classifier_at_the_end():
    built, detector = small(), RobustLoss(l2=0.05, num_fit_rounds=20)
    before = drive(detector, built, 20)[1]
    fed, state = drive(detector, built, detector.num_iterations())
    hand = ByHand(built, LabelEM())
    wanted = (torch.tensor(hand.z) @ state.models.view(2, 5, CLASSES)[0]).softmax(1)
    np.testing.assert_allclose(posteriors(fed, state, built), wanted, atol=1e-9)
    assert torch.equal(before.models, state.models)
    assert state.found["num_guard"] == 9


def test_a_resumed_run_is_the_same_bit_for_bit():
    check_continues(RobustLoss(loss="sce", num_fit_rounds=4), small())


def test_settings_that_have_no_effect_are_refused():
    with pytest.raises(UnknownNameError, match="targets"):
        made(RobustLoss, {"targets": "soft"})
