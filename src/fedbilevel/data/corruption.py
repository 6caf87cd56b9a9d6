"""What is spoiled on purpose."""

from __future__ import annotations

import numpy as np


def flip_labels(labels: np.ndarray, rate: float, num_classes: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A share `rate` of the labels, chosen at random, gets another label, uniform over the others. Returns the labels and who was hit."""
    hit = np.zeros(len(labels), dtype=bool)
    hit[rng.choice(len(labels), round(rate * len(labels)), replace=False)] = True
    shift = rng.integers(1, num_classes, size=len(labels))
    return np.where(hit, (labels + shift) % num_classes, labels), hit
