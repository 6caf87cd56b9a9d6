"""HAPT: accelerometer and gyroscope of smartphones while 30 people walk, climb, sit, stand and lie.

The person is the natural client.

UCI "Smartphone-Based Recognition of Human Activities and Postural Transitions" (Reyes-Ortiz et al.,
2015), in half-overlapping windows of 2.56 seconds at 50 Hz. Neighbouring windows of a person share
half their samples: split a person's windows in time, not at random, to keep test data unseen.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedbilevel.data.locations import find
from fedbilevel.data.sets import packed
from fedbilevel.errors import DataError

FILE = "hapt/hapt_windows.npz"


class Hapt(NamedTuple):
    x: np.ndarray  # (n, 128, 6) float32: time, then channel
    label: np.ndarray  # (n,) int64, which activity
    subject: np.ndarray  # (n,) int64, 1 to 30
    channels: list[str]
    label_names: list[str]


def hapt(data_dir: str | Path | None = None) -> Hapt:
    """Read `hapt/hapt_windows.npz`, which holds values in half precision."""
    (place,) = find(FILE, data_dir=data_dir)
    x, label, subject, channels, names = packed.read(place, ("x", "y", "subject", "channels", "label_names"), "HAPT")
    packed.same_length(place, {"x": x, "y": label, "subject": subject})
    if x.ndim != 3 or x.shape[2] != len(channels):
        raise DataError(
            f"{place} holds windows of shape {x.shape}, expected (n, time, {len(channels)}), one column for each "
            "channel: get the file anew."
        )
    if len(label) and not 0 <= label.min() <= label.max() < len(names):
        raise DataError(
            f"{place} numbers its activities from {label.min()} to {label.max()}, expected 0 to {len(names) - 1}: "
            "get the file anew."
        )
    return Hapt(
        x.astype(np.float32), label.astype(np.int64), subject.astype(np.int64), channels.tolist(), names.tolist()
    )


def summaries(x: np.ndarray) -> np.ndarray:
    """Return five numbers per channel of each window (n, time, channels), 30 numbers in all.

    The numbers are the mean, the standard deviation, the smallest and the largest value, and the
    mean absolute change between neighbouring samples.
    """
    parts = (x.mean(1), x.std(1), x.min(1), x.max(1), np.abs(np.diff(x, axis=1)).mean(1))
    return np.concatenate(parts, axis=1, dtype=np.float32)
