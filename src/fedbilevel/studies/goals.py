"""Goals of an experiment: bounds that its recorded figures meet or do not meet.

    [goals.G]               title, and the figure that is bounded
      rows, panels          which records must be there; without `rows`, every record there is
      least, most           a bound that is a number
      than                  a row of the same panel: the figure must be above that row's
      than_figure           another figure of the same record, likewise
      within                with `than` or `than_figure`: at most this much below is enough
      lower                 true, with `than` or `than_figure`: a smaller figure is better, so above
                            and below change places
      pooled                true: the mean over the runs of all records is bounded, not each record;
                            runs without the figure do not count
      verdict               "wins" or "never loses", in place of a bound: in every panel, the first of
                            `rows` that the panel has, against each plain way of the panel, by the
                            paired difference and its interval (studies/verdicts.py); the figure is
                            that of [verdict], and a tie is no win and no loss

A goal is met if all its records are there and within the bound, not met if a record is not, and open
otherwise. Figures are means over repetitions; the number of repetitions stands beside the verdict.
A win or a loss needs two common repetitions. That a row never loses needs three, because the interval
of two differences hardly ever excludes zero. A failed repetition of our row counts against it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fedbilevel.studies.experiment import Experiment
from fedbilevel.studies.verdicts import Verdict, lower, paired, plain_ways, recorded_values, verdict

_FEWEST = {"wins": 2, "never loses": 3}  # common repetitions


class Case(NamedTuple):
    """One record against its bound; margin: how far it is on the good side.

    against, verdict: the plain way with which the record is paired, and what their differences say.
    """

    panel: str
    row: str
    value: float
    bound: float
    repetitions: int
    is_met: bool
    margin: float
    against: str = ""
    verdict: Verdict | None = None


class Goal(NamedTuple):
    """A goal with its cases; missing: records that the goal needs, as "panel, row"."""

    name: str
    title: str
    figure: str
    cases: list[Case]
    missing: list[str]

    @property
    def word(self) -> str:
        if any(not case.is_met for case in self.cases):
            return "not met"
        return "met" if self.cases and not self.missing else "open"

    @property
    def closest(self) -> Case | None:
        """Return the case with the smallest margin."""
        return min(self.cases, key=lambda case: (case.is_met, case.margin), default=None)


def goals(experiment: Experiment) -> list[Goal]:
    """Return the goals of the experiment's file, judged by its records."""
    return [
        (_paired_goal if "verdict" in one else _goal)(experiment, name, one)
        for name, one in experiment.content.get("goals", {}).items()
    ]


def _paired_goal(experiment: Experiment, name: str, one: Mapping[str, Any]) -> Goal:
    """Judge the first of the goal's rows in every panel against all plain ways of the panel."""
    values, result = recorded_values(experiment), experiment.content.get("result", {})
    cases, missing = [], []
    for panel in one.get("panels", experiment.content["panels"]):
        has = [row for _, row in experiment.places(panels=[panel])]
        ours = next((row for row in one["rows"] if row in has), None)
        if ours is None:
            missing.append(f"{panel}, {one['rows'][0]}")
            continue
        mine = values.get((panel, ours), {})
        failed = result.get(panel, {}).get(ours, {}).get("repetitions", 0) - len(mine)
        for row in plain_ways(experiment, has):
            pairs = paired(mine, values.get((panel, row), {}))
            case = _paired_case(experiment, one["verdict"], (panel, ours, row), pairs) if len(pairs) > 1 else None
            if case is not None and (failed or not case.is_met):
                cases.append(case._replace(is_met=False))
            elif case is not None and len(pairs) >= _FEWEST[one["verdict"]]:
                cases.append(case)
            else:  # the records lack a row, or have too few repetitions of both
                missing.append(f"{panel}, {row if (panel, ours) in values else ours}")
    return Goal(name, one["title"], one["figure"], cases, list(dict.fromkeys(missing)))


def _paired_case(
    experiment: Experiment, asked: str, place: tuple[str, str, str], pairs: Sequence[tuple[float, float]]
) -> Case:
    panel, ours, row = place
    mine, theirs = zip(*pairs, strict=True)
    falls = lower(experiment, panel)
    found = verdict(mine, theirs, lower_is_better=falls)
    is_met = found.word == "wins" if asked == "wins" else found.word != "loses"
    margin = -found.difference if falls else found.difference
    means = math.fsum(mine) / len(mine), math.fsum(theirs) / len(theirs)
    return Case(panel, ours, *means, len(pairs), is_met, margin, row, found)


def _goal(experiment: Experiment, name: str, one: Mapping[str, Any]) -> Goal:
    places, missing = [], []
    result, figure = experiment.content.get("result", {}), one["figure"]
    for panel, row in experiment.places(panels=one.get("panels", ()), rows=one.get("rows", ())):
        if figure in result.get(panel, {}).get(row, {}).get("figures", {}):
            places.append((panel, row))
        elif not one.get("pooled") and ("rows" in one or row in result.get(panel, {})):
            missing.append(f"{panel}, {row}")
    cases = []
    for panel, row in places:
        mine = result[panel][row]
        bound, other = _bound(result[panel], mine, one)
        if bound is None:
            missing.append(f"{panel}, {other}")
        else:
            cases.append(_case(one, panel, row, mine["figures"][figure]["mean"], bound, mine["repetitions"]))
    return Goal(name, one["title"], figure, list(_pooled(one, cases, result) if one.get("pooled") else cases), missing)


def _bound(rows: Mapping[str, Any], mine: Mapping[str, Any], one: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return the bound, or None with the name of what is not recorded."""
    if "than" not in one and "than_figure" not in one:
        return float(one["least"] if "least" in one else one["most"]), ""
    entry = rows.get(one["than"], {}) if "than" in one else mine
    name = one.get("than_figure", one["figure"])
    found = entry.get("figures", {}).get(name, {}).get("mean")
    return (
        (None, one.get("than", name))
        if found is None
        else (found + (1 if one.get("lower") else -1) * one.get("within", 0.0), "")
    )


def _case(one: Mapping[str, Any], panel: str, row: str, value: float, bound: float, repetitions: int) -> Case:
    margin = bound - value if "most" in one or one.get("lower") else value - bound
    strictly = ("than" in one or "than_figure" in one) and "within" not in one
    is_met = margin > 0 if strictly else margin >= -1e-9  # means are recorded with six digits
    return Case(panel, row, value, bound, repetitions, is_met, margin)


def _pooled(one: Mapping[str, Any], cases: list[Case], result: Mapping[str, Any]) -> Iterator[Case]:
    runs = [result[case.panel][case.row]["figures"][one["figure"]]["runs"] for case in cases]
    if runs:
        mean = math.fsum(case.value * num for case, num in zip(cases, runs, strict=True)) / sum(runs)
        yield _case(one, "all", "all", mean, cases[0].bound, sum(runs))
