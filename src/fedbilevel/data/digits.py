"""The digits embedded in scikit-learn: 1,797 images of 8 x 8, ten classes. They need no download."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images (1797, 64) in [0, 1] as float32, labels (1797,) as int64."""
    data = load_digits()
    return (data.data / 16.0).astype(np.float32), data.target.astype(np.int64)
