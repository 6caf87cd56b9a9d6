"""What carries messages. An engine for real federations is something with an `exchange`; no algorithm and no site knows which."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol


class Reply(NamedTuple):
    content: bytes
    seconds: float


class Failure(NamedTuple):
    silent: bool  # no answer within the deadline, or not to be reached; else it answered with an error
    reason: str  # one sentence
    seconds: float
    wait: bool = False  # it waits for its operator, and will answer later


class Transport(Protocol):
    sites: Sequence[str]  # names of those that can be reached in principle, sorted

    def exchange(
        self, messages: Mapping[str, bytes], *, deadline: float
    ) -> tuple[dict[str, Reply], dict[str, Failure]]:
        """Send each site its message and wait for the answers, `deadline` seconds at most. Both in the order of names."""

    def stop_asked(self) -> bool:
        """Whether somebody wants the run to end after this outer iteration."""

    def strangers(self) -> dict[str, dict[str, int]]:
        """Senders whose messages were refused on the way since the last question: how often, by where and by name."""


class InProcess:
    """Sites as functions in this process, one after the other: to learn, and to test without an engine."""

    def __init__(self, sites: Mapping[str, Callable[[bytes], bytes]]) -> None:
        self.sites: Sequence[str] = sorted(sites)
        self._handle = dict(sites)

    def exchange(
        self, messages: Mapping[str, bytes], *, deadline: float
    ) -> tuple[dict[str, Reply], dict[str, Failure]]:
        replies = {}
        for name in sorted(messages):
            start = time.perf_counter()
            replies[name] = Reply(self._handle[name](messages[name]), time.perf_counter() - start)
        return replies, {}

    def stop_asked(self) -> bool:
        return False

    def strangers(self) -> dict[str, dict[str, int]]:
        return {}
