"""Samples of one role of a client as named arrays, from the containers that users have.

Accepted are dicts of arrays, tables (pandas, polars), and rows with named values: lists, torch data
sets and data sets of Hugging Face whose rows are dicts or named tuples. Everything else is refused
with the conversion to write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbilevel.errors import ProblemError, reason
from fedbilevel.problem.windows import Windows

Holdings = Mapping[str, Any]  # one client: role -> field -> array with one row per sample, or a table, or rows
_TABLES = ("pandas", "polars")  # packages; neither is imported here
_CODES = {  # the conversion of a column of words to whole numbers
    "pandas": 'table[{name!r}].astype("category").cat.codes',
    "polars": "table[{name!r}].cast(pl.Categorical).to_physical()",
}


def check_clients(clients: Any) -> None:
    """Raise unless `clients` is a sequence of dicts."""
    if isinstance(clients, Mapping) and ("train" in clients or "val" in clients):
        raise ProblemError(
            f"clients is the dict of a single client with the roles {', '.join(map(repr, clients))}, expected a list "
            "with one such dict per client: give [client]."
        )
    if isinstance(clients, str | Path):
        raise ProblemError(
            f"clients is {str(clients)!r}, expected a list with one dict per client: read files of arrays with "
            f"list(fb.read_folders({str(clients)!r}).values()), and folders of images with "
            f"fedbilevel.data.image_folders.read_clients([{str(clients)!r}]).clients."
        )
    if isinstance(clients, Mapping) and clients:
        raise ProblemError(
            f"clients is a dict with the names {', '.join(map(repr, list(clients)[:3]))}, expected a list with one "
            "dict per client: give list(clients.values())."
        )
    if not isinstance(clients, Sequence) or not all(isinstance(one, Mapping) for one in clients):
        raise ProblemError(
            "clients must be a sequence with one dict per client, {'train': {field: array, ...}, 'val': {...}}."
        )
    if not clients:
        raise ProblemError("there are no clients: give a sequence with one entry per client.")


def fields_of(given: Any, where: str) -> Mapping[Any, Any]:
    """Return the fields of one role by name.

    where: client and role, for errors.
    """
    if isinstance(given, Mapping):
        return given
    package = type(given).__module__.partition(".")[0]
    if package in _TABLES and hasattr(given, "columns"):
        return {str(name): _column(given[name], str(name), package, where) for name in given.columns}
    if isinstance(given, torch.utils.data.DataLoader):
        raise ProblemError(
            f"{where} is a DataLoader, but the library draws its own minibatches (batch_size=...): give loader.dataset."
        )
    if isinstance(given, tuple) and hasattr(given, "_asdict"):
        return given._asdict()
    if isinstance(given, tuple):
        raise ProblemError(
            f"{where} is a tuple of {len(given)} arrays without names: give a dict of arrays, e.g. "
            "{'a': data[0], 'label': data[1]}."
        )
    if isinstance(given, str | Tensor | np.ndarray) or not (
        hasattr(given, "__len__") and hasattr(given, "__getitem__")
    ):
        raise ProblemError(
            f"{where} is of type {type(given).__name__}, expected a dict {{field: array}}, a table, or a list or data "
            "set of rows with names: give e.g. {'a': values}."
        )
    return _of_rows([given[i] for i in range(len(given))], where)


def same_samples(one: Any, other: Any) -> bool:
    """Return whether two roles hold the same samples in the same order."""
    if one is other:
        return True
    ours, theirs = fields_of(one, "a role"), fields_of(other, "a role")
    return ours.keys() == theirs.keys() and all(_same(ours[name], theirs[name]) for name in ours)


def as_array(value: Any) -> np.ndarray:
    """Return the values of a field; floating tensors become float64, because numpy has no bfloat16."""
    if not isinstance(value, Tensor):
        return np.asarray(value)
    return (value.double() if value.is_floating_point() else value).numpy(force=True)


def _same(one: Any, other: Any) -> bool:
    """Compare two fields by value; windows of files are not read, and are the same if they are one object."""
    if one is other or isinstance(one, Windows) or isinstance(other, Windows):
        return one is other
    return np.array_equal(as_array(one), as_array(other))


def _column(column: Any, name: str, package: str, where: str) -> np.ndarray:
    values: np.ndarray = column.to_numpy()
    if values.dtype.kind not in "iufb":
        raise ProblemError(
            f"{where} has the column {name!r} of type {column.dtype}, expected numbers without gaps: drop it, fill it "
            f"or encode it, e.g. with {_CODES[package].format(name=name)}."
        )
    return values


def _of_rows(rows: list[Any], where: str) -> dict[str, Any]:
    """Stack rows that are dicts or named tuples."""
    named = [row._asdict() if hasattr(row, "_asdict") else row for row in rows]
    names = list(named[0]) if named and isinstance(named[0], Mapping) else []
    for place, row in enumerate(named):
        if not isinstance(row, Mapping):
            raise ProblemError(
                f"{where} has rows of type {type(row).__name__}, whose values have no names: give dicts, e.g. "
                "[{'a': row[0], 'label': row[1]} for row in data]."
            )
        if list(row) != names and set(row) != set(names):
            raise ProblemError(
                f"{where} has the names {sorted(map(str, row))} in row {place} and {sorted(map(str, names))} in row 0: "
                "every row needs the same names."
            )
    return {name: _stacked([row[name] for row in named], f"{where} under {name!r}") for name in names}


def _stacked(values: list[Any], where: str) -> Any:
    try:
        return torch.stack(values) if isinstance(values[0], Tensor) else np.stack([np.asarray(one) for one in values])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ProblemError(
            f"{where} has rows that cannot be stacked ({reason(error)}): give values of one shape, e.g. by padding."
        ) from error
