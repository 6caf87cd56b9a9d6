"""Readers of .npz, .safetensors, .csv and .parquet files, which return arrays by field.

Nothing in a file is executed when it is read.
"""

from __future__ import annotations

import csv
import re
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedbilevel.errors import DataError

Fields = dict[str, np.ndarray]
FORMATS = ".npz, .csv, .parquet or .safetensors"


def _npz(place: Path) -> Fields:
    try:
        with place.open("rb") as file:  # numpy leaves a file open that it cannot read
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise DataError(
                    f"{place} holds a single array without a name: write it with numpy.savez(file, field=array)."
                )
            return {name: _member(arrays, name, place) for name in arrays.files}
    except DataError:
        raise
    except (zipfile.BadZipFile, EOFError, OSError, RuntimeError, TypeError, ValueError, zlib.error) as error:
        raise DataError(
            f"{place} cannot be read as arrays of numpy ({_brief(error)}): "
            "write it anew with numpy.savez(file, field=array)."
        ) from error


def _member(arrays: np.lib.npyio.NpzFile, name: str, place: Path) -> np.ndarray:
    try:
        value = arrays[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise DataError(
            f"{place} has the field {name!r} as Python objects, which are never loaded: "
            "convert it to an array of numbers."
        ) from error
    if not isinstance(value, np.ndarray):
        raise DataError(
            f"{place} has {name!r} in it, which is no array: write the file anew with numpy.savez(file, field=array)."
        )
    return value


def _safetensors(place: Path) -> Fields:
    try:
        tensors = load_file(place)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{place} cannot be read as safetensors ({_brief(error)}): write it anew.") from error
    known = (torch.float16, torch.float32, torch.float64)  # float types of numpy
    return {
        name: (value.float() if value.is_floating_point() and value.dtype not in known else value).numpy()
        for name, value in tensors.items()
    }


def _csv(place: Path) -> Fields:
    try:
        with place.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets write a byte order mark
            lines = csv.reader(file, strict=True)
            header = [name.strip() for name in next(lines, [])]
            rows, single = _columns(place, header)
            found: dict[str, list[Any]] = {name: [] for name in (*rows, *single)}
            names = {name: [header[c] for c in columns] for name, columns in rows.items()}
            numbers = []
            for line in filter(None, lines):  # blank lines are empty lists
                if len(line) != len(header):
                    raise DataError(
                        f"{place} has {len(line)} values in line {lines.line_num}, expected {len(header)} "
                        "as in the header: separate them by commas."
                    )
                numbers.append(lines.line_num)
                for name, columns in rows.items():  # converted line by line: text takes a lot of memory
                    found[name].append(_floats(place, [line[c] for c in columns], names[name], [lines.line_num]))
                for name, column in single.items():
                    found[name].append(line[column])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"{place} cannot be read as text with commas ({_brief(error)}): write it anew as UTF-8."
        ) from error
    together = {name: np.array(found[name], np.float64).reshape(-1, len(columns)) for name, columns in rows.items()}
    return {**together, **{name: _single(place, name, found[name], numbers) for name in single}}


def _parquet(place: Path) -> Fields:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            f"{place} is read by pyarrow, which is not installed: pip install 'fedbilevel[parquet]', "
            "or write the file as CSV."
        ) from error
    try:
        with parquet.ParquetFile(place) as file:  # reads no columns from the names of folders
            table = file.read()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{place} cannot be read as Parquet ({_brief(error)}): write it anew.") from error
    # the row numbers of pandas are no field
    header = [name for name in table.column_names if not re.fullmatch(r"__index_level_\d+__", name)]
    kept = [column for name, column in zip(table.column_names, table.columns, strict=True) if name in header]
    rows, single = _columns(place, header)
    arrays = [_from_arrow(place, name, column.combine_chunks()) for name, column in zip(header, kept, strict=True)]
    for name in (
        f"{name}.{k}" for name, columns in rows.items() for k in range(len(columns)) if arrays[columns[k]].ndim > 1
    ):
        raise DataError(
            f"{place} has lists in the column {name!r}, expected one number each where a column has a number "
            "in its name: rename it."
        )
    together = {name: np.stack([arrays[c] for c in columns], axis=1) for name, columns in rows.items()}
    wide = {
        name: array.astype(array.dtype if array.dtype.kind == "f" else np.float64) for name, array in together.items()
    }
    return {**wide, **{name: arrays[column] for name, column in single.items()}}


