"""Exchange between the members of a group: rows of synchronous steps, and sums of robust averages.

A row that does not arrive is requested again. The newest running sums of a sender replace its
earlier sums, so lost sums are not sent again.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedbilevel.engines.engine import Regrouped
from fedbilevel.peers.agreement import LOOK, Agreement
from fedbilevel.peers.formation import Formation
from fedbilevel.peers.membership import Membership
from fedbilevel.peers.outbox import Outbox
from fedbilevel.peers.wire import Packed, PeerMessage, pack

_HISTORY, _HISTORY_BYTES = 256, 2**28  # limits of the rows that can be sent again
_AGAIN = 0.3  # seconds before a missing row is requested again; doubles with every request
_AHEAD = 256  # steps that a sender may be ahead; later rows are dropped and requested again


class ReceivedSums(NamedTuple):
    """Running sums of one edge in a robust average."""

    sender: int
    number: int
    total: np.ndarray


class AveragingStatus(NamedTuple):
    """Progress of a robust average at one peer.

    got: numbers of the newest messages from every peer.
    settled: numbers of this peer's messages to every peer when its value settled.
    sketch: sketch of that value.
    """

    got: np.ndarray
    settled: np.ndarray
    sketch: np.ndarray


class PeerProgress(NamedTuple):
    """Progress of another peer, from the header of its newest beat."""

    epoch: int = 0
    finished: int = 0
    averaging: int = 0
    step: int = 0


class Exchange:
    """Data of the other peers, and rows of this peer that may have to be sent again.

    changed: lock of the office; the callers of `restart`, `forget`, `note_progress` and `take` hold
        it, and the other methods acquire it.
    """

    def __init__(
        self, outbox: Outbox, membership: Membership, agreement: Agreement, changed: threading.Condition
    ) -> None:
        self._outbox, self._membership, self._agreement, self._changed = outbox, membership, agreement, changed
        self._progress: dict[int, PeerProgress] = {}  # of other peers, from their beats
        self._rows: dict[tuple[int, int], dict[int, PeerMessage]] = {}  # by epoch and step, by sender
        self._awaited = 0  # the next step whose rows are wanted
        self._history: OrderedDict[tuple[int, int], Packed] = OrderedDict()  # own rows, by epoch and step
        self._history_bytes = 0
        self._sums: dict[int, PeerMessage] = {}  # the newest of every sender
        self._statuses: dict[int, PeerMessage] = {}  # the newest of every sender
        self._news = 0  # sums that arrived since the last `new_sums`

    def restart(self, formation: Formation) -> None:
        """Begin a new epoch."""
        out = self._outbox
        out.finished, out.step, out.averaging = max(formation.iteration, 0), 0, 1
        self._awaited = self._history_bytes = 0
        self._history.clear()
        self._rows = {key: rows for key, rows in self._rows.items() if key[0] >= formation.epoch}

    def forget(self, peer: int) -> None:
        """Drop the messages of an earlier process of a peer.

        The epoch of that process may have had the same number.
        """
        for book in (self._progress, self._sums, self._statuses):
            book.pop(peer, None)
        for rows in self._rows.values():
            rows.pop(peer, None)

    # ---- outer iterations ------------------------------------------------------------------------

    def announce(self, finished: int) -> None:
        """Inform the others how many outer iterations are finished and stored here."""
        with self._changed:
            self._outbox.finished = finished
            self._membership.broadcast("beat")

    def wait_until_finished(self, iteration: int, stop: Callable[[], bool]) -> None:
        """Wait until all members have finished an outer iteration, or `stop` returns True.

        No member is ever more than one outer iteration ahead, so two stored states are enough.
        """
        with self._changed:
            while not all(self._has_finished(peer, iteration) for peer in self._other_members()):
                if stop():
                    return
                self._changed.wait(LOOK)

    def _has_finished(self, peer: int, iteration: int) -> bool:
        return peer in self._membership.left or self._progress_of(peer)[:2] >= (self._outbox.epoch, iteration)

    def _progress_of(self, peer: int) -> PeerProgress:
        return self._progress.get(peer, PeerProgress())

    def _other_members(self) -> list[int]:
        formed = self._agreement.formed
        return [] if formed is None else [peer for peer in formed.members if peer != self._outbox.me]

    # ---- rows of one step ------------------------------------------------------------------------

    def send_row(self, step: int, row: np.ndarray, weight: float, receivers: Sequence[int]) -> None:
        packed = pack(self._outbox.message("data", step=step, weight=weight, array=row))
        with self._changed:
            self._history[self._outbox.epoch, step] = packed
            self._history_bytes += len(packed[1])
            while len(self._history) > _HISTORY or (self._history_bytes > _HISTORY_BYTES and len(self._history) > 2):
                self._history_bytes -= len(self._history.popitem(last=False)[1][1])
            self._outbox.step = step + 1
        for receiver in receivers:
            self._outbox.transport.send(receiver, *packed)

    def rows(
        self,
        step: int,
        senders: Sequence[int],
        like: np.ndarray,
        is_valid: Callable[[np.ndarray], bool] = lambda row: True,
    ) -> dict[int, tuple[np.ndarray, float]]:
        """Wait for and return the row and weight of every sender.

        like: array with the expected shape and type of a row.
        is_valid: further check of a row of that shape and type.
        """
        key, pause = (self._outbox.epoch, step), _AGAIN
        ask = time.monotonic() + pause
        with self._changed:
            while True:
                if self._agreement.regrouped():
                    raise Regrouped
                found = self._fitting(self._rows.get(key, {}), like, is_valid)
                missing = [sender for sender in senders if sender not in found]
                if not missing:
                    break
                if time.monotonic() > ask:
                    pause = 2 * pause
                    ask = time.monotonic() + pause
                    self._request(step, missing)
                self._changed.wait(_AGAIN)
            self._awaited = step + 1
            self._rows = {later: rows for later, rows in self._rows.items() if later > key}
            return {sender: (one.array, one.weight) for sender, one in found.items() if one.array is not None}

    def _fitting(
        self, found: dict[int, PeerMessage], like: np.ndarray, is_valid: Callable[[np.ndarray], bool]
    ) -> dict[int, PeerMessage]:
        """Remove rows whose shape or type differs from `like` or that are not valid, and ban their senders."""
        for sender, message in list(found.items()):
            array = message.array
            assert array is not None
            if array.shape != like.shape or array.dtype != like.dtype.newbyteorder("<"):
                del found[sender]
                sent = f"{array.size} entries of {array.dtype}"
                self._membership.ban(sender, f"sends {sent} where {like.size} of {like.dtype} are expected")
            elif not is_valid(array):
                del found[sender]
                self._membership.ban(sender, "sends compressed rows that hold NaN, infinity or places outside the row")
        return found

    def _request(self, step: int, senders: Sequence[int]) -> None:
        """Request a row from the senders that have passed its step and so must have sent it."""
        for sender in senders:
            progress = self._progress_of(sender)
            if (progress.epoch, progress.step) > (self._outbox.epoch, step):
                self._outbox.send(sender, "want", step=step)

    # ---- robust averaging ------------------------------------------------------------------------

    def send_sums(self, receiver: int, number: int, total: np.ndarray) -> None:
        averaging = self._outbox.averaging
        self._outbox.send(receiver, "data", averaging=averaging, step=number, array=total, newest="sums")

    def send_status(self, number: int, status: AveragingStatus) -> None:
        message = self._outbox.message(
            "status",
            averaging=self._outbox.averaging,
            step=number,
            numbers=(status.got, status.settled),
            sketch=status.sketch,
        )
        packed = pack(message)
        for peer in self._other_members():
            self._outbox.transport.send(peer, *packed, newest="status")

    def new_sums(self, width: int) -> list[ReceivedSums]:
        """Return the newest sums of every sender in this average, each only once."""
        with self._changed:
            found, now = [], self._now()
            for sender, message in list(self._sums.items()):
                if _averaging_of(message) > now:
                    continue
                del self._sums[sender]
                if _averaging_of(message) != now or message.array is None:
                    continue
                if message.array.shape != (width,) or message.array.dtype != np.dtype("<f8"):
                    sent = f"{message.array.size} running sums"
                    self._membership.ban(sender, f"sends {sent} where {width} are expected")
                    continue
                found.append(ReceivedSums(sender, message.step, message.array))
            self._news = 0
            return sorted(found, key=lambda sums: sums.sender)

    def statuses(self) -> dict[int, AveragingStatus]:
        """Return the status of every peer that takes part in this average."""
        with self._changed:
            return {
                peer: AveragingStatus(*one.numbers, one.sketch)
                for peer, one in self._statuses.items()
                if _averaging_of(one) == self._now() and one.numbers is not None and one.sketch is not None
            }

    def overtaken(self) -> bool:
        """Return whether a member has started the next average, so that this average is over."""
        with self._changed:
            epoch, averaging = self._now()
            reached = [_averaging_of(one) for one in (*self._sums.values(), *self._statuses.values())]
            # No member can be farther ahead than the next averaging.
            reached += [(one.epoch, one.averaging) for one in self._progress.values()]
            return (epoch, averaging + 1) in reached

    def next_averaging(self) -> None:
        """End this average at this peer, which ends it for all members."""
        with self._changed:
            self._outbox.averaging += 1
            self._membership.broadcast("beat")

    def wait_for_news(self, seconds: float, many: int) -> None:
        """Wait until `many` sums have arrived, `seconds` have passed, or the group has changed."""
        until = time.monotonic() + seconds
        with self._changed:
            while self._news < many and (left := until - time.monotonic()) > 0 and not self._agreement.regrouped():
                self._changed.wait(left)

    def _now(self) -> tuple[int, int]:
        return self._outbox.epoch, self._outbox.averaging

    # ---- received messages -----------------------------------------------------------------------

    def note_progress(self, sender: int, message: PeerMessage) -> None:
        progress = PeerProgress(message.epoch, message.finished, message.averaging, message.step)
        self._progress[sender] = max(self._progress_of(sender), progress)

    def take(self, sender: int, message: PeerMessage) -> None:
        """Store or answer a message of the kind "data", "status" or "want"."""
        epoch, averaging = self._now()
        if message.kind == "want":
            self._send_again(sender, message)
        elif message.kind == "data" and message.averaging == 0:
            self._take_row(sender, message)
        elif message.epoch == epoch and message.averaging > averaging + 1:
            self._membership.refuse(sender, "ahead", "it is of an average that cannot have begun.")
        elif message.kind == "data":
            before = self._sums.get(sender)
            if before is None or _order(before) < _order(message):
                self._sums[sender] = message
                self._news += 1
        else:
            before = self._statuses.get(sender)
            if before is None or _order(before) <= _order(message):
                self._statuses[sender] = message

    def _take_row(self, sender: int, message: PeerMessage) -> None:
        """Store a row of this epoch, or of the latest epoch of its sender.

        Rows of earlier epochs are obsolete.
        """
        when, epoch = (message.epoch, message.step), self._outbox.epoch
        ahead = _AHEAD + (self._outbox.step if message.epoch == epoch else 0)
        if when < (epoch, self._awaited) or message.step >= ahead:
            return
        latest = max((number for (number, _), rows in self._rows.items() if sender in rows), default=0)
        if message.epoch < latest:
            return
        if message.epoch > latest > epoch:
            for (number, _), rows in self._rows.items():
                if number == latest:
                    rows.pop(sender, None)
        self._rows.setdefault(when, {})[sender] = message

    def _send_again(self, sender: int, message: PeerMessage) -> None:
        if message.epoch != self._outbox.epoch or message.step >= self._outbox.step:
            return
        packed = self._history.get((message.epoch, message.step))
        if packed is not None:
            self._outbox.transport.send(sender, *packed)
        elif self._agreement.is_unchanged():
            self._membership.renew()  # the row is too old: restart the outer iteration with all peers, once


def _averaging_of(message: PeerMessage) -> tuple[int, int]:
    return message.epoch, message.averaging


def _order(message: PeerMessage) -> tuple[int, int, int]:
    return message.epoch, message.averaging, message.step
