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
    [tune.settings]                 merged into every trial, e.g. fewer rounds
    [tune.ranges]                   "algorithm.lr_lower" = [0.1, 0.3, 1.0], or
                                    {low = 0.01, high = 1.0}, on a logarithmic scale unless
                                    linear = true
    [tune.rows.R]                   ranges of one row; they replace or extend [tune.ranges]

The best settings are written to [tuned.P.R], with their figure, the numbers of trials and rounds,
the commit and the time. They replace those of the row. If all ranges are lists, the search is a
grid. Otherwise it uses Optuna (an extra: pip install 'fedbilevel[tune]').
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tomlkit

from fedbilevel.errors import ExperimentError, SettingError, UnknownNameError
from fedbilevel.studies.comparison import COSTS
from fedbilevel.studies.experiment import Experiment, Job, merged
from fedbilevel.studies.experiment import write as experiment_write
from fedbilevel.studies.experiment_checks import Tree
from fedbilevel.studies.provenance import commit
from fedbilevel.studies.reproduce import Figure, Say, nested, reproduce, summary

_KNOWN: dict[str, type] = {
    **dict.fromkeys(("minimise", "maximise", "otherwise", "panel"), str),
    **dict.fromkeys(("repetitions", "first_repetition", "max_rounds", "trials"), int),
    **dict.fromkeys(("settings", "ranges", "rows"), dict),
}
_WORDS = {str: "a name", int: "a whole number, at least 1", dict: "a table"}
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

    @property
    def best(self) -> Trial:
        return min(self.trials, key=lambda trial: trial.score)


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
    plan, ranges = _plan(experiment), ranges_of(experiment, panel, row)
    if not ranges:
        raise ExperimentError(
            f"{experiment.path} declares no ranges for the row {row!r}: "
            f"add [tune.rows.{row}], or give it values of what is in [tune.ranges]."
        )
    start = merged(experiment.settings(panel, row), plan.get("settings", {}))
    search = (
        _Grid(ranges)
        if all(isinstance(values, list) for values in ranges.values())
        else _Optuna(ranges, plan.get("trials", 20), seed)
    )
    first = plan.get("first_repetition", 100)
    repetitions = range(first, first + plan.get("repetitions", 1))
    study = experiment.content["rows"][row].get("study", experiment.content["study"])
    trials: list[Trial] = []
    spent = 0
    while spent < plan.get("max_rounds", math.inf) and (asked := search.ask(processes)):
        jobs = [
            [Job(panel, _label(row, values), r, study, merged(start, _nested(values))) for r in repetitions]
            for values in asked
        ]
        found = reproduce([job for some in jobs for job in some], folder, device=device, processes=processes, say=say)
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
    return Chosen(panel, row, trials, spent)


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
    plan, has = _plan(experiment), _dotted(experiment.settings(panel, row))
    return {
        **{name: values for name, values in plan.get("ranges", {}).items() if name in has},
        **plan.get("rows", {}).get(row, {}),
    }


def write(experiment: Experiment, chosen: Chosen) -> None:
    """Write the chosen values and their figure to [tuned], and keep comments."""
    document: Any = tomlkit.parse(experiment.path.read_text())
    plan = _plan(experiment)
    figure = plan.get("minimise", plan.get("maximise"))
    entry = tomlkit.table()
    entry["settings"] = _inline(_nested(chosen.best.values))
    entry["figure"] = figure
    if figure in chosen.best.figures:
        entry["reached"] = chosen.best.figures[figure]
    entry["trials"], entry["rounds"] = len(chosen.trials), chosen.rounds
    entry["commit"], entry["time"] = commit(), datetime.now(UTC).isoformat(timespec="seconds")
    nested(document, "tuned", chosen.panel)[chosen.row] = entry
    experiment_write(experiment, "tuned", document)


class _Grid:
    """A search over all combinations of the values, in the order of the lists."""

    def __init__(self, ranges: Mapping[str, list[Any]]) -> None:
        self.left: Iterator[tuple[Any, ...]] = itertools.product(*ranges.values())
        self.names = list(ranges)

    def ask(self, number: int) -> list[dict[str, Any]]:
        return [dict(zip(self.names, values, strict=True)) for values in itertools.islice(self.left, number)]

    def tell(self, values: Mapping[str, Any], score: tuple[int, float, float]) -> None:
        """Ignore the score, because a grid does not depend on it."""


class _Optuna:
    """A search by a tree-structured Parzen estimator with a fixed seed.

    The same scores and the same number of processes give the same trials.
    """

    def __init__(self, ranges: Mapping[str, Any], num_trials: int, seed: int) -> None:
        if find_spec("optuna") is None:
            raise SettingError(
                "a search over ranges needs Optuna, which is not installed: "
                "pip install 'fedbilevel[tune]', or give lists of values."
            )
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(5, num_trials // 3))
        )
        self.space = {name: _distribution(optuna.distributions, name, values) for name, values in ranges.items()}
        self.left, self.open = num_trials, dict[str, list[Any]]()

    def ask(self, number: int) -> list[dict[str, Any]]:
        number = min(number, self.left)
        self.left -= number
        asked = []
        for _ in range(number):
            trial = self.study.ask(self.space)
            values = {
                name: float(f"{value:.3g}") if isinstance(value, float) else value
                for name, value in trial.params.items()
            }
            self.open.setdefault(json.dumps(values), []).append(trial)  # rounded values may repeat
            asked.append(values)
        return asked

    def tell(self, values: Mapping[str, Any], score: tuple[int, float, float]) -> None:
        missing, figure, other = score
        self.study.tell(
            self.open[json.dumps(values)].pop(), figure if not missing else 1e9 * missing + math.tanh(other)
        )


def _distribution(kinds: Any, name: str, values: Any) -> Any:
    if isinstance(values, list):
        return kinds.CategoricalDistribution(values)
    kind = kinds.IntDistribution if values.get("whole") else kinds.FloatDistribution
    return kind(values["low"], values["high"], log=not values.get("linear", False))


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


def _plan(experiment: Experiment) -> Tree:
    plan: Tree = experiment.content.get("tune", {})
    for name, value in plan.items():
        if name not in _KNOWN:
            raise UnknownNameError(f"entry in tune of {experiment.path}", name, _KNOWN)
        if not isinstance(value, _KNOWN[name]) or (isinstance(value, int) and value < 1):
            raise ExperimentError(f"{experiment.path}: tune.{name} is {value!r}, expected {_WORDS[_KNOWN[name]]}.")
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
