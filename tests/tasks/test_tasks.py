"""Tasks: closed forms against finite differences, clean splits, and figures as ratios of sums."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from fedbilevel.algorithms.fbo_aggitd import FBOAggITD
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.data.sets.digits import digits
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import ProblemError, SettingError
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.task import Built
from support.numeric.yardstick import drive, relative

SCOPES = [
    {},
    {"client_weights": "by_samples"},
    {"upper": "private"},
    {"upper": "private", "client_weights": "by_samples"},
    {"lower": "local"},
    {"lower": "local", "client_weights": "by_samples"},
    {"lower": "local", "upper": "private"},
]


def simulate(built: Built, **options) -> Simulation:
    return Simulation(FedAvg(), built.problem, built.clients, **{"dtype": torch.float64, **options})


# ---- quadratic -------------------------------------------------------------------------------------------------------


def point(task: Quadratic) -> np.ndarray:
    shape = (task.num_clients, task.dim_upper) if task.upper == "private" else (task.dim_upper,)
    return np.random.default_rng(1).standard_normal(shape)


@pytest.mark.parametrize("scopes", SCOPES, ids=str)
def test_the_closed_form_lower_solution_is_stationary_for_the_losses_themselves(scopes):
    task = Quadratic(**scopes)
    closed, x = task.closed_form(), point(task)
    host = simulate(task.build()).host
    gradients = host.oracle.lower_grad(
        torch.tensor(x), torch.tensor(closed.lower_solution(x)), host.data.batch(torch.arange(5), "train")
    )
    if task.lower == "global":
        gradients = torch.tensor(closed.share) @ gradients
    assert float(gradients.abs().max()) < 1e-12


@pytest.mark.parametrize("scopes", SCOPES, ids=str)
def test_the_closed_form_hypergradient_is_the_derivative_of_the_upper_loss_along_the_lower_solution(scopes):
    task = Quadratic(**scopes)
    closed, x, fed = task.closed_form(), point(task), simulate(task.build())

    def phi(x: np.ndarray) -> float:
        return fed.measure(torch.tensor(x), torch.tensor(closed.lower_solution(x)))["upper_loss"]

    numeric, step = np.zeros(x.size), 1e-4  # Phi is quadratic: central differences are exact but for rounding
    for i, unit in enumerate(np.eye(x.size)):
        shift = step * unit.reshape(x.shape)
        numeric[i] = (phi(x + shift) - phi(x - shift)) / (2 * step)
    expected = closed.hypergradient(x) * (
        closed.share[:, None] if task.upper == "private" else 1
    )  # blocks come without their weight
    np.testing.assert_allclose(numeric.reshape(x.shape), expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("scopes", SCOPES, ids=str)
def test_the_closed_form_solution_has_no_hypergradient_and_is_lower_than_its_neighbours(scopes):
    task = Quadratic(**scopes)
    closed, fed = task.closed_form(), simulate(task.build())
    best = closed.solution()
    phi = lambda x: fed.measure(torch.tensor(x), torch.tensor(closed.lower_solution(x)))["upper_loss"]
    assert np.abs(closed.hypergradient(best)).max() < 1e-12
    rng = np.random.default_rng(2)
    assert all(phi(best + 0.1 * rng.standard_normal(best.shape)) > phi(best) for _ in range(5))


def test_the_system_solution_solves_the_averaged_system():
    closed = Quadratic().closed_form()
    x = point(Quadratic())
    fy = np.einsum("nij,j->ni", closed.stacked["D"], closed.lower_solution(x)) - closed.stacked["Dt"]
    np.testing.assert_allclose(closed.stacked["A"].mean(0) @ closed.system_solution(x), fy.mean(0), rtol=0, atol=1e-12)


def test_without_heterogeneity_clients_are_identical_but_for_their_samples():
    stacked = Quadratic(heterogeneity=0.0).closed_form().stacked
    for name in "ABcDtRr":
        np.testing.assert_allclose(
            stacked[name], np.broadcast_to(stacked[name][0], stacked[name].shape), rtol=0, atol=1e-13
        )
    for client in Quadratic(heterogeneity=0.0, noise=0.0).clients():
        assert all(np.ptp(value, axis=0).max() < 1e-13 for role in client.values() for value in role.values())


def test_with_heterogeneity_the_mean_of_local_hypergradients_is_another_vector():
    """Why an algorithm that inverts each client's own Hessian fails here."""
    closed, x = Quadratic().closed_form(), point(Quadratic())
    assert relative(closed._replace(local=True).hypergradient(x), closed.hypergradient(x)) > 0.1
    same = Quadratic(heterogeneity=0.0, noise=0.0).closed_form()
    assert relative(same._replace(local=True).hypergradient(x), same.hypergradient(x)) < 1e-12


