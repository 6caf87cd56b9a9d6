"""Time limit of a check, and its progress on a terminal."""

from __future__ import annotations

import sys
import time

_SILENT = 2.0  # seconds before progress is shown
_BETWEEN = 0.5  # seconds between two lines


class OutOfTime(Exception):
    """The seconds of a check are spent."""


class Clock:
    """Counter of seconds, which an oracle calls before every evaluation.

    seconds: the limit; None means no limit. It counts processor time of this thread, so that other
        work on the machine does not change which checks are done.
    """

    def __init__(self, label: str, seconds: float | None) -> None:
        self.label, self.seconds, self.doing = label, seconds, ""
        self.start, self.begun = time.monotonic(), time.thread_time()
        self._shown = self.start + _SILENT - _BETWEEN
        self._is_terminal = sys.stderr.isatty()

    def __call__(self) -> None:
        now, spent = time.monotonic(), time.thread_time() - self.begun
        if self.seconds is not None and spent > self.seconds:
            raise OutOfTime
        if self._is_terminal and now - self._shown > _BETWEEN:
            self._shown = now
            limit = "" if self.seconds is None else f" of at most {self.seconds:g}"
            print(f"\r{self.label}: {self.doing}, {now - self.start:.0f} s{limit} \x1b[K", end="", file=sys.stderr)

    def clear(self) -> None:
        """Remove the line of progress."""
        if self._is_terminal and self._shown >= self.start + _SILENT:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
