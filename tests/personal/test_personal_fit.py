"""`fb.personalise`: the choice, the figures, the bytes, and heads at their minimum."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel import plots
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.self_tuned import SelfTuned
from fedbilevel.errors import ProblemError, ProblemWarning, SettingError
from fedbilevel.personal.fit import _head, _prepared, strengths
from fedbilevel.personal.outcome import Personalised, Scale
from fedbilevel.problem.problem import Scopes
from fedbilevel.tasks.hyper_representation import HyperRepresentation
from fedbilevel.tasks.task import Shapes
from support.stops import ctrl_c

ROUNDS = 20


def clients(shift: Any = "labels", **settings: Any) -> list[dict[str, Any]]:
    built = fb.tasks.Personalisation(num_clients=6, share=0.3, shift=shift, **settings).build()
    return [{role: own for role, own in client.items() if role in ("train", "test")} for client in built.clients]


@cache
def fitted() -> Personalised:
    return fb.personalise(clients(), num_rounds=ROUNDS, num_hidden=16, names=list("abcdef"))


def accuracy(found: Personalised, model: str) -> float:
    rows = found.table()
    return float(np.average([row[model] for row in rows], weights=[row["samples"] for row in rows]))


def test_where_labels_mean_different_things_own_heads_are_chosen_and_are_far_better() -> None:
    found = fitted()
    assert found.chosen == "own"
    assert found.gain > 0
    assert accuracy(found, "own") > accuracy(found, "shared") + 0.15
    assert str(found) == found.sentence
    assert found.sentence.startswith("own heads are used: on samples that no step has seen")


def test_where_own_heads_lower_the_likelihood_the_shared_network_is_used() -> None:
    found = dataclasses.replace(fitted(), gain=-0.1)
    image = clients()[0]["test"]["image"]
    assert found.chosen == "shared"
    assert "the shared network is used" in found.sentence
    assert np.array_equal(found.predict(0, image), found.predict(0, image, model="shared"))
    assert not np.array_equal(found.predict(0, image), found.predict(0, image, model="own"))


@pytest.mark.parametrize(
    ("gain", "error", "chosen"), [(0.1, 0.049, "own"), (0.1, 0.051, "shared"), (0.0, 0.0, "shared")]
)
def test_own_heads_need_a_gain_of_two_standard_errors(gain: float, error: float, chosen: str) -> None:
    found = dataclasses.replace(fitted(), gain=gain, error=error)
    assert found.chosen == chosen
    assert f"by {gain:+.3f} (standard error {error:.3f})" in found.sentence


def test_the_gain_is_the_mean_over_judging_samples_with_its_standard_error() -> None:
    """Heads of the outcome have used the judge's samples, so an outcome that kept the shared network is looked at."""
    rng = np.random.default_rng(0)
    data = [{"train": {"image": rng.standard_normal((40, 5)), "label": np.arange(40) % 2}} for _ in range(4)]
    found = fb.personalise(data, num_rounds=ROUNDS, num_hidden=4)
    assert found.chosen == "shared"
    gains = []
    for i, judged in enumerate(found.judged):
        image, label = torch.as_tensor(judged["image"]), torch.as_tensor(judged["label"])
        losses = [
            torch.nn.functional.cross_entropy(found.score(weights, {"image": image}), label, reduction="none")
            for weights in (found.shared, {**found.body, **found.heads[i]})
        ]
        gains.append((losses[0] - losses[1]).double().numpy())
    every = np.concatenate(gains)
    assert found.gain == pytest.approx(every.mean(), abs=1e-5)
    assert found.error == pytest.approx(every.std(ddof=1) / np.sqrt(len(every)), rel=1e-3)


def test_judging_samples_are_in_no_other_part_and_every_sample_is_in_one() -> None:
    for split, one in zip(_prepared(clients(), 3)[0], clients(), strict=True):
        parts = [[row.tobytes() for row in part["image"]] for part in split]
        assert not set(parts[2]) & {*parts[0], *parts[1]}
        assert sum(map(len, parts)) == len(one["train"]["label"])


def numbered(num: int, shift: float = 0.0) -> dict[str, Any]:
    """Every sample has a label of its own."""
    return {"train": {"image": shift + np.arange(3.0 * num).reshape(num, 3) ** 2, "label": np.arange(num)}}


