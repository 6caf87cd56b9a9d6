"""Run the jobs of an experiment in many processes of one thread each, until a time limit.

    python -m benchmarks.worth_jobs --processes 15 --limit 1500 --out runs/worth

A job is one repetition of one row of one panel. Jobs with a result are skipped, so the same command
resumes; jobs that run when the time is up are ended without a result. All rows of a repetition come
before the next repetition, those that take longest first; with --by-panel, all repetitions of a panel
come before the next panel, in the given order. A row that another row computes along with its own
(studies/together.py) waits for it, and rows that share networks run one after the other. A job that raises is
reported at the end.
Afterwards, `fedbilevel reproduce worth --out runs/worth --repetitions N --record` reads the results.
With --extend, repetitions that the file of the experiment records are left out, here and by `reproduce`, whose
--record adds the others to them.
With --tune the jobs are the trials of [tune]; afterwards, `fedbilevel tune NAME --out FOLDER` reads them.

    python -m benchmarks.worth_jobs --list jobs.txt --processes 15 --limit 1500 --out runs/papers

A list has one line `EXPERIMENT PANELS ROWS REPETITIONS` per group of jobs, with commas between names, `-` for all,
and `tune` instead of repetitions for trials. Groups run in this order, results go to OUT/EXPERIMENT and those of
trials to OUT/tune-EXPERIMENT. Jobs of several experiments with equal settings run once. Rows that the file of the
experiment records with these settings and as many repetitions, and searches that it records, are left out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel.errors import ExperimentError, FedBilevelError
from fedbilevel.runs.record import write_whole
from fedbilevel.studies.experiment import Experiment, Job, read
from fedbilevel.studies.extension import num_recorded, unrecorded
from fedbilevel.studies.reproduce import reproduce, results
from fedbilevel.studies.together import CHOICES
from fedbilevel.studies.tune import independent_jobs

_LONG = (  # rows that take longest
    "learned", "doge", "uncut", "doremi", "guarded", "blended", "started", "fine-tuned", "fedbabu", "self-tuned",
)  # fmt: skip


class Place(NamedTuple):
    """A job and the folder of its result."""

    job: Job
    folder: Path


class Outcome(NamedTuple):
    key: str
    seconds: float
    error: str


def ordered(jobs: Sequence[Job], panels: Sequence[str] = ()) -> list[Job]:
    """Return jobs by repetition, long ones first; with panels, in their order before all else."""
    rank = {row: place for place, row in enumerate(_LONG)}
    place = {panel: number for number, panel in enumerate(panels)}
    return sorted(jobs, key=lambda job: (place.get(job.panel, 0), job.repetition, rank.get(job.row, len(_LONG))))


def leader(job: Job, jobs: Sequence[Job]) -> str | None:
    """Return the key of the job that must end before this one, because it holds the row or trains its networks."""
    if job.study == "network_cleaning":
        keys = [one.key for one in jobs if (one.panel, one.repetition) == (job.panel, job.repetition)]
        place = keys.index(job.key)
        return keys[place - 1] if place else None
    name = job.settings.get("task", {}).get("name") if job.study == "worth" else None
    row = "self-tuned" if name == "influence" else "guarded"
    if name in (None, "data_cleaning") or job.row in (row, "self-tuned"):
        return None
    for one in jobs:
        if (one.panel, one.row, one.repetition) == (job.panel, row, job.repetition):
            among, method = one.settings.get("rivals"), job.settings["method"]
            if name == "influence" or among is None or method in (*CHOICES, *among):
                return one.key
    return None


def listed(text: str, out: Path, *, extend: bool = False) -> list[Place]:
    """Return the jobs of a list in its order; with `extend`, without repetitions that files record."""
    found = []
    for line in filter(None, (line.partition("#")[0].strip() for line in text.splitlines())):
        try:
            name, panels, rows, repetitions = line.split()
        except ValueError:
            raise ExperimentError(f"{line!r} is not EXPERIMENT PANELS ROWS REPETITIONS: correct the list.") from None
        chosen = read(name)
        some_panels, some_rows = (_names("" if part == "-" else part) for part in (panels, rows))
        if repetitions == "tune":
            jobs, folder = independent_jobs(chosen, some_panels, some_rows), out / f"tune-{chosen.name}"
            jobs = [job for job in jobs if not searched(chosen, job)]
        else:
            number = chosen.content.get("repetitions", 1) if repetitions == "-" else int(repetitions)
            jobs, folder = chosen.jobs(panels=some_panels, rows=some_rows, repetitions=number), out / chosen.name
            jobs = [job for job in ordered(jobs) if not recorded(chosen, job, number)]
            jobs = unrecorded(chosen, jobs) if extend else jobs
        found += [Place(job, folder) for job in jobs]
    return found


def recorded(experiment: Experiment, job: Job, number: int) -> bool:
    there = experiment.content.get("result", {}).get(job.panel, {}).get(job.row, {})
    if job.settings.get("indirect") and not {"indirect_share", "diverged"} & set(there.get("figures", {})):
        return False  # recorded before this figure was measured; it is no part of the digest
    return num_recorded(experiment, job) >= number


def searched(experiment: Experiment, trial: Job) -> bool:
    """Return whether the file records a search of a trial's row with as many trials as [tune] asks for."""
    own = [row for row in experiment.content["rows"] if trial.row.startswith(f"{row}-")]
    entry = experiment.content.get("tuned", {}).get(trial.panel, {}).get(max(own, key=len), {})
    return bool(entry.get("trials", 0) >= experiment.content["tune"].get("trials", 20))


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def perform(given: tuple[list[Place], str]) -> Outcome:
    """Run the first of several jobs with equal settings, and write its result for all of them."""
    places, device = given
    (job, folder), begun, error = places[0], time.perf_counter(), ""
    try:
        reproduce([job], folder, device=device)
        share(places)
    except (FedBilevelError, RuntimeError, ValueError) as raised:  # one job must not end the others
        error = f"{type(raised).__name__}: {raised}"
    return Outcome(job.key, time.perf_counter() - begun, error)


