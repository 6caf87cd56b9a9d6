"""Search step sizes and other settings of an experiment's rows, and write the best into its file.

    [tune]
    minimise = "rounds_to_target"   or maximise = "test_accuracy"
    otherwise = "test_accuracy"     ranks trials that lack that figure or have equal values of it;
                                    higher is better
    repetitions, first_repetition   trials use other data and draws than the experiment:
                                    by default repetitions from 100 on
    panel                           search in this panel only, and use its settings in all panels;
                                    by default every panel has its own search
    max_rounds                      rounds of communication of all trials of one row, from the
                                    ledger; no trial starts after them
    trials                          trials of a search over ranges; a grid tries all combinations
    search = "hypercube"            every row has the same trials, which are independent of each other
                                    (studies/row_searches.py)
    factor                          search every step size of a row's algorithm from 1/factor to factor
                                    times its value, without a range for it
    only                            the rows that are searched; by default all rows with ranges
    [tune.settings]                 merged into every trial, e.g. fewer rounds
    [tune.ranges]                   "algorithm.lr_lower" = [0.1, 0.3, 1.0], or
                                    {low = 0.01, high = 1.0}, on a logarithmic scale unless
                                    linear = true
    [tune.rows.R]                   ranges of one row; they replace or extend [tune.ranges]

The best settings are written to [tuned.P.R], with their figure, the budget, the number of diverged
trials, the commit and the time. They replace those of the row; if all trials diverged, the row
keeps its own. If all ranges are lists, the search is a grid. Otherwise it is the hypercube, or it
uses Optuna (an extra: pip install 'fedbilevel[tune]').
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tomlkit

from fedbilevel.errors import ExperimentError, RecoveryWarning, SettingError, UnknownNameError
from fedbilevel.studies.comparison import COSTS
from fedbilevel.studies.experiment import Experiment, Job, merged
from fedbilevel.studies.experiment import write as experiment_write
from fedbilevel.studies.experiment_checks import Tree, among
from fedbilevel.studies.provenance import commit
from fedbilevel.studies.reproduce import Figure, Say, nested, reproduce, summary
from fedbilevel.studies.row_searches import Grid, Hypercube, Optuna, around, own_values

_KNOWN: dict[str, type] = {
    **dict.fromkeys(("minimise", "maximise", "otherwise", "panel", "search"), str),
    **dict.fromkeys(("repetitions", "first_repetition", "max_rounds", "trials"), int),
    **dict.fromkeys(("settings", "ranges", "rows"), dict),
    "factor": float,
    "only": list,
}
_WORDS = {
    str: "a name",
    int: "a whole number, at least 1",
    dict: "a table",
    float: "a decimal number above 1",
    list: "a list of rows",
}
_RANGE = ("low", "high", "linear", "whole")


@dataclass(frozen=True)
class Trial:
    values: dict[str, Any]  # by dotted name
    # lower is better: repetitions without the figure, the figure, minus the figure of `otherwise`
    score: tuple[int, float, float]
    figures: dict[str, float]


@dataclass(frozen=True)
class Chosen:
    panel: str
    row: str
    trials: list[Trial]
    rounds: int  # of communication, in all trials
    trial_rounds: int | None  # at most, in one run of a trial; None if runs end by outer iterations
    seed: int

    @property
    def best(self) -> Trial:
        return min(self.trials, key=lambda trial: trial.score)

    @property
    def diverged(self) -> int:
        return sum("diverged" in trial.figures for trial in self.trials)


def tune(
    experiment: Experiment,
    folder: Path,
    *,
    panel: str,
    row: str,
    device: str = "cpu",
    processes: int = 1,
    seed: int = 0,
    say: Say = lambda _: None,
) -> Chosen:
    """Run trials of one row in one panel; trials with results in the folder are not repeated."""
    plan, search = _plan(experiment), _search(experiment, panel, row, seed)
    trials: list[Trial] = []
    spent = 0
    while spent < plan.get("max_rounds", math.inf) and (asked := search.ask(processes)):
        jobs = [_jobs(experiment, panel, row, values) for values in asked]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecoveryWarning)  # the number of diverged trials says it
            every = [job for some in jobs for job in some]
            found = reproduce(every, folder, device=device, processes=processes, say=say)
        for values, some in zip(asked, jobs, strict=True):
            mine = [(job, content) for job, content in found if job in some]
            figures = summary(mine)[panel, some[0].row]
            trial = Trial(
                values, _score(plan, figures, len(some)), {name: figure.mean for name, figure in figures.items()}
            )
            search.tell(values, trial.score)
            trials.append(trial)
            spent += int(sum(content["figures"].get("rounds", 0) for _, content in mine))
            shown = ", ".join(f"{name} = {value}" for name, value in values.items())
            say(f"{panel}, {row}: trial {len(trials)}, {shown}")
        _check_figures(plan, trials)
    return Chosen(panel, row, trials, spent, _start(experiment, panel, row).get("num_rounds"), seed)


def _search(experiment: Experiment, panel: str, row: str, seed: int) -> Grid | Hypercube | Optuna:
    plan, ranges = _plan(experiment), ranges_of(experiment, panel, row)
    if not ranges:
        raise ExperimentError(
            f"{experiment.path} declares no ranges for the row {row!r}: "
            f"add [tune.rows.{row}], or give it values of what is in [tune.ranges]."
        )
    if "search" in plan:  # before grids: every row has the same number of trials
        start = _start(experiment, panel, row)
        return Hypercube(ranges, {**own_values(start), **_dotted(start)}, plan.get("trials", 20), seed)
    if all(isinstance(values, list) for values in ranges.values()):
        return Grid(ranges)
    return Optuna(ranges, plan.get("trials", 20), seed)


def _start(experiment: Experiment, panel: str, row: str) -> Tree:
    """Return the settings that all trials of a row share, without those of an earlier search."""
    return merged(experiment.settings(panel, row, with_tuned=False), _plan(experiment).get("settings", {}))


def _jobs(experiment: Experiment, panel: str, row: str, values: Mapping[str, Any]) -> list[Job]:
    """Return the runs of one trial."""
    plan, settings = _plan(experiment), merged(_start(experiment, panel, row), _nested(values))
    first, study = plan.get("first_repetition", 100), experiment.content["rows"][row].get("study")
    return [
        Job(panel, _label(row, values), r, study or experiment.content["study"], settings)
        for r in range(first, first + plan.get("repetitions", 1))
    ]


def places(experiment: Experiment, panels: Sequence[str] = (), rows: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return pairs (panel, row) to search: the given ones, or all that [tune] declares."""
    plan = _plan(experiment)
    only = plan.get("panel")
    if only and list(panels) not in ([], [only]):
        raise SettingError(f"[tune] searches in the panel {only!r} alone, for all panels: omit --panels.")
    found = experiment.places(panels=[only] if only else panels, rows=rows or plan.get("only", ()))
    found = found if rows else [place for place in found if ranges_of(experiment, *place)]
    if not found:
        raise SettingError(f"{experiment.path} declares no ranges: add [tune.ranges] or [tune.rows.ROW].")
    return found