def test_the_scale_is_that_of_samples_that_do_not_judge() -> None:
    splits, _, scale = _prepared([numbered(30), numbered(40, 5.0)], 0)
    rows = np.concatenate([split.train["image"] for split in splits]).astype(float)
    np.testing.assert_allclose(rows.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(rows.std(0), 1, rtol=1e-5)
    given = numbered(40, 5.0)["train"]["image"]
    np.testing.assert_allclose(splits[1].judge["image"], scale(given)[splits[1].judge["label"]], rtol=1e-6)


def test_the_parts_of_a_client_do_not_depend_on_other_clients() -> None:
    one, two = (_prepared([numbered(num), numbered(40)], 0)[0] for num in (30, 50))
    for part, other in zip(one[1], two[1], strict=True):
        assert part["label"].tolist() == other["label"].tolist()
    assert one[1].judge["label"].tolist() != _prepared([numbered(40)], 0)[0][0].judge["label"].tolist()


def test_the_table_counts_predictions_of_both_models_on_the_test_samples() -> None:
    found, data = fitted(), clients()
    for i, row in enumerate(found.table()):
        test = data[i]["test"]
        assert (row["client"], row["samples"]) == ("abcdef"[i], len(test["label"]))
        for model in ("own", "shared"):
            right = found.predict("abcdef"[i], test["image"], model=model) == test["label"]
            assert row[model] == pytest.approx(right.mean())
        assert np.array_equal(found.predict(i, test["image"]), found.predict(i, test["image"], model="own"))


@pytest.mark.parametrize("num_rounds", [20, 50])
def test_all_messages_together_are_at_most_three_times_those_of_fedavg(num_rounds: int) -> None:
    data = clients()
    found = fb.personalise(data, num_rounds=num_rounds, num_hidden=8)
    network = HyperRepresentation(num_hidden=8, lower="local")
    own = network.problem(Shapes.of({"train": data[0]["train"], "val": data[0]["train"]}, 10))
    whole = network.classified(
        lambda x, y, batch: network.score(64)(y, batch), {"x": torch.zeros(1)}, {**own.x0, **own.y0}, Scopes(), (), None
    )
    both = [{"train": one["train"], "val": one["train"]} for one in data]
    with pytest.warns(ProblemWarning, match="hold the same"):
        plain = fb.solve(whole, both, FedAvg(), num_iterations=num_rounds, residuals=False)
    assert plain.final["megabytes"] < found.megabytes <= 3 * plain.final["megabytes"]
    assert found.megabytes >= sum(run.final["megabytes"] for run in found.runs)


def heads_and_rows() -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    draw = torch.Generator().manual_seed(0)
    noise = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)
    parts = [{"row": noise(num, 4), "label": torch.arange(num) % 3} for num in (20, 10)]
    return {"head.weight": noise(3, 4), "head.bias": noise(3)}, parts


def test_a_head_is_fitted_to_the_minimum_of_all_its_samples_near_the_shared_head() -> None:
    centre, parts = heads_and_rows()
    found = _head(centre, 0.3, parts)
    rows, label = (np.concatenate([part[name].numpy() for part in parts]) for name in ("row", "label"))
    z = rows @ found["head.weight"].numpy().T + found["head.bias"].numpy()
    residual = (np.exp(z) / np.exp(z).sum(1, keepdims=True) - np.eye(3)[label]) / len(z)
    away = {name: 0.3 * (leaf - centre[name]).numpy() for name, leaf in found.items()}
    np.testing.assert_allclose(residual.T @ rows + away["head.weight"], 0, atol=1e-5)
    np.testing.assert_allclose(residual.sum(0) + away["head.bias"], 0, atol=1e-5)


def test_the_strength_is_learned_by_an_exact_hypergradient() -> None:
    centre, _ = heads_and_rows()
    data = [{role: heads_and_rows()[1][0] for role in ("train", "val")}]
    data[0]["val"] = heads_and_rows()[1][1]
    assert fb.check_problem(strengths(centre), data, show=False).ok
    assert fb.check_hypergradient(strengths(centre), data, estimators=["cg"], show=False).ok


def test_the_scale_is_that_of_all_training_samples_together() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(i, 1 + i, (5 + i, 3)) for i in range(3)]
    pooled = np.concatenate(parts)
    columns, one = Scale.of(parts, by_column=True), Scale.of(parts, by_column=False)
    np.testing.assert_allclose(columns.mean, pooled.mean(0), rtol=1e-6)
    np.testing.assert_allclose(columns.spread, pooled.std(0), rtol=1e-6)
    np.testing.assert_allclose([one.mean, one.spread], [pooled.mean(), pooled.std()], rtol=1e-6)
    assert Scale.of([np.ones((4, 2))], by_column=True).spread.tolist() == [1, 1]


def test_images_with_rows_and_columns_validation_samples_and_clients_without_test_samples() -> None:
    data = [
        {"train": {"image": one["train"]["image"].reshape(-1, 8, 8), "label": one["train"]["label"]},
         "val": {"image": one["test"]["image"].reshape(-1, 8, 8), "label": one["test"]["label"]}}
        for one in clients()
    ]  # fmt: skip
    found = fb.personalise(data, num_rounds=ROUNDS, model="cnn", num_hidden=8, batch_size=16, cohort=0.7)
    assert found.scale.mean.ndim == 0
    assert found.predict(1, data[1]["val"]["image"]).shape == data[1]["val"]["label"].shape
    measured = [row["own"] is not None for row in found.table()]
    assert measured == [found.chosen == "shared"] * 6  # own heads have used all other samples


