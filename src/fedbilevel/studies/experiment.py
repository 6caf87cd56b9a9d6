"""An experiment of a paper as a file: experiments/NAME/experiment.toml.

The file states the runs, the figures that the paper printed, and the last recorded results.

    title, source, about    name, place in the paper, and what differs here
    [items."PAPER Figure N"]    a figure or table of a paper that this file reproduces: its panels and rows
                            (by default all), the repetitions that it needs (by default three), and
                            `differs`: in words, what is not as in the paper
    [unobtainable]          figures or tables that cannot be reproduced: name = "reason"
    study                   module of fedbilevel.studies.kinds that runs a row
    repetitions             each with its own data and draws
    [figures]               columns of the table: name = "heading";
                            in per cent if the heading ends with ", %"
    [plot]                  x and y of the lines, and which axes are logarithmic;
                            kind = "points" for prediction against truth
    [verdict]               rows and figure: whether each of these rows wins, ties or loses against the
                            other rows, by that figure over repetitions (studies/verdicts.py);
                            `bilevel`: further rows that are no plain way
    [goals.G]               bounds that recorded figures meet or do not meet (studies/goals.py)
    extends, select         an experiment to start from, and which of its panels and rows:
                            select = {panels = [...], rows = [...]}
    [settings]              settings of all rows
    [panels.P]              a table or picture: title, and settings of this panel
    [rows.R]                a line in every panel, or in the panels of `only`: title, settings,
                            `in.P` for one panel, `paper.P` for the printed figures;
                            `from.P = "NAME.P.R"` starts from a row of another experiment;
                            `tuning`: the budget of a search that [tuned] does not hold, in words
    [quick]                 smaller values for --quick: repetitions, rows, panels, settings
                            (of an algorithm: only settings that the row has)
    [tune]                  ranges that `fedbilevel tune` searches
    [tuned.P.R]             written by tune: best settings, their figure, the budget, commit, time
    [result.P.R]            written by `fedbilevel reproduce --record`: figures, commit, machine,
                            time, and a digest of the settings

A row may name its own study; then it takes only `task` from the settings of all rows.
Settings are merged in this order, and later values replace earlier ones: settings, panel, row, row
in that panel, tuned, quick.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

from fedbilevel.errors import ExperimentError, UnknownNameError
from fedbilevel.runs.record import write_whole
from fedbilevel.studies.experiment_checks import Tree, among, check_kinds, check_names

FILE = "experiment.toml"
_MEASURES = ("indirect",)  # settings that add figures to a run and do not change it
_INHERITED = ("study", "repetitions", "figures", "plot", "verdict", "settings", "panels", "rows", "quick")


@dataclass(frozen=True)
class Job:
    """One repetition of one row of one panel, with all settings that determine its result."""

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
        """Return a digest of the settings; a recorded result with another digest is out of date."""
        settings = {name: value for name, value in self.settings.items() if name not in _MEASURES}
        return hashlib.blake2b(json.dumps([self.study, settings], sort_keys=True).encode(), digest_size=6).hexdigest()


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

    def settings(self, panel: str, row: str, *, quick: bool = False, with_tuned: bool = True) -> Tree:
        one, small = self.content["rows"][row], self.content.get("quick", {}).get("settings", {}) if quick else {}
        panels, searched = self.content["panels"], self.content.get("tune", {}).get("panel", panel)
        tuned = self.content.get("tuned", {}).get(searched, {}).get(row, {}) if with_tuned else {}
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
        if isinstance(small.get("algorithm"), Mapping):  # keep only settings that the row has
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
        """Return pairs (panel, row) in the order of the file, restricted to any given names."""
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
        """Return jobs by repetition, so that an interrupted experiment has results of every row."""
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
    """Merge tables entry by entry; later values replace earlier ones."""
    out: Tree = {}
    for layer in layers:
        for name, value in layer.items():
            out[name] = (
                merged(out[name], value) if isinstance(value, Mapping) and isinstance(out.get(name), Mapping) else value
            )
    return out


def folders() -> list[Path]:
    """Return the folders of experiments in the current folder, beside the source, or packaged."""
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
    """Read an experiment by its name, folder or file."""
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
        raise ExperimentError(f"{path} cannot be read as TOML ({error}): fix it, or restore it from a copy.") from error
    check_kinds(path, content)
    if "extends" in content:
        if path in before:
            raise ExperimentError(f"{path} extends itself: start from another experiment.")
        content = _extended(path, content, (*before, path))
    check_names(path, content)
    return content


def _extended(path: Path, content: Tree, before: tuple[Path, ...]) -> Tree:
    """Merge the content into the experiment that it extends, which is in a sibling folder.

    Tuned settings of the extended experiment stay valid unless this file changes them. If `select`
    removes all panels of a row, the row is in all panels.
    """
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
        among(path, f"select.{kind}", names, whole[kind])
        whole[kind] = {name: whole[kind][name] for name in names}
    for name, row in whole["rows"].items():  # drop entries of deselected panels
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
    """Write a changed document, provided that only `part` has changed."""
    text = tomlkit.dumps(document)
    before, after = tomllib.loads(experiment.path.read_text()), tomllib.loads(text)
    if {**before, part: None} != {**after, part: None}:
        raise ExperimentError(
            f"{experiment.path} has [{part}] in a form that cannot be added to: write it as tables, [{part}.PANEL.ROW]."
        )
    write_whole(experiment.path, text.encode())