def independent_jobs(
    experiment: Experiment, panels: Sequence[str] = (), rows: Sequence[str] = (), seed: int = 0
) -> list[Job]:
    """Return the runs of all trials, for searches whose trials do not depend on each other."""
    found: list[Job] = []
    for place in places(experiment, panels, rows):
        search = _search(experiment, *place, seed)
        if isinstance(search, Optuna):
            raise ExperimentError(
                f"the trials of {place[1]} in {experiment.path} depend on each other: "
                'add search = "hypercube" to [tune], or use fedbilevel tune.'
            )
        while asked := search.ask(1):
            found += _jobs(experiment, *place, asked[0])
    return found


def _check_figures(plan: Tree, trials: Sequence[Trial]) -> None:
    """Raise for a misspelt figure, which would look like a figure that no trial has."""
    given = {name for trial in trials for name in trial.figures if name != "diverged"} | {
        f"{name}_to_target" for name in COSTS
    }
    for name in (plan.get("minimise"), plan.get("maximise"), plan.get("otherwise")):
        if name is not None and name not in given and any("diverged" not in trial.figures for trial in trials):
            raise UnknownNameError("figure of these trials", name, given)


def ranges_of(experiment: Experiment, panel: str, row: str) -> dict[str, Any]:
    """Return the ranges of the row, and the ranges of all rows for settings that this row has."""
    plan, settings = _plan(experiment), experiment.settings(panel, row, with_tuned=False)
    has = _dotted(settings)
    return {
        **(around(settings, plan["factor"]) if "factor" in plan else {}),
        **{name: values for name, values in plan.get("ranges", {}).items() if name in has},
        **plan.get("rows", {}).get(row, {}),
    }