def test_the_same_seed_gives_the_same_models() -> None:
    again = fb.personalise(clients(), num_rounds=ROUNDS, num_hidden=16)
    for one, two in zip(fitted().heads, again.heads, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_validation_samples_that_are_the_training_samples_judge_nothing() -> None:
    same = [{**one, "val": one["train"]} for one in clients()]
    found = fb.personalise(same, num_rounds=ROUNDS, num_hidden=16)
    assert found.gain == fitted().gain
    for judged, one in zip(found.judged, same, strict=True):
        assert len(judged["label"]) < 0.2 * len(one["train"]["label"])


def test_a_picture_shows_every_client(tmp_path: Any) -> None:
    if not plots.available():
        pytest.skip("matplotlib is not installed")
    [axes] = fitted().plot(tmp_path / "clients.png").axes
    assert (tmp_path / "clients.png").stat().st_size > 1000
    assert axes.collections[0].get_offsets().tolist() == [[row["shared"], row["own"]] for row in fitted().table()]
    bare = dataclasses.replace(fitted(), tested=[None] * 6)
    with pytest.raises(SettingError, match="no client has test samples"):
        bare.plot(tmp_path / "none.png")


def test_a_notebook_shows_both_accuracies_of_every_client_and_the_choice() -> None:
    found = dataclasses.replace(fitted(), names=["<a>", *"bcdef"], tested=[None, *fitted().tested[1:]])
    html = found._repr_html_()
    assert "Models of 6 clients" in html
    assert found.sentence[1:] in html
    assert "<tr><td" in html
    assert "&lt;a&gt;" in html
    assert html.count(">-<") == 2  # nothing measures client a
    for row in found.table()[1:]:
        assert f">{row['shared']:.1%}<" in html
        assert f">{row['own']:.1%}<" in html
    many = dataclasses.replace(
        found, names=[str(i) for i in range(36)], heads=[*found.heads] * 6, tested=[*found.tested] * 6,
        judged=[*found.judged] * 6,
    )  # fmt: skip
    assert "The first 30 clients are shown." in many._repr_html_()


def test_wrong_inputs_are_clear_errors() -> None:
    with pytest.raises(SettingError, match="num_rounds is 5, expected a whole number, at least 20"):
        fb.personalise(clients(), num_rounds=5)
    with pytest.raises(SettingError, match="num_rounds is 'x', expected a whole number"):
        fb.personalise(clients(), num_rounds="x")  # type: ignore[arg-type]
    for names, text in ((["a", "b"], "6 names, one"), ("abcdef", "6 names, one"), (list("abcdea"), "'a' more than")):
        with pytest.raises(SettingError, match=text):
            fb.personalise(clients(), names=names)
    with pytest.raises(ProblemError, match="there are no clients"):
        fb.personalise([])
    with pytest.raises(ProblemError, match="client 0 has the fields image in 'train', expected image and label"):
        fb.personalise([{"train": {"image": np.ones((9, 2))}}])
    few = {"image": np.ones((7, 2)), "label": np.arange(7)}
    for some in ({"train": few}, {"train": few, "val": few}):
        with pytest.raises(ProblemError, match="client 0 has fewer than 8 samples"):
            fb.personalise([some])
    part = lambda label: [{"train": {"image": np.ones((9, 2)), "label": label}}]
    with pytest.raises(ProblemError, match="labels of type float64 in 'train', expected one whole number per sample"):
        fb.personalise(part(np.linspace(0.9, 1.7, 9)))
    with pytest.raises(ProblemError, match="client 0 has the label 3 in 'train', expected whole numbers from 0 to 2"):
        fb.personalise(part(np.arange(9)), num_classes=3)
    for place in range(9):  # no sample is said to be in a part that users do not know
        with pytest.raises(ProblemError, match="client 0 has the label 3 in 'train', expected whole numbers from 0"):
            fb.personalise(part(np.where(np.arange(9) == place, 3, np.arange(9) % 2)), num_classes=3)
    [tested] = part(np.arange(9) % 3)
    with pytest.raises(ProblemError, match="client 0 has the label 3 in 'test', expected whole numbers from 0 to 2"):
        fb.personalise([{**tested, "test": {"image": np.ones((9, 2)), "label": np.arange(9) % 4}}], num_classes=3)
    with pytest.raises(ProblemError, match=r"from 1 to 3, .* subtract 1, or say how many classes there are \(num_cl"):
        fb.personalise(part(np.arange(9) % 3 + 1))
    with pytest.raises(SettingError, match="num_classes is 'x', expected a whole number"):
        fb.personalise(part(np.arange(9)), num_classes="x")  # type: ignore[arg-type]
    assert repr(fitted()) == f"<models of 6 clients; {str(fitted())[:-1]}>"
    with pytest.raises(SettingError, match="model is 'mine', expected 'own' or 'shared'"):
        fitted().predict(0, np.zeros((1, 64)), model="mine")
    with pytest.raises(SettingError, match="the client is 'z', expected a number below 6 or one of the names"):
        fitted().predict("z", np.zeros((1, 64)))


@pytest.mark.parametrize("kind", [FedAvg, SelfTuned])
def test_ctrl_c_in_either_run_leaves_no_models(monkeypatch: Any, kind: Any) -> None:
    ctrl_c(monkeypatch, kind)
    with pytest.raises(KeyboardInterrupt):
        fb.personalise(clients(), num_rounds=ROUNDS, num_hidden=16)
