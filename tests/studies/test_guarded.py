"""The guarded choice: samples that no run saw choose between the bilevel answer and the best rival."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel.errors import NonFiniteError, SettingError, UnknownNameError
from fedbilevel.problem.problem import Scopes
from fedbilevel.runs.result import Ending
from fedbilevel.runs.solve import solve
from fedbilevel.studies import contest as contest_module
from fedbilevel.studies import guarded as guarded_module
from fedbilevel.studies.sources import _Sources
from fedbilevel.tasks.few_shot_episodes import FewShotEpisodes
from fedbilevel.tasks.mixing import Mixing
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.regularisation import Regularisation, _losses
from fedbilevel.tasks.rival import Rival, Way, with_validation
from fedbilevel.tasks.task import Built, Task

SMALL = {"num_train": 20, "num_val": 16, "num_test": 10, "parametrisation": "sigmoid"}


def scored(problem, result, clients) -> np.ndarray:
    """Cross-entropy of every sample, in plain numpy."""
    weight, bias = (result.y[name].double().numpy() for name in ("weight", "bias"))
    found = []
    for fields in clients:
        scores = fields["input"] @ weight + bias
        found.append(np.logaddexp(0, scores) - fields["label"] * scores)
    return np.concatenate(found)


def tempered(losses: np.ndarray) -> np.ndarray:
    """Losses of two classes at the temperature with the smallest mean, in plain numpy.

    A loss -log p has the log-odds log(p / (1 - p)), which the temperature multiplies.
    """
    odds = -losses - np.log(-np.expm1(-losses))
    return min((np.logaddexp(0, -factor * odds) for factor in np.geomspace(0.1, 10, 81)), key=np.mean)


class Watched(Regularisation):
    """A task that keeps the clients of its rivals."""

    seen: list = []

    def rivals(self):
        Watched.seen.append(self.build().clients)
        return {"l2": super().rivals()["l2"]}


def test_samples_are_judged_by_runs_that_did_not_see_them():
    Watched.seen.clear()
    found = fb.guarded(Watched(**SMALL), num_rounds=20, seed=3, num_folds=4, blend=False)
    whole = Regularisation(**SMALL).build().clients
    first, *folds = Watched.seen
    assert [len(clients[0]["val"]["label"]) for clients in folds] == [12] * 4
    assert [client["val"]["label"].tolist() for client in first] == [c["val"]["label"].tolist() for c in whole]
    expected = []
    for kept in folds:
        apart = []
        for full, part in zip(whole, kept, strict=True):
            rows = {tuple(row) for row in part["val"]["input"].tolist()}
            out = np.array([tuple(row) not in rows for row in full["val"]["input"].tolist()])
            apart.append({name: value[out] for name, value in full["val"].items()})
        own = Regularisation(**SMALL)
        way = own.with_built(Built(own.build().problem, kept)).rivals()["l2"].ways["1/n"]
        assert [len(client["train"]["label"]) for client in way.clients] == [32] * 3
        result = fb.solve(
            way.problem, way.clients, "self_tuned", num_rounds=20, seed=3, residuals=False, **way.settings
        )
        expected.append(scored(way.problem, result, apart))
    l2, bilevel = found.contenders["l2"], found.contenders["bilevel"]
    np.testing.assert_allclose(l2.losses, tempered(np.concatenate(expected)), rtol=1e-4)
    assert len(l2.losses) == 48  # every validation sample once
    gaps = bilevel.losses - l2.losses
    assert found.difference == pytest.approx(gaps.mean())
    assert found.error == pytest.approx(gaps.std(ddof=1) / math.sqrt(48))
    assert found.answer == ("bilevel" if gaps.mean() < -found.error else "l2")
    assert found.figures == found.contenders[found.answer].figures
    assert found.costs["rounds"] == 5 * 60  # the rival, the bilevel run and its refit, in four folds and at last
    assert found.answer in found.sentence
    assert repr(found).startswith("<the answer is")


def test_training_misses_the_samples_that_judge_where_both_roles_are_the_same():
    Watched.seen.clear()
    task = Watched(**SMALL)
    built = task.build()
    clients = [{**client, "val": client["train"]} for client in built.clients]
    fb.guarded(task.with_built(Built(built.problem, clients)), num_rounds=2, num_folds=4)
    _, *folds = Watched.seen
    for fold in folds:
        assert [len(client["train"]["label"]) for client in fold] == [15] * 3  # of 20
        for client in fold:
            np.testing.assert_array_equal(client["train"]["input"], client["val"]["input"])
            rows = {tuple(row) for row in client["train"]["input"].tolist()}
            assert not rows & {tuple(row) for row in client["apart"]["input"].tolist()}


@pytest.mark.parametrize("task", [Mixing(), _Sources(kl=0.7)])
def test_answers_are_judged_without_the_penalty_of_x(task):
    problem = task.build().problem if isinstance(task, Mixing) else task.problem_of(8, 2, 3)
    draw = torch.Generator().manual_seed(0)
    x = {"logit": torch.randn(8, generator=draw)}
    inputs = (
        {"context": torch.zeros(2, 3, dtype=torch.long)} if isinstance(task, Mixing) else {"input": torch.ones(2, 3)}
    )
    batch = {**inputs, "label": torch.tensor([0, 1])}
    full, plain = (one.upper(x, problem.y0, batch) for one in (problem, task.judged(problem)))
    logs = torch.log_softmax(x["logit"], 0)
    divergence = float((logs.exp() * (logs + math.log(8))).sum())
    torch.testing.assert_close(full - plain, torch.full((2,), task.kl * divergence), rtol=1e-4, atol=1e-5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spoilt(Regularisation):
    """Rivals that are far too strongly, or hardly, penalised."""

    weight: float = 50.0

    def rivals(self):
        built, pooled = self.build(), with_validation(self.build().clients)
        lower = lambda x, y, batch: _losses(y, batch) + 0.5 * self.weight * (y["weight"] ** 2).sum()
        problem = dataclasses.replace(built.problem, lower=lower, x0={"lambda": torch.zeros(1)}, scopes=Scopes())
        return {"only": Rival("one penalty", {"one": Way(problem, pooled)})}


def test_a_bad_rival_loses_and_a_good_rival_is_kept():
    large = {**SMALL, "num_train": 80, "num_val": 80}
    assert fb.guarded(Spoilt(num_noise=5, **large), num_rounds=30, num_folds=2).single == "bilevel"
    stiff = Spoilt(weight=0.01, **{**large, "l2": 50.0})
    assert fb.guarded(stiff, num_rounds=30, num_folds=2).single == "only"  # x can lower no penalty below 50


def test_the_bilevel_run_starts_at_the_best_rival():
    """At the matched lambda, weight decay has the gradient of the penalty at the rival's y."""
    task = Regularisation(**SMALL, l2=0.0)
    y = {"weight": torch.tensor([0.5, -0.2, 0.0, 1.0, -2.0]), "bias": torch.tensor([0.3])}
    for name, gradient in (("l2_grid", lambda w: 0.03 * w), ("l1_grid", lambda w: 0.03 * w / (w**2 + 1e-4).sqrt())):
        start = task.rivals()[name].start("0.03", SimpleNamespace(y=y))
        decay = task.decay(start["x0"])[:5]
        expected = gradient(y["weight"])
        torch.testing.assert_close(decay * y["weight"], expected, rtol=1e-4, atol=1e-6)
        assert start["y0"] is y


