"""Data sets that are read from files: descriptions and file names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fedbilevel.data.locations import find, find_one_of
from fedbilevel.data.sets import a9a, adult, cifar10, hapt, idx, letters, omniglot, shakespeare, w8a
from fedbilevel.errors import UnknownNameError

Where = Callable[[str | Path | None], list[Path]]


class Entry(NamedTuple):
    about: str
    where: Where  # never downloads; raises DataError with the names of missing files


def _idx(name: str) -> Where:
    return lambda data_dir: [idx.folder_of(name, data_dir)]


SETS: dict[str, Entry] = {
    "a9a": Entry("census data in 123 binary features", lambda data_dir: find_one_of(*a9a.CHOICES, data_dir=data_dir)),
    "adult": Entry(
        "the same census data as published, numbers and categories",
        lambda data_dir: find_one_of(*adult.CHOICES, data_dir=data_dir),
    ),
    "cifar10": Entry(
        "colour images in ten classes, as lossy JPEG", lambda data_dir: find(cifar10.FILE, data_dir=data_dir)
    ),
    "emnist": Entry("handwritten digits and letters", _idx("emnist")),
    "fashion": Entry("images of clothes in ten classes", _idx("fashion")),
    "hapt": Entry("movements of 30 people from their smartphones", lambda data_dir: find(hapt.FILE, data_dir=data_dir)),
    "letters": Entry("2,990 handwritten capitals", lambda data_dir: find(letters.FILE, data_dir=data_dir)),
    "mnist": Entry("handwritten digits", _idx("mnist")),
    "omniglot": Entry(
        "1,623 handwritten characters of 50 alphabets", lambda data_dir: find(omniglot.FILE, data_dir=data_dir)
    ),
    "shakespeare": Entry("plays by role", lambda data_dir: find(shakespeare.FILE, data_dir=data_dir)),
    "w8a": Entry("web pages in 300 binary features", lambda data_dir: find_one_of(*w8a.CHOICES, data_dir=data_dir)),
}


def where(name: str, data_dir: str | Path | None = None) -> list[Path]:
    """Return the files of a set, or the folder that holds them."""
    if name not in SETS:
        raise UnknownNameError("set of data", name, SETS)
    return SETS[name].where(data_dir)
