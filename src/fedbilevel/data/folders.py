"""The data of one client, read from a folder of its own, or those of many, read from one folder.

A file holds the samples of one role, and its name is that role: `train` (lower level) and `val` (upper level) have to be there, `test` and others may be.

    train.npz          named arrays with one row per sample, as numpy.savez writes them
    train.safetensors  the same as safetensors
    train.csv          a header with the names of the fields and a line per sample; `image.0, image.1, ...` together are one field, a row of
                       floating-point numbers; a column by itself holds whole numbers, floating-point numbers, or true and false
    train.parquet      columns as in a CSV file; one that holds lists, all of the same length, is one field, too (needs pyarrow)

Many clients lie in folders of their own, DATA/ann/train.csv, or in one folder per role, DATA/train/ann.csv.

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

from fedbilevel.errors import DataError
from fedbilevel.problem.client_data import REQUIRED, RESERVED, Holdings

Fields = dict[str, np.ndarray]
FORMATS = ".npz, .csv, .parquet or .safetensors"


def read_folder(path: Path | str, *, num_classes: int | None = None) -> dict[str, Fields]:
    """Role -> field -> array. With `num_classes`, every field `label` has to hold whole numbers from 0 to num_classes - 1, and comes out as int64."""
    folder, files = Path(path), _files(Path(path))
    _required(folder, files)
    return {role: _read(place, role, num_classes) for role, place in files.items()}


def read_folders(path: Path | str, *, num_classes: int | None = None) -> dict[str, dict[str, Fields]]:
    """Client -> role -> field -> array, the clients by name with client2 before client10: `list(read_folders(...).values())` is what a run takes.

    Either every client has a folder, path/ann/train.csv, or every role has, path/train/ann.csv. All clients need the same roles and fields. A field of whole
    numbers at one client and of others elsewhere is one of floating-point numbers for all: a column of a CSV file may hold no fraction by chance.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import fedbilevel as fb
    >>> with tempfile.TemporaryDirectory() as data:
    ...     for name, lines in {"client10": "1.5,0", "client2": "2,1\\n3,0"}.items():
    ...         (Path(data) / name).mkdir()
    ...         for role in ("train", "val"):
    ...             _ = (Path(data) / name / f"{role}.csv").write_text(f"age,label\\n{lines}\\n")
    ...     clients = fb.read_folders(data, num_classes=2)
    >>> {name: own["train"]["age"].tolist() for name, own in clients.items()}
    {'client2': [2.0, 3.0], 'client10': [1.5]}
    """
    if not isinstance(path, Path | str):
        raise DataError(f"the folder of the clients is {path!r:.80}, expected its name.")
    folder = Path(path)
    places = _places(folder)
    first, *others = places
    for name in others:
        for one, other in ((first, name), (name, first)):
            lacking = [role for role in places[one] if role not in places[other]]
            if lacking:
                there = places[one][lacking[0]]
                raise DataError(
                    f"{folder} holds {there.relative_to(folder)}, but nothing for {lacking[0]!r} of {other!r}: all clients need the same roles."
                )
    clients = {
        name: {role: _read(place, role, num_classes) for role, place in own.items()} for name, own in places.items()
    }
    for role in places[first]:
        _make_alike(role, clients, {name: own[role] for name, own in places.items()})
    return clients


def write_folder(path: Path | str, holdings: Holdings) -> None:
    """One .npz file per role, which `read_folder` reads as they were. Nothing that is there already is overwritten."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be made ({error.strerror}): name another folder.") from error
    there = _files(folder)
    if there:
        raise DataError(
            f"{folder} holds {', '.join(place.name for place in there.values())} already: name an empty folder, or move them away."
        )
    arrays = {
        folder / f"{role}.npz": {name: _array(value) for name, value in fields.items()}
        for role, fields in holdings.items()
    }
    for place, fields in arrays.items():
        _checked(place, place.stem, fields, None)
    for place, fields in arrays.items():
        with zipfile.ZipFile(place, "w") as archive:  # what numpy.savez does, for fields of any name
            for name, array in fields.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)


def _read(place: Path, role: str, num_classes: int | None) -> Fields:
    return _checked(place, role, _READERS[place.suffix.lower()](place), num_classes)


