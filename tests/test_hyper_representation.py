"""Hyper-representation: losses against plain numpy, derivatives against finite differences, splits against the images themselves, and learning."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections import Counter

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel import discovery
from fedbilevel.data import idx
from fedbilevel.data.digits import digits
from fedbilevel.errors import DataError, ProblemError
from fedbilevel.population import Population
from fedbilevel.tasks.hyper_representation import HyperRepresentation
from fedbilevel.tasks.task import Built
from yardstick import drive, relative

SMALL = {"num_clients": 3, "share": 0.05, "num_hidden": 4}
models = pytest.mark.parametrize("model", ["mlp", "cnn"])


def write(folder, stem, pixels, labels):
    for what, array in (("images-idx3", pixels), ("labels-idx1", labels)):
        (folder / f"{stem}-{what}-ubyte").write_bytes(struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes())


def fake(folder) -> tuple[np.ndarray, np.ndarray]:
    """Sixty training and ten test images of 28 x 28 with ten labels, as idx files."""
    pixels, labels = np.random.default_rng(0).integers(0, 256, (70, 28, 28)), np.arange(70) % 10
    write(folder, "train", pixels[:60], labels[:60])
    write(folder, "t10k", pixels[60:], labels[60:])
    return pixels, labels


def numbers(tree) -> int:
    return sum(leaf.numel() for leaf in tree.values())


# ---- the network ---------------------------------------------------------------------------------------------------------


def test_the_mlp_has_the_numbers_of_parameters_that_the_papers_name(tmp_path):
    fake(tmp_path)
    problem = HyperRepresentation(data="mnist", data_dir=str(tmp_path), num_clients=4).build().problem
    assert (numbers(problem.x0), numbers(problem.y0)) == (157_000, 2_010)
    problem = HyperRepresentation(num_clients=4).build().problem
    assert (numbers(problem.x0), numbers(problem.y0)) == (64 * 200 + 200, 2_010)


def test_the_cnn_fits_images_of_both_sizes_and_all_but_its_last_layer_is_x(tmp_path):
    fake(tmp_path)
    shapes = lambda tree: {name: tuple(leaf.shape) for name, leaf in tree.items() if name.endswith("weight")}
    built = HyperRepresentation(data="mnist", data_dir=str(tmp_path), num_clients=4, model="cnn").build()
    assert shapes(built.problem.x0) == {"conv1.weight": (10, 1, 5, 5), "conv2.weight": (20, 10, 5, 5), "hidden.weight": (50, 320)}
    assert shapes(built.problem.y0) == {"head.weight": (10, 50)}
    population = Population(*built)
    assert population.measure(population.x0, population.y0)["upper_loss"] == pytest.approx(math.log(10), abs=1)
    problem = HyperRepresentation(num_clients=4, model="cnn").build().problem
    assert shapes(problem.x0) == {"conv1.weight": (8, 1, 3, 3), "conv2.weight": (16, 8, 2, 2), "hidden.weight": (32, 16)}


def test_initial_weights_are_uniform_within_one_over_the_root_of_the_inputs_and_follow_the_seed():
    x0, other = (HyperRepresentation(data_seed=seed).build().problem.x0["hidden.weight"] for seed in (0, 1))
    assert 0.99 / 8 < float(x0.abs().max()) <= 1 / 8
    assert float(x0.mean()) == pytest.approx(0, abs=0.005)
    assert not torch.equal(x0, other)
    head = HyperRepresentation().build().problem.y0["head.weight"]
    assert 0.98 / math.sqrt(200) < float(head.abs().max()) <= 1 / math.sqrt(200)
    cnn = HyperRepresentation(model="cnn").build().problem
    for tree, name, bound in ((cnn.x0, "conv2.weight", math.sqrt(6 / 32)), (cnn.x0, "hidden.bias", 1 / 4), (cnn.y0, "head.weight", 1 / math.sqrt(32))):
        assert 0.9 * bound < float(tree[name].abs().max()) <= bound


# ---- the same in plain numpy ---------------------------------------------------------------------------------------------


def activated(z: np.ndarray, kind: str) -> np.ndarray:
    return np.maximum(z, 0) if kind == "relu" else 0.5 * z * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))


def represented(x: dict[str, np.ndarray], images: np.ndarray, kind: str) -> np.ndarray:
    z = images
    if "conv1.weight" in x:
        z = z.reshape(len(z), 1, 8, 8)
        for name in ("conv1", "conv2"):
            weight, bias = x[f"{name}.weight"], x[f"{name}.bias"]
            windows = np.lib.stride_tricks.sliding_window_view(z, weight.shape[2:], axis=(2, 3))
            z = activated(np.einsum("nchwij,kcij->nkhw", windows, weight) + bias[:, None, None], kind)
            half = z.shape[2] // 2
            z = z[:, :, : 2 * half, : 2 * half].reshape(*z.shape[:2], half, 2, half, 2).max((3, 5))
        z = z.reshape(len(z), -1)
    return activated(z @ x["hidden.weight"].T + x["hidden.bias"], kind)


def near(population: Population, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(start + 0.2 * torch.randn(start.shape, generator=draw, dtype=torch.float64) for start in (population.x0, population.y0))


@models
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_losses_and_figures_are_those_of_plain_numpy(model, activation):
    built = HyperRepresentation(**SMALL, model=model, activation=activation, l2=0.3).build()
    population = Population(*built, dtype=torch.float64)
    x, y = near(population)
    hidden = {name: leaf.numpy() for name, leaf in population.layout_x.unravel(x).items()}
    head = {name: leaf.numpy() for name, leaf in population.layout_y.unravel(y).items()}
    losses, right, count = {"train": [], "val": []}, Counter(), Counter()
    for client in built.clients:
        for role, fields in client.items():
            scores = represented(hidden, fields["image"].astype(float), activation) @ head["head.weight"].T + head["head.bias"]
            entropy = np.log(np.exp(scores).sum(1)) - scores[np.arange(len(scores)), fields["label"]]
            losses.setdefault(role, []).append(entropy.mean())
            right[role] += int((scores.argmax(1) == fields["label"]).sum())
            count[role] += len(scores)
    figures = population.measure(x, y)
    assert figures["upper_loss"] == pytest.approx(np.mean(losses["val"]), rel=1e-9)
    assert figures["lower_loss"] == pytest.approx(np.mean(losses["train"]) + 0.15 * sum((leaf**2).sum() for leaf in head.values()), rel=1e-9)
    for role in ("test", "train"):
        assert figures[f"{role}_accuracy"] == right[role] / count[role]


# ---- derivatives ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "lower"), [("mlp", "global"), ("mlp", "local"), ("cnn", "global")])
def test_derivatives_agree_with_finite_differences_where_activations_are_smooth(model, lower):
    built = HyperRepresentation(**SMALL, model=model, activation="gelu", lower=lower).build()
    assert built.problem.scopes == (lower, "shared")
    assert fb.check_problem(*built, show=False).ok
    # which of two by two is the largest may change within a longer step
    report = fb.check_hypergradient(*built, estimators=["cg"], num_directions=2, step=1e-6, show=False)
    assert report.ok, str(report)


def test_the_hessian_of_the_head_is_exact_with_relu_and_at_least_as_curved_as_the_norm():
    population = Population(*HyperRepresentation(**SMALL, l2=0.3).build(), dtype=torch.float64)
    x, y = near(population)
    batch = population.data.batch(population.data.positions, "train")
    eye = torch.eye(len(y), dtype=torch.float64)
    hessian = torch.stack([population.oracle.hessian_product(x, y, unit, batch) for unit in eye], dim=2)
    step = 1e-5
    differences = [
        (population.oracle.lower_grad(x, y + step * unit, batch) - population.oracle.lower_grad(x, y - step * unit, batch)) / (2 * step) for unit in eye
    ]
    assert relative(hessian, torch.stack(differences, dim=2)) < 1e-8
    assert float(torch.linalg.eigvalsh(hessian).min()) == pytest.approx(0.3, abs=1e-9)  # a shift of all biases changes the norm alone


def without_features(built: Built) -> Built:
    problem, features = built.problem, built.problem.features
    inside = lambda function: lambda x, y, batch: function(x, y, {**batch, "features": features(x, batch)})
    statistics = {role: inside(function) for role, function in problem.statistics.items()}
    return Built(dataclasses.replace(problem, upper=inside(problem.upper), lower=inside(problem.lower), statistics=statistics, features=None), built.clients)


@pytest.mark.parametrize("name", ["fbo_aggitd", "lfednest", "fedbio"])
@pytest.mark.parametrize("batch_size", [None, 5])
def test_kept_features_change_no_result(name, batch_size):
    built, ends = HyperRepresentation(**SMALL).build(), []
    algorithm = discovery.algorithm(name)(lr_upper=0.1, lr_lower=0.1, lr_system=0.1, num_local_steps=2)
    for one in (built, without_features(built)):
        fed, state = drive(algorithm, one, 3, batch_size=batch_size)
        ends.append((state.x, state.y, fed.measure(state.x, state.y)))
    (x, y, figures), (other_x, other_y, other_figures) = ends
    assert relative(x, fed.host.x0) > 1e-4
    assert relative(x, other_x) < 1e-12
    assert relative(y, other_y) < 1e-12
    assert figures == pytest.approx(other_figures, rel=1e-12)


# ---- who has what --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["iid", "shards"])
@pytest.mark.parametrize("num_clients", [1, 10, 13])
def test_every_image_is_used_once_with_its_label_and_the_parts_are_as_large_as_asked(split, num_clients):
    images, labels = digits()
    truth = {image.tobytes(): label for image, label in zip(images, labels, strict=True)}
    clients = HyperRepresentation(split=split, num_clients=num_clients, val_share=0.3).build().clients
    used = Counter()
    for client in clients:
        for fields in client.values():
            used.update(image.tobytes() for image in fields["image"])
            assert all(truth[image.tobytes()] == label for image, label in zip(fields["image"], fields["label"], strict=True))
        num_val, num_train = len(client["val"]["label"]), len(client["train"]["label"])
        assert num_val == round(0.3 * (num_val + num_train))
    assert used == Counter(truth.keys())
    assert sum(len(client["test"]["label"]) for client in clients) == round(0.25 * 1797)
    assert np.ptp([len(client["test"]["label"]) for client in clients]) <= 1
    assert np.ptp([len(client["train"]["label"]) + len(client["val"]["label"]) for client in clients]) <= (1 if split == "iid" else 2)


def known(client) -> int:
    return len({*client["train"]["label"].tolist(), *client["val"]["label"].tolist()})


def test_shards_leave_each_client_a_few_labels_and_iid_leaves_all():
    shards, iid = (HyperRepresentation(split=split).build().clients for split in ("shards", "iid"))
    assert max(map(known, shards)) <= 4
    assert np.mean([*map(known, shards)]) < 4
    assert {*map(known, iid)} == {10}
    assert all(len({*client["test"]["label"].tolist()}) > 5 for client in shards)  # the test part is dealt at random


def test_files_keep_their_own_test_part_and_pixels_are_scaled(tmp_path):
    pixels, labels = fake(tmp_path)
    clients = HyperRepresentation(data="mnist", data_dir=str(tmp_path), num_clients=3).build().clients
    seen = {"train": {}, "test": {}}
    for client in clients:
        for role, fields in client.items():
            keys = [np.rint(255 * image).astype(np.uint8).tobytes() for image in fields["image"]]
            seen["test" if role == "test" else "train"].update(zip(keys, fields["label"].tolist(), strict=True))
    keyed = {image.astype(np.uint8).tobytes(): label for image, label in zip(pixels, labels.tolist(), strict=True)}
    assert seen["train"] == dict([*keyed.items()][:60])
    assert seen["test"] == dict([*keyed.items()][60:])
    half = HyperRepresentation(data="mnist", data_dir=str(tmp_path), num_clients=3, share=0.5).build().clients
    assert sum(len(client[role]["label"]) for client in half for role in ("train", "val")) == 30
    assert sum(len(client["test"]["label"]) for client in half) == 5


def test_mnist_is_split_as_in_the_papers():
    try:
        idx.folder_of("mnist")
    except DataError:
        pytest.skip("the files of MNIST are not here: name their folder with FEDBILEVEL_DATA")
    clients = HyperRepresentation(data="mnist", num_clients=100).build().clients
    assert {(len(client["train"]["label"]), len(client["val"]["label"]), len(client["test"]["label"])) for client in clients} == {(480, 120, 100)}
    assert max(map(known, clients)) <= 4


def test_too_many_clients_are_a_clear_error():
    with pytest.raises(ProblemError, match="cannot be cut into 2 shards for each of 1000 clients: use fewer shards or clients, or more data"):
        HyperRepresentation(num_clients=1000).build()
    with pytest.raises(ProblemError, match="client 0 has 1 image, expected one for training and one for validation"):
        HyperRepresentation(num_clients=45, split="iid", share=0.05, test_share=0.5).build()


# ---- learning ------------------------------------------------------------------------------------------------------------


def test_the_cnn_learns_with_shorter_steps():
    algorithm = discovery.algorithm("fedbio")(lr_upper=0.05, lr_lower=0.2, lr_system=0.1, num_local_steps=1)
    fed, state = drive(algorithm, HyperRepresentation(model="cnn").build(), 60, dtype=torch.float32)
    assert fed.measure(*fed.initial())["test_accuracy"] < 0.2
    assert fed.measure(state.x, state.y)["test_accuracy"] > 0.4


@pytest.mark.parametrize("name", ["fbo_aggitd", "fednest", "lfednest", "fedbio"])
def test_suggested_settings_learn_in_a_quarter_of_the_suggested_iterations(name):
    built = HyperRepresentation(num_hidden=32).build()
    algorithm = discovery.algorithm(name)(**HyperRepresentation.suggestions(name))
    fed, state = drive(algorithm, built, HyperRepresentation.iterations(name) // 4, dtype=torch.float32)
    start, end = fed.measure(*fed.initial()), fed.measure(state.x, state.y)
    assert start["test_accuracy"] < 0.2
    assert end["test_accuracy"] > 0.7
    assert end["upper_loss"] < 0.7 * start["upper_loss"]
