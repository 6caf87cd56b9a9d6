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
from fedbilevel.studies.verdicts import verdict

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
    assert "too few records of q, ours" in table
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


def paired_goal(asked, values, *, figure="accuracy", panels=("p", "q"), failed=0):
    """Return a goal of `guarded` over rows of values by repetition, and the table of the goal.

    Panel q has no row `guarded`, so that `own` is judged there. failed: further repetitions of
    `guarded`, which have no value.
    """
    rows = {"own": {}, "guarded": {"only": ["p"]}, "still": {"only": ["p"]}, "plain": {}, "blend": {"only": ["p"]}}
    result = {
        panel: {
            row: record(len(some) + failed * (row == "guarded"), **{figure: sum(some.values()) / len(some)})
            | {"values": [*some.values()], "repeated": [*some]}
            for row, some in own.items()
        }
        for panel, own in values.items()
    }
    content = {
        "title": "t", "source": "s", "study": "worth", "figures": {"accuracy": "accuracy", "test_loss": "loss"},
        "panels": {"p": {}, "q": {}}, "rows": rows, "result": result,
        "verdict": {"rows": ["own", "guarded"], "figure": figure, "bilevel": ["still"]},
        "goals": {"g": {"title": "the goal", "figure": figure, "rows": ["guarded", "own"], "panels": [*panels],
                        "verdict": asked}},
    }  # fmt: skip
    one = dataclasses.replace(read("worth"), content=content)
    check_kinds(one.path, content)
    check_names(one.path, content)
    return goals.goals(one)[0], goal_tables.table([one])


def by_repetition(*values, first=0):
    return dict(enumerate(values, first))


OURS = by_repetition(0.90, 0.80, 0.85)
CLEARLY_WORSE = by_repetition(0.88, 0.78, 0.83)
NEARLY_EQUAL = by_repetition(0.91, 0.79, 0.85)
CLEARLY_BETTER = by_repetition(0.92, 0.82, 0.87)


def both(plain, blend=CLEARLY_WORSE, **more):
    return {
        "p": {"guarded": OURS, "own": CLEARLY_WORSE, "still": CLEARLY_BETTER, "plain": plain, "blend": blend, **more},
        "q": {"own": OURS, "plain": CLEARLY_WORSE},
    }


def test_a_paired_goal_is_met_only_if_the_whole_interval_of_every_pair_is_on_the_better_side():
    """Both differences below spread less than the figures, by which nothing could be said."""
    found, table = paired_goal("wins", both(CLEARLY_WORSE))
    assert found.word == "met"
    assert {(case.panel, case.row, case.against) for case in found.cases} == {
        ("p", "guarded", "plain"), ("p", "guarded", "blend"), ("q", "own", "plain"),
    }  # fmt: skip
    assert "| the goal | met | p, guarded against plain: wins (+0.02, " in table
    found, table = paired_goal("wins", both(NEARLY_EQUAL))
    assert found.word == "not met"
    case = found.closest
    assert (case.panel, case.against, case.verdict) == (
        "p", "plain", verdict([*OURS.values()], [*NEARLY_EQUAL.values()], lower_is_better=False),
    )  # fmt: skip
    assert f"| not met | p, guarded against plain: {case.verdict.shown()} | 3 |" in table
    assert paired_goal("wins", both(CLEARLY_WORSE, blend=NEARLY_EQUAL))[0].word == "not met"
    assert "2 of 3 pairs" in paired_goal("wins", both(NEARLY_EQUAL, blend=CLEARLY_BETTER))[1]
    assert paired_goal("wins", both(CLEARLY_BETTER), panels=("q",))[0].word == "met"


def test_a_tie_is_no_loss():
    assert paired_goal("never loses", both(NEARLY_EQUAL))[0].word == "met"
    found, table = paired_goal("never loses", both(CLEARLY_WORSE, blend=CLEARLY_BETTER))
    assert (found.word, found.closest.against) == ("not met", "blend")
    assert "| not met | p, guarded against blend: loses (-0.02, " in table
    turned = paired_goal("never loses", both(CLEARLY_BETTER), figure="test_loss")[0]  # a smaller loss is better
    assert (turned.word, turned.closest.against) == ("not met", "blend")
    assert {case.against for case in turned.cases if case.is_met} == {"plain"}


