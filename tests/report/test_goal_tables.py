"""Goals of experiments: what is met, what is not, and what no record says."""

from __future__ import annotations

import dataclasses

import pytest
from click.testing import CliRunner

from fedbilevel.cli.main import cli
from fedbilevel.errors import ExperimentError, UnknownNameError
from fedbilevel.report import goal_tables
from fedbilevel.studies import goals
from fedbilevel.studies.experiment import known, read
from fedbilevel.studies.experiment_checks import check_kinds, check_names

FIGURES = {"f1": "F1", "accuracy": "accuracy, %", "plain": "plain, %", "kept": "kept"}


def record(repetitions=5, **means):
    figures = {name: {"mean": mean, "deviation": 0.0, "runs": repetitions} for name, mean in means.items()}
    return {
        "settings": "",
        "repetitions": repetitions,
        "seconds": 1.0,
        "machine": "m",
        "commit": "c",
        "figures": figures,
    }


def judged(result, **goal):
    """Return one goal of an experiment with two panels and two rows."""
    content = {
        "title": "t", "source": "s", "study": "cleaning", "figures": FIGURES, "panels": {"p": {}, "q": {}},
        "rows": {"ours": {}, "theirs": {}}, "goals": {"g": {"title": "the goal", **goal}}, "result": result,
    }  # fmt: skip
    one = dataclasses.replace(read("cleaning-mnist"), content=content)
    check_kinds(one.path, content)
    check_names(one.path, content)
    return goals.goals(one)[0], goal_tables.table([one])


def test_a_bound_is_met_by_every_record_or_not_met():
    both = {"p": {"ours": record(f1=0.96)}, "q": {"ours": record(3, f1=0.95)}}
    found, table = judged(both, figure="f1", rows=["ours"], least=0.95)
    assert (found.word, found.closest.panel, found.closest.repetitions) == ("met", "q", 3)
    assert "| the goal | met | q, ours: 0.95 (bound 0.95) | 3 |" in table
    assert judged(both, figure="f1", rows=["ours"], least=0.955)[0].word == "not met"
    assert judged(both, figure="f1", rows=["ours"], most=0.96)[0].word == "met"
    assert judged(both, figure="f1", rows=["ours"], most=0.959)[0].closest.panel == "p"
    assert judged(both, figure="f1", rows=["ours"], panels=["p"], least=0.955)[0].word == "met"


def test_a_smaller_figure_can_be_better_than_another_row():
    both = {"p": {"ours": record(f1=1.60), "theirs": record(f1=1.59)}}
    goal = {"figure": "f1", "rows": ["ours"], "panels": ["p"], "than": "theirs", "lower": True}
    assert judged(both, **goal)[0].word == "not met"
    assert judged(both, **goal, within=0.005)[0].word == "not met"
    assert judged(both, **goal, within=0.01)[0].word == "met"
    both["p"]["ours"] = record(f1=1.58)
    assert judged(both, **goal)[0].word == "met"
    both["p"]["ours"] = record(f1=1.59)
    assert judged(both, **goal)[0].word == "not met"


def test_a_goal_without_a_record_is_open():
    one = {"p": {"ours": record(f1=0.96)}}
    found, table = judged(one, figure="f1", rows=["ours"], least=0.95)
    assert (found.word, found.missing) == ("open", ["q, ours"])
    assert "no record of q, ours" in table
    assert judged(one, figure="f1", rows=["ours"], least=0.99)[0].word == "not met"
    assert judged({}, figure="f1", least=0.99)[0].word == "open"
    assert judged(one, figure="f1", least=0.95)[0].word == "met"  # every record there is
    assert judged(one, figure="kept", least=0.95)[0].missing == ["p, ours"]  # recorded without the figure


def test_a_row_must_be_above_another_row_or_nearly():
    equal = {"p": {"ours": record(accuracy=0.9), "theirs": record(accuracy=0.9)}}
    go = lambda result, **goal: judged(result, figure="accuracy", rows=["ours"], panels=["p"], **goal)[0]
    assert go(equal, than="theirs").word == "not met"
    assert go(equal, than="theirs", within=0.0).word == "met"
    lower = {"p": {"ours": record(accuracy=0.897), "theirs": record(accuracy=0.9)}}
    assert go(lower, than="theirs", within=0.003).word == "met"
    assert go(lower, than="theirs", within=0.002).word == "not met"
    assert go({"p": {"ours": record(accuracy=0.9)}}, than="theirs").missing == ["p, theirs"]
    own = {"p": {"ours": record(accuracy=0.9, plain=0.91)}}
    assert go(own, than_figure="plain", within=0.003).word == "not met"
    assert "p, ours: 90 (bound 90.7)" in judged(own, figure="accuracy", than_figure="plain", within=0.003)[1]


def test_pooled_runs_count_one_by_one():
    both = {"p": {"ours": record(1, kept=0.0)}, "q": {"ours": record(19, kept=1.0)}}
    found, table = judged(both, figure="kept", rows=["ours"], least=0.95, pooled=True)
    assert (found.word, found.closest.value, found.closest.repetitions) == ("met", pytest.approx(0.95), 20)
    assert "all runs: 0.95" in table
    assert judged(both, figure="kept", rows=["ours"], least=0.96, pooled=True)[0].word == "not met"
    assert judged({"p": both["p"]}, figure="f1", rows=["ours"], least=0.95, pooled=True)[0].word == "open"


def test_goals_that_cannot_be_judged_are_refused():
    with pytest.raises(ExperimentError, match=r"goals\.g has title, figure, expected title, figure, and one of least"):
        judged({}, figure="f1")
    with pytest.raises(UnknownNameError, match="nobody"):
        judged({}, figure="f1", than="nobody")
    with pytest.raises(UnknownNameError, match="f2"):
        judged({}, figure="f2", least=1)


def test_every_experiment_of_cleaning_has_goals_of_the_guard_and_the_command_prints_them():
    names = [name for name in known() if name.startswith("cleaning-")]
    assert len(names) >= 5
    for name in names:
        assert "guard" in {goal.name for goal in goals.goals(read(name))}
    printed = CliRunner().invoke(cli, ["reproduce", "cleaning-mnist", "--results"])
    assert goal_tables.table([read("cleaning-mnist")]) in printed.output
    assert goal_tables.table([read("fedbioacc-figure4")]) == ""
