"""Noise of labels by kind: how many labels change, and to what."""

from __future__ import annotations

import numpy as np
import pytest

from fedbilevel.data.corruption import flip_by_client, flip_labels
from fedbilevel.data.partition import spread
from fedbilevel.data.sets import cifar10
from fedbilevel.errors import DataError, ProblemError
from fedbilevel.tasks.data_cleaning import DataCleaning

LABELS = np.random.default_rng(0).integers(0, 5, 20_000)
ROWS = np.random.default_rng(1).normal(size=(20_000, 12)) + 3 * np.eye(5, 12)[LABELS]


def test_asymmetric_noise_takes_the_next_label():
    spoiled, wrong = flip_labels(LABELS, 0.3, 5, np.random.default_rng(2), to="asymmetric")
    assert wrong.sum() == 6000
    assert set(((spoiled - LABELS) % 5).tolist()) == {0, 1}


def test_noise_that_depends_on_the_sample_has_its_rate_and_repeats_for_similar_samples():
    spoiled, wrong = flip_labels(LABELS, 0.3, 5, np.random.default_rng(2), to="instance", rows=ROWS)
    assert wrong.mean() == pytest.approx(0.3, abs=0.01)
    assert (spoiled[wrong] != LABELS[wrong]).all()
    twice = np.concatenate([ROWS[:2000]] * 2), np.concatenate([LABELS[:2000]] * 2)
    spoiled, wrong = flip_labels(twice[1], 0.5, 5, np.random.default_rng(3), to="instance", rows=twice[0])
    both = wrong[:2000] & wrong[2000:]
    same = spoiled[:2000] == spoiled[2000:]
    assert same[both].mean() > 0.4  # 0.25 for labels that do not depend on the sample
    assert not flip_labels(LABELS, 0.0, 5, np.random.default_rng(2), to="instance", rows=ROWS)[1].any()
    with pytest.raises(ProblemError, match="give rows, with one row of numbers per label"):
        flip_labels(LABELS, 0.3, 5, np.random.default_rng(2), to="instance")


def test_clients_have_rates_of_their_own():
    parts = spread(LABELS, 8, "iid", np.random.default_rng(4))
    rng = np.random.default_rng(5)
    spoiled, same = flip_by_client(LABELS, parts, (0.1, 0.9), 5, rng, to="wrong", rows=ROWS)
    rates = [np.mean(spoiled[own] != LABELS[own]) for own in same]
    assert min(rates) >= 0.1 - 1e-3
    assert max(rates) <= 0.9 + 1e-3
    assert np.std(rates) > 0.1
    with pytest.raises(ProblemError, match="raise the largest rate"):
        flip_by_client(LABELS, parts, (0.5, 0.2), 5, rng, to="wrong", rows=ROWS)


def test_some_clients_have_right_labels():
    """The noise of FedCorr: noisy with probability rho, at a rate uniform in (tau, 1), labels drawn uniformly."""
    labels = np.random.default_rng(0).integers(0, 5, 40_000)
    parts = spread(labels, 400, "iid", np.random.default_rng(4))
    flip = lambda chance: flip_by_client(
        labels, parts, (0.3, 1.0), 5, np.random.default_rng(5), to="uniform", rows=labels, chance=chance
    )[0]
    rates = np.array([np.mean(flip(0.4)[own] != labels[own]) for own in parts])
    assert np.mean(rates > 0) == pytest.approx(0.4, abs=0.06)
    assert rates[rates > 0].mean() == pytest.approx(0.65 * 0.8, abs=0.03)  # a fifth of new labels is right
    assert (rates > 0.3 * 0.8 - 0.15).sum() == (rates > 0).sum()
    assert (flip(1.0) != labels).mean() == pytest.approx(0.65 * 0.8, abs=0.03)


@pytest.mark.parametrize("how", ["iid", "dirichlet", "shards", "presence"])
def test_partitions_use_every_sample_once(how):
    parts = spread(LABELS, 10, how, np.random.default_rng(6), alpha=0.1)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(LABELS)))
    kinds = np.mean([len(np.unique(LABELS[own])) for own in parts])
    assert (kinds == 5) == (how == "iid")


def write(folder, labels):
    """Write labels of people for five training images of CIFAR-10 that hold no pixels."""
    (folder / "cifar10").mkdir()
    np.savez(folder / "cifar10" / "cifar10_jpeg.npz", train_labels=np.arange(5, dtype=np.uint8))
    np.savez(folder / "cifar10" / "cifar10n.npz", worst=np.array(labels, np.uint8))


def test_labels_of_people_are_read_in_the_order_of_the_images(tmp_path):
    write(tmp_path, [1, 1, 2, 9, 4])
    assert cifar10.human_labels("worst", tmp_path).tolist() == [1, 1, 2, 9, 4]


@pytest.mark.parametrize("labels", [[1, 2], [1, 1, 2, 10, 4]], ids=str)
def test_labels_of_people_that_do_not_fit_are_refused(tmp_path, labels):
    write(tmp_path, labels)
    with pytest.raises(DataError, match="get the file anew"):
        cifar10.human_labels("worst", tmp_path)


def test_the_task_knows_all_kinds_of_noise_and_partitions():
    for settings in ({"flip": "asymmetric"}, {"flip": "instance"}, {"noise_most": 0.8, "partition": "dirichlet"},
        {"noise_most": 0.8, "noisy_clients": 0.9, "partition": "presence", "alpha": 10.0},
    ):  # fmt: skip
        clients = DataCleaning(noise=0.2, num_clients=4, test_share=0.5, **settings).build().clients
        wrong = np.concatenate([client["train"]["wrong"] for client in clients])
        assert 0.15 < wrong.mean() < (0.25 if "flip" in settings else 0.8)
    with pytest.raises(ProblemError, match="use data='cifar10' and share=1"):
        DataCleaning(flip="human").build()
    with pytest.raises(ProblemError, match="but noise is the same at all clients"):
        DataCleaning(noisy_clients=0.5).build()
