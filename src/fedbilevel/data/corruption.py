"""Deliberate corruption of data."""

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
    """Replace a random share `rate` of the labels; return the labels and a mask of wrong labels.

    to: `wrong` draws from the other labels, `uniform` from all labels, so that some labels stay
        right.
    """
    hit = np.zeros(len(labels), dtype=bool)
    hit[rng.choice(len(labels), round(rate * len(labels)), replace=False)] = True
    shift = rng.integers(0 if to == "uniform" else 1, num_classes, size=len(labels))
    spoiled = np.where(hit, (labels + shift) % num_classes, labels)
    return spoiled, spoiled != labels
