"""Content of the report page as one plain structure: recorded numbers, and curves of runs.

JSON has no NaN and no infinity, so they are words here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedbilevel._version import __version__
from fedbilevel.columns import DIAGNOSTICS, TERMS, falls, figures_of, metric_and_value, rises
from fedbilevel.errors import ReportError
from fedbilevel.report import page_studies
from fedbilevel.report.page_curves import curves_of, groups_of
from fedbilevel.report.page_runs import Finished, run_of_folder, run_of_result, runs_of_comparison
from fedbilevel.report.record_files import folder_of, is_number, records_in

Source = Path | str | Finished  # a record folder, its main file, or a Result
Goal = tuple[str, float] | str | None  # a metric and the value to reach, or both as METRIC=VALUE
_FIRST = ("test_accuracy", "accuracy", "f1")  # shown first where a record does not say; losses come last


@dataclass
class _Found:
    """The records read so far.

    over: True if all runs have ended, False if a run continues, or None if the folder may receive
        more records.
    """

    runs: list[dict[str, Any]] = field(default_factory=list)
    studies: list[dict[str, Any]] = field(default_factory=list)
    over: bool | None = True
    goal: dict[str, Any] | None = None


def read(
    sources: Sequence[Source], *, target: Goal = None, title: str | None = None, partial: bool = False
) -> dict[str, Any]:
    """Return the whole content of the page.

    partial: accept runs that have no measurement yet.
    """
    pair = _pair(target)
    if not sources:
        raise ReportError("there is nothing to report: name the folder of at least one run.")
    found = _Found()
    for number, source in enumerate(_unique(sources)):
        if isinstance(source, Path):
            _read_folder(folder_of(source), found, partial=partial, alone=len(sources) == 1)
        else:
            found.runs.append(run_of_result(source, number))
    if not found.runs and not found.studies:
        raise ReportError(f"none of the runs in {sources[0]} has a measurement yet: wait for the first one.")
    runs = found.runs
    metrics = figures_of(dict.fromkeys(name for run in runs for name in run["columns"]))
    if pair is not None:
        _check_target(pair[0], runs, metrics)
    return plain(
        {
            "title": title or _title(runs, found.studies),
            "made": {"fedbilevel": __version__, "time": datetime.now(UTC).isoformat(timespec="seconds")},
            "over": found.over,
            "curves": curves_of(runs),
            "groups": groups_of(runs),
            "runs": [
                {name: value for name, value in run.items() if name not in ("traits", "clients", "empty")}
                for run in runs
            ],
            "metrics": _ordered(
                [name for name in metrics if name not in DIAGNOSTICS],
                [name for run in runs for name in run["headline"]],
            ),
            "diagnostics": [name for name in DIAGNOSTICS if name in metrics],
            "falls": [name for name in metrics if falls(name)],
            "rises": [name for name in metrics if rises(name)],
            "target": {"metric": pair[0], "value": pair[1]} if pair is not None else found.goal,
            "partitions": _partitions(runs),
            "studies": found.studies,
            "terms": TERMS,
        }
    )


def _unique(sources: Sequence[Source]) -> list[Path | Finished]:
    """Replace results by their record folders, if they have one, and drop repeated folders."""
    found: dict[Any, Path | Finished] = {}
    for source in sources:
        if isinstance(source, Path | str):
            found[Path(source)] = Path(source)
        elif source.path is not None:
            found[source.path] = source.path
        else:
            found[id(source)] = source
    return list(found.values())


def _read_folder(folder: Path, found: _Found, *, partial: bool, alone: bool) -> None:
    """Add all records of a folder.

    alone: True if the folder is the only source of the page.
    """
    places = records_in(folder)
    found.over = found.over if places == [folder] else None
    for place in places:
        if (place / "config.json").exists():
            run = run_of_folder(place, partial=partial or len(places) > 1)
            if partial or run["columns"] or run["state"] == "failed":  # skip runs that have measured nothing yet
                found.runs.append(run)
            found.over = False if run["state"] == "going" else found.over
        if (place / "comparison.json").exists():
            runs, goal = runs_of_comparison(place, alone and len(places) == 1)
            found.runs, found.goal, found.over = [*found.runs, *runs], found.goal or goal, None
        if (place / "influence.json").exists():
            found.studies.append(page_studies.influence(place))
        if (place / "personalisation.json").exists():
            found.studies.append(page_studies.personalisation(place))
            found.over = None


def _check_target(metric: str, runs: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> None:
    if metric in metrics:
        return
    if any(metric in run["empty"] for run in runs):
        raise ReportError(
            f"the metric {metric!r} was never determined in these records: "
            "every measurement of it is empty; name another metric, or omit the target."
        )
    known = f"name one of {', '.join(metrics)}" if metrics else "omit the target, as they have no metric at all"
    raise ReportError(f"there is no metric named {metric!r} in these records: {known}.")


def _pair(target: Goal) -> tuple[str, float] | None:
    """Parse a target given as text, in the form of the command line."""
    if target is None or (
        isinstance(target, tuple) and len(target) >= 2 and isinstance(target[0], str) and is_number(target[1])
    ):
        return target
    try:
        return metric_and_value(target if isinstance(target, str) else "")
    except ValueError:
        raise ReportError(
            f"target is {target!r:.80}, expected METRIC=VALUE, e.g. 'test_accuracy=0.94', or a pair of both."
        ) from None


def plain(value: Any) -> Any:
    """Convert a value to strict JSON; NaN and infinities become words that JavaScript reads."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def _ordered(metrics: Sequence[str], headline: Sequence[str]) -> list[str]:
    """Sort metrics: the headline of the task, accuracies and F1, other figures, then losses."""

    def rank(name: str) -> int:
        if name in headline:
            return headline.index(name)
        usual = next((i for i, word in enumerate(_FIRST) if word in name), len(_FIRST))
        return len(headline) + (len(_FIRST) + 1 if "loss" in name else usual)

    return sorted(metrics, key=rank)


def _title(runs: Sequence[Mapping[str, Any]], studies: Sequence[Mapping[str, Any]]) -> str:
    """Return a title that names the tasks and studies on the page."""
    names = {"influence": "influence of instances", "personalisation": "personalisation"}
    parts = [str(run["task"]).replace("_", " ") for run in runs] + [names[study["kind"]] for study in studies]
    title = " and ".join(dict.fromkeys(parts))
    return title[:1].upper() + title[1:]


def _partitions(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the data of every client, once for all runs on the same data."""
    found: dict[str, dict[str, Any]] = {}
    for number, run in enumerate(runs):
        if run["clients"] is not None:
            key = json.dumps(run["clients"], sort_keys=True)
            found.setdefault(key, {"clients": run["clients"], "runs": []})["runs"].append(number)
    return list(found.values())
