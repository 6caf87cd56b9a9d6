"""Images with labels from 0, in a training and a test part, from embedded digits or from files.

The windows of HAPT are offered in the same form, as rows of 30 numbers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from fedbilevel.data.sets import idx
from fedbilevel.data.sets.cifar10 import cifar10, num_images
from fedbilevel.data.sets.digits import digits
from fedbilevel.data.sets.hapt import hapt, summaries
from fedbilevel.errors import ProblemError

NUM_CHANNELS = {"cifar10": 3}  # of sets with more than one


class Images(NamedTuple):
    """Images (n, pixels) as float32 in [0, 1], channel after channel, and labels (n,) from 0."""

    image: np.ndarray
    label: np.ndarray

    def __len__(self) -> int:
        """Return the number of samples, not the number of fields."""
        return self.label.shape[0]

    def some(self, places: np.ndarray) -> Images:
        return Images(self.image[places], self.label[places])

    def fields(self) -> dict[str, np.ndarray]:
        return {"image": self.image, "label": self.label}


def train_and_test(
    name: Literal["digits", "mnist", "fashion", "cifar10", "hapt"],
    rng: np.random.Generator,
    *,
    share: float = 1.0,
    test_share: float = 0.25,
    data_dir: Path | str | None = None,
) -> tuple[Images, Images]:
    """Return a random `share` of the training and the test part.

    The digits have no test part, so a random `test_share` of them becomes the test part. Of HAPT,
    the windows of a random `test_share` of the people are the test part, because windows of one
    person overlap. Its columns are standardised by the training part.
    """
    if name == "cifar10":  # decoding is slow, so only used images are decoded
        used = [
            cifar10(part, data_dir, which=_some(num_images(part, data_dir), share, rng)) for part in ("train", "test")
        ]
        return Images(_unit(used[0].images), used[0].label), Images(_unit(used[1].images), used[1].label)
    if name == "hapt":
        parts = _by_person(rng, test_share, data_dir)
    elif name == "digits":
        images, labels = digits()
        order, num_test = rng.permutation(len(labels)), round(test_share * len(labels))
        parts = [(images[places], labels[places]) for places in (order[num_test:], order[:num_test])]
    else:
        folder = idx.folder_of(name, data_dir)
        read = [idx.images(folder, kind, emnist=False) for kind in ("train", "test")]
        parts = [(_unit(images), labels) for images, labels in read]
    chosen = [Images(*part).some(_some(len(part[1]), share, rng)) for part in parts]
    return chosen[0], chosen[1]


def standardised(train: Images, test: Images, num_channels: int = 1) -> tuple[Images, Images]:
    """Standardise both parts per channel by the mean and the deviation of the training part.

    A constant channel is not divided.
    """
    pixels = train.image.reshape(len(train), num_channels, -1)
    mean, deviation = (
        of(axis=(0, 2), dtype=np.float64, keepdims=True)[0].astype(np.float32) for of in (pixels.mean, pixels.std)
    )
    deviation[deviation == 0] = 1
    scaled = [
        ((part.image.reshape(len(part), num_channels, -1) - mean) / deviation).reshape(len(part), -1)
        for part in (train, test)
    ]
    return Images(scaled[0], train.label), Images(scaled[1], test.label)


def turned(images: np.ndarray, number: int) -> np.ndarray:
    """Turn square images (n, pixels) by `number` quarters of a circle, and mirror them from 4 on."""
    side = math.isqrt(images.shape[1])
    if number > 7 or side * side != images.shape[1]:
        raise ProblemError(
            f"rotation {number} of images with {images.shape[1]} pixels does not exist: use grey square images and at "
            "most 8 clusters."
        )
    square = np.rot90(images.reshape(-1, side, side), number % 4, axes=(1, 2))
    return np.ascontiguousarray(square if number < 4 else square[:, :, ::-1]).reshape(images.shape)


def _by_person(
    rng: np.random.Generator, test_share: float, data_dir: Path | str | None
) -> list[tuple[np.ndarray, np.ndarray]]:
    found = hapt(data_dir)
    people = rng.permutation(np.unique(found.subject))
    testing = np.isin(found.subject, people[: max(1, round(test_share * len(people)))])
    rows = summaries(found.x)
    scaled = (rows - rows[~testing].mean(0)) / np.maximum(rows[~testing].std(0), 1e-6)
    return [(scaled[part], found.label[part]) for part in (~testing, testing)]


def _unit(images: np.ndarray) -> np.ndarray:
    """Convert bytes to pixels (n, pixels) in [0, 1]."""
    return (images.reshape(len(images), -1) * np.float32(1 / 255)).astype(np.float32)


def _some(num: int, share: float, rng: np.random.Generator) -> np.ndarray:
    return np.sort(rng.permutation(num)[: max(1, round(share * num))])