def share(places: Sequence[Place]) -> bool:
    """Write the result of one of several equal jobs for all of them; return whether there is a result."""
    there = [results([job], folder) for job, folder in places]
    content = next((found[0][1] for found in there if found), None)
    for (job, folder), found in zip(places, there, strict=True):
        if content is not None and not found:
            folder.mkdir(parents=True, exist_ok=True)
            own = {**content, "panel": job.panel, "row": job.row}
            write_whole(folder / f"{job.key}.json", json.dumps(own).encode())
    return content is not None


def equal(places: Sequence[Place]) -> list[list[Place]]:
    """Group jobs with equal settings, in the order of their first place."""
    groups: dict[str, list[Place]] = {}
    for place in places:
        job = place.job
        groups.setdefault(json.dumps([job.study, job.settings, job.repetition], sort_keys=True), []).append(place)
    return list(groups.values())


def run(jobs: Sequence[Job], folder: Path, *, processes: int, limit: float, device: str = "cpu") -> list[Outcome]:
    """Run the jobs that have no result, and return the outcomes until the time limit."""
    return run_places([Place(job, folder) for job in ordered(jobs)], processes=processes, limit=limit, device=device)


def run_places(places: Sequence[Place], *, processes: int, limit: float, device: str = "cpu") -> list[Outcome]:
    """Run the jobs that have no result, in the given order but for waits, and return the outcomes until the limit."""
    groups, end = equal(places), time.monotonic() + limit
    left = [group for group in groups if not share(group)]
    leaders, num = _leaders(left), len(left)
    done = {id(group) for group in groups} - {id(group) for group in left}
    found: list[Outcome] = []
    print(f"{len(groups) - num} of {len(groups)} jobs are done, {num} are left", flush=True)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # read by the processes that start now
    ended: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:  # leaving the block ends all processes
        running = 0
        try:
            while len(found) < num:
                ready = [one for one in left if leaders.get(id(one)) in done | {None}][: processes - running]
                for group in ready:
                    left.remove(group)
                    _submit(pool, group, device, ended)
                running += len(ready)
                place, one = ended.get(timeout=max(0.0, end - time.monotonic()))
                running, done = running - 1, done | {place}  # a job that raised holds nobody up
                found.append(one)
                print(f"{len(found)} of {num}: {one.key} {one.seconds:.1f} s {one.error}", flush=True)
        except queue.Empty:
            print(f"the time is up: {num - len(found)} jobs are left", flush=True)
    return found


def _leaders(groups: Sequence[list[Place]]) -> dict[int, int]:
    """Return, by group, the group whose run also holds its rows."""
    places = {(one[0].folder, one[0].job.key): id(one) for one in groups}
    found: dict[int, int] = {}
    for group in groups:
        job, folder = group[0]
        key = leader(job, [one[0].job for one in groups if one[0].folder == folder])
        if key is not None:
            found[id(group)] = places[folder, key]
    return found


def _submit(pool: Any, group: list[Place], device: str, ended: queue.SimpleQueue[tuple[int, Outcome]]) -> None:
    place, key = id(group), group[0].job.key
    pool.apply_async(
        perform,
        ((group, device),),
        callback=lambda one: ended.put((place, one)),
        error_callback=lambda raised: ended.put((place, Outcome(key, 0.0, repr(raised)))),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="worth", help="name or file of the experiment")
    parser.add_argument("--panels", default="", help="comma-separated; by default all")
    parser.add_argument("--rows", default="", help="comma-separated; by default all")
    parser.add_argument("--by-panel", action="store_true", help="all repetitions of a panel before the next panel")
    parser.add_argument("--repetitions", type=int, default=None)
    parser.add_argument("--extend", action="store_true", help="leave out repetitions that the file records")
    parser.add_argument("--tune", action="store_true", help="run the trials of [tune] instead of the rows")
    parser.add_argument("--list", type=Path, default=None, help="file with groups of jobs of several experiments")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; processes share a GPU")
    parser.add_argument("--out", type=Path, default=Path("runs/worth"))
    given = parser.parse_args(arguments)
    if given.list is not None:
        places = listed(given.list.read_text(), given.out, extend=given.extend)
    else:
        chosen, panels, rows = read(given.experiment), _names(given.panels), _names(given.rows)
        jobs = (
            independent_jobs(chosen, panels, rows)
            if given.tune
            else chosen.jobs(panels=panels, rows=rows, repetitions=given.repetitions)
        )
        jobs = unrecorded(chosen, jobs) if given.extend else jobs
        order = panels or list(dict.fromkeys(job.panel for job in jobs)) if given.by_panel else ()
        places = [Place(job, given.out) for job in ordered(jobs, order)]
    found = run_places(places, processes=given.processes, limit=given.limit, device=given.device)
    for one in found:
        if one.error:
            print(f"failed: {one.key}: {one.error}")


if __name__ == "__main__":
    main()
