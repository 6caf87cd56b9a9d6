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
    [quick]                   what is smaller with --quick: repetitions, rows, panels, settings
    [tune]                    ranges that `fedbilevel tune` searches
    [tuned.P.R]               written by it: settings that won, and by which figure, trials, commit, time
    [result.P.R]              written by `fedbilevel reproduce --record`: figures, commit, machine, time

A row may name a study of its own; then only `task` comes from what is common.
Settings are merged in this order, later ones win: settings, panel, row, row in that panel, tuned, quick.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbilevel.errors import ExperimentError, UnknownNameError

Tree = dict[str, Any]
FILE = "experiment.toml"
_TOP = (
    "title",
    "source",
    "about",
    "extends",
    "select",
    "study",
    "repetitions",
    "figures",
    "plot",
    "settings",
    "panels",
    "rows",
    "quick",
    "tune",
    "tuned",
    "result",
)
_NEEDED = ("title", "source", "study", "figures", "panels", "rows")
_INHERITED = ("study", "repetitions", "figures", "plot", "settings", "panels", "rows", "quick", "tune", "tuned")
_PANEL = ("title", "settings")
_ROW = ("title", "study", "settings", "only", "in", "from", "paper")
_PLOT = ("x", "y", "log", "kind")
_QUICK = ("repetitions", "rows", "panels", "settings")


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
        layers = (self.content, panels[panel], borrowed, one, {"settings": one.get("in", {}).get(panel, {})}, tuned, {"settings": small})
        whole = merged(*(layer.get("settings", {}) for layer in layers))
        own = merged(one.get("settings", {}), one.get("in", {}).get(panel, {}))
        return whole if "study" not in one else {name: value for name, value in whole.items() if name == "task" or name in own}

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

    def places(self, *, quick: bool = False, panels: Sequence[str] = (), rows: Sequence[str] = ()) -> list[tuple[str, str]]:
        """(panel, row), in the order of the file; named ones only, if any are named."""
        small = self.content.get("quick", {}) if quick else {}
        for kind, names in (("panels", panels), ("rows", rows)):
            for name in names:
                if name not in self.content[kind]:
                    raise UnknownNameError(f"{kind[:-1]} of {self.name}", name, self.content[kind])
        wanted_panels, wanted_rows = panels or small.get("panels") or list(self.content["panels"]), rows or small.get("rows") or list(self.content["rows"])
        return [(panel, row) for panel in wanted_panels for row in wanted_rows if panel in self.content["rows"][row].get("only", [panel])]

    def jobs(self, *, quick: bool = False, panels: Sequence[str] = (), rows: Sequence[str] = (), repetitions: int | None = None) -> list[Job]:
        """Every repetition of one before the next, so that an interrupted experiment has something of everything."""
        number = self.content.get("repetitions", 1)
        number = repetitions or (self.content.get("quick", {}).get("repetitions", 1) if quick else number)
        places = self.places(quick=quick, panels=panels, rows=rows)
        return [
            Job(panel, row, r, self.content["rows"][row].get("study", self.content["study"]), self.settings(panel, row, quick=quick))
            for r in range(number)
            for panel, row in places
        ]


def merged(*layers: Mapping[str, Any]) -> Tree:
    """Tables are merged entry by entry, anything else is replaced."""
    out: Tree = {}
    for layer in layers:
        for name, value in layer.items():
            out[name] = merged(out[name], value) if isinstance(value, Mapping) and isinstance(out.get(name), Mapping) else value
    return out


def folders() -> list[Path]:
    """Where experiments lie: in the current folder, beside the source, in the installed package."""
    here = Path(__file__).resolve()
    return [folder for folder in (Path("experiments"), here.parents[2] / "experiments", here.parent / "experiments") if folder.is_dir()]


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
            raise UnknownNameError("experiment", str(name), experiments)
        path = experiments[str(name)]
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ExperimentError(f"{path} cannot be read as TOML ({error}): mend it, or restore it from a copy.") from error
    if "extends" in content:
        content = _extended(path, content)
    _check(path, content)
    return Experiment(path, content)


def _extended(path: Path, content: Tree) -> Tree:
    """On top of what it extends, which lies beside it."""
    base = read(path.parent.parent / str(content["extends"]) / FILE).content
    whole = merged({name: base[name] for name in _INHERITED if name in base}, content)
    for kind, names in content.get("select", {}).items():
        if kind not in ("panels", "rows"):
            raise UnknownNameError(f"entry in select of {path}", kind, ("panels", "rows"))
        _names(path, f"select.{kind}", dict.fromkeys(names), tuple(whole[kind]))
        whole[kind] = {name: whole[kind][name] for name in names}
    for name, row in whole["rows"].items():  # what was said of panels that are not here is not wrong
        kept = {key: {panel: row[key][panel] for panel in row[key] if panel in whole["panels"]} for key in ("in", "from", "paper") if key in row}
        only = [panel for panel in row.get("only", ()) if panel in whole["panels"]]
        rest = {key: value for key, value in row.items() if key != "only"}
        whole["rows"][name] = {**rest, **kept, **({"only": only} if only else {})}
    small = whole.get("quick", {})
    whole["quick"] = {**small, **{kind: [name for name in small[kind] if name in whole[kind]] for kind in ("panels", "rows") if kind in small}}
    return whole


def _check(path: Path, content: Tree) -> None:
    """Misspelt names must not pass for settings that are left out."""
    _names(path, "", content, _TOP)
    for name in _NEEDED:
        if not content.get(name):
            raise ExperimentError(f"{path} has no {name!r}: an experiment needs {', '.join(_NEEDED)}.")
    for kind, allowed in (("panels", _PANEL), ("rows", _ROW)):
        for name, one in content[kind].items():
            _names(path, f"{kind}.{name}", one, allowed)
    _names(path, "plot", content.get("plot", {}), _PLOT)
    _names(path, "quick", content.get("quick", {}), _QUICK)
    panels, rows = content["panels"], content["rows"]
    for name, one in rows.items():
        for key in ("only", "in", "from", "paper"):
            _names(path, f"rows.{name}.{key}", dict.fromkeys(one.get(key, ())), tuple(panels))
        for panel, figures in one.get("paper", {}).items():
            _names(path, f"rows.{name}.paper.{panel}", figures, tuple(content["figures"]))
    for key, names in (("panels", panels), ("rows", rows)):
        _names(path, f"quick.{key}", dict.fromkeys(content.get("quick", {}).get(key, ())), tuple(names))


def _names(path: Path, where: str, given: Any, allowed: Sequence[str]) -> None:
    if not isinstance(given, Mapping):
        raise ExperimentError(f"{path}: {where} is {given!r}, expected a table.")
    for name in given:
        if name not in allowed:
            raise UnknownNameError(f"entry in {f'{where} of ' if where else ''}{path}", name, allowed)
