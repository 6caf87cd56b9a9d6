"""Images in idx files: MNIST, Fashion-MNIST and EMNIST under their published names, gzipped or not.

An idx file is two zero bytes, a byte for the type, a byte for the number of dimensions, the
dimensions as big-endian 32-bit numbers, and the values, last dimension fastest.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Literal

import numpy as np

from fedbilevel.data.locations import folders
from fedbilevel.errors import DataError

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_PARTS = {"train": ("train", "train"), "test": ("t10k", "test")}  # names of the part in files of MNIST and EMNIST
_FOLDERS = {
    "mnist": ("mnist", "MNIST/raw"),
    "emnist": ("emnist", "EMNIST/raw"),
    "fashion": ("fashion", "fashion-mnist", "FashionMNIST/raw"),
}
_PACKAGES = {"fashion": "dataset-fashion-mnist"}  # of Debian, in `locations.SYSTEM`


def read(path: Path | str) -> np.ndarray:
    """Read the array of one idx file; gzip is detected by its first bytes, not by its name."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): give the path of an idx file.") from error
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(f"{path} is a damaged gzip file ({error}): fetch it again.") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES or content[3] == 0:
        raise DataError(
            f"{path} starts with the bytes {content[:4].hex(' ') or 'of an empty file'}, expected 00 00, a type (08 "
            "for images and labels) "
            "and the number of dimensions: this is not an idx file."
        )
    kind, start = np.dtype(_TYPES[content[2]]), 4 + 4 * content[3]
    if len(content) < start:
        raise DataError(f"{path} ends within its header, after {len(content)} of {start} bytes: fetch it again.")
    shape = tuple(int(side) for side in np.frombuffer(content, ">u4", content[3], 4))
    expected = kind.itemsize
    for side in shape:
        expected *= side
    if len(content) - start != expected:
        raise DataError(
            f"{path} has {len(content) - start} bytes of values, expected {expected} for the shape {shape}: fetch it "
            "again."
        )
    return np.frombuffer(content, kind, offset=start).reshape(shape).astype(kind.newbyteorder("="))


def images(
    folder: Path | str, kind: Literal["train", "test"], split: str = "byclass", *, emnist: bool | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Read images (n, height, width) and labels (n,) of the training or the test part in `folder`.

    EMNIST files (`emnist-<split>-train-images-idx3-ubyte`) are searched first. They hold every
    image with rows and columns exchanged; the returned images are upright, as for MNIST.

    emnist: True for EMNIST files only, False for other files only; a folder may hold both.
    """
    mnist, theirs = _PARTS[kind]
    stems = [(f"emnist-{split}-{theirs}", True), (mnist, False)]
    stems = stems if emnist is None else stems[:1] if emnist else stems[1:]
    for stem, exchanged in stems:
        paths = [_there(Path(folder) / f"{stem}-{what}-ubyte") for what in ("images-idx3", "labels-idx1")]
        if paths[0] is None and paths[1] is None:
            continue
        if paths[0] is None or paths[1] is None:
            raise DataError(
                f"{folder} holds only one of {stem}-images-idx3-ubyte and {stem}-labels-idx1-ubyte: both are needed."
            )
        pixels, labels = read(paths[0]), read(paths[1])
        for path, array, num in ((paths[0], pixels, 3), (paths[1], labels, 1)):
            if array.ndim != num:
                raise DataError(
                    f"{path} has {array.ndim} dimensions, expected {num}: it is not the file that its name says."
                )
        if len(pixels) != len(labels):
            raise DataError(
                f"{paths[0]} has {len(pixels)} images, but {paths[1]} has {len(labels)} labels: fetch both again, "
                "from one place."
            )
        return (np.ascontiguousarray(pixels.swapaxes(1, 2)) if exchanged else pixels), labels.astype(np.int64)
    wanted = " or ".join(f"{stem}-images-idx3-ubyte" for stem, _ in stems)
    raise DataError(
        f"{folder} does not hold {wanted}, plain or .gz: name another folder{' or another split' if emnist else ''}."
    )


def folder_of(name: str, data_dir: Path | str | None = None) -> Path:
    """Return the folder with the files of "mnist", "emnist" or "fashion".

    The folder is `data_dir` or a folder in it. Without `data_dir`, the folders of `locations` are
    searched.
    """
    roots = [Path(data_dir)] if data_dir else folders()
    pattern = "emnist-*-images-idx3-ubyte*" if name == "emnist" else "t*-images-idx3-ubyte*"
    for place in [root / part for root in roots for part in (*_FOLDERS[name], *([""] if data_dir else []))]:
        if any(place.glob(pattern)):
            return place
    package = f", install Debian's package {_PACKAGES[name]}" if name in _PACKAGES and not data_dir else ""
    raise DataError(
        f"no files of {name} were found under {' or '.join(map(str, roots))}: put its idx files into a folder named "
        f"{name} there{package}, or name the folder with data_dir or the environment variable FEDBILEVEL_DATA."
    )


def _there(path: Path) -> Path | None:
    """Return `path`, or `path` with .gz, whichever exists."""
    return next((found for found in (path, path.with_name(f"{path.name}.gz")) if found.is_file()), None)
