"""Several algorithms on the same data with the same seeds: what each needs to reach a target, and where it ends."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel.errors import SettingError
from fedbilevel.federation import ServerAlgorithm
from fedbilevel.ledger import COLUMNS
from fedbilevel.record import write_whole
from fedbilevel.run import Progress, run, versions
from fedbilevel.tasks.task import Task

COSTS = ("rounds", "megabytes", "gradients", "products", "seconds")


class Target(NamedTuple):
    """A figure and the value it must reach, from whichever side it starts."""

    metric: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Target:
        name, sign, value = text.partition("=")
        try:
            if not (name and sign):
                raise ValueError
            return cls(name, float(value))
        except ValueError:
            raise SettingError(f"the target is {text!r}, expected METRIC=VALUE, e.g. test_accuracy=0.94.") from None

    def reached(self, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """The first measurement at or beyond the target; the side is that of the first measurement."""
        if self.metric not in rows[0]:
            raise SettingError(f"there is no metric named {self.metric!r} in this task, only {', '.join(_figures(rows[0]))}.")
        rises = rows[0][self.metric] < self.value
        return next((row for row in rows if (row[self.metric] >= self.value if rises else row[self.metric] <= self.value)), None)


def costs(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        "rounds": row["rounds"],
        "megabytes": row["megabytes"],
        "gradients": row["gy"] + row["gx"] + row["fx"] + row["fy"],
        "products": row["hvp"] + row["jvp"],
        "seconds": row["seconds"],
    }


class Spread(NamedTuple):
    mean: float
    deviation: float  # sample standard deviation; 0 for one value

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One algorithm: over repetitions, the cost of reaching the target (of those that did) and the final figures."""

    name: str
    num_runs: int
    num_reached: int
    to_target: dict[str, Spread]
    final: dict[str, Spread]
    total: dict[str, Spread]


@dataclasses.dataclass(frozen=True)
class Comparison:
    task: str
    target: Target | None
    outcomes: list[Outcome]
    runs: list[dict[str, Any]]


def compare(
    task: Task,
    algorithms: Mapping[str, ServerAlgorithm],
    *,
    num_iterations: Mapping[str, int],
    target: Target | None = None,
    repetitions: int = 3,
    seed: int = 0,
    max_rounds: int | None = None,
    record: Path | None = None,
    progress: Callable[[str, int, Progress], None] | None = None,
    **options: Any,
) -> Comparison:
    """Repetition r uses run seed `seed + r` and, where the task has one, data seed `data_seed + r`, the same for every algorithm.

    max_rounds ends every run at the first outer iteration that reaches so many communication rounds. options go to `run`.
    """
    if repetitions < 1:
        raise SettingError(f"repetitions is {repetitions}, expected at least 1.")
    runs: list[dict[str, Any]] = []
    for r in range(repetitions):
        built = task.repeated(r).build()
        for name, algorithm in algorithms.items():

            def watch(now: Progress, name: str = name, r: int = r) -> bool:
                if progress is not None:
                    progress(name, r, now)
                return max_rounds is not None and now.rounds >= max_rounds

            result = run(algorithm, built.problem, built.clients, num_iterations=num_iterations[name], seed=seed + r, callbacks=[watch], **options)
            if result.stopped == "interrupted":
                raise KeyboardInterrupt
            runs.append({"algorithm": name, "repetition": r, "settings": algorithm.asdict(), "rows": result.rows})
    comparison = Comparison(
        task.name(), target, [_outcome(name, [one["rows"] for one in runs if one["algorithm"] == name], target) for name in algorithms], runs
    )
    if record is not None:
        record.mkdir(parents=True, exist_ok=True)
        content = {
            "task_settings": task.asdict(),
            "seed": seed,
            "options": {name: str(value) for name, value in options.items()},
            "versions": versions(),
            **dataclasses.asdict(comparison),
        }
        content["target"] = target._asdict() if target is not None else None
        write_whole(record / "comparison.json", (json.dumps(content, indent=1) + "\n").encode())
    return comparison


def _outcome(name: str, runs: Sequence[Sequence[Mapping[str, Any]]], target: Target | None) -> Outcome:
    firsts = [costs(row) for row in (target.reached(rows) for rows in runs) if row is not None] if target is not None else []
    ends = [rows[-1] for rows in runs]
    return Outcome(
        name,
        len(runs),
        len(firsts),
        {cost: Spread.of([first[cost] for first in firsts]) for cost in COSTS} if firsts else {},
        {key: Spread.of([end[key] for end in ends]) for key in _figures(ends[0])},
        {cost: Spread.of([costs(end)[cost] for end in ends]) for cost in COSTS},
    )


def _figures(row: Mapping[str, Any]) -> list[str]:
    """What was measured, without what was paid."""
    return [name for name in row if name not in ("iteration", *COSTS, *COLUMNS)]
