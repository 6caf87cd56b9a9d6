"""Personalisation: losses and predictions in plain numpy, splits and normalisation of images."""

from __future__ import annotations

import math
import struct
import warnings
from collections import Counter

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.data.sets import idx
from fedbilevel.data.sets.digits import digits
from fedbilevel.data.sets.images import turned
from fedbilevel.errors import DataError, ProblemError, SettingError
from fedbilevel.oracle.population import Population
from fedbilevel.tasks.personal_rivals import standardised, with_prior
from fedbilevel.tasks.personalisation import Personalisation
from support.numeric.yardstick import relative

KINDS = ("mask", "ensemble", "mixture", "output", "none")
SMALL = {"num_clients": 4, "share": 0.05, "width": 0.15}
kinds = pytest.mark.parametrize("kind", KINDS)
models = pytest.mark.parametrize("model", ["linear", "mlp", "cnn"])


def write(folder, stem, pixels, labels):
    for what, array in (("images-idx3", pixels), ("labels-idx1", labels)):
        (folder / f"{stem}-{what}-ubyte").write_bytes(
            struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
        )


# ---- the same in plain numpy -----------------------------------------------------------------------------------------


def gelu(z: np.ndarray) -> np.ndarray:
    return 0.5 * z * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def convolved(images: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Images (n, channels, side, side), then the largest of every two by two."""
    windows = np.lib.stride_tricks.sliding_window_view(images, weight.shape[2:], axis=(2, 3))
    z = gelu(np.einsum("nchwij,kcij->nkhw", windows, weight) + bias[:, None, None])
    half = z.shape[2] // 2
    return z[:, :, : 2 * half, : 2 * half].reshape(*z.shape[:2], half, 2, half, 2).max((3, 5))


def logits(weights: dict[str, np.ndarray], images: np.ndarray) -> np.ndarray:
    z = images
    if "conv1.weight" in weights:
        z = z.reshape(len(z), 1, 8, 8)
        for name in ("conv1", "conv2"):
            z = convolved(z, weights[f"{name}.weight"], weights[f"{name}.bias"])
        z = z.reshape(len(z), -1)
    if "hidden.weight" in weights:
        z = gelu(z @ weights["hidden.weight"].T + weights["hidden.bias"])
    return z @ weights["out.weight"].T + weights["out.bias"]


def probabilities(
    task: Personalisation, lam: np.ndarray, weights: dict[str, np.ndarray], images: np.ndarray
) -> np.ndarray:
    """(samples, classes): what the client predicts."""
    share = np.exp(log_softmax(lam))
    each = lambda: [logits({name: leaf[m] for name, leaf in weights.items()}, images) for m in range(len(lam))]
    if task.personalise == "mask":
        return np.exp(log_softmax(logits(weights, images) * share * (10 if task.mask_scale == "classes" else 1)))
    if task.personalise == "ensemble":
        return np.exp(log_softmax(sum(s * z for s, z in zip(share, each(), strict=True))))
    if task.personalise == "mixture":
        return sum(s * np.exp(log_softmax(z)) for s, z in zip(share, each(), strict=True))
    if task.personalise == "output":
        return np.exp(log_softmax(logits(weights, images) @ (np.eye(10) + lam.reshape(10, 10)).T))
    return np.exp(log_softmax(logits(weights, images)))


def point(population: Population, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """x and y near the start, other for every client and every entry."""
    draw = torch.Generator().manual_seed(seed)
    noise = lambda like: torch.randn(like.shape, generator=draw, dtype=torch.float64)
    y = population.y0 + 0.1 * noise(population.y0)  # first, so that it does not depend on the length of x
    return population.x0 + noise(population.x0), y


def arrays(tree: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: leaf.numpy() for name, leaf in tree.items()}


@models
@pytest.mark.parametrize(
    "settings",
    [
        {"personalise": "mask"},
        {"personalise": "mask", "mask_scale": "paper"},
        *({"personalise": kind} for kind in KINDS[1:]),
    ],
    ids=["mask", "paper's mask", *KINDS[1:]],
)
def test_losses_and_figures_are_those_of_plain_numpy(model, settings):
    task = Personalisation(**SMALL, **settings, model=model, l2=0.03, l2_upper=0.2)
    built = task.build()
    population = Population(*built, dtype=torch.float64)
    x, y = point(population)
    lam, weights = x.numpy(), arrays(population.layout_y.unravel(y))
    lower, upper, right, count = [], [], {"test": [], "stop": []}, {"test": [], "stop": []}
    for i, client in enumerate(built.clients):
        train = client["train"]
        p = probabilities(task, lam[i], weights, train["image"].astype(float))[
            np.arange(len(train["label"])), train["label"]
        ]
        inflation = (
            np.log(np.exp(lam[i]).sum()) if task.personalise == "mixture" else 0.0
        )  # the lower level takes exp(lambda) as it is
        lower.append(-np.log(p).mean() - inflation + 0.03 / 2 * sum((leaf**2).sum() for leaf in weights.values()))
        upper.append(-np.log(p).mean() + 0.2 / 2 * (lam[i] ** 2).sum())
        for role in ("test", "stop"):
            answers = probabilities(task, lam[i], weights, client[role]["image"].astype(float)).argmax(1)
            right[role].append(int((answers == client[role]["label"]).sum()))
            count[role].append(len(answers))
    everyone = population.data.positions
    for name, loss, role, expected in (
        ("lower_loss", built.problem.lower, "train", lower),
        ("upper_loss", built.problem.upper, "val", upper),
    ):
        found = population.oracle.evaluate(loss, x, y, population.data.batch(everyone, role))
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)
        assert population.measure(x, y)[name] == pytest.approx(np.mean(expected), rel=1e-9)
    figures = population.measure(x, y)
    for role in ("test", "stop"):
        assert figures[f"{role}_accuracy"] == pytest.approx(sum(right[role]) / sum(count[role]), rel=1e-12)
    each = np.array(right["test"]) / np.array(count["test"])
    assert figures["test_accuracy_bottom_decile"] == pytest.approx(np.quantile(each, 0.1), rel=1e-12)
    assert figures["test_accuracy_mean_client"] == pytest.approx(each.mean(), rel=1e-12)


def test_figures_over_clients_of_unequal_sizes_are_not_the_same_number():
    """Weighted by samples, unweighted, and the decile: three different numbers here."""
    problem = Personalisation(**SMALL).build().problem
    right, samples = torch.tensor([1.0, 0.0, 3.0, 30.0, 2.0]), torch.tensor([1.0, 2.0, 4.0, 40.0, 8.0])
    accuracy = right / samples
    figures = {
        **problem.metrics(
            {
                "test_right": float(right.sum()),
                "test_samples": float(samples.sum()),
                "stop_right": 1.0,
                "stop_samples": 4.0,
            }
        ),
        **problem.across({"test_right": right, "test_samples": samples}),
    }
    expected = {
        "test_accuracy": 36 / 55,
        "stop_accuracy": 0.25,
        "test_accuracy_bottom_decile": float(np.quantile(accuracy.numpy(), 0.1)),
        "test_accuracy_mean_client": (1 + 0 + 0.75 + 0.75 + 0.25) / 5,
    }
    assert figures == pytest.approx(expected, rel=1e-6)
    assert len({round(value, 3) for value in figures.values()}) == 4


# ---- derivatives -----------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_derivatives_agree_with_finite_differences(kind, model):
    """Max pooling is included: near a random point a step of 1e-5 changes no maximum."""
    report = fb.check_problem(
        *Personalisation(num_clients=3, share=0.01, width=0.15, personalise=kind, model=model).build(), show=False
    )
    wrong = [check.name for check in report.checks if not check.ok]
    assert wrong == (["levels"] if kind == "none" else []), str(report)  # without masks x is not used


@pytest.mark.parametrize(("kind", "lower"), [("mask", "global"), ("mask", "local"), ("ensemble", "global")])
def test_the_hypergradient_is_exact_where_the_lower_level_is_convex(tmp_path, kind, lower):
    """A linear model on images of four by four pixels in three classes."""
    rng = np.random.default_rng(0)
    labels = np.arange(30) % 3
    write(tmp_path, "train", 60 * labels[:20, None, None] + rng.integers(0, 120, (20, 4, 4)), labels[:20])
    write(tmp_path, "t10k", 60 * labels[20:, None, None] + rng.integers(0, 120, (10, 4, 4)), labels[20:])
    settings = {
        "data": "mnist",
        "data_dir": str(tmp_path),
        "num_clients": 3,
        "model": "linear",
        "num_networks": 2,
        "l2": 0.3,
    }
    built = Personalisation(**settings, personalise=kind, lower=lower).build()
    x = torch.randn(3, 3 if kind == "mask" else 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    report = fb.check_hypergradient(*built, x=x, estimators=["cg"], show=False)
    assert report.ok, str(report)


@pytest.mark.parametrize("strategy", ["vmap", "loop"])
def test_minus_the_derivative_by_the_log_weights_of_a_mixture_is_the_mean_responsibility(strategy):
    task = Personalisation(**SMALL, personalise="mixture")
    built = task.build()
    population = Population(*built, dtype=torch.float64, strategy=strategy)
    x, y = point(population)
    found = -population.oracle.lower_grad_x(x, y, population.data.batch(population.data.positions, "train"))
    weights = arrays(population.layout_y.unravel(y))
    for i, client in enumerate(built.clients):
        images, labels = client["train"]["image"].astype(float), client["train"]["label"]
        likelihood = np.stack(
            [
                np.exp(log_softmax(logits({name: leaf[m] for name, leaf in weights.items()}, images)))[
                    np.arange(len(labels)), labels
                ]
                for m in range(3)
            ]
        )
        joint = np.exp(x[i].numpy())[:, None] * likelihood
        np.testing.assert_allclose(found[i].numpy(), (joint / joint.sum(0)).mean(1), rtol=1e-9)
    np.testing.assert_allclose(found.sum(1).numpy(), 1, rtol=1e-12)


def test_all_clients_at_once_and_one_by_one_agree_for_convolutions():
    built = Personalisation(**SMALL, model="cnn").build()
    pairs = []
    for strategy in ("vmap", "loop"):
        population = Population(*built, dtype=torch.float64, strategy=strategy)
        x, y = point(population)
        own = y + 0.1 * torch.randn(
            4, len(y), generator=torch.Generator().manual_seed(3), dtype=torch.float64
        )  # as after local steps
        pairs.append(
            torch.cat(
                population.oracle.second_order(
                    x, own, own.flip(0), population.data.batch(population.data.positions, "train")
                ),
                dim=1,
            )
        )
    assert relative(pairs[0], pairs[1]) < 1e-10


# ---- what lambda does ------------------------------------------------------------------------------------------------


def losses(**settings) -> torch.Tensor:
    built = Personalisation(**SMALL, **settings).build()
    population = Population(*built, dtype=torch.float64)
    y = point(population)[1]
    return population.oracle.evaluate(
        built.problem.lower, population.x0, y, population.data.batch(population.data.positions, "train")
    )


def test_at_the_start_the_scaled_mask_masks_nothing_and_the_papers_shrinks_the_logits():
    plain, scaled, shrunk = (
        losses(personalise="none"),
        losses(personalise="mask"),
        losses(personalise="mask", mask_scale="paper"),
    )
    assert relative(scaled, plain) < 1e-12
    assert relative(shrunk, plain) > 0.01


@pytest.mark.parametrize(
    ("kind", "length", "start"),
    [("mask", 10, 0.0), ("ensemble", 3, 0.0), ("mixture", 3, math.log(1 / 3)), ("output", 100, 0.0), ("none", 1, 0.0)],
)
def test_every_client_starts_with_the_same_numbers_of_its_own(kind, length, start):
    population = Population(*Personalisation(**SMALL, personalise=kind).build(), dtype=torch.float64)
    np.testing.assert_allclose(population.x0.numpy(), np.full((4, length), start), rtol=1e-7)
    assert population.problem.scopes == fb.Scopes(lower="global", upper="private")


def test_without_personalisation_lambda_changes_nothing_but_the_regulariser():
    built = Personalisation(**SMALL, personalise="none", l2_upper=0.5).build()
    population = Population(*built, dtype=torch.float64)
    y, batch = population.y0, population.data.batch(population.data.positions, "val")
    one, two = (
        population.oracle.evaluate(built.problem.upper, torch.full((4, 1), value, dtype=torch.float64), y, batch)
        for value in (0.0, 2.0)
    )
    np.testing.assert_allclose((two - one).numpy(), 0.5 / 2 * 4, rtol=1e-12)
    assert Personalisation(**SMALL, personalise="none", lower="local").build().problem.scopes == fb.Scopes(
        lower="local", upper="private"
    )


# ---- initial weights -------------------------------------------------------------------------------------------------


def test_initial_weights_come_from_the_seed_and_leave_the_common_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = Personalisation(personalise="ensemble", share=0.4).build().problem.y0
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = (
        Personalisation(personalise="ensemble", share=0.4, data_seed=seed).build().problem.y0 for seed in (0, 1)
    )
    for name, leaf in first.items():
        assert torch.equal(leaf, again[name])
        assert not torch.equal(leaf, other[name])
        assert not torch.equal(leaf[0], leaf[1])
        assert not torch.equal(leaf[1], leaf[2])


@models
def test_initial_weights_are_uniform_with_a_bound_by_the_inputs_of_a_unit(model):
    y = Personalisation(model=model, num_clients=5).build().problem.y0
    for name in {name.split(".")[0] for name in y}:
        weight = y[f"{name}.weight"]
        bound = weight[0].numel() ** -0.5
        assert y[f"{name}.bias"].shape == weight.shape[:1]
        for leaf in (weight, y[f"{name}.bias"]):
            assert float(leaf.abs().max()) <= bound
            assert float(leaf.abs().max()) > 0.7 * bound  # a hundred entries or more, or ten of a bias
            assert float(leaf.min()) < 0 < float(leaf.max())


# ---- data ------------------------------------------------------------------------------------------------------------


def raw(image: np.ndarray) -> bytes:
    """A digit as it is in the set: sixteenths."""
    return np.rint(16 * image).astype(np.int8).tobytes()


def original(task: Personalisation) -> list[dict[str, np.ndarray]]:
    """The images of every client before normalisation, by role."""
    clusters, clients = task.normalisation(), task.build().clients
    return [
        {
            role: fields["image"].astype(float) * clusters[i % len(clusters)][1] + clusters[i % len(clusters)][0]
            for role, fields in client.items()
        }
        for i, client in enumerate(clients)
    ]


@pytest.mark.parametrize(
    "settings", [{}, {"num_clients": 7, "num_clusters": 2}, {"num_clients": 1}, {"share": 0.3, "least": 3}], ids=str
)
def test_every_image_is_used_once_with_its_label_and_the_normalisation_of_its_cluster(settings):
    task = Personalisation(**settings)
    images, labels = digits()
    truth = {raw(image): int(label) for image, label in zip(images, labels, strict=True)}
    used = Counter()
    for client, before in zip(task.build().clients, original(task), strict=True):
        assert list(client) == ["train", "stop", "test", "val"]
        for role in ("train", "stop", "test"):
            keys = [raw(image) for image in before[role]]
            assert [truth.get(key) for key in keys] == client[role]["label"].tolist()
            assert np.abs(16 * before[role] - np.rint(16 * before[role])).max() < 1e-3
            used.update(keys)
        assert all(np.array_equal(client["val"][name], client["train"][name]) for name in ("image", "label"))
    assert set(used.values()) == {1}
    assert len(used) == round(task.share * 1797)


@pytest.mark.parametrize("least", [3, 5, 8])
def test_a_fifth_is_for_testing_and_a_quarter_of_the_rest_for_stopping(least):
    clients = Personalisation(least=least).build().clients
    sizes = np.array([[len(client[role]["label"]) for role in ("train", "stop", "test")] for client in clients])
    assert sizes.min() >= 1
    assert sizes.sum(1).min() >= least
    assert np.abs(sizes[:, 2] - 0.2 * sizes.sum(1)).max() <= 0.5 or least < 5
    assert np.abs(sizes[:, 1] - 0.25 * sizes[:, :2].sum(1)).max() <= 0.5 or least < 5
    assert sizes.sum(1).max() > 3 * sizes.sum(1).min()  # clients are unequal


def test_labels_are_uneven_by_alpha():
    spread = {}
    for alpha in (0.1, 10.0):
        clients = Personalisation(num_clients=10, alpha=alpha).build().clients
        spread[alpha] = np.mean(
            [
                np.bincount(client["train"]["label"], minlength=10).max() / len(client["train"]["label"])
                for client in clients
            ]
        )
    assert spread[0.1] > 0.5 > 0.3 > spread[10.0]


def test_clusters_are_drawn_from_the_unit_interval_and_divide_the_clients_equally():
    drawn = [
        entry for seed in range(200) for entry in Personalisation(data_seed=seed, least_spread=0.25).normalisation()
    ]
    means, spreads = np.array(drawn).T
    assert len(drawn) == 600
    assert 0 <= means.min() < 0.02 < 0.98 < means.max() <= 1
    assert means.mean() == pytest.approx(0.5, abs=0.05)
    assert spreads.min() == 0.25
    assert (spreads == 0.25).mean() == pytest.approx(
        0.25, abs=0.06
    )  # the smaller ones are raised, the others stay as drawn
    assert spreads[spreads > 0.25].mean() == pytest.approx(0.625, abs=0.03)
    task = Personalisation(num_clients=8, num_clusters=3)
    blank = [client["train"]["image"].min() for client in task.build().clients]  # a black pixel is -mean / spread
    assert len({round(float(value), 4) for value in blank}) == 3
    np.testing.assert_allclose(blank, [-mean / spread for mean, spread in (task.normalisation() * 3)[:8]], rtol=1e-5)


def unshifted(**settings) -> list[dict[str, dict[str, np.ndarray]]]:
    """Clients of one cluster, which see pixels and labels as they are."""
    return Personalisation(**SMALL, shift="labels", **settings, num_clusters=1).build().clients


def test_clusters_permute_labels_in_every_role_and_leave_images_alone():
    task = Personalisation(**SMALL, shift="labels")
    meanings = task.meanings(10)
    assert meanings[0].tolist() == list(range(10))
    assert all(sorted(one.tolist()) == list(range(10)) for one in meanings)
    assert len({tuple(one.tolist()) for one in meanings}) == 3
    for i, (client, plain) in enumerate(zip(task.build().clients, unshifted(), strict=True)):
        for role, fields in client.items():
            assert np.array_equal(fields["image"], plain[role]["image"])
            assert np.array_equal(fields["label"], meanings[i % 3][plain[role]["label"]])
    assert not np.array_equal(task.build().clients[1]["train"]["label"], unshifted()[1]["train"]["label"])


def test_clusters_turn_images_in_every_role_and_leave_labels_alone():
    task = Personalisation(num_clients=9, share=0.1, shift="rotations", num_clusters=8)
    plain = Personalisation(num_clients=9, share=0.1, shift="labels", num_clusters=1).build().clients
    seen = set()
    for i, (client, before) in enumerate(zip(task.build().clients, plain, strict=True)):
        for role, fields in client.items():
            assert np.array_equal(fields["label"], before[role]["label"])
            for image, old in zip(fields["image"], before[role]["image"], strict=True):
                turned = np.rot90(old.reshape(8, 8), i % 4)
                assert np.array_equal(image.reshape(8, 8), turned if i % 8 < 4 else turned[:, ::-1])
        corner = np.zeros(64)
        corner[1] = 1  # one pixel beside a corner has eight images
        seen.add(turned_corner(corner, i % 8))
    assert len(seen) == 8
    with pytest.raises(ProblemError, match="rotation 8 of images with 64 pixels does not exist"):
        Personalisation(num_clients=9, share=0.1, shift="rotations", num_clusters=9).build()


def turned_corner(image: np.ndarray, number: int) -> int:
    return int(turned(image[None], number)[0].argmax())


@pytest.mark.parametrize("val_share", [0.3, 0.6])
def test_validation_samples_are_taken_from_the_training_samples_alone(val_share):
    settings = {"num_clients": 5, "shift": "labels"}
    with_val, without = (Personalisation(**settings, val_share=share).build().clients for share in (val_share, 0.0))
    for one, two in zip(with_val, without, strict=True):
        for role in ("stop", "test"):
            assert np.array_equal(one[role]["image"], two[role]["image"])
        parts = [row.tobytes() for role in ("train", "val") for row in one[role]["image"]]
        assert sorted(parts) == sorted(row.tobytes() for row in two["train"]["image"])
        num = len(two["train"]["label"])
        assert len(one["val"]["label"]) == min(max(round(val_share * num), 1), num - 1)


# ---- own heads and rivals --------------------------------------------------------------------------------------------


def test_own_heads_are_the_last_layer_of_the_same_network():
    settings = {**SMALL, "model": "cnn", "l2": 0.03}
    built, plain = (Personalisation(**settings, personalise=kind).build() for kind in ("head", "none"))
    assert built.problem.scopes == fb.Scopes(lower="local", upper="shared")
    assert set(built.problem.y0) == {"out.weight", "out.bias"}
    assert {**built.problem.x0, **built.problem.y0}.keys() == plain.problem.y0.keys()
    population = Population(*built, dtype=torch.float64)
    batch = population.data.batch(population.data.positions, "train")
    found = population.oracle.evaluate(built.problem.lower, population.x0, population.y0, batch)
    weights = arrays(plain.problem.y0)
    for i, client in enumerate(built.clients):
        z = log_softmax(logits(weights, client["train"]["image"].astype(float)))
        fit = -z[np.arange(len(z)), client["train"]["label"]].mean()
        penalty = 0.03 / 2 * sum((weights[f"out.{part}"] ** 2).sum() for part in ("weight", "bias"))
        assert float(found[i]) == pytest.approx(fit + penalty, rel=1e-6)
    report = fb.check_problem(
        *Personalisation(num_clients=3, share=0.01, width=0.15, personalise="head").build(), show=False
    )
    assert report.ok, str(report)
    with pytest.raises(ProblemError, match="a linear model has no hidden layers to share"):
        Personalisation(**SMALL, personalise="head", model="linear").build()


@pytest.mark.parametrize("val_share", [0.0, 0.4])
def test_every_rival_runs_and_measures_the_figures_of_the_task_on_its_test_samples(val_share):
    task = Personalisation(num_clients=4, share=0.1, width=0.15, shift="labels", val_share=val_share)
    mine, found = task.build(), task.rivals()
    assert {"fedavg", "fedadam", "fine_tuned", "ditto", "fedrep", "prior", "standardised", "local"} <= set(found)
    tested = [client["test"]["label"].tolist() for client in mine.clients]
    for name, rival in found.items():
        label, way = next(iter(rival.ways.items()))
        ways = [way, *([rival.refit(label)] if val_share else [])]
        assert (rival.refit is None) == (val_share == 0)
        for one in ways:
            assert [client["test"]["label"].tolist() for client in one.clients] == tested, name
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a few samples of one label
                result = fb.solve(
                    one.problem, one.clients, one.algorithm, num_iterations=1, residuals=False, **one.settings
                )
            assert set(task.headline) <= set(result.final), name
        if val_share:
            assert [len(client["train"]["label"]) for client in ways[1].clients] == [
                len(client["train"]["label"]) + len(client["val"]["label"]) for client in mine.clients
            ]


def test_a_linear_model_has_no_rival_with_own_heads():
    assert "fedrep" not in Personalisation(num_clients=3, share=0.05, model="linear").rivals()


def test_the_rivals_prior_and_standardisation_are_those_of_the_client():
    clients = Personalisation(num_clients=4, share=0.1).build().clients
    for one, own in zip(standardised(clients), clients, strict=True):
        assert float(one["train"]["image"].mean()) == pytest.approx(0, abs=1e-5)
        assert float(one["train"]["image"].std()) == pytest.approx(1, abs=1e-5)
        pixels = own["train"]["image"].astype(float)
        np.testing.assert_allclose(
            one["test"]["image"], (own["test"]["image"] - pixels.mean()) / pixels.std(), atol=1e-4
        )
    for one in with_prior(clients, 10):
        counts = np.array([(one["train"]["label"] == k).sum() for k in range(10)])
        for role in ("train", "test"):
            expected = np.log((counts + 1) / (counts.sum() + 10))
            np.testing.assert_allclose(one[role]["prior"], np.tile(expected, (len(one[role]["label"]), 1)), rtol=1e-5)
    [way] = list(Personalisation(num_clients=4, share=0.1, model="linear").rivals()["prior"].ways.values())[:1]
    population = Population(way.problem, way.clients, dtype=torch.float64)
    y, weights = population.y0, arrays(population.layout_y.unravel(population.y0))
    found = population.oracle.evaluate(
        way.problem.upper, population.x0, y, population.data.batch(population.data.positions, "val")
    )
    for i, client in enumerate(way.clients):
        z = log_softmax(logits(weights, client["val"]["image"].astype(float)) + client["val"]["prior"])
        assert float(found[i]) == pytest.approx(-z[np.arange(len(z)), client["val"]["label"]].mean(), rel=1e-6)


def test_too_many_clients_and_values_out_of_range_are_clear_errors():
    with pytest.raises(ProblemError, match="1797 samples cannot give 400 clients at least 5 each"):
        Personalisation(num_clients=400).build()
    with pytest.raises(SettingError, match="least is 2"):
        Personalisation(least=2)
    with pytest.raises(SettingError, match="personalise is 'everything'"):
        Personalisation(personalise="everything")


# ---- images from files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "stems"), [("emnist", ("emnist-letters-train", "emnist-letters-test")), ("fashion", ("train", "t10k"))]
)
def test_files_are_joined_scaled_and_turned_and_the_network_is_that_of_the_paper(tmp_path, data, stems):
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (40, 28, 28)), 1 + np.arange(40) % 4
    write(tmp_path, stems[0], pixels[:30], labels[:30])
    write(tmp_path, stems[1], pixels[30:], labels[30:])
    task = Personalisation(data=data, data_dir=str(tmp_path), split="letters", num_clients=3, model="cnn")
    built = task.build()
    upright = pixels.swapaxes(1, 2) if data == "emnist" else pixels
    truth = {image.astype(np.uint8).tobytes(): label - 1 for image, label in zip(upright, labels, strict=True)}
    seen = {}
    for client, before in zip(built.clients, original(task), strict=True):
        for role in ("train", "stop", "test"):
            keys = [np.rint(255 * image).astype(np.uint8).tobytes() for image in before[role]]
            seen.update(zip(keys, client[role]["label"].tolist(), strict=True))
    assert seen == truth
    assert {name: tuple(leaf.shape) for name, leaf in built.problem.y0.items() if name.endswith("weight")} == {
        "conv1.weight": (32, 1, 5, 5),
        "conv2.weight": (64, 32, 5, 5),
        "hidden.weight": (2048, 1024),
        "out.weight": (4, 2048),
    }
    narrow = Personalisation(
        data=data, data_dir=str(tmp_path), split="letters", num_clients=3, model="cnn", width=0.0625
    )
    population = Population(*narrow.build())
    assert np.isfinite(population.measure(population.x0, population.y0)["upper_loss"])


def test_mnist_is_read_and_a_share_of_it_used():
    try:
        idx.folder_of("mnist")
    except DataError:
        pytest.skip("the files of MNIST are not here: name their folder with FEDBILEVEL_DATA")
    built = Personalisation(data="mnist", share=0.01, num_clients=20).build()
    assert sum(len(client[role]["label"]) for client in built.clients for role in ("train", "stop", "test")) == 700
    assert built.problem.y0["out.bias"].shape == (10,)


# ---- learning --------------------------------------------------------------------------------------------------------


def test_fedavg_with_suggested_settings_learns_and_beats_training_alone():
    def accuracy(lower: str) -> float:
        built = Personalisation(personalise="none", lower=lower).build()
        return fb.solve(
            *built,
            FedAvg(**Personalisation.suggestions("fedavg")),
            residuals=False,
            num_iterations=20,
            measure_every=20,
        ).rows[-1]["test_accuracy"]

    together, alone = accuracy("global"), accuracy("local")
    assert together > 0.85
    assert alone < together - 0.1
