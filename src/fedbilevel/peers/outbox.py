"""Outgoing messages of one peer, with the header fields that its messages share."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Hashable
from typing import Any

from fedbilevel.peers.transport import PeerTransport
from fedbilevel.peers.wire import Kind, Packed, PeerMessage, pack


class Outbox:
    """Builder and sender of messages, whose headers name the sending process and its progress.

    Membership writes `incarnation`, Agreement writes `epoch`, and Exchange writes `finished`,
    `averaging` and `step`. These fields are stored here because every message carries them.
    """

    def __init__(self, transport: PeerTransport, me: int, num_peers: int, run: str) -> None:
        self.transport, self.me = transport, me
        self.others = [peer for peer in range(num_peers) if peer != me]
        self.run = hashlib.blake2b(run.encode(), digest_size=16).digest()
        self.incarnation = next_incarnation()
        self.epoch = self.finished = self.step = 0
        self.averaging = 1  # the current averaging, or the next one

    def message(self, kind: Kind, **parts: Any) -> PeerMessage:
        fields = {"epoch": self.epoch, "finished": self.finished, **parts}
        return PeerMessage(kind, self.run, self.incarnation, **fields)

    def send(self, to: int, kind: Kind, *, newest: Hashable = None, **parts: Any) -> None:
        self.transport.send(to, *pack(self.message(kind, **parts)), newest=newest)

    def broadcast(self, packed: Packed, newest: Hashable) -> None:
        for peer in self.others:
            self.transport.send(peer, *packed, newest=newest)


def next_incarnation(above: int = 0) -> int:
    """Return an even number from the clock that is larger than `above`."""
    number = max(above + 1, time.time_ns() // 1_000_000)
    return number + number % 2
