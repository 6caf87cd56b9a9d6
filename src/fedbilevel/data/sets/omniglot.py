"""Omniglot: 1,623 handwritten characters of 50 alphabets, each drawn by 20 people, as 28 x 28
images.

Source: Lake, Salakhutdinov, Tenenbaum, "Human-level concept learning through probabilistic program
induction", Science 2015. The background alphabets are for training, the others for testing.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedbilevel.data.locations import find
from fedbilevel.data.sets import packed
from fedbilevel.errors import DataError

FILE = "omniglot/omniglot_28x28.npz"


class Omniglot(NamedTuple):
    images: np.ndarray  # (n, 28, 28) float32, ink 1, paper 0
    label: np.ndarray  # (n,) int64, which character
    alphabet: np.ndarray  # (n,) int64
    drawer: np.ndarray  # (n,) int64, 0 to 19 within a character
    background: np.ndarray  # (n,) bool
    label_names: list[str]
    alphabet_names: list[str]


def omniglot(data_dir: str | Path | None = None) -> Omniglot:
    """Read `omniglot/omniglot_28x28.npz`, in which ink is 0 and paper 255."""
    (place,) = find(FILE, data_dir=data_dir)
    arrays = dict(zip(Omniglot._fields, packed.read(place, Omniglot._fields, "Omniglot"), strict=True))
    packed.same_length(place, {name: arrays[name] for name in ("images", "label", "alphabet", "drawer", "background")})
    pixels = arrays["images"]
    if pixels.dtype != np.uint8 or pixels.shape[1:] != (28, 28):
        raise DataError(
            f"{place} holds images of shape {pixels.shape} and type {pixels.dtype}, expected (n, 28, 28) and uint8: "
            "get the file anew."
        )
    for name in ("label", "alphabet"):
        numbers, names = arrays[name], arrays[f"{name}_names"]
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(names):
            raise DataError(
                f"{place} numbers its {name}s from {numbers.min()} to {numbers.max()}, expected 0 to "
                f"{len(names) - 1}, one for each name: get the file anew."
            )
    ink = pixels.astype(np.float32)
    ink /= -255
    ink += 1
    label, alphabet, drawer = (arrays[name].astype(np.int64) for name in ("label", "alphabet", "drawer"))
    return Omniglot(
        ink,
        label,
        alphabet,
        drawer,
        arrays["background"].astype(bool),
        arrays["label_names"].tolist(),
        arrays["alphabet_names"].tolist(),
    )
