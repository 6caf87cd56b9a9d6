"""Pictures of an experiment: the curves of a panel, and the labels of its clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbilevel import plots
from fedbilevel.studies import given
from fedbilevel.studies.experiment import Experiment, Job


def draw(experiment: Experiment, found: Sequence[tuple[Job, Mapping[str, Any]]], folder: Path) -> list[Path]:
    """Draw one picture of all rows per panel, and one picture of the clients' labels.

    Returns the files; the list is empty without matplotlib.
    """
    if not plots.available():
        return []
    drawn = []
    for panel in dict.fromkeys(job.panel for job, _ in found):
        mine = [(job, content) for job, content in found if job.panel == panel]
        curves: dict[str, list[Any]] = {}
        for job, content in mine:
            curves.setdefault(job.row, []).append(content["curve"])
        if draw_panel(experiment, panel, curves, folder / f"{panel}.png"):
            drawn.append(folder / f"{panel}.png")
        labels = _labels(mine[0][0])
        if labels is not None:
            drawn.append(folder / f"{panel}-partition.png")
            plots.partition(labels, drawn[-1], f"training samples, {experiment.panel_title(panel)}")
    return drawn


def draw_panel(experiment: Experiment, panel: str, curves: Mapping[str, Sequence[Any]], path: Path) -> bool:
    """Draw lines or points of all rows in the order of the file; return whether it drew any."""
    plot = experiment.content.get("plot")
    if plot is None or not plots.available():
        return False
    titles = [experiment.row_title(row) for row in experiment.content["rows"]]
    named = {
        row: title if titles.count(title) == 1 else row
        for row, title in zip(experiment.content["rows"], titles, strict=True)
    }
    axes = {plot["x"], plot["y"]}
    shown = {
        name: [[point for point in line if axes <= set(point)] for line in curves[row]]
        for row, name in named.items()
        if row in curves
    }
    shown = {name: lines for name, lines in shown.items() if any(lines)}  # a reference without rounds has no line
    if not shown:
        return False
    about = {"x": plot["x"], "y": plot["y"], "title": f"{experiment.title}\n{experiment.panel_title(panel)}"}
    if plot.get("kind") == "points":
        plots.points(shown, path, **about)
    else:
        plots.lines(shown, path, log=plot.get("log", ()), **about)
    return True


def _labels(job: Job) -> list[Any] | None:
    """Return the training labels of every client in the first repetition, for tasks with labels."""
    task = job.settings.get("task")
    if not isinstance(task, Mapping) or "name" not in task:
        return None
    built = given.task(task).build()
    if not all("label" in client["train"] for client in built.clients):
        return None
    labels = [client["train"]["label"] for client in built.clients]
    return labels if all(len(getattr(label, "shape", (0, 0))) == 1 for label in labels) else None
