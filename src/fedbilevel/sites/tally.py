"""Counts of repeated refusals, written down after 1, 2, 4, 8, ... repetitions, so that repetitions
fill no disk.

Imports nothing heavy: the guard of FLARE's processes uses it, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Tally(Generic[Key]):
    """most: number of keys that are counted separately. others: the key for all further ones."""

    def __init__(self, most: int, others: Key) -> None:
        self._most, self._others = most, others
        self.counts: Counter[Key] = Counter()

    def add(self, key: Key) -> tuple[Key, int]:
        """Count one more; returns the key that it counts for, and its count."""
        if key not in self.counts and len(self.counts) >= self._most:
            key = self._others
        self.counts[key] += 1
        return key, self.counts[key]


def is_due(times: int) -> bool:
    """Whether the repetition with this number is written down: 1, 2, 4, 8, ..."""
    return times & (times - 1) == 0


def since_last(times: int) -> int:
    """Repetitions since the one that was written down before number `times`, which is due."""
    return max(1, times // 2)
