"""A network in memory: delivery, and faults that the seed decides."""

import threading
import time

import pytest

from fedbilevel.peers import transport
from fedbilevel.peers.transport import Faults, Lossy, MemoryNetwork

pytestmark = pytest.mark.wait


def until(condition, seconds=5.0, what="what was waited for"):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come in {seconds} s"
        time.sleep(0.005)


class Ear:
    """Keeps the messages to one peer, and counts ticks."""

    def __init__(self, network, peer):
        self.got, self.ticks, self.threads = [], 0, set()
        self.transport = network.transport(peer)
        self.transport.start(self._take, self._tick)

    def _take(self, sender, head, body):
        self.threads.add(threading.current_thread())
        self.got.append((sender, head, bytes(body)))

    def _tick(self):
        self.ticks += 1

    def numbers(self, sender=0):
        return [int(head) for who, head, _ in self.got if who == sender]

    def tell(self, to, many, start=0):
        for number in range(start, start + many):
            self.transport.send(to, b"%d" % number, b"body")


@pytest.fixture
def network(monkeypatch):
    """Factory of networks. All their transports leave at the end."""
    monkeypatch.setattr(transport, "TICK", 0.05)
    ears = []

    def make(num_peers, faults=None):
        net = MemoryNetwork(num_peers, faults)
        ears.extend(Ear(net, peer) for peer in range(num_peers))
        return net, *ears[-num_peers:]

    yield make
    for ear in ears:
        ear.transport.close()


def end_of(net, ear, to=1):
    """Send an end marker that faults do not affect."""
    net.post(ear.transport.peer, to, b"-1", b"", [net.faults.delay + 0.01])


def test_messages_without_faults_arrive_once_and_in_order(network):
    _, a, b, c = network(3)
    a.tell(1, 200)
    c.tell(1, 50, start=1000)
    b.tell(1, 3)  # to itself
    until(lambda: len(b.got) >= 253)
    assert b.numbers(0) == list(range(200))
    assert b.numbers(2) == list(range(1000, 1050))
    assert b.numbers(1) == [0, 1, 2]
    assert all(body == b"body" for _, _, body in b.got)
    assert a.got == c.got == []


def test_body_is_copied_when_it_is_sent(network):
    _, a, b = network(2)
    body = bytearray(b"before")
    a.transport.send(1, b"0", memoryview(body))
    body[:] = b"after!"
    until(lambda: b.got)
    assert b.got == [(0, b"0", b"before")]


def test_one_thread_makes_all_calls(network):
    _, a, b = network(2)
    until(lambda: a.ticks >= 3 and b.ticks >= 3)
    a.tell(1, 1)
    b.tell(0, 1)
    until(lambda: a.got and b.got)
    assert len(a.threads | b.threads) == 1
    assert threading.current_thread() not in a.threads


def test_faults_are_decided_by_the_seed(network):
    faults = Faults(loss=0.3, doubled=0.2, seed=7)
    net, a, b = network(2, faults)
    copies = [len(faults.delays(0, 1, number + 1)) for number in range(300)]
    a.tell(1, 300)
    end_of(net, a)
    until(lambda: b.numbers()[-1:] == [-1])
    assert b.numbers()[:-1] == [number for number, many in enumerate(copies) for _ in range(many)]
    assert set(copies) == {0, 1, 2}


def test_faults_depend_on_seed_sender_receiver_and_number():
    drawn = lambda seed, sender, receiver: tuple(
        tuple(Faults(loss=0.3, delay=1.0, seed=seed).delays(sender, receiver, number)) for number in range(40)
    )
    assert drawn(1, 0, 1) == drawn(1, 0, 1)
    different = {drawn(seed, sender, receiver) for seed in (1, 2) for sender in (0, 1, 2) for receiver in (0, 1, 2)}
    assert len(different) == 18
    assert len({one for one in drawn(1, 0, 1) if one}) > 20


@pytest.mark.parametrize(("loss", "doubled"), [(0.3, 0.0), (0.0, 0.4), (0.5, 0.5)])
def test_shares_of_faults_are_as_requested(loss, doubled):
    faults, many = Faults(loss=loss, doubled=doubled, delay=2.0, seed=3), 2000
    drawn = [faults.delays(1, 0, number) for number in range(many)]
    share = lambda copies: sum(len(one) == copies for one in drawn) / many
    slack = 4 * (0.25 / many) ** 0.5  # four standard deviations at most
    assert abs(share(0) - loss) < slack
    assert abs(share(2) - (1 - loss) * doubled) < slack
    late = sorted(delay for one in drawn for delay in one)
    assert 0 <= late[0] < 0.02
    assert 1.98 < late[-1] < 2.0
    assert abs(sum(late) / len(late) - 1.0) < 4 * 2 / (12 * len(late)) ** 0.5
    if doubled:
        assert all(one[0] != one[1] for one in drawn if len(one) == 2)


def test_delayed_messages_overtake_each_other(network):
    faults = Faults(delay=0.4, seed=5)
    net, a, b = network(2, faults)
    begun = time.monotonic()
    a.tell(1, 40)
    end_of(net, a)
    spent = time.monotonic() - begun
    until(lambda: -1 in b.numbers())
    late = [faults.delays(0, 1, number + 1)[0] for number in range(40)]
    got = [number for number in b.numbers() if number >= 0]
    assert sorted(got) == list(range(40))
    assert got != sorted(got)
    for place, number in enumerate(got):  # those that were sent within `spent` of each other come by their delays
        assert all(late[number] < late[later] + spent + 0.001 for later in got[place + 1 :])


