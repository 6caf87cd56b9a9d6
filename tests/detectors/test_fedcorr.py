"""FedCorr, against its stages in plain numpy on heterogeneous clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import softmax

import fedbilevel as fb
from fedbilevel.detectors._mixture import upper_part
from fedbilevel.detectors.as_given import AsGiven
from fedbilevel.detectors.fedcorr import FedCorr, local_dimensions
from fedbilevel.detectors.label_em import LabelEM
from support.numeric.labels import CLASSES, ByHand, posteriors, small
from support.numeric.rivals import some_noisy_clients
from support.numeric.yardstick import check_continues, drive

EYE = np.eye(CLASSES)


def upper(values):
    return upper_part(torch.tensor(values)).numpy() > 0.5


def dimension(rows, k):
    """The definition, row by row."""
    found = []
    for j, row in enumerate(rows):
        near = np.sort([np.sqrt(((row - other) ** 2).sum()) for i, other in enumerate(rows) if i != j])[:k]
        found.append(-k / np.log(near / near[-1]).sum())
    return np.mean(found)


class Corrected:
    """All stages on the pooled samples of `small`."""

    def __init__(self, built, settings):
        self.set, self.hand = settings, ByHand(built, LabelEM())
        self.label, self.W = self.hand.label.copy(), np.zeros((5, CLASSES))
        self.level, self.total = np.zeros(3), np.zeros(3)

    def train(self, rounds, used):
        z = np.concatenate([self.hand.z[used], self.hand.zc])
        label = np.concatenate([self.label[used], self.hand.yc])
        self.W = self.stepped(z, label, self.hand.gram, rounds)
        return softmax(self.hand.z @ self.W, axis=1)

    def stepped(self, z, label, gram, rounds):
        bound = gram / (2 * len(z)) + self.set.l2 * np.eye(5)
        last = ahead = self.W
        age = 0
        for _ in range(rounds):
            slope = z.T @ (softmax(z @ ahead, axis=1) - EYE[label]) / len(z) + self.set.l2 * ahead
            new = ahead - np.linalg.solve(bound, slope)
            age = 0 if (slope * (new - last)).sum() > 0 else age + 1
            last, ahead = new, new + age / (age + 3) * (new - last)
        return last

    def own(self, i):
        """Probabilities of the model that client i trains further."""
        mine = self.hand.owner == i
        z = self.hand.z[mine]
        return softmax(z @ self.stepped(z, self.label[mine], z.T @ z, self.set.num_local_steps), axis=1)

    def passes(self):
        every, own = np.ones(len(self.label), bool), self.hand.owner
        for _ in range(self.set.num_passes - 1):
            p = self.train(self.set.num_warm_rounds, every)
            self.total += [dimension(self.own(i), self.set.num_neighbours) for i in range(3)]
            self.level[:] = 0
            for i in np.flatnonzero(upper(self.total)):
                mine = np.flatnonzero(own == i)
                loss = -np.log(p[mine, self.label[mine]])
                num = upper(loss).sum()
                self.level[i] = num / len(mine)
                for j in mine[np.argsort(-loss, kind="stable")][: int(self.set.relabel_share * num)]:
                    if p[j].max() >= self.set.confidence:
                        self.label[j] = p[j].argmax()
        self.between = self.label.copy()
        p = self.train(self.set.num_tune_rounds, self.level[own] <= self.set.clean_level)
        for j in np.flatnonzero(self.level[own] > self.set.clean_level):
            if p[j].max() >= self.set.confidence:
                self.label[j] = p[j].argmax()
        return 0.999 * EYE[self.label] + 0.001 * p


@pytest.mark.parametrize(("steps", "l2", "k", "share"), [(1, 0.003, 6, 0.3), (3, 0.01, 4, 0.5)])
def test_labels_are_those_of_the_stages_in_numpy(steps, l2, k, share):
    built = small()
    detector = FedCorr(
        num_passes=4, num_warm_rounds=5, num_local_steps=steps, num_tune_rounds=7, num_neighbours=k, l2=l2,
        confidence=0.4, relabel_share=share,
    )  # fmt: skip
    hand = Corrected(built, detector)
    wanted = hand.passes()
    fed, state = drive(detector, built, detector.num_passes)
    np.testing.assert_allclose(posteriors(fed, state, built), wanted, atol=1e-9)
    np.testing.assert_allclose(fed.host.memory.rows["level"][:, 0], hand.level, atol=1e-12)
    np.testing.assert_allclose(fed.host.memory.rows["dimension"][:, 0], hand.total, rtol=1e-8)
    assert (hand.between != hand.hand.label).any()  # the first stage changed labels
    assert (hand.label != hand.between).any()  # and so did the second
    assert 0 < (hand.level > detector.clean_level).sum() < 3
    untouched = hand.hand.owner == int(np.argmin(hand.level))
    assert np.array_equal(hand.label[untouched], hand.hand.label[untouched])
    assert drive(detector, built, detector.num_passes + 1)[1].found["cut"] is None


def test_labels_are_corrected_with_the_smallest_l2_if_it_is_chosen():
    found = []
    for l2 in (None, 0.001, 0.1):
        fed, state = drive(FedCorr(num_passes=3, num_neighbours=6, confidence=0.4, l2=l2), small(), 3)
        found.append(posteriors(fed, state, small()))
    assert np.array_equal(found[0], found[1])
    assert not np.allclose(found[0], found[2])


def test_the_classifier_is_trained_on_corrected_labels():
    built, detector = small(), FedCorr(num_passes=3, num_fit_rounds=400, num_neighbours=6, l2=0.05)
    fed, state = drive(detector, built, detector.num_passes + detector.num_fit_rounds)
    hand = ByHand(built, LabelEM())
    q = torch.tensor(posteriors(fed, state, built))
    assert (q.argmax(1).numpy() != hand.label).any()
    model = state.models.view(2, 5, CLASSES)[0].clone().requires_grad_()
    rows = torch.tensor(np.concatenate([hand.z, hand.zc]))
    target = torch.cat([q, torch.tensor(EYE[hand.yc])])
    loss = -(target * (rows @ model).log_softmax(1)).sum(1).mean() + 0.025 * (model**2).sum()
    loss.backward()
    assert float(model.grad.norm()) < 1e-8


@pytest.mark.parametrize("dim", [1, 3])
def test_the_local_dimension_is_that_of_the_space_of_the_rows(dim):
    rng = np.random.default_rng(0)
    rows = torch.tensor(np.pad(rng.random((1500, dim)), ((0, 0), (0, 4))) @ rng.standard_normal((dim + 4, 6)))
    # 1 / LID is a mean of 19 exponential variables, so the mean of LID is 20/18 of the dimension
    assert float(local_dimensions(rows, 20).mean()) == pytest.approx(dim * 20 / 18, rel=0.12)


def test_the_local_dimension_of_few_or_equal_rows_is_finite():
    assert local_dimensions(torch.rand(2, 3), 20).tolist() == [0.0, 0.0]
    assert torch.isfinite(local_dimensions(torch.ones(5, 3), 3)).all()


def test_a_resumed_run_is_the_same_bit_for_bit():
    check_continues(FedCorr(num_passes=3, num_warm_rounds=2, num_neighbours=5, num_fit_rounds=1), small())


def test_labels_of_noisy_clients_are_corrected_and_those_of_others_stay():
    clients, noisy = some_noisy_clients(dim=200)  # as many features as samples, so that wrong labels can be fitted
    found = fb.clean_labels(clients, detector="fedcorr", dtype=torch.float64, l2=0.03)
    assert found.verdict == "accepted"
    for i, (client, flags) in enumerate(zip(clients, found.flags, strict=True)):
        wrong = client["train"]["wrong"]
        if i in noisy:
            assert (flags & wrong).sum() / wrong.sum() > 0.9
            assert (flags & ~wrong).sum() <= 5
        else:
            assert flags.sum() <= 2


def test_the_cost_is_that_of_the_docstring():
    detector = FedCorr(num_passes=3, num_warm_rounds=4, num_tune_rounds=5, num_neighbours=6, num_fit_rounds=2)
    bills = [
        drive(one, small(), one.num_iterations())[0].bill().totals() for one in (detector, AsGiven(num_fit_rounds=2))
    ]
    assert bills[0]["rounds"] - bills[1]["rounds"] == 2 * (4 + 1) + 5
    sent = (2 * 4 + 5) * (5 * CLASSES + 1) + 2  # W and a number of samples, and one dimension in each pass
    assert bills[0]["floats_up"] - bills[1]["floats_up"] == 3 * sent
