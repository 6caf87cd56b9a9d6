"""Detection of suspensions of this process (SIGSTOP, a frozen container, a machine out of memory),
so that sites are not blamed for that time."""

from __future__ import annotations

import threading
import time
from types import TracebackType

_TICK = 0.2  # seconds
_LEAST = 1.0  # seconds between two ticks of a suspended process; a busy machine delays a thread by less


class Pulse:
    """A thread that ticks regularly. A late tick shows how long the process was suspended."""

    def __init__(self) -> None:
        self._lock, self._over = threading.Lock(), threading.Event()
        self._last, self._total = time.monotonic(), 0.0
        self._thread = threading.Thread(target=self._tick, name="pulse", daemon=True)

    def lost(self) -> float:
        """Return the seconds of suspension so far. The method reads the clock itself, because the
        caller may resume before the thread does."""
        with self._lock:
            now = time.monotonic()
            gap, self._last = now - self._last, now
            self._total += gap if gap > _LEAST else 0.0
            return self._total

    def awake(self) -> float:
        """Return the time of a clock that stops while the process is suspended."""
        return time.monotonic() - self.lost()

    def _tick(self) -> None:
        while not self._over.wait(_TICK):
            self.lost()

    def __enter__(self) -> Pulse:
        self._last = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
