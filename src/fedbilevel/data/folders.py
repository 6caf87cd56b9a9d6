"""Data of one client from its folder, or of many clients from one folder.

A file holds the samples of one role and has the role's name. `train` (lower level) and `val` (upper
level) are required; `test` and others are optional.

    train.npz          named arrays with one row per sample, as numpy.savez writes them
    train.safetensors  the same as safetensors
    train.csv          a header with the names of the fields and a line per sample; the columns
                       `image.0, image.1, ...` together are one field, a row of floating-point
                       numbers; a single column holds whole numbers, floating-point numbers, or
                       true and false
    train.parquet      columns as in a CSV file; a column of lists of equal length is one field, too
                       (needs pyarrow)

For many clients, there is one folder per client, DATA/ann/train.csv, or one folder per role,
DATA/train/ann.csv.

Other files are ignored. Nothing in a file is executed when it is read.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbilevel.data.readers import FORMATS, READERS, Fields
from fedbilevel.errors import DataError
from fedbilevel.problem.client_data import REQUIRED, RESERVED, Holdings

IMAGES = (".png", ".jpg", ".jpeg")


def an_image(folder: Path) -> Path | None:
    """Return an image in the folder of a client or of many clients, or None."""
    places = (place for depth in ("*", "*/*", "*/*/*", "*/*/*/*") for place in folder.glob(depth))
    return next((place for place in places if place.suffix.lower() in IMAGES), None)


def read_folder(path: Path | str, *, num_classes: int | None = None) -> dict[str, Fields]:
    """Read the data of one client: role -> field -> array.

    With `num_classes`, every field `label` must hold whole numbers from 0 to num_classes - 1, and
    is returned as int64. The names `weight`, `index` and `features` are reserved: the library fills
    them in, and a file with a field of that name is refused.
    """
    folder, files = Path(path), _files(Path(path))
    _required(folder, files)
    return {role: _read(place, role, num_classes) for role, place in files.items()}


def read_roles(path: Path | str) -> dict[str, Fields]:
    """Read the data of one client, of which only `train` is required."""
    folder, files = Path(path), _files(Path(path))
    if "train" not in files:
        held = ", ".join(place.name for place in files.values()) or "no file of data"
        raise DataError(f"{folder} holds {held}, but nothing for the role 'train': add train{FORMATS}.")
    return {role: _read(place, role, None) for role, place in files.items()}


def read_folders(path: Path | str, *, num_classes: int | None = None) -> dict[str, dict[str, Fields]]:
    """Read the data of many clients: client -> role -> field -> array.

    `list(read_folders(...).values())` is the list of clients that a run takes. Clients are sorted
    by name, with client2 before client10. Either every client has a folder, path/ann/train.csv, or
    every role has one, path/train/ann.csv. All clients need the same roles and fields. A field of
    whole numbers at one client and of floating-point numbers at another is one of floating-point
    numbers for all, because a column of a CSV file may hold no fraction by chance.

    num_classes: every field `label` must hold whole numbers from 0 to num_classes - 1.

    The names `weight`, `index` and `features` are reserved: the library fills them in, and a file
    with a field of that name is refused.

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
                    f"{folder} holds {there.relative_to(folder)}, but nothing for {lacking[0]!r} of {other!r}: "
                    "all clients need the same roles."
                )
    clients = {
        name: {role: _read(place, role, num_classes) for role, place in own.items()} for name, own in places.items()
    }
    for role in places[first]:
        _make_alike(role, clients, {name: own[role] for name, own in places.items()})
    return clients


