"""LIBSVM's a9a: the UCI Adult census data in 123 binary features; the label says whether somebody earns more than 50,000 dollars a year."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from sklearn.datasets import load_svmlight_file

from fedbilevel.data.places import find_one_of
from fedbilevel.errors import DataError

NUM_FEATURES = 123
CHOICES = (("libsvm/a9a.npz",), ("libsvm/a9a", "libsvm/a9a.t"), ("a9a", "a9a.t"))


def a9a(data_dir: str | Path | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Train features (n, 123) as float32 and labels (n,) 0 or 1 as int64, then those of the test part: 32,561 and 16,281 samples in the published
    files. From `libsvm/a9a.npz` (X_train, y_train, X_test, y_test), or from LIBSVM's own text files."""
    places = find_one_of(*CHOICES, data_dir=data_dir)
    try:
        arrays = _packed(places[0]) if len(places) == 1 else _texts(places)
    except (BadZipFile, EOFError, KeyError, OSError, TypeError, ValueError) as error:
        raise DataError(f"{' or '.join(map(str, places))} cannot be read as a9a ({error}): get the file anew, or delete it.") from error
    for x, y in (arrays[:2], arrays[2:]):
        if x.shape != (len(y), NUM_FEATURES) or not np.isin(y, (-1, 1)).all():
            raise DataError(
                f"{' and '.join(map(str, places))} hold features of shape {x.shape} and labels {np.unique(y)[:5]}, expected {NUM_FEATURES} features "
                "and labels -1 and 1: get the file anew, or delete it."
            )
    train_x, train_y, test_x, test_y = arrays
    return train_x.astype(np.float32), (train_y > 0).astype(np.int64), test_x.astype(np.float32), (test_y > 0).astype(np.int64)


def _packed(place: Path) -> list[np.ndarray]:
    with place.open("rb") as file, np.load(file) as arrays:  # numpy leaves a file open that it cannot read
        return [arrays[name] for name in ("X_train", "y_train", "X_test", "y_test")]


def _texts(places: Sequence[Path]) -> list[np.ndarray]:
    """The test file never names feature 123, so the number of features is given; LIBSVM counts them from one."""
    arrays = []
    for place in places:
        x, y = load_svmlight_file(str(place), n_features=NUM_FEATURES, zero_based=False)
        arrays += [x.toarray(), y]
    return arrays
