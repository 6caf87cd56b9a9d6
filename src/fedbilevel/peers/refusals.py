"""Counts of refused messages and connections, with a log of limited size."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

_PAUSE = 1.0  # seconds between two log lines with the same reason


class Refusals:
    """Counts of refusals by reason, with at most one log line per reason and second."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self.log = log
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._logged: dict[str, float] = {}  # time of the last line, by reason

    def add(self, reason: str, line: str = "", *, times: int = 1) -> None:
        """Count a refusal, and log it if a line is given."""
        with self._lock:
            self.counts[reason] += times
            now = time.monotonic()
            logs = bool(line) and now - self._logged.get(reason, -_PAUSE) >= _PAUSE
            if logs:
                self._logged[reason] = now
        if logs:
            self.log(line)

    def as_dict(self) -> dict[str, int]:
        with self._lock:
            return dict(self.counts)
