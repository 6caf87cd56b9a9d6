"""Predicted changes against dense algebra, finite differences and real retraining.

Also scores against scikit-learn, and islands against separate runs.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import struct

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from sklearn.metrics import f1_score, r2_score
from torch import nn

import fedbilevel as fb
from fedbilevel import plots
from fedbilevel.algorithms.fbo_aggitd import FBOAggITD
from fedbilevel.algorithms.fednest import FedNest
from fedbilevel.algorithms.hgp import HGP
from fedbilevel.algorithms.sgp import SGP
from fedbilevel.cli.main import cli
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.errors import CheckpointError, DataError, ScopeError, SettingError
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.network import Network
from fedbilevel.oracle.hypergradient import lower_solution
from fedbilevel.oracle.population import Population
from fedbilevel.studies.influence.predict import ESTIMATES, influences
from fedbilevel.studies.influence.result import Instance, Study, scores
from fedbilevel.studies.influence.retrain import Training, retrain, train
from fedbilevel.studies.influence.study import study
from fedbilevel.tasks.influence import Influence
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.task import Built
from support.numeric.yardstick import relative

RANDOM = Network(kind="random_directed")
FLOAT64 = {"dtype": torch.float64}


def ragged(l2: float = 0.05, seed: int = 0) -> Built:
    """Clients of 30, 21 and 12 training samples, and of different numbers of validation samples."""
    built = Influence(num_train=30, num_val=20, l2=l2, data_seed=seed).build()
    cut = lambda fields, num: {name: value[:num] for name, value in fields.items()}
    clients = [
        {"train": cut(one["train"], 30 - 9 * i), "val": cut(one["val"], 20 - 3 * i)}
        for i, one in enumerate(built.clients)
    ]
    return Built(built.problem, clients)


def inputs(fields) -> tuple[np.ndarray, np.ndarray]:
    x = fields["input"].astype(float)
    return np.hstack([x, np.ones((len(x), 1))]), fields["label"]


def slopes(fields, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The gradient of every sample's loss, and the Hessian of their mean."""
    x, label = inputs(fields)
    chance = 1 / (1 + np.exp(-x @ y))
    return (chance - label)[:, None] * x, (x.T * (chance * (1 - chance))) @ x / len(x)


