"""Hyper-representation: losses against plain numpy and derivatives against finite differences.

Also splits against the images themselves, and learning.
"""

from __future__ import annotations

import dataclasses
import io
import math
import struct
from collections import Counter

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel import discovery
from fedbilevel.data import catalogue
from fedbilevel.data.sets import cifar10
from fedbilevel.data.sets.digits import digits
from fedbilevel.data.sets.images import Images, standardised
from fedbilevel.errors import DataError, ProblemError
from fedbilevel.oracle.population import Population
from fedbilevel.tasks.hyper_representation import HyperRepresentation
from fedbilevel.tasks.task import Built
from support.numeric.yardstick import drive, relative

SMALL = {"num_clients": 3, "share": 0.05, "num_hidden": 4}
models = pytest.mark.parametrize("model", ["mlp", "cnn"])


def write(folder, stem, pixels, labels):
    for what, array in (("images-idx3", pixels), ("labels-idx1", labels)):
        (folder / f"{stem}-{what}-ubyte").write_bytes(
            struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
        )


def fake(folder) -> tuple[np.ndarray, np.ndarray]:
    """Sixty training and ten test images of 28 x 28 with ten labels, as idx files."""
    pixels, labels = np.random.default_rng(0).integers(0, 256, (70, 28, 28)), np.arange(70) % 10
    write(folder, "train", pixels[:60], labels[:60])
    write(folder, "t10k", pixels[60:], labels[60:])
    return pixels, labels


def fake_cifar(folder, num_train: int = 30, num_test: int = 10) -> None:
    """Noise of another colour for every channel, as JPEG files."""
    image = pytest.importorskip("PIL.Image")
    rng, arrays = np.random.default_rng(0), {"class_names": np.array([f"class {k}" for k in range(10)])}
    for part, num in (("train", num_train), ("test", num_test)):
        pieces = []
        for _ in range(num):
            file = io.BytesIO()
            image.fromarray(
                np.kron(rng.integers([0, 90, 30], [256, 160, 130], (8, 8, 3)), np.ones((4, 4, 1))).astype(np.uint8)
            ).save(file, "JPEG", quality=95)
            pieces.append(file.getvalue())
        arrays[f"{part}_jpeg"] = np.frombuffer(b"".join(pieces), np.uint8)
        arrays[f"{part}_offsets"] = np.cumsum([0, *map(len, pieces)])
        arrays[f"{part}_labels"] = np.arange(num, dtype=np.uint8) % 10
    place = folder / cifar10.FILE
    place.parent.mkdir(parents=True)
    np.savez(place, **arrays)


def here(name: str) -> None:
    try:
        catalogue.where(name)
    except DataError as missing:
        pytest.skip(str(missing))


def numbers(tree) -> int:
    return sum(leaf.numel() for leaf in tree.values())


# ---- the network -----------------------------------------------------------------------------------------------------


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
    assert shapes(built.problem.x0) == {
        "conv1.weight": (10, 1, 5, 5),
        "conv2.weight": (20, 10, 5, 5),
        "hidden.weight": (50, 320),
    }
    assert shapes(built.problem.y0) == {"head.weight": (10, 50)}
    population = Population(*built)
    assert population.measure(population.x0, population.y0)["upper_loss"] == pytest.approx(math.log(10), abs=1)
    problem = HyperRepresentation(num_clients=4, model="cnn").build().problem
    assert shapes(problem.x0) == {
        "conv1.weight": (8, 1, 3, 3),
        "conv2.weight": (16, 8, 2, 2),
        "hidden.weight": (32, 16),
    }