def test_clients_have_unequal_numbers_of_samples_that_differ():
    clients = Quadratic(num_clients=3, num_samples=2).clients()
    assert [len(client["train"]["A"]) for client in clients] == [2, 3, 4]
    assert np.ptp(clients[0]["train"]["A"], axis=0).max() > 0.1


def test_the_bend_changes_the_curvature_with_y():
    built = Quadratic(bend=0.5).build()
    host, v = simulate(built).host, torch.ones(6, dtype=torch.float64)
    batch, x = host.data.batch(torch.arange(5), "train"), torch.zeros(4, dtype=torch.float64)
    flat, bent = (
        host.oracle.hessian_product(x, torch.full((6,), y, dtype=torch.float64), v, batch) for y in (0.0, 2.0)
    )
    expected = 0.5 * (1 - np.tanh(2.0) ** 2 - 1)
    np.testing.assert_allclose(bent - flat, np.full((5, 6), expected), rtol=0, atol=1e-12)


def test_the_data_depend_on_the_seed_alone():
    one, same, other = (Quadratic(data_seed=seed).clients()[2]["train"]["A"] for seed in (3, 3, 4))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_measured_figures_are_those_of_the_closed_form():
    task = Quadratic(client_weights="by_samples")
    closed, x, fed = task.closed_form(), point(task), simulate(task.build())
    figures = fed.measure(torch.tensor(x), torch.tensor(closed.lower_solution(x)))
    assert figures["hypergradient_norm"] == pytest.approx(np.linalg.norm(closed.hypergradient(x)), rel=1e-12)
    assert figures["distance"] == pytest.approx(np.linalg.norm(x - closed.solution()), rel=1e-12)
    assert figures["exact_upper_loss"] == pytest.approx(figures["upper_loss"], rel=1e-12)


@pytest.mark.parametrize("lower", ["global", "local"])
def test_the_hypergradient_is_the_gradient_of_the_objective(lower):
    task = Quadratic(cross=0.7, lower=lower)
    closed, x = task.closed_form(), point(task)
    units = 1e-4 * np.eye(len(x))
    found = [(closed.objective(x + unit) - closed.objective(x - unit)) / 2e-4 for unit in units]
    np.testing.assert_allclose(found, closed.hypergradient(x), rtol=1e-7)


# ---- data cleaning ---------------------------------------------------------------------------------------------------

CLEANING = {
    "standard": DataCleaning(),
    "twelve clients": DataCleaning(num_clients=12, num_clean=7),
    "one client": DataCleaning(num_clients=1, noise=0.3),
}
cleanings = pytest.mark.parametrize("task", CLEANING.values(), ids=list(CLEANING))


def true_labels() -> dict[bytes, int]:
    images, labels = digits()
    return {image.tobytes(): int(label) for image, label in zip(images, labels, strict=True)}


@cleanings
def test_every_image_is_used_exactly_once(task):
    used = Counter(
        image.tobytes() for client in task.build().clients for role in client.values() for image in role["image"]
    )
    assert set(used.values()) == {1}
    assert set(used) == set(true_labels())


@cleanings
def test_clean_samples_are_clean_and_of_the_clients_own_class(task):
    truth = true_labels()
    for i, client in enumerate(task.build().clients):
        assert len(client["val"]["label"]) == task.num_clean
        assert set(client["val"]["label"].tolist()) == {i % 10}
        for role in ("val", "test"):
            assert all(
                truth[image.tobytes()] == label
                for image, label in zip(client[role]["image"], client[role]["label"], strict=True)
            )


@cleanings
def test_the_share_of_wrong_labels_is_as_asked_and_the_mark_tells_which(task):
    truth, total, wrong = true_labels(), 0, 0
    for client in task.build().clients:
        train = client["train"]
        actual = np.array([truth[image.tobytes()] for image in train["image"]]) != train["label"]
        assert np.array_equal(actual, train["wrong"])
        assert 0 <= train["label"].min() <= train["label"].max() <= 9
        total, wrong = total + len(actual), wrong + int(actual.sum())
    assert wrong == round(task.noise * total)


def test_at_full_noise_every_training_label_is_wrong():
    assert all(client["train"]["wrong"].all() for client in DataCleaning(noise=1.0).build().clients)
    assert not any(client["train"]["wrong"].any() for client in DataCleaning(noise=0.0).build().clients)


