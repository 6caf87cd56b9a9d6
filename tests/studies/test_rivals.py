"""Rivals of tasks: choice by validation samples, costs of all runs, and rows beside algorithms."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import fedbilevel as fb
from fedbilevel.cli import main
from fedbilevel.errors import ProblemError, SettingError
from fedbilevel.report.page_data import read
from fedbilevel.studies.rivals import run_rival
from fedbilevel.tasks.regularisation import Regularisation
from fedbilevel.tasks.rival import Rival, Way, with_validation
from fedbilevel.tasks.task import Built

TASK = Regularisation(num_train=12, num_val=8, num_test=20)


def shifted(places: dict[str, float], clients: list[dict]) -> dict[str, Way]:
    """Ways whose y ends at a given place, while validation samples ask for the mean of b."""
    problem = lambda place: fb.Problem(
        upper=lambda x, y, batch: (y["w"] - batch["b"]) ** 2,
        lower=lambda x, y, batch: (y["w"] - place - 0 * batch["b"]) ** 2,
        x0={"nothing": torch.zeros(1)},
        y0={"w": torch.zeros(())},
    )
    return {label: Way(problem(place), clients) for label, place in places.items()}


CLIENTS = [{role: {"b": np.array([1.0, 3.0 + i])} for role in ("train", "val")} for i in range(2)]


def test_validation_samples_choose_and_all_runs_are_paid():
    """The upper loss of a place p is mean (p - b)^2, lowest at the mean 2.25."""
    ways = shifted({"far": -1.0, "near": 2.0, "beyond": 5.0}, CLIENTS)
    found = run_rival(Rival("a place", ways), num_rounds=30, dtype=torch.float64)
    expected = {
        label: np.mean([(place - b) ** 2 for b in (1, 3, 1, 4)])
        for label, place in (("far", -1), ("near", 2), ("beyond", 5))
    }
    assert {label: pytest.approx(loss, abs=1e-6) for label, loss in found.tried.items()} == expected
    assert found.chosen == "near"
    assert float(found.result.y["w"]) == pytest.approx(2.0, abs=1e-6)
    assert found.figures["upper_loss"] == pytest.approx(expected["near"], abs=1e-6)
    single = run_rival(Rival("one", {"near": ways["near"]}), num_rounds=30, dtype=torch.float64)
    assert (found.costs["rounds"], single.costs["rounds"]) == (90, 30)
    assert found.costs["megabytes"] == pytest.approx(3 * single.costs["megabytes"])
    assert found.failed is None


def test_a_refit_is_the_answer_and_is_paid_too():
    ways = shifted({"far": -1.0, "near": 2.0}, CLIENTS)
    again = shifted({"near": 2.5}, CLIENTS)
    found = run_rival(Rival("a place", ways, again.__getitem__), num_rounds=30, dtype=torch.float64)
    assert (found.chosen, found.costs["rounds"]) == ("near", 90)
    assert float(found.result.y["w"]) == pytest.approx(2.5, abs=1e-6)
    alone = run_rival(Rival("one", {"near": ways["near"]}, again.__getitem__), num_rounds=30, dtype=torch.float64)
    assert (alone.costs["rounds"], alone.tried) == (30, {})  # a single way needs no choice


def test_a_way_that_diverges_is_not_chosen():
    [wild] = shifted({"wild": 2.25}, CLIENTS).values()
    wild = wild._replace(algorithm="fedavg", settings={"lr_lower": 1e30, "num_local_steps": 1, "recover": False})
    ways = {"wild": wild, **shifted({"calm": -9.0}, CLIENTS)}
    found = run_rival(Rival("a place", ways), num_rounds=20)
    assert (found.chosen, found.tried["wild"], found.failed) == ("calm", float("inf"), None)
    lost = run_rival(Rival("lost", {"wild": wild}), num_rounds=20)
    assert lost.failed is not None
    assert lost.figures == {}
    with pytest.raises(ProblemError, match="the rival 'empty' has no way: give at least one run"):
        run_rival(Rival("empty", {}), num_rounds=3)


def test_validation_samples_join_the_training_samples_of_their_client():
    clients = [
        {"train": {"a": np.arange(i + 2)}, "val": {"a": np.array([9])}, "test": {"a": np.ones(1)}} for i in (0, 1)
    ]
    joined = with_validation(clients)
    assert [one["train"]["a"].tolist() for one in joined] == [[0, 1, 9], [0, 1, 2, 9]]
    assert [one["val"]["a"].tolist() for one in joined] == [[9], [9]]
    assert [one["train"]["a"].tolist() for one in clients] == [[0, 1], [0, 1, 2]]


def test_rivals_of_a_task_on_other_data_use_these_data():
    built = TASK.build()
    few = [{**client, "val": {name: value[:3] for name, value in client["val"].items()}} for client in built.clients]
    own = TASK.with_built(Built(built.problem, few))
    [way] = own.rivals()["l2"].ways.values()
    assert [len(client["train"]["label"]) for client in way.clients] == [15] * 3
    assert len(TASK.build().clients[0]["val"]["label"]) == 8


def test_comparison_has_a_row_for_every_rival_which_a_report_can_read(tmp_path):
    found = fb.compare(TASK, ["fedbio"], num_rounds=8, repetitions=2, record=tmp_path / "c", baseline=False)
    assert [(one.name, one.num_runs) for one in found.outcomes] == [(name, 2) for name in ("fedbio", *TASK.rivals())]
    rounds = {one.name: one.total["rounds"].mean for one in found.outcomes}
    assert rounds == {"fedbio": 8, "l2": 8, "l2_grid": 64, "l1_grid": 64, "screened": 104}  # 7 or 12 ways and a refit
    saved = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert {one["algorithm"]: "chosen" in one for one in saved["runs"]} == {
        "fedbio": False, "l2": True, "l2_grid": True, "l1_grid": True, "screened": True,
    }  # fmt: skip
    page = read([tmp_path / "c"])
    assert (len(page["curves"]), len(page["runs"])) == (5, 10)  # a choice by repetition does not split a curve
    assert {run["algorithm"] for run in page["runs"]} == set(rounds)
    by_hand = run_rival(TASK.repeated(1).rivals()["l2"], num_rounds=8, seed=1)
    last = [one for one in found.runs if one["algorithm"] == "l2"][1]["rows"][-1]
    assert last["test_loss"] == by_hand.figures["test_loss"]
    plain = fb.compare(TASK, ["fedbio"], num_rounds=2, repetitions=1, baseline=False, rivals=False)
    assert [one.name for one in plain.outcomes] == ["fedbio"]
    with pytest.raises(SettingError, match="rivals is 'yes', expected True or False"):
        fb.compare(TASK, ["fedbio"], num_rounds=2, rivals="yes")


def test_a_rival_named_like_an_algorithm_keeps_its_own_row():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Named(Regularisation):
        def rivals(self):
            return {"fedbio": super().rivals()["l2"]}

    found = fb.compare(Named(**TASK.asdict()), ["fedbio"], num_rounds=3, repetitions=1, baseline=False)
    assert [one.name for one in found.outcomes] == ["fedbio", "fedbio (rival)"]


def test_the_command_runs_rivals_unless_told_otherwise(tmp_path):
    common = ["compare", "regularisation", "--algorithms", "fedbio", "--num-rounds", "2", "--repetitions", "1",
              "--no-baseline", "--set", "task.num_train=9"]  # fmt: skip
    printed = CliRunner().invoke(main.cli, [*common, "--out", str(tmp_path / "a")]).output
    assert "l2_grid" in printed
    printed = CliRunner().invoke(main.cli, [*common, "--no-rivals", "--out", str(tmp_path / "b")]).output
    assert "fedbio" in printed
    assert "l2" not in printed
