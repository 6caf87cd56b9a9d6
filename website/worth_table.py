"""The table of what two levels are worth, made from the records of the experiment worth.

    python -m website.worth_table

A page has the comment `<!-- worth of every task -->`, which the table replaces.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedbilevel.studies.experiment import Experiment
from fedbilevel.studies.verdicts import Values, lower, paired, plain_ways, recorded_values, verdict
from website.task_pages import worth

MARKER = "<!-- worth of every task -->"
_OURS = ("guarded", "self-tuned")  # the answer of fb.guarded, or of the function that a task has of its own


def filled(markdown: str) -> str:
    return markdown.replace(MARKER, table()) if MARKER in markdown else markdown


def table(experiment: Experiment | None = None) -> str:
    """Return one line per panel with current records: our answer beside the best plain way, and a verdict."""
    experiment = experiment or worth()
    values = current(experiment)
    lines = [
        "| task, data: figure | two levels | the best plain way | verdict | repetitions |",
        "|---|---|---|---|---|",
    ]
    for panel in experiment.content["panels"]:
        rows = {row: some for (place, row), some in values.items() if place == panel}
        ours = next((row for row in _OURS if row in rows), None)
        if ours is not None and plain_ways(experiment, rows):
            lines.append(_line(experiment, panel, ours, rows))
    return "\n".join(lines)


def current(experiment: Experiment) -> dict[tuple[str, str], Values]:
    """Return recorded values of rows whose settings have not changed since."""
    digests = {(job.panel, job.row): job.digest for job in experiment.jobs(repetitions=1)}
    record = experiment.content.get("result", {})
    return {
        (panel, row): some
        for (panel, row), some in recorded_values(experiment).items()
        if record[panel][row]["settings"] == digests.get((panel, row))
    }


def _line(experiment: Experiment, panel: str, ours: str, rows: Mapping[str, Values]) -> str:
    """Return a line of the table; differences are over the repetitions that both rows have."""
    falls = lower(experiment, panel)
    pairs = {row: paired(rows[ours], rows[row]) for row in plain_ways(experiment, rows)}
    found = {row: verdict(*zip(*some, strict=True), lower_is_better=falls) for row, some in pairs.items() if some}
    # the rival to which the least is gained
    best = (max if falls else min)(found, key=lambda row: found[row].difference)
    words = [one.word for one in found.values()]
    counts = ", ".join(f"{said} {words.count(word)}" for word, said in _SAID.items() if word in words)
    mine, theirs = (f"{sum(some) / len(some):.4g}" for some in zip(*pairs[best], strict=True))
    return (
        f"| {experiment.panel_title(panel)} | {mine} ({experiment.row_title(ours)}) | "
        f"{theirs} ({experiment.row_title(best)}) | {found[best].shown()}; of {len(found)} plain ways, {counts} | "
        f"{len(pairs[best])} |"
    )


_SAID = {"wins": "it beats", "ties": "ties with", "loses": "loses to"}


if __name__ == "__main__":
    print(table())
