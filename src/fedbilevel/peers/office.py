"""One peer's desk: who is there, who is gone, what arrived, and when all may begin.

**View.** Everybody keeps one number per peer: 0 for one never heard of, an even incarnation for one that is there, one more for one that is gone, and the
largest there is for one that sent what does not fit. Views travel with every beat and are merged by taking the larger number, so that they only grow and all
come to agree. Whoever is silent for longer than `suspect` seconds is gone; beats are sent by the thread of the transport, so a peer that computes for long is
not silent. One that finds itself gone, or whose process was started again, takes a higher incarnation and is there again.

**Formation.** A group begins when all of its peers have said `ready` with the same view. More than one view cannot begin with peers in common, and a quorum
of more than half lets only one of several parts of a broken network begin. What is said with `ready` for a view is said once and repeated as it was. In the
middle of an average, those who are left must agree about the group only, not about who else came and went.

**Epoch.** Every formation has a higher one. Rows and sums of another epoch than the present one are left alone, or kept until it begins.

Nothing that arrives changes anything before it was parsed whole, its sender is in the view with that incarnation, and it belongs to this run.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fedbilevel.engines.engine import Regrouped
from fedbilevel.errors import PlanError, QuorumError, WireError
from fedbilevel.peers.transport import Transport
from fedbilevel.peers.wire import MOST, Introduction, Letter, Version, pack, unpack

_HISTORY, _HISTORY_BYTES = 256, 2**28  # rows that can be sent again
_AGAIN = 0.3  # seconds after which a row that must have been sent is asked for again; twice as many the next time
_AHEAD = 256  # steps that a peer may be ahead of this one; what it sends beyond is asked for again
_LOOK = 0.5  # seconds between looks at what else happened
_GOODBYES = (
    5  # beats for which one that has finished says so: who misses it would think that it is gone, and begin again
)
_NEVER = 2**64 - 1  # in a view: turned away for good


class Sums(NamedTuple):
    """Running sums of one edge in a robust averaging."""

    sender: int
    number: int
    total: np.ndarray


class Status(NamedTuple):
    """How far a robust averaging is at a peer: numbers of the newest messages it has of everybody, numbers of its messages to everybody when its value
    settled, and a sketch of that value."""

    got: np.ndarray
    settled: np.ndarray
    sketch: np.ndarray


@dataclass(frozen=True)
class Formation:
    """Those who begin together. iteration: from which stored state, -1 for the start. changed: whether it was others who made that state. run: a mark of this
    run, which tells it from another of the same plan."""

    members: tuple[int, ...]
    weights: tuple[float, ...]
    epoch: int
    iteration: int
    changed: bool
    run: int


def mark(numbers: Sequence[int]) -> int:
    """Of members, or of a view; never 0."""
    return int.from_bytes(hashlib.blake2b(np.array(numbers, "<u8").tobytes(), digest_size=8).digest(), "little") | 1


def agreed(introductions: Mapping[int, Introduction]) -> tuple[int, bool]:
    """From which outer iteration to go on, and whether as a new group. Everybody who was there at the end has finished the last or the last but one; whoever is
    farther behind was not, and joins those. So does one that is behind by one where somebody cannot go back: it came, or has gone back, just now."""
    newest = [one.versions[0].iteration for one in introductions.values()]
    most = max(newest)
    can_go_back = all(
        most - 1 in (version.iteration for version in one.versions)
        for one in introductions.values()
        if one.versions[0].iteration == most
    )
    iteration = most - 1 if most >= 0 and most - 1 in newest and can_go_back else most
    wanted = Version(iteration, mark(sorted(introductions)))
    return iteration, iteration >= 0 and not all(wanted in one.versions for one in introductions.values())


class Office:
    """quorum: peers without which no group begins. goes_on: an averaging survives the loss of a peer (`reform`), and who comes waits for the next outer
    iteration; otherwise either begins the outer iteration again. suspect: seconds of silence. beat: seconds between signs of life. names: for what is
    said about peers.
    """

    def __init__(
        self,
        transport: Transport,
        me: int,
        names: Sequence[str],
        run: str,
        *,
        quorum: int,
        goes_on: bool = False,
        suspect: float = 10.0,
        beat: float = 0.5,
        max_bytes: int = MOST,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.transport, self.me, self.names, self.num_peers = transport, me, names, len(names)
        self.run = hashlib.blake2b(run.encode(), digest_size=16).digest()
        self.quorum, self.goes_on, self.suspect, self.beat = quorum, goes_on, suspect, beat
        self.max_bytes, self._say = max_bytes, say
        self.counts: Counter[str] = Counter()  # refused, by reason
        self.epoch = self.finished = self.step = 0
        self.averaging = 1  # the one that this peer is in, or will be in next
        self.formed: Formation | None = None
        self.left: set[int] = set()  # finished, and went
        self.goes = False  # before the end
        self._changed = threading.Condition()
        self._incarnation = _even(time.time_ns() // 1_000_000)
        self.view = [0] * self.num_peers
        self.view[me] = self._incarnation
        self._formed_view: tuple[int, ...] = ()
        self._reformed = False
        self._banned: set[int] = set()
        self._about: Introduction | None = None  # while a group is being formed
        self._reforming = self._waited = self._leaving = False
        self._since = [0.0] * self.num_peers  # when a peer was last found to be there
        self._frozen: tuple[tuple[int, ...], tuple[bytes, bytes | memoryview]] | None = (
            None  # what was said with `ready`, and for which view
        )
        self._readies: dict[int, Letter] = {}
        self._repeated: dict[int, float] = {}
        self._far: dict[int, tuple[int, int, int, int]] = {}  # by peer: epoch, finished, averaging, next step
        self._rows: dict[tuple[int, int], dict[int, Letter]] = {}  # by epoch and step, by sender
        self._history: OrderedDict[tuple[int, int], tuple[bytes, bytes | memoryview]] = OrderedDict()
        self._history_bytes = 0
        self._awaited = 0  # the next step whose rows are wanted
        self._sums: dict[int, Letter] = {}  # by sender, the newest
        self._statuses: dict[int, Letter] = {}
        self._news = 0
        self._last_beat = self._last_tick = self._awake = time.monotonic()
        self._noted: dict[str, float] = {}

    def open(self) -> None:
        self._awake = self._last_tick = time.monotonic()
        self.transport.start(self._take, self._tick)

    # ---- forming a group -------------------------------------------------------------------------------------------------

    def form(self, about: Introduction, *, deadline: float) -> Formation:
        """Begin with everybody who is there. What nobody has begun before needs all; a run that goes on, those who have come after `deadline` seconds."""
        until = time.monotonic() + deadline
        with self._changed:
            self._without_left()
            if (
                tuple(self.view) == self._formed_view
            ):  # what is said for a view is said once: a second group of the same peers needs another
                self._renew(self._incarnation)
            self._about, self._frozen, self._waited = replace(about, epoch=self.epoch), None, False
            try:
                while True:
                    self._without_left()
                    self._say_ready()
                    members = self._present()
                    unlike = self._unlike(members)
                    if self.formed is None and len(self._readies) == self.num_peers - 1:
                        self._check_one_run(self._introductions())
                    if unlike and self.formed is None:
                        self._broadcast_ready()  # so that the other knows, too
                        raise PlanError(unlike)
                    unknown = [peer for peer, status in enumerate(self.view) if status == 0]
                    enough = len(members) >= (self.num_peers if self._is_new(members) else self.quorum)
                    if not unknown and not unlike and enough and self._all_ready(members, self._readies):
                        return self._begin(members, self._readies)
                    left = until - time.monotonic()
                    if left <= 0:
                        if unlike:
                            raise PlanError(unlike)
                        self._give_up(members, unknown, new=self._is_new(members), deadline=deadline)
                        until = time.monotonic() + deadline
                    self._changed.wait(max(0.0, min(left, _LOOK)))
            finally:
                self._about = None

    def reform(self) -> bool:
        """In the middle of an averaging: agree with those of the group who are left on who that is, and go on. True where the averaging that this peer is in
        was over for somebody already: its value then stands."""
        with self._changed:
            self._reforming = True
            try:
                while (over := self._reformed_now()) is None:
                    self._changed.wait(_LOOK)
                return over
            finally:
                self._reforming = False

    def _reformed_now(self) -> bool | None:
        assert self.formed is not None
        here = [peer for peer in self.formed.members if self._stayed(peer)]
        if len(here) < self.quorum:
            raise Regrouped
        self._say_ready_again()
        others = {
            peer: letter
            for peer, letter in self._readies.items()
            if peer in here and letter.averaging and self._leaves(letter.view, here)
        }
        if self.called_back():
            raise Regrouped
        if not all(peer in others for peer in here if peer != self.me):
            return None
        latest = max([self.averaging, *(letter.averaging for letter in others.values())])
        weights = tuple(w for peer, w in zip(self.formed.members, self.formed.weights, strict=True) if peer in here)
        self.epoch = (
            max([self.epoch, *(letter.introduction.epoch for letter in others.values() if letter.introduction)]) + 1
        )
        self._formed_view, self._reformed = tuple(self.view), True
        self.formed = replace(self.formed, members=tuple(here), weights=weights, epoch=self.epoch)
        return latest > self.averaging

    def regrouped(self) -> bool:
        """Whether who takes part has changed since the group began, so that something must be done now."""
        if self.formed is None or not self.goes_on:
            return self.formed is not None and tuple(self.view) != self._formed_view
        return not all(self._stayed(peer) for peer in self.formed.members) or self.called_back()

    def newcomers(self) -> bool:
        """Whether somebody waits to be taken in."""
        return self.formed is not None and any(
            self._alive(peer) and peer not in self.formed.members for peer in range(self.num_peers)
        )

    def called_back(self) -> bool:
        """Whether somebody of the group begins anew, or this peer must, which the others went on without."""
        members = self.formed.members if self.formed is not None else ()
        if self.formed is not None and self.view[self.me] != self._formed_view[self.me]:
            return True
        fellows = [
            letter
            for peer, letter in self._readies.items()
            if peer in members and letter.averaging == 0 and self._stayed(peer)
        ]
        return any(sum(letter.view) + self._reformed > sum(self._formed_view) for letter in fellows)

    def leave(self, *, finished: bool) -> None:
        """Say goodbye: at the end, until all have said so or for a while, or as one that is gone."""
        alone = lambda: all(
            peer in self.left or not self._alive(peer) for peer in range(self.num_peers) if peer != self.me
        )
        with self._changed:
            self._leaving = True
            if not finished:
                self.view[self.me] = self._incarnation + 1
                self._broadcast("beat")
            for _ in range(_GOODBYES * finished):
                self._broadcast("bye")
                if self._changed.wait_for(alone, self.beat):
                    break
        self.transport.close()

    # ---- one outer iteration ----------------------------------------------------------------------------------------------

    def announce(self, finished: int) -> None:
        """So many outer iterations are finished here and stored."""
        with self._changed:
            self.finished = finished
            self._broadcast("beat")

    def all_finished(self, iteration: int, stop: Callable[[], bool]) -> None:
        """Wait until everybody of the group is as far. Nobody is ever more than one outer iteration ahead, so two stored states are enough to go back to."""
        assert self.formed is not None
        with self._changed:
            far = lambda peer: peer in self.left or self._far.get(peer, (0, -1))[:2] >= (self.epoch, iteration)
            while not all(far(peer) for peer in self.formed.members if peer != self.me):
                if stop():
                    return
                self._changed.wait(_LOOK)

    # ---- rows of one step --------------------------------------------------------------------------------------------------

    def send_row(self, step: int, row: np.ndarray, weight: float, receivers: Sequence[int]) -> None:
        letter = self._letter("data", step=step, weight=weight, array=row)
        packed = pack(letter)
        with self._changed:
            self._history[self.epoch, step] = packed
            self._history_bytes += len(packed[1])
            while len(self._history) > _HISTORY or (self._history_bytes > _HISTORY_BYTES and len(self._history) > 2):
                self._history_bytes -= len(self._history.popitem(last=False)[1][1])
            self.step = step + 1
        for receiver in receivers:
            self.transport.send(receiver, *packed)

    def rows(self, step: int, senders: Sequence[int], like: np.ndarray) -> dict[int, tuple[np.ndarray, float]]:
        """One row of each, in the form of `like`, when all are there."""
        key, pause = (self.epoch, step), _AGAIN
        ask = time.monotonic() + pause
        with self._changed:
            while True:
                if self.regrouped():
                    raise Regrouped
                found = self._rows.get(key, {})
                for sender, letter in list(found.items()):
                    assert letter.array is not None
                    if letter.array.shape != like.shape or letter.array.dtype != like.dtype.newbyteorder("<"):
                        del found[sender]
                        self._ban(
                            sender,
                            f"sends {letter.array.size} entries of {letter.array.dtype} where {like.size} of {like.dtype} are expected",
                        )
                missing = [sender for sender in senders if sender not in found]
                if not missing:
                    self._awaited = step + 1
                    for old in [old for old in self._rows if old <= key]:
                        del self._rows[old]
                    return {
                        sender: (letter.array, letter.weight)
                        for sender, letter in found.items()
                        if letter.array is not None
                    }
                if time.monotonic() > ask:
                    pause = 2 * pause
                    ask = time.monotonic() + pause
                    for sender in missing:
                        if self._far.get(sender, (0, 0, 0, 0))[::3] > key:
                            self.transport.send(sender, *pack(self._letter("want", step=step)))
                self._changed.wait(_AGAIN)

    # ---- robust averaging ---------------------------------------------------------------------------------------------------

    def send_sums(self, receiver: int, number: int, total: np.ndarray) -> None:
        self.transport.send(
            receiver, *pack(self._letter("data", averaging=self.averaging, step=number, array=total)), newest="sums"
        )

    def send_status(self, number: int, status: Status) -> None:
        packed = pack(
            self._letter(
                "status",
                averaging=self.averaging,
                step=number,
                numbers=(status.got, status.settled),
                sketch=status.sketch,
            )
        )
        for peer in self.formed.members if self.formed is not None else ():
            if peer != self.me:
                self.transport.send(peer, *packed, newest="status")

    def new_sums(self, width: int) -> list[Sums]:
        """The newest of every sender in this averaging that were not handed out before."""
        with self._changed:
            found = []
            for sender, letter in list(self._sums.items()):
                if (letter.epoch, letter.averaging) > (self.epoch, self.averaging):
                    continue
                del self._sums[sender]
                if (letter.epoch, letter.averaging) != (self.epoch, self.averaging) or letter.array is None:
                    continue
                if letter.array.shape != (width,) or letter.array.dtype != np.dtype("<f8"):
                    self._ban(sender, f"sends {letter.array.size} running sums where {width} are expected")
                    continue
                found.append(Sums(sender, letter.step, letter.array))
            self._news = 0
            return sorted(found, key=lambda sums: sums.sender)

    def statuses(self) -> dict[int, Status]:
        """Of those of the group who are in this averaging."""
        with self._changed:
            now = (self.epoch, self.averaging)
            return {
                peer: Status(*one.numbers, one.sketch)  # type: ignore[arg-type]
                for peer, one in self._statuses.items()
                if (one.epoch, one.averaging) == now and one.numbers
            }

    def overtaken(self) -> bool:
        """Whether somebody of the group is in a later averaging, so that this one is over."""
        with self._changed:
            letters = [(one.epoch, one.averaging) for one in (*self._sums.values(), *self._statuses.values())]
            return (self.epoch, self.averaging + 1) in [
                *letters,
                *((far[0], far[2]) for far in self._far.values()),
            ]  # nobody can be farther ahead

    def next_averaging(self) -> None:
        """This one is over, here and so for everybody."""
        with self._changed:
            self.averaging += 1
            self._broadcast("beat")

    def wait_for_news(self, seconds: float, many: int) -> None:
        """Until so many sums have arrived, or so many seconds have passed."""
        until = time.monotonic() + seconds
        with self._changed:
            while self._news < many and (left := until - time.monotonic()) > 0 and not self.regrouped():
                self._changed.wait(left)

    # ---- the transport's thread --------------------------------------------------------------------------------------------

    def _take(self, sender: int, head: bytes, body: memoryview) -> None:
        try:
            letter = unpack(head, body, num_peers=self.num_peers, max_bytes=self.max_bytes)
        except WireError as error:
            self._refuse(sender, "malformed", str(error))
            return
        with self._changed:
            if letter.run != self.run:
                self._refuse(sender, "another run", "it belongs to another run.")
            elif sender in self._banned:
                self._refuse(sender, "banned", "its sender was found to send what does not fit.")
            elif sender == self.me or letter.incarnation % 2 or letter.incarnation < self.view[sender]:
                self.counts["outdated"] += (
                    1  # from a process that is gone, or from before its sender knew that it was thought to be
                )
            elif letter.view and letter.view[sender] not in (letter.incarnation, letter.incarnation + 1):
                self._refuse(sender, "malformed", "it says two things about its sender.")
            elif any(_latest() < status != _NEVER for status in letter.view):
                self._refuse(sender, "malformed", "it is of a time more than a year from now: compare the clocks.")
            else:
                self._accept(sender, letter)
            self._changed.notify_all()

    def _accept(self, sender: int, letter: Letter) -> None:
        if letter.view:
            self._merge(letter.view)
        elif letter.incarnation > self.view[sender]:
            return  # who it is will be known with its next beat
        self._far[sender] = (
            max(self._far.get(sender, (0, 0, 0, 0)), (letter.epoch, letter.finished, letter.averaging, letter.step))
            if letter.view
            else (self._far.get(sender, (0, 0, 0, 0)))
        )
        match letter.kind:
            case "bye":
                self.left.add(sender)
            case "ready":
                self._readies[sender] = letter
                self._repeat_ready(sender, letter)
            case "want":
                self._send_again(sender, letter)
            case "data" if letter.averaging == 0:
                self._take_row(sender, letter)
            case "data" | "status" if letter.epoch == self.epoch and letter.averaging > self.averaging + 1:
                self._refuse(sender, "ahead", "it is of an average that cannot have begun.")
            case "data":
                before = self._sums.get(sender)
                if before is None or (before.epoch, before.averaging, before.step) < (
                    letter.epoch,
                    letter.averaging,
                    letter.step,
                ):
                    self._sums[sender] = letter
                    self._news += 1
            case "status":
                before = self._statuses.get(sender)
                if before is None or (before.epoch, before.averaging, before.step) <= (
                    letter.epoch,
                    letter.averaging,
                    letter.step,
                ):
                    self._statuses[sender] = letter

    def _take_row(self, sender: int, letter: Letter) -> None:
        """Of this epoch, or of the latest one that its sender is in: an earlier one will not be needed any more."""
        when = (letter.epoch, letter.step)
        if when < (self.epoch, self._awaited) or letter.step >= _AHEAD + (
            self.step if letter.epoch == self.epoch else 0
        ):
            return
        latest = max((epoch for (epoch, _), rows in self._rows.items() if sender in rows), default=0)
        if letter.epoch < latest:
            return
        if letter.epoch > latest > self.epoch:
            for (epoch, _), rows in self._rows.items():
                if epoch == latest:
                    rows.pop(sender, None)
        self._rows.setdefault(when, {})[sender] = letter

    def _tick(self) -> None:
        now = time.monotonic()
        with self._changed:
            if now - self._last_tick > min(
                1.0 + self.beat, self.suspect / 2
            ):  # stopped itself: what waits must be read before anybody is suspected
                self._awake = now
            self._last_tick = now
            for peer in range(self.num_peers):
                watched = peer != self.me and self._alive(peer) and peer not in self.left
                if (
                    watched
                    and min(self.transport.quiet(peer), now - self._awake, now - self._since[peer]) > self.suspect
                ):
                    self.view[peer] += 1
                    self._say(f"{self.names[peer]} is gone: no sign of life for {self.suspect:g} s.")
                    self._changed.notify_all()
            if now - self._last_beat >= self.beat:
                self._last_beat = now
                if (self._about is not None or self._reforming) and self._frozen is not None:
                    self._broadcast_ready()
                else:
                    self._broadcast("beat")

    # ---- inside --------------------------------------------------------------------------------------------------------------

    def _alive(self, peer: int) -> bool:
        return self.view[peer] > 0 and self.view[peer] % 2 == 0

    def _stayed(self, peer: int) -> bool:
        """Whether it is there as the process that the group began with: one that was gone and came back knows nothing of the average any more."""
        return self._alive(peer) and self.view[peer] == self._formed_view[peer]

    def _leaves(self, view: Sequence[int], members: Sequence[int]) -> bool:
        """Whether a view leaves these of the group. What it says of others does not count: some may have heard already that one who was gone is there again."""
        group = self.formed.members if self.formed is not None else ()
        return all((view[peer] == self._formed_view[peer]) == (peer in members) for peer in group)

    def _present(self) -> list[int]:
        return [peer for peer in range(self.num_peers) if self._alive(peer)]

    def _merge(self, view: Sequence[int]) -> None:
        for peer, status in enumerate(view):
            if status <= self.view[peer]:
                continue
            if peer == self.me:  # somebody thinks that this peer is gone, or remembers a process with a later clock
                if status == _NEVER:
                    self.view[peer] = status
                elif not self._leaving:
                    self._renew(status)
                continue
            if status % 2 and self._alive(peer):
                self._say(f"{self.names[peer]} is gone, as another peer says.")
            elif status % 2 == 0 and self.view[peer]:
                self._say(f"{self.names[peer]} is there again.")
            self.view[peer] = status
            self._since[peer] = time.monotonic()
            if status % 2 == 0:
                self._forget(peer)
            self.left.discard(peer)

    def _without_left(self) -> None:
        """Who has finished and went is not one to begin with, and will not say so again."""
        for peer in self.left:
            self.view[peer] += self._alive(peer)
        self.left.clear()

    def _forget(self, peer: int) -> None:
        """What an earlier process of that peer said: it may have been in another epoch of the same number."""
        for book in (self._far, self._readies, self._sums, self._statuses, *self._rows.values()):
            book.pop(peer, None)  # type: ignore[attr-defined]

    def _renew(self, above: int) -> None:
        self._incarnation = self.view[self.me] = _even(max(above + 1, time.time_ns() // 1_000_000))
        self._say("this peer joins anew.")

    def _letter(self, kind: str, **parts: object) -> Letter:
        return Letter(kind, self.run, self._incarnation, **{"epoch": self.epoch, "finished": self.finished, **parts})  # type: ignore[arg-type]

    def _broadcast(self, kind: str) -> None:
        packed = pack(self._letter(kind, averaging=self.averaging, step=self.step, view=tuple(self.view)))
        for peer in range(self.num_peers):
            if peer != self.me:
                self.transport.send(peer, *packed, newest=kind)

    def _say_ready(self, averaging: int = 0) -> None:
        if self.view[self.me] == _NEVER:
            raise PlanError(
                "another peer turns away what this one sends, as it does not fit: compare versions and data, then start all peers again."
            )
        view = tuple(self.view)
        if self._frozen is None or self._frozen[0] != view:
            self._frozen = (
                view,
                pack(self._letter("ready", averaging=averaging, step=self.step, view=view, introduction=self._about)),
            )
            self._broadcast_ready()

    def _broadcast_ready(self) -> None:
        for peer in range(self.num_peers):
            if peer != self.me and self._frozen is not None:
                self.transport.send(peer, *self._frozen[1], newest="beat")

    def _say_ready_again(self) -> None:
        """In the middle of an averaging, whose number travels along."""
        assert self.formed is not None
        nothing = bytes(16)
        weight = self.formed.weights[self.formed.members.index(self.me)]
        about, self._about = (
            self._about,
            Introduction(weight, nothing, nothing, nothing, self.epoch, 0, (Version(), Version())),
        )
        self._say_ready(self.averaging)
        self._about = about

    def _all_ready(self, members: Sequence[int], readies: Mapping[int, Letter]) -> bool:
        view = tuple(self.view)
        return all(
            peer in readies and readies[peer].view == view and readies[peer].averaging == 0
            for peer in members
            if peer != self.me
        )

    def _is_new(self, members: Sequence[int]) -> bool:
        """Whether nobody has begun before: then all are needed."""
        letters = [self._readies[peer].introduction for peer in members if peer in self._readies]
        return all(
            one.versions[0].iteration < 0 and one.epoch == 0 for one in (self._about, *letters) if one is not None
        )

    def _unlike(self, members: Sequence[int]) -> str:
        """Who cannot take part, and why. It finds the same and goes: those who had begun without it need not. At the beginning one that is gone counts, too:
        that may be why it went."""
        assert self._about is not None
        for peer, letter in self._readies.items():
            if letter.introduction is None or letter.averaging or (self.formed is not None and peer not in members):
                continue
            for part, what in (
                ("roster", "another roster: give all peers the same file"),
                ("plan", "another plan: give all peers the same file"),
                (
                    "start",
                    "another version of fedbilevel, data of another form, or another start of x and y: compare them",
                ),
            ):
                if getattr(letter.introduction, part) != getattr(self._about, part):
                    return f"{self.names[peer]} has {what}."
        return ""

    def _begin(self, members: Sequence[int], readies: Mapping[int, Letter]) -> Formation:
        assert self._about is not None
        introductions = {
            peer: one
            for peer, letter in readies.items()
            if peer in members and (one := letter.introduction) is not None
        }
        introductions[self.me] = self._about
        self._check_one_run(introductions)
        iteration, changed = agreed(introductions)
        self.epoch = max(one.epoch for one in introductions.values()) + 1
        self.finished, self.step, self._awaited = max(iteration, 0), 0, 0
        weights = tuple(introductions[peer].weight for peer in members)
        run = (
            max(one.mark for one in introductions.values()) if iteration >= 0 else mark(self.view)
        )  # whose incarnations no other run has
        self.formed, self._formed_view = (
            Formation(tuple(members), weights, self.epoch, iteration, changed, run),
            tuple(self.view),
        )
        self._reformed, self.averaging = False, 1
        self._history.clear()
        self._history_bytes = 0
        self._rows = {key: rows for key, rows in self._rows.items() if key[0] >= self.epoch}
        return self.formed

    def _introductions(self) -> dict[int, Introduction]:
        """All that were heard at the beginning, also of those who have gone since: perhaps because of what they found."""
        assert self._about is not None
        heard = {
            peer: one
            for peer, letter in self._readies.items()
            if letter.averaging == 0 and (one := letter.introduction) is not None
        }
        return {**heard, self.me: self._about}

    def _check_one_run(self, introductions: Mapping[int, Introduction]) -> None:
        """Stored states of different runs of the same plan must not be mixed, nor an old record be taken for the state of all."""
        have = {peer: one.mark for peer, one in sorted(introductions.items()) if one.versions[0].iteration >= 0}
        named = ", ".join(self.names[peer] for peer in have)
        if all(one.versions[0].iteration <= 0 for one in introductions.values()):
            return
        if len(set(have.values())) > 1:
            raise PlanError(
                f"the records of {named} are of different runs of the same plan: remove those that do not belong, or name other folders."
            )
        if len(have) < self.quorum <= len(introductions):
            others = ", ".join(self.names[peer] for peer in introductions if peer not in have)
            raise PlanError(
                f"{named} goes on with a run of which {others} have no record: remove that one, put the others back, or lower the quorum."
            )

    def _give_up(self, members: Sequence[int], unknown: Sequence[int], *, new: bool, deadline: float) -> None:
        """After the deadline: whoever has never been heard of is gone, if the run can do without."""
        if self.formed is None:
            self._check_one_run(self._introductions())
        named = lambda peers: ", ".join(self.names[peer] for peer in peers)
        if len(members) < (self.num_peers if new else self.quorum):
            needed = f"all {self.num_peers}" if new else f"{self.quorum} of {self.num_peers}"
            there = "1 peer is" if len(members) == 1 else f"{len(members)} peers are"
            missing = named(peer for peer in range(self.num_peers) if peer not in members)
            raise QuorumError(
                f"{there} there after {deadline:g} s, {needed} are needed; missing: {missing}: start them, then this one again."
            )
        silent = named(
            peer
            for peer in members
            if peer != self.me and (peer not in self._readies or self._readies[peer].view != tuple(self.view))
        )
        if silent and not unknown and self._waited:
            raise QuorumError(
                f"{silent} gives signs of life but was not ready within {2 * deadline:g} s: look at its log, and whether all reach each other."
            )
        if silent and not unknown:
            self._waited = True
            self._say(f"still waiting for {silent} to be ready: can it be reached from here, and this peer from there?")
        for peer in unknown:
            self.view[peer] = 1

    def _repeat_ready(self, sender: int, letter: Letter) -> None:
        """To one that has not heard that this peer was ready. Not more often than beats: two that both have begun would answer each other for ever."""
        begun = (
            self.formed is not None
            and self._about is None
            and not self._reforming
            and self._leaves(letter.view, self.formed.members)
        )
        if begun and self._frozen is not None and time.monotonic() - self._repeated.get(sender, -1e9) > self.beat:
            self._repeated[sender] = time.monotonic()
            self.transport.send(sender, *self._frozen[1])

    def _send_again(self, sender: int, letter: Letter) -> None:
        if letter.epoch != self.epoch or letter.step >= self.step:
            return
        packed = self._history.get((letter.epoch, letter.step))
        if packed is not None:
            self.transport.send(sender, *packed)
        elif (
            tuple(self.view) == self._formed_view
        ):  # too long ago: begin the outer iteration again with everybody, once
            self._renew(self._incarnation)

    def _ban(self, peer: int, why: str) -> None:
        """One of the group that sends what cannot be used counts as gone, for everybody and for good: others would take it in again, and wait for this one."""
        self._banned.add(peer)
        self._refuse(peer, "misfit", f"it {why}.")
        self.view[peer] = _NEVER

    def _refuse(self, sender: int, reason: str, why: str) -> None:
        self.counts[reason] += 1
        now = time.monotonic()
        if now - self._noted.get(reason, -1e9) > 1.0:  # a flood must not fill the disk
            self._noted[reason] = now
            self._say(f"a message of {self.names[sender]} was refused: {why}")

    @contextmanager
    def opened(self) -> Iterator[Office]:
        """Until the block ends: as one that has finished, or, when an error ends it, as one that is gone."""
        self.open()
        done = False
        try:
            yield self
            done = True
        finally:
            self.leave(finished=done and not self.goes)


def _even(number: int) -> int:
    return number + number % 2


def _latest() -> int:
    """A view that says more is not one: incarnations are times, and no clock is off by a year."""
    return time.time_ns() // 1_000_000 + 365 * 86_400_000
