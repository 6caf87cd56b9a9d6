"""Runs the experiments of the papers: every job once, whatever interrupts; ours beside theirs; pictures; and what came out, written into the file.

A folder of results has one JSON file per job. A job whose file is there with the same settings is not run again, and one that was cut short goes on from its
checkpoint (where its study keeps one). `record` writes means over repetitions into the experiment's TOML, with the commit, the machine and the time of the
runs they come from.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import multiprocessing
import os
import pkgutil
import platform
import shutil
import subprocess
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
from fedbilevel import plots
from fedbilevel.errors import ExperimentError, FedBilevelError, UnknownNameError
from fedbilevel.runs.record import make_folder, write_whole
from fedbilevel.runs.resume import versions
from fedbilevel.studies import given
from fedbilevel.studies.compare import Spread
from fedbilevel.studies.experiment import Experiment, Job, write

Say = Callable[[str], None]
_POINTS = 60  # of a line that is kept beside the experiment
_DIGITS = 6


class Figure(NamedTuple):
    """Over the repetitions in which it exists: a target that was not reached has no cost."""

    mean: float
    deviation: float
    runs: int


def studies() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(fedbilevel.studies.kinds.__path__)]


def reproduce(
    jobs: Sequence[Job], folder: Path, *, device: str = "cpu", processes: int = 1, say: Say = lambda _: None
) -> list[Any]:
    """All jobs, those that are done from their files. Returns what `results` returns."""
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
    """(job, what its file holds), for jobs that are done."""
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
        raise ExperimentError(
            f"{path} does not hold a result ({error}): remove it, and the job is run again."
        ) from error
    return content if same else None


def _perform(job: Job, folder: Path, device: str, source: str, say: Say) -> None:
    """`source` is the commit of the source as it was read, not as it may be when a long job ends."""
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
    """What a job that was cut short has left, if it can be gone on with."""
    try:
        begun = json.loads(note.read_text())
    except (OSError, ValueError):
        return None
    return begun if isinstance(begun, dict) and {"study", "settings", "commits"} <= set(begun) else None


def _side_by_side(jobs: Sequence[Job], folder: Path, device: str, processes: int, say: Say) -> None:
    """Jobs share nothing but the folder, and each has a file of its own. No job waits inside the pool: an interrupt ends those that run and begins no other."""
    threads = max(
        1, min(torch.get_num_threads(), (os.cpu_count() or 1) // processes)
    )  # never more than the user allows: too many crawl
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
                    problem = "its process ended without a word, perhaps for want of memory; the same command goes on with what is left"
                if problem:
                    raise ExperimentError(f"{job.key}: {problem}")
                say(f"{done} of {len(jobs)} done: {job.key}")


def _quietly(job: Job, folder: Path, device: str, source: str) -> str:
    try:
        _perform(job, folder, device, source, lambda _: None)
    except FedBilevelError as error:  # as text: not every error of ours travels between processes
        return str(error)
    return ""


# ---- what came out ------------------------------------------------------------------------------------------------------------


def summary(found: Sequence[tuple[Job, Mapping[str, Any]]]) -> dict[tuple[str, str], dict[str, Figure]]:
    """Means over repetitions of every row of every panel; `repetitions` says how many there were, with or without a figure."""
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
    """Into the file: what is there about other rows stays, comments too. Fewer repetitions than are there are refused."""
    document: Any = tomlkit.parse(experiment.path.read_text())
    by_place: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for job, content in found:
        by_place.setdefault((job.panel, job.row), []).append(content)
    kept = experiment.path.parent / "curves.json"
    curves = _curves(kept)
    means, digests = summary(found), {(job.panel, job.row): job.digest for job, _ in found}
    for (panel, row), contents in by_place.items():
        there = experiment.content.get("result", {}).get(panel, {}).get(row, {})
        before = there.get("repetitions", 0) if there.get("settings") == digests[panel, row] else 0
        if len(contents) < before:
            raise ExperimentError(
                f"{experiment.path} holds {before} repetitions of {row} in {panel}, these are {len(contents)}: run more, or remove what is there."
            )
        entry, figures = tomlkit.table(), tomlkit.table()
        entry["settings"], entry["repetitions"] = digests[panel, row], len(contents)
        entry["commit"] = ", ".join(sorted({one for content in contents for one in content["commit"].split(", ")}))
        entry["machine"] = ", ".join(sorted({content["machine"] for content in contents}))
        entry["time"] = max(content["time"] for content in contents)
        entry["seconds"] = _rounded(sum(content["seconds"] for content in contents))
        for name, figure in means[panel, row].items():
            if name != "repetitions":
                one = tomlkit.inline_table()
                one.update(
                    {"mean": _rounded(figure.mean), "deviation": _rounded(figure.deviation), "runs": figure.runs}
                )
                figures[name] = one
        entry["figures"] = figures
        nested(document, "result", panel)[row] = entry
    write(experiment, "result", document)
    names = [experiment.content.get("plot", {}).get(axis) for axis in "xy"]
    for (panel, row), contents in by_place.items():
        lines = [
            [{name: point[name] for name in names if name in point} for point in _thinned(content["curve"])]
            for content in contents
        ]
        curves.setdefault(panel, {})[row] = [
            [point for point in line if all(map(math.isfinite, point.values()))] for line in lines
        ]
    if any(names):
        write_whole(kept, (json.dumps(curves, allow_nan=False) + "\n").encode())
        for panel in dict.fromkeys(panel for panel, _ in by_place):
            _draw_panel(experiment, panel, curves[panel], kept.with_name(f"{panel}.png"))


def nested(document: Any, *names: str) -> Any:
    """The table of that name in a document that is being edited, made where it is missing."""
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


def draw(experiment: Experiment, found: Sequence[tuple[Job, Mapping[str, Any]]], folder: Path) -> list[Path]:
    """Lines of all rows, one picture per panel, and who has which labels; nothing if matplotlib is missing."""
    if not plots.available():
        return []
    drawn = []
    for panel in dict.fromkeys(job.panel for job, _ in found):
        mine = [(job, content) for job, content in found if job.panel == panel]
        curves: dict[str, list[Any]] = {}
        for job, content in mine:
            curves.setdefault(job.row, []).append(content["curve"])
        if _draw_panel(experiment, panel, curves, folder / f"{panel}.png"):
            drawn.append(folder / f"{panel}.png")
        labels = _labels(mine[0][0])
        if labels is not None:
            drawn.append(folder / f"{panel}-partition.png")
            plots.partition(labels, drawn[-1], f"training samples, {experiment.panel_title(panel)}")
    return drawn


def _draw_panel(experiment: Experiment, panel: str, curves: Mapping[str, Sequence[Any]], path: Path) -> bool:
    """The lines or points of all rows, in the order of the file; false if there is nothing to draw or nothing to draw with."""
    plot = experiment.content.get("plot")
    if plot is None or not plots.available():
        return False
    titles = [experiment.row_title(row) for row in experiment.content["rows"]]
    named = {
        row: title if titles.count(title) == 1 else row
        for row, title in zip(experiment.content["rows"], titles, strict=True)
    }
    axes = {plot["x"], plot["y"]}
    shown = {
        name: [[point for point in line if axes <= set(point)] for line in curves[row]]
        for row, name in named.items()
        if row in curves
    }
    shown = {name: lines for name, lines in shown.items() if any(lines)}  # a reference without rounds has no line
    if not shown:
        return False
    about = {"x": plot["x"], "y": plot["y"], "title": f"{experiment.title}\n{experiment.panel_title(panel)}"}
    if plot.get("kind") == "points":
        plots.points(shown, path, **about)
    else:
        plots.lines(shown, path, log=plot.get("log", ()), **about)
    return True


def _labels(job: Job) -> list[Any] | None:
    """The training labels of every client of the first repetition, for tasks that have such."""
    task = job.settings.get("task")
    if not isinstance(task, Mapping) or "name" not in task:
        return None
    built = given.task(task).build()
    if not all("label" in client["train"] for client in built.clients):
        return None
    labels = [client["train"]["label"] for client in built.clients]
    return labels if all(len(getattr(label, "shape", (0, 0))) == 1 for label in labels) else None


def _thinned(curve: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """At most so many points, the first and the last among them."""
    if len(curve) <= _POINTS:
        return list(curve)
    return [curve[round(i * (len(curve) - 1) / (_POINTS - 1))] for i in range(_POINTS)]


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


# ---- where and from what it was run -------------------------------------------------------------------------------------------


@functools.cache
def commit() -> str:
    """The commit of the source when first asked, with + if it was changed since; $FEDBILEVEL_COMMIT if it is set: a copy of the source may lack its history, or
    have another one."""
    root = Path(__file__).resolve().parents[3]
    if os.environ.get("FEDBILEVEL_COMMIT") or not (root / ".git").exists():
        return os.environ.get("FEDBILEVEL_COMMIT", "unknown")
    ask = lambda *words: subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
    ).stdout.strip()
    changed = ask("status", "--porcelain", "--untracked-files=no", "--", "src")
    return (ask("rev-parse", "--short=10", "HEAD") or "unknown") + ("+" if changed else "")


def machine(device: str) -> str:
    """What a time must be read with: processor and cores, or the GPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"
