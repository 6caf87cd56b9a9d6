"""Blends: temperatures, weights and figures against closed forms and the tasks' own measurements."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize

import fedbilevel as fb
from fedbilevel.studies import blend
from fedbilevel.studies.blend import Scores
from fedbilevel.studies.guarded import _scored
from fedbilevel.tasks.imbalance import Imbalance
from fedbilevel.tasks.regularisation import Regularisation
from fedbilevel.tasks.representation import Representation

SMALL = {"num_train": 20, "num_val": 16, "num_test": 10, "parametrisation": "sigmoid"}


def drawn(num: int, num_classes: int, seed: int) -> Scores:
    """Labels that are drawn from the probabilities of the scores."""
    rng = np.random.default_rng(seed)
    scores = blend.normalised(2 * rng.standard_normal((num, num_classes)))
    labels = np.array([rng.choice(num_classes, p=np.exp(row)) for row in scores])
    return Scores(scores, labels, rng.integers(3, size=num))


@pytest.mark.parametrize("factor", [0.3, 1.0, 4.0])
def test_the_temperature_undoes_a_factor_of_the_logits(factor):
    """Labels follow the scores, so that scores times `factor` need 1 / factor."""
    true = drawn(20_000, 4, 0)
    found = blend.factor_of(true.tempered(factor))
    assert found == pytest.approx(1 / factor, rel=0.08)  # neighbours on the grid differ by 6 %
    np.testing.assert_allclose(true.tempered(factor).tempered(1 / factor).scores, true.scores, atol=1e-12)


def test_weights_maximise_the_likelihood_with_their_prior():
    """Scipy's maximum of sum_j log sum_k w_k p_kj + sum_k log w_k, over softmax coordinates."""
    losses = np.random.default_rng(1).exponential([[0.5], [0.7], [3.0]], size=(3, 40))

    def objective(free: np.ndarray) -> float:
        log_w = free - np.logaddexp.reduce(free)
        return -np.logaddexp.reduce(log_w[:, None] - losses, axis=0).sum() - log_w.sum()

    best = minimize(objective, np.zeros(3), tol=1e-12).x
    np.testing.assert_allclose(blend.weights_of(losses), np.exp(best - np.logaddexp.reduce(best)), atol=1e-4)


def test_weights_of_equal_and_of_useless_members():
    same = np.tile(np.random.default_rng(2).exponential(size=50), (4, 1))
    np.testing.assert_allclose(blend.weights_of(same), 0.25)
    one, useless = np.zeros(98), np.full(98, 60.0)  # the useless member has its pseudo-count alone
    np.testing.assert_allclose(blend.weights_of(np.stack([one, useless])), [0.99, 0.01], atol=1e-9)


def test_the_loss_of_a_blend_is_that_of_samples_which_its_weights_have_not_seen():
    rng = np.random.default_rng(2)
    losses = rng.exponential(size=(3, 40))
    found = np.empty(40)
    for k in range(4):
        mine = np.arange(40) % 4 == k
        found[mine] = -np.log(blend.weights_of(losses[:, ~mine]) @ np.exp(-losses[:, mine]))
    assert blend.held_loss(losses) == pytest.approx(found.mean())
    assert blend.held_loss(np.stack([losses[0]] * 3)) == pytest.approx(losses[0].mean())


def test_a_blend_that_held_out_samples_do_not_prefer_is_no_answer(monkeypatch):
    monkeypatch.setattr(blend, "held_loss", lambda losses: math.inf)
    found = fb.guarded(Regularisation(**SMALL), num_rounds=10, num_folds=2, rivals=["l2"])
    assert found.answer == found.single
    assert found.weights == {}
    assert found.figures == found.contenders[found.single].figures


def test_the_blend_is_the_mean_of_probabilities():
    one, two = drawn(30, 5, 3), drawn(30, 5, 4)
    found = blend.blended([one, two._replace(labels=one.labels)], [0.3, 0.7])
    np.testing.assert_allclose(np.exp(found.scores), 0.3 * np.exp(one.scores) + 0.7 * np.exp(two.scores))
    assert found.labels is one.labels


