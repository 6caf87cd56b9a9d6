"""Goals of speed, each with the figure that a section has measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from benchmarks.clock import Row


class Goal(NamedTuple):
    """A limit of one column of one row.

    file, section: results that have the row.
    name, what: the row.
    column: the figure, which must not exceed `most`.
    """

    text: str
    file: str
    section: str
    name: str
    what: str
    column: str
    most: float

    def found(self, files: Mapping[str, Mapping[str, Any]]) -> float | None:
        """Return the measured figure, or None if no result has it."""
        rows: list[Row] = files.get(self.file, {}).get(self.section, {}).get("rows", [])
        values = [row.get(self.column) for row in rows if (row["name"], row["what"]) == (self.name, self.what)]
        return values[0] if values and self._is_by_hand(rows) else None

    def _is_by_hand(self, rows: list[Row]) -> bool:
        """Return whether the ratios of the section are to programs by hand, as in its present form."""
        reference = "by hand, complete" if self.file == "cpu" else "by hand, one graph"
        return self.column != "times_ours" or any(row["what"] == reference for row in rows)


class Overall(NamedTuple):
    """A limit of one column of all rows of a section, such as the worst figure."""

    text: str
    file: str
    section: str
    column: str
    most: float
    of: Callable[[list[float]], float]

    def found(self, files: Mapping[str, Mapping[str, Any]]) -> float | None:
        """Return the measured figure, or None if no result has it."""
        rows: list[Row] = files.get(self.file, {}).get(self.section, {}).get("rows", [])
        values = [row[self.column] for row in rows if row.get(self.column) is not None]
        return self.of(values) if values else None


_AGGITD = "fbo_aggitd, cohort per iteration"
_FEDBIO = "fedbio, cohort per iteration"
_FEDNEST = "fednest, cohort per iteration"
GOALS: tuple[Goal | Overall, ...] = (
    Goal("FBO-AggITD in FedNest's setting, by default: times the program by hand, CPU", "cpu", "iteration", _AGGITD,
         "library", "times_ours", 1.3),
    Goal("the same on CUDA, where the program by hand is one graph", "cuda", "iteration", _AGGITD, "library",
         "times_ours", 1.5),
    Goal("FedNest in its setting, by default: times the program by hand, CPU", "cpu", "iteration",
         _FEDNEST, "library", "times_ours", 1.3),
    Goal("the same on CUDA, where the program by hand is one graph", "cuda", "iteration", _FEDNEST, "library",
         "times_ours", 1.5),
    Goal("FedBiO in the same setting, by default: times the program by hand, CPU", "cpu", "iteration", _FEDBIO,
         "library", "times_ours", 1.3),
    Goal("the same on CUDA, where the program by hand is one graph", "cuda", "iteration", _FEDBIO, "library",
         "times_ours", 1.5),
    Overall("measured algorithms on CUDA, wall time / GPU time: worst", "busy-cuda", "busy", "ratio", 1.3, max),
    Overall("the same: median", "busy-cuda", "busy", "ratio", 1.3, statistics.median),
    Goal("tiny problem, FedBiO, engine: times torch by hand", "cpu", "tiny", "fedbio", "engine", "ratio", 4.0),
    Goal("tiny problem, FBO-AggITD, engine: times torch by hand", "cpu", "tiny", "fbo_aggitd", "engine", "ratio", 4.0),
    Goal("FedBiO, 1e9 parameters, 8 clients, bf16, one GPU: rows of y per client", "large-1b-cuda", "large_models",
         "1B, 8 clients, fedbio, bf16", "library, in turn", "y_rows", 6.0),
    *(
        Goal(f"FedBiO, 8 clients, 1.06 million weights, {way}: rows of y per client, CPU", "cpu", "rows_of_y", "fedbio",
             way, "y_rows", 6.0)
        for way in ("auto", "loop")
    ),
    Goal("memory-mapped data: times the same run in memory, CPU", "cpu", "streaming", "fedbio", "memory-mapped",
         "ratio", 1.3),
    Goal("`fedbilevel --help`: seconds of the processor", "cpu", "startup", "start", "--help", "seconds", 0.3),
    Goal("`fedbilevel list`: seconds of the processor", "cpu", "startup", "start", "list", "seconds", 0.3),
)  # fmt: skip


def table(files: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the goals as lines of Markdown.

    files: results by the name of their file, then by section.
    """
    lines = ["| goal | at most | measured | |", "|---|--:|--:|---|"]
    for goal in GOALS:
        value = goal.found(files)
        verdict = "not measured" if value is None else "met" if value <= goal.most else "**not met**"
        lines.append(f"| {goal.text} | {goal.most:g} | {'' if value is None else format(value, '.3g')} | {verdict} |")
    return "\n".join(lines)
