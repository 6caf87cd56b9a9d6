"""Handwritten digits that come with the package: 1,797 images of 8 x 8 pixels, ten classes.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository, 1998. `digits.npz` holds its test part as scikit-learn distributes it (BSD-3-Clause, see
`digits.LICENSE.txt`). Pixels are counts from 0 to 16 and labels are 0 to 9, both stored as uint8.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedbilevel.data.sets import packed

FILE = Path(__file__).with_name("digits.npz")


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images (1797, 64) in [0, 1] as float32 and labels (1797,) as int64."""
    images, labels = packed.read(FILE, ("images", "labels"), "the digits of the package")
    return images.astype(np.float32) / 16, labels.astype(np.int64)
