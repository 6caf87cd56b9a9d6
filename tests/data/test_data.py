"""Ragged client data: the content of a batch, errors, and how samples are split and corrupted."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.data.corruption import flip_labels
from fedbilevel.data.partition import iid, take_per_class
from fedbilevel.data.sets.digits import digits
from fedbilevel.errors import ProblemError
from fedbilevel.problem.client_data import ClientData

SIZES = {"train": (3, 1, 5), "val": (2, 4, 1), "test": (0, 2, 0)}


def holdings(sizes=SIZES):
    """Samples with value = 100 * client + place, in two fields of different shape and type."""
    return [
        {
            role: {
                "value": 100.0 * i + np.arange(nums[i], dtype=np.float64),
                "pair": np.stack([np.full(nums[i], i), np.arange(nums[i])], axis=1),
            }
            for role, nums in sizes.items()
        }
        for i in range(len(sizes["train"]))
    ]


def test_whole_batches_hold_each_clients_samples_once_and_weights_that_sum_to_one():
    data = ClientData(holdings(), dtype=torch.float64)
    batch = data.batch(torch.arange(3), "train")
    assert batch.counts.tolist() == [3, 1, 5]
    assert batch.fields["value"].shape == (3, 5)
    assert batch.fields["pair"].shape == (3, 5, 2)
    for i, num in enumerate(SIZES["train"]):
        weight = batch.fields["weight"][i]
        assert weight[:num].tolist() == [1 / num] * num
        assert weight[num:].tolist() == [0.0] * (5 - num)
        row = batch.row(i)
        assert row["value"].tolist() == [100.0 * i + j for j in range(num)]
        assert row["pair"].tolist() == [[i, j] for j in range(num)]
        assert row["index"].tolist() == list(range(num))
        assert row["weight"].tolist() == [1 / num] * num


def test_padding_repeats_a_sample_of_the_same_client():
    batch = ClientData(holdings(), dtype=torch.float64).batch(torch.tensor([0, 2]), "train")
    assert batch.fields["value"][0].tolist() == [0.0, 1.0, 2.0, 0.0, 0.0]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.data())
def test_any_cohort_gathers_its_own_samples(nums, data):
    clients = ClientData(holdings({"train": nums, "val": nums}), dtype=torch.float64)
    cohort = torch.tensor(
        data.draw(st.lists(st.sampled_from(range(len(nums))), unique=True, max_size=len(nums))), dtype=torch.int64
    )
    places = torch.tensor(
        [[data.draw(st.integers(0, nums[i] - 1)) for _ in range(3)] for i in cohort.tolist()], dtype=torch.int64
    ).view(len(cohort), 3)
    some = clients.batch(cohort, "train", places)
    assert torch.equal(some.fields["value"], 100.0 * cohort[:, None] + places)
    assert torch.equal(some.fields["pair"], torch.stack([cohort[:, None].expand_as(places), places], dim=-1))
    assert torch.equal(some.fields["index"], places)
    assert torch.equal(some.fields["weight"], torch.full_like(places, 1, dtype=torch.float64) / 3)
    whole = clients.batch(cohort, "train")
    assert whole.counts.tolist() == [nums[i] for i in cohort.tolist()]
    for row, i in enumerate(cohort.tolist()):
        assert whole.row(row)["value"].tolist() == [100.0 * i + j for j in range(nums[i])]


def test_the_whole_batch_of_another_cohort_is_another_batch():
    data = ClientData(holdings(), dtype=torch.float64)
    first = data.batch(torch.tensor([0, 1]), "train")
    assert data.batch(torch.tensor([0, 1]), "train") is first
    assert data.batch(torch.tensor([1, 2]), "train").fields["value"][0].tolist()[:1] == [100.0]
    assert data.batch(torch.tensor([0, 1]), "val").counts.tolist() == [2, 4]
    assert data.batch(torch.tensor([0, 1]), "train", torch.tensor([[2], [0]])).whole().counts.tolist() == [3, 1]


def test_a_client_without_samples_of_an_optional_role_has_weight_zero_everywhere():
    batch = ClientData(holdings(), dtype=torch.float64).batch(torch.arange(3), "test")
    assert batch.counts.tolist() == [0, 2, 0]
    assert batch.fields["weight"].tolist() == [[0, 0], [0.5, 0.5], [0, 0]]
    assert batch.row(0)["value"].tolist() == []


def test_floats_take_the_working_type_and_whole_numbers_stay():
    for dtype in (torch.float32, torch.float64):
        batch = ClientData(holdings(), dtype=dtype).batch(torch.arange(3), "train")
        assert (batch.fields["value"].dtype, batch.fields["weight"].dtype) == (dtype, dtype)
        assert (batch.fields["pair"].dtype, batch.fields["index"].dtype) == (torch.int64, torch.int64)


def test_changing_the_given_arrays_later_changes_nothing():
    given_arrays = holdings({"train": (2,), "val": (2,)})
    data = ClientData(given_arrays, dtype=torch.float64)
    given_arrays[0]["train"]["value"][:] = -1
    assert data.batch(torch.arange(1), "train").fields["value"].tolist() == [[0.0, 1.0]]


def test_lists_and_tensors_are_as_good_as_arrays():
    role = {"a": [[1.0, 2.0], [3.0, 4.0]], "b": torch.tensor([True, False])}
    batch = ClientData([{"train": role, "val": role}], dtype=torch.float64).batch(torch.arange(1), "val")
    assert batch.fields["a"].tolist() == [[[1.0, 2.0], [3.0, 4.0]]]
    assert batch.fields["b"].tolist() == [[True, False]]


@pytest.mark.parametrize(
    "array", [np.arange(3.0)[::-1], np.broadcast_to(np.array([2.0, 1.0, 0.0]), (3,))], ids=["backwards", "read-only"]
)
def test_views_that_torch_dislikes_are_read_as_they_stand(array):
    role = {"a": array}
    assert ClientData([{"train": role, "val": role}]).batch(torch.arange(1), "val").fields["a"].tolist() == [
        [2.0, 1.0, 0.0]
    ]


def spoiled(client, role, **fields):
    """Three good clients, one of whom has some fields replaced (None: removed)."""
    clients = holdings()
    for name, value in fields.items():
        clients[client][role][name] = value
        if value is None:
            del clients[client][role][name]
    return clients


def without(client, role):
    clients = holdings()
    del clients[client][role]
    return clients


empty = np.zeros(0)


@pytest.mark.parametrize(
    ("clients", "says"),
    [
        ([], "there are no clients"),
        ([{}], "client 0 has no 'train' data (it has none)"),
        ([{"train": {"a": np.ones(2)}}], "client 0 has no 'val' data (it has 'train')"),
        (spoiled(1, "train", value=empty, pair=np.zeros((0, 2), int)), "client 1 has no 'train' samples"),
        (spoiled(2, "val", value=empty, pair=np.zeros((0, 2), int)), "client 2 has no 'val' samples"),
        ([{"train": {}, "val": {}}], "client 0 has no 'train' samples"),
        (spoiled(1, "val", value=np.ones((4, 2))), "client 1 has val/value samples of shape (2,)"),
        (spoiled(2, "train", pair=np.ones((5, 3), int)), "client 2 has train/pair samples of shape (3,)"),
        (
            spoiled(2, "train", pair=np.ones((5, 2))),
            "client 2 has train/pair samples of shape (2,) and type torch.float32",
        ),
        (spoiled(2, "train", pair=np.ones((5, 2), np.int32)), "type torch.int32, client 0 has (2,) and torch.int64"),
        (
            spoiled(0, "train", value=np.ones(4)),
            "client 0 has fields of different lengths in 'train' ({'value': 4, 'pair': 3})",
        ),
        (spoiled(1, "val", value=None), "only 2 of 3 clients have the field val/value"),
        (spoiled(0, "val", value=None), "only 2 of 3 clients have the field val/value"),
        (spoiled(1, "val", extra=np.ones(4)), "only 1 of 3 clients have the field val/extra"),
        (without(2, "test"), "client 2 has the roles ['train', 'val'], client 0 has ['test', 'train', 'val']"),
        (without(0, "test"), "client 1 has the roles ['test', 'train', 'val'], client 0 has ['train', 'val']"),
        (spoiled(1, "train", index=np.ones(1)), "client 1 has a field named 'index' in 'train'"),
        (spoiled(0, "val", weight=np.ones(2)), "client 0 has a field named 'weight' in 'val'"),
        (spoiled(2, "train", features=np.ones(5)), "client 2 has a field named 'features' in 'train'"),
        (
            spoiled(2, "train", value=np.array([0, 1, np.nan, 3, 4])),
            "client 2 has a value in train/value that is not finite",
        ),
        (spoiled(0, "val", value=np.array([np.inf, 0])), "client 0 has a value in val/value that is not finite"),
        (
            spoiled(0, "val", value=np.array([1e300, 0])),
            "client 0 has a value in val/value that is not finite",
        ),  # infinite in float32
        (spoiled(1, "train", value=np.array([object()])), "client 1 has train/value as an array of Python objects"),
        (spoiled(1, "train", value=np.array(["seven"])), "client 1 has train/value"),
        (spoiled(1, "train", pair=[[1, 2], [3]]), "client 1 has train/pair"),
        (spoiled(1, "train", value=3.0), "client 1 has a single number as train/value"),
    ],
)
def test_bad_data_are_refused_with_the_client_and_the_field(clients, says):
    with pytest.raises(ProblemError) as error:
        ClientData(clients, dtype=torch.float32)
    assert says in str(error.value)


# ---- split and spoil -------------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 99))
def test_iid_gives_every_sample_to_exactly_one_client_in_equal_parts(num_samples, num_clients, seed):
    rng = np.random.default_rng(seed)
    if num_samples < num_clients:
        with pytest.raises(ProblemError, match=f"{num_samples} samples cannot be split among {num_clients} clients"):
            iid(num_samples, num_clients, rng)
        return
    parts = iid(num_samples, num_clients, rng)
    assert sorted(np.concatenate(parts).tolist()) == list(range(num_samples))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_iid_depends_on_the_generator():
    first, again, other = (iid(50, 3, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_take_per_class_takes_that_many_of_each_class():
    labels = np.array([0, 1, 1, 2, 2, 2, 0, 1, 0])
    taken = take_per_class(labels, 2, np.random.default_rng(0))
    assert sorted(taken) == [0, 1, 2]
    for label, places in taken.items():
        assert len(set(places.tolist())) == 2
        assert (labels[places] == label).all()
    with pytest.raises(ProblemError, match="class 0 has 3 samples, 4 were requested"):
        take_per_class(labels, 4, np.random.default_rng(0))


@given(st.floats(0, 1), st.integers(2, 10), st.integers(1, 200), st.integers(0, 99))
def test_flipped_labels_are_exactly_those_reported_and_always_wrong(rate, num_classes, num, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, num_classes, num)
    noisy, hit = flip_labels(labels, rate, num_classes, rng)
    assert hit.sum() == round(rate * num)
    assert np.array_equal(noisy != labels, hit)
    assert noisy.min() >= 0
    assert noisy.max() < num_classes


def test_a_flipped_label_is_uniform_over_the_other_classes():
    noisy, _ = flip_labels(np.full(9000, 3), 1.0, 10, np.random.default_rng(0))
    counts = np.delete(np.bincount(noisy, minlength=10), 3)
    assert ((counts - 1000) ** 2 / 1000).sum() < 26.12  # 99.9 % of chi-square with 8 degrees of freedom


def test_digits_are_bit_equal_to_those_of_scikit_learn():
    theirs = pytest.importorskip("sklearn.datasets").load_digits()
    images, labels = digits()
    assert (images.dtype, labels.dtype) == (np.float32, np.int64)
    assert images.tobytes() == (theirs.data / 16.0).astype(np.float32).tobytes()
    assert labels.tobytes() == theirs.target.astype(np.int64).tobytes()


def test_digits_are_read_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert len(digits()[0]) == 1797


def test_digits_are_the_embedded_images_in_the_unit_interval():
    images, labels = digits()
    assert images.shape == (1797, 64)
    assert images.dtype == np.float32
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