def test_on_cifar_the_cnn_is_lenet_and_its_last_layer_or_its_last_two_are_y(tmp_path):
    fake_cifar(tmp_path)
    task = HyperRepresentation(data="cifar10", data_dir=str(tmp_path), num_clients=3, split="iid", model="cnn")
    shapes = lambda tree: {name: tuple(leaf.shape) for name, leaf in tree.items() if name.endswith("weight")}
    upper = {"conv1.weight": (6, 3, 5, 5), "conv2.weight": (16, 6, 5, 5), "hidden.weight": (120, 16 * 5 * 5)}
    one, two = (dataclasses.replace(task, head_layers=layers).build().problem for layers in (1, 2))
    assert (shapes(one.x0), shapes(one.y0)) == (upper, {"head.weight": (10, 120)})
    assert (shapes(two.x0), shapes(two.y0)) == (upper, {"middle.weight": (84, 120), "head.weight": (10, 84)})
    assert numbers(two.x0) + numbers(two.y0) == 62_006  # LeNet-5 on three channels
    assert all(torch.equal(leaf, two.x0[name]) for name, leaf in one.x0.items())
    assert 0.95 / math.sqrt(120) < float(two.y0["middle.weight"].abs().max()) <= 1 / math.sqrt(120)
    mlp = dataclasses.replace(task, model="mlp").build().problem
    assert (numbers(mlp.x0), numbers(mlp.y0)) == (3 * 32 * 32 * 200 + 200, 2_010)


def test_initial_weights_are_uniform_within_one_over_the_root_of_the_inputs_and_follow_the_seed():
    x0, other = (HyperRepresentation(data_seed=seed).build().problem.x0["hidden.weight"] for seed in (0, 1))
    assert 0.99 / 8 < float(x0.abs().max()) <= 1 / 8
    assert float(x0.mean()) == pytest.approx(0, abs=0.005)
    assert not torch.equal(x0, other)
    head = HyperRepresentation().build().problem.y0["head.weight"]
    assert 0.98 / math.sqrt(200) < float(head.abs().max()) <= 1 / math.sqrt(200)
    cnn = HyperRepresentation(model="cnn").build().problem
    for tree, name, bound in (
        (cnn.x0, "conv2.weight", math.sqrt(6 / 32)),
        (cnn.x0, "hidden.bias", 1 / 4),
        (cnn.y0, "head.weight", 1 / math.sqrt(32)),
    ):
        assert 0.9 * bound < float(tree[name].abs().max()) <= bound


# ---- the same in plain numpy -----------------------------------------------------------------------------------------


def activated(z: np.ndarray, kind: str) -> np.ndarray:
    return np.maximum(z, 0) if kind == "relu" else 0.5 * z * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))


def represented(x: dict[str, np.ndarray], images: np.ndarray, kind: str) -> np.ndarray:
    z = images
    if "conv1.weight" in x:
        num_channels = x["conv1.weight"].shape[1]
        side = round((z.shape[1] / num_channels) ** 0.5)
        z = z.reshape(len(z), num_channels, side, side)
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
    return tuple(
        start + 0.2 * torch.randn(start.shape, generator=draw, dtype=torch.float64)
        for start in (population.x0, population.y0)
    )


@models
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize(("data", "head_layers"), [("digits", 1), ("digits", 2), ("cifar10", 1)])
def test_losses_and_figures_are_those_of_plain_numpy(model, activation, data, head_layers, tmp_path):
    settings = {**SMALL, "head_layers": head_layers}
    if data == "cifar10":
        fake_cifar(tmp_path)
        settings |= {"data": data, "data_dir": str(tmp_path), "share": 1.0, "split": "iid"}
    built = HyperRepresentation(**settings, model=model, activation=activation, l2=0.3).build()
    population = Population(*built, dtype=torch.float64)
    x, y = near(population)
    hidden = {name: leaf.numpy() for name, leaf in population.layout_x.unravel(x).items()}
    head = {name: leaf.numpy() for name, leaf in population.layout_y.unravel(y).items()}
    losses, right, count = {"train": [], "val": []}, Counter(), Counter()
    for client in built.clients:
        for role, fields in client.items():
            z = represented(hidden, fields["image"].astype(float), activation)
            z = activated(z @ head["middle.weight"].T + head["middle.bias"], activation) if head_layers == 2 else z
            scores = z @ head["head.weight"].T + head["head.bias"]
            entropy = np.log(np.exp(scores).sum(1)) - scores[np.arange(len(scores)), fields["label"]]
            losses.setdefault(role, []).append(entropy.mean())
            right[role] += int((scores.argmax(1) == fields["label"]).sum())
            count[role] += len(scores)
    figures = population.measure(x, y)
    assert figures["upper_loss"] == pytest.approx(np.mean(losses["val"]), rel=1e-9)
    assert figures["lower_loss"] == pytest.approx(
        np.mean(losses["train"]) + 0.15 * sum((leaf**2).sum() for leaf in head.values()), rel=1e-9
    )
    for role in ("test", "train"):
        assert figures[f"{role}_accuracy"] == right[role] / count[role]


