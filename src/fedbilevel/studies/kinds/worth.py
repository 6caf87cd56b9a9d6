"""Worth: a task solved without settings by self_tuned, by one of its rivals, or by the guarded choice.

task        {name, settings}; repetition r uses the task's own `repeated(r)`
figure      the task's figure by which rows are judged
num_rounds  rounds of self_tuned, and of every single run of a rival
method      "self_tuned" (by default), the name of a rival of the task, or "guarded"
            (studies/guarded.py)
options     fraction, batch_size, sampling, ... (runs/options.py)

Figures: figure; rounds, megabytes and cpu_seconds over all runs, those that tune a rival included;
of the guarded choice also bilevel, 1 if it chose the bilevel answer and else 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedbilevel.errors import ExperimentError, UnknownNameError
from fedbilevel.runs.options import keywords
from fedbilevel.runs.solve import solve
from fedbilevel.studies import given
from fedbilevel.studies.guarded import guarded
from fedbilevel.studies.outcome import RowOutcome
from fedbilevel.studies.rivals import run_rival

KNOWN = {"task": "table", "figure": "text", "num_rounds": "whole", "method": "text", "options": "table"}


def run(
    row: Mapping[str, Any], *, repetition: int, folder: Path, device: str, say: Callable[[str], None]
) -> RowOutcome:
    given.check(row, KNOWN, needs=("task", "figure", "num_rounds"))
    task, rounds, method = (
        given.task(row["task"]).repeated(repetition),
        row["num_rounds"],
        row.get("method", "self_tuned"),
    )
    options = keywords({**row.get("options", {}), "device": device})
    options |= {"seed": options["seed"] + repetition, "measure_every": rounds, "residuals": False}
    say(f"{task.name()} by {method}")
    begun, more = time.process_time(), {}
    if method == "self_tuned":
        built = task.build()
        last = solve(built.problem, built.clients, "self_tuned", num_rounds=rounds, **options).final
    elif method == "guarded":
        found = guarded(task, num_rounds=rounds, **options)
        last, more = {**found.figures, **found.costs}, {"bilevel": float(found.answer == "bilevel")}
    else:
        rivals = task.rivals()
        if method not in rivals:
            raise UnknownNameError(f"method of {task.name()}", method, ["self_tuned", "guarded", *rivals])
        outcome = run_rival(rivals[method], num_rounds=rounds, **options)
        last = {**outcome.figures, **outcome.costs}
    if last and row["figure"] not in last:
        raise ExperimentError(f"{task.name()} does not measure {row['figure']!r}: name one of {', '.join(last)}.")
    if not last:  # every way of a rival diverged
        return RowOutcome({"diverged": 1.0}, [])
    paid = {name: float(last[name]) for name in ("rounds", "megabytes")}
    figures = {"figure": float(last[row["figure"]]), **paid, "cpu_seconds": time.process_time() - begun, **more}
    return RowOutcome(figures, [figures])