TASKS = [
    Regularisation(**SMALL),
    Imbalance(num_clients=3),
    Representation(num_clients=5, num_hidden=8),
    fb.tasks.Personalisation(personalise="head", shift="labels", num_clients=3, share=0.1, val_share=0.3, width=0.1),
    fb.tasks.Personalisation(num_clients=3, share=0.1, width=0.1),  # its upper loss has a penalty of x
]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: f"{task.name()}-{getattr(task, 'personalise', '')}")
def test_figures_of_scores_are_those_that_a_run_measures(task):
    """Scores come from the upper loss at every label, figures of a run from its own statistics."""
    assert task.classes
    problem, clients = task.build()
    result = fb.solve(problem, clients, "self_tuned", num_rounds=3, residuals=False)
    scores = blend.scored(problem, result, clients, "test", blend.num_classes(clients))
    np.testing.assert_allclose(np.exp(scores.scores).sum(1), 1, rtol=1e-9)
    figures = task.graded(*scores)
    assert {"test_accuracy", *(name for name in task.headline if "test" in name)} <= set(figures)
    for name, value in figures.items():
        assert value == pytest.approx(result.final[name], rel=1e-5), name


@pytest.fixture
def preferred(monkeypatch):
    """Let held-out samples speak for every blend."""
    monkeypatch.setattr(blend, "held_loss", lambda losses: -math.inf)


@pytest.mark.usefixtures("preferred")
def test_guarded_blends_rivals_and_the_bilevel_answer():
    task = Regularisation(**SMALL)
    found = fb.guarded(task, num_rounds=10, num_folds=2, rivals=["l2"])
    assert (found.answer, sorted(found.weights)) == ("blend", ["bilevel", "l2"])
    assert found.share == found.weights["bilevel"]
    one, two = (found.contenders[name] for name in found.weights)
    np.testing.assert_allclose(list(found.weights.values()), blend.weights_of(np.stack([one.losses, two.losses])))
    chances = sum(
        weight * np.exp(_scored(own, "test", 2).tempered(own.factor).scores)
        for own, weight in zip((one, two), found.weights.values(), strict=True)
    )
    labels = np.concatenate([client["test"]["label"] for client in task.build().clients])
    assert found.figures["test_accuracy"] == (chances.argmax(1) == labels).mean()
    assert found.figures["test_loss"] == pytest.approx(
        -np.log(chances[np.arange(len(labels)), labels.astype(int)]).mean()
    )
    assert found.result is found.contenders[found.single].result
    assert "% bilevel" in found.sentence


@pytest.mark.usefixtures("preferred")
def test_rivals_alone_can_be_blended():
    task = Regularisation(**SMALL)
    found = fb.guarded(task, num_rounds=10, num_folds=2, rivals=["l2", "l2_grid"], bilevel=False)
    assert (sorted(found.weights), found.share) == (["l2", "l2_grid"], 0)
    assert found.costs["rounds"] == 10 * ((1 + 8) + 2 * 2)  # seven values and a refit, then a run in each fold
    assert "bilevel" not in found.sentence
    single = fb.guarded(task, num_rounds=10, num_folds=2, rivals=["l2"], bilevel=False, blend=False)
    assert (single.answer, single.weights) == ("l2", {})
    assert single.figures == single.contenders["l2"].figures


@pytest.mark.usefixtures("preferred")
def test_a_contender_without_finite_probabilities_is_left_out(monkeypatch):
    scored = blend.scored

    def spoilt(problem, *rest):
        found = scored(problem, *rest)
        learned = len(problem.x0["lambda"]) > 1  # one entry in problems of rivals
        return found._replace(scores=found.scores * np.nan) if learned else found

    monkeypatch.setattr(blend, "scored", spoilt)
    found = fb.guarded(Regularisation(**SMALL), num_rounds=4, num_folds=2, rivals=["l2"])
    assert (found.single, found.weights) == ("l2", {"l2": 1.0})
    assert found.figures["test_accuracy"] == found.contenders["l2"].figures["test_accuracy"]
