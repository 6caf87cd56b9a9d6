"""Run the jobs of an experiment in many processes of one thread each, until a time limit.

    python -m benchmarks.worth_jobs --processes 15 --limit 1500 --out runs/worth

A job is one repetition of one row of one panel. Jobs with a result are skipped, so the same command
resumes; jobs that run when the time is up are ended without a result. All rows of a repetition come
before the next repetition, those that take longest first; with --by-panel, all repetitions of a panel
come before the next panel, in the given order. A row that another row computes along with its own
(studies/together.py) waits for it. A job that raises is reported at the end.
Afterwards, `fedbilevel reproduce worth --out runs/worth --repetitions N --record` reads the results.
With --tune the jobs are the trials of [tune]; afterwards, `fedbilevel tune NAME --out FOLDER` reads them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedbilevel.errors import FedBilevelError
from fedbilevel.studies.experiment import Job, read
from fedbilevel.studies.reproduce import reproduce, results
from fedbilevel.studies.together import CHOICES
from fedbilevel.studies.tune import independent_jobs

_LONG = (  # rows that take longest
    "learned", "doge", "uncut", "doremi", "guarded", "blended", "started", "fine-tuned", "fedbabu", "self-tuned",
)  # fmt: skip


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
    """Return the key of the job whose run also holds the row of this job."""
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


def perform(given: tuple[Job, Path, str]) -> Outcome:
    job, folder, device = given
    begun, error = time.perf_counter(), ""
    try:
        reproduce([job], folder, device=device)
    except (FedBilevelError, RuntimeError, ValueError) as raised:  # one job must not end the others
        error = f"{type(raised).__name__}: {raised}"
    return Outcome(job.key, time.perf_counter() - begun, error)


def run(
    jobs: Sequence[Job], folder: Path, *, processes: int, limit: float, device: str = "cpu", panels: Sequence[str] = ()
) -> list[Outcome]:
    """Run the jobs that have no result, and return the outcomes until the time limit."""
    folder.mkdir(parents=True, exist_ok=True)
    done, end = {job.key for job, _ in results(jobs, folder)}, time.monotonic() + limit
    left = [job for job in ordered(jobs, panels) if job.key not in done]
    leaders, num = {job.key: leader(job, left) for job in left}, len(left)
    found: list[Outcome] = []
    print(f"{len(done)} of {len(jobs)} jobs are done, {num} are left", flush=True)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # read by the processes that start now
    ended: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:  # leaving the block ends all processes
        running = 0
        try:
            while len(found) < num:
                waiting = {job.key for job in jobs} - done
                ready = [job for job in left if leaders[job.key] not in waiting][: processes - running]
                for job in ready:
                    left.remove(job)
                    lost = lambda raised, key=job.key: ended.put(Outcome(key, 0.0, repr(raised)))
                    pool.apply_async(perform, ((job, folder, device),), callback=ended.put, error_callback=lost)
                running += len(ready)
                one = ended.get(timeout=max(0.0, end - time.monotonic()))
                running, done = running - 1, done | {one.key}  # one that raised holds nobody up
                found.append(one)
                print(f"{len(found)} of {num}: {one.key} {one.seconds:.1f} s {one.error}", flush=True)
        except queue.Empty:
            print(f"the time is up: {num - len(found)} jobs are left", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="worth", help="name or file of the experiment")
    parser.add_argument("--panels", default="", help="comma-separated; by default all")
    parser.add_argument("--rows", default="", help="comma-separated; by default all")
    parser.add_argument("--by-panel", action="store_true", help="all repetitions of a panel before the next panel")
    parser.add_argument("--repetitions", type=int, default=None)
    parser.add_argument("--tune", action="store_true", help="run the trials of [tune] instead of the rows")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; processes share a GPU")
    parser.add_argument("--out", type=Path, default=Path("runs/worth"))
    given = parser.parse_args(arguments)
    panels, rows = ([one for one in text.split(",") if one] for text in (given.panels, given.rows))
    chosen = read(given.experiment)
    if given.tune:
        jobs = independent_jobs(chosen, panels, rows)
    else:
        jobs = chosen.jobs(panels=panels, rows=rows, repetitions=given.repetitions)
    order = panels or list(dict.fromkeys(job.panel for job in jobs)) if given.by_panel else ()
    found = run(jobs, given.out, processes=given.processes, limit=given.limit, device=given.device, panels=order)
    for one in found:
        if one.error:
            print(f"failed: {one.key}: {one.error}")


if __name__ == "__main__":
    main()
