"""LIBSVM's text format: a sample per line, with its label and `feature:value` for nonzero values.

Features are counted from one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedbilevel.errors import DataError


def read(
    place: str | Path, num_features: int, *, zero_based: bool = False, what: str = "LIBSVM text"
) -> tuple[np.ndarray, np.ndarray]:
    """Read dense features (n, num_features) as float32 and labels (n,) as float64.

    Files with .gz and .bz2 are unpacked. The number of features is an argument, because a file may
    lack the last feature, as the test part of a9a does.
    """
    try:
        from sklearn.datasets import load_svmlight_file  # an extra, and slow to import
    except ImportError as error:
        raise DataError(
            f"{place} is LIBSVM text, which scikit-learn reads, and scikit-learn is not installed: pip install "
            "'fedbilevel[libsvm]'."
        ) from error
    try:
        x, y = load_svmlight_file(str(place), n_features=num_features, dtype=np.float32, zero_based=zero_based)
    except (EOFError, OSError, OverflowError, ValueError) as error:
        raise DataError(
            f"{place} cannot be read as {what} with {num_features} features ({error}): get the file anew, or delete it."
        ) from error
    return x.toarray(), np.asarray(y, np.float64)


def two_classes(
    places: Sequence[Path], x: np.ndarray, y: np.ndarray, num_features: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return features as float32, and the labels -1 and 1 as 0 and 1 (int64)."""
    if x.shape != (len(y), num_features) or not np.isin(y, (-1, 1)).all():
        raise DataError(
            f"{' and '.join(map(str, places))} hold features of shape {x.shape} and labels "
            f"{np.unique(y)[:5].tolist()}, expected {num_features} features "
            "and labels -1 and 1: get the file anew, or delete it."
        )
    return x.astype(np.float32), (y > 0).astype(np.int64)
