"""Named arrays of an .npz file, with a clear error for a file that cannot be read."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from fedbilevel.errors import DataError


def read(place: Path, names: Sequence[str], what: str) -> list[np.ndarray]:
    """Read the named arrays of a file, in the order of `names`.

    Nothing in the file is executed: arrays of Python objects are refused.
    """
    try:
        # opened here, because numpy leaves a file open that it cannot read
        with place.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return [arrays[name] for name in names]
    except (BadZipFile, EOFError, KeyError, OSError, TypeError, ValueError, zlib.error) as error:
        raise DataError(
            f"{place} cannot be read as {what} ({str(error).split('. ', 1)[0]}): get the file anew, or delete it."
        ) from error


def same_length(place: Path, arrays: dict[str, np.ndarray]) -> None:
    """Raise unless every array has one row per sample."""
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"{place} holds arrays of different lengths ({lengths}), expected one row per sample in each: get the "
            "file anew, or delete it."
        )