def dense(built: Built, y: np.ndarray, l2: float) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Changes, mean H and mean f_y in plain numpy.

    Removing j of client i moves y by H^-1 grad loss_j / (n n_i), and F = n mean f.
    """
    hessian = np.mean([slopes(one["train"], y)[1] for one in built.clients], axis=0) + l2 * np.eye(len(y))
    fy = np.mean([slopes(one["val"], y)[0].mean(0) for one in built.clients], axis=0)
    u = np.linalg.solve(hessian, fy)
    return [slopes(one["train"], y)[0] @ u / len(one["train"]["label"]) for one in built.clients], hessian, fy


def worst(found: list[torch.Tensor], target: list) -> float:
    return max(relative(a, torch.as_tensor(b)) for a, b in zip(found, target, strict=True))


def optimum(built: Built) -> torch.Tensor:
    return train(built, Training(), **FLOAT64).y[0, 0]


# ---- the prediction --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["cg", "exact", "neumann", "fixed_point"])
def test_every_solver_gives_the_changes_of_dense_algebra(method):
    built = ragged()
    y = optimum(built)
    found = influences(*built, y, method=method, **FLOAT64)
    assert [len(row) for row in found.changes] == [30, 21, 12]
    assert worst(found.changes, dense(built, y.numpy(), 0.05)[0]) < 1e-7
    assert found.residual < 1e-9
    assert found.cost["hvp"] == 3 * (found.cost["rounds"] - 1) > 0


def test_predictions_are_minus_the_finite_differences_of_the_summed_validation_loss():
    built = ragged()
    population = Population(*built, **FLOAT64)
    val = population.data.batch(torch.arange(3), "val")
    y = optimum(built)
    found = influences(*built, y, **FLOAT64).changes

    def total(client: int, sample: int, value: float) -> float:
        x = population.x0.clone()
        x[client, sample] = value
        return float(
            population.oracle.evaluate(
                built.problem.upper, x, lower_solution(population, x, y, tolerance=1e-14), val
            ).sum()
        )

    scale = max(float(row.abs().max()) for row in found)
    start = float(train(built, Training(), **FLOAT64).loss[0])
    for client, sample in ((0, 29), (1, 3), (2, 11)):
        slope = (total(client, sample, 1 + 1e-3) - total(client, sample, 1 - 1e-3)) / 2e-3
        assert abs(float(found[client][sample]) + slope) < 1e-6 * scale
        errors = [
            abs((total(client, sample, 1 - t) - start) / t - float(found[client][sample])) for t in (0.2, 0.1, 0.05)
        ]
        assert (
            1.8 < errors[0] / errors[1] < 2.2
        )  # what a straight line leaves of a smooth function shrinks with the step
        assert 1.9 < errors[1] / errors[2] < 2.1


def test_hgp_on_a_random_directed_network_agrees_with_cg_and_knows_its_residual():
    built = ragged(l2=0.3)
    y = optimum(built)
    target = influences(*built, y, method="cg", **FLOAT64).changes
    found = influences(
        *built, y, method=HGP(lr_system=1.0, num_terms=45), network=RANDOM, averaging=Averaging(num_steps=18), **FLOAT64
    )
    assert worst(found.changes, target) < 1e-6
    assert found.residual < 1e-6
    assert found.disagreement < 1e-6
    assert found.cost["rounds"] == 45 * 18
    assert (found.cost["jvp"], found.cost["hvp"]) == (3 * 45, 3 * (44 + 20))  # 20 products measure the stable range
    poor = influences(
        *built, y, method=HGP(lr_system=1.0, num_terms=45), network=RANDOM, averaging=Averaging(num_steps=1), **FLOAT64
    )
    assert poor.disagreement > 1e-3
    assert worst(poor.changes, target) > 1e-3


def test_the_residual_of_a_short_series_is_that_of_neumann():
    built = ragged()
    y = optimum(built)
    _, hessian, fy = dense(built, y.numpy(), 0.05)
    left = np.linalg.matrix_power(np.eye(6) - 0.7 * hessian, 5) @ fy
    found = influences(*built, y, method=HGP(lr_system=0.7, num_terms=5), averaging=Averaging(kind="exact"), **FLOAT64)
    assert found.residual == pytest.approx(np.linalg.norm(left) / np.linalg.norm(fy), rel=1e-8)
    assert found.disagreement < 1e-14


def test_a_server_algorithm_with_a_whole_series_agrees_with_cg_and_one_that_draws_a_term_is_refused():
    built = ragged(l2=0.3)
    y = optimum(built)
    found = influences(*built, y, method=FBOAggITD(lr_lower=1.0, lr_system=1.0, num_lower_rounds=45), **FLOAT64)
    assert worst(found.changes, influences(*built, y, **FLOAT64).changes) < 1e-6
    assert found.residual is None
    assert found.cost["rounds"] == 2 * 45 + 1
    with pytest.raises(SettingError, match="fednest draws at random which part of a series it takes"):
        influences(*built, y, method=FedNest(lr_lower=1.0, lr_system=1.0, num_terms=20), **FLOAT64)


def test_rows_of_peers_that_differ_count_by_their_mean_for_a_server():
    built = ragged()
    y = optimum(built)
    rows = y + torch.tensor([[0.25], [-0.75], [0.5]])
    assert worst(influences(*built, rows, **FLOAT64).changes, influences(*built, y, **FLOAT64).changes) < 1e-12


# ---- training again --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("model", ["logistic", "cnn"])
def test_islands_are_separate_runs(model, batch_size):
    built = ragged() if model == "logistic" else Influence(data="digits", model="cnn", share=0.03).build()
    places = [None, (0, 3), (2, 1), (1, 0)]
    training = Training(kind="push", lr=0.3, num_steps=12 if model == "logistic" else 7)
    together = train(built, training, places, network=RANDOM, seed=5, batch_size=batch_size, **FLOAT64)
    sgp = SGP(lr_lower=0.3, num_lower_steps=training.num_steps, lower_schedule="milestones")
    for island, place in enumerate(places):
        peers = PeerSimulation(sgp, *built, network=RANDOM, seed=5, batch_size=batch_size, **FLOAT64)
        x = peers.host.x0.clone()
        if place is not None:
            x[place] = 0
        y = sgp.round(peers, sgp.init(peers)._replace(x=x)).y
        assert float((together.y[island] - y).abs().max()) < 1e-10
        mean_f = peers.host.measure(x, y)["upper_loss"]
        assert float(together.loss[island]) == pytest.approx(3 * mean_f, abs=1e-10)
    assert float((together.loss[1:] - together.loss[0]).abs().min()) > 1e-6 or batch_size is not None


def test_retraining_in_chunks_and_by_newton_changes_nothing():
    built = ragged()
    places = [(0, 1), (0, 2), (1, 5), (2, 0), (2, 7)]
    training = Training(kind="push", lr=2.0, num_steps=120, schedule="constant")
    base = train(built, training, **FLOAT64)
    whole, pieces = (retrain(built, training, base, places, at_once=size, **FLOAT64) for size in (None, 2))
    assert torch.allclose(whole.changes, pieces.changes, rtol=0, atol=1e-12)
    assert whole.noise < 1e-12
    exact = retrain(
        built, Training(), train(built, Training(), **FLOAT64), places, **FLOAT64
    )  # complete network: y* is where push ends
    assert torch.allclose(whole.changes, exact.changes, rtol=0, atol=1e-7)
    left_out = [dict(one) for one in built.clients]  # a sample that is not there: the others count 1 / n_i as before
    fields = left_out[2]["train"]
    left_out[2] = {
        **left_out[2],
        "train": {name: np.concatenate([value[:7], value[8:]]) for name, value in fields.items()},
    }
    keep = dataclasses.replace(
        built.problem,
        x0=lambda sizes: {"mask": torch.full((sizes["train"],), 11 / 12 if sizes["train"] == 11 else 1.0, **FLOAT64)},
    )
    without = Population(keep, left_out, **FLOAT64)
    y = lower_solution(without, without.x0, tolerance=1e-14)
    loss = float(without.oracle.evaluate(keep.upper, without.x0, y, without.data.batch(torch.arange(3), "val")).sum())
    base_loss = float(train(built, Training(), **FLOAT64).loss[0])
    assert float(exact.changes[4]) == pytest.approx(loss - base_loss, abs=1e-10)


# ---- scores ----------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    for _ in range(5):
        actual = rng.standard_normal(30)
        predicted = 0.8 * actual + 0.4 * rng.standard_normal(30)
        found = scores(predicted.tolist(), actual.tolist())
        assert found.r2 == pytest.approx(r2_score(actual, predicted), abs=1e-12)
        assert found.f1 == pytest.approx(f1_score(actual < 0, predicted < 0), abs=1e-12)
        assert found.pearson == pytest.approx(np.corrcoef(actual, predicted)[0, 1], abs=1e-12)
    assert scores([1.0, 2.0], [2.0, 4.0]) == (1 - 5 / 2, None, pytest.approx(1.0))  # nobody harms: nothing to find
    assert scores([-1.0, 2.0], [1.0, 1.0]) == (None, 0.0, None)
    with pytest.raises(SettingError, match="2 predicted and 1 actual"):
        scores([1.0, 2.0], [1.0])


# ---- the study -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["cg", HGP(lr_system=1.0, num_terms=200)], ids=["cg", "hgp"])
def test_logistic_regression_on_the_mixture_is_predicted_as_in_the_paper(method):
    result = study(Influence(), method=method, averaging=Averaging(num_steps=4), num_removed=16)
    assert result.scores.r2 >= 0.99
    assert result.scores.f1 == 1.0
    assert 4 <= sum(one.actual < 0 for one in result.removed) <= 12  # both kinds are there to be told apart
    assert result.residual < 1e-2
    assert result.lower_gradient < 1e-12
    assert result.noise < 1e-12


def test_a_study_ranks_records_and_draws(tmp_path):
    result = study(
        Influence(data="digits", share=0.06, wrong=0.1, l2=0.05),
        method="cg",
        num_removed=4,
        record=tmp_path / "s",
        draw=True,
    )
    sizes = [abs(one.prediction) for one in result.ranked]
    assert sizes == sorted(sizes, reverse=True)
    assert [one.actual is not None for one in result.ranked] == [True] * 4 + [False] * (len(sizes) - 4)
    for some, sign in ((result.harmful(5), -1), (result.helpful(5), 1)):
        assert len(some) == 5
        assert all(sign * one.prediction > 0 for one in some)
        assert sign * some[0].prediction == max(sign * one.prediction for one in result.ranked)
    clients = Influence(data="digits", share=0.06, wrong=0.1, l2=0.05).build().clients
    assert sum(len(one["train"]["label"]) for one in clients) == len(result.ranked)
    assert all(one.label == clients[one.client]["train"]["label"][one.sample] for one in result.ranked)
    wrong = sum(one.wrong for one in result.ranked)
    assert wrong == sum(round(0.1 * len(one["train"]["label"])) for one in clients)
    assert (
        sum(one.wrong for one in result.harmful(wrong)) > 0.3 * wrong
    )  # wrong labels harm; by chance it would be a tenth
    saved = json.loads((tmp_path / "s" / "influence.json").read_text())
    assert saved["scores"] == result.scores._asdict()
    assert Instance(**saved["ranked"][0]) == result.ranked[0]
    assert saved["task"]["wrong"] == 0.1
    assert {"torch", "fedbilevel"} <= set(saved["versions"])
    from matplotlib.image import imread

    for name, columns in (("removals.png", 400), ("instances.png", 1500)):
        pixels = imread(tmp_path / "s" / name)
        assert pixels.shape[1] >= columns
        assert 0.02 < float(pixels[..., :3].std()) < 0.5
        assert float((pixels[..., :3].mean(-1) < 0.5).mean()) > 0.003  # something dark: text, frames, ink
    with pytest.raises(CheckpointError, match="already holds a study"):
        study(Influence(), method="cg", record=tmp_path / "s")


def test_gradient_push_of_a_network_of_convolutions_goes_through(tmp_path):
    task = Influence(data="digits", model="cnn", share=0.03)
    training = Training(kind="push", lr=0.3, num_steps=5)
    hgp = HGP(lr_system=0.05, num_terms=3)
    result = study(
        task,
        method=hgp,
        training=training,
        averaging=Averaging(num_steps=3),
        num_removed=2,
        dtype=torch.float32,
        at_once=1,
    )
    assert isinstance(result, Study)
    assert result.scores.pearson is not None
    assert result.noise < 1e-4
    assert result.settings["network"]["kind"] == "random_directed"


# ---- the task --------------------------------------------------------------------------------------------------------


def test_the_losses_are_those_of_numpy_with_any_mask():
    task = Influence(num_train=8, num_val=5, l2=0.3)
    population = Population(*task.build(), **FLOAT64)
    y = np.linspace(-1, 1, 6)
    mask = np.arange(24.0).reshape(3, 8) / 10
    entropies = []
    for one in task.build().clients:
        x, label = inputs(one["train"])
        entropies.append(-np.log(np.where(label == 1, 1 / (1 + np.exp(-x @ y)), 1 / (1 + np.exp(x @ y)))))
    batch = population.data.batch(torch.arange(3), "train")
    found = population.oracle.evaluate(population.problem.lower, torch.tensor(mask), torch.tensor(y), batch)
    assert torch.allclose(found, torch.tensor((mask * np.array(entropies)).mean(1) + 0.15 * (y**2).sum()), rtol=1e-6)
    assert torch.equal(population.x0, torch.ones(3, 8, dtype=torch.float64))


def write_mnist(folder, num: int = 300) -> None:
    rng = np.random.default_rng(0)
    (folder / "mnist").mkdir(parents=True)
    images, labels = rng.integers(0, 256, (num, 28, 28), dtype=np.uint8), np.arange(num, dtype=np.uint8) % 10
    for name, array in (("train-images-idx3", images), ("train-labels-idx1", labels)):
        head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        (folder / "mnist" / f"{name}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))


def test_the_network_on_mnist_is_that_of_table_3(tmp_path):
    write_mnist(tmp_path)
    task = Influence(data="mnist", model="cnn", share=0.5, data_dir=str(tmp_path))
    built = task.build()
    assert sum(len(role["label"]) for one in built.clients for role in one.values()) == 150
    y = built.problem.y0
    assert sum(leaf.numel() for leaf in y.values()) == 20 * 26 + 20 * (20 * 25 + 1) + 3210
    table = nn.Sequential(
        nn.Conv2d(1, 20, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 20, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(320, 10),
    )
    with torch.no_grad():
        for place, prefix in ((0, "conv0."), (3, "conv1."), (7, "")):
            table[place].weight.copy_(y[prefix + "weight"].T if place == 7 else y[prefix + "weight"])
            table[place].bias.copy_(y[prefix + "bias"])
        val = built.clients[0]["val"]
        image, label = torch.as_tensor(val["input"]), torch.as_tensor(val["label"])
        assert float(image.min()) >= 0
        assert 0.9 < float(image.max()) <= 1
        expected = nn.functional.cross_entropy(table(image[:, None]), label)
        batch = {
            "input": image,
            "label": label,
            "weight": torch.full((len(label),), 1 / len(label)),
            "index": torch.arange(len(label)),
        }
        assert torch.allclose(built.problem.upper({}, y, batch).mean(), expected, rtol=1e-5)
    assert task.suggests("hgp")["num_terms"] == 1000
    (tmp_path / "mnist" / "train-labels-idx1-ubyte.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match="train-labels-idx1"):
        task.build()


@pytest.mark.parametrize("model", ["logistic", "cnn"])
def test_digits_pass_the_checks_of_problems(model):
    built = Influence(data="digits", model=model, share=0.05).build()
    report = fb.check_problem(*built, tolerance=1e-4, show=False)
    assert report.ok, str(report)
    assert len({len(one["train"]["label"]) for one in built.clients}) > 1


# ---- what is refused, and the command line ---------------------------------------------------------------------------


def test_what_makes_no_sense_is_refused():
    built = ragged()
    y = torch.zeros(6, dtype=torch.float64)
    with pytest.raises(SettingError, match="which needs images"):
        Influence(model="cnn")
    with pytest.raises(SettingError, match="fedbio has no estimate of the hypergradient at a point"):
        influences(*built, y, method="fedbio")
    with pytest.raises(ScopeError, match="this problem has a shared x"):
        influences(*Quadratic().build(), y)
    push = Training(kind="push", num_steps=1)
    with pytest.raises(SettingError, match="a network without loss"):
        train(built, push, network=Network(loss=0.1))
    with pytest.raises(SettingError, match="base shares of islands differ"):
        train(built, push, network=Network(kind="base"))
    with pytest.raises(SettingError, match="use a network with metropolis shares"):
        train(built, push, [None, (0, 0)], network=Network(kind="ring", shares="fastest"))
    with pytest.raises(SettingError, match="at_once is -1"):
        retrain(built, push, train(built, push), [(0, 0)], at_once=-1)
    with pytest.raises(SettingError, match="num_removed is -1"):
        study(Influence(), num_removed=-1)


def test_pictures_without_matplotlib_are_refused_before_anything_is_computed(monkeypatch, tmp_path):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match=r"pip install 'fedbilevel\[plot\]'"):
        study(Influence(), record=tmp_path / "none", draw=True)
    assert not (tmp_path / "none").exists()


def test_the_command_prints_scores_beside_the_paper_and_saves(tmp_path):
    small = ["influence", "--num-train", "12", "--num-val", "8", "--l2", "0.1", "--num-removed", "4"]
    args = [
        *small,
        "--averaging-num-steps",
        "3",
        "--num-terms",
        "20",
        "--network",
        "ring",
        "--num-listed",
        "2",
        "--out",
        str(tmp_path / "a"),
    ]
    result = CliRunner().invoke(cli, args, catch_exceptions=False)
    assert result.exit_code == 0
    saved = json.loads((tmp_path / "a" / "influence.json").read_text())
    assert f"{saved['scores']['r2']:.4f}" in result.output
    assert "Table 4" in result.output
    assert "0.99" in result.output
    assert (tmp_path / "a" / "removals.png").stat().st_size > 5000
    assert not (tmp_path / "a" / "instances.png").exists()
    assert saved["settings"]["network"]["kind"] == "ring"
    assert saved["settings"]["method"]["num_terms"] == 20
    assert saved["cost"]["rounds"] == 60
    assert result.output.count("not tried") <= 4
    by_server = CliRunner().invoke(
        cli, [*small, "--method", "cg", "--no-pictures", "--out", str(tmp_path / "b")], catch_exceptions=False
    )
    assert by_server.exit_code == 0
    assert [place.name for place in (tmp_path / "b").iterdir()] == ["influence.json"]
    text = (
        CliRunner().invoke(cli, ["influence", "--data", "mnist", "--model", "cnn", "--help"], terminal_width=300).output
    )
    assert "default 1000 on this task" in text
    assert "--training-num-steps" in text
    assert "--lr-upper" not in text
    assert ESTIMATES[0].replace("_", "-") in text