def test_killed_peer_neither_sends_nor_receives(network):
    net, a, b, c = network(3)
    net.gone.add(1)
    ticks = b.ticks
    b.tell(2, 1)
    a.tell(1, 1)
    a.tell(2, 1, start=5)
    waited = a.ticks
    until(lambda: c.got and a.ticks >= waited + 2)
    assert b.got == []
    assert c.got == [(0, b"5", b"body")]
    assert b.ticks <= ticks + 1  # one may have been on its way


def test_messages_for_a_halted_peer_wait(network):
    net, a, b = network(2)
    net.halted.add(1)
    a.tell(1, 5)
    waited, before = a.ticks, b.ticks
    until(lambda: a.ticks >= waited + 3)
    ticks = b.ticks
    assert b.got == []
    assert ticks <= before + 1  # one may have been on its way
    net.halted.discard(1)
    until(lambda: len(b.got) == 5 and b.ticks > ticks)
    assert b.numbers() == list(range(5))


def test_second_transport_of_a_peer_replaces_the_first(network):
    net, a, b = network(2)
    net.gone.add(1)
    again = Ear(net, 1)
    assert 1 not in net.gone  # started again
    a.tell(1, 2)
    until(lambda: len(again.got) == 2)
    assert b.got == []
    b.transport.close()  # the first leaves late: the second stays
    a.tell(1, 1, start=2)
    until(lambda: len(again.got) == 3)
    again.transport.close()
    a.tell(1, 1, start=3)
    a.tell(0, 1)
    until(lambda: a.got)
    assert len(again.got) == 3


def test_quiet_in_memory_is_the_time_since_the_last_message(network):
    _, a, b, c = network(3)
    started = time.monotonic()
    until(lambda: b.transport.quiet(0) > 0.1)
    assert b.transport.quiet(0) <= time.monotonic() - started + 0.1
    before = time.monotonic()
    a.tell(1, 1)
    until(lambda: b.got)
    assert b.transport.quiet(0) <= time.monotonic() - before
    assert b.transport.quiet(2) > 0.1 > b.transport.quiet(0) or time.monotonic() - before > 0.1
    assert b.transport.quiet(2) >= time.monotonic() - started - 0.05
    assert c.transport.quiet(0) > b.transport.quiet(0)
    assert b.transport.refused() == {}


def test_quiet_counts_from_the_start():
    net = MemoryNetwork(2)
    one = net.transport(0)
    made = time.monotonic()
    until(lambda: time.monotonic() - made > 0.05)
    begun = time.monotonic()
    one.start(lambda *message: None, lambda: None)
    try:
        assert one.quiet(1) <= time.monotonic() - begun
    finally:
        one.close()


def test_thread_ends_when_all_transports_have_left(network):
    net, a, b = network(2)
    first = net._thread
    assert first.is_alive()
    a.transport.close()
    a.transport.close()  # twice does no harm
    assert first.is_alive()
    b.transport.close()
    first.join(5)
    assert not first.is_alive()
    c, d = Ear(net, 0), Ear(net, 1)
    c.tell(1, 1)
    until(lambda: d.got)
    second = net._thread
    c.transport.close()
    d.transport.close()
    second.join(5)
    assert not second.is_alive()


def test_concurrent_messages_have_different_numbers(network):
    drawn = []

    class Watched(Faults):
        def delays(self, sender, receiver, number):
            drawn.append((sender, receiver, number))
            return []

    _, a, _ = network(2, Watched())
    writers = [threading.Thread(target=a.tell, args=(1, 300)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(drawn) == [(0, 1, number) for number in range(1, 1201)]


class Counted:
    def __init__(self):
        self.sent, self.calls = [], []

    def start(self, take, tick):
        self.calls.append("start")

    def send(self, to, head, body=b"", *, newest=None):
        self.sent.append((to, head, body, newest))

    def quiet(self, peer):
        return 3.5 + peer

    def refused(self):
        return {"key": 2}

    def close(self):
        self.calls.append("close")


def test_lossy_transport_drops_the_messages_of_its_seed():
    inner, faults = Counted(), Faults(loss=0.3, doubled=0.9, seed=11)
    lossy = Lossy(inner, 2, 3, faults)
    for number in range(400):
        lossy.send(number % 2, b"%d" % number, b"x", newest="mark")
    sent = [[int(head) // 2 for to, head, _, _ in inner.sent if to == receiver] for receiver in (0, 1)]
    expected = [[number for number in range(200) if faults.delays(2, receiver, number + 1)] for receiver in (0, 1)]
    assert sent == expected
    assert sent[0] != sent[1]
    assert 0.6 < len(inner.sent) / 400 < 0.8
    assert {(body, mark) for _, _, body, mark in inner.sent} == {(b"x", "mark")}
    lossy.start(lambda *message: None, lambda: None)
    assert (lossy.quiet(1), lossy.refused()) == (4.5, {"key": 2})
    lossy.close()
    assert inner.calls == ["start", "close"]
