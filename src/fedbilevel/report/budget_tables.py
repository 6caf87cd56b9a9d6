"""Rows of experiments that diverged or ended at chance, with the search for their settings."""

from __future__ import annotations

from collections.abc import Sequence

from fedbilevel.studies.budgets import lost, tuning
from fedbilevel.studies.experiment import Experiment


def table(experiments: Sequence[Experiment]) -> str:
    """Return a Markdown table of these rows, or nothing if there are none."""
    lines = [
        f"| {one.name} | {panel} | {one.row_title(row)} | {wrong} | {tuning(one, panel, row)} |"
        for one in experiments
        for (panel, row), wrong in lost(one).items()
    ]
    if not lines:
        return ""
    opening = [
        "## Rows that diverged or ended at chance",
        "",
        "A row whose search did not diverge in all trials says nothing against its method: it needs other settings.",
        "",
        "| experiment | panel | row | what is wrong | tuning |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*opening, *lines, ""])
