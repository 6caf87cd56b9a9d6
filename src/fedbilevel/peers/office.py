"""Office of one peer: parses messages and passes them to Membership, Agreement and Exchange.

A message changes the state only after it was parsed completely, its sender is in the view with the
same incarnation, and it belongs to this run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from fedbilevel.errors import WireError
from fedbilevel.peers.agreement import Agreement
from fedbilevel.peers.exchange import Exchange
from fedbilevel.peers.formation import Formation
from fedbilevel.peers.membership import Membership, is_plausible
from fedbilevel.peers.outbox import Outbox
from fedbilevel.peers.refusals import Refusals
from fedbilevel.peers.transport import PeerTransport
from fedbilevel.peers.wire import MOST, Introduction, PeerMessage, unpack

_GOODBYES = 5  # beats with `bye` after the end: a peer that misses all of them would restart the outer iteration


class Office:
    """Connection between a transport and the three parts of a peer's state.

    membership: the peers that are present.
    agreement: the group of peers that compute together.
    exchange: the data that the peers send.
    quorum, continues: settings of `Agreement`.
    suspect, beat: settings of `Membership`.
    names: names of the peers for log lines.
    """

    def __init__(
        self,
        transport: PeerTransport,
        me: int,
        names: Sequence[str],
        run: str,
        *,
        quorum: int,
        continues: bool = False,
        suspect: float = 10.0,
        beat: float = 0.5,
        max_bytes: int = MOST,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        # One lock for all parts: a message changes the view and the data together, and a thread that
        # waits for data must also wake when the view changes.
        self._changed = threading.Condition()
        self.transport, self.me, self.beat = transport, me, beat
        self.num_peers, self.max_bytes = len(names), max_bytes
        self.interrupted = False  # set before the block of `opened` ends: this peer has not finished
        self.refusals = Refusals(say)
        self.outbox = Outbox(transport, me, len(names), run)
        self.membership = Membership(self.outbox, names, self.refusals, suspect=suspect, beat=beat, say=say)
        self.agreement = Agreement(
            self.outbox, self.membership, self._changed, quorum=quorum, continues=continues, beat=beat, say=say
        )
        self.exchange = Exchange(self.outbox, self.membership, self.agreement, self._changed)
        self._last_beat = time.monotonic()

    @contextmanager
    def opened(self) -> Iterator[Office]:
        """Listen until the block ends, then leave; after an error or interrupt, leave as gone."""
        self.open()
        done = False
        try:
            yield self
            done = True
        finally:
            self.leave(finished=done and not self.interrupted)

    def open(self) -> None:
        self.membership.wake()
        self.transport.start(self._take, self._tick)

    def leave(self, *, finished: bool) -> None:
        """Send a goodbye; if finished, repeat it for a while or until all other peers have left."""
        with self._changed:
            self.membership.leaving = True
            if not finished:
                self.membership.leave()
                self.membership.broadcast("beat")
            for _ in range(_GOODBYES * finished):
                self.membership.broadcast("bye")
                if self._changed.wait_for(self.membership.alone, self.beat):
                    break
        self.transport.close()

    def form(self, about: Introduction, *, deadline: float) -> Formation:
        """Agree on a group and start its epoch."""
        with self._changed:
            formation = self.agreement.form(about, deadline=deadline)
            self.exchange.restart(formation)
            return formation

    # ---- calls by the transport's thread ---------------------------------------------------------

    def _take(self, sender: int, head: bytes, body: memoryview) -> None:
        try:
            message = unpack(head, body, num_peers=self.num_peers, max_bytes=self.max_bytes)
        except WireError as error:
            self.membership.refuse(sender, "malformed", str(error))
            return
        with self._changed:
            view, refuse = self.membership.view, self.membership.refuse
            if message.run != self.outbox.run:
                refuse(sender, "another run", "it belongs to another run.")
            elif sender in self.membership.banned:
                refuse(sender, "banned", "its sender was banned for data that do not fit.")
            elif sender == self.me or message.incarnation % 2 or message.incarnation < view[sender]:
                self.refusals.add("outdated")  # from an earlier process, or sent before its sender rejoined
            elif message.view and message.view[sender] not in (message.incarnation, message.incarnation + 1):
                refuse(sender, "malformed", "its view and its head disagree about its sender.")
            elif not is_plausible(message.view):
                refuse(sender, "malformed", "it is of a time more than a year from now: compare the clocks.")
            else:
                self._accept(sender, message)
            self._changed.notify_all()

    def _accept(self, sender: int, message: PeerMessage) -> None:
        if message.view:
            for peer in self.membership.merge(message.view):
                self.agreement.forget(peer)
                self.exchange.forget(peer)
            self.exchange.note_progress(sender, message)
        elif message.incarnation > self.membership.view[sender]:
            return  # the next beat of this new process will introduce it
        match message.kind:
            case "beat":
                pass
            case "bye":
                self.membership.left.add(sender)
            case "ready":
                self.agreement.take_ready(sender, message)
            case "data" | "status" | "want":
                self.exchange.take(sender, message)

    def _tick(self) -> None:
        now = time.monotonic()
        with self._changed:
            if self.membership.suspect_silent(now):
                self._changed.notify_all()
            if now - self._last_beat < self.beat:
                return
            self._last_beat = now
            if self.agreement.negotiating:
                self.agreement.repeat_ready()
            else:
                self.membership.broadcast("beat")