def test_more_clean_samples_than_there_are_is_a_clear_error():
    with pytest.raises(ProblemError, match="samples, 500 were requested: request fewer"):
        DataCleaning(num_clean=500).build()
    with pytest.raises(SettingError, match=r"noise is 1\.5"):
        DataCleaning(noise=1.5)


def tiny_cleaning() -> Built:
    """Three clients with 4, 6 and 11 training samples and 3, 5, 9 test samples."""
    built = DataCleaning(num_clients=3).build()
    keep = {"train": (4, 6, 11), "val": (2, 2, 2), "test": (3, 5, 9)}
    return Built(
        built.problem,
        [
            {role: {name: v[: keep[role][i]] for name, v in fields.items()} for role, fields in c.items()}
            for i, c in enumerate(built.clients)
        ],
    )


def test_figures_are_ratios_of_sums_over_clients():
    built = tiny_cleaning()
    fed = simulate(built)
    rng = np.random.default_rng(0)
    logits = [rng.standard_normal(n) for n in (4, 6, 11)]
    x = torch.zeros(3, 11, dtype=torch.float64)
    for row, own in zip(x, logits, strict=True):
        row[: len(own)] = torch.tensor(own)
    weight, bias = rng.standard_normal((64, 10)), rng.standard_normal(10)
    figures = fed.measure(x, torch.tensor(np.concatenate([weight.ravel(), bias])))

    counts = [  # per client: hits, false alarms, misses, right answers
        (
            int(((own < 0) & client["train"]["wrong"]).sum()),
            int(((own < 0) & ~client["train"]["wrong"]).sum()),
            int(((own >= 0) & client["train"]["wrong"]).sum()),
            int(((client["test"]["image"].astype(float) @ weight + bias).argmax(1) == client["test"]["label"]).sum()),
        )
        for own, client in zip(logits, built.clients, strict=True)
    ]
    hits, alarms, misses, right = np.array(counts).sum(0)
    assert min(hits, alarms, misses) > 0
    precision, recall = hits / (hits + alarms), hits / (hits + misses)
    assert figures["precision"] == pytest.approx(precision)
    assert figures["recall"] == pytest.approx(recall)
    assert figures["f1"] == pytest.approx(2 * precision * recall / (precision + recall))
    assert figures["test_accuracy"] == pytest.approx(right / 17)
    assert recall != pytest.approx(
        np.mean([hit / (hit + miss) for hit, _, miss, _ in counts if hit + miss])
    )  # a mean of ratios is another number


def test_without_a_single_flag_precision_recall_and_f1_are_zero():
    fed = simulate(tiny_cleaning())
    figures = fed.measure(torch.ones(3, 11, dtype=torch.float64), fed.host.y0)
    assert [figures[name] for name in ("precision", "recall", "f1")] == [0.0, 0.0, 0.0]


def test_the_lower_loss_is_the_weighted_mean_over_samples_plus_the_norm():
    built = tiny_cleaning()
    fed = simulate(built)
    rng = np.random.default_rng(4)
    x, weight, bias = torch.tensor(rng.standard_normal((3, 11))), rng.standard_normal((64, 10)), rng.standard_normal(10)
    losses = {"train": [], "val": []}
    for row, client in zip(x.numpy(), built.clients, strict=True):
        for role, collected in losses.items():
            scores = client[role]["image"].astype(float) @ weight + bias
            entropy = np.log(np.exp(scores).sum(1)) - scores[np.arange(len(scores)), client[role]["label"]]
            collected.append(np.mean(entropy / (1 + np.exp(-row[: len(entropy)])) if role == "train" else entropy))
    figures = fed.measure(x, torch.tensor(np.concatenate([weight.ravel(), bias])))
    assert figures["lower_loss"] == pytest.approx(
        np.mean(losses["train"]) + 0.005 * ((weight**2).sum() + (bias**2).sum()), rel=1e-12
    )
    assert figures["upper_loss"] == pytest.approx(np.mean(losses["val"]), rel=1e-12)


def test_bilevel_cleaning_finds_the_wrong_labels_and_beats_fedavg():
    built = DataCleaning(noise=0.4).build()
    bilevel = FBOAggITD(lr_upper=500, lr_lower=1, lr_system=1, num_local_steps=5, num_lower_rounds=5)
    fed, state = drive(bilevel, built, 30, dtype=torch.float32)
    cleaned = fed.measure(*state)
    fed, state = drive(FedAvg(lr_lower=1, num_local_steps=5), built, 150, dtype=torch.float32)
    plain = fed.measure(*state)
    assert cleaned["f1"] > 0.9
    assert min(cleaned["precision"], cleaned["recall"]) > 0.9
    assert cleaned["test_accuracy"] > plain["test_accuracy"] + 0.01