def _array(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _files(folder: Path, what: str = "role") -> dict[str, Path]:
    """By role, or by client where a folder holds one role of all."""
    if not folder.is_dir():
        raise DataError(
            f"{folder} is no folder: name the one that holds this client's train.npz and val.npz, or .csv, .parquet or .safetensors instead."
        )
    found: dict[str, Path] = {}
    for place in sorted(folder.iterdir()):
        if place.suffix.lower() in _READERS and place.is_file() and not place.name.startswith("."):
            other = found.setdefault(place.stem, place)
            if other != place:
                raise DataError(
                    f"{folder} holds {other.name} and {place.name}, both for the {what} {place.stem!r}: keep one of them."
                )
    return found


def _required(folder: Path, found: Mapping[str, Any]) -> None:
    missing = [role for role in REQUIRED if role not in found]
    if missing:
        names = (
            ", ".join(place.name if isinstance(place, Path) else role for role, place in found.items())
            or "no file of data"
        )
        add = (
            f"{missing[0]}{FORMATS}"
            if all(isinstance(place, Path) for place in found.values())
            else f"a folder {missing[0]} with a file per client"
        )
        raise DataError(f"{folder} holds {names}, but nothing for the role {missing[0]!r}: add {add}.")


def _places(folder: Path) -> dict[str, dict[str, Path]]:
    """Client -> role -> file, in the order of names."""
    expected = "expected a folder per client with train.csv and val.csv in it, or the folders train and val with a file per client"
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder, {expected}.")
    inside = {place.name: place for place in folder.iterdir() if place.is_dir() and place.name[0] not in "._"}
    if not inside:
        own = _files(folder)
        found = f"{next(iter(own.values())).name}, but no folder" if own else "no folder"
        raise DataError(f"{folder} holds {found}, {expected}.")
    if not any(role in inside for role in REQUIRED):
        for place in inside.values():
            _required(place, _files(place))
        return {name: _files(inside[name]) for name in sorted(inside, key=_natural)}
    by_role = {role: _files(place, "client") for role, place in sorted(inside.items())}
    _required(folder, by_role)
    everyone = sorted({name for own in by_role.values() for name in own}, key=_natural)
    if not everyone:
        raise DataError(f"{folder} holds no file of data in {' and '.join(sorted(inside))}, {expected}.")
    return {name: {role: own[name] for role, own in by_role.items() if name in own} for name in everyone}


def _natural(name: str) -> tuple[list[Any], str]:
    """client2 comes before client10: digits count as the number they make."""
    return [int(part) if part.isdecimal() else part.casefold() for part in re.split(r"([0-9]+)", name)], name


def _make_alike(role: str, clients: Mapping[str, dict[str, Fields]], places: Mapping[str, Path]) -> None:
    """One type for each field of this role at all clients. A file without samples has no say in that."""
    held = {name: own[role] for name, own in clients.items()}
    first = next((name for name, own in held.items() if len(next(iter(own.values())))), next(iter(held)))
    for name, own in held.items():
        for one, other in ((first, name), (name, first)):
            lacking = [field for field in held[one] if field not in held[other]]
            if lacking:
                raise DataError(
                    f"{places[other]} lacks the field {lacking[0]!r} that {places[one]} has: all clients need the same fields."
                )
        for field, array in own.items():
            like = held[first][field]
            if len(array) and (array.shape[1:] != like.shape[1:] or (array.dtype == bool) != (like.dtype == bool)):
                raise DataError(
                    f"{places[name]} has the field {field!r} as {_looks(array)} and {places[first]} as {_looks(like)}: all clients need the same."
                )
    for field, like in held[first].items():
        types = {own[field].dtype for own in held.values() if len(own[field])}
        common = np.result_type(*types) if types else like.dtype
        for own in held.values():
            own[field] = (
                own[field].astype(common, copy=False) if len(own[field]) else np.zeros((0, *like.shape[1:]), common)
            )


def _looks(array: np.ndarray) -> str:
    return f"{array.dtype} of shape {array.shape[1:]}" if array.ndim > 1 else f"single numbers ({array.dtype})"


def _checked(place: Path, role: str, fields: Mapping[str, np.ndarray], num_classes: int | None) -> Fields:
    """Arrays that a run can use, or a sentence about the first that is none."""
    if not fields:
        raise DataError(f"{place} holds no field: give it named arrays with one row per sample.")
    for name, array in fields.items():
        if name in RESERVED:
            raise DataError(f"{place} has a field named {name!r}, which the library fills in itself: rename it.")
        if array.dtype.kind not in "biuf":
            what = {"O": "Python objects", "U": "text", "S": "text"}.get(array.dtype.kind, f"the type {array.dtype}")
            raise DataError(
                f"{place} has {what} in the field {name!r}, expected numbers: convert them, or leave the field out."
            )
        if array.ndim == 0:
            raise DataError(f"{place} has a single number as the field {name!r}, expected one row per sample.")
    lengths = {name: len(array) for name, array in fields.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{place} has fields of different lengths ({lengths}), expected one row per sample in each.")
    if role in REQUIRED and not next(iter(lengths.values())):
        raise DataError(f"{place} holds no sample, expected at least one.")
    found = {name: _native(place, name, array) for name, array in fields.items()}
    return (
        {**found, "label": _classes(place, found["label"], num_classes)}
        if "label" in found and num_classes is not None
        else found
    )


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
                raise DataError(
                    f"{place} holds a single array without a name: write it with numpy.savez(file, field=array)."
                )
            return {name: _member(arrays, name, place) for name in arrays.files}
    except DataError:
        raise
    except (zipfile.BadZipFile, EOFError, OSError, RuntimeError, TypeError, ValueError, zlib.error) as error:
        raise DataError(
            f"{place} cannot be read as arrays of numpy ({_brief(error)}): write it anew with numpy.savez(file, field=array)."
        ) from error


def _member(arrays: np.lib.npyio.NpzFile, name: str, place: Path) -> np.ndarray:
    try:
        value = arrays[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise DataError(
            f"{place} has the field {name!r} as Python objects, which are never loaded: convert it to an array of numbers."
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
    known = (torch.float16, torch.float32, torch.float64)  # to numpy
    return {
        name: (value.float() if value.is_floating_point() and value.dtype not in known else value).numpy()
        for name, value in tensors.items()
    }


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
            f"{place} is read by pyarrow, which is not installed: pip install 'fedbilevel[parquet]', or write the file as CSV."
        ) from error
    try:
        with parquet.ParquetFile(place) as file:  # that file alone: its place adds no columns
            table = file.read()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{place} cannot be read as Parquet ({_brief(error)}): write it anew.") from error
    header = [
        name for name in table.column_names if not re.fullmatch(r"__index_level_\d+__", name)
    ]  # the row numbers of pandas are no field
    kept = [column for name, column in zip(table.column_names, table.columns, strict=True) if name in header]
    rows, single = _columns(place, header)
    arrays = [_from_arrow(place, name, column.combine_chunks()) for name, column in zip(header, kept, strict=True)]
    for name in (
        f"{name}.{k}" for name, columns in rows.items() for k in range(len(columns)) if arrays[columns[k]].ndim > 1
    ):
        raise DataError(
            f"{place} has lists in the column {name!r}, expected one number each where a column has a number in its name: rename it."
        )
    together = {name: np.stack([arrays[c] for c in columns], axis=1) for name, columns in rows.items()}
    wide = {
        name: array.astype(array.dtype if array.dtype.kind == "f" else np.float64) for name, array in together.items()
    }
    return {**wide, **{name: arrays[column] for name, column in single.items()}}


def _from_arrow(place: Path, name: str, values: Any) -> np.ndarray:
    """Numbers, or rows of them where `values` are lists."""
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
    if not len(values):  # pandas gives a column without values no type
        return np.zeros(0)
    if not (types.is_integer(values.type) or types.is_floating(values.type) or types.is_boolean(values.type)):
        raise DataError(
            f"{place} has the type {values.type} in the column {name!r}, expected numbers: convert them, or leave the column out."
        )
    array = np.array(values.to_numpy(zero_copy_only=False))  # a copy that may be written to
    if (
        array.dtype.kind in "iu"
    ):  # as in a CSV file: one width for whole numbers, and those that it cannot hold as floating-point numbers
        array = array.astype(np.float64 if array.size and int(array.max()) > np.iinfo(np.int64).max else np.int64)
    return array


def _columns(place: Path, header: Sequence[str]) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Where the columns of the fields with several stand, and those of the others."""
    parts: dict[str, dict[Any, int]] = {}
    single: dict[Any, int] = {}
    for column, name in enumerate(header):
        numbered = re.fullmatch(r"(.+)\.(\d{1,9})", name)
        own, key = (parts.setdefault(numbered[1], {}), int(numbered[2])) if numbered else (single, name)
        if not name or key in own:
            raise DataError(
                f"{place} has {f'two columns named {name!r}' if name else 'a column without a name'} in its header: name every column once."
            )
        own[key] = column
    for name, own in parts.items():
        if name in single or sorted(own) != list(range(len(own))):
            which = ", ".join(f"{name}.{k}" for k in sorted(own)[:5])
            raise DataError(
                f"{place} has the columns {which}{f' and {name}' if name in single else ''}, expected {name}.0, {name}.1 and so on without a gap."
            )
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
_READERS: dict[str, Callable[[Path], Fields]] = {
    ".npz": _npz,
    ".csv": _csv,
    ".parquet": _parquet,
    ".safetensors": _safetensors,
}
