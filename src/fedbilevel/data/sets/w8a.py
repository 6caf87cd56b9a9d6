"""LIBSVM's w8a: web pages in 300 binary features, of which 3 % belong to the class to be found.

Platt, "Fast Training of Support Vector Machines Using Sequential Minimal Optimization", 1998.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedbilevel.data.locations import find_one_of
from fedbilevel.data.sets import libsvm, packed

NUM_FEATURES = 300
CHOICES = (("libsvm/w8a.npz",), ("libsvm/w8a",), ("w8a",))


def w8a(data_dir: str | Path | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return features and labels of the training part, the only part that is read.

    Features (n, 300) are float32, labels (n,) are 0 or 1 as int64; the published part has 49,749
    samples. They are read from `libsvm/w8a.npz` (X_train, y_train), or from LIBSVM's own text file.
    """
    (place,) = find_one_of(*CHOICES, data_dir=data_dir)
    x, y = (
        packed.read(place, ("X_train", "y_train"), "w8a")
        if place.suffix == ".npz"
        else libsvm.read(place, NUM_FEATURES, what="w8a")
    )
    return libsvm.two_classes([place], x, y, NUM_FEATURES)