def test_rivals_are_tuned_once_and_keep_their_settings_in_every_fold():
    found = fb.guarded(Regularisation(**SMALL), num_rounds=10, rivals=["l2_grid"])
    assert sorted(found.contenders) == ["bilevel", "l2_grid"]
    # seven values and a refit, then the chosen value without and with validation samples in each of two
    # folds, because bilevel starts at it; bilevel run and refit three times
    assert found.costs["rounds"] == 10 * (8 + 2 * 2 + 2 * 3)
    assert found.tuning["l2_grid"]["rounds"] == 80
    assert found.spent["bilevel"]["rounds"] == 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnMeans(Task):
    """Every client has a y of its own, mean(b) / (1 + exp(x)) over its training samples."""

    shift: float = 100.0

    def build(self):
        rng = np.random.default_rng(0)
        clients = [
            {"train": {"b": c + np.array([0.0, 2.0])}, "val": {"b": c + rng.standard_normal(12)}}
            for c in (-3.0, 0.0, 5.0)
        ]
        problem = fb.Problem(
            upper=lambda x, y, batch: (y["w"] - batch["b"]) ** 2,
            lower=lambda x, y, batch: (y["w"] - batch["b"]) ** 2 + x["a"].exp() * y["w"] ** 2,
            x0={"a": torch.tensor(-3.0)}, y0={"w": torch.zeros(())}, scopes=Scopes(lower="local"),
        )  # fmt: skip
        return Built(problem, clients)

    def rivals(self):
        problem, clients = self.build()
        far = dataclasses.replace(problem, lower=lambda x, y, batch: (y["w"] - self.shift - 0 * batch["b"]) ** 2)
        return {"far": Rival("a distant place", {"one": Way(far, clients)})}


