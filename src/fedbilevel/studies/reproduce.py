"""Run the experiments of papers, and record their results.

A folder of results has one JSON file per job. A job with a file of the same settings is not
repeated. An interrupted job resumes from its checkpoint, if its study writes one. `record` writes
means over repetitions into the experiment's TOML, with the commit, the machine and the time of the
runs.
"""

from __future__ import annotations

import importlib
import json
import math
import multiprocessing
import os
import pkgutil
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit
import torch

import fedbilevel.studies.kinds
from fedbilevel.errors import ExperimentError, FedBilevelError, UnknownNameError
from fedbilevel.runs.record import make_folder, write_whole
from fedbilevel.runs.resume import versions
from fedbilevel.studies import extension
from fedbilevel.studies.comparison import Spread
from fedbilevel.studies.experiment import Experiment, Job, write
from fedbilevel.studies.pictures import draw_panel
from fedbilevel.studies.provenance import commit, machine
from fedbilevel.studies.verdicts import values_of

Say = Callable[[str], None]
_POINTS = 60  # largest number of points of a recorded line
_DIGITS = 6


class Figure(NamedTuple):
    """A figure over the repetitions that have it; a target that was not reached has no cost."""

    mean: float
    deviation: float
    runs: int


def studies() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(fedbilevel.studies.kinds.__path__)]


def reproduce(
    jobs: Sequence[Job], folder: Path, *, device: str = "cpu", processes: int = 1, say: Say = lambda _: None
) -> list[Any]:
    """Run all jobs that have no results yet, and return `results` of all jobs."""
    known = studies()
    for job in jobs:
        if job.study not in known:
            raise UnknownNameError("study", job.study, known)
    jobs = list({job.key: job for job in jobs}.values())
    make_folder(folder)
    missing = [job for job in jobs if _done(folder, job) is None]
    if processes > 1 and len(missing) > 1:
        _side_by_side(missing, folder, device, processes, say)
    else:
        for number, job in enumerate(missing, 1):
            say(f"{number} of {len(missing)}: {job.key}")
            _perform(job, folder, device, commit(), _prefixed(say, f"{number} of {len(missing)}: {job.key}"))
    return results(jobs, folder)


def _prefixed(say: Say, prefix: str) -> Say:
    return lambda text: say(f"{prefix}, {text}")


def results(jobs: Iterable[Job], folder: Path) -> list[Any]:
    """Return pairs of a finished job and the content of its file."""
    return [(job, found) for job in jobs if (found := _done(folder, job)) is not None]


def _done(folder: Path, job: Job) -> dict[str, Any] | None:
    path = folder / f"{job.key}.json"
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        same = content["settings"] == json.loads(json.dumps(job.settings)) and content["study"] == job.study
        content["figures"], content["curve"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ExperimentError(f"{path} does not hold a result ({error}): remove it to run the job again.") from error
    return content if same else None


def _perform(job: Job, folder: Path, device: str, source: str, say: Say) -> None:
    """Run one job.

    source: the commit at the start, because the commit may change during a long job.
    """
    work, clock = folder / job.key, time.perf_counter()
    about = {"study": job.study, "settings": json.loads(json.dumps(job.settings))}
    begun = _begun(work / "job.json")
    if begun is None or {name: begun[name] for name in about} != about:
        shutil.rmtree(work, ignore_errors=True)  # checkpoints of other settings
        begun = {**about, "commits": []}
    make_folder(work)
    begun["commits"] = list(dict.fromkeys([*begun["commits"], source]))
    write_whole(work / "job.json", json.dumps(begun).encode())
    outcome = importlib.import_module(f"fedbilevel.studies.kinds.{job.study}").run(
        job.settings, repetition=job.repetition, folder=work, device=device, say=say
    )
    curve = [{name: _rounded(value) for name, value in point.items()} for point in outcome.curve]
    content = {
        "panel": job.panel,
        "row": job.row,
        "repetition": job.repetition,
        **about,
        "figures": outcome.figures,
        "seconds": time.perf_counter() - clock,
        "commit": ", ".join(begun["commits"]),
        "machine": machine(device),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "curve": curve,
    }
    write_whole(folder / f"{job.key}.json", json.dumps(content).encode())
    shutil.rmtree(work)


def _begun(note: Path) -> dict[str, Any] | None:
    """Return the note of an interrupted job, or None if the job cannot be resumed."""
    try:
        begun = json.loads(note.read_text())
    except (OSError, ValueError):
        return None
    return begun if isinstance(begun, dict) and {"study", "settings", "commits"} <= set(begun) else None


def _side_by_side(jobs: Sequence[Job], folder: Path, device: str, processes: int, say: Say) -> None:
    """Run jobs in several processes, each with its own file.

    No job waits inside the pool, so that an interrupt starts no further job.
    """
    # no more threads than cores or than the user allows: more are slower
    threads = max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // processes))
    left, done = list(reversed(jobs)), 0
    with ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(threads,),
    ) as pool:
        running: dict[Any, Job] = {}
        while left or running:
            while left and len(running) < processes:
                job = left.pop()
                running[pool.submit(_quietly, job, folder, device, commit())] = job
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, done = running.pop(future), done + 1
                try:
                    problem = future.result()
                except BrokenProcessPool:
                    problem = (
                        "its process ended without a message, perhaps for lack of memory; "
                        "the same command resumes the experiment"
                    )
                if problem:
                    raise ExperimentError(f"{job.key}: {problem}")
                say(f"{done} of {len(jobs)} done: {job.key}")


