"""Rows that come from one guarded run: all contenders, and the choices among them.

`fb.guarded` runs every rival of its list, so that their rows need no runs of their own. A folder keeps
the figures of each guarded run under an address of what determines it, and rows read them there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbilevel.runs.record import make_folder, write_whole
from fedbilevel.studies.contest import BILEVEL
from fedbilevel.studies.guarded import Guarded, guarded
from fedbilevel.tasks.task import Task

CHOICES = ("guarded", "blended", "started")
Rows = dict[str, dict[str, float]]  # figures and costs by row


def address(task: Task, **options: Any) -> str:
    """Return a short name of everything that determines a guarded run but the list of its rivals."""
    about = json.dumps([task.name(), task.asdict(), options], sort_keys=True, default=str)
    return hashlib.blake2b(about.encode(), digest_size=6).hexdigest()


def known(folder: Path, place: str) -> Rows:
    """Return the rows of a run that has ended."""
    return dict(_content(folder, place).get("rows", {}))


def kept(folder: Path, place: str, names: Sequence[str], compute: Callable[[], Rows]) -> Rows:
    """Return the rows of a run, which runs unless the folder has a run with these names.

    A run with other names had other rivals, and its choices are not those among these. A rival that
    failed has no row.
    """
    found = _content(folder, place)
    if sorted(found.get("names", ())) == sorted(names):
        return dict(found["rows"])
    rows = compute()
    make_folder(folder)
    content = json.dumps({"names": list(names), "rows": rows})
    write_whole(folder / f"{place}.json", content.encode(), shared=True)  # rows are jobs of several processes
    return rows  # the file may have the rows of other rivals by now


def _content(folder: Path, place: str) -> dict[str, Any]:
    path = folder / f"{place}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def choices(
    task: Task, folder: Path, place: str, *, rivals: Sequence[str] | None, num_rounds: int, **options: Any
) -> Rows:
    """Return the rows of a guarded run with these rivals."""
    names = list(task.rivals() if rivals is None else rivals)
    compute = lambda: rows_of(guarded(task, num_rounds=num_rounds, rivals=names, **options), task)
    return kept(folder, place, names, compute)


def rows_of(found: Guarded, task: Task) -> Rows:
    """Return figures and costs of the choices and of every rival."""
    rows: Rows = {name: {**found.contenders[name].figures, **costs}
                  for name, costs in found.tuning.items() if name in found.contenders and name != BILEVEL}  # fmt: skip
    rows["guarded"] = {**found.figures, **total(found.spent.values()), "bilevel": found.share}
    plain = found.plain or found
    rows["blended"] = {**plain.figures, **total(plain.spent.values()), "bilevel": 0.0}
    if BILEVEL in found.contenders:
        plans = task.rivals()
        paid = [own for name, own in found.spent.items() if name == BILEVEL or plans[name].start is not None]
        rows["started"] = {**found.contenders[BILEVEL].figures, **total(paid)}
    return rows


def total(costs: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in costs:
        found |= {name: found.get(name, 0.0) + value for name, value in one.items()}
    return found
