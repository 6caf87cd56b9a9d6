"""Generalised and symmetric cross-entropy: closed forms, limits, gradients, and FedAvg with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.tasks.robust_losses import Robust
from support.numeric.labels import CLASSES, small
from support.numeric.yardstick import drive

EVERY = [Robust("cross_entropy"), Robust("gce", q=0.7), Robust("gce", q=1.0), Robust("sce"),
         Robust("sce", alpha=2.0, beta=0.3, floor=-6.0)]  # fmt: skip


def some(num=7):
    rng = torch.Generator().manual_seed(1)
    scores = 3 * torch.randn(num, 4, generator=rng, dtype=torch.float64)
    label = torch.randint(0, 4, (num,), generator=rng)
    soft = torch.rand(num, 4, generator=rng, dtype=torch.float64)
    return scores, label, one_hot(label, 4).double(), soft / soft.sum(1, keepdim=True)


def test_closed_forms_of_labels():
    scores, label, target, _ = some()
    p = scores.softmax(1)[range(7), label]
    entropy = cross_entropy(scores, label, reduction="none")
    torch.testing.assert_close(Robust("gce", q=0.7).losses(scores, target), (1 - p**0.7) / 0.7)
    sce = Robust("sce", alpha=0.2, beta=3.0, floor=-5.0).losses(scores, target)
    torch.testing.assert_close(sce, 0.2 * entropy + 3.0 * 5.0 * (1 - p))
    torch.testing.assert_close(Robust("cross_entropy").losses(scores, target), entropy)


def test_limits_of_the_exponent():
    scores, label, target, soft = some()
    entropy = cross_entropy(scores, label, reduction="none")
    torch.testing.assert_close(Robust("gce", q=0.0).losses(scores, target), entropy)
    errors = [float((Robust("gce", q=q).losses(scores, target) - entropy).abs().max()) for q in (1e-2, 1e-4, 1e-6)]
    assert errors[1] < errors[0] / 50
    assert errors[2] < 1e-4
    p = scores.softmax(1)
    torch.testing.assert_close(Robust("gce", q=1.0).losses(scores, target), 1 - p[range(7), label])
    distance = 0.5 * (p - target).abs().sum(1)  # half of the mean absolute error, summed over classes
    torch.testing.assert_close(Robust("gce", q=1.0).losses(scores, target), distance)
    torch.testing.assert_close(Robust("gce", q=1.0).losses(scores, soft), 1 - (p * soft).sum(1))


def test_the_linear_loss_is_symmetric_and_cross_entropy_is_not():
    """The losses of all labels of a sample have one sum: then uniform noise does not move the minimum."""
    scores, *_ = some()
    every = lambda robust: sum(robust.losses(scores, one_hot(torch.full((7,), c), 4)) for c in range(4))
    torch.testing.assert_close(every(Robust("gce", q=1.0)), torch.full((7,), 3.0, dtype=torch.float64))
    assert every(Robust("cross_entropy")).std() > 1


@pytest.mark.parametrize("robust", EVERY, ids=str)
def test_gradients_are_those_of_finite_differences_and_of_the_share(robust):
    scores, label, target, soft = some()
    for wanted in (target, soft):
        found = torch.func.grad(lambda s, t=wanted: robust.losses(s, t).sum())(scores)
        step = 1e-6
        for i, k in ((0, 0), (3, 2), (6, 3)):
            move = torch.zeros_like(scores)
            move[i, k] = step
            up, down = (float(robust.losses(scores + sign * move, wanted).sum()) for sign in (1, -1))
            assert float(found[i, k]) == pytest.approx((up - down) / (2 * step), abs=1e-8)
    p = scores.softmax(1)
    closed = robust.share(p[range(7), label][:, None]) * (p - target)
    torch.testing.assert_close(torch.func.grad(lambda s: robust.losses(s, target).sum())(scores), closed)


@pytest.mark.parametrize("robust", EVERY, ids=str)
def test_the_share_is_never_above_its_bound_and_reaches_it(robust):
    share = robust.share(torch.linspace(0, 1, 50, dtype=torch.float64))
    assert float(share.max()) == pytest.approx(robust.steepest)


@pytest.mark.parametrize("learn", ["weights", "labels"])
@pytest.mark.parametrize("robust", [Robust("gce", q=0.4), Robust("sce", alpha=0.5, beta=0.2, floor=-3.0)], ids=str)
def test_fedavg_takes_steps_on_the_mean_of_the_robust_losses(learn, robust):
    built = small(
        learn=learn, loss=robust.name, gce_power=robust.q, sce_forward=robust.alpha, sce_reverse=robust.beta,
        sce_floor=robust.floor, l2=0.03,
    )  # fmt: skip
    _, state = drive(FedAvg(lr_lower=0.05, num_local_steps=1), built, 3)
    y = torch.zeros(4 * CLASSES + CLASSES, dtype=torch.float64)

    def loss(flat):
        weight, bias = flat[: 4 * CLASSES].view(4, CLASSES), flat[4 * CLASSES :]
        parts = []
        for client in built.clients:
            image, label = torch.tensor(client["train"]["image"]), torch.tensor(client["train"]["label"])
            target = one_hot(label, CLASSES).double()
            if learn == "labels":
                target = (8 * target).softmax(1)
            each = robust.losses(image @ weight + bias, target)
            parts.append(each.mean() * (0.5 if learn == "weights" else 1.0) + 0.015 * (flat**2).sum())
        return sum(parts) / len(parts)

    for _ in range(3):
        y = y - 0.05 * torch.func.grad(loss)(y)
    np.testing.assert_allclose(state.y, y, atol=1e-12)
    plain = drive(FedAvg(lr_lower=0.05, num_local_steps=1), small(learn=learn, l2=0.03), 3)[1]
    assert not torch.allclose(plain.y, state.y, atol=1e-3)
