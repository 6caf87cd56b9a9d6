"""Queues of messages to peers, and a wake-up signal for the thread that sends them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable

from fedbilevel.peers.wire import Packed

BACKLOG = 256 << 20  # most bytes that wait for one peer; beyond this the oldest messages are dropped
_OVERHEAD = 512  # approximate bytes of a waiting message besides its content


class SendQueues:
    """Queues of messages, one per peer; any thread may call any method."""

    def __init__(self, peers: Iterable[int]) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, OrderedDict[Hashable, Packed]] = {peer: OrderedDict() for peer in peers}
        self._bytes: Counter[int] = Counter()  # in the queue, by peer
        self._closed = False

    def put(self, peer: int, message: Packed, mark: Hashable = None) -> int:
        """Add a message, and return the number of old messages that were dropped.

        A message with a mark replaces a queued message with the same mark and takes its position.
        """
        with self._lock:
            if self._closed:
                return 0
            waiting, key = self._waiting[peer], object() if mark is None else mark
            if (old := waiting.get(key)) is not None:
                self._bytes[peer] -= _weight(old)
            waiting[key] = message
            self._bytes[peer] += _weight(message)
            dropped = 0
            while self._bytes[peer] > BACKLOG and len(waiting) > 1:
                self._bytes[peer] -= _weight(waiting.popitem(last=False)[1])
                dropped += 1
            return dropped

    def drain(self, peer: int, send: Callable[[Packed], bool]) -> bool:
        """Send from the front until `send` returns False, and return whether messages remain."""
        waiting = self._waiting[peer]
        while True:
            with self._lock:  # also while sending, so that no newer message replaces the one being sent
                if not waiting:
                    return False
                key, message = next(iter(waiting.items()))
                if not send(message):
                    return True
                del waiting[key]
                self._bytes[peer] -= _weight(message)

    def close(self) -> None:
        """Accept no more messages."""
        with self._lock:
            self._closed = True

    def waiting(self, peer: int) -> list[Packed]:
        with self._lock:
            return list(self._waiting[peer].values())

    def num_bytes(self, peer: int) -> int:
        """Return the size of a queue in bytes, with an overhead per message."""
        return self._bytes[peer]

    def empty(self) -> bool:
        with self._lock:
            return not any(self._waiting.values())


class Waker:
    """Signal that wakes a thread polling `fileno()`.

    It is not a ZeroMQ socket, because any thread may send the signal.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending = False  # a byte is on its way: one is enough until it is read
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def fileno(self) -> int:
        return self._receiver.fileno()

    def wake(self) -> None:
        with self._lock:
            if not self._pending:
                self._pending = True
                with contextlib.suppress(OSError):  # closed, as the thread has ended
                    self._sender.send(b"\0")

    def clear(self) -> None:
        """Clear the signal; messages queued later wake the thread again."""
        with contextlib.suppress(BlockingIOError):
            self._receiver.recv(16)
        with self._lock:
            self._pending = False

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()


def size(body: bytes | memoryview) -> int:
    return body.nbytes if isinstance(body, memoryview) else len(body)


def _weight(message: Packed) -> int:
    return len(message[0]) + size(message[1]) + _OVERHEAD