# ---- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "lower"), [("mlp", "global"), ("mlp", "local"), ("cnn", "global")])
def test_derivatives_agree_with_finite_differences_where_activations_are_smooth(model, lower):
    built = HyperRepresentation(**SMALL, model=model, activation="gelu", lower=lower).build()
    assert built.problem.scopes == (lower, "shared")
    assert fb.check_problem(*built, show=False).ok
    report = fb.check_hypergradient(*built, estimators=["cg"], num_directions=1, show=False)
    assert report.ok, str(report)


def test_derivatives_of_a_head_of_two_layers_agree_with_finite_differences():
    report = fb.check_problem(*HyperRepresentation(**SMALL, activation="gelu", head_layers=2).build(), show=False)
    assert report.ok, str(report)


def test_the_hessian_of_the_head_is_exact_with_relu_and_at_least_as_curved_as_the_norm():
    population = Population(*HyperRepresentation(**SMALL, l2=0.3).build(), dtype=torch.float64)
    x, y = near(population)
    batch = population.data.batch(population.data.positions, "train")
    eye = torch.eye(len(y), dtype=torch.float64)
    hessian = torch.stack([population.oracle.hessian_product(x, y, unit, batch) for unit in eye], dim=2)
    step = 1e-5
    differences = [
        (
            population.oracle.lower_grad(x, y + step * unit, batch)
            - population.oracle.lower_grad(x, y - step * unit, batch)
        )
        / (2 * step)
        for unit in eye
    ]
    assert relative(hessian, torch.stack(differences, dim=2)) < 1e-8
    assert float(torch.linalg.eigvalsh(hessian).min()) == pytest.approx(
        0.3, abs=1e-9
    )  # a shift of all biases changes the norm alone


def without_features(built: Built) -> Built:
    problem, features = built.problem, built.problem.features
    inside = lambda function: lambda x, y, batch: function(x, y, {**batch, "features": features(x, batch)})
    statistics = {role: inside(function) for role, function in problem.statistics.items()}
    return Built(
        dataclasses.replace(
            problem, upper=inside(problem.upper), lower=inside(problem.lower), statistics=statistics, features=None
        ),
        built.clients,
    )


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


# ---- who has what ----------------------------------------------------------------------------------------------------


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
            assert all(
                truth[image.tobytes()] == label for image, label in zip(fields["image"], fields["label"], strict=True)
            )
        num_val, num_train = len(client["val"]["label"]), len(client["train"]["label"])
        assert num_val == round(0.3 * (num_val + num_train))
    assert used == Counter(truth.keys())
    assert sum(len(client["test"]["label"]) for client in clients) == round(0.25 * 1797)
    assert np.ptp([len(client["test"]["label"]) for client in clients]) <= 1
    assert np.ptp([len(client["train"]["label"]) + len(client["val"]["label"]) for client in clients]) <= (
        1 if split == "iid" else 2
    )


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


def test_cifar_keeps_its_test_part_and_only_what_is_used_is_decoded(tmp_path, monkeypatch):
    fake_cifar(tmp_path)
    task = HyperRepresentation(data="cifar10", data_dir=str(tmp_path), num_clients=3, split="iid")
    seen = {"train": {}, "test": {}}
    for client in task.build().clients:
        for role, fields in client.items():
            assert fields["image"].dtype == np.float32
            keys = [np.rint(255 * image).astype(np.uint8).tobytes() for image in fields["image"]]
            seen["test" if role == "test" else "train"].update(zip(keys, fields["label"].tolist(), strict=True))
    for part, found in seen.items():
        data = cifar10.cifar10(part, tmp_path)
        assert found == {image.tobytes(): label for image, label in zip(data.images, data.label.tolist(), strict=True)}
    decoded, decode = [], cifar10._decoded
    monkeypatch.setattr(cifar10, "_decoded", lambda *args: (decoded.append(args[1]), decode(*args))[1])
    half = dataclasses.replace(task, share=0.5).build().clients
    assert (
        sum(len(fields["label"]) for client in half for fields in client.values())
        == len(decoded)
        == len({*decoded})
        == 20
    )


