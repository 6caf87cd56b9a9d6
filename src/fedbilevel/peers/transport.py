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

import torch

from fedbilevel.problem.draws import Stream

Take = Callable[[int, bytes, memoryview], None]  # sender, head, body
TICK = 0.2  # seconds between two calls of `tick`


class PeerTransport(Protocol):
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


class Faults:
    """What happens to messages of a `MemoryNetwork`, decided by (seed, sender, receiver, number of the message).

    loss, doubled: shares of messages. delay: up to so many seconds late, each its own, so that messages overtake each other.
    """

    def __init__(self, *, loss: float = 0.0, doubled: float = 0.0, delay: float = 0.0, seed: int = 0) -> None:
        self.loss, self.doubled, self.delay, self._stream = loss, doubled, delay, Stream(seed)

    def delays(self, sender: int, receiver: int, number: int) -> list[float]:
        """Of every copy that arrives: none, one or two."""
        words = self._stream.bits(
            f"transport/{receiver}", torch.tensor([sender]), iteration=number, call=0, steps=range(1), width=4
        )
        lost, twice, first, second = (words[0, 0] / 2**32).tolist()
        copies = 0 if lost < self.loss else 2 if twice < self.doubled else 1
        return [self.delay * late for late in (first, second)[:copies]]


_Due = tuple[float, int, int, int, bytes, memoryview]  # when, order, sender, receiver, head, body


class MemoryNetwork:
    """Transports of several peers in one process. A thread of its own carries the messages, as that of sockets does."""

    def __init__(self, num_peers: int, faults: Faults | None = None) -> None:
        self.num_peers, self.faults = num_peers, faults or Faults()
        self.gone: set[int] = set()  # as if their processes had been killed: nothing goes out of them or in
        self.halted: set[int] = set()  # as if stopped: what is for them waits
        self._changed = threading.Condition()
        self._due: list[_Due] = []
        self._kept: list[_Due] = []  # for those who are halted, in the order in which it is handed over later
        self._order = count()
        self._there: dict[int, MemoryTransport] = {}
        self._thread: threading.Thread | None = None

    def transport(self, peer: int) -> MemoryTransport:
        """A second one for the same peer takes the place of the first, as a process that was started again does."""
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
    def __init__(self, network: MemoryNetwork, peer: int) -> None:
        self.network, self.peer = network, peer
        self._numbers = [
            count(1) for _ in range(network.num_peers)
        ]  # of messages to everybody; two threads never get the same
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
    """A transport that does not send a share of what it is asked to, to try things out."""

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
