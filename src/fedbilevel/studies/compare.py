"""Several algorithms on the same data with the same seeds: what each needs to reach a target, and where it ends."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel.columns import falls, figures_of, metric_and_value
from fedbilevel.errors import CheckpointError, NonFiniteError, SettingError
from fedbilevel.federation.algorithm import Algorithm, Cohort, PeerAlgorithm, ServerAlgorithm
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.network import AnyNetwork
from fedbilevel.runs.loop import run
from fedbilevel.runs.record import finite, make_folder, write_whole
from fedbilevel.runs.result import Progress
from fedbilevel.runs.resume import versions
from fedbilevel.settings import whole_number
from fedbilevel.tasks.task import Task

COSTS = ("rounds", "megabytes", "gradients", "products", "seconds")


class Target(NamedTuple):
    """A figure and the value it must reach: what falls (`figures.falls`) from above, the rest from whichever side it starts."""

    metric: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Target:
        try:
            return cls(*metric_and_value(text))
        except ValueError:
            raise SettingError(f"the target is {text!r}, expected METRIC=VALUE, e.g. test_accuracy=0.94.") from None

    def check(self, row: Mapping[str, Any]) -> None:
        if self.metric not in row:
            asked = {"hypergradient": "stationarity", "residual": "residuals", "lower_gradient": "residuals"}.get(
                self.metric
            )
            mend = f"ask for {asked} (--{asked}), or " if asked is not None else ""
            raise SettingError(
                f"there is no metric named {self.metric!r} in this run: {mend}use one of {', '.join(figures_of(row))}."
            )

    def reached(self, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """The first measurement at or beyond the target, on the side that `falls` or else the first finite measurement tells."""
        finite = [
            row for row in rows if row[self.metric] is not None and math.isfinite(row[self.metric])
        ]  # null in a file
        rises = bool(finite) and finite[0][self.metric] < self.value and not falls(self.metric)
        return next(
            (row for row in finite if (row[self.metric] >= self.value if rises else row[self.metric] <= self.value)),
            None,
        )


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
        if not all(map(math.isfinite, values)):  # of which statistics.stdev makes an error
            return cls(sum(values) / len(values), math.nan)
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
    num_iterations: int | Mapping[str, int],
    target: Target | str | None = None,
    repetitions: int = 3,
    seed: int = 0,
    max_rounds: int | None = None,
    record: Path | str | None = None,
    progress: Callable[[str, int, Progress], None] | None = None,
    cohort: Cohort = Cohort(),
    network: AnyNetwork | None = None,
    averaging: Averaging | None = None,
    **options: Any,
) -> Comparison:
    """Repetition r uses run seed `seed + r` and, where the task has one, data seed `data_seed + r`, the same for every algorithm.

    num_iterations: outer iterations of every algorithm by name, or one number for all. target: e.g. "test_accuracy=0.94".
    cohort is for the algorithms with a server, network and averaging for those between peers.
    max_rounds ends every run at the first outer iteration that reaches so many communication rounds. options go to `run`.
    The record is written after every run. A run that diverges is recorded as such and has not reached the target.
    """
    if not isinstance(task, Task):
        raise SettingError(f"task is {task!r:.80}, expected a task with its settings, e.g. Quadratic(num_clients=5).")
    _check_algorithms(algorithms)
    repetitions, seed = whole_number("repetitions", repetitions, 1), whole_number("seed", seed)
    max_rounds = whole_number("max_rounds", max_rounds, 1) if max_rounds is not None else None
    iterations = _iterations(num_iterations, algorithms)
    target = Target.parse(target) if isinstance(target, str) else target
    if not isinstance(target, Target | None):
        raise SettingError(f"target is {target!r:.80}, expected METRIC=VALUE, e.g. 'test_accuracy=0.94', or a Target.")
    if not callable(progress) and progress is not None:
        raise SettingError(
            f"progress is {progress!r:.80}, expected a function of (name, repetition, Progress), or None."
        )
    if record is not None:
        if not isinstance(record, str | Path) or not str(record):
            raise SettingError(f"record is {record!r:.80}, expected the name of a folder, or None.")
        record = Path(record)
        if (record / "comparison.json").exists():
            raise CheckpointError(f"{record} already holds a comparison: name another folder.")
        make_folder(record)
    runs: list[dict[str, Any]] = []
    shown = {"cohort": cohort, "network": network, "averaging": averaging, **options}
    about = {
        "task_settings": task.asdict(),
        "seed": seed,
        "repetitions": repetitions,
        "num_iterations": iterations,
        "max_rounds": max_rounds,
        "options": {name: str(value) for name, value in shown.items()},
        "versions": versions(),
    }
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
                where = (
                    {"network": network, "averaging": averaging}
                    if isinstance(algorithm, PeerAlgorithm)
                    else {"cohort": cohort}
                )
                plan: dict[str, Any] = {
                    "num_iterations": iterations[name],
                    "seed": seed + r,
                    "callbacks": [watch],
                    **where,
                    **options,
                }
                result = run(algorithm, built.problem, built.clients, **plan)
                if result.stopped == "interrupted":
                    raise KeyboardInterrupt  # a run cut short is not a result; those before it are on disk
                rows[:] = result.rows
            except NonFiniteError as error:
                diverged = str(error)
            runs.append(
                {"algorithm": name, "repetition": r, "settings": algorithm.asdict(), "rows": rows, "diverged": diverged}
            )
            done = Comparison(
                task.name(),
                target,
                [_outcome(name, runs, target) for name in algorithms if any(one["algorithm"] == name for one in runs)],
                runs,
            )
            if record is not None:
                content = {
                    **about,
                    **dataclasses.asdict(done),
                    "target": target._asdict() if target is not None else None,
                }
                write_whole(
                    record / "comparison.json", (json.dumps(finite(content), indent=1, allow_nan=False) + "\n").encode()
                )
    return done


def _check_algorithms(algorithms: Any) -> None:
    example = "e.g. {'fedbio': FedBiO(lr_upper=0.01)}"
    if not isinstance(algorithms, Mapping) or not all(isinstance(name, str) for name in algorithms):
        raise SettingError(
            f"algorithms is {algorithms!r:.80}, expected a dict of algorithms with their settings by name, {example}."
        )
    if not algorithms:
        raise SettingError("there are no algorithms to compare: name at least one.")
    for name, algorithm in algorithms.items():
        if not isinstance(algorithm, ServerAlgorithm | PeerAlgorithm):
            raise SettingError(
                f"the algorithm {name!r} is {algorithm!r:.80}, expected an algorithm with its settings, {example}."
            )


def _iterations(given: Any, names: Mapping[str, Any]) -> dict[str, int]:
    """By name, whichever way they were given."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, whole_number("num_iterations", given, 0, ", or a dict of such by algorithm"))
    for name in names:
        if name not in given:
            raise SettingError(
                f"num_iterations says nothing of {name!r}: give one number for all, or one for each of {', '.join(names)}."
            )
    return {name: whole_number(f"num_iterations of {name!r}", given[name], 0) for name in names}


def _outcome(name: str, runs: Sequence[Mapping[str, Any]], target: Target | None) -> Outcome:
    mine = [one for one in runs if one["algorithm"] == name]
    whole = [one["rows"] for one in mine if one["diverged"] is None]
    firsts = (
        [costs(row) for row in (target.reached(rows) for rows in whole) if row is not None]
        if target is not None
        else []
    )
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
