"""Extend records by further repetitions, without the results of the earlier ones.

A record has means, deviations and numbers of runs, from which those of both groups together follow:

    mean = (n m + n' m') / (n + n')
    (n + n' - 1) s^2 = (n - 1) s_1^2 + (n' - 1) s_2^2 + n n' / (n + n') (m - m')^2
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedbilevel.errors import ExperimentError
from fedbilevel.studies.experiment import Experiment, Job


def num_recorded(experiment: Experiment, job: Job) -> int:
    """Return how many repetitions of a job's row the file records with these settings."""
    there = experiment.content.get("result", {}).get(job.panel, {}).get(job.row, {})
    return int(there.get("repetitions", 0)) if there.get("settings") == job.digest else 0


def unrecorded(experiment: Experiment, jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs whose repetitions the file does not record with these settings."""
    return [job for job in jobs if job.repetition >= num_recorded(experiment, job)]


def extends(experiment: Experiment, jobs: Sequence[Job]) -> bool:
    """Return whether the repetitions of one row follow the recorded ones; a gap is an error."""
    numbers, before = sorted(job.repetition for job in jobs), num_recorded(experiment, jobs[0])
    if not numbers[0]:
        return False
    if numbers != list(range(before, before + len(numbers))):
        raise ExperimentError(
            f"{experiment.path} holds {before} repetitions of {jobs[0].row} in {jobs[0].panel}, and these are the "
            f"repetitions {', '.join(map(str, numbers))}: run those from {before} on, or all from 0 on."
        )
    return True


def joined(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of all repetitions from the recorded entry and the entry of further ones."""
    together = {
        "settings": now["settings"],
        "repetitions": before["repetitions"] + now["repetitions"],
        "commit": ", ".join(sorted({*before["commit"].split(", "), *now["commit"].split(", ")})),
        "machine": _named(before["machine"], now["machine"]),
        "time": max(before["time"], now["time"]),
        "seconds": before["seconds"] + now["seconds"],
        "figures": {
            name: _pooled([own["figures"][name] for own in (before, now) if name in own["figures"]])
            for name in (*before["figures"], *(name for name in now["figures"] if name not in before["figures"]))
        },
    }
    if "values" in now:
        together["values"] = [*before["values"], *now["values"]]
        numbers = [
            *before.get("repeated", range(len(before["values"]))),
            *(one + before["repetitions"] for one in now.get("repeated", range(len(now["values"])))),
        ]
        if numbers != list(range(len(numbers))):
            together["repeated"] = numbers
    return together


def _named(machines: str, further: str) -> str:
    """Return names of machines, which may have commas of their own, each once."""
    known = f", {machines}, "
    return machines if f", {further}, " in known else f"{machines}, {further}"


def _pooled(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = dict(parts[0])
    for one in parts[1:]:
        num = found["runs"] + one["runs"]
        gap = found["mean"] - one["mean"]
        squares = sum((own["runs"] - 1) * own["deviation"] ** 2 for own in (found, one))
        squares += found["runs"] * one["runs"] / num * gap**2
        mean = (found["runs"] * found["mean"] + one["runs"] * one["mean"]) / num
        found = {"mean": mean, "deviation": math.sqrt(squares / (num - 1)), "runs": num}
    return found
