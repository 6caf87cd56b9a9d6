"""One algorithm on one task: what it needs to reach a target, where it ends, and the way there.

task        {name, settings}; repetition r uses the task's own `repeated(r)`
algorithm   {name, settings}; what is left out has the algorithm's default, not the task's suggestion
num_iterations, num_rounds    the first to be reached ends the run
target      METRIC=VALUE; stop_at_target ends the run there
options     fraction, batch_size, sampling, ... (runs/options.py)
measure_every, measure_growth, checkpoint_every
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbilevel.columns import figures_of
from fedbilevel.errors import ExperimentError, NonFiniteError
from fedbilevel.runs.options import keywords
from fedbilevel.runs.record import Record
from fedbilevel.runs.result import Progress
from fedbilevel.runs.solve import solve
from fedbilevel.studies import given
from fedbilevel.studies.compare import Target, costs
from fedbilevel.studies.outcome import RowOutcome

KNOWN = {
    "task": "table",
    "algorithm": "table",
    "num_iterations": "whole",
    "num_rounds": "whole",
    "target": "text",
    "stop_at_target": "flag",
    "options": "table",
    "measure_every": "whole",
    "measure_growth": "number",
    "checkpoint_every": "whole",
}


def run(
    row: Mapping[str, Any], *, repetition: int, folder: Path, device: str, say: Callable[[str], None]
) -> RowOutcome:
    given.check(row, KNOWN, needs=("task", "algorithm"))
    task, algorithm = given.task(row["task"]), given.algorithm(row["algorithm"])
    target = Target.parse(row["target"]) if "target" in row else None
    iterations = row.get("num_iterations", row.get("num_rounds"))  # an outer iteration takes at least one round
    if iterations is None:
        raise ExperimentError("an optimisation needs num_iterations or num_rounds, so that it ends: give one.")
    if "device" in row.get("options", {}):
        raise ExperimentError("the device is no setting of an experiment: give it to the command, --device cuda.")
    options = keywords({**row.get("options", {}), "device": device})
    options["seed"] += repetition
    book = Record(folder)

    def over(rounds: int, rows: Sequence[Mapping[str, Any]]) -> bool:
        there = (
            row.get("stop_at_target", False) and target is not None and bool(rows) and target.reached(rows) is not None
        )
        return there or ("num_rounds" in row and rounds >= row["num_rounds"])

    def watch(now: Progress) -> bool:
        rows = (
            book.rows() if now.row is not None else []
        )  # with the first, which no callback sees: it says from which side the target is reached
        if target is not None and rows:
            target.check(rows[0])
        say(f"outer iteration {now.iteration}, {now.rounds} rounds")
        return over(now.rounds, rows)

    rows: Sequence[Mapping[str, Any]] = book.rows() if book.checkpoint.exists() else []
    diverged = {}
    if not (rows and over(rows[-1]["rounds"], rows)):  # it may have been cut short after its last measurement
        built = task.repeated(repetition).build()
        plan = {name: row[name] for name in ("measure_every", "measure_growth", "checkpoint_every") if name in row}
        try:
            result = solve(
                built.problem,
                built.clients,
                algorithm,
                num_iterations=iterations,
                residuals=False,
                record=folder,
                resume=book.checkpoint.exists(),
                callbacks=[watch],
                **{"checkpoint_every": max(10, iterations // 10), **plan},
                **options,
            )
            if result.stopped == "interrupted":
                raise KeyboardInterrupt  # a run cut short is not a result; its checkpoint is there
            rows = result.rows
        except NonFiniteError:
            diverged = {"diverged": 1.0}
            rows = book.rows()
    if target is not None:
        target.check(rows[0])
    reached = None if target is None or diverged else target.reached(rows)
    to_target = {f"{name}_to_target": value for name, value in costs(reached).items()} if reached is not None else {}
    names = figures_of(rows[0])
    curve = [
        {"iterations": one["iteration"], **{name: float(one[name]) for name in names}, **costs(one)} for one in rows
    ]
    ends = {
        name: value for name, value in curve[-1].items() if not diverged or name not in names
    }  # what was paid, but no figure of a run that exploded
    return RowOutcome({**to_target, **ends, **diverged}, curve)
