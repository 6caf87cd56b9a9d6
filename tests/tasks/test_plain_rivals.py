"""Rivals of cleaning, shared networks and fixed few-shot tasks against plain numpy and loops by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from scipy.optimize import minimize

import fedbilevel as fb
from fedbilevel.cli import main
from fedbilevel.oracle.population import Population
from fedbilevel.studies.rivals import run_rival
from fedbilevel.tasks.rival import with_validation
from fedbilevel.tasks.task import Built, Shapes

CLEANING = fb.tasks.DataCleaning(num_clients=3, num_train=30, num_clean=6, noise=0.3, l2=0.05)
NETWORK = fb.tasks.HyperRepresentation(num_clients=3, share=1.0, test_share=0.8, num_hidden=5)
CLASSES = fb.tasks.Classification(num_clients=3, share=0.2, model="linear")
TASKS = fb.tasks.FewShot(num_clients=2, num_tasks=3, num_queries=2, num_held_out=2, num_filters=3, num_ways=3)
EVERY = [CLEANING, NETWORK, CLASSES, TASKS]
F64 = {"dtype": torch.float64}


# ---- cleaning --------------------------------------------------------------------------------------------------------


def softmax_regression(clients, l2: float, q: float | None):
    """Return scores of the minimiser, found by scipy: cross-entropy, or its generalised form with exponent q."""
    image, label = (np.concatenate([client["train"][name] for client in clients]) for name in ("image", "label"))
    image, truth = image.astype(float), np.eye(10)[label]
    weight = np.concatenate([np.full(len(c["train"]["label"]), 1 / len(c["train"]["label"])) for c in clients])

    def loss(flat):
        w, b = flat[:-10].reshape(-1, 10), flat[-10:]
        z = image @ w + b
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        own = (p * truth).sum(1)
        each, slope = (-np.log(own), 1.0) if q is None else ((1 - own**q) / q, own[:, None] ** q)
        gradient = (weight / len(clients))[:, None] * slope * (p - truth)
        by_w, by_b = image.T @ gradient + l2 * w, gradient.sum(0) + l2 * b
        return weight @ each / len(clients) + 0.5 * l2 * (flat @ flat), np.concatenate([by_w.ravel(), by_b])

    found = minimize(loss, np.zeros(image.shape[1] * 10 + 10), jac=True, method="L-BFGS-B",
                     options={"maxiter": 3000, "gtol": 1e-9, "ftol": 1e-15}).x  # fmt: skip
    return lambda image: image.astype(float) @ found[:-10].reshape(-1, 10) + found[-10:]


@pytest.mark.parametrize(
    ("name", "clean", "q"), [("as_given", False, None), ("with_clean", True, None), ("gce", True, 0.7)]
)
def test_classifiers_of_noisy_labels_are_those_of_scipy_and_so_are_their_figures(name, clean, q):
    rival, own = CLEANING.rivals()[name], CLEANING.build().clients
    assert list(rival.ways) == ["l2 0.05", "l2 0.015", "l2 0.005"]
    one = rival._replace(ways={"l2 0.05": rival.ways["l2 0.05"]})
    found = run_rival(one, num_rounds=300, **F64)
    marked = [{**c, "val": {**c["val"], "wrong": np.zeros(len(c["val"]["label"]), bool)}} for c in own]
    scores = softmax_regression(with_validation(marked) if clean else own, 0.05, q)
    ours = lambda image: image.astype(float) @ found.result.y["weight"].numpy() + found.result.y["bias"].numpy()
    join = lambda role, field: np.concatenate([client[role][field] for client in own])
    test, noted = join("test", "image"), join("train", "image")
    assert np.abs(ours(test) - scores(test)).max() < 2e-3
    assert found.figures["test_accuracy"] == pytest.approx((scores(test).argmax(1) == join("test", "label")).mean())
    flags, wrong = scores(noted).argmax(1) != join("train", "label"), join("train", "wrong")
    assert 0 < (flags & wrong).sum() < flags.sum()
    precision, recall = (flags & wrong).sum() / flags.sum(), (flags & wrong).sum() / wrong.sum()
    f1 = 2 * precision * recall / (precision + recall)
    assert [found.figures[key] for key in ("precision", "recall", "f1")] == pytest.approx([precision, recall, f1])


def test_clean_samples_choose_the_weight_and_then_join_the_training_samples():
    """The rounds of all runs are paid: three to choose, and one more with the clean samples."""
    rivals, own = CLEANING.rivals(), CLEANING.build().clients
    for name, runs in (("as_given", 3), ("with_clean", 4), ("gce", 4)):
        found = run_rival(rivals[name], num_rounds=12)
        losses = {label: one.result for label, one in (
            (label, run_rival(rivals[name]._replace(ways={label: way}, refit=None), num_rounds=12))
            for label, way in rivals[name].ways.items()
        )}  # fmt: skip
        tried = {label: one.final["upper_loss"] for label, one in losses.items()}
        assert found.tried == pytest.approx(tried)
        assert found.chosen == min(tried, key=tried.__getitem__)
        assert found.costs["rounds"] == 12 * runs
        sizes = [len(client["train"]["label"]) for client in found.way.clients]
        assert sizes == [len(client["train"]["label"]) + 6 * (runs == 4) for client in own]


def test_rivals_of_cleaning_read_random_features_and_labels_without_truth():
    task = dataclasses.replace(CLEANING, features="convolutional", model="mlp", num_hidden=4)
    [way] = [one for label, one in task.rivals()["gce"].ways.items() if label == "l2 0.05"]
    assert way.problem.features is not None
    rows = fb.solve(*way[:3], num_rounds=2, residuals=False, **way.settings).rows
    assert "f1" in rows[-1]
    blind = [
        {**client, "train": {name: client["train"][name] for name in ("image", "label")}}
        for client in CLEANING.build().clients
    ]
    plain = CLEANING.with_built(Built(CLEANING.problem(Shapes.of(blind[0], 10)), blind))
    found = run_rival(plain.rivals()["with_clean"], num_rounds=2)
    assert "f1" not in found.figures
    assert "test_accuracy" in found.figures


def test_a_guarded_answer_takes_weights_of_clients_of_unequal_sizes():
    task = dataclasses.replace(CLEANING, num_train=None, partition="dirichlet", test_share=0.8)
    assert len({len(client["train"]["label"]) for client in task.build().clients}) > 1
    found = fb.guarded(task, num_rounds=2)
    assert list(found.contenders) == [*task.rivals(), "bilevel"]
    assert found.share in (0, 1)


# ---- networks that all clients train ---------------------------------------------------------------------------------


def test_fedavg_on_the_whole_network_is_a_loop_by_hand():
    rival = NETWORK.rivals()["fedavg"]
    assert len(rival.ways) == 8
    way = rival.refit("lr_lower 0.5, num_local_steps 5")
    result = fb.solve(*way[:3], num_rounds=4, residuals=False, **way.settings, **F64)
    built = NETWORK.build()
    y = {name: leaf.double() for name, leaf in {**built.problem.x0, **built.problem.y0}.items()}
    for _ in range(4):
        ends = []
        for client in with_validation(built.clients):
            image, label = (torch.as_tensor(client["train"][name]) for name in ("image", "label"))
            own = dict(y)
            for _ in range(5):
                leaves = {name: leaf.clone().requires_grad_() for name, leaf in own.items()}
                z = (image.double() @ leaves["hidden.weight"].T + leaves["hidden.bias"]).relu()
                z = z @ leaves["head.weight"].T + leaves["head.bias"]
                norm = (leaves["head.weight"] ** 2).sum() + (leaves["head.bias"] ** 2).sum()
                loss = torch.nn.functional.cross_entropy(z, label) + 0.005 * norm
                slopes = torch.autograd.grad(loss, list(leaves.values()))
                own = {name: own[name] - 0.5 * slope for name, slope in zip(leaves, slopes, strict=True)}
            ends.append(own)
        y = {name: sum(one[name] for one in ends) / 3 for name in y}
    for name, leaf in y.items():
        torch.testing.assert_close(result.y[name], leaf, rtol=1e-8, atol=1e-10)


def test_a_bilevel_run_may_begin_at_the_network_of_fedavg():
    rival, problem = NETWORK.rivals()["fedavg"], NETWORK.build().problem
    way = rival.ways["lr_lower 0.5, num_local_steps 5"]
    result = fb.solve(*way[:3], num_rounds=3, residuals=False, **way.settings)
    begun = dataclasses.replace(problem, **rival.start("", result))
    assert {name: leaf.shape for name, leaf in begun.x0.items()} == {n: leaf.shape for n, leaf in problem.x0.items()}
    assert {name: leaf.shape for name, leaf in begun.y0.items()} == {n: leaf.shape for n, leaf in problem.y0.items()}
    figures = fb.solve(begun, NETWORK.build().clients, "fedavg", num_rounds=1, lr_lower=1e-9, residuals=False).final
    assert figures["test_accuracy"] == result.final["test_accuracy"]


def test_classification_trains_its_network_at_the_weight_decay_of_the_start():
    way = CLASSES.rivals()["fedadam"].refit("lr_lower 0.3, server_lr 0.1, num_local_steps 5")
    rng = np.random.default_rng(0)
    y = {name: rng.standard_normal(tuple(leaf.shape)) for name, leaf in way.problem.y0.items()}
    own = with_validation(CLASSES.build().clients)
    image, label = (np.concatenate([client["train"][name] for client in own]) for name in ("image", "label"))
    z = image @ y["out.weight"].T + y["out.bias"]
    losses = np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), label]  # every sample counts the same
    expected = losses.mean() + 0.5 * CLASSES.weight_decay * sum((leaf**2).sum() for leaf in y.values())
    population = Population(way.problem, way.clients, **F64)
    flat = torch.cat([torch.as_tensor(leaf).flatten() for leaf in y.values()])
    assert population.measure(population.x0, flat)["lower_loss"] == pytest.approx(expected, rel=1e-6)


# ---- fixed few-shot tasks --------------------------------------------------------------------------------------------


def of_tasks(task, y):
    """Return, per client, own episodes (support, queries, ways, pixels) and held-out ones, with features by numpy."""
    found = []
    for client in task.build().clients:
        support, query = (np.swapaxes(client[role]["image"], 0, 1) for role in ("train", "val"))
        found.append({"own": np.concatenate([support, query], 1), "held": client["held_out"]["image"],
                      "test": client["test"]["image"]})  # fmt: skip
    return [{role: features(y, images, task) for role, images in client.items()} for client in found]


def features(y, images, task):
    """Two convolutions of stride two, each normalised over the images of one of every character."""
    z = images.astype(float).reshape(-1, 1, 8, 8)
    for i in (1, 2):
        padded = np.pad(z, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))[:, :, ::2, ::2]
        z = np.einsum("nchwij,kcij->nkhw", windows, y[f"conv{i}.weight"])
        groups = z.reshape(-1, task.num_ways, *z.shape[1:])
        groups = groups - groups.mean((1, 3, 4), keepdims=True)
        groups = groups / np.sqrt((groups**2).mean((1, 3, 4), keepdims=True) + 1e-5)
        z = groups.reshape(z.shape) + (y["conv1.bias"][:, None, None] if i == 1 else 0)
        z = np.maximum(z, 0)
    return (z.mean((2, 3)) / np.sqrt(3)).reshape(*images.shape[:-1], -1)


def by_prototypes(z, y):
    gaps = z[1:, :, None] - z[0][None, None]  # one image of the support
    return -16 * (gaps**2).sum(-1)


def by_steps(z, y):
    weight, bias, truth = y["head.weight"], y["head.bias"], np.eye(3)
    for _ in range(5):
        scores = np.exp(z[0] @ weight.T + bias)
        wrong = (scores / scores.sum(1, keepdims=True) - truth) / 3
        weight, bias = weight - 4 * wrong.T @ z[0], bias - 4 * wrong.sum(0)
    return z[1:] @ weight.T + bias


def by_ridge(z, y):
    return 8 * z[1:] @ np.linalg.solve(z[0].T @ z[0] + np.eye(3), z[0].T @ np.eye(3))


@pytest.mark.parametrize(
    ("name", "score"), [("prototypes", by_prototypes), ("anil", by_steps), ("classifier", by_ridge)]
)
def test_few_shot_rivals_measure_heads_of_numpy_on_own_and_on_held_out_tasks(name, score):
    way = next(iter(TASKS.rivals()[name].ways.values()))
    rng = np.random.default_rng(1)
    y = {key: 0.4 * rng.standard_normal(tuple(leaf.shape)) for key, leaf in way.problem.y0.items()}
    population = Population(way.problem, way.clients, **F64)
    flat = torch.cat([torch.as_tensor(leaf).flatten() for leaf in y.values()])
    figures = population.measure(population.x0, flat)
    entropy = lambda s: (np.log(np.exp(s).sum(-1)) - np.einsum("qnn->qn", s)).mean()
    every = of_tasks(TASKS, y)
    right = lambda s: (s.argmax(-1) == np.arange(3)).mean()
    for role, figure in (("own", "query_accuracy"), ("held", "validation_accuracy"), ("test", "test_accuracy")):
        found = [score(z, y) for client in every for z in client[role]]
        assert figures[figure] == pytest.approx(np.mean([right(one) for one in found]))
    held = [score(z, y) for client in every for z in client["held"]]
    assert figures["upper_loss"] == pytest.approx(np.mean([entropy(one) for one in held]), rel=1e-8)
    own = [score(z, y) for client in every for z in client["own"]]
    if name != "classifier":
        assert figures["lower_loss"] == pytest.approx(np.mean([entropy(one) for one in own]), rel=1e-8)
        return
    characters = [np.concatenate([c[role]["character"] for role in ("train", "val")]).swapaxes(0, 1)
                  for c in TASKS.build().clients]  # fmt: skip
    known = np.unique(np.concatenate([one.ravel() for one in characters]))
    z = np.concatenate([client["own"].reshape(-1, 3) for client in every]) * np.sqrt(3)
    scores = z @ y["head.weight"].T + y["head.bias"]
    label = np.searchsorted(known, np.concatenate([one.ravel() for one in characters]))
    losses = np.log(np.exp(scores).sum(1)) - scores[np.arange(len(label)), label]
    assert figures["lower_loss"] == pytest.approx(losses.mean(), rel=1e-8)


def test_the_guarded_answer_to_fixed_tasks_is_the_one_with_most_right_answers_on_held_out_episodes():
    """The bilevel run begins at ProtoNet's network, and has the figures of a run from there."""
    found = fb.guarded(TASKS, num_rounds=3)
    rival = TASKS.rivals()["prototypes"]
    plain = run_rival(rival, num_rounds=3, measure_every=3)
    assert list(found.contenders) == [*TASKS.rivals(), "bilevel"]
    begun = dataclasses.replace(TASKS.build().problem, **rival.start(plain.chosen, plain.result))
    alone = fb.solve(begun, TASKS.build().clients, "self_tuned", num_rounds=3, residuals=False, measure_every=3)
    reached = {name: one.figures["validation_accuracy"] for name, one in found.contenders.items()}
    assert reached["bilevel"] == alone.final["validation_accuracy"]
    assert found.figures["validation_accuracy"] in reached.values()
    best = max(reached[name] for name in TASKS.rivals())
    assert found.share == 1 or found.figures["validation_accuracy"] == best


# ---- in a comparison -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", EVERY, ids=lambda task: task.name())
def test_a_comparison_shows_the_rivals_with_the_figures_of_the_task(task):
    method = "fedbio_local" if task is TASKS else "fedbio"
    found = fb.compare(task, [method], num_rounds=2, repetitions=1, baseline=False, residuals=False)
    assert [one.name for one in found.outcomes] == [method, *task.rivals()]
    measured = {one.name: {*one.final} for one in found.outcomes}
    assert all(figures == measured[method] for figures in measured.values()), measured
    assert {*task.headline} <= measured[method]


def test_the_command_shows_rivals_of_cleaning_by_default(tmp_path):
    words = ["compare", "data_cleaning", "--algorithms", "fedbio", "--num-rounds", "2", "--repetitions", "1",
             "--no-baseline", "--set", "task.num_train=10", "--out", str(tmp_path / "c")]  # fmt: skip
    printed = CliRunner().invoke(main.cli, words).output
    assert all(name in printed for name in CLEANING.rivals()), printed
