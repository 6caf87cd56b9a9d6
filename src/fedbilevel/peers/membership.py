"""Membership: the peers that are present, as far as one peer knows.

**View.** Every peer keeps one number per peer: 0 if it has never heard from that peer, an even
incarnation if the peer is present, the next odd number if the peer is gone, and the largest number
if the peer was banned. Every beat carries the view. Views are merged by taking the larger number,
so they only grow and finally agree.

**Silence.** A peer that is silent for longer than `suspect` seconds is gone. The transport's thread
sends the beats, so a peer that computes for a long time is not silent. A peer that is declared
gone, or whose process was restarted, takes a higher incarnation and is present again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from fedbilevel.peers.outbox import Outbox, next_incarnation
from fedbilevel.peers.refusals import Refusals
from fedbilevel.peers.wire import pack

NEVER = 2**64 - 1  # in a view: banned
_YEAR = 365 * 86_400_000  # milliseconds


class Membership:
    """The view, and the peers that left or were banned.

    The caller of any method holds the lock of the office.

    suspect: seconds of silence after which a peer is gone.
    beat: seconds between two beats.
    say: function that writes a log line.
    """

    def __init__(
        self,
        outbox: Outbox,
        names: Sequence[str],
        refusals: Refusals,
        *,
        suspect: float,
        beat: float,
        say: Callable[[str], None],
    ) -> None:
        self.names, self.suspect = names, suspect
        self._outbox, self._refusals, self._beat, self._say = outbox, refusals, beat, say
        self.view = [0] * len(names)
        self.view[outbox.me] = outbox.incarnation
        self.left: set[int] = set()  # peers that finished and left
        self.banned: set[int] = set()
        self.leaving = False
        self._since = [0.0] * len(names)  # time of the last change of the view, by peer
        self._last_tick = self._awake = time.monotonic()

    # ---- queries ---------------------------------------------------------------------------------

    def alive(self, peer: int) -> bool:
        return self.view[peer] > 0 and self.view[peer] % 2 == 0

    def present(self) -> list[int]:
        return [peer for peer in range(len(self.view)) if self.alive(peer)]

    def unknown(self) -> list[int]:
        return [peer for peer, status in enumerate(self.view) if status == 0]

    def alone(self) -> bool:
        """Return whether every other peer has left or is gone."""
        return all(peer in self.left or not self.alive(peer) for peer in self._outbox.others)

    # ---- changes ---------------------------------------------------------------------------------

    def merge(self, view: Sequence[int]) -> list[int]:
        """Adopt the larger numbers of a view, and return the peers with a new process."""
        renewed = []
        for peer, status in enumerate(view):
            if status <= self.view[peer]:
                continue
            if peer == self._outbox.me:
                self._merge_own(status)
                continue
            if status % 2 and self.alive(peer):
                self._say(f"{self.names[peer]} is gone, according to another peer.")
            elif status % 2 == 0 and self.view[peer]:
                self._say(f"{self.names[peer]} is back.")
            self.view[peer] = status
            self._since[peer] = time.monotonic()
            if status % 2 == 0:
                renewed.append(peer)
            self.left.discard(peer)
        return renewed

    def _merge_own(self, status: int) -> None:
        """Record a ban of this peer, or take an incarnation above `status`.

        Another peer has declared this peer gone, or remembers a process with a later clock.
        """
        if status == NEVER:
            self.view[self._outbox.me] = status
        elif not self.leaving:
            self.renew(status)

    def renew(self, above: int | None = None) -> None:
        """Take a new incarnation above the given one, by default above the present one."""
        above = self._outbox.incarnation if above is None else above
        self._outbox.incarnation = self.view[self._outbox.me] = next_incarnation(above)
        self._say("this peer rejoins as a new process.")

    def remove_left(self) -> None:
        """Mark the peers that left as gone, because no group can start with them."""
        for peer in self.left:
            self.view[peer] += self.alive(peer)
        self.left.clear()

    def remove_unknown(self) -> None:
        for peer in self.unknown():
            self.view[peer] = 1

    def leave(self) -> None:
        """Declare this peer gone."""
        self.view[self._outbox.me] = self._outbox.incarnation + 1

    def ban(self, peer: int, why: str) -> None:
        """Mark a peer that sends unusable data as gone permanently and for all peers.

        Otherwise the other peers would readmit the banned peer and then wait for this peer.
        """
        self.banned.add(peer)
        self.refuse(peer, "misfit", f"it {why}.")
        self.view[peer] = NEVER

    def refuse(self, sender: int, reason: str, why: str) -> None:
        self._refusals.add(reason, f"a message of {self.names[sender]} was refused: {why}")

    # ---- beats -----------------------------------------------------------------------------------

    def wake(self) -> None:
        """Start to listen, so that earlier silence does not count."""
        self._awake = self._last_tick = time.monotonic()

    def suspect_silent(self, now: float) -> bool:
        """Mark silent peers as gone, and return whether the view changed."""
        if now - self._last_tick > min(1.0 + self._beat, self.suspect / 2):
            self._awake = now  # this process was stopped: it must read waiting messages before it suspects a peer
        self._last_tick = now
        silent = [peer for peer in self._outbox.others if self._is_silent(peer, now)]
        for peer in silent:
            self.view[peer] += 1
            self._say(f"{self.names[peer]} is gone: no message for {self.suspect:g} s.")
        return bool(silent)

    def _is_silent(self, peer: int, now: float) -> bool:
        if not self.alive(peer) or peer in self.left:
            return False
        quiet = self._outbox.transport.quiet(peer)
        return min(quiet, now - self._awake, now - self._since[peer]) > self.suspect

    def broadcast(self, kind: Literal["beat", "bye"]) -> None:
        out = self._outbox
        message = out.message(kind, averaging=out.averaging, step=out.step, view=tuple(self.view))
        out.broadcast(pack(message), newest=kind)


def is_plausible(view: Sequence[int]) -> bool:
    """Return whether no incarnation, which is a clock time, is later than a year from now."""
    latest = time.time_ns() // 1_000_000 + _YEAR
    return all(status <= latest or status == NEVER for status in view)
