"""Run the judge: `python -m benchmarks.judge --processes 2` writes benchmarks/results/judge.json and RESULTS.md.

Every tuned method has the same trials (step x ratio of the steps of x and y), on a seed that is not
reported, chosen by the squared norm of the gradient of the value function. Every run may use the
same number of samples. `self_tuned` has no trial. A run that diverges has no figure.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import results
from benchmarks.clock import Setup
from benchmarks.judge.problems import PROBLEMS, Judged
from benchmarks.judge.rivals import BATCH, RIVALS
from fedbilevel.errors import FedBilevelError
from fedbilevel.federation.schedule import Schedule
from fedbilevel.runs.solve import solve

STEPS, RATIOS = (0.5, 0.2, 0.1, 0.03), (1.0, 0.1, 0.01)
TUNING_SEED = 100
FALLING = Schedule(power=0.5, offset=0)
OURS: dict[str, dict[str, Any]] = {  # settings beside the tuned steps
    "fedbio": {"num_local_steps": 10, "minibatches": "shared", "schedule": FALLING},
    "fedbioacc": {"num_local_steps": 10, "minibatches": "shared"},
    "fbo_aggitd": {"num_lower_rounds": 10, "schedule": FALLING},
    "penalty": {"num_local_steps": 10, "schedule": FALLING},
    "self_tuned": {},
}
UNTUNED = ("self_tuned",)
HEADINGS = {
    "gradient": "squared gradient of the value function",
    "low": "smallest",
    "high": "largest",
    "value": "value function",
    "samples": "samples",
    "trials": "trials",
}


class Task(NamedTuple):
    problem: str
    method: str
    step: float
    ratio: float
    seed: int
    budget: int


class Found(NamedTuple):
    task: Task
    gradient: float
    value: float
    samples: int
    seconds: float


def perform(task: Task) -> Found:
    """Run one method once, and measure its x."""
    torch.set_num_threads(1)
    judged, begun = PROBLEMS[task.problem](), time.perf_counter()
    if task.method in RIVALS:
        x, samples = RIVALS[task.method](judged, task.step, task.ratio, task.seed, task.budget), task.budget
    else:
        x, samples = _ours(judged, task)
    seconds = time.perf_counter() - begun
    if x is None or not bool(torch.isfinite(x).all()):
        return Found(task, math.inf, math.inf, samples, seconds)
    try:
        found = judged.measures(x)
    except RuntimeError:  # torch's error of a singular matrix: x left the range of the problem
        return Found(task, math.inf, math.inf, samples, seconds)
    ok = all(map(math.isfinite, found.values()))
    return Found(task, found["gradient"] if ok else math.inf, found["value"] if ok else math.inf, samples, seconds)


def _ours(judged: Judged, task: Task) -> tuple[Any, int]:
    """Run a method of the library for as many outer iterations as the samples allow."""
    steps = {"lr_upper": task.step / task.ratio, "lr_lower": task.step}
    steps |= {"lr_system": task.step} if task.method != "penalty" else {}
    own = {**({} if task.method in UNTUNED else steps), **OURS[task.method]}

    def run(num: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return solve(
                judged.problem(), [judged.client()], task.method, num_iterations=num, measure_every=num,
                residuals=False, recover=False, seed=task.seed, batch_size=BATCH, sampling="epochs", **own,
            )  # fmt: skip

    try:
        few, more = (run(num).ledger["samples"] for num in (1, 3))
        each = (more - few) / 2
        result = run(max(1, int((task.budget - few) / each) + 1))
    except FedBilevelError:
        return None, task.budget
    return result.x["x"], int(result.ledger["samples"])


def trials(problem: str, method: str, budget: int) -> list[Task]:
    return [Task(problem, method, step, ratio, TUNING_SEED, budget) for step, ratio in itertools.product(STEPS, RATIOS)]


def rows(finals: Sequence[Found], tried: dict[str, int]) -> list[dict[str, Any]]:
    """Return a row per method, the best first: medians over seeds, and the range."""
    found = []
    for method in dict.fromkeys(one.task.method for one in finals):
        mine = [one for one in finals if one.task.method == method]
        size = [one.gradient for one in mine]
        middle = statistics.median(size)
        shown = lambda value: value if math.isfinite(value) else "diverged"
        found.append(
            {
                "method": method,
                "gradient": shown(middle),
                "low": shown(min(size)),
                "high": shown(max(size)),
                "value": shown(statistics.median(one.value for one in mine)),
                "samples": max(one.samples for one in mine),
                "seconds": statistics.median(one.seconds for one in mine),
                "step": mine[0].task.step if tried[method] else "",
                "ratio": mine[0].task.ratio if tried[method] else "",
                "trials": tried[method],
            }
        )
    return sorted(found, key=lambda row: math.inf if isinstance(row["gradient"], str) else row["gradient"])


def judge(problem: str, methods: Sequence[str], budget: int, seeds: int, pool: Any) -> list[dict[str, Any]]:
    """Tune every method with the same trials, run the best settings with the seeds, and return the table."""
    searched = [method for method in methods if method not in UNTUNED]
    tried = list(pool.imap_unordered(perform, [one for method in searched for one in trials(problem, method, budget)]))
    chosen = {method: (1.0, 1.0) for method in methods}
    for method in searched:
        best = min((one for one in tried if one.task.method == method), key=lambda one: one.gradient)
        chosen[method] = (best.task.step, best.task.ratio)
    finals = [Task(problem, method, *chosen[method], seed, budget) for seed in range(seeds) for method in methods]
    count = {method: sum(one.task.method == method for one in tried) for method in methods}
    return rows(list(pool.imap_unordered(perform, finals)), count)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judge", description=__doc__)
    parser.add_argument("--problems", default="quadratics,logistic-a9a", help=f"some of {', '.join(PROBLEMS)}")
    parser.add_argument("--methods", default=",".join((*RIVALS, *OURS)), help="with commas between them")
    parser.add_argument("--budget", type=int, default=262_144, help="samples of a run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1, help="with one thread each")
    parser.add_argument("--folder", type=Path, default=results.FOLDER)
    given = parser.parse_args(arguments)
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        for problem in given.problems.split(","):
            found = judge(problem, given.methods.split(","), given.budget, given.seeds, pool)
            section = {
                "title": f"benchmark_bilevel's measures, {problem}",
                "about": "Problems, measures and solvers after benchopt's benchmark_bilevel, one client, minibatches "
                f"of {BATCH}, {given.budget:,} samples per run; rounds are seeds. "
                + " ".join((__doc__ or "").split("\n\n")[1].split()),
                "headings": HEADINGS,
                "rows": found,
                "where": results.circumstances(Setup(threads=1, small=False, rounds=given.seeds)),
            }
            results.save("judge", {problem: section}, given.folder)
            print(problem, results.table(found, HEADINGS), sep="\n", flush=True)
