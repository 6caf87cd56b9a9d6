"""The figures and tables of papers that experiments declare, and how far each is reproduced."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedbilevel.report.seed_tables import ENOUGH
from fedbilevel.studies.experiment import Experiment


class Part(NamedTuple):
    """What one experiment declares for an item: its records, None where a row has none yet."""

    experiment: str
    records: list[Mapping[str, Any] | None]
    needed: int
    differs: str


def parts(experiments: Sequence[Experiment]) -> dict[str, list[Part]]:
    """Return the declared parts of every item, sorted by paper, kind and number."""
    found: dict[str, list[Part]] = {}
    for one in experiments:
        result = one.content.get("result", {})
        for item, given in one.content.get("items", {}).items():
            places = one.places(panels=given.get("panels", ()), rows=given.get("rows", ()))
            records = [result.get(panel, {}).get(row) for panel, row in places]
            found.setdefault(item, []).append(
                Part(one.name, records, given.get("repetitions", ENOUGH), given.get("differs", ""))
            )
    return {item: found[item] for item in sorted(found, key=_natural)}


def state(own: Sequence[Part]) -> str:
    """Return how far an item is reproduced, with its diverged rows and what differs from the paper."""
    every = [(part, record) for part in own for record in part.records]
    there = [(part, record) for part, record in every if record is not None]
    if not there:
        return "not recorded"
    needed = max(part.needed for part in own)
    if len(there) < len(every):
        first = f"partly recorded, {len(there)} of {len(every)} rows"
    elif all(record["repetitions"] >= part.needed for part, record in there):
        first = "recorded" if any("diverged" in record["figures"] for _, record in there) else "reproduced"
    else:
        first = f"recorded with fewer than {needed} repetitions"
    diverged = sum("diverged" in record["figures"] for _, record in there)
    words = [f"{diverged} of {len(there)} rows diverged" if diverged else "", *(part.differs for part in own)]
    return "; ".join([first, *dict.fromkeys(word for word in words if word)])


def repetitions(own: Sequence[Part]) -> str:
    """Return the smallest and the largest number of repetitions of the recorded rows."""
    numbers = {record["repetitions"] for part in own for record in part.records if record is not None}
    if not numbers:
        return "-"
    return str(min(numbers)) if len(numbers) == 1 else f"{min(numbers)} to {max(numbers)}"


def table(experiments: Sequence[Experiment]) -> str:
    """Return a Markdown table of all items, or nothing if none is declared."""
    items = parts(experiments)
    lines = {
        item: f"| {item} | {state(own)} | {repetitions(own)} | {', '.join(part.experiment for part in own)} |"
        for item, own in items.items()
    }
    for one in experiments:
        for item, reason in one.content.get("unobtainable", {}).items():
            lines[item] = f"| {item} | not obtainable: {reason} | - | {one.name} |"
    if not lines:
        return ""
    opening = [
        "## Figures and tables of the papers",
        "",
        f"An item is reproduced if all its rows are recorded with at least {ENOUGH} repetitions, "
        "or with as many as its file asks for.",
        "",
        "| paper item | state | repetitions | experiment |",
        "|---|---|---|---|",
    ]
    return "\n".join([*opening, *(lines[item] for item in sorted(lines, key=_natural)), ""])


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a key by which Figure 10 comes behind Figure 9."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", text)]