def test_own_lower_variables_are_refitted_on_training_and_validation_samples():
    """Training samples are one too large on average, so that held-out samples ask for the refit."""
    found = fb.guarded(OwnMeans(), num_rounds=40, num_folds=3, dtype=torch.float64)
    assert found.answer == "bilevel"
    clients = OwnMeans().build().clients
    shrinkage = 1 + float(found.result.x["a"].exp())
    for own, client in zip(found.result.y, clients, strict=True):
        expected = np.concatenate([client["train"]["b"], client["val"]["b"]]).mean() / shrinkage
        assert float(own["w"]) == pytest.approx(expected, abs=1e-6)


def test_samples_apart_are_changed_as_a_rival_changes_its_inputs():
    """The held-out loss of a rival with own label prior and standardised inputs, in plain numpy."""
    task = fb.tasks.Personalisation(
        personalise="head", shift="labels", num_clients=3, share=0.1, val_share=0.3, width=0.1, least=20
    )
    kept = []

    class Kept(type(task)):
        def rivals(self):
            kept.append(self.build().clients)
            one = super().rivals()["prior_standardised"]
            label = next(iter(one.ways))
            return {"one": Rival("fixed", {label: one.ways[label]}, one.refit)}

        @classmethod
        def name(cls):
            return "personalisation"

    found = fb.guarded(Kept(**task.asdict()), num_rounds=2, num_folds=2)
    whole = task.build().clients
    _, *folds = kept
    for clients in folds:
        for full, part in zip(whole, clients, strict=True):
            assert len(part["val"]["label"]) + len(part["apart"]["label"]) == len(full["val"]["label"])
    last = found.contenders["one"]
    assert len(last.losses) == sum(len(client["val"]["label"]) for client in whole)
    for full, own in zip(whole, last.clients, strict=True):
        pixels = np.concatenate([full[role]["image"] for role in ("train", "val")]).astype(float)
        expected = (full["test"]["image"] - pixels.mean()) / pixels.std()
        np.testing.assert_allclose(own["test"]["image"], expected, atol=1e-5)
        assert "prior" in own["test"]


def test_samples_that_no_run_learns_from_judge_without_folds():
    """Few-shot: adasimfbo starts at ProtoNet's network, and held-out episodes choose."""
    task = FewShotEpisodes(num_episodes=2, num_queries=2, num_held_out=4, num_filters=3)
    found = fb.guarded(task, num_rounds=2, rivals=["prototypes"], seed=1)
    near, bilevel = found.contenders["prototypes"], found.contenders["bilevel"]
    for name, leaf in near.result.y.items():
        torch.testing.assert_close(bilevel.problem.x0[name], leaf, rtol=0, atol=0)
    assert bilevel.result.name == "adasimfbo"
    for one in (near, bilevel):
        assert len(one.losses) == 4  # clients, each with as many episodes
        assert one.held_loss == pytest.approx(1 - one.figures["validation_accuracy"])
    assert found.difference == pytest.approx(bilevel.held_loss - near.held_loss)
    assert found.answer == ("bilevel" if found.difference < -found.error else "prototypes")
    num_ways = len(task.rivals()["prototypes"].ways)
    assert found.costs["rounds"] == 2 * (num_ways + 1)


def test_a_bilevel_run_that_fails_leaves_the_rivals(monkeypatch):
    def failing(problem, clients, algorithm, **options):
        if algorithm == "self_tuned":
            raise NonFiniteError("client 0 returned NaN.")
        return solve(problem, clients, algorithm, **options)

    monkeypatch.setattr(contest_module, "solve", failing)
    found = fb.guarded(Regularisation(**SMALL), num_rounds=3, num_folds=2, rivals=["l2"])
    assert (found.single, sorted(found.contenders)) == ("l2", ["l2"])


