"""Rivals of tasks against plain numpy: losses, weights and the points to which they converge."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel.oracle.population import Population
from fedbilevel.studies.rivals import run_rival
from fedbilevel.tasks.association import associations
from fedbilevel.tasks.imbalance import Imbalance
from fedbilevel.tasks.mixing import Mixing
from fedbilevel.tasks.regularisation import Regularisation
from fedbilevel.tasks.representation import Representation
from fedbilevel.tasks.task import Built

REGULARISATION = Regularisation(num_train=30, num_val=20, num_test=10, num_noise=2)
IMBALANCE = Imbalance(num_clients=3, share=0.3, num_val=2, imbalance_ratio=6.0, l2=0.02)
MIXING = Mixing(num_clients=3, num_good=2, num_bad=1, num_train=6, num_val=4, num_test=5, num_hidden=4)


def lower_loss(way, y) -> float:
    population = Population(way.problem, way.clients, dtype=torch.float64)
    flat = torch.cat([torch.as_tensor(leaf, dtype=torch.float64).flatten() for leaf in y.values()])
    return population.measure(population.x0, flat)["lower_loss"]


def some_y(problem, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: 0.5 * rng.standard_normal(tuple(leaf.shape)) for name, leaf in problem.y0.items()}


def newton(clients, l2: float) -> np.ndarray:
    """Weights and bias of ridge logistic regression on pooled samples; the bias is free."""
    x = np.concatenate([client["train"]["input"] for client in clients]).astype(float)
    x, label = np.hstack([x, np.ones((len(x), 1))]), np.concatenate([client["train"]["label"] for client in clients])
    decay, y = l2 * np.diag([*np.ones(x.shape[1] - 1), 0.0]), np.zeros(x.shape[1])
    for _ in range(50):
        chance = 1 / (1 + np.exp(-x @ y))
        hessian = (x.T * (chance * (1 - chance))) @ x / len(x) + decay
        y -= np.linalg.solve(hessian, x.T @ (chance - label) / len(x) + decay @ y)
    return y


def test_one_penalty_converges_to_ridge_regression_on_training_and_validation_samples():
    rivals = REGULARISATION.rivals()
    found = run_rival(rivals["l2"], num_rounds=300, dtype=torch.float64)
    assert [len(client["train"]["label"]) for client in found.way.clients] == [50] * 3
    expected = newton(found.way.clients, 1 / 150)
    ours = np.concatenate([found.result.y["weight"], found.result.y["bias"]])
    assert np.abs(ours - expected).max() < 1e-4 * np.abs(expected).max()


def test_the_grid_chooses_by_validation_samples_and_refits_on_all():
    rival = REGULARISATION.rivals()["l2_grid"]
    found = run_rival(rival, num_rounds=150, dtype=torch.float64)
    losses = {}
    for label, way in rival.ways.items():
        y = newton(way.clients, float(label))
        val = [(np.hstack([c["val"]["input"], np.ones((20, 1))]) @ y, c["val"]["label"]) for c in way.clients]
        losses[label] = np.mean([np.logaddexp(0, scores) - label * scores for scores, label in val])
    assert found.tried == pytest.approx(losses, rel=1e-4)
    assert found.chosen == min(losses, key=losses.__getitem__)
    expected = newton(found.way.clients, float(found.chosen))
    assert len(found.way.clients[0]["train"]["label"]) == 50
    assert np.abs(found.result.y["weight"].numpy() - expected[:-1]).max() < 1e-3 * np.abs(expected).max()


def test_the_lasso_is_the_smoothed_sum_of_absolute_weights():
    rival = REGULARISATION.rivals()["l1_grid"]
    y = some_y(rival.ways["0.01"].problem)
    gap = lower_loss(rival.ways["0.1"], y) - lower_loss(rival.ways["0.01"], y)
    assert gap == pytest.approx(0.09 * (np.sqrt(y["weight"] ** 2 + 1e-4) - 0.01).sum(), rel=1e-9)


def test_screened_features_are_those_with_a_large_t_and_the_others_have_no_weight():
    task = Regularisation(num_train=60, num_val=20, num_test=10, num_noise=6)
    rival, own = task.rivals()["screened"], task.build().clients
    rows, label = (np.concatenate([client["train"][name] for client in own]) for name in ("input", "label"))
    t = associations(own).numpy()
    ones, zeros = rows[label == 1], rows[label == 0]
    error = np.sqrt(rows.var(0) * (1 / len(ones) + 1 / len(zeros)))
    np.testing.assert_allclose(t, (ones.mean(0) - zeros.mean(0)) / error, rtol=1e-4)
    assert 0 < (np.abs(t) > 3).sum() < len(t)
    found = run_rival(rival._replace(ways={"3, 0.01": rival.ways["3, 0.01"]}), num_rounds=300, dtype=torch.float64)
    kept = np.abs(associations(found.way.clients).numpy()) > 3
    assert [len(client["train"]["label"]) for client in found.way.clients] == [80] * 3
    cut = [{"train": {**one["train"], "input": one["train"]["input"][:, kept]}} for one in found.way.clients]
    expected, weight = newton(cut, 0.01), found.result.y["weight"].numpy()
    assert not weight[~kept].any()
    assert np.abs(weight[kept] - expected[:-1]).max() < 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("parametrisation", ["exp", "softplus", "sigmoid"])
def test_a_bilevel_run_can_start_at_screened_features(parametrisation):
    task = Regularisation(num_train=60, num_val=20, num_test=10, num_noise=6, parametrisation=parametrisation)
    own = task.build()
    start = task.rivals()["screened"].start("3, 0.01", SimpleNamespace(y=own.problem.y0))
    r = task.decay({"lambda": start["x0"]["lambda"].double()})[:-1].numpy()
    weak = np.abs(associations(own.clients).numpy()) <= 3
    assert r[~weak] == pytest.approx(0.009, rel=1e-3)  # besides l2
    assert r[weak] == pytest.approx(9.5 if parametrisation == "sigmoid" else 10, rel=1e-3)


def test_a_feature_or_a_label_that_never_changes_has_no_association():
    draw = np.random.default_rng(0)
    rows = np.column_stack([draw.standard_normal(20), np.ones(20)])
    one = {"train": {"input": rows, "label": (rows[:, 0] > 0).astype(int)}}
    assert associations([one])[0] > 2
    assert associations([one])[1] == 0
    assert not associations([{"train": {"input": rows, "label": np.ones(20)}}]).any()


def entropies(z: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), labels]


def test_losses_of_the_rivals_of_imbalance_are_those_of_numpy():
    """Every image counts the same, wherever it is; weights of classes have mean one over images."""
    rivals, own = IMBALANCE.rivals(), IMBALANCE.build().clients
    image, label = (
        np.concatenate([client[role][name] for client in own for role in ("train", "val")])
        for name in ("image", "label")
    )
    counts = np.bincount(label)
    y = some_y(rivals["plain"].refit("train").problem)
    z = image @ y["out.weight"].T + y["out.bias"]
    norm = 0.01 * sum((leaf**2).sum() for leaf in y.values())
    beta = 1 - 1 / len(label)
    weights = (1 - beta) / (1 - beta**counts)
    weights = weights[label] / weights[label].mean()
    expected = {
        "plain": entropies(z, label).mean(),
        "logit_adjustment": entropies(z + np.log(counts / counts.sum()), label).mean(),
        "class_balanced": (weights * entropies(z, label)).mean(),
    }
    for name, loss in expected.items():
        assert lower_loss(rivals[name].refit("train"), y) == pytest.approx(loss + norm, rel=1e-6), name
        [way] = rivals[name].ways.values()  # where a bilevel run begins: without validation samples
        num = [[len(client["train"]["label"]) for client in clients] for clients in (way.clients, own)]
        assert num[0] == num[1]


def test_adjusted_start_is_logit_adjustment_by_the_priors_of_the_tail():
    task = Imbalance(num_clients=2, imbalance_ratio=6.0, start="adjusted")
    built = task.build()
    counts = np.bincount(np.concatenate([client["train"]["label"] for client in built.clients]))
    ell = built.problem.x0["ell"].numpy()
    log_priors = np.log(counts / counts.sum())
    assert ell.mean() == pytest.approx(0, abs=1e-6)
    np.testing.assert_allclose(ell, log_priors - log_priors.mean(), atol=0.2)  # whole numbers of images
    assert not Imbalance().build().problem.x0["ell"].any()


def test_losses_of_the_rivals_of_mixing_are_those_of_numpy():
    rivals, own = MIXING.rivals(), MIXING.build().clients
    way = rivals["uniform"].ways["sources"]
    y = some_y(way.problem)

    def losses(fields, places) -> np.ndarray:
        x = y["embedding"][fields["context"][places]].reshape(len(fields["label"][places]), -1)
        z = torch.nn.functional.gelu(torch.as_tensor(x @ y["hidden.weight"].T + y["hidden.bias"])).numpy()
        return entropies(z @ y["out.weight"].T + y["out.bias"], fields["label"][places])

    by_source = [
        [losses(client["train"], client["train"]["source"] == source) for source in range(3)]
        + [losses(client["val"], slice(0, 2))]
        for client in own
    ]
    norm = 0.0005 * sum((leaf**2).sum() for leaf in y.values())
    every = lambda chosen: np.mean([np.concatenate([client[s] for s in chosen]).mean() for client in by_source])
    alike = lambda chosen: np.mean([[client[s].mean() for s in chosen] for client in by_source])
    expected = {
        ("uniform", "sources"): alike([0, 1, 2]),
        ("uniform", "sources and target"): alike([0, 1, 2, 3]),
        ("proportional", "sources"): every([0, 1, 2]),
        ("proportional", "sources and target"): every([0, 1, 2, 3]),
        ("target", "target"): every([3]),
    }
    for (name, label), loss in expected.items():
        found = lower_loss(rivals[name].ways[label], y)
        assert found == pytest.approx(loss + norm, rel=1e-6), (name, label)
        assert [len(client["val"]["label"]) for client in rivals[name].ways[label].clients] == [2] * 3


def test_mixing_starts_at_a_plain_mixture_and_trains_again_with_learned_weights():
    """Sources have other numbers of samples here: 2, 4 and 5 at every client."""
    kept = np.concatenate([np.arange(2), np.arange(5, 9), np.arange(10, 15)])
    problem, whole = Mixing(num_good=2, num_bad=1, num_clients=3, num_train=5, num_val=4, num_hidden=4).build()
    clients = [{**one, "train": {name: value[kept] for name, value in one["train"].items()}} for one in whole]
    task = MIXING.with_built(Built(problem, clients))
    rivals = task.rivals()
    shares = {
        name: torch.softmax(rivals[name].start("sources", None)["x0"]["logit"], 0)
        for name in rivals
        if name != "target"
    }
    np.testing.assert_allclose(shares["uniform"], [1 / 3] * 3, rtol=1e-6)
    np.testing.assert_allclose(shares["proportional"], np.array([2, 4, 5]) / 11, rtol=1e-6)
    x = {"logit": torch.tensor([0.5, -1.0, 2.0])}
    found, y = task.refits(problem, clients, x), some_y(problem)
    weights = torch.softmax(x["logit"], 0).tolist()
    alone = lambda source: lower_loss(task._trained(problem, clients, torch.eye(4)[source]), y)
    losses = [alone(source) for source in range(4)]
    assert lower_loss(found["sources"], y) == pytest.approx(sum(map(math.prod, zip(weights, losses[:3], strict=True))))
    mixed = [*(0.75 * weight for weight in weights), 0.25]
    assert lower_loss(found["sources and target"], y) == pytest.approx(
        sum(map(math.prod, zip(mixed, losses, strict=True)))
    )
    for way in found.values():
        assert way.problem.x0 is x
        batch = {"context": torch.zeros(1, 3, dtype=torch.long), "label": torch.zeros(1, dtype=torch.long)}
        leaves = {name: torch.as_tensor(leaf) for name, leaf in y.items()}
        plain = way.problem.upper(x, leaves, batch)  # no divergence from uniform weights
        torch.testing.assert_close(plain, problem.upper({"logit": torch.zeros(3)}, leaves, batch))


def test_a_run_may_begin_at_a_shared_network_to_which_clients_add_their_own_part():
    """Losses in plain numpy; without own parts they are those of the shared network with own priors."""
    task = Representation(num_clients=4, num_hidden=6)
    rival = task.rivals()["prior_standardised"]
    label, way = next(iter(rival.ways.items()))
    network = {name: torch.as_tensor(leaf) for name, leaf in some_y(way.problem).items()}
    start = rival.start(label, SimpleNamespace(y=network))
    clients = start.pop("clients")
    problem = dataclasses.replace(task.build().problem, **start)
    assert problem.scopes.lower == "local"
    assert all(bool((leaf == 0).all()) for leaf in problem.y0.values())
    own = {name: torch.as_tensor(leaf) for name, leaf in some_y(problem, 1).items()}
    rates = {"head.weight": -0.7, "head.bias": 0.4}
    x = {**network, **{f"penalty of {name}": torch.tensor(rate, dtype=torch.float64) for name, rate in rates.items()}}
    assert set(x) == set(problem.x0)
    for client, raw in zip(clients, task.build().clients, strict=True):
        pixels, labels = raw["train"]["image"].astype(float), raw["train"]["label"]
        counts = np.bincount(labels, minlength=10) + 1
        inputs = ((pixels - pixels.mean()) / pixels.std()).astype(np.float32).astype(float)
        hidden = np.maximum(inputs @ network["hidden.weight"].numpy().T + network["hidden.bias"].numpy(), 0)
        batch = {name: torch.as_tensor(value) for name, value in client["train"].items()}
        batch |= {name: batch[name].double() for name in ("image", "prior")}
        for added in (own, {name: torch.zeros_like(leaf) for name, leaf in own.items()}):
            weight, bias = ((network[name] + added[name]).numpy() for name in ("head.weight", "head.bias"))
            z = hidden @ weight.T + bias + np.log(counts / counts.sum())
            expected = np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), labels]
            penalty = sum(0.5 * math.exp(rates[name]) * float((leaf**2).sum()) for name, leaf in added.items())
            np.testing.assert_allclose(problem.upper(x, added, batch), expected, rtol=1e-5)
            np.testing.assert_allclose(problem.lower(x, added, batch), expected + penalty, rtol=1e-5)
            right = problem.statistics["test"](x, added, batch)["test_right"]
            assert right.tolist() == (z.argmax(1) == labels).tolist()
        shared = way.problem.upper({}, network, batch)
        torch.testing.assert_close(
            problem.upper(x, {name: torch.zeros_like(v) for name, v in own.items()}, batch), shared
        )


def test_the_guarded_run_takes_the_clients_of_its_start():
    task = Representation(num_clients=4, num_hidden=6)
    found = fb.guarded(task, num_rounds=2, num_folds=2, rivals=["prior_standardised"])
    bilevel = found.contenders["bilevel"]
    assert "prior" in bilevel.clients[0]["test"]
    assert "penalty of head.weight" in bilevel.result.x


@pytest.mark.parametrize("task", [REGULARISATION, IMBALANCE, MIXING], ids=lambda task: task.name())
def test_rivals_measure_the_figures_of_the_task(task):
    measured = set(fb.solve(*task.build(), "fedavg", num_rounds=1, residuals=False).rows[-1])
    for name, rival in task.rivals().items():
        for label, way in rival.ways.items():
            rows = fb.solve(*way[:3], num_rounds=2, residuals=False, **way.settings).rows
            assert set(rows[-1]) == measured, (name, label)


@pytest.mark.parametrize("parametrisation", ["softplus", "sigmoid"])
def test_bounded_penalties_start_at_the_usual_one_and_stay_in_range(parametrisation):
    task = Regularisation(parametrisation=parametrisation, most=0.3, num_train=20, num_val=20, num_test=5)
    built = task.build()
    assert task.decay(built.problem.x0).tolist() == pytest.approx([0.01] * 6, rel=1e-5)
    far = task.decay({"lambda": torch.tensor([-50.0, 50.0])}).tolist()
    assert far == pytest.approx([0, 0.3 if parametrisation == "sigmoid" else 50], abs=1e-6)
    report = fb.check_hypergradient(*built, estimators=["cg"], step=1e-5, show=False)
    assert report.ok, str(report)


def test_noise_columns_are_added_and_change_nothing_else():
    plain, noisy = (Regularisation(num_noise=num, num_test=9).build() for num in (0, 3))
    for one, other in zip(plain.clients, noisy.clients, strict=True):
        for role, fields in one.items():
            assert np.array_equal(fields["input"], other[role]["input"][:, :5])
            assert np.array_equal(fields["label"], other[role]["label"])
    noise = np.concatenate([client["train"]["input"][:, 5:] for client in noisy.clients])
    assert abs(noise.mean()) < 0.15
    assert 0.85 < noise.std() < 1.15
    assert noisy.problem.x0["lambda"].shape == (9,)


def test_fairness_of_one_is_the_squared_mean_plus_the_variance_over_clients():
    plain, fair = (dataclasses.replace(MIXING, fairness=fairness, kl=0.0).build() for fairness in (0.0, 1.0))
    populations = [Population(*built, dtype=torch.float64) for built in (plain, fair)]
    y = populations[0].y0 + 0.3
    each = [
        Population(plain.problem, [client], dtype=torch.float64).measure(populations[0].x0, y)["upper_loss"]
        for client in plain.clients
    ]
    found = populations[1].measure(populations[1].x0, y)
    assert found["upper_loss"] == pytest.approx(0.5 * (np.mean(each) ** 2 + np.var(each)), rel=1e-9)
    worst = [
        Population(plain.problem, [client], dtype=torch.float64).measure(populations[0].x0, y)["test_loss"]
        for client in plain.clients
    ]
    assert found["worst_test_loss"] == pytest.approx(max(worst), rel=1e-9)
    assert "worst_test_loss" not in populations[0].measure(populations[0].x0, y)
    assert fb.check_problem(*fair, show=False).ok
