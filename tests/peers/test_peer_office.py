"""An office that receives valid, outdated, mutated and random messages."""

import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.peers.formation import Formation
from fedbilevel.peers.office import Office
from fedbilevel.peers.wire import KINDS, PeerMessage, pack
from support.peers.messages import PEERS, example, flat, messages, mutated, read
from support.peers.offices import BEAT, until


class Drawer:
    """A transport that keeps all sent messages."""

    def __init__(self):
        self.sent = []

    def send(self, to, head, body=b"", *, newest=None):
        self.sent.append((to, head, bytes(body)))

    def quiet(self, peer):
        return 0.0

    def refused(self):
        return {}

    def start(self, take, tick):
        pass

    def close(self):
        pass


RUN = Office(Drawer(), 0, list("abcd"), "one run", quorum=3).outbox.run
NOW = time.time_ns() // 2_000_000 * 2


def busy_office():
    """An office in epoch 3 at step 5, with messages of all kinds from peers 1 and 2."""
    office = Office(Drawer(), 0, list("abcd"), "one run", quorum=3)
    office.outbox.incarnation = office.membership.view[0] = NOW
    view = (NOW, *(NOW + 2 * peer for peer in range(1, PEERS)))
    office.outbox.epoch, office.outbox.step, office.exchange._awaited, office.outbox.finished = 3, 5, 4, 2
    for peer in range(1, PEERS):
        message = PeerMessage("beat", RUN, view[peer], 3, 2, 1, 5, view=view)
        office._take(peer, *pack(message))
        for kind in KINDS[1:4] if peer < 3 else ():
            office._take(peer, *pack(fitting(example(kind, step=5, averaging=int(kind == "status")), view, peer)))
        office._take(peer, *pack(fitting(example("data", step=5, averaging=1), view, peer)))
    office.agreement.formed, office.agreement._formed_view = (
        Formation((0, 1, 2, 3), (1.0,) * 4, 3, 2, False, 7),
        tuple(office.membership.view),
    )
    office.exchange.send_row(4, np.ones(3), 1.0, ())
    office.transport.sent.clear()
    office.refusals.counts.clear()
    return office


def fitting(message, view, sender):
    """The message with the run and the incarnation of its sender, so that it is accepted."""
    return replace(message, run=RUN, incarnation=view[sender], view=tuple(view) if message.view else ())


def state(office):
    rows = {
        key: {peer: flat(message) for peer, message in found.items()}
        for key, found in office.exchange._rows.items()
        if found
    }
    kept = {
        "_sums": office.exchange._sums,
        "_statuses": office.exchange._statuses,
        "_readies": office.agreement._readies,
    }
    books = {name: {peer: flat(one) for peer, one in book.items()} for name, book in kept.items()}
    books["_progress"] = dict(office.exchange._progress)
    return {
        "view": list(office.membership.view),
        "_rows": rows,
        **books,
        "left": set(office.membership.left),
        "epoch": office.outbox.epoch,
        "formed": office.agreement.formed,
        "step": office.outbox.step,
        "averaging": office.outbox.averaging,
        "finished": office.outbox.finished,
        "me": office.outbox.incarnation,
        "bans": {*office.membership.banned},
    }


MAY_CHANGE = {
    "beat": {"view", "_progress"},
    "ready": {"view", "_progress", "_readies"},
    "bye": {"view", "_progress", "left"},
    "data": {"_rows", "_sums"},
    "status": {"_statuses"},
    "want": {"view", "me"},
}


def check_taken(office, sender, head, body):
    """Hand a message over and compare the state of the office before and after."""
    before, refused = state(office), sum(office.refusals.counts.values())
    office._take(sender, head, memoryview(body))
    after, more = state(office), sum(office.refusals.counts.values()) - refused
    changed = {name for name in before if before[name] != after[name]}
    if more:
        assert more == 1
        assert not changed
        assert not office.transport.sent
        return False
    message = read(head, body)
    assert message.run == RUN
    assert all(new >= old for old, new in zip(before["view"], after["view"], strict=True))
    # Messages of earlier processes of these peers are dropped.
    other = {peer for peer in range(PEERS) if before["view"][peer] != after["view"][peer]}
    if before["view"] != after["view"]:
        assert message.view or message.kind == "want"
        changed -= {"me", "_rows", "_sums", "_statuses", "_readies", "_progress", "left"} if message.view else set()
    assert changed <= MAY_CHANGE[message.kind]
    for name in ("_sums", "_statuses", "_readies", "_progress"):
        for peer in set(range(PEERS)) - {sender} - other:
            assert before[name].get(peer) == after[name].get(peer), name
        for peer in other - {sender}:
            assert after[name].get(peer) in (None, before[name].get(peer)), name
    return True


def test_office_with_mutated_messages_changes_only_what_their_kind_may_change():
    met = Counter()
    office_with_garbage(met)
    assert min(met[kind] for kind in KINDS) > 50, met  # every kind is accepted and refused often
    assert met["refused"] > 1000, met
    assert met.total() >= 3000, met


@settings(max_examples=300)
@given(message=messages(), sender=st.integers(1, PEERS - 1), seed=st.integers(0, 2**32 - 1))
def office_with_garbage(met, message, sender, seed):
    random, office = np.random.default_rng(seed), busy_office()
    for _ in range(12):
        near = replace(
            message,
            epoch=int(random.integers(2, 5)),
            step=int(random.integers(8)),
            averaging=int(random.integers(3)),
            finished=int(random.integers(4)),
        )
        view = [status + int(random.choice([0, 0, 0, 1, 2])) for status in office.membership.view]
        view[sender] += view[sender] % 2
        packed = pack(fitting(near, view, sender))
        head, body = (
            (packed[0], bytes(packed[1])) if random.integers(3) == 0 else mutated(random, packed[0], bytes(packed[1]))
        )
        met[read(head, body).kind if check_taken(office, sender, head, body) else "refused"] += 1
        office.transport.sent.clear()
        if office.membership.view[0] != NOW or not office.membership.alive(sender):
            office = busy_office()


