"""How the settings of a row were found, and recorded rows that did not learn."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedbilevel.studies.experiment import FILE, Experiment, read

UNTUNED = "not tuned here"
NO_SEARCH = (UNTUNED, "in its costs")
CHANCE = 0.15  # of an accuracy of ten classes, with room for noise
HUGE = 1e6  # a loss that no run ends with unless it diverges


@functools.cache
def _cached(path: Path, _changed: int) -> tuple[Experiment, dict[str, Any]]:
    return read(path), tomllib.loads(path.read_text())


def _parsed(path: Path) -> tuple[Experiment, dict[str, Any]]:
    """Return the experiment of a file, and the file's own content without the experiment that it extends."""
    return _cached(path, path.stat().st_mtime_ns)


def tuning(one: Experiment, panel: str, row: str) -> str:
    """Return the budget of the search for the settings of a row, in this file or in the file that it starts from."""
    content = one.content["rows"][row]
    entry = one.content.get("tuned", {}).get(one.content.get("tune", {}).get("panel", panel), {}).get(row)
    if entry is not None:
        return searched(entry)
    if "tuning" in content:
        return str(content["tuning"])
    if panel in content.get("from", {}):
        name, other_panel, other_row = content["from"][panel].split(".")
        return tuning(_parsed(one.path.parent.parent / name / FILE)[0], other_panel, other_row)
    own = _parsed(one.path)[1]
    if "extends" in own:
        base = _parsed(one.path.parent.parent / str(own["extends"]) / FILE)[0]
        if row in base.content["rows"] and "settings" not in own.get("rows", {}).get(row, {}):
            return tuning(base, panel, row)
    return "in its costs" if one.content["study"] == "worth" else UNTUNED


def searched(entry: Mapping[str, Any]) -> str:
    """Return the budget of an entry of [tuned] in words; an entry of an old search has no rounds of a trial."""
    each = f" of {entry['trial_rounds']} rounds" if "trial_rounds" in entry else f", {entry['rounds']} rounds"
    budget = f"{entry['trials']} trials{each}"
    return f"diverged in all {budget}" if entry.get("diverged", 0) == entry["trials"] else budget


def lost(one: Experiment) -> dict[tuple[str, str], str]:
    """Return recorded rows that diverged or ended at chance: (panel, row) -> what is wrong."""
    found = {}
    for panel, row in one.places():
        record = one.content.get("result", {}).get(panel, {}).get(row)
        if record is not None and (wrong := _wrong(record["figures"])):
            found[panel, row] = wrong
    return found


def _wrong(figures: Mapping[str, Any]) -> str:
    if "diverged" in figures:
        return "diverged"
    for name, value in figures.items():
        if name == "test_accuracy" and value["mean"] < CHANCE:
            return f"{name.replace('_', ' ')} {100 * value['mean']:.2f} %"
        if name.endswith("_loss") and not value["mean"] < HUGE:
            return f"{name.replace('_', ' ')} {value['mean']:.2g}"
    return ""
