"""FedNoRo: indicators, weights by distance and gradients, against derivatives of its losses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div

import fedbilevel as fb
from fedbilevel.detectors.as_given import AsGiven
from fedbilevel.detectors.fednoro import FedNoRo, nearness, scaled_losses
from fedbilevel.detectors.label_em import LabelEM
from fedbilevel.problem.draws import Stream
from support.numeric.labels import CLASSES, ByHand, posteriors, small
from support.numeric.rivals import some_noisy_clients
from support.numeric.yardstick import check_continues, drive


def test_losses_are_scaled_by_class_and_missing_classes_count_as_the_least():
    losses = torch.tensor([[2.0, 9.0, 0.0], [8.0, 0.0, 0.0], [3.0, 4.0, 0.0]])
    numbers = torch.tensor([[2.0, 3.0, 0.0], [2.0, 0.0, 0.0], [1.0, 4.0, 0.0]])
    wanted = [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [2 / 3, 0.0, 0.0]]  # means 1, 4, 3 and 3, none, 1
    torch.testing.assert_close(scaled_losses(losses, numbers), torch.tensor(wanted))


def test_distances_are_those_to_the_nearest_clean_client():
    models = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0], [10.0, 0.0]])
    found = nearness(models, torch.tensor([False, True, True, False]))
    wanted = [1.0, math.exp(-1), math.exp(-0.2), 1.0]  # distances 5 and 1
    assert found.tolist() == pytest.approx(wanted)
    assert nearness(models, torch.tensor([True] * 4)).tolist() == [1.0] * 4  # nothing to compare with
    assert nearness(models, torch.tensor([False] * 4)).tolist() == [1.0] * 4


def parts(built):
    """Rows and labels of every client: training samples, and the clean samples that are used."""
    hand, found = ByHand(built, LabelEM()), []
    start = 0
    for i, client in enumerate(built.clients):
        order = Stream(0).order("held", i, len(client["val"]["label"]), iteration=0).numpy()
        used = len(order) - round(0.5 * len(order))
        mine = hand.owner == i
        clean = slice(start, start + used)
        start += used
        found.append([torch.tensor(a) for a in (hand.z[mine], hand.label[mine], hand.zc[clean], hand.yc[clean])])
    return found


def test_gradients_are_those_of_adjusted_cross_entropy_and_distillation():
    built, detector = small(), FedNoRo(num_fit_rounds=6, num_warm_rounds=4, l2=0.03)
    fed, state = drive(detector, built, 4)
    state = state._replace(found={**state.found, "noisy": [0, 1, 0]})
    fed.begin(5)
    found = detector.summed(fed, state)
    now = state.ahead.view(2, 5, CLASSES)
    part = 0.8 * math.exp(-5 * (1 - 4 / 6) ** 2)  # the fourth of six rounds
    slopes, counts = [], []
    for i, (z, label, zc, clean) in enumerate(parts(built)):
        shares = (torch.bincount(label, minlength=CLASSES) + 1) / (len(label) + CLASSES)
        teacher = (z @ now[0] / 0.8).softmax(1)

        def loss(model, z=z, label=label, zc=zc, clean=clean, shares=shares, teacher=teacher, noisy=i == 1):
            adjusted = cross_entropy(z @ model + shares.log(), label, reduction="sum")
            other = kl_div((z @ model).log_softmax(1), teacher, reduction="sum")
            mixed = (1 - part) * adjusted + part * other if noisy else adjusted
            return mixed + cross_entropy(zc @ model, clean, reduction="sum")

        slopes.append(torch.func.grad(loss)(now[0]))
        counts.append(len(z) + len(zc))
    mean = [slope / count for slope, count in zip(slopes, counts, strict=True)]
    gap = min(float((mean[1] - mean[i]).norm()) for i in (0, 2))
    trust = [1.0, math.exp(-gap / gap), 1.0]
    wanted = sum(t * slope for t, slope in zip(trust, slopes, strict=True)) / 3
    torch.testing.assert_close(found.slope.view(2, 5, CLASSES)[0], wanted)
    assert found.weight.tolist() == pytest.approx([np.dot(trust, counts) / 3, sum(counts) / 3])
    plain = sum(
        torch.func.grad(
            lambda m, z=z, label=label, zc=zc, clean=clean: (
                cross_entropy(z @ m, label, reduction="sum") + cross_entropy(zc @ m, clean, reduction="sum")
            )
        )(now[1])
        for z, label, zc, clean in parts(built)
    )
    torch.testing.assert_close(found.slope.view(2, 5, CLASSES)[1], plain / 3)


def test_slopes_while_l2_is_chosen_are_those_of_every_pair_without_the_fold():
    """Each pair has the slopes that a fixed l2 has on clients without the fold, with shares of all labels."""
    built, detector = small(), FedNoRo(num_fit_rounds=12, num_warm_rounds=4)
    fed, state = drive(detector, built, 4)
    state = state._replace(found={**state.found, "noisy": [0, 1, 0]})
    fed.begin(5)
    found, part = detector.summed(fed, state), 0.8 * math.exp(-5 * (1 - 4 / 12) ** 2)
    every = parts(built)
    orders = [Stream(0).order("fold", i, len(own[0]), iteration=0) for i, own in enumerate(every)]
    rest = [order[len(order) // 10 :] for order in orders]
    slopes, weights = found.slope.view(4, 2, 5, CLASSES), found.weight.view(4, 2)
    counts = torch.tensor([len(some) + len(own[2]) for own, some in zip(every, rest, strict=True)], dtype=torch.float64)
    for pair, models in enumerate(state.ahead.view(4, 2, 5, CLASSES)):
        own = [[], []]
        for i, ((z, label, zc, clean), some) in enumerate(zip(every, rest, strict=True)):
            shares = ((torch.bincount(label, minlength=CLASSES) + 1) / (len(label) + CLASSES)).log()
            eye, zr = torch.eye(CLASSES, dtype=torch.float64), z[some]
            score = zr @ models[0]
            gap = (score + shares).softmax(1) - eye[label[some]]
            if i == 1:
                gap = (1 - part) * gap + part * (score.softmax(1) - (score / 0.8).softmax(1))
            for k, inside in enumerate((gap, (zr @ models[1]).softmax(1) - eye[label[some]])):
                own[k].append(zr.T @ inside + zc.T @ ((zc @ models[k]).softmax(1) - eye[clean]))
        mean = [slope / count for slope, count in zip(own[0], counts, strict=True)]
        near = min(float((mean[1] - mean[i]).norm()) for i in (0, 2))
        assert near > 1e-3
        trust = torch.tensor([1.0, math.exp(-1), 1.0], dtype=torch.float64)
        torch.testing.assert_close(slopes[pair, 0], sum(t * slope for t, slope in zip(trust, own[0], strict=True)) / 3)
        torch.testing.assert_close(slopes[pair, 1], sum(own[1]) / 3)
        torch.testing.assert_close(weights[pair], torch.stack([(trust * counts).mean(), counts.mean()]))


def test_the_fold_counts_labels_of_noisy_clients_as_much_as_training_does():
    built, detector = small(), FedNoRo(num_fit_rounds=12, num_warm_rounds=4)
    fed, state = drive(detector, built, 4)
    state = state._replace(found={**state.found, "noisy": [0, 1, 0]})
    fed.begin(5)
    wanted, doubt = torch.zeros(4, 2, dtype=torch.float64), 0.8 * math.exp(-5 * (1 - 4 / 12) ** 2)
    for i, (z, label, _, _) in enumerate(parts(built)):
        fold = Stream(0).order("fold", i, len(z), iteration=0)[: len(z) // 10]
        shares = ((torch.bincount(label, minlength=CLASSES) + 1) / (len(label) + CLASSES)).log()
        for pair, (cleaned, plain) in enumerate(state.models.view(4, 2, 5, CLASSES)):
            loss = cross_entropy(z[fold] @ cleaned + shares, label[fold], reduction="sum")
            wanted[pair, 0] += loss * ((1 - doubt) if i == 1 else 1.0)
            wanted[pair, 1] += cross_entropy(z[fold] @ plain, label[fold], reduction="sum")
    torch.testing.assert_close(3 * detector.fold_losses(fed, state).view(4, 2), wanted)


def test_noisy_clients_are_the_upper_part_of_the_losses_after_the_warm_up():
    clients, noisy = some_noisy_clients()
    found = fb.clean_labels(clients, detector="fednoro", dtype=torch.float64, l2=0.03)
    assert {i for i, flag in enumerate(found.found["noisy"]) if flag} == noisy
    assert found.found["gain"] > 0
    for i, (client, flags) in enumerate(zip(clients, found.flags, strict=True)):
        wrong = client["train"]["wrong"]
        if i in noisy:
            assert (flags & wrong).sum() / wrong.sum() > 0.9
        else:
            assert flags.sum() == 0


def test_x_has_the_labels_that_were_learned_from():
    built, detector = small(), FedNoRo(num_fit_rounds=5, num_warm_rounds=4, l2=0.03)
    fed, state = drive(detector, built, detector.num_iterations())
    hand = ByHand(built, LabelEM())
    score = torch.tensor(hand.z) @ state.models.view(2, 5, CLASSES)[0]
    given = torch.eye(CLASSES, dtype=torch.float64)[hand.label]
    noisy = np.array(state.found["noisy"])[hand.owner].astype(bool)
    assert 0 < noisy.sum() < len(noisy)
    wanted = torch.where(
        torch.tensor(noisy)[:, None],
        0.2 * given + 0.8 * (score / 0.8).softmax(1),
        0.999 * given + 0.001 * score.softmax(1),
    )
    np.testing.assert_allclose(posteriors(fed, state, built), wanted, atol=1e-9)


def test_noisy_clients_are_sought_with_the_smallest_l2_if_it_is_chosen():
    found = [drive(FedNoRo(num_warm_rounds=9, l2=l2), small(), 1)[1].found for l2 in (None, 0.001)]
    assert found[0] == found[1]


def test_a_resumed_run_is_the_same_bit_for_bit():
    check_continues(FedNoRo(num_fit_rounds=3, num_warm_rounds=2), small())


def test_the_cost_is_that_of_the_docstring():
    detector = FedNoRo(num_warm_rounds=4, num_fit_rounds=2)
    bills = [
        drive(one, small(), one.num_iterations())[0].bill().totals() for one in (detector, AsGiven(num_fit_rounds=2))
    ]
    assert bills[0]["rounds"] - bills[1]["rounds"] == 4 + 1
    assert bills[0]["floats_up"] - bills[1]["floats_up"] == 3 * (4 * (5 * CLASSES + 1) + 2 * CLASSES)