def test_two_repetitions_do_not_show_that_a_row_never_loses():
    found, _ = paired_goal("never loses", both(by_repetition(0.91, 0.79)))
    assert (found.word, found.missing) == ("open", ["p, plain"])
    found, _ = paired_goal("never loses", both(by_repetition(0.92, 0.8201)))
    assert found.word == "not met"  # a loss needs no third repetition


@pytest.mark.parametrize("asked", ["wins", "never loses"])
def test_a_failed_repetition_of_our_row_counts_against_it(asked):
    some = both(CLEARLY_WORSE)
    assert paired_goal(asked, some)[0].word == "met"
    assert paired_goal(asked, some, failed=1)[0].word == "not met"


def test_rows_are_paired_by_the_repetitions_that_both_have():
    """The plain way is 0.02 worse in repetitions 1 and 2, although its mean is the higher one."""
    shifted = by_repetition(0.78, 0.83, 0.99, first=1)
    found, table = paired_goal("wins", both(shifted))
    [case] = [one for one in found.cases if (one.panel, one.against) == ("p", "plain")]
    assert (case.repetitions, case.verdict.difference) == (2, pytest.approx(0.02))
    assert (case.value, case.bound) == (pytest.approx(0.825), pytest.approx(0.805))
    assert found.word == "met"
    assert table.rstrip().endswith("| 2 |")


def test_a_paired_goal_is_open_while_a_pair_has_no_two_repetitions_in_common():
    found, table = paired_goal("wins", both(by_repetition(0.7)))
    assert (found.word, found.missing) == ("open", ["p, plain"])
    assert "too few records of p, plain" in table
    assert paired_goal("wins", both(by_repetition(0.7, 0.7, first=2)))[0].missing == ["p, plain"]
    some = both(CLEARLY_WORSE)
    del some["p"]["guarded"]  # `own` is recorded there, but is not what the goal judges
    assert paired_goal("never loses", some)[0].missing == ["p, guarded"]
    assert paired_goal("never loses", {})[0].word == "open"
    assert paired_goal("never loses", both(by_repetition(0.7), blend=CLEARLY_BETTER))[0].word == "not met"


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"verdict": "ties"}, UnknownNameError, "ties"),
        ({"rows": []}, ExperimentError, r"expected rows, the figure of \[verdict\] \('figure'\)"),
        ({"figure": "f1"}, ExperimentError, r"with the figure 'f1', expected rows, the figure of \[verdict\]"),
        ({"within": 0.1}, ExperimentError, "no lower, within or pooled beside verdict"),
        ({"least": 0.1}, ExperimentError, "one of least, most, than, than_figure and verdict"),
    ],
)
def test_a_paired_goal_has_rows_and_no_bound(change, error, words):
    one = read("worth")
    content = {**one.content, "goals": {"mixing": {**one.content["goals"]["mixing"], **change}}}
    with pytest.raises(error, match=words):
        check_names(one.path, content)


def test_the_experiment_worth_has_a_goal_of_every_task_and_one_of_all_panels():
    one = read("worth")
    found = {goal.name: one.content["goals"][goal.name] for goal in goals.goals(one)}
    asked = {name: goal.pop("verdict") for name, goal in {name: {**goal} for name, goal in found.items()}.items()}
    assert {name for name, word in asked.items() if word == "never loses"} == {"never-loses"}
    assert "panels" not in found["never-loses"]
    places = [panel for name, goal in found.items() if name != "never-loses" for panel in goal["panels"]]
    assert len(places) == len({*places})
    [never] = [goal for goal in goals.goals(one) if goal.name == "never-loses"]
    judged = {case.panel for case in never.cases} | {place.partition(",")[0] for place in never.missing}
    assert judged == {*one.content["panels"]}
    assert not {"unlearned", "started", "self-tuned", "guarded"} & {case.against for case in never.cases}
    assert "blended" in {case.against for case in never.cases}
