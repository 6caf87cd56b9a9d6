"""The leaderboard: every recorded row of every experiment, by the cost of reaching a target and by its final figure.

A cell is a link to the settings and the command that make it. Where an experiment sets no target,
its curves give one: a value that three quarters of the rows of the panel reach.
"""

from __future__ import annotations

import functools
import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import tomlkit

from fedbilevel.columns import metric_and_value, rises
from fedbilevel.studies.budgets import tuning
from fedbilevel.studies.experiment import Experiment, known, read
from fedbilevel.studies.verdicts import half_width

COSTS = {"rounds": "rounds", "megabytes": "MB", "calls": "oracle calls", "seconds": "seconds"}
HEADINGS = {
    "task": "task",
    "method": "method",
    "target": "target",
    **{name: f"{heading} to target" for name, heading in COSTS.items()},
    "figure": "final figure",
    "final": "its value",
    **{f"all_{name}": f"{heading} in all" for name, heading in COSTS.items()},
    "repetitions": "repetitions",
    "tuning": "tuning",
}
SHARE = 0.75  # of the rows of a panel reach a target that is taken from curves
FIRST = "aggitd-table2/shards"  # the task that the page shows first


class Cell(NamedTuple):
    """A shown text, and the number by which it is sorted, if it is a number."""

    text: str
    value: float | None = None


class Entry(NamedTuple):
    """One row of one panel of one experiment."""

    experiment: str
    panel: str
    row: str
    cells: dict[str, Cell]


@functools.cache
def experiments() -> tuple[Experiment, ...]:
    return tuple(read(path) for path in known().values())


def entries(given: Sequence[Experiment] | None = None) -> list[Entry]:
    return [
        Entry(one.name, panel, row, _cells(one, panel, row))
        for one in (experiments() if given is None else given)
        for panel, row in one.places()
        if row in one.content.get("result", {}).get(panel, {})
    ]


def _cells(one: Experiment, panel: str, row: str) -> dict[str, Cell]:
    record = one.content["result"][panel][row]
    figures = record["figures"]
    settings = one.settings(panel, row)
    name, heading = final_figure(one, settings)
    target, to_target = _to_target(one, panel, row, settings)
    found = {
        "task": Cell(f"{one.name}/{panel}"),
        "method": Cell(one.row_title(row)),
        "target": Cell(target),
        **to_target,
        "figure": Cell(heading),
        "final": Cell("diverged") if "diverged" in figures else _cell(figures.get(name), percent=heading.endswith("%")),
        **{f"all_{cost}": _cost(figures, cost, "") for cost in COSTS},
        "repetitions": Cell(str(record["repetitions"]), record["repetitions"]),
        "tuning": Cell(tuning(one, panel, row)),
    }
    return {column: found.get(column, Cell("")) for column in HEADINGS}


