"""The data of one client, read from a folder of its own.

A file holds the samples of one role, and its name is that role: `train` (lower level) and `val` (upper level) have to be there, `test` and others may be.

    train.npz          named arrays with one row per sample, as numpy.savez writes them
    train.safetensors  the same as safetensors
    train.csv          a header with the names of the fields and a line per sample; `image.0, image.1, ...` together are one field, a row of
                       floating-point numbers; a column by itself holds whole numbers, floating-point numbers, or true and false

Other files are left alone. Nothing in a file is executed when it is read.
"""

from __future__ import annotations

import csv
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedbilevel.data.clients import REQUIRED, RESERVED, Holdings
from fedbilevel.errors import DataError

Fields = dict[str, np.ndarray]


def read_folder(path: Path | str, *, num_classes: int | None = None) -> dict[str, Fields]:
    """Role -> field -> array. With `num_classes`, every field `label` has to hold whole numbers from 0 to num_classes - 1, and comes out as int64."""
    folder, files = Path(path), _files(Path(path))
    missing = [role for role in REQUIRED if role not in files]
    if missing:
        found = ", ".join(place.name for place in files.values()) or "no file of data"
        raise DataError(f"{folder} holds {found}, but nothing for the role {missing[0]!r}: add {missing[0]}.npz, .csv or .safetensors.")
    return {role: _checked(place, role, _READERS[place.suffix.lower()](place), num_classes) for role, place in files.items()}


