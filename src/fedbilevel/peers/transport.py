"""Transport of messages between peers, and a transport in memory with seeded faults.

A transport carries a header and a body to a peer and may lose, duplicate, delay or reorder
messages. It reports the true sender of every message and does not interpret messages.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Hashable
from itertools import count
from typing import Protocol

import torch

from fedbilevel.problem.draws import Stream

Take = Callable[[int, bytes, memoryview], None]  # sender, head, body
TICK = 0.2  # seconds between two calls of `tick`


class PeerTransport(Protocol):
    """Connection of one peer to all others."""

    def start(self, take: Take, tick: Callable[[], None]) -> None:
        """Start to listen.

        One thread calls `take` for every message and `tick` about every TICK seconds. Both
        functions must be fast and must not raise.
        """

    def send(self, to: int, head: bytes, body: bytes | memoryview = b"", *, newest: Hashable = None) -> None:
        """Send a message without waiting; any thread may call this method.

        The body must not change after the call.

        newest: mark of the message; the message replaces a queued message to the same peer with the
            same mark.
        """

    def quiet(self, peer: int) -> float:
        """Return the seconds since the last message from a peer, or since the start."""

    def refused(self) -> dict[str, int]:
        """Return the numbers of refused messages and connections, by reason."""

    def close(self) -> None:
        """Wait a few seconds for queued messages to be sent, then close the transport."""


class Faults:
    """Faults of a `MemoryNetwork`, drawn from (seed, sender, receiver, number of the message).

    loss: share of messages that are lost.
    doubled: share of messages that arrive twice.
    delay: longest delay of a message in seconds; every message has its own delay, so messages can
        overtake each other.
    """

    def __init__(self, *, loss: float = 0.0, doubled: float = 0.0, delay: float = 0.0, seed: int = 0) -> None:
        self.loss, self.doubled, self.delay, self._stream = loss, doubled, delay, Stream(seed)

    def delays(self, sender: int, receiver: int, number: int) -> list[float]:
        """Return the delay of every copy that arrives: none, one or two."""
        words = self._stream.bits(
            f"transport/{receiver}", torch.tensor([sender]), iteration=number, call=0, steps=range(1), width=4
        )
        lost, twice, first, second = (words[0, 0] / 2**32).tolist()
        copies = 0 if lost < self.loss else 2 if twice < self.doubled else 1
        return [self.delay * late for late in (first, second)[:copies]]


_Due = tuple[float, int, int, int, bytes, memoryview]  # when, order, sender, receiver, head, body


class MemoryNetwork:
    """Transports of several peers in one process, with one thread that carries all messages."""

    def __init__(self, num_peers: int, faults: Faults | None = None) -> None:
        self.num_peers, self.faults = num_peers, faults or Faults()
        self.gone: set[int] = set()  # as if killed: they neither send nor receive
        self.halted: set[int] = set()  # as if stopped: their messages wait
        self._changed = threading.Condition()
        self._due: list[_Due] = []
        self._kept: list[_Due] = []  # messages for halted peers, in order
        self._order = count()
        self._there: dict[int, MemoryTransport] = {}
        self._thread: threading.Thread | None = None

    def transport(self, peer: int) -> MemoryTransport:
        """Return a transport, which replaces an earlier one of the same peer after a restart."""
        return MemoryTransport(self, peer)

    def join(self, transport: MemoryTransport) -> None:
        with self._changed:
            self._there[transport.peer] = transport
            self.gone.discard(transport.peer)
            if self._thread is None:
                self._thread = threading.Thread(target=self._carry, name="memory network", daemon=True)
                self._thread.start()

    def leave(self, transport: MemoryTransport) -> None:
        with self._changed:
            if self._there.get(transport.peer) is transport:
                del self._there[transport.peer]
            self._changed.notify_all()

    def post(self, sender: int, receiver: int, head: bytes, body: bytes | memoryview, delays: list[float]) -> None:
        with self._changed:
            for delay in () if sender in self.gone else delays:
                heapq.heappush(
                    self._due,
                    (time.monotonic() + delay, next(self._order), sender, receiver, head, memoryview(bytes(body))),
                )
            self._changed.notify_all()

    def _carry(self) -> None:
        tick = time.monotonic()
        while True:
            with self._changed:
                now = time.monotonic()
                until = min([tick, *(entry[0] for entry in self._due[:1])])
                if until > now:
                    self._changed.wait(until - now)
                if not self._there:
                    self._thread = None
                    return
                now = time.monotonic()
                due, self._kept = self._kept, []
                while self._due and self._due[0][0] <= now:
                    due.append(heapq.heappop(self._due))
                ready: list[_Due] = []
                for entry in due:
                    (self._kept if entry[3] in self.halted else ready).append(entry)
                there = {peer: one for peer, one in self._there.items() if peer not in self.gone}
            for _, _, sender, receiver, head, body in ready:
                if receiver in there:
                    there[receiver].arrived(sender, head, body)
            if now >= tick:
                tick = now + TICK
                for peer, one in there.items():
                    if peer not in self.halted:
                        one.tick()


class MemoryTransport:
    """Transport of one peer in a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, peer: int) -> None:
        self.network, self.peer = network, peer
        self._numbers = [count(1) for _ in range(network.num_peers)]  # of messages, by receiver; thread-safe
        self._heard = [time.monotonic()] * network.num_peers

    def start(self, take: Take, tick: Callable[[], None]) -> None:
        self._take, self.tick = take, tick
        self._heard = [time.monotonic()] * self.network.num_peers
        self.network.join(self)

    def arrived(self, sender: int, head: bytes, body: memoryview) -> None:
        self._heard[sender] = time.monotonic()
        self._take(sender, head, body)

    def send(self, to: int, head: bytes, body: bytes | memoryview = b"", *, newest: Hashable = None) -> None:
        self.network.post(self.peer, to, head, body, self.network.faults.delays(self.peer, to, next(self._numbers[to])))

    def quiet(self, peer: int) -> float:
        return time.monotonic() - self._heard[peer]

    def refused(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.network.leave(self)


class Lossy:
    """Transport that drops a share of its messages, for experiments."""

    def __init__(self, transport: PeerTransport, me: int, num_peers: int, faults: Faults) -> None:
        self.transport, self.me, self.faults = transport, me, faults
        self._numbers = [count(1) for _ in range(num_peers)]
        self.start, self.quiet, self.refused, self.close = (
            transport.start,
            transport.quiet,
            transport.refused,
            transport.close,
        )

    def send(self, to: int, head: bytes, body: bytes | memoryview = b"", *, newest: Hashable = None) -> None:
        if self.faults.delays(self.me, to, next(self._numbers[to])):
            self.transport.send(to, head, body, newest=newest)