def _quietly(job: Job, folder: Path, device: str, source: str) -> str:
    try:
        _perform(job, folder, device, source, lambda _: None)
    except FedBilevelError as error:  # as text, because not every error can be pickled
        return str(error)
    return ""


def summary(found: Sequence[tuple[Job, Mapping[str, Any]]]) -> dict[tuple[str, str], dict[str, Figure]]:
    """Return means over repetitions for every row of every panel.

    `repetitions` counts all repetitions, with or without a figure.
    """
    values: dict[tuple[str, str], dict[str, list[float]]] = {}
    for job, content in found:
        mine = values.setdefault((job.panel, job.row), {"repetitions": []})
        mine["repetitions"].append(1.0)
        for name, value in content["figures"].items():
            if value is not None and math.isfinite(value):
                mine.setdefault(name, []).append(value)
    return {
        place: {name: Figure(*Spread.of(some), len(some)) for name, some in figures.items()}
        for place, figures in values.items()
    }


def record(experiment: Experiment, found: Sequence[tuple[Job, Mapping[str, Any]]]) -> None:
    """Write results into the experiment's file; other rows and comments do not change.

    Results with fewer repetitions than the recorded ones are refused. Repetitions that follow the
    recorded ones are added to them (studies/extension.py).
    """
    document: Any = tomlkit.parse(experiment.path.read_text())
    by_place: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for job, content in found:
        by_place.setdefault((job.panel, job.row), []).append(content)
    kept = experiment.path.parent / "curves.json"
    curves = _curves(kept)
    values = values_of(experiment, found)
    means, jobs = summary(found), dict[tuple[str, str], list[Job]]()
    for job, _ in found:
        jobs.setdefault((job.panel, job.row), []).append(job)
    further = {place for place, own in jobs.items() if extension.extends(experiment, own)}
    for (panel, row), contents in by_place.items():
        before = extension.num_recorded(experiment, jobs[panel, row][0])
        there = experiment.content.get("result", {}).get(panel, {}).get(row, {})
        if (panel, row) not in further and len(contents) < before:
            raise ExperimentError(
                f"{experiment.path} holds {before} repetitions of {row} in {panel}, these are {len(contents)}: "
                "run more, or remove the recorded ones."
            )
        entry: dict[str, Any] = {
            "settings": jobs[panel, row][0].digest,
            "repetitions": len(contents),
            "commit": ", ".join(sorted({one for content in contents for one in content["commit"].split(", ")})),
            "machine": ", ".join(sorted({content["machine"] for content in contents})),
            "time": max(content["time"] for content in contents),
            "seconds": sum(content["seconds"] for content in contents),
            "figures": {name: one._asdict() for name, one in means[panel, row].items() if name != "repetitions"},
        }
        if "verdict" in experiment.content:
            own, first = values.get((panel, row), {}), min(job.repetition for job in jobs[panel, row])
            entry["values"] = list(own.values())
            if [number - first for number in own] != list(range(len(own))):
                entry["repeated"] = [number - first for number in own]  # repetitions that have values; others failed
        if (panel, row) in further:
            entry = extension.joined(there, entry)
        nested(document, "result", panel)[row] = _written(entry)
    write(experiment, "result", document)
    names = [experiment.content.get("plot", {}).get(axis) for axis in "xy"]
    for (panel, row), contents in by_place.items():
        lines = [
            [{name: point[name] for name in names if name in point} for point in _thinned(content["curve"])]
            for content in contents
        ]
        earlier = curves.get(panel, {}).get(row, []) if (panel, row) in further else []
        curves.setdefault(panel, {})[row] = [
            *earlier,
            *([point for point in line if all(map(math.isfinite, point.values()))] for line in lines),
        ]
    if any(names):
        write_whole(kept, (json.dumps(curves, allow_nan=False) + "\n").encode())
        for panel in dict.fromkeys(panel for panel, _ in by_place):
            draw_panel(experiment, panel, curves[panel], kept.with_name(f"{panel}.png"))


def _written(entry: Mapping[str, Any]) -> Any:
    """Return the entry as a table of the file, with rounded numbers and a line per figure."""
    table, figures = tomlkit.table(), tomlkit.table()
    for name, value in entry.items():
        if name == "values":
            value = [_rounded(one) for one in value]
        if name != "figures":
            table[name] = _rounded(value)
    for name, figure in entry["figures"].items():
        figures[name] = tomlkit.inline_table()
        figures[name].update({part: _rounded(value) for part, value in figure.items()})
    table["figures"] = figures
    return table


def nested(document: Any, *names: str) -> Any:
    """Return the table at `names` in an edited document, and add missing tables."""
    for name in names:
        if name not in document:
            document[name] = tomlkit.table(is_super_table=True)
        document = document[name]
        if isinstance(document, tomlkit.items.InlineTable) or not isinstance(document, Mapping):
            raise ExperimentError(
                f"[{name}] is in a form that cannot be added to: write it as tables, [{names[0]}.PANEL.ROW]."
            )
    return document


def _curves(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text())) if path.exists() else {}
    except (OSError, ValueError, TypeError) as error:
        raise ExperimentError(
            f"{path} does not hold curves ({error}): restore it from a copy, or remove it and record all rows again."
        ) from error


def _thinned(curve: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Return at most _POINTS points of a curve, including the first and the last."""
    if len(curve) <= _POINTS:
        return list(curve)
    return [curve[round(i * (len(curve) - 1) / (_POINTS - 1))] for i in range(_POINTS)]


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
