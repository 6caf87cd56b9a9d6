"""Files of a record: their places, their content, and a clear error for a damaged file.

A folder holds a run (config.json, metrics.jsonl and, from newer versions, ledger.json,
clients.json, findings.json, end.json and run.toml), a comparison (comparison.json), a study
(influence.json or personalisation.json), or folders of these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbilevel.errors import ReportError

STUDIES = {"comparison.json": "comparison", "influence.json": "influence", "personalisation.json": "personalisation"}
ENDS = ("finished", "converged", "callback", "interrupted", "budget", "failed")  # a killed run writes no end.json


def folder_of(path: Path) -> Path:
    """Return the folder of a record from the path of the folder or of its main file."""
    if path.is_file():
        if path.name in ("config.json", "metrics.jsonl", *STUDIES):
            return path.parent
        raise ReportError(f"{path} is not the file of a record: give the folder that a command printed at its end.")
    if not path.is_dir():
        raise ReportError(f"there is no folder {path}: give the folder that a command printed at its end.")
    return path


def records_in(folder: Path) -> list[Path]:
    """Return the folder itself if it is a record, otherwise the records directly below it."""
    known = ("config.json", *STUDIES)
    if any((folder / name).exists() for name in known):
        return [folder]
    found = sorted(
        place for place in folder.iterdir() if place.is_dir() and any((place / name).exists() for name in known)
    )
    if not found:
        raise ReportError(
            f"{folder} holds no record ({', '.join(known)}), nor does any folder in it: "
            "give the folder that a command printed at its end."
        )
    return found


def read_bytes(place: Path) -> bytes:
    try:
        return place.read_bytes()
    except OSError as error:
        raise ReportError(
            f"{place} cannot be read ({error.strerror}): check its permissions, or leave this record out."
        ) from error


def read_json(place: Path, kind: type[Any] = dict) -> Any:
    try:
        content = json.loads(read_bytes(place))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReportError(
            f"{place} is not readable as JSON ({error}): restore it from a copy, or leave this record out."
        ) from error
    if not isinstance(content, kind):
        raise damaged(place, f"a {'table' if kind is dict else 'list'}")
    return content


def read_optional(place: Path, kind: type[Any], fits: Callable[[Any], bool], expected: str) -> Any:
    """Return the content of a file, or None if the file does not exist.

    Older versions write fewer files. A file that exists must be complete.
    """
    if not place.exists():
        return None
    content = read_json(place, kind)
    try:
        complete = fits(content)
    except (AttributeError, KeyError, TypeError):
        complete = False
    if not complete:
        raise damaged(place, expected)
    return content


def damaged(place: Path, expected: str) -> ReportError:
    return ReportError(
        f"{place} does not hold what its name says (expected {expected}): "
        "restore it from a copy, or leave this record out."
    )


def read_rows(place: Path) -> list[dict[str, Any]]:
    """Return all measurements.

    A last line without a line end is skipped: it is still being written, or a crash cut it off.
    """
    lines = read_bytes(place).split(b"\n") if place.exists() else [b""]
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
            if not is_number(row["iteration"]):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ReportError(
                f"line {number} of {place} is not a measurement: "
                "restore the file from a copy, or leave this record out."
            ) from None
        rows.append(row)
    return rows


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the measurements by column; a missing value of a measurement is None."""
    names = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if any(is_number(row.get(name)) for row in rows)
    ]
    return {name: [row[name] if is_number(row.get(name)) else None for row in rows] for name in names}


def empty_columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns that were measured but never had a value."""
    return [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if all(row.get(name) is None for row in rows)
    ]


# ---- complete content of each file ----------------------------------------------------------------------------------


def is_end(content: Mapping[str, Any]) -> bool:
    return content["stopped"] in ENDS and is_number(content["iteration"]) and isinstance(content.get("why", ""), str)


def is_baseline(content: Mapping[str, Any]) -> bool:
    return isinstance(content["sentence"], str)


def is_cleaning(content: Mapping[str, Any]) -> bool:
    return bool(content["sentences"]) and all(isinstance(one, str) for one in content["sentences"])


def is_ledger(content: Mapping[str, Any]) -> bool:
    """Return whether the content has costs by phase, client or edge.

    Records that older versions collected from peers have edges only.
    """
    phases, clients, edges = (content.get(name, {}) for name in ("phases", "clients", "edges"))
    return (
        all(is_number(value) for phase in phases.values() for value in phase.values())
        and all(is_number(value) for column in clients.values() for value in column)
        and all(is_number(value) for table in edges.values() for row in table for value in row)
        and bool(phases or clients or edges)
    )


def is_partition(content: Mapping[str, Any]) -> bool:
    sizes, labels = content["sizes"], content.get("labels", {})
    return all(is_number(size) for role in sizes.values() for size in role) and all(
        isinstance(role["values"], list)
        and len(role["values"]) == len(role["counts"])
        and all(is_number(count) for row in role["counts"] for count in row)
        for role in labels.values()
    )


def are_findings(content: Sequence[Any]) -> bool:
    """Return whether each finding has the fields of its kind (`tasks.findings`).

    A finding of an unknown kind is shown as text.
    """
    return all(
        isinstance(one["kind"], str) and isinstance(one["title"], str) and _FITS.get(one["kind"], lambda _: True)(one)
        for one in content
    )


_FITS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "histogram": lambda one: (
        all(map(is_number, one["edges"]))
        and all(
            len(group["counts"]) == len(one["edges"]) - 1
            and isinstance(group["name"], str)
            and all(map(is_number, group["counts"]))
            for group in one["groups"]
        )
    ),
    "images": lambda one: (
        len(one["shape"]) in (2, 3)
        and all(map(is_number, one["shape"]))
        and all(isinstance(item["pixels"], str) and isinstance(item["facts"], dict) for item in one["items"])
    ),
    "ranking": lambda one: (
        all(isinstance(name, str) for name in one["columns"])
        and all(isinstance(row, list) and len(row) == len(one["columns"]) for row in one["rows"])
    ),
    "matrix": lambda one: (
        all(isinstance(text, str) for text in (one["rows"], one["columns"], *one["names"]))
        and len(one["values"]) == len(one["names"])
        and all(len(row) == len(one["names"]) and all(map(is_number, row)) for row in one["values"])
    ),
    "by_client": lambda one: all(
        value is None or is_number(value) for some in one["values"].values() for value in some
    ),
}
