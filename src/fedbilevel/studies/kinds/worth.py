"""Worth: a task solved without settings, by one of its rivals, or by the guarded answer.

task        {name, settings}; repetition r uses the task's own `repeated(r)`
figure      the task's figure by which rows are judged
num_rounds  rounds of self_tuned, and of every single run of a rival
method      "self_tuned" (by default), the name of a rival of the task, "guarded" (studies/guarded.py), or
            "started": the bilevel answer of `guarded`, with the costs of the rivals at which it can
            start; "unlearned": the same start and refit with x fixed; or "blended": the choice of
            `guarded` without the bilevel answer
rivals      names of the rivals that take part in these four; all by default
options     fraction, batch_size, sampling, ... (runs/options.py)

Two tasks have functions of their own, which stand for self_tuned:

data_cleaning   `clean_labels` as it is, with its guard. Another method is the detector with this name,
                without the guard; "cleanlab" flags pooled labels (studies/pooled.py). `detector` and
                `pooled` are their settings; num_rounds has no effect.
influence       conjugate gradients, or a plain score (studies/influence/plain.py). The figure is the
                rank correlation with retraining without each of `num_removed` random samples.

"guarded", "started", "blended" and the rivals that take part come from one run (studies/together.py), and
so do all scores of influence: the first of these rows computes all, the others read the folder of results.

Figures: figure; rounds, megabytes and cpu_seconds over all runs, those that tune a rival included;
of the guarded choice also bilevel, the weight of the bilevel answer, 0 or 1 without a blend; of cleaning also f1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedbilevel.errors import ExperimentError, UnknownNameError
from fedbilevel.runs.endings import whole
from fedbilevel.runs.options import keywords, torch_device
from fedbilevel.runs.solve import solve
from fedbilevel.studies import given
from fedbilevel.studies.contest import unlearned
from fedbilevel.studies.influence.orders import orders
from fedbilevel.studies.influence.plain import NAMES
from fedbilevel.studies.kinds import cleaning
from fedbilevel.studies.outcome import RowOutcome
from fedbilevel.studies.rivals import run_rival
from fedbilevel.studies.together import CHOICES, address, choices, kept, known
from fedbilevel.tasks.task import Task

KNOWN = {
    "task": "table",
    "figure": "text",
    "num_rounds": "whole",
    "method": "text",
    "rivals": "names",
    "options": "table",
    "detector": "table",
    "pooled": "table",
    "num_removed": "whole",
}
_UNLEARNED = "unlearned"
_OURS = {"data_cleaning": "label_em", "influence": "cg"}  # what stands for self_tuned


def run(
    row: Mapping[str, Any], *, repetition: int, folder: Path, device: str, say: Callable[[str], None]
) -> RowOutcome:
    given.check(row, KNOWN, needs=("task", "figure", "num_rounds"))
    name, method, begun = row["task"].get("name"), row.get("method", "self_tuned"), time.process_time()
    method = _OURS.get(str(name), method) if method == "self_tuned" else method
    say(f"{name} by {method}")
    last: Mapping[str, float]
    shared = folder.parent / "together"  # runs that hold several rows
    if name == "data_cleaning":
        last = _cleaned(row, method, repetition=repetition, folder=folder, device=device, say=say)
    elif name == "influence":
        last = _ordered(row, method, repetition, device, shared)
    else:
        last = _solved(row, given.task(row["task"]).repeated(repetition), method, repetition, device, shared)
    if last and row["figure"] not in last:
        raise ExperimentError(f"{name} does not measure {row['figure']!r}: name one of {', '.join(last)}.")
    if not last:  # every way of a rival diverged
        return RowOutcome({"diverged": 1.0}, [])
    figures = {"figure": float(last[row["figure"]])}
    figures |= {key: float(last[key]) for key in ("rounds", "megabytes", "bilevel", "f1") if key in last}
    figures["cpu_seconds"] = float(last.get("cpu_seconds", time.process_time() - begun))
    return RowOutcome(figures, [figures])


def _solved(
    row: Mapping[str, Any], task: Task, method: str, repetition: int, device: str, shared: Path
) -> Mapping[str, float]:
    """Return figures and costs of self_tuned, of a choice, or of a rival.

    shared: folder of guarded runs, which hold the rows of all their contenders.
    """
    rounds, options = row["num_rounds"], keywords({**row.get("options", {}), "device": device})
    options |= {"seed": options["seed"] + repetition, "measure_every": rounds, "residuals": False}
    if method == "self_tuned":
        built = task.build()
        options |= task.suggestions(task.automatic)
        return whole(solve(built.problem, built.clients, task.automatic, num_rounds=rounds, **options)).final
    plans = task.rivals()
    if method == _UNLEARNED:
        return unlearned(task, {**options, "num_rounds": rounds}, row.get("rivals"))
    if method not in (*CHOICES, *plans):
        raise UnknownNameError(f"method of {task.name()}", method, ["self_tuned", _UNLEARNED, *CHOICES, *plans])
    place = address(task, num_rounds=rounds, **{name: value for name, value in options.items() if name != "device"})
    if method in CHOICES:
        rows = choices(task, shared, place, rivals=row.get("rivals"), num_rounds=rounds, **options)
        return rows.get(method, {})  # without a bilevel answer, nothing has started
    if method in (rows := known(shared, place)):
        return rows[method]
    outcome = run_rival(plans[method], num_rounds=rounds, **options)
    # a run that failed returns to its best state, at worst its start, which no search has found
    return {**outcome.figures, **outcome.costs} if outcome.figures and outcome.failed is None else {}


def _cleaned(row: Mapping[str, Any], method: str, **where: Any) -> dict[str, float]:
    """Return figures of clean_labels, with its guard, or of another detector, without it."""
    pooled = {"pooled": row.get("pooled", {})} if method == "cleanlab" else {}
    detector = {"name": "as_given" if pooled else method, **row.get("detector", {})}
    figures = dict(cleaning.run({"task": row["task"], "detector": detector, **pooled}, **where).figures)
    return figures if method == _OURS["data_cleaning"] else {**figures, "test_accuracy": figures["cleaned"]}


def _ordered(row: Mapping[str, Any], method: str, repetition: int, device: str, shared: Path) -> Mapping[str, float]:
    if method != _OURS["influence"] and method not in NAMES:
        raise UnknownNameError("method of influence", method, [_OURS["influence"], *NAMES])
    task, num = given.task(row["task"]).repeated(repetition), row.get("num_removed", 60)
    scores = [_OURS["influence"], *NAMES]

    def compute() -> dict[str, dict[str, float]]:
        found = orders(task, scores, num_removed=num, seed=repetition, device=torch_device(device))
        return {score: one._asdict() for score, one in found.items()}

    return kept(shared, address(task, num_removed=num, seed=repetition), scores, compute)[method]
