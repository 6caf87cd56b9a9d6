"""One algorithm on one task: the cost of reaching a target, the final figures, and the curve.

task        {name, settings}; repetition r uses the task's own `repeated(r)`
algorithm   {name, settings}; omitted settings have the algorithm's defaults, not those that the
            task suggests
num_iterations, num_rounds    the run ends at the first that it reaches
target      METRIC=VALUE; with stop_at_target, the run ends at the target
options     fraction, batch_size, sampling, ... (runs/options.py)
measure_every, measure_growth, checkpoint_every
indirect    true: also the figures of studies/indirect.py at the end
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel.columns import figures_of
from fedbilevel.errors import ExperimentError, NonFiniteError
from fedbilevel.runs.endings import whole
from fedbilevel.runs.options import keywords
from fedbilevel.runs.record import Record
from fedbilevel.runs.result import Progress
from fedbilevel.runs.solve import solve
from fedbilevel.studies import given, indirect
from fedbilevel.studies.comparison import Target, costs
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
    "indirect": "flag",
}


def run(
    row: Mapping[str, Any], *, repetition: int, folder: Path, device: str, say: Callable[[str], None]
) -> RowOutcome:
    given.check(row, KNOWN, needs=("task", "algorithm"))
    task, algorithm = given.task(row["task"]), given.algorithm(row["algorithm"])
    target = Target.parse(row["target"]) if "target" in row else None
    iterations = row.get("num_iterations", row.get("num_rounds"))  # an outer iteration takes at least one round
    if iterations is None:
        raise ExperimentError("an optimisation needs num_iterations or num_rounds to end: give one.")
    if "device" in row.get("options", {}):
        raise ExperimentError("the device is not a setting of an experiment: give it to the command, --device cuda.")
    options = keywords({**row.get("options", {}), "device": device})
    options["seed"] += repetition
    book, end = Record(folder), _End(row, target)

    def watch(now: Progress) -> bool:
        rows = book.rows() if now.row is not None else []  # all rows, because the first determines the side
        if target is not None and rows:
            target.check(rows[0])
        say(f"outer iteration {now.iteration}, {now.rounds} rounds")
        return end.reached(now.rounds, rows)

    rows: Sequence[Mapping[str, Any]] = book.rows() if book.checkpoint.exists() else []
    diverged, more = False, {}
    ended = bool(rows) and end.reached(rows[-1]["rounds"], rows)  # an interrupted run may have reached its end
    if ended and row.get("indirect"):  # its figures need the state, so the run is repeated
        shutil.rmtree(folder)
        ended = False
    if not ended:
        built = task.repeated(repetition).build()
        pace = {name: row[name] for name in ("measure_every", "measure_growth", "checkpoint_every") if name in row}
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
                recover=False,  # recorded figures are those of the given steps
                **{"checkpoint_every": max(10, iterations // 10), **pace},
                **options,
            )
            rows, diverged = whole(result).rows, result.stopped == "failed"
            if row.get("indirect") and not diverged:
                more = indirect.measured(built, algorithm, result, options)
        except NonFiniteError:
            rows, diverged = book.rows(), True
    found = _outcome(rows, target, diverged)
    return RowOutcome({**found.figures, **more}, found.curve)


class _End(NamedTuple):
    """The condition that ends a run: the target or a number of rounds."""

    row: Mapping[str, Any]
    target: Target | None

    def reached(self, rounds: int, rows: Sequence[Mapping[str, Any]]) -> bool:
        if "num_rounds" in self.row and rounds >= self.row["num_rounds"]:
            return True
        stops = self.row.get("stop_at_target", False) and self.target is not None and bool(rows)
        return stops and self.target is not None and self.target.reached(rows) is not None


def _outcome(rows: Sequence[Mapping[str, Any]], target: Target | None, diverged: bool) -> RowOutcome:
    if target is not None:
        target.check(rows[0])
    reached = None if target is None or diverged else target.reached(rows)
    to_target = {f"{name}_to_target": value for name, value in costs(reached).items()} if reached is not None else {}
    names = figures_of(rows[0])
    curve = [
        {"iterations": one["iteration"], **{name: float(one[name]) for name in names}, **costs(one)} for one in rows
    ]
    if not diverged:
        return RowOutcome({**to_target, **curve[-1]}, curve)
    paid = {name: value for name, value in curve[-1].items() if name not in names}  # figures are meaningless then
    return RowOutcome({**paid, "diverged": 1.0}, curve)
