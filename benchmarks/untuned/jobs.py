"""Searches and runs of the benchmark as jobs of several processes."""

from __future__ import annotations

import json
import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.untuned import table
from benchmarks.untuned.pairs import PAIRS
from benchmarks.untuned.search import best, run, search, write
from fedbilevel.studies.provenance import commit


class Job(NamedTuple):
    """A search (seed None), or one run with a reported seed."""

    pair: str
    algorithm: str
    seed: int | None


@dataclass(frozen=True)
class Plan:
    pairs: Sequence[str]
    ours: str
    rivals: Sequence[str]
    seeds: Sequence[int]
    stages: Sequence[str]
    num_trials: int
    deadline: float
    folder: Path

    def tuned(self, pair: str, algorithm: str) -> bool:
        place = table.tune_place(self.folder, pair, algorithm)
        return place.exists() and len(json.loads(place.read_text())["trials"]) >= self.num_trials

    def open(self) -> list[Job]:
        """Return the jobs that are not done, pair by pair, searches before runs."""
        jobs: list[Job] = []
        for pair in self.pairs:
            if "tune" in self.stages:
                jobs += [Job(pair, rival, None) for rival in self.rivals if not self.tuned(pair, rival)]
            if "final" in self.stages:
                jobs += [
                    Job(pair, algorithm, seed)
                    for algorithm in (self.ours, *self.rivals)
                    for seed in self.seeds
                    if not table.final_place(self.folder, pair, algorithm, seed).exists()
                ]
        return jobs

    def ready(self, job: Job) -> bool:
        """Return whether a job can start: runs of a rival need the end of its search."""
        return job.seed is None or job.algorithm == self.ours or self.tuned(job.pair, job.algorithm)


def do(plan: Plan, job: Job) -> None:
    """Do one job in this process."""
    pair, trials = PAIRS[job.pair], table.tune_place(plan.folder, job.pair, job.algorithm)
    if job.seed is None:
        search(pair, job.pair, job.algorithm, trials, num_trials=plan.num_trials, deadline=plan.deadline)
        return
    settings = {} if job.algorithm == plan.ours else best(pair, trials)
    outcome = run(pair, job.algorithm, settings, job.seed)
    write(
        table.final_place(plan.folder, job.pair, job.algorithm, job.seed),
        {**outcome._asdict(), "settings": settings, "commit": commit()},
    )


def attempt(plan: Plan, job: Job) -> str | None:
    """Do one job, and return the error as text, because some errors do not pass between processes."""
    try:
        do(plan, job)
    except Exception:  # noqa: BLE001 - the other jobs continue, and the command ends with an error
        return traceback.format_exc()
    return None


def work(plan: Plan, processes: int, say: Callable[[str], None]) -> int:
    """Do all open jobs in several processes; return the number of jobs that failed."""
    waiting, running, num_failed = plan.open(), dict[Future[str | None], Job](), 0
    with ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as pool:
        while waiting or running:
            for job in [job for job in waiting if plan.ready(job)][: processes - len(running)]:
                if time.time() < plan.deadline:
                    running[pool.submit(attempt, plan, job)] = job
                    waiting.remove(job)
            if not running:  # the rest is late, or waits for searches that did not end
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, error = running.pop(future), future.result()
                what = "search" if job.seed is None else f"seed {job.seed}"
                num_failed += error is not None
                say(f"{job.pair}, {job.algorithm}, {what}: {error or 'done'}")
    if waiting:
        say(f"{len(waiting)} jobs are left: repeat the command to continue.")
    return num_failed