def _from_arrow(place: Path, name: str, values: Any) -> np.ndarray:
    """Return numbers, or rows of numbers if `values` are lists."""
    from pyarrow import types

    if values.null_count:
        first = values.is_null().to_pylist().index(True)
        what = f"{values.null_count} empty values in the column {name!r}, of which the first is number {first} from 0"
        raise DataError(f"{place} has {what}: fill them, or drop those samples.")
    if types.is_list(values.type) or types.is_large_list(values.type) or types.is_fixed_size_list(values.type):
        lengths = values.value_lengths().to_numpy(zero_copy_only=False)
        if len(set(lengths.tolist())) > 1:
            odd = int(np.flatnonzero(lengths != lengths[0])[0])
            what = f"{lengths[0]} numbers in sample 0 of the column {name!r} and {lengths[odd]} in sample {odd}"
            raise DataError(f"{place} has {what}, expected as many in each: cut or fill them.")
        inner = _from_arrow(place, name, values.flatten())
        return inner.reshape(len(values), int(lengths[0]) if len(lengths) else 0, *inner.shape[1:])
    if not len(values):  # an empty column of pandas has no type
        return np.zeros(0)
    if not (types.is_integer(values.type) or types.is_floating(values.type) or types.is_boolean(values.type)):
        raise DataError(
            f"{place} has the type {values.type} in the column {name!r}, expected numbers: "
            "convert them, or leave the column out."
        )
    array = np.array(values.to_numpy(zero_copy_only=False))  # a writable copy
    if array.dtype.kind in "iu":  # as in a CSV file: int64, and larger numbers as floating-point numbers
        array = array.astype(np.float64 if array.size and int(array.max()) > np.iinfo(np.int64).max else np.int64)
    return array


def _columns(place: Path, header: Sequence[str]) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Return the columns of each field with several columns, and the column of each other field."""
    parts: dict[str, dict[Any, int]] = {}
    single: dict[Any, int] = {}
    for column, name in enumerate(header):
        numbered = re.fullmatch(r"(.+)\.(\d{1,9})", name)
        own, key = (parts.setdefault(numbered[1], {}), int(numbered[2])) if numbered else (single, name)
        if not name or key in own:
            wrong = f"two columns named {name!r}" if name else "a column without a name"
            raise DataError(f"{place} has {wrong} in its header: name every column once.")
        own[key] = column
    for name, own in parts.items():
        if name in single or sorted(own) != list(range(len(own))):
            which = ", ".join(f"{name}.{k}" for k in sorted(own)[:5])
            which += f" and {name}" if name in single else ""
            raise DataError(f"{place} has the columns {which}, expected {name}.0, {name}.1 and so on without a gap.")
    return {name: [own[k] for k in range(len(own))] for name, own in parts.items()}, single


def _floats(place: Path, texts: Sequence[str], columns: Sequence[str], lines: Sequence[int]) -> np.ndarray:
    try:
        if "_" in "".join(texts):  # Python reads 1_0 as ten
            raise ValueError
        return np.array([float(text) for text in texts])
    except ValueError:
        i = next(i for i, text in enumerate(texts) if not _NUMBER.fullmatch(text.strip()))
        where = f"line {lines[i % len(lines)]} of the column {columns[i % len(columns)]!r}"
        raise DataError(
            f"{place} has {texts[i]!r} in {where}, expected a number: convert it, or leave it out."
        ) from None


def _single(place: Path, name: str, texts: Sequence[str], lines: Sequence[int]) -> np.ndarray:
    words = [text.strip().lower() for text in texts]
    if words and all(word in ("true", "false") for word in words):
        return np.array([word == "true" for word in words])
    if all(re.fullmatch(r"[+-]?\d{1,18}", word) for word in words):
        return np.array([int(word) for word in words], np.int64)
    return _floats(place, texts, [name], lines)


def _brief(error: Exception) -> str:
    return str(error).splitlines()[0].split(". ", 1)[0].rstrip(".") if str(error) else type(error).__name__


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE)  # as Python reads it
READERS: dict[str, Callable[[Path], Fields]] = {
    ".npz": _npz,
    ".csv": _csv,
    ".parquet": _parquet,
    ".safetensors": _safetensors,
}
