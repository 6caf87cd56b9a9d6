"""Searches step sizes and other settings of an experiment's rows, and writes what it chose into the experiment's file.

    [tune]
    minimise = "rounds_to_target"      or maximise = "test_accuracy"
    otherwise = "test_accuracy"        what ranks trials in which that figure does not exist, or is the same; higher is better
    repetitions, first_repetition      trials use other data and draws than the experiment: repetitions from 100 on by default
    panel                              the only one in which is searched; what is found holds in all (otherwise every panel has its own)
    max_rounds                         rounds of communication of all trials of one row together, from the ledger; no trial is begun after it
    trials                             of a search over ranges; a grid has as many as it has
    [tune.settings]                    merged into every trial, e.g. fewer rounds
    [tune.ranges]                      "algorithm.lr_lower" = [0.1, 0.3, 1.0]  or  {low = 0.01, high = 1.0}, on a logarithmic scale, or with linear = true
    [tune.rows.R]                      ranges of one row, instead of or besides those

What is chosen goes to [tuned.P.R], beside the figure it was chosen by, trials, rounds spent, commit and time; it wins over the settings of the row.
Lists alone are a plain grid. With a range the search is Optuna's (an extra: pip install 'fedbilevel[tune]').
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tomlkit

from fedbilevel.errors import ExperimentError, SettingError, UnknownNameError
from fedbilevel.experiment import Experiment, Job, Tree, merged
from fedbilevel.record import write_whole
from fedbilevel.reproduce import Figure, Say, commit, reproduce, summary

_KNOWN = ("minimise", "maximise", "otherwise", "panel", "repetitions", "first_repetition", "max_rounds", "trials", "settings", "ranges", "rows")
_RANGE = ("low", "high", "linear", "whole")


@dataclass(frozen=True)
class Trial:
    values: dict[str, Any]  # by dotted name
    score: float  # lower is better
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
    experiment: Experiment, folder: Path, *, panel: str, row: str, device: str = "cpu", processes: int = 1, seed: int = 0, say: Say = lambda _: None
) -> Chosen:
    """Trials of one row in one panel; those that are in the folder already are taken from there."""
    plan, ranges = _plan(experiment), ranges_of(experiment, panel, row)
    if not ranges:
        raise ExperimentError(
            f"{experiment.path} declares no ranges for the row {row!r}: add [tune.rows.{row}], or give it values of what is in [tune.ranges]."
        )
    start = merged(experiment.settings(panel, row), plan.get("settings", {}))
    search = _Grid(ranges) if all(isinstance(values, list) for values in ranges.values()) else _Optuna(ranges, plan.get("trials", 20), seed)
    first = plan.get("first_repetition", 100)
    repetitions = range(first, first + plan.get("repetitions", 1))
    study = experiment.content["rows"][row].get("study", experiment.content["study"])
    trials: list[Trial] = []
    spent = 0
    while spent < plan.get("max_rounds", math.inf) and (asked := search.ask(processes)):
        jobs = [[Job(panel, _label(row, values), r, study, merged(start, _nested(values))) for r in repetitions] for values in asked]
        found = reproduce([job for some in jobs for job in some], folder, device=device, processes=processes, say=say)
        for values, some in zip(asked, jobs, strict=True):
            mine = [(job, content) for job, content in found if job in some]
            figures = summary(mine)[panel, some[0].row]
            trial = Trial(values, _score(plan, figures, len(some)), {name: figure.mean for name, figure in figures.items()})
            search.tell(values, trial.score)
            trials.append(trial)
            spent += int(sum(content["figures"].get("rounds", 0) for _, content in mine))
            say(f"{panel}, {row}: trial {len(trials)}, {_words(values)}: {trial.score:.6g}")
    if not trials:
        raise SettingError("no trial was made: raise max_rounds in [tune].")
    return Chosen(panel, row, trials, spent)


def ranges_of(experiment: Experiment, panel: str, row: str) -> dict[str, Any]:
    """Its own, and those of all rows for settings that this row has."""
    plan, has = _plan(experiment), _dotted(experiment.settings(panel, row))
    return {**{name: values for name, values in plan.get("ranges", {}).items() if name in has}, **plan.get("rows", {}).get(row, {})}


def write(experiment: Experiment, chosen: Chosen) -> None:
    """The chosen values, and what they were chosen by, under [tuned]. Comments stay."""
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
    document.setdefault("tuned", tomlkit.table()).setdefault(chosen.panel, tomlkit.table())[chosen.row] = entry
    write_whole(experiment.path, tomlkit.dumps(document).encode())


class _Grid:
    """Every combination, in the order of the lists."""

    def __init__(self, ranges: Mapping[str, list[Any]]) -> None:
        self.left: Iterator[tuple[Any, ...]] = itertools.product(*ranges.values())
        self.names = list(ranges)

    def ask(self, number: int) -> list[dict[str, Any]]:
        return [dict(zip(self.names, values, strict=True)) for values in itertools.islice(self.left, number)]

    def tell(self, values: Mapping[str, Any], score: float) -> None:
        """A grid learns nothing."""


class _Optuna:
    """Tree-structured Parzen estimator with a fixed seed: the same trials for the same scores."""

    def __init__(self, ranges: Mapping[str, Any], num_trials: int, seed: int) -> None:
        if find_spec("optuna") is None:
            raise SettingError("a search over ranges needs Optuna, which is not installed: pip install 'fedbilevel[tune]', or give lists of values.")
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(5, num_trials // 3)))
        self.space = {name: _distribution(optuna.distributions, name, values) for name, values in ranges.items()}
        self.left, self.open = num_trials, dict[str, Any]()

    def ask(self, number: int) -> list[dict[str, Any]]:
        number = min(number, self.left)
        self.left -= number
        asked = []
        for _ in range(number):
            trial = self.study.ask(self.space)
            values = {name: float(f"{value:.3g}") if isinstance(value, float) else value for name, value in trial.params.items()}
            self.open[json.dumps(values)] = trial
            asked.append(values)
        return asked

    def tell(self, values: Mapping[str, Any], score: float) -> None:
        self.study.tell(self.open.pop(json.dumps(values)), score)


def _distribution(kinds: Any, name: str, values: Any) -> Any:
    if isinstance(values, list):
        return kinds.CategoricalDistribution(values)
    for key in values:
        if key not in _RANGE:
            raise UnknownNameError(f"entry of the range of {name}", key, _RANGE)
    kind = kinds.IntDistribution if values.get("whole") else kinds.FloatDistribution
    return kind(values["low"], values["high"], log=not values.get("linear", False))


def _plan(experiment: Experiment) -> Tree:
    plan: Tree = experiment.content.get("tune", {})
    for name in plan:
        if name not in _KNOWN:
            raise UnknownNameError(f"entry in tune of {experiment.path}", name, _KNOWN)
    if ("minimise" in plan) == ("maximise" in plan):
        raise ExperimentError(f"{experiment.path}: [tune] needs either minimise = FIGURE or maximise = FIGURE.")
    if plan.get("panel", next(iter(experiment.content["panels"]))) not in experiment.content["panels"]:
        raise UnknownNameError(f"panel of {experiment.name}", plan["panel"], experiment.content["panels"])
    for name in plan.get("rows", {}):
        if name not in experiment.content["rows"]:
            raise UnknownNameError(f"row of {experiment.name}", name, experiment.content["rows"])
    return plan


def _score(plan: Tree, figures: Mapping[str, Figure], repetitions: int) -> float:
    """Trials that have the figure in every repetition come first; the others by how far they got."""
    name, sign = (plan["minimise"], 1.0) if "minimise" in plan else (plan["maximise"], -1.0)
    got = figures[plan["otherwise"]].mean if plan.get("otherwise") in figures else -1.0  # -1: diverged
    if name in figures and figures[name].runs == repetitions:
        return sign * figures[name].mean - 1e-6 * got  # it also decides between equals
    missing = repetitions - (figures[name].runs if name in figures else 0)
    return 1e9 * (missing - got / 10)


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


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())