def pooled(task: HyperRepresentation, num_channels: int = 1) -> dict[str, np.ndarray]:
    """All images of the training part used, and of the test part: (images, channels, pixels)."""
    clients = task.build().clients
    parts = {"train": ("train", "val"), "test": ("test",)}
    together = {
        part: np.concatenate([client[role]["image"] for client in clients for role in roles])
        for part, roles in parts.items()
    }
    return {part: images.reshape(len(images), num_channels, -1).astype(float) for part, images in together.items()}


@pytest.mark.parametrize(("data", "num_channels"), [("digits", 1), ("mnist", 1), ("cifar10", 3)])
def test_standard_pixels_have_mean_zero_and_deviation_one_over_the_training_images_that_are_used(
    data, num_channels, tmp_path
):
    if data == "mnist":
        fake(tmp_path)
    elif data == "cifar10":
        fake_cifar(tmp_path)
    task = HyperRepresentation(data=data, data_dir=str(tmp_path), num_clients=3, split="iid", share=0.5)
    unit, standard = (pooled(dataclasses.replace(task, pixels=pixels), num_channels) for pixels in ("unit", "standard"))
    mean, deviation = unit["train"].mean((0, 2))[:, None], unit["train"].std((0, 2))[:, None]
    if num_channels == 3:
        assert np.ptp(mean) > 0.05  # channels are told apart
        assert np.ptp(deviation) > 0.05
    for part in ("train", "test"):
        assert np.abs(standard[part] - (unit[part] - mean) / deviation).max() < 1e-5
    assert pooled(task, num_channels)["train"].tobytes() == unit["train"].tobytes()  # the default leaves them alone
    assert 0 <= unit["train"].min() < unit["train"].max() <= 1


def test_a_channel_without_deviation_is_not_divided():
    flat = Images(np.full((2, 4), 0.5, np.float32), np.zeros(2, np.int64))
    train, test = standardised(flat, Images(np.ones((1, 4), np.float32), np.zeros(1, np.int64)), 2)
    assert (train.image.tolist(), test.image.tolist()) == ([[0.0] * 4] * 2, [[0.5] * 4])


@pytest.mark.parametrize(
    ("data", "share", "mean", "deviation"),
    [("mnist", 0.3, [0.1307], [0.3081]), ("cifar10", 0.04, [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])],
    ids=["mnist", "cifar10"],
)
def test_published_means_and_deviations_are_found_again(data, share, mean, deviation):
    """The shift and scale from `unit` to `standard` are recovered from a part of the images.

    CIFAR-10 here has been compressed as JPEG.
    """
    here(data)
    task = HyperRepresentation(data=data, num_clients=3, split="iid", share=share)
    unit, standard = (
        pooled(dataclasses.replace(task, pixels=pixels), len(mean))["test"] for pixels in ("unit", "standard")
    )
    for channel, (middle, width) in enumerate(zip(mean, deviation, strict=True)):
        slope, shift = np.polyfit(unit[:, channel].ravel(), standard[:, channel].ravel(), 1)
        assert -shift / slope == pytest.approx(middle, abs=0.01)
        assert 1 / slope == pytest.approx(width, abs=0.01)


def test_mnist_is_split_as_in_the_papers():
    here("mnist")
    clients = HyperRepresentation(data="mnist", num_clients=100).build().clients
    assert {
        (len(client["train"]["label"]), len(client["val"]["label"]), len(client["test"]["label"])) for client in clients
    } == {(480, 120, 100)}
    assert max(map(known, clients)) <= 4


def test_too_many_clients_are_a_clear_error():
    with pytest.raises(
        ProblemError,
        match="cannot be cut into 2 shards for each of 1000 clients: use fewer shards or clients, or more data",
    ):
        HyperRepresentation(num_clients=1000).build()
    with pytest.raises(ProblemError, match="client 0 has 1 image, expected one for training and one for validation"):
        HyperRepresentation(num_clients=45, split="iid", share=0.05, test_share=0.5).build()


# ---- learning --------------------------------------------------------------------------------------------------------


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
