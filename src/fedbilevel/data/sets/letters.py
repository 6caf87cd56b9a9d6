"""2,990 handwritten capitals from A to Z, 115 of each, as 28 x 28 images.

Source: a sample of Kaggle's "A-Z Handwritten Alphabets", which was made from NIST Special Database
19 and is published there as CC0. Who wrote an image is not known.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedbilevel.data.locations import find
from fedbilevel.data.sets import packed
from fedbilevel.errors import DataError

FILE = "femnist/az_letters_2990.npz"
NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Letters(NamedTuple):
    images: np.ndarray  # (n, 28, 28) float32, ink 1, paper 0
    label: np.ndarray  # (n,) int64: 0 is A


def letters(data_dir: str | Path | None = None) -> Letters:
    """Read `femnist/az_letters_2990.npz`, in which ink is 255 and paper 0."""
    (place,) = find(FILE, data_dir=data_dir)
    images, label = packed.read(place, ("images", "label"), "letters")
    packed.same_length(place, {"images": images, "label": label})
    if images.dtype != np.uint8 or images.shape[1:] != (28, 28):
        raise DataError(
            f"{place} holds images of shape {images.shape} and type {images.dtype}, expected (n, 28, 28) and uint8: "
            "get the file anew."
        )
    if sorted(set(label.tolist())) != list(range(len(NAMES))):
        raise DataError(f"{place} does not number its letters from 0 to {len(NAMES) - 1}: get the file anew.")
    return Letters(images.astype(np.float32) / 255, label.astype(np.int64))
