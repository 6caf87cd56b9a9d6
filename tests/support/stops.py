"""Ctrl-C in the middle of a run, in the process of the test."""

from __future__ import annotations

import itertools
import signal
from typing import Any


def ctrl_c(monkeypatch: Any, kind: type[Any], *, at: int = 2) -> None:
    """Press Ctrl-C in one outer iteration of an algorithm, counted over all its runs."""
    plain, number = kind.round, itertools.count(1)

    def round(self: Any, fed: Any, state: Any) -> Any:
        if next(number) == at:
            signal.raise_signal(signal.SIGINT)
        return plain(self, fed, state)

    monkeypatch.setattr(kind, "round", round)
