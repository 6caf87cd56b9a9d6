"""Counts of repeated refusals, logged after 1, 2, 4, 8, ... repetitions, so that repetitions cannot
fill a disk.

The module imports nothing heavy, because the guard of FLARE's processes uses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Tally(Generic[Key]):
    """Counts keys, up to a maximal number of separate keys.

    most: number of keys that are counted separately.
    others: the key under which all further keys are counted.
    """

    def __init__(self, most: int, others: Key) -> None:
        self._most, self._others = most, others
        self.counts: Counter[Key] = Counter()

    def add(self, key: Key) -> tuple[Key, int]:
        """Count a key once more, and return the key under which it is counted and the new count."""
        if key not in self.counts and len(self.counts) >= self._most:
            key = self._others
        self.counts[key] += 1
        return key, self.counts[key]


def is_due(times: int) -> bool:
    """Check whether the repetition with this number is logged: 1, 2, 4, 8, ..."""
    return times & (times - 1) == 0


def since_last(times: int) -> int:
    """Return the number of repetitions since the previous logged one, for a repetition that is
    due."""
    return max(1, times // 2)
