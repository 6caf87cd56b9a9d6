"""Sources: good ones get the weight; losses of the plain ways against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel import plots
from fedbilevel.errors import ProblemError, SettingError
from fedbilevel.oracle.population import Population
from fedbilevel.studies import sources
from fedbilevel.studies.guarded import guarded
from fedbilevel.studies.sources import _dealt, _halved, _Sources
from fedbilevel.tasks.task import Built


def source(num: int, wrong: float, seed: int):
    draw = np.random.default_rng(seed)
    rows = draw.standard_normal((num, 12))
    label = (rows @ np.linspace(-1, 1, 12) > 0) ^ (draw.random(num) < wrong)
    return {"input": 3 + 10 * rows, "label": label.astype(int)}


@pytest.fixture(scope="module")
def found():
    tables = {"good": source(150, 0.0, 0), "fair": source(250, 0.3, 1), "bad": source(150, 0.9, 2)}
    return fb.mix_sources(tables, source(60, 0.0, 3), num_rounds=60)


def test_weights_follow_the_quality_of_sources(found):
    assert [row["weight"] for row in found.table()] == sorted(found.weights.values(), reverse=True)
    assert (found.table()[0]["source"], found.table()[0]["samples"]) == ("good", 150)
    assert sum(found.weights.values()) == pytest.approx(1)
    assert found.weights["bad"] < 0.1


def test_the_model_predicts_the_target_and_the_better_side_is_the_answer(found):
    test = source(400, 0.0, 9)
    assert np.mean(found.predict(test["input"]) == test["label"]) > 0.93
    better = found.guard.difference < -found.guard.error
    assert found.guard.answer == ("bilevel" if better else found.guard.rival)
    assert found.guard.sentence in repr(found)
    html = found._repr_html_()
    assert "Weights of 3 sources" in html
    assert "held-out samples" in html
    if plots.available():
        [axes] = found.plot().axes
        assert [bar.get_width() for bar in axes.patches] == [row["weight"] for row in found.table()]


def test_losses_of_the_plain_ways_are_those_of_numpy():
    """Clients have 4 and 10 samples of their source, and 3 target samples, of which 1 is trained on."""
    draw, task = np.random.default_rng(4), _Sources(l2=0.2)
    some = lambda num: {"input": draw.standard_normal((num, 2)), "label": draw.integers(0, 3, num)}
    clients = [{"train": {**some(num), "source": np.full(num, i)}, "val": some(3)} for i, num in enumerate((4, 10))]
    rivals = task.with_built(Built(task.problem_of(2, 3, 2), clients)).rivals()
    y = {"weight": draw.standard_normal((3, 2)), "bias": draw.standard_normal(3)}

    def losses(fields, rows=slice(None)):
        z = fields["input"][rows] @ y["weight"].T + y["bias"]
        return np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), fields["label"][rows]]

    own = [losses(client["train"]) for client in clients]
    goal = np.concatenate([losses(client["val"], slice(0, 1)) for client in clients])
    expected = {
        ("uniform", "sources"): np.mean([one.mean() for one in own]),
        ("uniform", "sources and target"): np.mean([*(one.mean() for one in own), goal.mean()]),
        ("proportional", "sources"): np.concatenate(own).mean(),
        ("proportional", "sources and target"): np.concatenate([*own, goal]).mean(),
        ("target", "target"): goal.mean(),
    }
    norm = 0.1 * sum((leaf**2).sum() for leaf in y.values())
    flat = torch.as_tensor(np.concatenate([y["weight"].ravel(), y["bias"]]))
    for (name, label), loss in expected.items():
        way = rivals[name].ways[label]
        population = Population(way.problem, way.clients, dtype=torch.float64)
        assert population.measure(population.x0, flat)["lower_loss"] == pytest.approx(loss + norm, rel=1e-6), (
            name,
            label,
        )


def test_a_target_that_is_sorted_by_class_is_not_split_by_class():
    num, label = 4, np.arange(96) // 48
    goal = {"input": np.arange(96.0)[:, None], "label": label}
    parts = _dealt(goal, num, 0)
    assert sorted(np.concatenate([part["input"][:, 0] for part in parts])) == list(range(96))
    for i, part in enumerate(parts):
        assert (part["label"] == label[part["input"][:, 0].astype(int)]).all()
        train = {"input": np.zeros((3, 1)), "label": np.zeros(3, int), "source": np.full(3, i)}
        half, sizes = _halved({"train": train, "val": part})
        assert sizes == (3, 12)
        for found in (half["train"]["label"][3:], half["val"]["label"]):
            assert {*found.tolist()} == {0, 1}


def test_wrong_input_is_refused():
    one = source(8, 0.0, 0)
    with pytest.raises(SettingError, match="there are 1 sources, expected at least two"):
        fb.mix_sources([one], one)
    with pytest.raises(SettingError, match="the target has 7 samples, expected at least 8: four per source"):
        fb.mix_sources([one, one], {name: value[:7] for name, value in one.items()})
    with pytest.raises(ProblemError, match="the target has no rows 'input' and whole numbers 'label'"):
        fb.mix_sources([one, one], {"input": one["input"]})
    narrow = {**one, "input": one["input"][:, :2]}
    with pytest.raises(ProblemError, match="different numbers of columns: give the same features"):
        fb.mix_sources([one, one], narrow)
    with pytest.raises(ProblemError, match="the source 'b' has the label -1: number the classes from 0"):
        fb.mix_sources({"a": one, "b": {**one, "label": one["label"] - 1}}, one)
    with pytest.raises(SettingError, match="bilevel is False, but it gives the weights: leave it out"):
        fb.mix_sources([one, one], one, bilevel=False)


def test_without_a_bilevel_run_that_ends_well_there_are_no_weights(monkeypatch):
    monkeypatch.setattr(sources, "guarded", lambda task, **settings: guarded(task, **settings, bilevel=False))
    with pytest.raises(ProblemError, match="the bilevel run failed, so there are no weights"):
        fb.mix_sources([source(8, 0.0, 0), source(8, 0.0, 1)], source(8, 0.0, 2), num_rounds=2, num_folds=2)
