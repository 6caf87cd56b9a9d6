"""Imbalance: the adjusted loss against plain numpy, and the long tail against its formula.

Also the gain from learning the loss.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel import discovery
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.data.sets.digits import digits
from fedbilevel.errors import ProblemError
from fedbilevel.oracle.hypergradient import lower_solution
from fedbilevel.oracle.population import Population
from fedbilevel.tasks.imbalance import Imbalance
from fedbilevel.tasks.task import Built
from support.numeric.yardstick import drive

SMALL = {"num_clients": 3, "share": 0.21, "num_val": 2, "imbalance_ratio": 4.0}
models = pytest.mark.parametrize("model", ["linear", "mlp"])


def near(population: Population) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return tuple(
        start + 0.5 * torch.randn(start.shape, generator=draw, dtype=torch.float64)
        for start in (population.x0, population.y0)
    )


def logits(y: dict[str, np.ndarray], images: np.ndarray) -> np.ndarray:
    z = images.astype(float)
    if "hidden.weight" in y:
        z = z @ y["hidden.weight"].T + y["hidden.bias"]
        z = 0.5 * z * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))
    return z @ y["out.weight"].T + y["out.bias"]


def entropies(z: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), labels]


@models
def test_losses_and_figures_are_those_of_plain_numpy(model):
    built = Imbalance(**SMALL, model=model, num_hidden=5, l2=0.3).build()
    population = Population(*built, dtype=torch.float64)
    x, y = near(population)
    delta, ell = (leaf.numpy() for leaf in population.layout_x.unravel(x).values())
    weights = {name: leaf.numpy() for name, leaf in population.layout_y.unravel(y).items()}
    lower, upper, right, tested = [], [], Counter(), Counter()
    for client in built.clients:
        train, val, test = (client[role] for role in ("train", "val", "test"))
        lower.append(entropies(logits(weights, train["image"]) * 2 / (1 + np.exp(-delta)) + ell, train["label"]).mean())
        plain = entropies(logits(weights, val["image"]), val["label"])
        upper.append(
            np.mean([plain[val["label"] == label].mean() for label in range(10)])
        )  # class by class: f_i is balanced
        answers = logits(weights, test["image"]).argmax(1)
        tested.update(test["label"].tolist())
        right.update(test["label"][answers == test["label"]].tolist())
    assert len({len(client["test"]["label"]) for client in built.clients}) == 2  # so that some are padded
    figures = population.measure(x, y)
    assert figures["lower_loss"] == pytest.approx(
        np.mean(lower) + 0.15 * sum((leaf**2).sum() for leaf in weights.values()), rel=1e-9
    )
    assert figures["upper_loss"] == pytest.approx(np.mean(upper), rel=1e-9)
    assert figures["balanced_test_accuracy"] == pytest.approx(
        np.mean([right[label] / tested[label] for label in range(10)]), rel=1e-12
    )
    assert figures["rarest_test_accuracy"] == pytest.approx(right[9] / tested[9], rel=1e-12)
    assert figures["test_accuracy"] == pytest.approx(right.total() / tested.total(), rel=1e-12)
    assert right.total() > 0


def test_figures_are_means_over_classes_of_ratios_of_sums():
    metrics = Imbalance(**SMALL).build().problem.metrics
    sums = {f"{what}_{label}": value for label in range(10) for what, value in (("right", 1.0), ("tested", 2.0))}
    found = metrics({**sums, "right_9": 3.0, "tested_9": 12.0, "right_0": 0.0, "tested_0": 0.0})
    assert found == pytest.approx(
        {"balanced_test_accuracy": (8 * 0.5 + 0.25) / 9, "rarest_test_accuracy": 0.25, "test_accuracy": 11 / 28}
    )
    assert math.isnan(metrics({**sums, "tested_9": 0.0})["rarest_test_accuracy"])


def test_at_the_start_the_training_loss_is_plain_cross_entropy():
    built = Imbalance(**SMALL, l2=0.3).build()
    population = Population(*built, dtype=torch.float64)
    assert population.x0.shape == (20,)
    assert built.problem.scopes == ("global", "shared")
    _, y = near(population)
    batch = population.data.batch(population.data.positions, "train")
    evaluate = lambda loss: population.oracle.evaluate(loss, population.x0, y, batch)
    torch.testing.assert_close(
        evaluate(built.problem.lower) - 0.15 * (y**2).sum(), evaluate(built.problem.upper), rtol=1e-12, atol=1e-12
    )


def test_a_run_that_starts_at_logit_adjustment_is_refitted_as_logit_adjustment():
    """Without a change of x, the refit has the loss of the rival in every sample."""
    task = Imbalance(**SMALL, alpha=0.3)
    built, rival = task.build(), task.rivals()["logit_adjustment"]
    counts = np.array([np.bincount(client["train"]["label"], minlength=10) for client in built.clients])
    y = {name: torch.randn(leaf.shape, dtype=torch.float64) for name, leaf in built.problem.y0.items()}
    start = rival.start("train", SimpleNamespace(y=y))
    shares = (counts / counts.sum(1, keepdims=True)).mean(0)  # clients count the same in the lower level
    np.testing.assert_allclose(start["x0"]["ell"], np.log(shares) - np.log(shares).mean(), atol=1e-5)
    problem = dataclasses.replace(built.problem, **start)
    refit, plain = task.refits(problem, built.clients, start["x0"])["refitted"], rival.refit("train")
    assert refit.problem.client_weights == plain.problem.client_weights == "by_samples"
    for one, other in zip(refit.clients, plain.clients, strict=True):
        batch = {name: torch.as_tensor(value) for name, value in one["train"].items()}
        batch["image"] = batch["image"].double()
        assert one["train"]["label"].tolist() == other["train"]["label"].tolist()
        ours, theirs = (way.problem.lower(refit.problem.x0, y, batch) for way in (refit, plain))
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-5)
    moved = {name: leaf + 0.1 for name, leaf in start["x0"].items()}
    batch = {"image": torch.zeros(1, 64, dtype=torch.float64), "label": torch.tensor([3])}
    more = problem.upper(moved, y, batch) - built.problem.upper(moved, y, batch)
    assert float(more) == pytest.approx(0.5 * 20 * 0.1**2 / (0.5**2 * 3 * 2 * 10), rel=1e-5)  # 60 validation images


def test_derivatives_and_hypergradients_agree_with_finite_differences():
    built = Imbalance(**SMALL, l2=0.1).build()
    assert fb.check_problem(*built, show=False).ok
    report = fb.check_hypergradient(
        *built, estimators=["cg"], x=near(Population(*built))[0], num_directions=1, show=False
    )
    assert report.ok, str(report)
    assert fb.check_problem(*Imbalance(**SMALL, model="mlp", num_hidden=4).build(), show=False).ok


# ---- who has what ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["iid", "dirichlet"])
@pytest.mark.parametrize("ratio", [1.0, 7.0, 20.0])
def test_training_images_follow_the_tail_and_no_image_is_used_twice(split, ratio):
    images, labels = digits()
    truth = {image.tobytes(): label for image, label in zip(images, labels, strict=True)}
    clients = Imbalance(split=split, imbalance_ratio=ratio).build().clients
    used = Counter(image.tobytes() for client in clients for fields in client.values() for image in fields["image"])
    assert set(used.values()) == {1}
    for client in clients:
        for fields in client.values():
            assert all(
                truth[image.tobytes()] == label for image, label in zip(fields["image"], fields["label"], strict=True)
            )
        assert Counter(client["val"]["label"].tolist()) == dict.fromkeys(range(10), 3)
        assert len(client["train"]["label"]) >= 1
    sizes = np.bincount(np.concatenate([client["train"]["label"] for client in clients]))
    expected = sizes[0] * ratio ** (-np.arange(10) / 9)
    assert np.abs(sizes - expected).max() < 1.1
    left = (
        np.array([sum(label == c for label in labels) for c in range(10)]) - 30
    )  # of which a quarter, about, is for testing
    assert sizes[0] > 0.6 * left.min()


def test_labels_are_spread_unevenly_over_clients_unless_asked_otherwise():
    def spread(split: str) -> float:
        counts = np.stack(
            [np.bincount(client["train"]["label"], minlength=10) for client in Imbalance(split=split).build().clients]
        )
        return float((counts[:, 0] / counts.sum(1)).std())

    assert spread("dirichlet") > 2 * spread("iid")


def test_what_the_data_cannot_give_is_a_clear_error():
    with pytest.raises(
        ProblemError,
        match=r"with imbalance_ratio 1000 and \d+ training images of the commonest class none is left of the rarest",
    ):
        Imbalance(imbalance_ratio=1000).build()
    with pytest.raises(ProblemError, match="samples, 1000 were requested: request fewer"):
        Imbalance(num_val=100).build()


# ---- learning --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> tuple[Built, list[dict[str, float]]]:
    """Train with x at its start: the result of FedAvg and the exact minimiser of the lower level.

    FedAvg only approaches the minimiser.
    """
    built = Imbalance().build()
    settings = {name: Imbalance.suggestions("fedavg")[name] for name in ("lr_lower", "num_local_steps")}
    fed, state = drive(FedAvg(**settings), built, Imbalance.iterations("fedavg") // 2, dtype=torch.float32)
    population = Population(*built, dtype=torch.float64)
    return built, [
        fed.measure(state.x, state.y),
        population.measure(population.x0, lower_solution(population, population.x0, tolerance=1e-6)),
    ]


@pytest.mark.parametrize("name", ["fbo_aggitd", "fedbio"])
def test_learning_the_loss_beats_training_with_plain_cross_entropy(name, plain):
    built, floors = plain
    algorithm = discovery.algorithm(name)(**Imbalance.suggestions(name))
    fed, state = drive(algorithm, built, Imbalance.iterations(name) // 2, dtype=torch.float32)
    learned = fed.measure(state.x, state.y)
    for floor in floors:
        assert floor["balanced_test_accuracy"] > 0.7
        assert learned["balanced_test_accuracy"] > floor["balanced_test_accuracy"] + 0.07
        assert learned["rarest_test_accuracy"] > floor["rarest_test_accuracy"] + 0.3
