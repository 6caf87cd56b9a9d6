"""What is spoiled on purpose."""

from __future__ import annotations

from typing import Literal

import numpy as np


def flip_labels(
    labels: np.ndarray,
    rate: float,
    num_classes: int,
    rng: np.random.Generator,
    *,
    to: Literal["wrong", "uniform"] = "wrong",
) -> tuple[np.ndarray, np.ndarray]:
    """A share `rate` of the labels, chosen at random, gets another label, uniform over the others,
    or `to` any label, uniform over all of them.

    Returns the labels and which of them are wrong: with `uniform`, a label that was drawn again is
    not.
    """
    hit = np.zeros(len(labels), dtype=bool)
    hit[rng.choice(len(labels), round(rate * len(labels)), replace=False)] = True
    shift = rng.integers(0 if to == "uniform" else 1, num_classes, size=len(labels))
    spoiled = np.where(hit, (labels + shift) % num_classes, labels)
    return spoiled, spoiled != labels
