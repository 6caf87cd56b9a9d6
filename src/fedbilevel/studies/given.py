"""Checked settings of a row of an experiment file, for a study that runs the row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedbilevel import discovery
from fedbilevel.errors import ExperimentError, UnknownNameError
from fedbilevel.settings import check_plain, made


def check(row: Mapping[str, Any], allowed: Mapping[str, str], *, needs: tuple[str, ...] = ()) -> None:
    """Check that names are known, values have their kind (settings.PLAIN), and `needs` exist."""
    for name, value in row.items():
        if name not in allowed:
            raise UnknownNameError("setting of this study", name, allowed)
        check_plain(name, value, allowed[name], ExperimentError)
    for name in needs:
        if name not in row:
            raise ExperimentError(
                f"a row of this study needs {name!r}, it has {', '.join(map(repr, row)) or 'nothing'}."
            )


def task(given: Mapping[str, Any], default: str | None = None) -> Any:
    """Make the named task with its settings."""
    return _made("task", given, default, discovery.task)


def algorithm(given: Mapping[str, Any], default: str | None = None) -> Any:
    return _made("algorithm", given, default, discovery.algorithm)


def _made(what: str, given: Mapping[str, Any], default: str | None, find: Any) -> Any:
    name = given.get("name", default)
    if not isinstance(name, str):
        raise ExperimentError(f"{what} is {dict(given)!r}, expected {{name = ..., and its settings}}.")
    return made(find(name), {key: value for key, value in given.items() if key != "name"})
