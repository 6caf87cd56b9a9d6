"""One algorithm on one task: what it needs to reach a target, where it ends, and the way there.

task        {name, settings}; repetition r uses the task's own `repeated(r)`
algorithm   {name, settings}; what is left out has the algorithm's default, not the task's suggestion
iterations, max_rounds    whichever comes first ends the run
target      METRIC=VALUE; stop_at_target ends the run there
run         options of a run: fraction, batch_size, sampling, ... (options.py)
measure_every, measure_growth, checkpoint_every
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedbilevel import discovery
from fedbilevel.compare import Target, costs, figures_of
from fedbilevel.errors import CheckpointError, ExperimentError, NonFiniteError, UnknownNameError
from fedbilevel.options import keywords
from fedbilevel.record import Record
from fedbilevel.run import Progress
from fedbilevel.run import run as run_algorithm
from fedbilevel.settings import Settings, made
from fedbilevel.studies.outcome import Outcome

KNOWN = ("task", "algorithm", "iterations", "max_rounds", "target", "stop_at_target", "run", "measure_every", "measure_growth", "checkpoint_every")


def run(row: Mapping[str, Any], *, repetition: int, folder: Path, device: str, say: Callable[[str], None]) -> Outcome:
    for name in row:
        if name not in KNOWN:
            raise UnknownNameError("setting of an optimisation", name, KNOWN)
    task, algorithm = _made("task", row), _made("algorithm", row)
    target = Target.parse(row["target"]) if "target" in row else None
    iterations = row.get("iterations", row.get("max_rounds"))  # an outer iteration takes at least one round
    if iterations is None:
        raise ExperimentError("an optimisation needs iterations or max_rounds, so that it ends.")
    built = task.repeated(repetition).build()
    options = {**row.get("run", {}), "device": device}
    options["seed"] = options.get("seed", 0) + repetition
    rows: list[Mapping[str, Any]] = []

    def watch(now: Progress) -> bool:
        if now.row is not None:
            rows.append(now.row)
        say(f"outer iteration {now.iteration}, {now.rounds} rounds")
        there = row.get("stop_at_target") and target is not None and now.row is not None and target.reached([*rows[:1], now.row])
        return bool(there) or ("max_rounds" in row and now.rounds >= row["max_rounds"])

    book = Record(folder)
    plan = {name: row[name] for name in ("measure_every", "measure_growth", "checkpoint_every") if name in row}
    diverged = {}
    try:
        result = run_algorithm(
            algorithm, built.problem, built.clients, num_iterations=iterations, record=folder, resume=book.checkpoint.exists(), callbacks=[watch],
            **{"checkpoint_every": max(10, iterations // 10), **plan}, **keywords(options),
        )  # fmt: skip
        if result.stopped == "interrupted":
            raise KeyboardInterrupt  # a run cut short is not a result; its checkpoint is there
        rows = list(result.rows)
    except NonFiniteError:
        diverged = {"diverged": 1.0}
        rows = list(book.go_on_from(iterations))
    if not rows:
        raise CheckpointError(f"the run in {folder} was not finite before anything was measured: lower the step sizes.")
    if target is not None:
        target.check(rows[0])
    reached = None if target is None or diverged else target.reached(rows)
    to_target = {f"{name}_to_target": value for name, value in costs(reached).items()} if reached is not None else {}
    names = figures_of(rows[0])
    curve = [{"iterations": one["iteration"], **{name: float(one[name]) for name in names}, **costs(one)} for one in rows]
    return Outcome({**to_target, **({} if diverged else curve[-1]), **diverged}, curve)


def _made(kind: str, row: Mapping[str, Any]) -> Any:
    given = row.get(kind)
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise ExperimentError(f"an optimisation needs {kind} = {{name = ...}}, got {given!r}.")
    owner: type[Settings] = discovery.task(given["name"]) if kind == "task" else discovery.algorithm(given["name"])
    return made(owner, {name: value for name, value in given.items() if name != "name"})
