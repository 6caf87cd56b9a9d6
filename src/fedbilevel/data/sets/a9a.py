"""LIBSVM's a9a: the UCI Adult census data in 123 binary features.

The label says whether a person earns more than 50,000 dollars a year.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedbilevel.data.locations import find_one_of
from fedbilevel.data.sets import libsvm, packed

NUM_FEATURES = 123
CHOICES = (("libsvm/a9a.npz",), ("libsvm/a9a", "libsvm/a9a.t"), ("a9a", "a9a.t"))


def a9a(data_dir: str | Path | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return features and labels of the training part, then of the test part.

    Features (n, 123) are float32, labels (n,) are 0 or 1 as int64. The published parts have 32,561
    and 16,281 samples. They are read from `libsvm/a9a.npz` (X_train, y_train, X_test, y_test), or
    from LIBSVM's own text files.
    """
    places = find_one_of(*CHOICES, data_dir=data_dir)
    if len(places) == 1:
        arrays = packed.read(places[0], ("X_train", "y_train", "X_test", "y_test"), "a9a")
    else:
        arrays = [array for place in places for array in libsvm.read(place, NUM_FEATURES, what="a9a")]
    train_x, train_y, test_x, test_y = arrays
    return (
        *libsvm.two_classes(places, train_x, train_y, NUM_FEATURES),
        *libsvm.two_classes(places, test_x, test_y, NUM_FEATURES),
    )