@pytest.mark.parametrize("raises", [True, False])
def test_a_refit_that_fails_leaves_the_bilevel_run(monkeypatch, raises):
    def failing(problem, clients, algorithm, **options):
        found = solve(problem, clients, algorithm, **options)
        if options.get("learn_x", True):
            return found
        if raises:
            raise NonFiniteError("client 0 returned NaN.")
        return dataclasses.replace(found, ending=Ending("failed", "the loss grew."))

    monkeypatch.setattr(contest_module, "solve", failing)
    found = fb.guarded(Regularisation(**SMALL), num_rounds=3, num_folds=2, rivals=["l2"])
    assert sorted(found.contenders) == ["bilevel", "l2"]
    assert found.spent["bilevel"]["rounds"] == (3 if raises else 6) * 3


def test_a_bilevel_run_that_failed_is_paid(monkeypatch):
    def failing(problem, clients, algorithm, **options):
        found = solve(problem, clients, algorithm, **options)
        return dataclasses.replace(found, ending=Ending("failed", "the loss grew."))

    monkeypatch.setattr(contest_module, "solve", failing)
    found = fb.guarded(Regularisation(**SMALL), num_rounds=3, num_folds=2, rivals=["l2"])
    assert (found.single, sorted(found.contenders)) == ("l2", ["l2"])
    assert found.spent["bilevel"]["rounds"] == 9  # once with all samples, and in two folds
    assert found.costs["rounds"] == found.plain.costs["rounds"] + 9


def test_a_run_that_cannot_hold_x_has_no_row_of_its_own(monkeypatch):
    with pytest.raises(SettingError, match="few_shot_episodes runs adasimfbo, which cannot hold x: leave this row"):
        contest_module.unlearned(FewShotEpisodes(), {"num_rounds": 2}, None)

    def failing(problem, clients, algorithm, **options):
        raise NonFiniteError("client 0 returned NaN.")

    monkeypatch.setattr(contest_module, "solve", failing)
    with pytest.raises(SettingError, match="the run of regularisation that holds x failed: use more rounds"):
        contest_module.unlearned(Regularisation(**SMALL), {"num_rounds": 2}, ["l2"])


@pytest.mark.parametrize("raises", [True, False])
def test_a_run_that_holds_x_has_no_row_if_its_refit_failed(monkeypatch, raises):
    calls = []

    def failing(problem, clients, algorithm, **options):
        calls.append(algorithm)
        if len(calls) == 1:
            return solve(problem, clients, algorithm, **options)
        if raises:
            raise NonFiniteError("client 0 returned NaN.")
        return dataclasses.replace(solve(problem, clients, algorithm, **options), ending=Ending("failed", "it grew."))

    monkeypatch.setattr(contest_module, "solve", failing)
    with pytest.raises(SettingError, match="the run of regularisation that holds x failed: use more rounds"):
        contest_module.unlearned(Regularisation(**SMALL), {"num_rounds": 2}, ["l2"])
    assert len(calls) == 2


def test_what_cannot_be_guarded_is_refused():
    with pytest.raises(SettingError, match="every rival failed in some fold"):
        guarded_module._chosen({}, ({}, {}))
    with pytest.raises(SettingError, match="task is 'regularisation', expected a task with its settings"):
        fb.guarded("regularisation", num_rounds=2)
    with pytest.raises(SettingError, match="quadratic has no rival that ends well: use solve"):
        fb.guarded(Quadratic(), num_rounds=2)
    task = Regularisation(**SMALL)
    with pytest.raises(UnknownNameError, match="no rival of regularisation named 'l3'"):
        fb.guarded(task, num_rounds=2, rivals=["l3"])
    built = task.build()
    one = [{**client, "val": {name: value[:1] for name, value in client["val"].items()}} for client in built.clients]
    with pytest.raises(SettingError, match="no client has two validation samples, so that none can be left out"):
        fb.guarded(task.with_built(Built(built.problem, one)), num_rounds=2)
    assert isinstance(task, Task)


@pytest.mark.parametrize("call", [1, 2])
def test_ctrl_c_in_the_bilevel_run_or_its_refit_leaves_no_answer(monkeypatch, call):
    calls = []

    def stopped(*given, **options):
        calls.append(given)
        result = solve(*given, **options)
        return dataclasses.replace(result, ending=Ending("interrupted")) if len(calls) == call else result

    monkeypatch.setattr(contest_module, "solve", stopped)
    with pytest.raises(KeyboardInterrupt):
        fb.guarded(Regularisation(**SMALL), num_rounds=5, rivals=["l2"])
    assert len(calls) == call
