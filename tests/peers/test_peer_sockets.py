"""Messages over loopback TCP with real keys: delivery, senders, refusals, queues and the end."""

import contextlib
import os
import socket
import threading
import time
from contextlib import closing

import numpy as np
import pytest
import zmq

from fedbilevel.errors import RosterError, WireError
from fedbilevel.peers import send_queues, sockets
from fedbilevel.peers.roster import PeerEntry, PeerRoster, Secret
from fedbilevel.peers.sockets import Sockets

pytestmark = pytest.mark.wait

LIMIT = 4_000_000


def until(condition, seconds=5.0):
    """Whether the condition became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def held():
    """Threads and open files of this process, also those of libzmq, once they no longer change."""
    now, since = None, time.monotonic()
    while time.monotonic() - since < 0.2:
        before, now = now, (set(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))
        if now != before:
            since = time.monotonic()
        time.sleep(0.01)
    return now


def nothing_more(before):
    """Whether no thread or file was added. Threads of earlier tests may end meanwhile."""
    now = held()
    return now[0] <= before[0] and now[1] <= before[1]


def ports(count):
    with contextlib.ExitStack() as stack:  # all at once, so that they differ
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


class Group:
    """Peers of one roster, with the messages and log lines of each."""

    def __init__(self, size, *, host="127.0.0.1", keys=True):
        pairs = [tuple(half.decode() for half in zmq.curve_keypair()) for _ in range(size)]
        self.roster = PeerRoster(
            tuple(
                PeerEntry(f"p{i}", f"{host}:{port}", key)
                for i, (port, (key, _)) in enumerate(zip(ports(size), pairs, strict=True))
            )
        )
        self.secrets = [
            Secret(peer.name, peer.address, peer.key, secret)
            for peer, (_, secret) in zip(self.roster.peers, pairs, strict=True)
        ]
        self.keys = keys
        self.got = [[] for _ in range(size)]
        self.lines = [[] for _ in range(size)]
        self.live = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # All at once, because each waits for messages that cannot leave.
        threads = [threading.Thread(target=one.close) for one in self.live.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def made(self, me, **options):
        options = {"max_bytes": LIMIT, "log": self.lines[me].append} | options
        return Sockets(self.roster, me, self.secrets[me] if self.keys else None, **options)

    def start(self, *which, take=None, **options):
        for me in which or range(len(self.got)):
            self.live[me] = self.made(me, **options)
            self.live[me].start(
                take or (lambda sender, head, body, me=me: self.got[me].append((sender, head, bytes(body)))),
                lambda: None,
            )
        return self

    def arrives(self, to, *expected):
        return until(lambda: set(expected) <= set(self.got[to]))


class Stranger:
    """A socket that follows none of the rules."""

    def __init__(self, group, to, *, pair=None, server=None, identity=None):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        if pair is not None:
            key, secret = pair
            self.socket.curve_publickey, self.socket.curve_secretkey = key.encode(), secret.encode()
            self.socket.curve_serverkey = (server or group.roster.peers[to].key).encode()
        if identity is not None:
            self.socket.setsockopt(zmq.ROUTING_ID, identity)
        self.socket.connect(f"tcp://{group.roster.peers[to].address}")

    def __enter__(self):
        return self

    def send(self, *frames):
        self.socket.send_multipart(frames)

    def __exit__(self, *_):
        self.context.destroy(linger=0)


def pair_of(group, me):
    return group.secrets[me].key, group.secrets[me].secret


def fresh():
    return tuple(half.decode() for half in zmq.curve_keypair())


@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_messages_of_all_peers_arrive_under_the_right_number(size, keys):
    with Group(size, keys=keys).start() as group:
        for me, one in group.live.items():
            for to in group.live:
                if to != me:
                    one.send(to, b"from %d" % me, b"to %d" % to)
        for to in group.live:
            assert group.arrives(to, *((me, b"from %d" % me, b"to %d" % to) for me in group.live if me != to))
            assert len(group.got[to]) == size - 1
        assert all(one.refused() == {} for one in group.live.values())


def test_long_bodies_arrive_whole_and_in_order():
    numbers = np.random.default_rng(0).standard_normal(750_000).astype(np.float32)
    with Group(2).start() as group:
        group.live[0].send(1, b"first", memoryview(numbers))  # 3 MB, and not of bytes
        group.live[0].send(1, b"second", numbers.tobytes())
        group.live[0].send(1, b"third")
        assert until(lambda: len(group.got[1]) == 3)
        assert group.got[1] == [(0, b"first", numbers.tobytes()), (0, b"second", numbers.tobytes()), (0, b"third", b"")]


def test_received_body_is_a_view_that_can_be_kept():
    kept = []
    with Group(2).start(1, take=lambda *message: kept.append(message)).start(0) as group:
        for number in range(20):
            group.live[0].send(1, b"", bytes([number]) * 100_000)
        assert until(lambda: len(kept) == 20)
    assert all(isinstance(body, memoryview) and isinstance(head, bytes) for _, head, body in kept)
    assert [bytes(body) for *_, body in kept] == [bytes([number]) * 100_000 for number in range(20)]


def test_messages_from_many_threads_arrive_while_the_receiver_answers():
    with Group(2) as group:
        group.start(0)
        group.start(1, take=lambda sender, head, body: group.live[1].send(sender, head))
        threads = [
            threading.Thread(target=lambda t=t: [group.live[0].send(1, b"%d %d" % (t, i)) for i in range(100)])
            for t in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert until(lambda: len(group.got[0]) == 400)
        assert {head for _, head, _ in group.got[0]} == {b"%d %d" % (t, i) for t in range(4) for i in range(100)}


def test_message_leaves_before_the_next_tick(monkeypatch):
    monkeypatch.setattr(sockets, "TICK", 600.0)
    with Group(2).start(0) as group:
        for number in range(100):  # many times what libzmq takes at once
            group.live[0].send(1, b"%d" % number, b"b" * 50_000)
        group.start(1)
        assert until(lambda: len(group.got[1]) == 100)
        for number in range(20):
            group.live[0].send(1, b"again %d" % number)
            assert group.arrives(1, (0, b"again %d" % number, b""))


def test_key_outside_the_roster_is_refused_without_flooding_the_log():
    with Group(2).start() as group, contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(Stranger(group, 0, pair=fresh())).send(b"head", b"body")
        assert until(lambda: group.live[0].refused().get("key", 0) == 5)
        group.live[1].send(0, b"after")
        assert group.arrives(0, (1, b"after", b""))
        assert len(group.got[0]) == 1
        assert group.live[0].refused() == {"key": 5}
        assert "refused a connection from 127.0.0.1: its key" in group.lines[0][0]
        assert len(group.lines[0]) < 5


def test_connection_without_encryption_is_refused():
    with Group(2).start() as group, Stranger(group, 0, identity=b"1") as stranger:
        stranger.send(b"head", b"body")
        assert until(lambda: group.live[0].refused().get("handshake", 0) >= 1)
        group.live[1].send(0, b"after")
        assert group.arrives(0, (1, b"after", b""))
        assert len(group.got[0]) == 1
        assert any("not encrypted" in line for line in group.lines[0])


def test_sender_that_expects_another_server_key_cannot_connect():
    with Group(3).start() as group, Stranger(group, 0, pair=pair_of(group, 1), server=fresh()[0]) as stranger:
        stranger.send(b"head", b"body")
        assert until(lambda: group.live[0].refused().get("handshake", 0) >= 1)
        group.live[2].send(0, b"after")
        assert group.arrives(0, (2, b"after", b""))
        assert len(group.got[0]) == 1


def test_refused_peer_is_informed_and_reconnects(monkeypatch):
    monkeypatch.setattr(sockets, "PAUSE", 0.1)
    with Group(2) as group:
        right = group.roster
        group.roster = PeerRoster((right.peers[0], PeerEntry("p1", right.peers[1].address, fresh()[0])))
        group.start(0)
        group.roster = right
        group.start(1)
        group.live[1].send(0, b"head")
        assert until(lambda: group.live[1].refused().get("shut out", 0) >= 2)
        assert any("p0 refuses this peer" in line for line in group.lines[1])
        assert group.live[0].refused()["key"] >= 2
        assert group.got[0] == []
        group.live[0].close()
        group.start(0)  # with the roster of the other peer
        assert group.arrives(0, (1, b"head", b""))


def test_peer_connects_after_a_foreign_server_used_its_port(monkeypatch):
    monkeypatch.setattr(sockets, "PAUSE", 0.1)
    with Group(2) as group:
        host, port = group.roster.peers[0].address.split(":")
        with socket.create_server((host, int(port))) as other:
            other.settimeout(5.0)
            group.start(1)
            group.live[1].send(0, b"head")
            accepted, _ = other.accept()
            with accepted:
                accepted.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
                with contextlib.suppress(ConnectionResetError):
                    accepted.recv(1000)
        group.start(0)
        assert group.arrives(0, (1, b"head", b""))


def test_sender_is_identified_by_its_key_not_by_its_identity():
    with Group(3).start(0, 2) as group:
        with Stranger(group, 0, pair=pair_of(group, 1), identity=b"2") as liar:
            liar.send(b"2", b"I am 2")
            assert group.arrives(0, (1, b"2", b"I am 2"))
            group.live[2].send(0, b"I really am")  # the true p2 keeps its connection
            assert group.arrives(0, (2, b"I really am", b""))
            liar.send(b"2", b"still here")
            assert group.arrives(0, (1, b"2", b"still here"))
        assert {sender for sender, *_ in group.got[0]} == {1, 2}


def test_own_key_is_refused():
    with Group(2).start(0) as group, Stranger(group, 0, pair=pair_of(group, 0)) as mirror:
        mirror.send(b"head", b"body")
        assert until(lambda: group.live[0].refused().get("key", 0) >= 1)
        assert group.got[0] == []


@pytest.mark.parametrize("identity", [None, b"0", b"3", b"01", b"\xff"])
def test_identity_that_is_not_a_peer_number_is_refused_without_keys(identity):
    with Group(3, keys=False).start(0) as group, Stranger(group, 0, identity=identity) as stranger:
        stranger.send(b"head", b"body")
        assert until(lambda: group.live[0].refused() == {"sender": 1})
        assert group.got[0] == []


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ((b"one",), "frames"),
        ((b"one", b"two", b"three"), "frames"),
        ((b"h" * 4097, b""), "head"),
        ((b"", b"b" * 10_001), "body"),
    ],
)
def test_malformed_message_is_refused_and_the_next_one_accepted(frames, reason):
    with Group(2).start(0, max_bytes=10_000) as group, Stranger(group, 0, pair=pair_of(group, 1)) as peer:
        peer.send(*frames)
        peer.send(b"h" * 4096, b"b" * 10_000)
        assert group.arrives(0, (1, b"h" * 4096, b"b" * 10_000))
        assert group.live[0].refused() == {reason: 1}
        assert len(group.got[0]) == 1
        assert len(group.lines[0]) == 1
        assert "p1" in group.lines[0][0]


def test_far_too_long_message_ends_only_its_connection():
    with Group(3).start(0, 2, max_bytes=10_000) as group:
        group.start(1, max_bytes=3_000_000)
        group.live[2].send(0, b"before")
        assert group.arrives(0, (2, b"before", b""))
        group.live[1].send(0, b"long", b"b" * 3_000_000)
        for number in range(20):
            group.live[2].send(0, b"%d" % number)
        assert group.arrives(0, *((2, b"%d" % number, b"") for number in range(20)))
        assert until(lambda: not group.live[1].queues.waiting(0))
        again = iter(range(10_000))  # it reconnects; messages in transit are lost
        assert until(
            lambda: (
                group.live[1].send(0, b"short", b"%d" % next(again), newest="short")
                or any(sender == 1 for sender, *_ in group.got[0])
            )
        )
        assert {head for sender, head, _ in group.got[0] if sender == 1} == {b"short"}
        assert group.live[0].refused() == {}


def test_sending_a_too_long_message_raises():
    one = Group(2).made(0, max_bytes=10)
    for head, body in ((b"", b"b" * 11), (b"h" * 4097, b""), (b"", memoryview(np.zeros(2)))):
        with pytest.raises(WireError, match="too long"):
            one.send(1, head, body)
    one.send(1, b"", memoryview(np.zeros(1)))


def test_restarted_peer_receives_messages_again():
    with Group(2).start() as group:
        group.live[0].send(1, b"first")
        assert group.arrives(1, (0, b"first", b""))
        group.live[1].close()
        group.start(1)
        sent = iter(range(10_000))
        assert until(
            lambda: group.live[0].send(1, b"later", b"%d" % next(sent), newest="later") or len(group.got[1]) > 1
        )
        group.live[1].send(0, b"back")
        assert group.arrives(0, (1, b"back", b""))


def test_restarted_peer_takes_over_its_identity_without_keys():
    with Group(2, keys=False).start(0) as group, Stranger(group, 0, identity=b"1") as old:
        old.send(b"old", b"")
        assert group.arrives(0, (1, b"old", b""))
        group.start(1)  # the connection of the old one is still there
        group.live[1].send(0, b"new")
        assert group.arrives(0, (1, b"new", b""))


def test_newest_message_replaces_a_waiting_one():
    with Group(2).start(0) as group:
        for number in range(50):
            group.live[0].send(1, b"state", b"%d" % number, newest=("state", 0))
            group.live[0].send(1, b"other", b"%d" % number, newest=("state", 1))
            if number % 10 == 0:
                group.live[0].send(1, b"all", b"%d" % number)
        group.start(1)
        # Replaced messages keep the place of the first.
        expected = [b"state 49", b"other 49", *(b"all %d" % number for number in range(0, 50, 10))]
        assert until(lambda: len(group.got[1]) == len(expected))
        group.live[0].send(1, b"end", b"")
        assert group.arrives(1, (0, b"end", b""))
        assert [b"%s %s" % message[1:] for message in group.got[1][:-1]] == [b"state 49", b"other 49", *expected[2:]]


def test_newest_message_is_sent_after_an_earlier_one_has_left():
    with Group(2).start() as group:
        for number in range(5):
            group.live[0].send(1, b"state", b"%d" % number, newest="state")
            assert group.arrives(1, (0, b"state", b"%d" % number))


def test_full_queue_drops_the_oldest_messages(monkeypatch):
    monkeypatch.setattr(send_queues, "BACKLOG", 1_000_000)
    with Group(3).start(0) as group:
        for number in range(100):
            group.live[0].send(1, b"%d" % number, b"b" * 100_000)
            group.live[0].send(2, b"%d" % number)
        kept = group.live[0].queues.waiting(1)
        assert len(kept) == 9  # with the overhead of each message
        dropped = group.live[0].refused()["backlog"]
        assert dropped == 91
        assert sum("p1" in line for line in group.lines[0]) == 1
        group.start(1, 2)
        assert until(lambda: len(group.got[1]) == 9 and len(group.got[2]) == 100)
        assert [int(head) for _, head, _ in group.got[1]] == list(range(91, 100))
        assert until(lambda: group.live[0].queues.num_bytes(1) == group.live[0].queues.num_bytes(2) == 0)


def test_replaced_messages_do_not_count_towards_the_backlog(monkeypatch):
    monkeypatch.setattr(send_queues, "BACKLOG", 1_000_000)
    one = Group(2).made(0)
    one.send(1, b"first", b"b" * 500_000)
    for _ in range(100):
        one.send(1, b"", b"b" * 400_000, newest="state")
    assert one.refused() == {}
    for _ in range(10_000):
        one.send(1, b"")  # empty, but it takes memory
    assert one.refused()["backlog"] > 0
    assert len(one.queues.waiting(1)) < 2_500


def test_quiet_is_the_time_since_the_last_message():
    with Group(3).start() as group:
        begin = time.monotonic()
        spoken = []

        def speak():
            group.live[1].send(0, b"here", newest="here")
            spoken.append(group.live[0].quiet(1))
            return time.monotonic() - begin > 0.6

        assert until(speak)
        assert 0.6 <= group.live[0].quiet(2) < time.monotonic() - begin + 1.0
        assert until(lambda: group.live[1].send(0, b"here") or group.live[0].quiet(1) < 0.3)
        last = group.live[0].quiet(1)
        assert until(lambda: group.live[0].quiet(1) > last + 0.2)


def test_refused_message_does_not_end_the_silence():
    with Group(2).start(0) as group, Stranger(group, 0, pair=pair_of(group, 1)) as peer:
        before = time.monotonic()
        assert until(lambda: group.live[0].quiet(1) > 0.3)
        peer.send(b"one frame")
        assert until(lambda: group.live[0].refused() == {"frames": 1})
        assert group.live[0].quiet(1) > 0.3
        peer.send(b"head", b"body")
        assert until(lambda: group.live[0].quiet(1) < time.monotonic() - before - 0.2)


def test_error_of_the_receiver_is_counted_and_the_next_message_arrives():
    got = []

    def take(sender, head, body):
        got.append(head)
        raise RuntimeError("no room for it")

    with Group(2).start(0).start(1, take=take) as group:
        group.live[0].send(1, b"first")
        group.live[0].send(1, b"second")
        assert until(lambda: got == [b"first", b"second"] and group.live[1].refused() == {"failed": 2})
        assert group.lines[1] == ["an error while taking a message: RuntimeError: no room for it"]


def test_ticks_come_without_messages():
    ticks = []
    with Group(2) as group:
        group.live[0] = group.made(0)
        begin = time.monotonic()
        group.live[0].start(lambda *_: None, lambda: ticks.append((time.monotonic(), threading.current_thread().name)))
        assert until(lambda: len(ticks) >= 3)
        assert ticks[2][0] - begin >= 0.6 - 1e-3
        assert {name for _, name in ticks} == {"peer p0"}


def test_waiting_messages_leave_before_the_end():
    with Group(2).start() as group:
        group.live[1].send(0, b"there")
        group.live[0].send(1, b"there")
        assert group.arrives(0, (1, b"there", b""))
        assert group.arrives(1, (0, b"there", b""))
        body = b"b" * 300_000
        for number in range(40):  # more than libzmq takes at once
            group.live[0].send(1, b"%d" % number, body)
        group.live[0].close()
        assert group.arrives(1, *((0, b"%d" % number, body) for number in range(40)))


def test_close_waits_at_most_the_flush_time_and_leaves_no_thread(monkeypatch):
    with Group(2).start() as warm:  # pyzmq keeps one thread of its own from the first long message on
        warm.live[0].send(1, b"", b"b" * 100_000)
        assert until(lambda: warm.got[1])
    before = held()
    for keys in (True, False):
        with Group(3, keys=keys).start(0, 1) as group:
            group.live[0].send(1, b"", b"b" * 100_000)
            assert until(lambda group=group: group.got[1])
            group.live[0].send(2, b"nobody there")
            monkeypatch.setattr(sockets, "FLUSH", 0.3)
            begin = time.monotonic()
            group.live[0].close()
            assert 0.3 <= time.monotonic() - begin < 30
            group.live[0].close()
            group.live[0].send(1, b"too late")
            assert not group.live[0].queues.waiting(1)
            monkeypatch.setattr(sockets, "FLUSH", 60.0)
            begin = time.monotonic()
            group.live[1].close()
            assert time.monotonic() - begin < 30  # nothing to wait for
    assert not any(thread.name.startswith("peer ") for thread in threading.enumerate())
    assert nothing_more(before)


def test_sockets_that_never_started_can_be_closed():
    one = Group(2).made(0)
    one.send(1, b"early")
    one.close()
    one.close()


def test_port_in_use_is_refused_and_leaves_no_thread():
    with Group(2).start(0) as group:
        before = held()
        with closing(group.made(0)) as second, pytest.raises(RosterError, match=r"port \d+ of this machine is in use"):
            second.start(lambda *_: None, lambda: None)
        assert nothing_more(before)


def test_address_of_another_machine_is_refused_with_a_hint():
    group = Group(2, host="192.0.2.1")  # reserved for examples
    with pytest.raises(RosterError, match=r'cannot listen at 192\.0\.2\.1.*give bind = "0\.0\.0\.0'):
        group.made(0).start(lambda *_: None, lambda: None)


def test_peer_behind_a_router_listens_at_its_bind_address():
    with Group(2) as group:
        outside, inside = ports(2)
        seen = PeerRoster((PeerEntry("p0", f"192.0.2.1:{outside}", group.roster.peers[0].key), group.roster.peers[1]))
        group.roster, real = seen, group.roster
        group.start(0, bind=f"0.0.0.0:{inside}")
        group.roster = PeerRoster((PeerEntry("p0", f"127.0.0.1:{inside}", real.peers[0].key), real.peers[1]))
        group.start(1)
        group.live[1].send(0, b"hello")
        assert group.arrives(0, (1, b"hello", b""))


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_localhost_and_ipv6_addresses_connect(host):
    if host == "[::1]":
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("no IPv6 on this machine")
    with Group(2, host=host).start() as group:
        group.live[0].send(1, b"there")
        group.live[1].send(0, b"back")
        assert group.arrives(1, (0, b"there", b""))
        assert group.arrives(0, (1, b"back", b""))


@pytest.mark.parametrize(
    ("host", "bind"),
    [
        ("10.0.0.1", None),
        ("north.example.org", None),
        ("127.0.0.1", "0.0.0.0:5555"),
        ("[2001:db8::1]", "127.0.0.1:5555"),
    ],
)
def test_address_outside_loopback_needs_a_key(host, bind):
    with pytest.raises(RosterError, match="is not a loopback address"):
        Group(2, host=host, keys=False).made(0, bind=bind)


def test_private_key_of_another_peer_is_refused():
    group = Group(2)
    with pytest.raises(RosterError, match="the private key of 'p1' is not the one that 'p0' has"):
        Sockets(group.roster, 0, group.secrets[1], max_bytes=1)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_loopback_peer_listens_only_at_its_own_address(host):
    with Group(2, host=host, keys=False).start(0) as group:
        port = int(group.roster.peers[0].address.split(":")[1])
        socket.create_connection(("127.0.0.1", port), timeout=5.0).close()
        with pytest.raises(OSError):
            # Would connect if the peer listened at all interfaces.
            socket.create_connection(("127.0.0.2", port), timeout=1.0)
