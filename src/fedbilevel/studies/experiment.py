"""An experiment of a paper as a file: experiments/NAME/experiment.toml says what is run, what the paper printed, and what came out last.

    title, source, about      what it is, where it is printed, and what differs here
    study                     which module of fedbilevel.studies runs a row
    repetitions               each with its own data and draws
    [figures]                 what the table shows: name = "heading" (in per cent if the heading ends with ", %")
    [plot]                    x and y of the lines, which axes are logarithmic; kind = "points" for prediction against truth
    extends, select           another experiment to start from, and which of its panels and rows: select = {panels = [...], rows = [...]}
    [settings]                what every row has in common
    [panels.P]                a table or picture of its own: title, and settings that hold in it
    [rows.R]                  a line in every panel, or in those of `only`: title, settings, `in.P` for one panel, `paper.P` for the printed figures
                              `from.P = "NAME.P.R"` starts from the settings of a row of another experiment
    [quick]                   what is smaller with --quick: repetitions, rows, panels, settings (of an algorithm: those that a row has)
    [tune]                    ranges that `fedbilevel tune` searches
    [tuned.P.R]               written by it: settings that won, and by which figure, trials, commit, time
    [result.P.R]              written by `fedbilevel reproduce --record`: figures, commit, machine, time, and a digest of the settings

A row may name a study of its own; then only `task` comes from what is common.
Settings are merged in this order, later ones win: settings, panel, row, row in that panel, tuned, quick.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

from fedbilevel.errors import ExperimentError, UnknownNameError
from fedbilevel.runs.record import write_whole
from fedbilevel.settings import check_plain

Tree = dict[str, Any]
FILE = "experiment.toml"
_TOP = {
    "title": "text",
    "source": "text",
    "about": "text",
    "extends": "text",
    "select": "table",
    "study": "text",
    "repetitions": "whole",
    "figures": "table",
    "plot": "table",
    "settings": "table",
    "panels": "table",
    "rows": "table",
    "quick": "table",
    "tune": "table",
    "tuned": "table",
    "result": "table",
}
_NEEDED = ("title", "source", "study", "figures", "panels", "rows")
_INHERITED = ("study", "repetitions", "figures", "plot", "settings", "panels", "rows", "quick")
_PANEL = {"title": "text", "settings": "table"}
_ROW = {
    "title": "text",
    "study": "text",
    "settings": "table",
    "only": "names",
    "in": "table",
    "from": "table",
    "paper": "table",
}
_PLOT = {"x": "text", "y": "text", "log": "names", "kind": "text"}
_QUICK = {"repetitions": "whole", "rows": "names", "panels": "names", "settings": "table"}
_SELECT = {"panels": "names", "rows": "names"}
_NAME = re.compile(r"(?!.*--)[A-Za-z0-9][A-Za-z0-9_.+=-]*")  # names become those of files, joined by --


@dataclass(frozen=True)
class Job:
    """One row of one panel, once. Its settings are complete: nothing else of the file matters to what comes out."""

    panel: str
    row: str
    repetition: int
    study: str
    settings: Tree

    @property
    def key(self) -> str:
        return f"{self.panel}--{self.row}--{self.repetition}"

    @property
    def digest(self) -> str:
        """Of the settings: a result that was recorded with another one is no longer that of the row."""
        return hashlib.blake2b(
            json.dumps([self.study, self.settings], sort_keys=True).encode(), digest_size=6
        ).hexdigest()


@dataclass(frozen=True)
class Experiment:
    path: Path
    content: Tree

    @property
    def name(self) -> str:
        return self.path.parent.name

    @property
    def title(self) -> str:
        return str(self.content["title"])

    @property
    def figures(self) -> dict[str, str]:
        return dict(self.content["figures"])

    def panel_title(self, panel: str) -> str:
        return str(self.content["panels"][panel].get("title", panel))

    def row_title(self, row: str) -> str:
        return str(self.content["rows"][row].get("title", row))

    def paper(self, panel: str, row: str) -> dict[str, float]:
        return dict(self.content["rows"][row].get("paper", {}).get(panel, {}))

    def settings(self, panel: str, row: str, *, quick: bool = False) -> Tree:
        one, small = self.content["rows"][row], self.content.get("quick", {}).get("settings", {}) if quick else {}
        panels, searched = self.content["panels"], self.content.get("tune", {}).get("panel", panel)
        tuned = self.content.get("tuned", {}).get(searched, {}).get(row, {})
        borrowed = {"settings": self._borrowed(one.get("from", {}).get(panel))}
        layers = (
            self.content,
            panels[panel],
            borrowed,
            one,
            {"settings": one.get("in", {}).get(panel, {})},
            tuned,
            {"settings": small},
        )
        whole = merged(*(layer.get("settings", {}) for layer in layers))
        if isinstance(small.get("algorithm"), Mapping):  # what a row does not have is not made smaller
            has = merged(*(layer.get("settings", {}) for layer in layers[:-1])).get("algorithm", {})
            whole["algorithm"] = {name: value for name, value in whole["algorithm"].items() if name in has}
        own = merged(one.get("settings", {}), one.get("in", {}).get(panel, {}))
        return (
            whole
            if "study" not in one
            else {name: value for name, value in whole.items() if name == "task" or name in own}
        )

    def _borrowed(self, place: str | None) -> Tree:
        if place is None:
            return {}
        try:
            name, panel, row = place.split(".")
        except ValueError:
            raise ExperimentError(f"{self.path}: from is {place!r}, expected EXPERIMENT.PANEL.ROW.") from None
        other = read(self.path.parent.parent / name / FILE)
        if (panel, row) not in other.places():
            raise UnknownNameError(f"row of {name}", f"{panel}.{row}", [".".join(one) for one in other.places()])
        return other.settings(panel, row)

    def places(
        self, *, quick: bool = False, panels: Sequence[str] = (), rows: Sequence[str] = ()
    ) -> list[tuple[str, str]]:
        """(panel, row), in the order of the file; named ones only, if any are named."""
        small = self.content.get("quick", {}) if quick else {}
        for kind, names in (("panels", panels), ("rows", rows)):
            for name in names:
                if name not in self.content[kind]:
                    raise UnknownNameError(f"{kind[:-1]} of {self.name}", name, self.content[kind])
        wanted_panels, wanted_rows = (
            panels or small.get("panels") or list(self.content["panels"]),
            rows or small.get("rows") or list(self.content["rows"]),
        )
        every = [
            (panel, row)
            for panel in wanted_panels
            for row in wanted_rows
            if panel in self.content["rows"][row].get("only", [panel])
        ]
        if not every:
            raise ExperimentError(
                f"{self.name} has none of the rows {', '.join(wanted_rows)} in {', '.join(wanted_panels)}: name others."
            )
        return list(dict.fromkeys(every))

    def jobs(
        self,
        *,
        quick: bool = False,
        panels: Sequence[str] = (),
        rows: Sequence[str] = (),
        repetitions: int | None = None,
    ) -> list[Job]:
        """Every repetition of one before the next, so that an interrupted experiment has something of everything."""
        number = repetitions or (self.content.get("quick", {}) if quick else self.content).get("repetitions", 1)
        places = self.places(quick=quick, panels=panels, rows=rows)
        return [
            Job(
                panel,
                row,
                r,
                self.content["rows"][row].get("study", self.content["study"]),
                self.settings(panel, row, quick=quick),
            )
            for r in range(number)
            for panel, row in places
        ]


def merged(*layers: Mapping[str, Any]) -> Tree:
    """Tables are merged entry by entry, anything else is replaced."""
    out: Tree = {}
    for layer in layers:
        for name, value in layer.items():
            out[name] = (
                merged(out[name], value) if isinstance(value, Mapping) and isinstance(out.get(name), Mapping) else value
            )
    return out


def folders() -> list[Path]:
    """Where experiments lie: in the current folder, beside the source, in the installed package."""
    here = Path(__file__).resolve()
    return [
        folder
        for folder in (Path("experiments"), here.parents[3] / "experiments", here.parents[1] / "experiments")
        if folder.is_dir()
    ]


def known() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for folder in folders():
        for path in sorted(folder.glob(f"*/{FILE}")):
            found.setdefault(path.parent.name, path)
    return found


def read(name: str | Path) -> Experiment:
    """The experiment of a name, or of a folder or file."""
    path = Path(name)
    path = path / FILE if path.is_dir() and (path / FILE).exists() else path
    if path.suffix != ".toml":
        experiments = known()
        if str(name) not in experiments:
            if not experiments:
                raise ExperimentError(
                    "no experiments were found: run this in a checkout, or give the path of an experiment.toml."
                )
            raise UnknownNameError("experiment", str(name), experiments)
        path = experiments[str(name)]
    return Experiment(path, _read(path, ()))


def _read(path: Path, before: tuple[Path, ...]) -> Tree:
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise ExperimentError(f"{path} cannot be read ({error.strerror}): name another file.") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ExperimentError(
            f"{path} cannot be read as TOML ({error}): mend it, or restore it from a copy."
        ) from error
    _check_kinds(path, content)
    if "extends" in content:
        if path in before:
            raise ExperimentError(f"{path} extends itself: start from another experiment.")
        content = _extended(path, content, (*before, path))
    _check_names(path, content)
    return content


def _extended(path: Path, content: Tree, before: tuple[Path, ...]) -> Tree:
    """On top of what it extends, which lies beside it. Steps that were found there hold here unless this file says otherwise; a row that is there only in
    panels which are not selected is in all panels."""
    base = _read(path.parent.parent / str(content["extends"]) / FILE, before)
    for place, rows in base.get("tuned", {}).items():
        for row, entry in rows.items():
            here = (
                {"settings": entry["settings"]}
                if "panel" in base.get("tune", {})
                else {"in": {place: entry["settings"]}}
            )
            base["rows"][row] = merged(base["rows"][row], here)
    whole = merged({name: base[name] for name in _INHERITED if name in base}, content)
    for kind, names in content.get("select", {}).items():
        _among(path, f"select.{kind}", names, whole[kind])
        whole[kind] = {name: whole[kind][name] for name in names}
    for name, row in whole["rows"].items():  # what was said of panels that are not here is not wrong
        kept = {
            key: {panel: row[key][panel] for panel in row[key] if panel in whole["panels"]}
            for key in ("in", "from", "paper")
            if key in row
        }
        only = [panel for panel in row.get("only", ()) if panel in whole["panels"]]
        rest = {key: value for key, value in row.items() if key != "only"}
        whole["rows"][name] = {**rest, **kept, **({"only": only} if only else {})}
    small = whole.get("quick", {})
    whole["quick"] = {
        **small,
        **{kind: [name for name in small[kind] if name in whole[kind]] for kind in ("panels", "rows") if kind in small},
    }
    return whole


def write(experiment: Experiment, part: str, document: Any) -> None:
    """A changed document, if it says the same as before about everything but `part`."""
    text = tomlkit.dumps(document)
    before, after = tomllib.loads(experiment.path.read_text()), tomllib.loads(text)
    if {**before, part: None} != {**after, part: None}:
        raise ExperimentError(
            f"{experiment.path} has [{part}] in a form that cannot be added to: write it as tables, [{part}.PANEL.ROW]."
        )
    write_whole(experiment.path, text.encode())


def _check_kinds(path: Path, content: Tree) -> None:
    """Tables where tables are expected, and no misspelt name that would pass for a setting that was left out."""
    _kinds(path, "", content, _TOP)
    _each(path, "figures", content.get("figures", {}), "text")
    _kinds(path, "plot", content.get("plot", {}), _PLOT)
    _kinds(path, "quick", content.get("quick", {}), _QUICK)
    _kinds(path, "select", content.get("select", {}), _SELECT)
    for kind, allowed in (("panels", _PANEL), ("rows", _ROW)):
        for name, one in content.get(kind, {}).items():
            if not _NAME.fullmatch(name):
                raise ExperimentError(
                    f"{path}: {kind}.{name!r} is no name: use letters, digits, single hyphens, dots, _, + and =."
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


def _check_names(path: Path, content: Tree) -> None:
    """What is named must be there."""
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
    panels, rows, quick = content["panels"], content["rows"], content.get("quick", {})
    for name, one in rows.items():
        for key in ("only", "in", "from", "paper"):
            _among(path, f"rows.{name}.{key}", one.get(key, ()), panels)
        for panel, figures in one.get("paper", {}).items():
            _among(path, f"rows.{name}.paper.{panel}", figures, content["figures"])
    for key, names in (("panels", panels), ("rows", rows)):
        _among(path, f"quick.{key}", quick.get(key, ()), names)
    for part in ("tuned", "result"):
        _among(path, part, content.get(part, ()), panels)
        for panel, given in content.get(part, {}).items():
            _among(path, f"{part}.{panel}", given, rows)


def _kinds(path: Path, where: str, given: Any, allowed: Mapping[str, str]) -> None:
    _is(path, where, given, "table")
    _among(path, where, given, allowed)
    for name, value in given.items():
        _is(path, f"{where}.{name}" if where else name, value, allowed[name])


def _each(path: Path, where: str, given: Mapping[str, Any], kind: str) -> None:
    for name, value in given.items():
        _is(path, f"{where}.{name}", value, kind)


def _is(path: Path, where: str, value: Any, kind: str) -> None:
    check_plain(f"{path}: {where}", value, kind, ExperimentError)


def _among(path: Path, where: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    for name in given:
        if name not in allowed:
            raise UnknownNameError(f"entry in {f'{where} of ' if where else ''}{path}", name, allowed)