def final_figure(one: Experiment, settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name and the heading of the figure that a row is about."""
    if "verdict" in one.content:
        return str(one.content["verdict"]["figure"]), str(settings.get("figure", one.content["verdict"]["figure"]))
    if "target" in settings:
        name = metric_and_value(settings["target"])[0]
    else:
        name = next(name for name in one.figures if name not in (*COSTS, *(f"{cost}_to_target" for cost in COSTS)))
    return name, one.figures.get(name, name.replace("_", " "))


def _to_target(one: Experiment, panel: str, row: str, settings: Mapping[str, Any]) -> tuple[str, dict[str, Cell]]:
    figures = one.content["result"][panel][row]["figures"]
    if "target" in settings:
        name, value = metric_and_value(settings["target"])
        return f"{name} {value:g}", {cost: _cost(figures, cost, "_to_target") for cost in COSTS}
    plot, lines = one.content.get("plot", {}), _curves(one.path.with_name("curves.json")).get(panel, {})
    if plot.get("x") != "rounds" or not rises(plot["y"]) or not lines.get(row):
        return "", {}
    value = common_target(lines, plot["y"])
    reached = [rounds for line in lines[row] if (rounds := first_at(line, plot["y"], value)) is not None]
    found = {"mean": sum(reached) / len(reached), "deviation": 0.0, "runs": 1} if reached else None
    partly = f" ({len(reached)} of {len(lines[row])})" if 0 < len(reached) < len(lines[row]) else ""
    cell = _cell(found)
    return f"{plot['y']} {value:g}, from curves", {"rounds": cell._replace(text=cell.text + partly)}


@functools.cache
def _curves(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def common_target(lines: Mapping[str, Sequence[Any]], figure: str) -> float:
    """Return the largest value, in thousandths, that a share of the rows has at its end on average."""
    ends = [[line[-1][figure] for line in runs if line] for runs in lines.values()]
    finals = sorted((sum(some) / len(some) for some in ends if some), reverse=True)
    return math.floor(1000 * finals[math.ceil(SHARE * len(finals)) - 1]) / 1000


def first_at(line: Sequence[Mapping[str, float]], figure: str, value: float) -> float | None:
    return next((point["rounds"] for point in line if point[figure] >= value), None)


def _cost(figures: Mapping[str, Any], cost: str, suffix: str) -> Cell:
    if cost != "calls":
        return _cell(figures.get(cost + suffix) or (figures.get("cpu_seconds") if cost + suffix == "seconds" else None))
    parts = [figures.get(name + suffix) for name in ("gradients", "products")]
    calls = [part["mean"] for part in parts if part is not None]
    return _cell({"mean": sum(calls), "deviation": 0.0, "runs": 1} if calls else None)


def _cell(figure: Mapping[str, Any] | None, *, percent: bool = False) -> Cell:
    """Return a mean with its 95 % interval; a single run has none."""
    if figure is None:
        return Cell("")
    scale = 100 if percent else 1
    half = half_width(figure["deviation"], figure["runs"])
    beside = "" if math.isinf(half) else f" ± {_digits(scale * half, 2)}"
    return Cell(f"{_digits(scale * figure['mean'], 4)}{beside}", figure["mean"])


def _digits(value: float, num: int) -> str:
    return f"{value:,.0f}" if 10**num <= abs(value) < 1e12 else f"{value:.{num}g}"


def anchor(panel: str, row: str) -> str:
    return f"{panel}--{row}"


def page() -> str:
    """Return the leaderboard as a page of Markdown with one table of HTML and the script that sorts it."""
    script = (Path(__file__).parent / "leaderboard.js").read_text()
    found = entries()
    tasks = list(dict.fromkeys(one.cells["task"].text for one in found))
    options = "".join(f"<option{' selected' if task == FIRST else ''}>{html.escape(task)}</option>" for task in tasks)
    heads = "".join(f'<th><button type="button">{heading}</button></th>' for heading in HEADINGS.values())
    lines = [
        "---\nhide: [navigation, toc]\nsearch: {exclude: true}\n---",
        "# Leaderboard",
        "Every recorded row of every [experiment](experiments.md).\n"
        "A value is a mean over repetitions with Student's 95 % interval; a single repetition has no interval.\n"
        "Press a heading to sort; press a value for the settings and the command that make it.\n"
        "Oracle calls are gradients and products together, and seconds are those of the machine that ran the row.\n"
        "Compare rows with equal tuning only: the last column is the budget of the search for the settings of the row.",
        f'<p><label>task <select id="board-task"><option value="">all</option>{options}</select></label> '
        '<label>method <input id="board-method" type="search" placeholder="part of a name"></label></p>',
        f'<div class="board"><table id="board" class="board"><thead><tr>{heads}</tr></thead><tbody>',
        *(_line(one) for one in found),
        f"</tbody></table></div>\n<script>\n{script}</script>",
    ]
    return "\n\n".join(lines[:4]) + "\n" + "\n".join(lines[4:]) + "\n"


def _line(one: Entry) -> str:
    link = f"runs/{quote(one.experiment)}.html#{quote(anchor(one.panel, one.row))}"

    def shown(column: str, cell: Cell) -> str:
        text = html.escape(cell.text)
        inner = f'<a href="{link}">{text}</a>' if cell.value is not None or column == "method" else text
        return f'<td data-value="{cell.value!r}">{inner}</td>' if cell.value is not None else f"<td>{inner}</td>"

    return f"<tr>{''.join(shown(column, cell) for column, cell in one.cells.items())}</tr>"


def run_page(one: Experiment) -> str:
    """Return the page of an experiment with the settings and the command of every recorded row."""
    out = [
        "---\nsearch: {exclude: true}\n---",
        f"# Runs of {one.name}",
        f"{one.title}. The results are on the page of [experiments](../experiments.md).",
    ]
    for panel, row in one.places():
        record = one.content.get("result", {}).get(panel, {}).get(row)
        if record is not None:
            settings = tomlkit.dumps({"study": one.content["rows"][row].get("study", one.content["study"]),
                                      **one.settings(panel, row)})  # fmt: skip
            out += [
                f'<a id="{html.escape(anchor(panel, row))}"></a>**{one.panel_title(panel)}: {one.row_title(row)}**',
                f"`fedbilevel reproduce {one.name} --panels {panel} --rows {row} "
                f"--repetitions {record['repetitions']}`: {record['seconds']:.0f} s on {record['machine']}, "
                f"{record['time'][:10]}, commit {record['commit']}.",
                f"```toml\n{settings.strip()}\n```",
            ]
    return "\n\n".join(out) + "\n"


def pages() -> dict[str, str]:
    """Return all pages by their paths in the site."""
    recorded = [one for one in experiments() if one.content.get("result")]
    return {"results/leaderboard.md": page(), **{f"results/runs/{one.name}.md": run_page(one) for one in recorded}}