def write_folder(path: Path | str, holdings: Holdings) -> None:
    """One .npz file per role, which `read_folder` reads as they were. Nothing that is there already is overwritten."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be made ({error.strerror}): name another folder.") from error
    there = _files(folder)
    if there:
        raise DataError(f"{folder} holds {', '.join(place.name for place in there.values())} already: name an empty folder, or move them away.")
    arrays = {folder / f"{role}.npz": {name: _array(value) for name, value in fields.items()} for role, fields in holdings.items()}
    for place, fields in arrays.items():
        _checked(place, place.stem, fields, None)
    for place, fields in arrays.items():
        with zipfile.ZipFile(place, "w") as archive:  # what numpy.savez does, for fields of any name
            for name, array in fields.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)


def _array(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _files(folder: Path) -> dict[str, Path]:
    """By role."""
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder: name the one that holds this client's train.npz and val.npz, or .csv or .safetensors instead.")
    found: dict[str, Path] = {}
    for place in sorted(folder.iterdir()):
        if place.suffix.lower() in _READERS and place.is_file() and not place.name.startswith("."):
            other = found.setdefault(place.stem, place)
            if other != place:
                raise DataError(f"{folder} holds {other.name} and {place.name}, both for the role {place.stem!r}: keep one of them.")
    return found


def _checked(place: Path, role: str, fields: Mapping[str, np.ndarray], num_classes: int | None) -> Fields:
    """Arrays that a run can use, or a sentence about the first that is none."""
    if not fields:
        raise DataError(f"{place} holds no field: give it named arrays with one row per sample.")
    for name, array in fields.items():
        if name in RESERVED:
            raise DataError(f"{place} has a field named {name!r}, which the library fills in itself: rename it.")
        if array.dtype.kind not in "biuf":
            what = {"O": "Python objects", "U": "text", "S": "text"}.get(array.dtype.kind, f"the type {array.dtype}")
            raise DataError(f"{place} has {what} in the field {name!r}, expected numbers: convert them, or leave the field out.")
        if array.ndim == 0:
            raise DataError(f"{place} has a single number as the field {name!r}, expected one row per sample.")
    lengths = {name: len(array) for name, array in fields.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{place} has fields of different lengths ({lengths}), expected one row per sample in each.")
    if role in REQUIRED and not next(iter(lengths.values())):
        raise DataError(f"{place} holds no sample, expected at least one.")
    found = {name: _native(place, name, array) for name, array in fields.items()}
    return {**found, "label": _classes(place, found["label"], num_classes)} if "label" in found and num_classes is not None else found


def _native(place: Path, name: str, array: np.ndarray) -> np.ndarray:
    """In the byte order of this machine, and no wider than torch knows."""
    array = array.astype(np.float64 if array.dtype == np.longdouble else array.dtype.newbyteorder("="), copy=False)
    if array.dtype.kind == "f":
        bad = np.flatnonzero(~np.isfinite(array).all(axis=tuple(range(1, array.ndim))))
        if len(bad):
            raise DataError(
                f"{place} has NaN or infinity in the field {name!r} of {len(bad)} samples, of which the first is number {bad[0]} from 0: mend or drop them."
            )
    return array


def _classes(place: Path, array: np.ndarray, num_classes: int) -> np.ndarray:
    array = array.astype(np.int64) if array.dtype == bool else array
    bad = array[(array < 0) | (array >= num_classes) | (array % 1 != 0)]
    if bad.size:
        raise DataError(
            f"{place} has the label {bad.flat[0]}, expected whole numbers from 0 to {num_classes - 1} for {num_classes} classes: number the classes anew."
        )
    return array.astype(np.int64, copy=False)


# ---- readers ---------------------------------------------------------------------------------------------------------


def _npz(place: Path) -> Fields:
    try:
        with place.open("rb") as file:  # numpy leaves a file open that it cannot read
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise DataError(f"{place} holds a single array without a name: write it with numpy.savez(file, field=array).")
            return {name: _member(arrays, name, place) for name in arrays.files}
    except DataError:
        raise
    except (zipfile.BadZipFile, EOFError, OSError, RuntimeError, TypeError, ValueError, zlib.error) as error:
        raise DataError(f"{place} cannot be read as arrays of numpy ({_brief(error)}): write it anew with numpy.savez(file, field=array).") from error


def _member(arrays: np.lib.npyio.NpzFile, name: str, place: Path) -> np.ndarray:
    try:
        value = arrays[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise DataError(f"{place} has the field {name!r} as Python objects, which are never loaded: convert it to an array of numbers.") from error
    if not isinstance(value, np.ndarray):
        raise DataError(f"{place} has {name!r} in it, which is no array: write the file anew with numpy.savez(file, field=array).")
    return value


def _safetensors(place: Path) -> Fields:
    try:
        tensors = load_file(place)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{place} cannot be read as safetensors ({_brief(error)}): write it anew.") from error
    known = (torch.float16, torch.float32, torch.float64)  # to numpy
    return {name: (value.float() if value.is_floating_point() and value.dtype not in known else value).numpy() for name, value in tensors.items()}


def _csv(place: Path) -> Fields:
    try:
        with place.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets put a mark in front
            lines = csv.reader(file, strict=True)
            header = [name.strip() for name in next(lines, [])]
            rows, single = _columns(place, header)
            found: dict[str, list[Any]] = {name: [] for name in (*rows, *single)}
            names = {name: [header[c] for c in columns] for name, columns in rows.items()}
            numbers = []
            for line in filter(None, lines):  # blank ones come out empty
                if len(line) != len(header):
                    raise DataError(
                        f"{place} has {len(line)} values in line {lines.line_num}, expected {len(header)} as in the header: separate them by commas."
                    )
                numbers.append(lines.line_num)
                for name, columns in rows.items():  # as numbers at once: text takes a lot of memory
                    found[name].append(_floats(place, [line[c] for c in columns], names[name], [lines.line_num]))
                for name, column in single.items():
                    found[name].append(line[column])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{place} cannot be read as text with commas ({_brief(error)}): write it anew as UTF-8.") from error
    together = {name: np.array(found[name], np.float64).reshape(-1, len(columns)) for name, columns in rows.items()}
    return {**together, **{name: _single(place, name, found[name], numbers) for name in single}}


def _columns(place: Path, header: Sequence[str]) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Where the columns of the fields with several stand, and those of the others."""
    parts: dict[str, dict[Any, int]] = {}
    single: dict[Any, int] = {}
    for column, name in enumerate(header):
        numbered = re.fullmatch(r"(.+)\.(\d+)", name)
        own, key = (parts.setdefault(numbered[1], {}), int(numbered[2])) if numbered else (single, name)
        if not name or key in own:
            raise DataError(f"{place} has {f'two columns named {name!r}' if name else 'a column without a name'} in its header: name every column once.")
        own[key] = column
    for name, own in parts.items():
        if name in single or sorted(own) != list(range(len(own))):
            which = ", ".join(f"{name}.{k}" for k in sorted(own)[:5])
            raise DataError(f"{place} has the columns {which}{f' and {name}' if name in single else ''}, expected {name}.0, {name}.1 and so on without a gap.")
    return {name: [own[k] for k in range(len(own))] for name, own in parts.items()}, single


def _floats(place: Path, texts: Sequence[str], columns: Sequence[str], lines: Sequence[int]) -> np.ndarray:
    try:
        if "_" in "".join(texts):  # Python reads 1_0 as ten
            raise ValueError
        return np.array([float(text) for text in texts])
    except ValueError:
        i = next(i for i, text in enumerate(texts) if not _NUMBER.fullmatch(text.strip()))
        where = f"line {lines[i % len(lines)]} of the column {columns[i % len(columns)]!r}"
        raise DataError(f"{place} has {texts[i]!r} in {where}, expected a number: convert it, or leave it out.") from None


def _single(place: Path, name: str, texts: Sequence[str], lines: Sequence[int]) -> np.ndarray:
    words = [text.strip().lower() for text in texts]
    if words and all(word in ("true", "false") for word in words):
        return np.array([word == "true" for word in words])
    if all(re.fullmatch(r"[+-]?\d{1,18}", word) for word in words):
        return np.array([int(word) for word in words], np.int64)
    return _floats(place, texts, [name], lines)


def _brief(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE)  # as Python reads it
_READERS: dict[str, Callable[[Path], Fields]] = {".npz": _npz, ".csv": _csv, ".safetensors": _safetensors}
