"""One method of personalisation on one network.

The figures are mean and bottom-decile test accuracy at the best validation accuracy; the curve is
the validation accuracy by outer step.

task      settings of the task personalisation; repetition r uses its `repeated(r)`
plan      settings shared by all methods (personalisation.PersonalisationPlan)
method, network, batch_size, seed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedbilevel.runs.options import batch_size, torch_device
from fedbilevel.settings import made
from fedbilevel.studies import given
from fedbilevel.studies.outcome import RowOutcome
from fedbilevel.studies.personalisation import PersonalisationPlan, personalise
from fedbilevel.tasks.personalisation import Personalisation

KNOWN = {"task": "table", "plan": "table", "method": "text", "network": "text", "batch_size": "size", "seed": "seed"}


def run(
    row: Mapping[str, Any], *, repetition: int, folder: Path, device: str, say: Callable[[str], None]
) -> RowOutcome:
    given.check(row, KNOWN, needs=("method", "network"))
    task = made(
        Personalisation, {name: value for name, value in row.get("task", {}).items() if name != "name"}
    ).repeated(repetition)
    size = batch_size(row.get("batch_size"))
    (one,) = personalise(
        task,
        made(PersonalisationPlan, {**row.get("plan", {}), "repetitions": 1}),
        methods=[row["method"]],
        networks=[row["network"]],
        seed=row.get("seed", 0) + repetition,
        batch_size={"train": size} if isinstance(size, int) else size,
        device=torch_device(device),
        progress=say,
    )
    figures = ("test_accuracy", "bottom_decile", "validation_accuracy", "rounds", "megabytes", "seconds")
    curve = [{"outer_steps": float(step), "validation_accuracy": accuracy} for step, accuracy in one.curve]
    return RowOutcome({name: float(getattr(one, name)) for name in figures}, curve)
