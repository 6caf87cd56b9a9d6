"""CIFAR-10: colour images of 32 x 32 in ten classes (Krizhevsky, 2009).

There are 50,000 training and 10,000 test images.

The file holds every image as a JPEG of about quality 75, which is **lossy**: pixels differ from the
published ones, and figures are not exactly comparable with those of the original. The order is by
class, then by file name, not that of the original batches; shuffle before use. Decoding needs
Pillow, which is an extra: `pip install fedbilevel[images]`.
"""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from fedbilevel.data.locations import find
from fedbilevel.data.sets import packed
from fedbilevel.errors import DataError

FILE = "cifar10/cifar10_jpeg.npz"
HUMAN_FILE = "cifar10/cifar10n.npz"
SIDE = 32


class Cifar10(NamedTuple):
    images: np.ndarray  # (n, 3, 32, 32) uint8, red, green, blue
    label: np.ndarray  # (n,) int64
    class_names: list[str]


Part = Literal["train", "test"]
Human = Literal["aggregate", "random1", "random2", "random3", "worst"]


def num_images(part: Part, data_dir: str | Path | None = None) -> int:
    """Return the number of images without decoding them."""
    (place,) = find(FILE, data_dir=data_dir)
    return len(packed.read(place, (f"{part}_labels",), "CIFAR-10")[0])


def human_labels(kind: Human, data_dir: str | Path | None = None) -> np.ndarray:
    """Return labels of the training part by human annotators, in the order of `cifar10("train")`.

    CIFAR-10N (Wei et al., "Learning with Noisy Labels Revisited", ICLR 2022): three annotators per
    image, the majority of them, or a wrong one if there is any.
    """
    (place,) = find(HUMAN_FILE, data_dir=data_dir)
    labels = packed.read(place, (kind,), "CIFAR-10N")[0].astype(np.int64)
    num = num_images("train", data_dir)
    if labels.shape != (num,) or labels.min() < 0 or labels.max() > 9:
        raise DataError(
            f"{place} has {labels.shape} labels for the {num} training images of CIFAR-10, expected one of 0 to 9 "
            "for each: get the file anew."
        )
    return labels


def cifar10(
    part: Part, data_dir: str | Path | None = None, *, which: list[int] | np.ndarray | slice | None = None
) -> Cifar10:
    """Decode one part, or only some of its images.

    Decoding all images takes seconds. In the file, image i is `jpeg[offsets[i]:offsets[i + 1]]`.

    which: numbers, a mask or a slice of the images to decode.
    """
    if find_spec("PIL") is None:
        raise DataError(
            "the images of CIFAR-10 are JPEG files, which need Pillow, and it is not installed: pip install "
            "'fedbilevel[images]'."
        )
    (place,) = find(FILE, data_dir=data_dir)
    jpeg, offsets, labels, names = packed.read(
        place, (f"{part}_jpeg", f"{part}_offsets", f"{part}_labels", "class_names"), "CIFAR-10"
    )
    num = len(labels)
    if offsets.shape != (num + 1,) or offsets[0] != 0 or offsets[-1] != len(jpeg) or (np.diff(offsets) <= 0).any():
        raise DataError(
            f"{place} has {num} labels in its {part} part, but its offsets do not cut the {len(jpeg)} bytes of "
            "images into as many pieces: get the file anew."
        )
    try:
        numbers = np.arange(num) if which is None else np.arange(num)[which]
    except IndexError as error:
        raise DataError(
            f"which names images that the {part} part has not ({error}): name whole numbers from 0 to {num - 1}, or "
            "give a mask."
        ) from error
    images = np.empty((len(numbers), 3, SIDE, SIDE), np.uint8)
    for row, i in zip(images, numbers, strict=True):
        row[:] = _decoded(
            jpeg[offsets[i] : offsets[i + 1]].tobytes(), f"image {i} of the {part} part in {place}"
        ).transpose(2, 0, 1)
    return Cifar10(images, labels[numbers].astype(np.int64), names.tolist())


def _decoded(content: bytes, what: str) -> np.ndarray:
    from PIL import Image  # an extra

    try:
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(
            f"{what} is no JPEG that can be read ({str(error).split(' <', 1)[0]}): get the file anew."
        ) from error
    if pixels.shape != (SIDE, SIDE, 3):
        raise DataError(
            f"{what} has {pixels.shape[1]} x {pixels.shape[0]} pixels, expected {SIDE} x {SIDE}: get the file anew."
        )
    return pixels
