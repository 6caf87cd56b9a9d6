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


def people(num: int, angle: float, seed: int):
    """Rows whose labels follow a rule of their group."""
    rows = np.random.default_rng(seed).standard_normal((num, 4)).astype(np.float32)
    return {"input": rows, "label": (rows @ [np.cos(angle), np.sin(angle), 0.3, 0.0] > 0).astype(int)}


ANGLES = (0.0, 0.15, 1.4)  # the third group differs from the other two


def worst(fairness: float) -> tuple[float, float]:
    """The largest loss of a group, on its target samples and on new ones, with learned weights."""
    clients = [
        {"train": {**people(60, angle, i), "source": np.full(60, i)}, "val": people(60, angle, 10 + i)}
        for i, angle in enumerate(ANGLES)
    ]
    problem = _Sources(l2=0.01, kl=0.0, fairness=fairness).problem_of(3, 2, 4)
    y = fb.solve(problem, clients, "self_tuned", num_rounds=40, measure_every=40, residuals=False).y

    def loss(own):
        z = own["input"] @ y["weight"].numpy().T + y["bias"].numpy()
        return np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), own["label"]])

    new = [people(1000, angle, 20 + i) for i, angle in enumerate(ANGLES)]
    return max(loss(client["val"]) for client in clients), max(map(loss, new))


def test_with_fairness_the_loss_of_the_worst_client_falls():
    mean, fair = worst(0.0), worst(4.0)
    assert fair[0] < mean[0] - 0.05
    assert fair[1] < mean[1] - 0.05


def test_the_upper_loss_of_a_fair_client_is_a_power_of_its_mean_and_judges_too():
    clients = [
        {"train": {**people(9, angle, i), "source": np.full(9, i)}, "val": people(5 + i, angle, i)}
        for i, angle in enumerate(ANGLES)
    ]
    task = _Sources(fairness=2.0, kl=0.3)
    y = np.random.default_rng(1).standard_normal(10)
    means = []
    for client in clients:
        z = client["val"]["input"] @ y[:8].reshape(2, 4).T + y[8:]
        means.append(np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), client["val"]["label"]]))
    x, expected = torch.tensor([0.5, -0.5, 0.0]), np.mean(np.array(means) ** 3) / 3
    w = torch.softmax(x, 0).double()
    for problem, kl in (
        (task.problem_of(3, 2, 4), 0.3 * float((w * (3 * w).log()).sum())),
        (task.judged(task.problem_of(3, 2, 4)), 0.0),
    ):
        population = Population(problem, clients, dtype=torch.float64)
        found = population.measure(x.double(), torch.as_tensor(y))["upper_loss"]
        assert found == pytest.approx(expected + kl, rel=1e-6)


def test_targets_by_name_or_in_order_stay_with_their_clients_and_the_model_has_a_loss(monkeypatch):
    seen = []

    def quick(task, **settings):
        seen.append(task)
        return guarded(task, **settings)

    monkeypatch.setattr(sources, "guarded", quick)
    tables = {"a": people(12, 0.0, 0), "b": people(16, 1.0, 1)}
    goals = {"b": people(8, 1.0, 2), "a": people(8, 0.0, 3)}
    how = {"fairness": 1.0, "num_rounds": 2, "num_folds": 2}
    found = fb.mix_sources(tables, goals, **how)
    fb.mix_sources(tables, [goals["a"], goals["b"]], **how)
    for task in seen:
        clients = task.build().clients
        assert task.fairness == 1.0
        for client, goal in zip(clients, (goals["a"], goals["b"]), strict=True):
            rows = client["val"]["input"] * found.scale + found.centre
            np.testing.assert_allclose(rows[np.argsort(rows[:, 0])], goal["input"][np.argsort(goal["input"][:, 0])],
                                       atol=1e-5)  # fmt: skip
    z = (goals["a"]["input"] - found.centre) / found.scale
    z = z @ found.guard.result.y["weight"].double().numpy().T + found.guard.result.y["bias"].double().numpy()
    loss = np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(8), goals["a"]["label"]])
    assert found.loss(goals["a"]) == pytest.approx(loss, rel=1e-6)


def test_targets_that_do_not_fit_are_refused():
    one = source(8, 0.0, 0)
    with pytest.raises(SettingError, match=r"^fairness is 1\.0, but all clients have the same target"):
        fb.mix_sources([one, one], one, fairness=1.0)
    with pytest.raises(SettingError, match="the targets are named a, expected the names of the sources, a, b"):
        fb.mix_sources({"a": one, "b": one}, {"a": one})
    with pytest.raises(SettingError, match="target is 3 targets, expected one table, or one per source, which are 2"):
        fb.mix_sources([one, one], [one, one, one])
    with pytest.raises(SettingError, match="target is of type int, expected one table"):
        fb.mix_sources([one, one], 3)
    with pytest.raises(SettingError, match="the target of 'source 1' has 3 samples, expected at least 4: give more"):
        fb.mix_sources([one, one], [one, {name: value[:3] for name, value in one.items()}])
    with pytest.raises(SettingError, match="'source 0' has 8 samples, expected at least 16, four in every fold"):
        fb.mix_sources([one, one], [one, one], fairness=1.0)


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
