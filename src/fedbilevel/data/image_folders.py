"""Data of clients from folders of images or of files, for the command `fedbilevel clean`.

A client is a folder with images in a folder per role and class,

    ann/train/cat/1.png  ann/train/dog/2.jpg  ann/val/cat/3.png

or with files of arrays as in data/folders.py, ann/train.npz and ann/val.npz. `train` holds the labels
to check and is required; `val` holds samples whose labels were checked; `test` is optional. A folder
of such folders holds several clients. All images have one size, or are resized to squares. They are
grey if the first image is grey, and otherwise coloured. Nothing in a file is executed when it is
read.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.data.folders import IMAGES, an_image, read_roles
from fedbilevel.data.readers import FORMATS, READERS
from fedbilevel.errors import DataError, ProblemWarning

ROLES = ("train", "val", "test")
_CLOSE = 0.81  # likeness of names; "male" and "female" are less alike


class FolderClients(NamedTuple):
    """Clients with their names; class names and files of training images only for images."""

    names: list[str]
    clients: list[dict[str, dict[str, np.ndarray]]]
    class_names: list[str] | None
    files: list[list[str]] | None


def read_clients(paths: Sequence[Path | str], *, size: int | None = None) -> FolderClients:
    """Read clients from their folders, or from folders of their folders.

    size: side to which images are resized; None: all images must have one size.
    """
    folders = [own for path in paths for own in _clients_in(Path(path))]
    names = [folder.name for folder in folders]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"two folders of clients are named {twice!r}: rename one of them.")
    images = [folder for folder in folders if (folder / "train").is_dir()]
    if not images:
        return FolderClients(names, [read_roles(folder) for folder in folders], None, None)
    if len(images) < len(folders):
        other = next(folder for folder in folders if folder not in images)
        raise DataError(f"{images[0]} holds folders of images and {other} does not: use one form for all clients.")
    return _read_images(folders, names, size)


def _clients_in(path: Path) -> list[Path]:
    if not path.is_dir():
        raise DataError(f"{path} is no folder: name the folder of a client, or a folder of such folders.")
    if _is_client(path):
        return [path]
    folders = sorted(place for place in path.iterdir() if place.is_dir())
    inside = [place for place in folders if _is_client(place)]
    if not inside:
        raise DataError(
            f"{path} holds no client, expected a folder train with a folder of images per class, or a file "
            f"train{FORMATS}: name such a folder, or a folder of such folders."
        )
    for place in folders:
        if place not in inside and place.name[0] not in "._" and (held := _held(place)) is not None:
            raise DataError(
                f"{place} holds {held.relative_to(place)} and no training samples, expected a folder train with a "
                f"folder of images per class, or a file train{FORMATS}: add it, or move {place} out of {path}."
            )
    return inside


def _held(path: Path) -> Path | None:
    """Return something that only a folder of a client holds: a role, or an image in folders of a client's depth."""
    roles = [place for place in sorted(path.iterdir()) if place.name.split(".")[0] in ROLES]
    known = (place for place in roles if place.is_dir() or place.suffix.lower() in READERS)
    return next(known, None) or an_image(path)


def _is_client(path: Path) -> bool:
    return (path / "train").is_dir() or any((path / f"train{suffix}").is_file() for suffix in READERS)


def _read_images(folders: list[Path], names: list[str], size: int | None) -> FolderClients:
    if find_spec("PIL") is None:
        raise DataError(
            "images in folders need Pillow, which is not installed: install it with pip install 'fedbilevel[images]'."
        )
    found = [{role: _files(folder / role) for role in ROLES if (folder / role).is_dir()} for folder in folders]
    classes = sorted({label for client in found for some in client.values() for label, _ in some})
    for folder, client in zip(folders, found, strict=True):
        if not client["train"] or len(classes) < 2:
            raise DataError(
                f"{folder / 'train'} holds {len(client['train'])} images and there are {len(classes)} classes in all, "
                "expected images (.png, .jpg) in a folder per class, for at least two classes."
            )
    kinds = [{label for some in client.values() for label, _ in some} for client in found]
    for text in _misspelt(dict(zip(names, kinds, strict=True))):
        warnings.warn(text, ProblemWarning, stacklevel=3)
    read = _Reader(found[0]["train"][0][1], size)
    clients = [
        {
            role: {
                "image": np.stack([read(place) for _, place in some]),
                "label": np.array([classes.index(label) for label, _ in some]),
            }
            for role, some in client.items()
            if some
        }
        for client in found
    ]
    files = [
        [str(place.relative_to(folder)) for _, place in client["train"]]
        for folder, client in zip(folders, found, strict=True)
    ]
    return FolderClients(names, clients, classes, files)


def _misspelt(held: Mapping[str, set[str]]) -> list[str]:
    """Return a sentence for each class of one client alone whose name is nearly that of a class of others.

    Names with different digits are different classes.
    """
    texts = []
    for name, own in held.items():
        others = sorted(set().union(*(some for other, some in held.items() if other != name)))
        for label in sorted(own - set(others)):
            like = {other.lower(): other for other in others if re.findall(r"\d", other) == re.findall(r"\d", label)}
            if close := difflib.get_close_matches(label.lower(), like, n=1, cutoff=_CLOSE):
                texts.append(
                    f"the class {label!r} occurs at the client {name!r} alone: did you mean {like[close[0]]!r}, which "
                    "other clients have?"
                )
    return texts


def _files(folder: Path) -> list[tuple[str, Path]]:
    """Return pairs of a class and an image, sorted by name."""
    return [
        (kind.name, place)
        for kind in sorted(folder.iterdir())
        if kind.is_dir()
        for place in sorted(kind.iterdir())
        if place.suffix.lower() in IMAGES
    ]


class _Reader:
    """Function from a file to pixels in [0, 1], all of the form of the first file."""

    def __init__(self, first: Path, size: int | None) -> None:
        self.first, self.side = first, None if size is None else (size, size)
        opened = self._opened(first)
        self.mode = "L" if opened.mode in ("L", "1", "LA", "I", "I;16") else "RGB"
        self.size = self.side or opened.size

    def __call__(self, place: Path) -> np.ndarray:
        image = self._opened(place).convert(self.mode)
        if self.side is not None:
            image = image.resize(self.side)
        if image.size != self.size:
            raise DataError(
                f"{place} has {image.size[0]} x {image.size[1]} pixels and {self.first} {self.size[0]} x "
                f"{self.size[1]}, expected one size for all images: resize them, or give size."
            )
        pixels = np.asarray(image, np.float32) / 255
        return pixels if self.mode == "L" else pixels.transpose(2, 0, 1)

    def _opened(self, place: Path) -> Any:
        from PIL import Image  # an extra

        try:
            image = Image.open(place, formats=["JPEG", "PNG"])
            image.load()
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"{place} is no image that can be read ({type(error).__name__}): remove it.") from error
        return image
