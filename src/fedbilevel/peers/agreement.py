"""Agreement of the peers on the group that computes together.

**Formation.** A group starts when all of its peers have said `ready` with the same view. Two views
with a peer in common cannot both start, and a quorum of more than half lets only one part of a
split network start. A peer says `ready` once per view and repeats that message unchanged. In the
middle of an average, the remaining peers only have to agree about the group, not about other peers.

**Epoch.** Every formation has a higher epoch than the one before. Rows and sums of an earlier epoch
are ignored; those of a later epoch are kept until it starts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from fedbilevel.engines.engine import Regrouped
from fedbilevel.errors import PlanError, QuorumError
from fedbilevel.peers.formation import Formation, agreed, check_one_run, difference, mark
from fedbilevel.peers.membership import NEVER, Membership
from fedbilevel.peers.outbox import Outbox
from fedbilevel.peers.wire import Introduction, Packed, PeerMessage, Version, pack

LOOK = 0.5  # seconds after which a waiting thread checks all conditions again
_EMPTY = bytes(16)


class Agreement:
    """The current group, and the `ready` messages that lead to the next group.

    quorum: smallest number of peers in a group.
    continues: whether an average survives the loss of a peer (`reform`) and a new peer waits for
        the next outer iteration; if False, both events restart the outer iteration.
    beat: seconds between two repetitions of `ready`.
    changed: lock of the office.
    """

    def __init__(
        self,
        outbox: Outbox,
        membership: Membership,
        changed: threading.Condition,
        *,
        quorum: int,
        continues: bool,
        beat: float,
        say: Callable[[str], None],
    ) -> None:
        self.quorum, self.continues = quorum, continues
        self.formed: Formation | None = None
        self._outbox, self._membership, self._changed = outbox, membership, changed
        self._beat, self._say = beat, say
        self._formed_view: tuple[int, ...] = ()
        self._reformed = False  # the group has lost members since it started
        self._about: Introduction | None = None  # set while a group is being formed
        self._reforming = self._waited = False
        self._sent_ready: tuple[tuple[int, ...], Packed] | None = None  # the view, and the message sent for it
        self._readies: dict[int, PeerMessage] = {}  # the newest of every sender
        self._repeated: dict[int, float] = {}  # time of the last repeated `ready`, by receiver

    # ---- a new group -----------------------------------------------------------------------------

    def form(self, about: Introduction, *, deadline: float) -> Formation:
        """Start a group with all present peers.

        A new run needs all peers. A resumed run starts after `deadline` seconds with the peers that
        are present.
        """
        until = time.monotonic() + deadline
        with self._changed:
            self._membership.remove_left()
            if self.is_unchanged():
                self._membership.renew()  # `ready` is said once per view, so a second group needs another view
            self._about, self._waited = replace(about, epoch=self._outbox.epoch), False
            self._sent_ready = None
            try:
                while (formation := self._formed_now()) is None:
                    left = until - time.monotonic()
                    if left <= 0:
                        self._after_deadline(deadline)
                        until = time.monotonic() + deadline
                    self._changed.wait(max(0.0, min(left, LOOK)))
                return formation
            finally:
                self._about = None

    def _formed_now(self) -> Formation | None:
        assert self._about is not None
        self._membership.remove_left()
        self._say_ready(self._about, averaging=0)
        members = self._membership.present()
        unlike = self._unlike(members)
        if self.formed is None:
            if len(self._readies) == len(self._outbox.others):
                check_one_run(self._introductions(), self._membership.names, self.quorum)
            if unlike:
                self.repeat_ready()  # so that the other peer detects the difference too
                raise PlanError(unlike)
        if unlike or self._membership.unknown() or len(members) < self._needed(members):
            return None
        return self._begin(members) if self._all_ready(members) else None

    def _begin(self, members: Sequence[int]) -> Formation:
        introductions = {peer: one for peer, one in self._introductions().items() if peer in members}
        check_one_run(introductions, self._membership.names, self.quorum)
        iteration, changed = agreed(introductions)
        self._outbox.epoch = max(one.epoch for one in introductions.values()) + 1
        weights = tuple(introductions[peer].weight for peer in members)
        view = tuple(self._membership.view)
        # The incarnations in the view make the mark of a new run unique.
        run = max(one.mark for one in introductions.values()) if iteration >= 0 else mark(view)
        self.formed = Formation(tuple(members), weights, self._outbox.epoch, iteration, changed, run)
        self._formed_view, self._reformed = view, False
        return self.formed

    def _introductions(self) -> dict[int, Introduction]:
        """Return all introductions, including those of peers that have left.

        A peer may have left because its introduction differed.
        """
        assert self._about is not None
        received = {
            peer: one
            for peer, message in self._readies.items()
            if message.averaging == 0 and (one := message.introduction) is not None
        }
        return {**received, self._outbox.me: self._about}

    def _is_new_run(self, members: Sequence[int]) -> bool:
        """Return whether no present peer has ever started, so that all peers are needed."""
        received = [self._readies[peer].introduction for peer in members if peer in self._readies]
        return all(
            one.versions[0].iteration < 0 and one.epoch == 0 for one in (self._about, *received) if one is not None
        )

    def _needed(self, members: Sequence[int]) -> int:
        return len(self._membership.view) if self._is_new_run(members) else self.quorum

    def _has_same_view(self, peer: int) -> bool:
        return peer in self._readies and self._readies[peer].view == tuple(self._membership.view)

    def _all_ready(self, members: Sequence[int]) -> bool:
        others = [peer for peer in members if peer != self._outbox.me]
        return all(self._has_same_view(peer) and self._readies[peer].averaging == 0 for peer in others)

    def _unlike(self, members: Sequence[int]) -> str:
        """Name a peer that cannot take part, with the reason, or return an empty string.

        The mismatched peer detects the difference too and exits, so a group that has started before
        continues without that peer. At the first start, peers that are gone are also compared,
        because the difference may be the reason why they left.
        """
        assert self._about is not None
        for peer, message in self._readies.items():
            if message.introduction is None or message.averaging or (self.formed is not None and peer not in members):
                continue
            if what := difference(self._about, message.introduction):
                return f"{self._membership.names[peer]} has {what}."
        return ""

    def _after_deadline(self, deadline: float) -> None:
        """Raise if the present peers cannot start; otherwise mark unknown peers as gone."""
        members, total = self._membership.present(), len(self._membership.view)
        if unlike := self._unlike(members):
            raise PlanError(unlike)
        if self.formed is None:
            check_one_run(self._introductions(), self._membership.names, self.quorum)
        if len(members) < self._needed(members):
            wanted = f"all {total}" if self._is_new_run(members) else f"{self.quorum} of {total}"
            present = "1 peer is" if len(members) == 1 else f"{len(members)} peers are"
            missing = self._named(peer for peer in range(total) if peer not in members)
            raise QuorumError(
                f"{present} present after {deadline:g} s, {wanted} are needed; missing: {missing}: "
                "start them, then restart this peer."
            )
        silent = self._named(peer for peer in members if peer != self._outbox.me and not self._has_same_view(peer))
        if silent and not self._membership.unknown():
            if self._waited:
                raise QuorumError(
                    f"{silent} sends beats but was not ready within {2 * deadline:g} s: "
                    "read its log, and check that all peers reach each other."
                )
            self._waited = True
            self._say(f"still waiting for {silent} to be ready: check that it and this peer reach each other.")
        self._membership.remove_unknown()

    def _named(self, peers: Iterable[int]) -> str:
        return ", ".join(self._membership.names[peer] for peer in peers)

    # ---- the rest of a group ---------------------------------------------------------------------

    def reform(self) -> bool:
        """Agree during an average on the members that remain, and continue with them.

        Return whether a member had already finished this average, so that its value is final.
        """
        with self._changed:
            self._reforming = True
            try:
                while (over := self._reformed_now()) is None:
                    self._changed.wait(LOOK)
                return over
            finally:
                self._reforming = False

    def _reformed_now(self) -> bool | None:
        assert self.formed is not None
        out = self._outbox
        remaining = [peer for peer in self.formed.members if self._stayed(peer)]
        if len(remaining) < self.quorum:
            raise Regrouped
        weight = self.formed.weights[self.formed.members.index(out.me)]
        about = Introduction(weight, _EMPTY, _EMPTY, _EMPTY, out.epoch, 0, (Version(), Version()))
        self._say_ready(about, averaging=out.averaging)
        others = {
            peer: message
            for peer, message in self._readies.items()
            if peer in remaining and message.averaging and self._retains(message.view, remaining)
        }
        if self.called_back():
            raise Regrouped
        if not all(peer in others for peer in remaining if peer != out.me):
            return None
        latest = max([out.averaging, *(message.averaging for message in others.values())])
        epochs = [message.introduction.epoch for message in others.values() if message.introduction]
        out.epoch = max([out.epoch, *epochs]) + 1
        weight_of = dict(zip(self.formed.members, self.formed.weights, strict=True))
        weights = tuple(weight_of[peer] for peer in remaining)
        self.formed = replace(self.formed, members=tuple(remaining), weights=weights, epoch=out.epoch)
        self._formed_view, self._reformed = tuple(self._membership.view), True
        return latest > out.averaging

    def regrouped(self) -> bool:
        """Return whether the peers have changed so that this peer must act now."""
        with self._changed:
            if self.formed is None or not self.continues:
                return self.formed is not None and not self.is_unchanged()
            return not all(self._stayed(peer) for peer in self.formed.members) or self.called_back()

    def is_unchanged(self) -> bool:
        """Return whether the view is the same as at the start of the group."""
        return tuple(self._membership.view) == self._formed_view

    def newcomers(self) -> bool:
        """Return whether a peer outside the group waits to join."""
        return self.formed is not None and any(peer not in self.formed.members for peer in self._membership.present())

    def called_back(self) -> bool:
        """Return whether a member starts a new group or the others continued without this peer."""
        if self.formed is None:
            return False
        me = self._outbox.me
        if self._membership.view[me] != self._formed_view[me]:
            return True
        starting = [
            message
            for peer, message in self._readies.items()
            if peer in self.formed.members and message.averaging == 0 and self._stayed(peer)
        ]
        return any(sum(message.view) + self._reformed > sum(self._formed_view) for message in starting)

    def _stayed(self, peer: int) -> bool:
        """Return whether a member is still the process that the group started with.

        A restarted process has lost its part of the average.
        """
        return self._membership.alive(peer) and self._membership.view[peer] == self._formed_view[peer]

    def _retains(self, view: Sequence[int], members: Sequence[int]) -> bool:
        """Return whether exactly these members of the group remain in a view.

        Peers outside the group are ignored: some members may already know that a lost peer is back.
        """
        group = self.formed.members if self.formed is not None else ()
        return all((view[peer] == self._formed_view[peer]) == (peer in members) for peer in group)

    # ---- ready messages --------------------------------------------------------------------------

    def take_ready(self, sender: int, message: PeerMessage) -> None:
        """Store a `ready` message, and repeat this peer's own to a sender that still waits for it.

        The repetition is sent at most once per beat, because two started peers would otherwise
        answer each other forever.
        """
        self._readies[sender] = message
        if self.formed is None or self._about is not None or self._reforming:
            return
        if not self._retains(message.view, self.formed.members):
            return
        now = time.monotonic()
        if self._sent_ready is not None and now - self._repeated.get(sender, -self._beat) > self._beat:
            self._repeated[sender] = now
            self._outbox.transport.send(sender, *self._sent_ready[1])

    def forget(self, peer: int) -> None:
        """Drop the `ready` message of an earlier process of a peer."""
        self._readies.pop(peer, None)

    @property
    def negotiating(self) -> bool:
        """Whether a group is being formed or reformed and this peer has sent `ready`."""
        return (self._about is not None or self._reforming) and self._sent_ready is not None

    def repeat_ready(self) -> None:
        if self._sent_ready is not None:
            self._outbox.broadcast(self._sent_ready[1], newest="beat")

    def _say_ready(self, about: Introduction, *, averaging: int) -> None:
        """Send `ready` once per view."""
        if self._membership.view[self._outbox.me] == NEVER:
            raise PlanError(
                "another peer has banned this peer because its data do not fit: "
                "compare versions and data, then restart all peers."
            )
        view = tuple(self._membership.view)
        if self._sent_ready is None or self._sent_ready[0] != view:
            step = self._outbox.step
            message = self._outbox.message("ready", averaging=averaging, step=step, view=view, introduction=about)
            self._sent_ready = (view, pack(message))
            self.repeat_ready()
