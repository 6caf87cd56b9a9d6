"""Transport of messages between a server and its sites. Algorithms and sites do not depend on the
kind of transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol


class Reply(NamedTuple):
    content: bytes
    seconds: float


class Failure(NamedTuple):
    silent: bool  # True: no answer within the deadline, or unreachable. False: it answered with an error
    reason: str  # one sentence
    seconds: float
    wait: bool = False  # it waits for its operator, and will answer later


class SiteTransport(Protocol):
    """Carries bytes from the server to its sites and back."""

    sites: Sequence[str]  # names of the sites that can be reached in principle, sorted

    def exchange(
        self, messages: Mapping[str, bytes], *, deadline: float
    ) -> tuple[dict[str, Reply], dict[str, Failure]]:
        """Send each site its message and wait up to `deadline` seconds for the answers. Return
        replies and failures, both in the order of names."""

    def stop_asked(self) -> bool:
        """Check whether the run should end after this outer iteration."""

    def strangers(self) -> dict[str, dict[str, int]]:
        """Return how often senders were refused in transit since the last call, by place and by
        name of the sender."""


class InProcess:
    """Sites as functions in this process, which are called one after the other, for learning and
    for tests without FLARE."""

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