def write_folder(path: Path | str, holdings: Holdings) -> None:
    """Write one .npz file per role for `read_folder`; never overwrite a file."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be made ({error.strerror}): name another folder.") from error
    there = _files(folder)
    if there:
        raise DataError(
            f"{folder} holds {', '.join(place.name for place in there.values())} already: "
            "name an empty folder, or move them away."
        )
    arrays = {
        folder / f"{role}.npz": {name: _array(value) for name, value in fields.items()}
        for role, fields in holdings.items()
    }
    for place, fields in arrays.items():
        _checked(place, place.stem, fields, None)
    for place, fields in arrays.items():
        with zipfile.ZipFile(place, "w") as archive:  # as numpy.savez does, but for fields of any name
            for name, array in fields.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)


def _read(place: Path, role: str, num_classes: int | None) -> Fields:
    return _checked(place, role, READERS[place.suffix.lower()](place), num_classes)


def _array(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _files(folder: Path, what: str = "role") -> dict[str, Path]:
    """Return the files by role, or by client for a folder with one role of all clients."""
    if not folder.is_dir():
        raise DataError(
            f"{folder} is no folder: name the folder that holds this client's train.npz and val.npz, "
            "or .csv, .parquet or .safetensors instead."
        )
    found: dict[str, Path] = {}
    for place in sorted(folder.iterdir()):
        if place.suffix.lower() in READERS and place.is_file() and not place.name.startswith("."):
            other = found.setdefault(place.stem, place)
            if other != place:
                raise DataError(
                    f"{folder} holds {other.name} and {place.name}, both for the {what} {place.stem!r}: keep one of "
                    "them."
                )
    return found


def _required(folder: Path, found: Mapping[str, Any]) -> None:
    missing = [role for role in REQUIRED if role not in found]
    if missing and not found:
        _refuse_images(folder)
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


def _refuse_images(folder: Path) -> None:
    if (image := an_image(folder)) is not None:
        raise DataError(
            f"{folder} holds images such as {image.relative_to(folder)}, expected files of arrays such as train.npz: "
            f"clean the labels of images with fedbilevel clean {folder}, or read them in Python with "
            f"fedbilevel.data.image_folders.read_clients([{str(folder)!r}]).clients."
        )


def _places(folder: Path) -> dict[str, dict[str, Path]]:
    """Return the files as client -> role -> file, sorted by name."""
    expected = (
        "expected a folder per client with train.csv and val.csv in it, "
        "or the folders train and val with a file per client"
    )
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder, {expected}.")
    if not any(place.suffix.lower() in READERS for depth in ("*", "*/*") for place in folder.glob(depth)):
        _refuse_images(folder)
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
    """Return a sort key by which client2 comes before client10: digits count as numbers."""
    return [int(part) if part.isdecimal() else part.casefold() for part in re.split(r"([0-9]+)", name)], name


def _make_alike(role: str, clients: Mapping[str, dict[str, Fields]], places: Mapping[str, Path]) -> None:
    """Give each field of this role the same type at all clients.

    Files without samples do not affect the type.
    """
    held = {name: own[role] for name, own in clients.items()}
    first = next((name for name, own in held.items() if len(next(iter(own.values())))), next(iter(held)))
    for name, own in held.items():
        for one, other in ((first, name), (name, first)):
            lacking = [field for field in held[one] if field not in held[other]]
            if lacking:
                raise DataError(
                    f"{places[other]} lacks the field {lacking[0]!r} that {places[one]} has: "
                    "all clients need the same fields."
                )
        for field, array in own.items():
            like = held[first][field]
            if len(array) and (array.shape[1:] != like.shape[1:] or (array.dtype == bool) != (like.dtype == bool)):
                raise DataError(
                    f"{places[name]} has the field {field!r} as {_looks(array)} and {places[first]} as "
                    f"{_looks(like)}: all clients need the same."
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
    """Return arrays that a run can use; raise for the first array that it cannot use."""
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
    """Return the array in the byte order of this machine and in a type that torch supports."""
    array = array.astype(np.float64 if array.dtype == np.longdouble else array.dtype.newbyteorder("="), copy=False)
    if array.dtype.kind == "f":
        bad = np.flatnonzero(~np.isfinite(array).all(axis=tuple(range(1, array.ndim))))
        if len(bad):
            raise DataError(
                f"{place} has NaN or infinity in the field {name!r} of {len(bad)} samples, of which the first is "
                "number "
                f"{bad[0]} from 0: fix or drop them."
            )
    return array


def _classes(place: Path, array: np.ndarray, num_classes: int) -> np.ndarray:
    array = array.astype(np.int64) if array.dtype == bool else array
    bad = array[(array < 0) | (array >= num_classes) | (array % 1 != 0)]
    if bad.size:
        raise DataError(
            f"{place} has the label {bad.flat[0]}, expected whole numbers from 0 to {num_classes - 1} for "
            f"{num_classes} classes: number the classes anew."
        )
    return array.astype(np.int64, copy=False)
