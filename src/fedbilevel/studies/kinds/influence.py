"""Training instances that help or harm: predicted against actual changes of the validation loss.

The actual changes come from training again without the instance. The figures are R2, F1 and
Pearson's correlation.

    task        settings of the task influence; repetition r uses its `repeated(r)`
    method      {name, settings}: hgp, series, a solver, or a server algorithm that has an estimate
    training, network, averaging    settings of each; the task suggests omitted ones
    num_removed, batch_size, dtype, seed

The points of the curve are the removals: predicted and actual change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedbilevel.errors import SettingError
from fedbilevel.oracle.hypergradient import SOLVERS
from fedbilevel.runs.options import BETWEEN_PEERS, DTYPES, batch_size, torch_device
from fedbilevel.settings import Settings, made
from fedbilevel.studies import given
from fedbilevel.studies.influence.predict import kind_of
from fedbilevel.studies.influence.retrain import Training
from fedbilevel.studies.influence.study import study
from fedbilevel.studies.outcome import RowOutcome
from fedbilevel.tasks.influence import Influence

KNOWN = {
    "task": "table",
    "method": "table",
    "training": "table",
    "network": "table",
    "averaging": "table",
    "num_removed": "whole",
    "batch_size": "size",
    "dtype": "text",
    "seed": "seed",
}


def run(
    row: Mapping[str, Any], *, repetition: int, folder: Path, device: str, say: Callable[[str], None]
) -> RowOutcome:
    given.check(row, KNOWN)
    dtype = row.get("dtype", "float64")
    if dtype not in DTYPES:
        raise SettingError(f"dtype is {dtype!r}, expected {' or '.join(DTYPES)}.")
    task = made(Influence, {name: value for name, value in row.get("task", {}).items() if name != "name"}).repeated(
        repetition
    )
    owners: dict[str, type[Settings]] = {"training": Training, **BETWEEN_PEERS}
    settings: dict[str, Any] = {
        name: made(owner, {**_fitting(owner, task.suggests(name)), **row.get(name, {})})
        for name, owner in owners.items()
    }
    named = row.get("method", {"name": "hgp"})
    method: Any = named.get("name", "hgp")
    if method not in SOLVERS:
        own = {name: value for name, value in named.items() if name != "name"}
        kind = kind_of(method)
        method = made(kind, {**_fitting(kind, task.suggests(method)), **own})
    found = study(
        task,
        method=method,
        num_removed=row.get("num_removed", 50),
        progress=say,
        dtype=DTYPES[dtype],
        device=torch_device(device),
        seed=row.get("seed", 0) + repetition,
        batch_size=batch_size(row.get("batch_size")),
        **settings,
    )
    scores = (
        {}
        if found.scores is None
        else {name: float(value) for name, value in found.scores._asdict().items() if value is not None}
    )
    others = {
        name: float(value)
        for name in ("noise", "residual", "val_accuracy")
        if (value := getattr(found, name)) is not None
    }
    points = [
        {"actual": float(one.actual), "predicted": float(one.prediction)}
        for one in found.removed
        if one.actual is not None
    ]
    return RowOutcome({**scores, **others, "seconds": sum(found.seconds.values())}, points)


def _fitting(owner: type[Settings], suggested: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in suggested.items() if name in owner.__dataclass_fields__}
