"""Data cleaning on idx files and with a network: splits, wrong labels, losses and derivatives.

Losses and derivatives are compared with plain numpy.

The losses and figures of the linear model are in test_tasks.py.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.data.corruption import flip_labels
from fedbilevel.data.partition import iid, take_per_class
from fedbilevel.data.sets import idx
from fedbilevel.data.sets.digits import digits
from fedbilevel.errors import DataError, ProblemError, SettingError
from fedbilevel.oracle.population import Population
from fedbilevel.tasks.data_cleaning import DataCleaning
from support.data import write_idx
from support.numeric.yardstick import drive, relative


def fake(folder, num_train: int = 120, num_test: int = 30) -> tuple[dict[bytes, int], dict[bytes, int]]:
    """Write random 28 x 28 images with ten labels as idx files; return the true labels per part."""
    pixels = np.random.default_rng(0).integers(0, 256, (num_train + num_test, 28, 28)).astype(np.uint8)
    labels = np.arange(num_train + num_test) * 7 % 10
    truth = [(image.tobytes(), int(label)) for image, label in zip(pixels, labels, strict=True)]
    write_idx(folder, "train", pixels[:num_train], labels[:num_train])
    write_idx(folder, "t10k", pixels[num_train:], labels[num_train:])
    return dict(truth[:num_train]), dict(truth[num_train:])


def keys(fields) -> list[bytes]:
    return [np.rint(255 * image).astype(np.uint8).tobytes() for image in fields["image"]]


# ---- who gets what ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"num_clients": 12, "num_clean": 7, "noise": 0.8, "data_seed": 5}], ids=str)
def test_without_new_settings_the_digits_are_split_by_the_draws_they_were_always_split_by(settings):
    """Follow the draws from the seed as they were before other data sets existed.

    One draw more or less would change all recorded results on the digits.
    """
    task = DataCleaning(**settings)
    images, labels = digits()
    rng = np.random.default_rng(task.data_seed)
    order, num_test = rng.permutation(1797), round(task.test_share * 1797)
    test, rest = order[:num_test], order[num_test:]
    holders = [len(range(label, task.num_clients, 10)) for label in range(10)]
    places = take_per_class(labels[rest], task.num_clean * max(holders), rng)
    clean = {label: rest[mine] for label, mine in places.items()}
    train = np.setdiff1d(rest, np.concatenate([clean[label][: task.num_clean * holders[label]] for label in range(10)]))
    hit = np.zeros(len(train), dtype=bool)
    hit[rng.choice(len(train), round(task.noise * len(train)), replace=False)] = True
    noisy = np.where(hit, (labels[train] + rng.integers(1, 10, size=len(train))) % 10, labels[train])
    for i, (client, mine, testing) in enumerate(
        zip(
            task.build().clients,
            iid(len(train), task.num_clients, rng),
            iid(len(test), task.num_clients, rng),
            strict=True,
        )
    ):
        own = clean[i % 10][i // 10 * task.num_clean :][: task.num_clean]
        expected = {
            "train": {"image": images[train[mine]], "label": noisy[mine], "wrong": hit[mine]},
            "val": {"image": images[own], "label": labels[own]},
            "test": {"image": images[test[testing]], "label": labels[test[testing]]},
        }
        for role, fields in expected.items():
            assert client[role].keys() == fields.keys()
            assert all(np.array_equal(client[role][name], value) for name, value in fields.items())


@pytest.mark.parametrize("num_train", [None, 6])
def test_images_of_idx_files_are_dealt_once_and_their_test_part_stays_apart(tmp_path, num_train):
    train, test = fake(tmp_path)
    task = DataCleaning(
        data="mnist", data_dir=str(tmp_path), num_clients=12, num_clean=2, num_train=num_train, noise=0.5
    )
    clients = task.build().clients
    assert [len(client["train"]["label"]) for client in clients] == [8 if num_train is None else 6] * 12
    used = Counter(key for client in clients for role in ("train", "val") for key in keys(client[role]))
    assert set(used.values()) == {1}
    assert set(used) <= set(train)
    tested = {
        key: int(label)
        for client in clients
        for key, label in zip(keys(client["test"]), client["test"]["label"], strict=True)
    }
    assert tested == test
    for i, client in enumerate(clients):
        assert [train[key] for key in keys(client["val"])] == client["val"]["label"].tolist() == [i % 10] * 2
        actual = np.array([train[key] for key in keys(client["train"])]) != client["train"]["label"]
        assert np.array_equal(actual, client["train"]["wrong"])
    assert (
        sum(client["train"]["wrong"].sum() for client in clients)
        == sum(len(client["train"]["label"]) for client in clients) // 2
    )


def test_which_training_images_are_used_is_random_and_follows_the_seed(tmp_path):
    train, _ = fake(tmp_path)
    one, same, other = (
        DataCleaning(data="mnist", data_dir=str(tmp_path), num_clients=3, num_clean=2, num_train=10, data_seed=seed)
        .build()
        .clients
        for seed in (1, 1, 2)
    )
    seen = lambda clients, role="train": {key for client in clients for key in keys(client[role])}
    assert seen(one) == seen(same) != seen(other)
    left = [key for key in train if key not in seen(one, "val")]
    assert 5 < sum(key in seen(one) for key in left[: len(left) // 2]) < 25  # of thirty: not the first ones in the file


def test_more_training_images_than_there_are_is_a_clear_error(tmp_path):
    with pytest.raises(
        ProblemError,
        match=(
            "num_train is 200 for each of 10 clients, but only 1148 images are left for training: use "
            "at most 114, or fewer"
        ),
    ):
        DataCleaning(num_train=200).build()
    assert [len(client["train"]["label"]) for client in DataCleaning(num_train=114).build().clients] == [114] * 10
    with pytest.raises(DataError, match="data_dir"):
        DataCleaning(data="fashion", data_dir=str(tmp_path)).build()
    with pytest.raises(SettingError, match="flip is 'some', expected 'wrong' or 'uniform'"):
        DataCleaning(flip="some")


def test_mnist_is_split_as_in_the_paper():
    try:
        idx.folder_of("mnist")
    except DataError:
        pytest.skip("the files of MNIST are not here: name their folder with FEDBILEVEL_DATA")
    clients = DataCleaning(data="mnist", num_train=4500, num_clean=50, noise=0.8, flip="uniform").build().clients
    assert {
        (len(client["train"]["label"]), len(client["val"]["label"]), len(client["test"]["label"])) for client in clients
    } == {(4500, 50, 1000)}
    assert [set(client["val"]["label"].tolist()) for client in clients] == [{i} for i in range(10)]
    wrong = np.concatenate([client["train"]["wrong"] for client in clients])
    assert (
        abs(wrong.mean() - 0.72) < 5 * (0.8 * 0.9 * 0.1 / 45000) ** 0.5
    )  # of 0.8 * 45000 corrupted labels, a tenth is right by chance


# ---- labels ----------------------------------------------------------------------------------------------------------


def test_a_uniform_label_is_any_label_and_only_a_really_wrong_one_is_marked():
    labels = np.arange(100_000) % 4
    spoiled, wrong = flip_labels(labels, 0.6, 4, np.random.default_rng(0), to="uniform")
    assert np.array_equal(wrong, spoiled != labels)
    shares = np.bincount((spoiled - labels) % 4, minlength=4) / len(labels)
    np.testing.assert_allclose(
        shares, [0.4 + 0.15, 0.15, 0.15, 0.15], rtol=0, atol=0.006
    )  # 5 deviations of 60,000 draws


def test_a_wrong_label_is_never_the_true_one():
    labels = np.arange(100_000) % 4
    spoiled, wrong = flip_labels(labels, 0.6, 4, np.random.default_rng(0))
    assert np.array_equal(wrong, spoiled != labels)
    assert wrong.sum() == 60_000
    np.testing.assert_allclose(
        np.bincount((spoiled - labels) % 4, minlength=4) / len(labels), [0.4, 0.2, 0.2, 0.2], rtol=0, atol=0.006
    )


@pytest.mark.parametrize(("flip", "true"), [("wrong", 0.05), ("uniform", 0.05 + 0.095)])
def test_at_high_noise_training_on_wrong_labels_is_worse_than_guessing_and_on_uniform_ones_better(flip, true):
    clients = DataCleaning(noise=0.95, flip=flip).build().clients
    right = ~np.concatenate([client["train"]["wrong"] for client in clients])
    assert abs(right.mean() - true) < 0.03
    fed, state = drive(
        FedAvg(lr_lower=1, num_local_steps=5), DataCleaning(noise=0.95, flip=flip).build(), 20, dtype=torch.float32
    )
    accuracy = fed.measure(*state)["test_accuracy"]
    assert accuracy < 0.08 if flip == "wrong" else accuracy > 0.25


# ---- the network -----------------------------------------------------------------------------------------------------

NETWORK = DataCleaning(num_clients=3, num_train=5, num_clean=4, test_share=0.9, model="mlp", num_hidden=6)


def scores(y, image: np.ndarray) -> np.ndarray:
    y = {name: leaf.double().numpy() for name, leaf in y.items()}
    for layer in ("hidden1", "hidden2"):
        image = np.maximum(image @ y[f"{layer}.weight"].T + y[f"{layer}.bias"], 0)
    return image @ y["head.weight"].T + y["head.bias"]


def test_the_network_has_three_layers_with_uniform_weights_that_follow_the_seed():
    one, same, other = (DataCleaning(model="mlp", data_seed=seed).build().problem.y0 for seed in (1, 1, 2))
    assert {name: tuple(leaf.shape) for name, leaf in one.items()} == {
        "hidden1.weight": (100, 64),
        "hidden1.bias": (100,),
        "hidden2.weight": (100, 100),
        "hidden2.bias": (100,),
        "head.weight": (10, 100),
        "head.bias": (10,),
    }
    assert all(torch.equal(one[name], same[name]) and not torch.equal(one[name], other[name]) for name in one)
    assert 0.99 / 8 < float(one["hidden1.weight"].abs().max()) <= 1 / 8


def test_losses_and_accuracy_of_the_network_are_those_of_plain_numpy():
    built = NETWORK.build()
    fed, _ = drive(FedAvg(), built, 0)
    y = {
        name: 3 * leaf for name, leaf in built.problem.y0.items()
    }  # away from the start, where all classes are about equal
    x = torch.tensor(np.random.default_rng(1).standard_normal((3, 5)))
    losses, right, missed = {"train": [], "val": []}, 0, 0
    for row, client in zip(x.numpy(), built.clients, strict=True):
        for role, collected in losses.items():
            s = scores(y, client[role]["image"].astype(float))
            entropy = np.log(np.exp(s).sum(1)) - s[np.arange(len(s)), client[role]["label"]]
            collected.append(np.mean(entropy / (1 + np.exp(-row)) if role == "train" else entropy))
        missed += (scores(y, client["val"]["image"].astype(float)).argmax(1) != client["val"]["label"]).sum()
        right += (scores(y, client["test"]["image"].astype(float)).argmax(1) == client["test"]["label"]).sum()
    figures = fed.measure(x, torch.cat([leaf.double().flatten() for leaf in y.values()]))
    norm = sum(float((leaf.double() ** 2).sum()) for leaf in y.values())
    assert figures["lower_loss"] == pytest.approx(np.mean(losses["train"]) + 0.005 * norm, rel=1e-12)
    assert figures["upper_loss"] == pytest.approx(np.mean(losses["val"]), rel=1e-12)
    assert figures["test_accuracy"] == pytest.approx(
        right / sum(len(client["test"]["label"]) for client in built.clients)
    )
    assert missed > 0
    assert figures["validation_error"] == pytest.approx(
        missed / sum(len(client["val"]["label"]) for client in built.clients)
    )


def test_second_derivatives_of_the_network_are_differences_of_its_gradient():
    population = Population(*NETWORK.build(), dtype=torch.float64)
    batch = population.data.batch(torch.arange(3), "train")
    rng = np.random.default_rng(2)
    x, y, v = (
        torch.tensor(rng.standard_normal((3, 5))),
        2 * population.y0,
        torch.tensor(rng.standard_normal(len(population.y0))),
    )
    gradient = lambda x, y: population.oracle.lower_grad(x, y, batch)
    h = 1e-6
    hessian = (gradient(x, y + h * v) - gradient(x, y - h * v)) / (2 * h)
    assert relative(population.oracle.hessian_product(x, y, v, batch), hessian) < 1e-6
    jacobian = torch.stack(
        [(gradient(x + h * e, y) - gradient(x - h * e, y)) @ v / (2 * h) for e in torch.eye(5, dtype=torch.float64)],
        dim=1,
    )
    assert relative(population.oracle.jacobian_product(x, y, v, batch), jacobian) < 1e-6


def test_the_network_learns_and_its_data_are_cleaned():
    built = DataCleaning(model="mlp", noise=0.4, num_hidden=50, l2=0.001, num_clean=40).build()
    algorithm = FedBiO(lr_lower=0.5, lr_system=0.2, lr_upper=50.0, num_local_steps=1, minibatches="shared")
    fed, state = drive(algorithm, built, 200, dtype=torch.float32)
    figures = fed.measure(state.x, state.y)
    assert figures["test_accuracy"] > 0.85
    assert figures["f1"] > 0.9
