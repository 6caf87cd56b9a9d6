"""Partitions of samples over clients, counted independently, and their picture.

No sample is lost or used twice, and the sizes and labels are as documented.
"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel import plots
from fedbilevel.data.partition import by_id, by_label, dirichlet, presence, quantity_skew, shards, split_validation
from fedbilevel.errors import ProblemError, SettingError


def rng(seed=0):
    return np.random.default_rng(seed)


def is_partition(parts, num_samples):
    assert sorted(np.concatenate(parts).tolist()) == list(range(num_samples))
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)


@given(st.integers(1, 150), st.integers(1, 8), st.integers(1, 4), st.integers(1, 9), st.integers(0, 99))
def test_shards_are_runs_of_the_samples_sorted_by_label(num_samples, num_clients, per_client, num_labels, seed):
    labels = rng(seed).integers(0, num_labels, num_samples)
    num = num_clients * per_client
    if num_samples < num:
        with pytest.raises(
            ProblemError,
            match=f"{num_samples} samples cannot be cut into {per_client} shards for each of {num_clients} clients",
        ):
            shards(labels, num_clients, per_client, rng(seed))
        return
    parts = shards(labels, num_clients, per_client, rng(seed))
    assert len(parts) == num_clients
    is_partition(parts, num_samples)
    assert all(abs(len(part) - num_samples / num_clients) <= per_client for part in parts)
    # A shard of s samples meets at most 1 + (s - 1) labels; over all shards the sorted labels change only num_labels -
    # 1 times.
    meetings = sum(len(set(labels[part].tolist())) for part in parts)
    assert meetings <= num + len(set(labels.tolist())) - 1


def test_two_shards_of_one_label_each_give_everybody_two_labels_at_most():
    """As in McMahan et al.: the shards divide the labels evenly, so that no shard holds two labels."""
    labels = rng().permutation(np.repeat(np.arange(10), 60))
    parts = shards(labels, 100, 2, rng(1))
    assert {len(part) for part in parts} == {6}
    held = [Counter(labels[part].tolist()) for part in parts]
    assert all(sorted(count.values()) in ([3, 3], [6]) for count in held)
    assert sum(len(count) == 2 for count in held) > 70  # 19 of 199 pairs of shards share their label
    together = {tuple(sorted(count)) for count in held}
    assert len(together) > 25  # neighbours in the order of labels are not dealt together
    others = shards(labels, 100, 2, rng(2))
    assert not all(np.array_equal(a, b) for a, b in zip(parts, others, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(parts, shards(labels, 100, 2, rng(1)), strict=True))


def test_which_samples_of_a_label_share_a_shard_is_random():
    first = shards(np.zeros(1000, int), 2, 1, rng())[0]
    assert 400 < first.mean() < 600


@pytest.mark.parametrize(("num_clients", "per_client"), [(0, 2), (2, 0), (-1, -1)])
def test_no_shards_are_refused(num_clients, per_client):
    with pytest.raises(ProblemError, match="use fewer shards or clients, or more data"):
        shards(np.zeros(5, int), num_clients, per_client, rng())


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 99))
def test_by_label_gives_client_i_the_label_i_mod_their_number(num_clients, num_labels, seed):
    names = 10 * np.arange(num_labels) - 7  # labels need not count from zero
    labels = rng(seed).permutation(np.repeat(names, rng(seed).integers(12, 30, num_labels)))
    parts = by_label(labels, num_clients, rng(seed))
    assert len(parts) == num_clients
    is_partition(parts, len(labels))
    for i, part in enumerate(parts):
        if num_clients >= num_labels:
            expected = {int(names[i % num_labels])}
        else:
            expected = {int(name) for k, name in enumerate(names) if k % num_clients == i}
        assert set(labels[part].tolist()) == expected
    if num_clients >= num_labels:
        for k in range(num_labels):
            sizes = [len(part) for part in parts[k::num_labels]]
            assert max(sizes) - min(sizes) <= 1


def test_by_label_deals_at_random_and_refuses_what_cannot_be():
    first = by_label(np.zeros(1000, int), 2, rng())[0]
    assert 400 < first.mean() < 600
    with pytest.raises(ProblemError, match="label 3 has 2 samples for 3 clients"):
        by_label(np.array([1, 1, 1, 3, 3]), 6, rng())
    for labels, num_clients in (([1, 2], 0), ([], 2)):
        with pytest.raises(ProblemError, match=f"{len(labels)} samples cannot be split among {num_clients} clients"):
            by_label(np.array(labels), num_clients, rng())


@given(st.lists(st.sampled_from(["b", "a", "zoe", "c"]), min_size=1, max_size=40))
def test_by_id_gives_every_client_its_own_samples(ids):
    found = by_id(np.array(ids))
    assert list(found) == sorted(set(ids))
    for name, places in found.items():
        assert places.tolist() == [i for i, one in enumerate(ids) if one == name]


def test_by_id_takes_numbers_and_refuses_values_that_name_no_client():
    found = by_id(np.array([30, 2, 30], np.int8))
    assert {name: places.tolist() for name, places in found.items()} == {2: [1], 30: [0, 2]}
    assert all(type(name) is int for name in found)
    for ids in (np.zeros(0), np.zeros((2, 2))):
        with pytest.raises(ProblemError, match="one for each of at least one sample"):
            by_id(ids)


@given(st.integers(1, 200), st.integers(1, 12), st.floats(0.01, 100), st.integers(0, 6), st.integers(0, 99))
def test_quantity_skew_gives_everybody_the_least_at_least(num_samples, num_clients, alpha, least, seed):
    if num_samples < least * num_clients:
        with pytest.raises(
            ProblemError, match=f"{num_samples} samples cannot give {num_clients} clients at least {least} each"
        ):
            quantity_skew(num_samples, num_clients, alpha, rng(seed), least)
        return
    parts = quantity_skew(num_samples, num_clients, alpha, rng(seed), least)
    assert len(parts) == num_clients
    is_partition(parts, num_samples)
    assert min(map(len, parts)) >= least


def test_sizes_of_quantity_skew_vary_as_a_dirichlet_distribution_does():
    """The mean of the sum of squared shares is (1 + alpha) / (1 + n alpha)."""
    for alpha in (0.2, 1.0, 10.0):
        shares = np.array(
            [[len(part) / 500 for part in quantity_skew(500, 8, alpha, rng(seed), least=0)] for seed in range(200)]
        )
        assert (shares**2).sum(1).mean() == pytest.approx((1 + alpha) / (1 + 8 * alpha), rel=0.1)
    big = max(quantity_skew(1000, 3, 1.0, rng()), key=len)
    assert 400 < big.mean() < 600


def test_a_class_is_present_with_its_probability_and_its_samples_are_spread_by_dirichlet():
    labels = np.repeat(np.arange(10), 4000)
    parts = presence(labels, 200, 0.7, 10.0, rng())
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    counts = np.stack([np.bincount(labels[own], minlength=10) for own in parts])
    assert np.mean(counts > 0) == pytest.approx(0.7, abs=0.03)
    shares = counts / counts.sum(0)
    owners = (counts > 0).sum(0)
    second = (shares**2).sum(0) * owners  # (1 + alpha) / (n alpha + 1), and the noise of 4000 draws
    assert second.mean() == pytest.approx(((11 / (10 * owners + 1) + 1 / 4000) * owners).mean(), rel=0.1)


def test_presence_leaves_nobody_and_no_label_out():
    labels = np.repeat(np.arange(3), 40)
    for seed in range(20):
        parts = presence(labels, 4, 0.05, 1.0, rng(seed), least=2)
        assert sorted(np.concatenate(parts).tolist()) == list(range(120))
        assert min(map(len, parts)) >= 2
    for share, alpha in ((0.0, 1.0), (1.1, 1.0), (0.5, 0.0)):
        with pytest.raises(ProblemError, match=f"presence is {share} and alpha is {alpha} for 4 clients"):
            presence(labels, 4, share, alpha, rng())


@pytest.mark.parametrize(("alpha", "num_clients"), [(0.0, 3), (-1.0, 3), (float("nan"), 3), (1.0, 0)])
def test_an_invalid_distribution_is_refused(alpha, num_clients):
    for split in (
        lambda: quantity_skew(10, num_clients, alpha, rng()),
        lambda: dirichlet(np.zeros(10, int), num_clients, alpha, rng()),
    ):
        with pytest.raises(
            ProblemError, match=f"alpha is {alpha} for {num_clients} clients, expected a value greater than 0"
        ):
            split()


@given(st.integers(2, 80), st.floats(0.001, 0.999), st.integers(0, 99))
def test_a_share_is_kept_for_validation_and_nobody_is_left_without(num, share, seed):
    indices = 3 * np.arange(num) + 5
    train, val = split_validation(indices, share, rng(seed))
    assert sorted([*train.tolist(), *val.tolist()]) == indices.tolist()
    assert len(train) >= 1
    assert len(val) >= 1
    assert abs(len(val) - share * num) <= 1
    assert train.tolist() == sorted(train.tolist())


def test_validation_is_drawn_at_random_and_impossible_shares_are_refused():
    train, val = split_validation(np.arange(1000), 0.3, rng())
    assert (len(train), len(val)) == (700, 300)
    assert 400 < val.mean() < 600
    for num, share in ((1, 0.5), (0, 0.5), (9, 0.0), (9, 1.0), (9, -0.1), (9, float("nan"))):
        with pytest.raises(ProblemError, match=f"a share of {share} of {num} samples was requested"):
            split_validation(np.arange(num), share, rng())


# ---- the picture -----------------------------------------------------------------------------------------------------


def test_counts_are_those_of_every_client():
    clients = [[3, 3, 7], [], [1, 3]]
    found, counts = plots.counts_by_client(clients)
    assert found.tolist() == [1, 3, 7]
    assert counts.tolist() == [[Counter(own)[label] for own in clients] for label in (1, 3, 7)]
    found, counts = plots.counts_by_client([np.array(["b", "a"]), np.array(["b"])])
    assert (found.tolist(), counts.tolist()) == (["a", "b"], [[1, 0], [1, 1]])


@pytest.mark.parametrize(("num_clients", "num_labels"), [(1, 1), (10, 10), (100, 10), (3, 62)])
def test_the_picture_shows_every_count(tmp_path, monkeypatch, num_clients, num_labels):
    drawn = []
    figure = plots._figure
    monkeypatch.setattr(plots, "_figure", lambda *size: drawn.append(figure(*size)) or drawn[-1])
    labels = rng().integers(0, num_labels, 60 * num_clients)
    own = [labels[part] for part in quantity_skew(len(labels), num_clients, 1.0, rng())]
    plots.partition(own, tmp_path / "parts.png", "parts")
    assert (tmp_path / "parts.png").read_bytes()[:4] == b"\x89PNG"
    above, heat = drawn[0].axes[:2]
    assert [bar.get_height() for bar in above.patches] == [len(one) for one in own]
    shown = heat.images[0].get_array().filled(0)
    names = np.unique(labels)
    assert shown.tolist() == [[Counter(one.tolist())[int(name)] for one in own] for name in names]
    assert np.ma.getmaskarray(heat.images[0].get_array()).tolist() == (shown == 0).tolist()
    written = sorted(int(text.get_text()) for text in heat.texts)
    assert written == (sorted(shown[shown > 0].tolist()) if num_clients <= 20 and num_labels <= 20 else [])
    assert len(heat.get_yticks()) <= 31


def test_pictures_of_nothing_and_without_matplotlib_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ProblemError, match="2 clients have no samples at all"):
        plots.partition([[], []], tmp_path / "none.png", "none")
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match=r"pip install 'fedbilevel\[plot\]'"):
        plots.partition([[1]], tmp_path / "none.png", "none")
    assert not (tmp_path / "none.png").exists()
