"""Checks of an experiment's file: types of entries, and names that refer to other entries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedbilevel.errors import ExperimentError, UnknownNameError
from fedbilevel.settings import check_plain

Tree = dict[str, Any]
_TOP = {
    "title": "text",
    "source": "text",
    "about": "text",
    "items": "table",
    "unobtainable": "table",
    "extends": "text",
    "select": "table",
    "study": "text",
    "repetitions": "whole",
    "figures": "table",
    "plot": "table",
    "verdict": "table",
    "goals": "table",
    "settings": "table",
    "panels": "table",
    "rows": "table",
    "quick": "table",
    "tune": "table",
    "tuned": "table",
    "result": "table",
}
_NEEDED = ("title", "source", "study", "figures", "panels", "rows")
_PANEL = {"title": "text", "settings": "table"}
_ROW = {
    "title": "text",
    "study": "text",
    "settings": "table",
    "only": "names",
    "in": "table",
    "from": "table",
    "paper": "table",
    "tuning": "text",
}
_ITEM = {"panels": "names", "rows": "names", "repetitions": "whole", "differs": "text"}
_PLOT = {"x": "text", "y": "text", "log": "names", "kind": "text"}
_VERDICT = {"rows": "names", "figure": "text", "bilevel": "names"}
_PAIRED = ("wins", "never loses")  # what a goal may ask of paired differences
_BOUNDS = ("least", "most", "than", "than_figure", "verdict")
_GOAL = {
    "title": "text",
    "figure": "text",
    "rows": "names",
    "panels": "names",
    "least": "number",
    "most": "number",
    "than": "text",
    "than_figure": "text",
    "lower": "flag",
    "within": "number",
    "pooled": "flag",
    "verdict": "text",
}
_QUICK = {"repetitions": "whole", "rows": "names", "panels": "names", "settings": "table"}
_SELECT = {"panels": "names", "rows": "names"}
_NAME = re.compile(r"(?!.*--)[A-Za-z0-9][A-Za-z0-9_.+=-]*")  # names are parts of file names, joined by --


def check_kinds(path: Path, content: Tree) -> None:
    """Check the types of all entries, and refuse unknown names."""
    _kinds(path, "", content, _TOP)
    _each(path, "figures", content.get("figures", {}), "text")
    for name, one in content.get("items", {}).items():
        _kinds(path, f"items.{name}", one, _ITEM)
    _each(path, "unobtainable", content.get("unobtainable", {}), "text")
    _kinds(path, "plot", content.get("plot", {}), _PLOT)
    _kinds(path, "verdict", content.get("verdict", {}), _VERDICT)
    _kinds(path, "quick", content.get("quick", {}), _QUICK)
    _kinds(path, "select", content.get("select", {}), _SELECT)
    _each(path, "goals", content.get("goals", {}), "table")
    for name, one in content.get("goals", {}).items():
        _kinds(path, f"goals.{name}", one, _GOAL)
    for kind, allowed in (("panels", _PANEL), ("rows", _ROW)):
        for name, one in content.get(kind, {}).items():
            if not _NAME.fullmatch(name):
                raise ExperimentError(
                    f"{path}: {kind}.{name!r} is not a valid name: "
                    "use letters, digits, single hyphens, dots, _, + and =."
                )
            _kinds(path, f"{kind}.{name}", one, allowed)
    for name, one in content.get("rows", {}).items():
        _each(path, f"rows.{name}.in", one.get("in", {}), "table")
        _each(path, f"rows.{name}.from", one.get("from", {}), "text")
        _each(path, f"rows.{name}.paper", one.get("paper", {}), "table")
        for panel, figures in one.get("paper", {}).items():
            _each(path, f"rows.{name}.paper.{panel}", figures, "number")
    for part in ("tuned", "result"):
        _each(path, part, content.get(part, {}), "table")
        for panel, rows in content.get(part, {}).items():
            _each(path, f"{part}.{panel}", rows, "table")
    for panel, rows in content.get("tuned", {}).items():
        for row, entry in rows.items():
            _is(path, f"tuned.{panel}.{row}.settings", entry.get("settings"), "table")


def check_names(path: Path, content: Tree) -> None:
    """Check that required entries exist, and that every named panel, row and figure exists."""
    for name in _NEEDED:
        if not content.get(name):
            raise ExperimentError(f"{path} has no {name!r}: an experiment needs {', '.join(_NEEDED)}.")
    plot = content.get("plot", {"x": "", "y": ""})
    if (
        not {"x", "y"} <= set(plot)
        or plot.get("kind", "lines") not in ("lines", "points")
        or not set(plot.get("log", ())) <= {"x", "y"}
    ):
        raise ExperimentError(
            f"{path}: plot is {plot}, expected x and y, kind = 'lines' or 'points', and log with 'x', 'y' or both."
        )
    judged = content.get("verdict", {})
    if judged and not {"rows", "figure"} <= set(judged):
        raise ExperimentError(f"{path}: verdict is {judged}, expected rows and a figure.")
    for key in ("rows", "bilevel"):
        among(path, f"verdict.{key}", judged.get(key, []), content["rows"])
    among(path, "verdict.figure", [judged["figure"]] if judged else [], content["figures"])
    for name, one in content.get("goals", {}).items():
        if not {"title", "figure"} <= {*one} or len({*_BOUNDS} & {*one}) != 1:
            raise ExperimentError(
                f"{path}: goals.{name} has {', '.join(one) or 'nothing'}, expected title, figure, and one of "
                f"{', '.join(_BOUNDS[:-1])} and {_BOUNDS[-1]}."
            )
        if "verdict" in one:
            _check_paired(path, name, one, judged.get("figure"))
        for key in ("rows", "panels"):
            among(path, f"goals.{name}.{key}", one.get(key, ()), content[key])
        among(path, f"goals.{name}.than", [one["than"]] if "than" in one else [], content["rows"])
        for key in ("figure", "than_figure"):
            among(path, f"goals.{name}.{key}", [one[key]] if key in one else [], content["figures"])
    panels, rows, quick = content["panels"], content["rows"], content.get("quick", {})
    for name, one in rows.items():
        for key in ("only", "in", "from", "paper"):
            among(path, f"rows.{name}.{key}", one.get(key, ()), panels)
        for panel, figures in one.get("paper", {}).items():
            among(path, f"rows.{name}.paper.{panel}", figures, content["figures"])
    for key, names in (("panels", panels), ("rows", rows)):
        among(path, f"quick.{key}", quick.get(key, ()), names)
    for name, one in content.get("items", {}).items():
        among(path, f"items.{name}.panels", one.get("panels", ()), panels)
        among(path, f"items.{name}.rows", one.get("rows", ()), rows)
    for part in ("tuned", "result"):
        among(path, part, content.get(part, ()), panels)
        for panel, given in content.get(part, {}).items():
            among(path, f"{part}.{panel}", given, rows)


def _check_paired(path: Path, name: str, one: Mapping[str, Any], figure: str | None) -> None:
    """Check a goal that is judged by paired differences."""
    among(path, f"goals.{name}.verdict", [one["verdict"]], _PAIRED)
    others = {"lower", "within", "pooled"} & {*one}
    if not one.get("rows") or one["figure"] != figure or others:
        raise ExperimentError(
            f"{path}: goals.{name} has {', '.join(one)} with the figure {one['figure']!r}, expected rows, the figure "
            f"of [verdict] ({figure!r}), and no lower, within or pooled beside verdict."
        )


def _kinds(path: Path, where: str, given: Any, allowed: Mapping[str, str]) -> None:
    _is(path, where, given, "table")
    among(path, where, given, allowed)
    for name, value in given.items():
        _is(path, f"{where}.{name}" if where else name, value, allowed[name])


def _each(path: Path, where: str, given: Mapping[str, Any], kind: str) -> None:
    for name, value in given.items():
        _is(path, f"{where}.{name}", value, kind)


def _is(path: Path, where: str, value: Any, kind: str) -> None:
    check_plain(f"{path}: {where}", value, kind, ExperimentError)


def among(path: Path, where: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    for name in given:
        if name not in allowed:
            raise UnknownNameError(f"entry in {f'{where} of ' if where else ''}{path}", name, allowed)
