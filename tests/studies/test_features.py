"""Features: real ones are stable and noise is not; the fitted object against its parts."""

from __future__ import annotations

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import plots
from fedbilevel.algorithms.self_tuned import SelfTuned
from fedbilevel.errors import ProblemError, SettingError
from support.stops import ctrl_c

SIGNAL = np.array([2.0, -1.5, 1.0])


def clients(num: int = 120, *, noise: int = 9, val: bool = True, seed: int = 0):
    """Clients whose label depends on the first three of twelve features, in units of their own."""
    draw, found = np.random.default_rng(seed), []
    for i in range(3):
        parts = {}
        for role in ("train", "val") if val else ("train",):
            rows = draw.standard_normal((num, 3 + noise))
            chance = 1 / (1 + np.exp(-(rows[:, :3] @ SIGNAL + 0.3 * i)))
            units = np.array([1e-3, 1.0, 1e3, *np.ones(noise)])
            parts[role] = {"input": 5.0 + rows * units, "label": (draw.random(num) < chance).astype(int)}
        found.append(parts)
    return found


@pytest.fixture(scope="module")
def found():
    return fb.select_features(clients(), num_repeats=4, num_rounds=40)


def test_real_features_are_stable_and_noise_is_not(found):
    assert sorted(found.chosen.tolist()) == [0, 1, 2]
    assert found.stability[:3].tolist() == [1.0] * 3
    assert found.stability[3:].max() < 0.8
    assert np.argsort(-found.importance)[:3].tolist() == [0, 1, 2]  # by the size of the coefficients


def test_the_model_uses_the_selected_features_alone(found):
    [test] = clients(400, seed=5)[:1]
    rows, label = test["train"]["input"], test["train"]["label"]
    assert np.mean(found.predict(rows) == label) > 0.8
    other = rows.copy()
    other[:, 3:] = 1e6
    assert np.array_equal(found.predict_probability(other), found.predict_probability(rows))
    y = found.guard.result.y
    scores = ((rows - found.centre) / found.scale)[:, :3] @ y["weight"].double().numpy() + float(y["bias"])
    np.testing.assert_allclose(found.predict_probability(rows), 1 / (1 + np.exp(-scores)), rtol=1e-9)


def test_tables_and_displays_show_the_ranking(found):
    rows = found.table(4)
    assert [row["selected"] for row in rows] == [True, True, True, False]
    assert rows[0]["stability"] == 1.0
    assert found.selected == [row["feature"] for row in rows[:3]]
    assert "3 of 12 features selected; the answer is" in repr(found)
    assert "3 of 12 features selected" in found._repr_html_()
    assert "feature 0" in found._repr_html_()
    if plots.available():
        [axes] = found.plot(most=5).axes
        assert [bar.get_width() for bar in axes.patches] == [row["stability"] for row in found.table(5)]


def test_nothing_is_selected_where_labels_are_chance_and_the_prior_remains():
    draw, data = np.random.default_rng(1), clients(60, val=False)
    for client in data:
        client["train"]["label"] = (draw.random(60) < 0.3).astype(int)
    found = fb.select_features(data, num_repeats=5, num_rounds=20, threshold=1.0, names=list("abcdefghijkl"))
    assert found.selected == []
    assert repr(found) == "<0 of 12 features selected>"
    assert found.predict(np.ones((2, 12))).tolist() == [0, 0]
    train = np.concatenate([client["train"]["label"] for client in data])
    assert found.prior == pytest.approx(train.mean(), abs=0.1)
    assert found.names[0] == "a"


def test_wrong_input_is_refused():
    good = clients(10)
    with pytest.raises(SettingError, match="names is 'abc', expected 12 names, one per column"):
        fb.select_features(good, names="abc")
    with pytest.raises(SettingError, match="threshold is 0, expected a share of repeats"):
        fb.select_features(good, threshold=0)
    with pytest.raises(ProblemError, match="client 0 has no input and label in 'train'"):
        fb.select_features([{"train": {"input": np.ones((3, 2))}}])
    with pytest.raises(ProblemError, match="client 0 has labels other than 0 and 1"):
        fb.select_features([{"train": {"input": np.ones((3, 2)), "label": np.arange(3)}}])


def test_ctrl_c_in_a_repeat_leaves_no_ranking(monkeypatch):
    ctrl_c(monkeypatch, SelfTuned)
    with pytest.raises(KeyboardInterrupt):
        fb.select_features(clients(), num_repeats=1, num_rounds=10)
