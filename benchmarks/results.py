"""Files of results: figures as JSON, one picture, and a page made from the JSON files."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from benchmarks import goals
from benchmarks.clock import Row, Setup
from fedbilevel.runs.record import make_folder, write_whole
from fedbilevel.runs.resume import versions
from fedbilevel.studies.provenance import commit, machine

FOLDER = Path(__file__).resolve().parent / "results"
HEADINGS = {
    "floor_seconds": "floor, s",
    "ratio": "x floor",
    "times_ours": "x library",
    "seconds": "s",
    "spread": "spread",
    "megabytes": "MB",
    "memory_mb": "peak, MB",
    "data_mb": "data, MB",
    "gflops": "GFLOP/s",
    "gigabytes_per_second": "GB/s",
    "aim": "aim",
}
KEPT_OUT = ("gflops", "gigabytes_per_second")  # these figures are in the text of the same row


def circumstances(setup: Setup) -> dict[str, Any]:
    """The machine, versions, commit and time of a measurement."""
    gpu = {"gpu": torch.cuda.get_device_name(setup.device)} if setup.cuda else {}
    return {
        "machine": machine("cpu"),
        **gpu,
        "threads": setup.threads,
        "rounds": setup.rounds,
        "small": setup.small,
        "versions": versions(),
        "system": platform.platform(),
        "load": list(os.getloadavg()),
        "commit": commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def save(name: str, sections: Mapping[str, Any], folder: Path = FOLDER) -> Path:
    """Save these sections and keep the others; each states when and where it was run."""
    make_folder(folder)
    path = folder / f"{name}.json"
    write_whole(path, (json.dumps({**read(path), **sections}, indent=1, allow_nan=False) + "\n").encode())
    write_whole(folder.parent / "RESULTS.md", page(folder).encode())
    return path


def page(folder: Path = FOLDER) -> str:
    """The page that RESULTS.md must hold."""
    parts = [
        "# Benchmarks",
        "",
        "Made from the files in `results/` by `python -m benchmarks --save`; "
        "README.md says what is measured and what floors are.",
    ]
    parts += ["Ratios can be compared between commits; seconds belong to the machine that is named.", ""]
    files = {path.stem: read(path) for path in sorted(folder.glob("*.json"))}
    parts += ["## Goals", "", goals.table(files), ""]
    for path in sorted(folder.glob("*.json")):
        parts += [f"## {path.stem}", ""]
        for name, section in read(path).items():
            parts += [f"### {section['title']} (`{name}`)", "", section["about"].replace("\n", " "), ""]
            parts += [_where(section), ""]
            parts += [
                section["skipped"] if "skipped" in section else table(section["rows"], section.get("headings", {})),
                "",
            ]
            if section.get("picture"):
                parts += [f"![{section['title']}](results/{section['picture']})", ""]
    return "\n".join(parts)


def _where(section: Mapping[str, Any]) -> str:
    where = section["where"]
    gpu = f"{where['gpu']}, " if "gpu" in where else ""
    small = ", the small version: its figures mean nothing" if where["small"] else ""
    found = where["versions"]
    load = f", load average {where['load'][0]:.1f} at the start" if "load" in where else ""
    return (
        f"{gpu}{where['machine']}, {where['threads']} threads, torch {found['torch']}, Python {found['python']}, "
        f"commit {where['commit']}, {where['time']}, "
        f"medians of {where['rounds']} rounds{load}{small}."
    )


def table(rows: Sequence[Row], headings: Mapping[str, str] = MappingProxyType({})) -> str:
    """Columns in the order in which they first appear."""
    columns = list(dict.fromkeys(key for row in rows for key in row if key not in KEPT_OUT))
    cells = [[{**HEADINGS, **headings}.get(column, column.replace("_", " ")) for column in columns]]
    cells += [[_cell(column, row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    numbers = [any(isinstance(row.get(column), int | float) for row in rows) for column in columns]
    about = list(zip(widths, numbers, strict=True))
    lines = [
        "| "
        + " | ".join(cell.rjust(w) if right else cell.ljust(w) for cell, (w, right) in zip(line, about, strict=True))
        + " |"
        for line in cells
    ]
    rule = "|" + "|".join("-" * (w + 1) + (":" if right else "-") for w, right in about) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if column == "spread":
        return f"{100 * value:.0f} %"
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 1000
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )
