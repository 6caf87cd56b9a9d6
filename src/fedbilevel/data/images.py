"""Images with labels from 0, as a part for training and a part for testing: the embedded digits, or idx files with a test part of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from fedbilevel.data import idx
from fedbilevel.data.digits import digits


class Images(NamedTuple):
    """Images (n, pixels) in [0, 1] as float32, labels (n,) from 0."""

    image: np.ndarray
    label: np.ndarray

    def __len__(self) -> int:
        """Samples, not fields."""
        return self.label.shape[0]

    def some(self, places: np.ndarray) -> Images:
        return Images(self.image[places], self.label[places])

    def fields(self) -> dict[str, np.ndarray]:
        return {"image": self.image, "label": self.label}


def train_and_test(
    name: Literal["digits", "mnist", "fashion"],
    rng: np.random.Generator,
    *,
    share: float = 1.0,
    test_share: float = 0.25,
    data_dir: Path | str | None = None,
) -> tuple[Images, Images]:
    """A random `share` of both parts. The digits have no test part: it is a random `test_share` of them; the other sets come with their own."""
    if name == "digits":
        images, labels = digits()
        order, num_test = rng.permutation(len(labels)), round(test_share * len(labels))
        parts = [(images[places], labels[places]) for places in (order[num_test:], order[:num_test])]
    else:
        folder = idx.folder_of(name, data_dir)
        read = [idx.images(folder, kind, emnist=False) for kind in ("train", "test")]
        parts = [((images.reshape(len(images), -1) * np.float32(1 / 255)).astype(np.float32), labels) for images, labels in read]
    chosen = [Images(*part).some(np.sort(rng.permutation(len(part[1]))[: max(1, round(share * len(part[1])))])) for part in parts]
    return chosen[0], chosen[1]