def write(experiment: Experiment, chosen: Chosen) -> None:
    """Write the chosen values and their figure to [tuned], and keep comments."""
    document: Any = tomlkit.parse(experiment.path.read_text())
    plan = _plan(experiment)
    figure = plan.get("minimise", plan.get("maximise"))
    entry = tomlkit.table()
    failed = chosen.diverged == len(chosen.trials)
    entry["settings"] = _inline({} if failed else _nested(chosen.best.values))
    entry["figure"] = figure
    if figure in chosen.best.figures:
        entry["reached"] = chosen.best.figures[figure]
    if plan.get("otherwise") in chosen.best.figures:
        entry["otherwise"] = chosen.best.figures[plan["otherwise"]]
    entry["trials"], entry["diverged"], entry["rounds"] = len(chosen.trials), chosen.diverged, chosen.rounds
    if chosen.trial_rounds is not None:
        entry["trial_rounds"] = chosen.trial_rounds
    first = plan.get("first_repetition", 100)
    entry["repetitions"] = list(range(first, first + plan.get("repetitions", 1)))
    entry["seed"] = chosen.seed
    entry["commit"], entry["time"] = commit(), datetime.now(UTC).isoformat(timespec="seconds")
    nested(document, "tuned", chosen.panel)[chosen.row] = entry
    experiment_write(experiment, "tuned", document)


def _check_range(name: str, values: Any) -> None:
    if isinstance(values, list) and values:
        return
    if not isinstance(values, Mapping):
        raise ExperimentError(
            f"the range of {name} is {values!r}, expected a list of values or {{low = ..., high = ...}}."
        )
    for key in values:
        if key not in _RANGE:
            raise UnknownNameError(f"entry of the range of {name}", key, _RANGE)
    ends: list[Any] = [values.get(end) for end in ("low", "high")]
    numbers = all(
        isinstance(end, int | float) and not isinstance(end, bool) and (isinstance(end, int) or not values.get("whole"))
        for end in ends
    )
    if not numbers or ends[0] > ends[1] or (ends[0] <= 0 and not values.get("linear")):
        raise ExperimentError(
            f"the range of {name} is {dict(values)}, expected low <= high, "
            "above 0 unless linear = true, and whole numbers if whole = true."
        )


def _narrow(name: str, value: Any) -> bool:
    return name == "factor" and value <= 1


def _plan(experiment: Experiment) -> Tree:
    plan: Tree = experiment.content.get("tune", {})
    for name, value in plan.items():
        if name not in _KNOWN:
            raise UnknownNameError(f"entry in tune of {experiment.path}", name, _KNOWN)
        if not isinstance(value, _KNOWN[name]) or (isinstance(value, int) and value < 1) or _narrow(name, value):
            raise ExperimentError(f"{experiment.path}: tune.{name} is {value!r}, expected {_WORDS[_KNOWN[name]]}.")
    if plan.get("search", "hypercube") != "hypercube":
        raise UnknownNameError(f"search in tune of {experiment.path}", plan["search"], ["hypercube"])
    among(experiment.path, "tune.only", plan.get("only", ()), experiment.content["rows"])
    if ("minimise" in plan) == ("maximise" in plan):
        raise ExperimentError(f"{experiment.path}: [tune] needs either minimise = FIGURE or maximise = FIGURE.")
    if plan.get("panel", next(iter(experiment.content["panels"]))) not in experiment.content["panels"]:
        raise UnknownNameError(f"panel of {experiment.name}", plan["panel"], experiment.content["panels"])
    for name, ranges in plan.get("rows", {}).items():
        if name not in experiment.content["rows"]:
            raise UnknownNameError(f"row of {experiment.name}", name, experiment.content["rows"])
        for setting, values in ranges.items():
            _check_range(setting, values)
    has = (
        {name for place in experiment.places() for name in _dotted(experiment.settings(*place))}
        if plan.get("ranges")
        else set()
    )
    for setting, values in plan.get("ranges", {}).items():
        _check_range(setting, values)
        if setting not in has:
            raise UnknownNameError(f"setting of a row of {experiment.name}", setting, has)
    return plan


def _score(plan: Tree, figures: Mapping[str, Figure], repetitions: int) -> tuple[int, float, float]:
    """Return the score of a trial; lower is better.

    Trials with the figure in every repetition come first. `otherwise` ranks the other trials and
    ties.
    """
    name, sign = (plan["minimise"], 1.0) if "minimise" in plan else (plan["maximise"], -1.0)
    got = figures[plan["otherwise"]].mean if plan.get("otherwise") in figures else -math.inf
    missing = repetitions - (figures[name].runs if name in figures else 0)
    return missing, 0.0 if missing else sign * figures[name].mean, -got


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in tree.items():
        out |= _dotted(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return out


def _nested(values: Mapping[str, Any]) -> Tree:
    out: Tree = {}
    for name, value in values.items():
        *parents, last = name.split(".")
        place = out
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return out


def _inline(tree: Mapping[str, Any]) -> Any:
    table = tomlkit.inline_table()
    table.update({name: _inline(value) if isinstance(value, Mapping) else value for name, value in tree.items()})
    return table


def _label(row: str, values: Mapping[str, Any]) -> str:
    return f"{row}-{hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=5).hexdigest()}"
