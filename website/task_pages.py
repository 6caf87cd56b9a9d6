"""Generate one page per task of the experiment worth: what it is for, what it is worth, when to leave it.

The sources are docstrings, settings, and the recorded results of the experiment.
"""

from __future__ import annotations

import functools
import inspect
import statistics
import sys
from typing import Any

from fedbilevel import discovery
from fedbilevel.report.tables import panel_table
from fedbilevel.studies.experiment import Experiment, read
from fedbilevel.studies.verdicts import Verdict, judges, lower, plain_ways, recorded_values, verdicts
from website.algorithm_pages import settings_table

NOT_RUN = "This panel has no recorded results yet."


@functools.cache
def worth() -> Experiment:
    return read("worth")


def panels(experiment: Experiment) -> dict[str, list[str]]:
    """Return the panels of every task of the experiment."""
    found: dict[str, list[str]] = {}
    for panel, content in experiment.content["panels"].items():
        found.setdefault(str(content["settings"]["task"]["name"]), []).append(panel)
    return found


def names() -> list[str]:
    return sorted(panels(worth()))


def page(name: str, experiment: Experiment | None = None) -> str:
    experiment = experiment or worth()
    kind = discovery.task(name)
    summary, _, rest = (inspect.getdoc(sys.modules[kind.__module__]) or "").partition("\n")
    out = [f"# {name}", summary, "## What it is worth", _opening(experiment)]
    for panel in panels(experiment)[name]:
        lines = panel_table(experiment, panel) if experiment.content.get("result", {}).get(panel) else [NOT_RUN]
        out += [f"**{experiment.panel_title(panel)}**", "\n".join(lines)]
    out += ["## Do not use this when", f"Do not use this when {kind.avoid}.", *_numbers(name, experiment)]
    out += ["## The problem", f"```text\n{rest.strip()}\n```", "## Settings", settings_table(kind)]
    return "\n\n".join(out) + "\n"


def _opening(experiment: Experiment) -> str:
    chosen = ", ".join(f"`{experiment.row_title(row)}`" for row in judges(experiment))
    return (
        f"Recorded by `fedbilevel reproduce {experiment.name}`: rounds, megabytes and processor seconds include all "
        f"runs by which a row is tuned. The last columns say whether {chosen} win, tie or lose against the row of the "
        "table, with the difference and its 95 % interval."
    )


def _numbers(name: str, experiment: Experiment) -> list[str]:
    """Return a sentence per recorded panel: the best plain way beside the best row of ours."""
    values, judged = recorded_values(experiment), verdicts(experiment, recorded_values(experiment))
    found = []
    for panel in panels(experiment)[name]:
        own = {row: statistics.fmean(some.values()) for (place, row), some in values.items() if place == panel and some}
        best = min if lower(experiment, panel) else max
        ours, theirs = [row for row in own if row in judges(experiment)], plain_ways(experiment, own)
        if ours and theirs:
            mine, rival = best(ours, key=own.__getitem__), best(theirs, key=own.__getitem__)
            found.append(_sentence(experiment, panel, mine, rival, judged[panel, rival, mine]))
    return found


def _sentence(experiment: Experiment, panel: str, mine: str, rival: str, word: Verdict) -> str:
    figures = lambda row: experiment.content["result"][panel][row]["figures"]

    def shown(row: str) -> str:
        costs = [
            f"{_rounded(figures(row)[name]['mean'])} {heading}"
            for name, heading in experiment.figures.items()
            if name in ("rounds", "megabytes", "cpu_seconds") and name in figures(row)
        ]
        return f"{experiment.row_title(row)} has {figures(row)['figure']['mean']:.4g} ({', '.join(costs)})"

    return (
        f"{experiment.panel_title(panel)}: the best plain way, {shown(rival)}; ours, {shown(mine)}: it {word.shown()}."
    )


def _rounded(cost: float) -> str:
    """Return a cost with three digits, or as a whole number from 1000 on."""
    return f"{cost:,.0f}" if cost >= 1000 else f"{cost:.3g}"


def index() -> str:
    """Return a table of all tasks with pages: the first line of each, and when to leave it."""
    rows: list[Any] = ["| task | what it does | do not use it when |", "|---|---|---|"]
    for name in names():
        kind = discovery.task(name)
        first = (inspect.getdoc(sys.modules[kind.__module__]) or "").partition("\n")[0]
        rows.append(f"| [{name}]({name}.md) | {first} | {kind.avoid} |")
    return "# Tasks\n\n" + "\n".join(rows) + "\n"
