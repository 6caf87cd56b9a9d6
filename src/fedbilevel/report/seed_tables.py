"""Rows of experiments that were repeated too seldom for an interval, with the time that more would take."""

from __future__ import annotations

from collections.abc import Sequence

from fedbilevel.studies.experiment import Experiment

ENOUGH = 3


def few(experiment: Experiment) -> dict[str, dict[str, tuple[int, float]]]:
    """Return recorded rows with fewer than ENOUGH repetitions: panel -> row -> repetitions, seconds of each."""
    found: dict[str, dict[str, tuple[int, float]]] = {}
    for panel, row in experiment.places():
        record = experiment.content.get("result", {}).get(panel, {}).get(row)
        if record is not None and record["repetitions"] < ENOUGH:
            number = int(record["repetitions"])
            found.setdefault(panel, {})[row] = (number, record["seconds"] / number)
    return found


def table(experiments: Sequence[Experiment]) -> str:
    """Return a Markdown table of these rows, one line per panel, or nothing if there are none.

    Behind a row: its repetitions, and the recorded seconds of one repetition.
    """
    lines = []
    for one in experiments:
        for panel, rows in few(one).items():
            names = ", ".join(f"{row} ({number}, {seconds:.0f} s)" for row, (number, seconds) in rows.items())
            devices = {one.content["result"][panel][row]["machine"] for row in rows}
            lines.append(f"| {one.name} | {panel} | {names} | {'; '.join(sorted(devices))} |")
    if not lines:
        return ""
    opening = [
        "## Rows with fewer than three repetitions",
        "",
        "In brackets: repetitions, and the seconds that one took on the machine of the last column.",
        "",
        "| experiment | panel | rows | machine |",
        "|---|---|---|---|",
    ]
    return "\n".join([*opening, *lines])
