"""Searches of equal budget for rows of an experiment, and what the tables say about them."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import worth_jobs
from fedbilevel.cli import main
from fedbilevel.errors import FedBilevelError
from fedbilevel.report import budget_tables, tables
from fedbilevel.studies import budgets, experiment, reproduce, row_searches, tune

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SMALL = """
title = "A small one"
source = "no paper"
study = "optimise"
repetitions = 1

[figures]
upper_loss = "upper loss"

[settings]
num_rounds = 12
measure_every = 1
task = {name = "quadratic", num_clients = 3}
options = {dtype = "float64"}

[panels.one]

[rows.fedbio]
settings.algorithm = {name = "fedbio", lr_lower = 0.1, num_local_steps = 2}

[rows.simfbo]
settings.algorithm = {name = "simfbo"}

[rows.wild]
title = "too long steps"
settings.algorithm = {name = "fedbio", lr_lower = 1e60, num_local_steps = 9}

[rows.printed]
tuning = "as the paper states"
settings.algorithm = {name = "fedbio"}

[tune]
minimise = "upper_loss"
search = "hypercube"
trials = 4
factor = 10.0
only = ["fedbio", "simfbo", "wild"]
settings = {num_rounds = 6}
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "experiments" / "small" / "experiment.toml"
    path.parent.mkdir(parents=True)
    path.write_text(SMALL)
    return path


def invoke(*words):
    return CliRunner().invoke(main.cli, [str(word) for word in words])


def test_every_row_gets_as_many_trials_over_ranges_around_its_own_steps(small):
    one = experiment.read(small)
    jobs = tune.independent_jobs(one)
    assert [sum(job.row.startswith(row) for job in jobs) for row in ("fedbio", "simfbo", "wild")] == [4, 4, 4]
    assert {(job.settings["num_rounds"], job.repetition) for job in jobs} == {(6, 100)}
    ranges = tune.ranges_of(one, "one", "fedbio")
    assert set(ranges) == {f"algorithm.lr_{name}" for name in ("upper", "lower", "system")}
    assert ranges["algorithm.lr_lower"] == {"low": pytest.approx(0.01), "high": pytest.approx(1.0)}
    assert ranges["algorithm.lr_upper"]["low"] == pytest.approx(0.001)  # around the default of the algorithm


def test_a_hypercube_has_one_value_in_each_part_of_a_range_and_starts_at_the_own_values():
    ranges = {
        "a": {"low": 0.01, "high": 100.0},
        "b": {"low": -1.0, "high": 1.0, "linear": True},
        "c": {"low": 1, "high": 9, "whole": True},
        "d": ["x", "y"],
    }
    own = {"a": 3.0, "b": 0.5, "c": 2, "d": "y", "e": 0}
    search = row_searches.Hypercube(ranges, own, 9, 0)
    first, *trials = search.ask(5) + search.ask(100)
    assert first == {"a": 3.0, "b": 0.5, "c": 2, "d": "y"}
    assert sorted(int((math.log10(trial["a"]) + 2) / 4 * 8) for trial in trials) == list(range(8))
    assert sorted(int((trial["b"] + 1) / 2 * 8) for trial in trials) == list(range(8))
    assert {type(trial["c"]) for trial in trials} == {int}
    assert [trial["d"] for trial in trials].count("x") == 4
    assert row_searches.Hypercube(ranges, own, 9, 0).ask(9) == [first, *trials]
    assert row_searches.Hypercube(ranges, own, 9, 1).ask(9)[1:] != trials
    alone = row_searches.Hypercube({"a": ranges["a"]}, {}, 8, 0).ask(9)  # without own values, all are drawn
    assert [trial["a"] for trial in alone] == [trial["a"] for trial in trials]


def test_trials_run_in_any_order_and_the_best_and_the_budget_are_written(small, tmp_path):
    folder = tmp_path / "t"
    worth_jobs.main(
        ["--experiment", str(small), "--tune", "--rows", "fedbio", "--processes", "1", "--out", str(folder)]
    )
    before = {path: path.read_bytes() for path in folder.glob("*.json")}
    assert len(before) == 4
    result = invoke("tune", small, "--out", folder)
    assert result.exit_code == 0, result.output
    assert {path: path.read_bytes() for path in before} == before  # not repeated
    new = experiment.read(small)
    entry = new.content["tuned"]["one"]["fedbio"]
    assert (entry["trials"], entry["trial_rounds"]) == (4, 6)
    assert (entry["repetitions"], entry["seed"]) == ([100], 0)
    found = [
        content["figures"] for _, content in reproduce.results(tune.independent_jobs(new, rows=["fedbio"]), folder)
    ]
    assert len(found) == 4  # the written settings do not move the ranges of a second search
    assert entry["diverged"] == sum("diverged" in figures for figures in found) < 4
    assert entry["reached"] == min(figures.get("upper_loss", math.inf) for figures in found)
    assert new.settings("one", "fedbio")["algorithm"]["lr_lower"] == entry["settings"]["algorithm"]["lr_lower"]
    assert set(new.content["tuned"]["one"]) == {"fedbio", "simfbo", "wild"}


