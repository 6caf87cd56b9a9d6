"""How messages get from peer to peer, and one way that needs no network: all peers in one process, with faults that a seed decides.

A transport carries a head and a body to a peer by number and may lose, double, delay or reorder them. It says who really sent what arrives; what a message
means is not its affair.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Hashable
from itertools import count
from typing import Protocol

from fedbilevel.draws import Stream

Take = Callable[[int, bytes, memoryview], None]  # sender, head, body
TICK = 0.2  # seconds between two calls of `tick`


class Transport(Protocol):
    def start(self, take: Take, tick: Callable[[], None]) -> None:
        """Begin to listen. One thread calls `take` for every message and `tick` every TICK seconds or so; both are quick, and neither raises."""

    def send(self, to: int, head: bytes, body: bytes | memoryview = b"", *, newest: Hashable = None) -> None:
        """Never waits, and may be called by any thread. `newest`: takes the place of an earlier message to the same peer with the same mark that has not
        left yet. The body must not change afterwards."""

    def quiet(self, peer: int) -> float:
        """Seconds since anything arrived from that peer, or since the start."""

    def refused(self) -> dict[str, int]:
        """How many messages or connections were turned away, by reason."""

    def close(self) -> None:
        """Give what was sent a few seconds to leave, then end."""