@settings(max_examples=60)
@given(st.binary(max_size=80), st.binary(max_size=80), st.integers(0, PEERS - 1))
def test_office_refuses_random_bytes(head, body, sender):
    office = busy_office()
    assert not check_taken(office, sender, head, body)
    assert office.refusals.counts == {"malformed": 1}


def messages_of(office, sender):
    view = office.membership.view
    return [
        fitting(example(kind, epoch=3, finished=3, step=6, averaging=averaging), view, sender)
        for kind in KINDS
        for averaging in (0, 1)
    ]


def test_valid_messages_are_accepted():
    """The tests below refuse variants of these messages."""
    for number in range(12):
        office = busy_office()
        message = messages_of(office, 1)[number]
        before = state(office)
        assert check_taken(office, 1, *map(bytes, pack(message)))
        older = (message.kind, message.averaging) == ("status", 0)
        if message.kind != "want" and not older:
            assert state(office) != before, message.kind


@pytest.mark.parametrize(("reason", "change", "sender"), [
    ("another run", {"run": b"x" * 16}, 1),
    ("outdated", {"incarnation": NOW + 2 - 2}, 1),
    ("outdated", {"incarnation": NOW + 3}, 1),  # odd: gone
    ("outdated", {}, 0),  # as if from this peer itself
    ("banned", {}, 3),
])  # fmt: skip
def test_message_of_another_run_or_process_changes_nothing(reason, change, sender):
    for number in range(12):
        office = busy_office()
        office.membership.banned.add(3)
        message = replace(messages_of(office, sender)[number], **change)
        assert not check_taken(office, sender, *map(bytes, pack(message)))
        assert office.refusals.counts == {reason: 1}


@pytest.mark.parametrize("kind", ["beat", "ready", "bye"])
def test_incarnation_more_than_a_year_ahead_is_refused(kind):
    years = 366 * 86_400_000
    for peer in (1, 2, 0):  # of the sender, of another, of the receiver
        office, lines = busy_office(), []
        office.refusals.log = lines.append
        view = [
            status + (years // 2 * 2 if number == peer else 0) for number, status in enumerate(office.membership.view)
        ]
        assert not check_taken(office, 1, *map(bytes, pack(fitting(example(kind), view, 1))))
        assert office.refusals.counts == {"malformed": 1}
        assert lines == ["a message of b was refused: it is of a time more than a year from now: compare the clocks."]


def test_view_that_contradicts_its_head_is_refused():
    office = busy_office()
    for wrong in (NOW, NOW + 4):
        message = replace(fitting(example("beat"), office.membership.view, 1), view=(NOW, wrong, NOW + 4, NOW + 6))
        assert not check_taken(office, 1, *map(bytes, pack(message)))


def test_data_before_the_first_beat_of_a_process_is_ignored():
    for kind in ("data", "status", "want"):
        office = busy_office()
        before = state(office)
        office._take(
            1, *pack(replace(fitting(example(kind, step=4), office.membership.view, 1), incarnation=NOW + 100))
        )
        assert state(office) == before
        assert not office.transport.sent


def test_row_too_many_steps_ahead_is_dropped():
    """A sender must not be able to fill the memory."""
    for epoch, step, kept in (
        (3, 5 + 255, True),
        (3, 5 + 256, False),
        (4, 255, True),
        (4, 256, False),
        (3, 3, False),
        (2, 9, False),
    ):
        office = busy_office()
        office._take(1, *pack(fitting(example("data", averaging=0, epoch=epoch, step=step), office.membership.view, 1)))
        assert (1 in office.exchange._rows.get((epoch, step), {})) == kept


def test_flood_of_refusals_is_logged_once():
    office, lines = busy_office(), []
    office.refusals.log = lines.append
    for _ in range(50):
        office._take(1, b"", memoryview(b""))
    assert len(lines) == 1
    assert office.refusals.counts == {"malformed": 50}


def test_only_the_latest_epoch_of_a_sender_is_kept():
    office = busy_office()
    for epoch in (7, 9, 8):
        office._take(1, *pack(fitting(example("data", averaging=0, epoch=epoch, step=0), office.membership.view, 1)))
    assert [key[0] for key, rows in office.exchange._rows.items() if 1 in rows and key[0] > office.outbox.epoch] == [9]
    ahead = office.outbox.averaging + 2
    for kind in ("data", "status"):
        office._take(
            1, *pack(fitting(example(kind, averaging=ahead, epoch=office.outbox.epoch), office.membership.view, 1))
        )
    assert office.refusals.counts["ahead"] == 2
    assert not office.exchange.overtaken()


def test_opened_block_leaves_as_finished_or_as_gone(team):
    t = team(3, opened=False)
    t.open(0)
    for peer, how in ((1, None), (2, ValueError)):
        office = Office(t.network.transport(peer), peer, t.names, "run", quorum=2, suspect=60.0, beat=BEAT)
        with pytest.raises(ValueError, match="stop") if how else nullcontext(), office.opened():
            until(lambda peer=peer: t.offices[0].membership.alive(peer))
            if how:
                raise how("stop")
    until(lambda: t.offices[0].membership.left == {1} and not t.offices[0].membership.alive(2))
    assert t.offices[0].membership.alive(1)