def test_a_search_that_failed_is_recorded_and_the_row_keeps_its_settings(small, tmp_path):
    assert invoke("tune", small, "--rows", "wild", "--out", tmp_path / "t").exit_code == 0
    new = experiment.read(small)
    entry = new.content["tuned"]["one"]["wild"]
    assert (entry["settings"], entry["diverged"]) == ({}, 4)
    assert new.settings("one", "wild")["algorithm"]["lr_lower"] == 1e60
    assert budgets.tuning(new, "one", "wild") == "diverged in all 4 trials of 6 rounds"


def test_recorded_tables_print_the_budget_of_every_row_and_the_rows_that_diverged(small, tmp_path):
    one = experiment.read(small)
    reproduce.record(one, reproduce.reproduce(one.jobs(rows=["fedbio", "simfbo"]), tmp_path / "r"))
    assert "tuning" not in tables.recorded(experiment.read(small))  # no row of the table was searched
    invoke("tune", small, "--rows", "fedbio", "--out", tmp_path / "t")
    one = experiment.read(small)
    reproduce.record(one, reproduce.reproduce(one.jobs(), tmp_path / "r"))
    one = experiment.read(small)
    lines = {line.split(" | ")[0]: line for line in tables.recorded(one).splitlines() if line.startswith("| ")}
    for row, words in {
        "fedbio": "4 trials of 6 rounds",
        "simfbo": budgets.UNTUNED,
        "printed": "as the paper states",
        "too long steps": budgets.UNTUNED,
    }.items():
        assert lines[f"| {row}"].endswith(f"| {words} |")
    assert budgets.lost(one) == {("one", "wild"): "diverged"}
    assert "| small | one | too long steps | diverged | not tuned here |" in budget_tables.table([one])
    assert budget_tables.table([one]) in invoke("reproduce", small, "--results").output
    assert budget_tables.table([experiment.read(EXPERIMENTS / "hgp-figure1")]) == ""


@pytest.mark.parametrize(
    ("figures", "wrong"),
    [
        ({"test_accuracy": {"mean": 0.0892}}, "test accuracy 8.92 %"),
        ({"upper_loss": {"mean": 3.3e25}, "test_accuracy": {"mean": 0.5}}, "upper loss 3.3e+25"),
        ({"diverged": {"mean": 1.0}}, "diverged"),
        ({"test_accuracy": {"mean": 0.9}, "upper_loss": {"mean": 2.0}}, ""),
    ],
)
def test_rows_at_chance_and_huge_losses_are_found(figures, wrong):
    assert budgets._wrong(figures) == wrong


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('search = "hypercube"', 'search = "hypercubes"', "Did you mean 'hypercube'"),
        ("factor = 10.0", "factor = 1.0", "tune.factor is 1.0, expected a decimal number above 1"),
        ('only = ["fedbio"', 'only = ["fedbo"', "Did you mean 'fedbio'"),
        ('only = ["fedbio", "simfbo", "wild"]', 'only = "fedbio"', "tune.only is 'fedbio', expected a list of rows"),
        ('search = "hypercube"\n', "", "depend on each other: add search ="),
    ],
)
def test_what_is_wrong_in_a_plan_is_named(small, old, new, named):
    small.write_text(small.read_text().replace(old, new, 1))
    with pytest.raises(FedBilevelError, match=named):
        tune.independent_jobs(experiment.read(small))


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*/experiment.toml")), ids=lambda path: path.parent.name)
def test_searches_of_this_project_have_the_declared_budget_and_no_lost_row_is_without_one(path):
    """An entry without `trial_rounds` is of a search before budgets were equal, and its words say so."""
    one, plan = experiment.read(path), tomllib.loads(path.read_text()).get("tune", {})
    for rows in one.content.get("tuned", {}).values():
        for row, entry in rows.items():
            if "only" in plan and "trial_rounds" in entry:
                assert (entry["trials"], entry["trial_rounds"]) == (plan["trials"], plan["settings"]["num_rounds"]), row
                assert row in plan["only"]
                assert min(entry["repetitions"]) >= one.content["repetitions"]  # not among the reported ones
    for panel, row in budgets.lost(one):
        assert row in plan.get("only", ()), f"{panel}, {row}: declare a search in [tune]"
