"""Tables of the documentation about leakage and protections, made from recorded experiments.

A page has a comment such as `<!-- leakage by protection -->`, which the table replaces.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from fedbilevel.studies.experiment import Experiment, read
from fedbilevel.studies.kinds.protection import is_met

MESSAGES = {  # by algorithm: the messages that hold training samples, and those that hold validation samples
    "fedavg": ("y", "none"),
    "fedbio": ("y", "u, and x where it is shared"),
    "adasimfbo": ("q_y", "q_u, and q_x where x is shared"),
    "fbo_aggitd": ("q", "z"),
    "penalty": ("y with d", "y with d, and x where it is shared"),
}
_FEDBIO = {
    "cleaning-fedbio": "linear model, 8 x 8",
    "representation-fedbio": "hidden layer, 8 x 8",
    "cleaning-mnist-fedbio": "linear model, 28 x 28",
    "representation-mnist-fedbio": "hidden layer, 28 x 28",
}
_ROWS = ("one", "four", "secure")  # recorded for every algorithm
GOALS = {  # experiment -> panels with a goal, by what they are called
    "protection-bytes": {"cleaning": "label cleaning", "representation": "hyper-representation"},
    "attackers-cleaning": {
        "all": "label cleaning, 30 clients",
        "ten": "label cleaning, 10 clients",
        "mnist": "label cleaning, MNIST, 30 clients",
    },
    "attackers-representation": {"all": "hyper-representation, 20 clients"},
}


@functools.cache
def experiment(name: str) -> Experiment:
    return read(name)


def recorded(one: Experiment, panel: str, row: str) -> dict[str, float]:
    """Return means of the recorded figures, or nothing."""
    entry = one.content.get("result", {}).get(panel, {}).get(row, {})
    return {name: figure["mean"] for name, figure in entry.get("figures", {}).items()}


def by_protection(one: Experiment | None = None) -> str:
    """Return what is read from FedBiO's messages, by protection, model and size of images."""
    one = one or experiment("leakage")
    panels = {panel: title for panel, title in _FEDBIO.items() if panel in one.content.get("result", {})}
    lines = ["| | " + " | ".join(panels.values()) + " |", "|---" * (len(panels) + 1) + "|"]
    for row in one.content["rows"]:
        cells = [_read(recorded(one, panel, row)) for panel in panels]
        lines.append("| " + " | ".join([one.row_title(row), *cells]) + " |")
    return "\n".join(lines)


def by_algorithm(one: Experiment | None = None) -> str:
    """Return which messages hold samples of which role, and what is read from them."""
    one = one or experiment("leakage")
    headings = ["training samples in", "validation samples in", *(one.row_title(row) for row in _ROWS)]
    lines = ["| algorithm | " + " | ".join(headings) + " |", "|---" * (len(headings) + 1) + "|"]
    for panel, content in one.content["panels"].items():
        if panel.startswith("cleaning-") and "mnist" not in panel:
            name = str(content["settings"]["algorithm"]["name"])
            cells = [_read(recorded(one, panel, row)) for row in _ROWS]
            lines.append("| " + " | ".join([f"`{name}`", *MESSAGES[name], *cells]) + " |")
    return "\n".join(lines)


def _read(figures: Mapping[str, float]) -> str:
    if not figures:
        return "-"
    shares = [f"{100 * figures[name]:.0f} %" for name in ("recovered_train", "recovered_val") if name in figures]
    return f"{figures['psnr']:.0f} dB ({', '.join(shares)})"


def goals() -> str:
    """Return a line per goal: the difference in points, and whether means over repetitions meet it."""
    headings = ["task", "row", "accuracy", "difference", "bytes", "goal", "repetitions"]
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    for name, panels in GOALS.items():
        one = experiment(name)
        for panel, title in panels.items():
            lines += [_line(one, panel, row, title) for row in one.content["rows"] if recorded(one, panel, row)]
    return "\n".join(lines)


def _line(one: Experiment, panel: str, row: str, title: str) -> str:
    figures, goal = recorded(one, panel, row), one.settings(panel, row)["goal"]
    reached = "accuracy" if goal["figure"] == "gap" else "sign_flip_20"
    cells: list[Any] = [
        title,
        _row_title(one, panel, row),
        f"{100 * figures[reached]:.1f} %",
        f"{100 * figures[goal['figure']]:+.1f}",
        f"{100 * figures['bytes']:.1f} %",
        "met" if is_met(goal, figures) else "not met",
        one.content["result"][panel][row]["repetitions"],
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def _row_title(one: Experiment, panel: str, row: str) -> str:
    """Return the title, with the robust rule that was chosen for it."""
    layer = one.settings(panel, row).get("aggregation", {})
    outside = f" after means of nearest rows without {layer['outside']:.0%}" if "outside" in layer else ""
    return one.row_title(row) + (f" ({layer['robust']}{outside})" if "robust" in layer else "")


TABLES = {
    "<!-- leakage by protection -->": by_protection,
    "<!-- leakage by algorithm -->": by_algorithm,
    "<!-- goals of protections -->": goals,
}


def filled(markdown: str) -> str:
    """Return a page with its tables."""
    for comment, table in TABLES.items():
        if comment in markdown:
            markdown = markdown.replace(comment, table())
    return markdown
