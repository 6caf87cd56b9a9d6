"""Several algorithms on the same data with the same seeds: what each needs to reach a target, and where it ends."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel.averaging import Averaging
from fedbilevel.errors import CheckpointError, NonFiniteError, SettingError
from fedbilevel.federation import Algorithm, Cohort, PeerAlgorithm
from fedbilevel.ledger import COLUMNS
from fedbilevel.network import AnyNetwork
from fedbilevel.record import make_folder, write_whole
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
            if not math.isfinite(float(value)):
                raise ValueError
            return cls(name, float(value))
        except ValueError:
            raise SettingError(f"the target is {text!r}, expected METRIC=VALUE, e.g. test_accuracy=0.94.") from None

    def check(self, row: Mapping[str, Any]) -> None:
        if self.metric not in row:
            raise SettingError(f"there is no metric named {self.metric!r} in this task, only {', '.join(figures_of(row))}.")

    def reached(self, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """The first measurement at or beyond the target; the side is that of the first measurement."""
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
    """One algorithm: over repetitions, the cost of reaching the target (of those that did) and the final figures (of those that did not diverge)."""

    name: str
    num_runs: int
    num_reached: int
    num_diverged: int
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
    algorithms: Mapping[str, Algorithm],
    *,
    num_iterations: Mapping[str, int],
    target: Target | None = None,
    repetitions: int = 3,
    seed: int = 0,
    max_rounds: int | None = None,
    record: Path | None = None,
    progress: Callable[[str, int, Progress], None] | None = None,
    cohort: Cohort = Cohort(),
    network: AnyNetwork | None = None,
    averaging: Averaging | None = None,
    **options: Any,
) -> Comparison:
    """Repetition r uses run seed `seed + r` and, where the task has one, data seed `data_seed + r`, the same for every algorithm.

    cohort is for the algorithms with a server, network and averaging for those between peers.
    max_rounds ends every run at the first outer iteration that reaches so many communication rounds. options go to `run`.
    The record is written after every run. A run that diverges is recorded as such and has not reached the target.
    """
    for label, number in (("repetitions", repetitions), ("max_rounds", max_rounds)):
        if number is not None and number < 1:
            raise SettingError(f"{label} is {number}, expected at least 1.")
    if not algorithms:
        raise SettingError("there are no algorithms to compare: name at least one.")
    if record is not None:
        if (record / "comparison.json").exists():
            raise CheckpointError(f"{record} already holds a comparison: name another folder.")
        make_folder(record)
    runs: list[dict[str, Any]] = []
    shown = {"cohort": cohort, "network": network, "averaging": averaging, **options}
    about = {"task_settings": task.asdict(), "seed": seed, "options": {name: str(value) for name, value in shown.items()}, "versions": versions()}
    for r in range(repetitions):
        built = task.repeated(r).build()
        for name, algorithm in algorithms.items():
            rows: list[Mapping[str, Any]] = []
            diverged = None

            def watch(now: Progress, name: str = name, r: int = r, rows: list[Mapping[str, Any]] = rows) -> bool:
                if now.row is not None:
                    rows.append(now.row)
                if target is not None and now.row is not None:
                    target.check(now.row)
                if progress is not None:
                    progress(name, r, now)
                return max_rounds is not None and now.rounds >= max_rounds

            try:
                where = {"network": network, "averaging": averaging} if isinstance(algorithm, PeerAlgorithm) else {"cohort": cohort}
                plan: dict[str, Any] = {"num_iterations": num_iterations[name], "seed": seed + r, "callbacks": [watch], **where, **options}
                result = run(algorithm, built.problem, built.clients, **plan)
                if result.stopped == "interrupted":
                    raise KeyboardInterrupt  # a run cut short is not a result; those before it are on disk
                rows[:] = result.rows
            except NonFiniteError as error:
                diverged = str(error)
            runs.append({"algorithm": name, "repetition": r, "settings": algorithm.asdict(), "rows": rows, "diverged": diverged})
            done = Comparison(task.name(), target, [_outcome(name, runs, target) for name in algorithms if any(one["algorithm"] == name for one in runs)], runs)
            if record is not None:
                content = {**about, **dataclasses.asdict(done), "target": target._asdict() if target is not None else None}
                write_whole(record / "comparison.json", (json.dumps(content, indent=1) + "\n").encode())
    return done


def _outcome(name: str, runs: Sequence[Mapping[str, Any]], target: Target | None) -> Outcome:
    mine = [one for one in runs if one["algorithm"] == name]
    whole = [one["rows"] for one in mine if one["diverged"] is None]
    firsts = [costs(row) for row in (target.reached(rows) for rows in whole) if row is not None] if target is not None else []
    ends = [rows[-1] for rows in whole]
    return Outcome(
        name,
        len(mine),
        len(firsts),
        len(mine) - len(whole),
        {cost: Spread.of([first[cost] for first in firsts]) for cost in COSTS} if firsts else {},
        {key: Spread.of([end[key] for end in ends]) for key in figures_of(ends[0])} if ends else {},
        {cost: Spread.of([costs(end)[cost] for end in ends]) for cost in COSTS} if ends else {},
    )


def figures_of(row: Mapping[str, Any]) -> list[str]:
    """What was measured, without what was paid."""
    return [name for name in row if name not in ("iteration", "messages", "members", "num_peers", "seen", *COSTS, *COLUMNS)]
