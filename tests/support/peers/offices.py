"""Offices of several peers over a network in memory, and threads for their calls that wait."""

import threading
import time
from collections import Counter
from dataclasses import replace

from fedbilevel.engines.engine import Regrouped
from fedbilevel.errors import PlanError, QuorumError
from fedbilevel.peers.formation import Formation, mark
from fedbilevel.peers.office import Office
from fedbilevel.peers.transport import MemoryNetwork
from fedbilevel.peers.wire import Introduction, PeerMessage, Version, pack, unpack

SUSPECT, BEAT, TIME = 0.6, 0.05, 8.0  # seconds
ALL, TWO = mark((0, 1, 2)), mark((0, 1))


def until(condition, seconds=TIME, what="the awaited state"):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come in {seconds} s"
        time.sleep(0.01)


def about(*versions, weight=1.0, **parts):
    """Introduction of a peer with these stored states."""
    newest, before, *_ = (*versions, Version(), Version())
    return replace(Introduction(weight, b"p" * 16, b"r" * 16, b"s" * 16, 0, 0, (newest, before)), **parts)


class Post(MemoryNetwork):
    """A network that counts messages, cuts links and loses chosen messages."""

    def __init__(self, num_peers, faults=None):
        super().__init__(num_peers, faults)
        self.cut = set()  # pairs of sender and receiver
        self.lost = lambda sender, receiver, message: False
        self.sent = Counter()

    def post(self, sender, receiver, head, body, delays):
        message = unpack(head, body, num_peers=self.num_peers)
        self.sent[message.kind] += 1
        if (sender, receiver) not in self.cut and not self.lost(sender, receiver, message):
            super().post(sender, receiver, head, body, delays)


class Team:
    """Offices of all peers, threads for their waiting calls, and `lines` that each peer logged."""

    def __init__(self, num_peers, faults=None, *, quorum=None, **options):
        self.names = [f"p{peer}" for peer in range(num_peers)]
        self.network, self.lines = Post(num_peers, faults), {peer: [] for peer in range(num_peers)}
        self.options = {
            "quorum": num_peers // 2 + 1 if quorum is None else quorum,
            "suspect": SUSPECT,
            "beat": BEAT,
            **options,
        }
        self.offices, self.results, self.threads = {}, {}, []

    def open(self, *peers, **options):
        for peer in peers:
            self.offices[peer] = Office(
                self.network.transport(peer),
                peer,
                self.names,
                "run",
                say=self.lines[peer].append,
                **{**self.options, **options},
            )
            self.offices[peer].open()

    def begin(self, peer, work):
        """Run `work` in a thread. Its value or error will be in `results`."""

        def keep():
            try:
                self.results[peer] = work()
            except (PlanError, QuorumError, Regrouped) as error:
                self.results[peer] = error

        self.results.pop(peer, None)
        thread = threading.Thread(target=keep, daemon=True)
        self.threads.append(thread)
        thread.start()

    def same_views(self):
        """Whether all offices know all peers and have the same view."""
        views = {tuple(office.membership.view) for office in self.offices.values()}
        return len(views) == 1 and all(views.pop())

    def ready(self, peer, view, **fields):
        """A packed `ready` of a peer with another view."""
        out = self.offices[peer].outbox
        return pack(
            PeerMessage("ready", out.run, out.incarnation, out.epoch, view=tuple(view), introduction=about(), **fields)
        )

    def forming(self, *peers, deadline=TIME, **introductions):
        for peer in peers:
            mine = introductions.get(f"p{peer}", about())
            self.begin(peer, lambda peer=peer, mine=mine: self.offices[peer].form(mine, deadline=deadline))

    def done(self, *peers):
        until(
            lambda: all(peer in self.results for peer in peers),
            what=f"the end of {peers}: {self.results} {self.lines}; the last",
        )
        return [self.results[peer] for peer in peers]

    def form(self, *peers, **options):
        """Form a group and check that all members have the same formation."""
        self.forming(*peers, **options)
        formations = self.done(*peers)
        assert all(isinstance(one, Formation) for one in formations), formations
        assert len(set(formations)) == 1, formations
        return formations[0]

    def gone(self, by):
        return sorted({line.split()[0] for line in self.lines[by] if " is gone" in line})
