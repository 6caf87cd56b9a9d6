"""Messages of peers: there and back, every refusal, and what garbage does to a parser and to an office: nothing."""

import struct
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.errors import WireError
from fedbilevel.peers.formation import Formation
from fedbilevel.peers.office import Office
from fedbilevel.peers.wire import HEAD, KINDS, SKETCH, Introduction, PeerMessage, Version, pack, unpack

PEERS = 4
U32, WAY = st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1)
U64 = st.integers(0, 2**64 - 1)
DIGESTS = st.binary(min_size=16, max_size=16)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
# offsets of what a head holds
KIND, TYPE, RUN, INCARNATION, EPOCH, FINISHED, AVERAGING, STEP, WEIGHT, LENGTH, COUNT = (
    4,
    5,
    8,
    24,
    32,
    36,
    40,
    44,
    48,
    56,
    60,
)


@st.composite
def introductions(draw):
    before, newest = sorted(draw(st.tuples(st.integers(-1, 2**31 - 1), st.integers(-1, 2**31 - 1))))
    weight = draw(st.floats(min_value=0, exclude_min=True, allow_infinity=False))
    return Introduction(
        weight,
        *(draw(DIGESTS) for _ in range(3)),
        draw(WAY),
        draw(U64),
        (Version(newest, draw(U64)), Version(before, draw(U64))),
    )


@st.composite
def messages(draw, kinds=KINDS):
    kind = draw(st.sampled_from(kinds))
    parts = {}
    if kind in ("beat", "ready", "bye"):
        parts["view"] = tuple(draw(st.lists(U64, min_size=PEERS, max_size=PEERS)))
        parts["introduction"] = draw(introductions()) if kind == "ready" else None
    if kind == "data":
        width, dtype = draw(st.sampled_from([(32, "<f4"), (64, "<f8")]))
        entries = st.floats(allow_nan=False, allow_infinity=False, width=width)
        parts["array"] = np.array(draw(st.lists(entries, min_size=1, max_size=9)), dtype)
    if kind == "status":
        parts["numbers"] = tuple(np.array(draw(st.lists(U32, min_size=PEERS, max_size=PEERS)), "<u4") for _ in range(2))
        parts["sketch"] = np.array([draw(FINITE), *range(SKETCH - 2), draw(FINITE)])
    weight = draw(st.floats(min_value=0, allow_infinity=False))
    return PeerMessage(kind, draw(DIGESTS), draw(U64), draw(WAY), draw(WAY), draw(U32), draw(U32), weight, **parts)


def flat(message):
    """For a comparison: arrays as their bytes, with their type."""
    as_bytes = lambda array: None if array is None else (array.dtype.str, array.tobytes())
    numbers = None if message.numbers is None else tuple(map(as_bytes, message.numbers))
    return {**vars(message), "array": as_bytes(message.array), "sketch": as_bytes(message.sketch), "numbers": numbers}


def example(kind, **parts):
    view = {"view": (2, 4, 6, 8)} if kind in ("beat", "ready", "bye") else {}
    if kind == "ready":
        view["introduction"] = Introduction(
            1.5, b"p" * 16, b"r" * 16, b"s" * 16, 3, 99, (Version(5, 77), Version(4, 78))
        )
    if kind == "data":
        view["array"] = np.array([1.0, -2.0, 3.5])
    if kind == "status":
        view |= {"numbers": (np.arange(4), np.arange(4) + 2**31), "sketch": np.arange(SKETCH) / 7}
    return PeerMessage(
        kind, b"r" * 16, 2, **{"epoch": 3, "finished": 2, "averaging": 1, "step": 9, "weight": 0.25, **view, **parts}
    )


def planted(packed, offset, form, value):
    head = bytearray(packed[0])
    struct.pack_into("<" + form, head, offset, value)
    return bytes(head), bytes(packed[1])


def read(head, body, **options):
    return unpack(head, memoryview(bytes(body)), num_peers=PEERS, **options)


# ---- there and back --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(st.data())
def test_every_kind_comes_back_as_it_went(kind, data):
    message = data.draw(messages(kinds=(kind,)))
    head, body = pack(message)
    assert len(head) == HEAD == 64
    assert flat(read(head, body)) == flat(message)


def test_a_head_is_laid_out_as_the_module_says():
    head, body = pack(example("status"))
    assert struct.unpack("<4sBB2x16sQIIIIdIH2x", head) == (
        b"FBP1",
        KINDS.index("status"),
        0,
        b"r" * 16,
        2,
        3,
        2,
        1,
        9,
        0.25,
        len(body),
        PEERS,
    )
    assert np.frombuffer(body, "<u4", 8).tolist() == [0, 1, 2, 3, 2**31, 2**31 + 1, 2**31 + 2, 2**31 + 3]
    assert len(body) == 2 * 4 * PEERS + 8 * SKETCH


def test_an_array_is_not_copied_and_may_come_in_any_order_of_bytes():
    row = np.arange(6.0)
    assert np.shares_memory(np.frombuffer(pack(example("data", array=row))[1], "<f8"), row)
    for form in (">f8", ">f4"):
        there = read(*pack(example("data", array=row.astype(form))))
        assert there.array.dtype == np.dtype(form.replace(">", "<"))
        assert there.array.tolist() == row.tolist()
    every_other = np.arange(12.0)[::2]
    assert read(*pack(example("data", array=every_other))).array.tolist() == every_other.tolist()


# ---- every refusal -----------------------------------------------------------------------------------------------------------

BEAT, READY, DATA, STATUS, WANT, BYE = (pack(example(kind)) for kind in KINDS)
_INTRODUCED = struct.Struct("<d16s16s16sIQqQqQ")


def introduced(**parts):
    parts = {"weight": 1.0, "epoch": 0, "newest": 5, "before": 4, **parts}
    body = _INTRODUCED.pack(parts["weight"], b"", b"", b"", parts["epoch"], 9, parts["newest"], 1, parts["before"], 1)
    return READY[0], bytes(READY[1])[: 8 * PEERS] + body


def arrayed(packed, values, form="<f8"):
    body = np.array(values, form).tobytes()
    return planted((packed[0], body), LENGTH, "I", len(body))


REFUSALS = {
    "short head": ((BEAT[0][:-1], BEAT[1]), "its head has 63 bytes, expected 64"),
    "long head": ((BEAT[0] + b"x", BEAT[1]), "its head has 65 bytes, expected 64"),
    "empty head": ((b"", b""), "its head has 0 bytes, expected 64"),
    "magic": ((b"FBP2" + BEAT[0][4:], BEAT[1]), "it does not begin like a message between peers"),
    "kind": (planted(BEAT, KIND, "B", 6), "it is of the unknown kind 6"),
    "more than said": ((BEAT[0], bytes(BEAT[1]) + b"x"), "its head announces 32 bytes, but 33 follow"),
    "less than said": (planted(DATA, LENGTH, "I", 25), "its head announces 25 bytes, but 24 follow"),
    "weight NaN": (
        planted(DATA, WEIGHT, "d", np.nan),
        "its weight is nan, expected a finite number that is not negative",
    ),
    "weight infinite": (planted(BEAT, WEIGHT, "d", np.inf), "its weight is inf"),
    "weight negative": (planted(DATA, WEIGHT, "d", -1e-300), "its weight is -1e-300"),
    "epoch": (
        planted(BEAT, EPOCH, "I", 2**31),
        "it is of epoch 2147483648 after 2 outer iterations, expected less than 2147483648 of each",
    ),
    "finished": (planted(BEAT, FINISHED, "I", 2**31), "it is of epoch 3 after 2147483648 outer iterations"),
    "no type": (planted(DATA, TYPE, "B", 0), "its array is of the unknown type 0"),
    "type": (planted(DATA, TYPE, "B", 3), "its array is of the unknown type 3"),
    "type of none": (planted(BEAT, TYPE, "B", 1), "its array is of the unknown type 1"),
    "beat of other size": (
        planted((BEAT[0], bytes(BEAT[1])[8:]), LENGTH, "I", 24),
        "it is a beat of 24 bytes about 4 peers, expected 32 bytes about 4",
    ),
    "beat of other count": (
        planted(BEAT, COUNT, "H", 3),
        "it is a beat of 32 bytes about 3 peers, expected 32 bytes about 4",
    ),
    "bye that is a beat": (
        planted(planted(BYE, COUNT, "H", 5), KIND, "B", 5),
        "it is a bye of 32 bytes about 5 peers, expected 32",
    ),
    "ready without introduction": (
        planted(BEAT, KIND, "B", KINDS.index("ready")),
        "it is a ready of 32 bytes about 4 peers, expected 132 bytes about 4",
    ),
    "status without sketch": (
        planted(BEAT, KIND, "B", KINDS.index("status")),
        "it is a status of 32 bytes about 4 peers, expected 544 bytes about 4",
    ),
    "want with body": (
        planted((WANT[0], b"x"), LENGTH, "I", 1),
        "it is a want of 1 bytes about 0 peers, expected 0 bytes about 0",
    ),
    "want about peers": (
        planted(WANT, COUNT, "H", 4),
        "it is a want of 0 bytes about 4 peers, expected 0 bytes about 0",
    ),
    "data about peers": (
        planted(DATA, COUNT, "H", 1),
        "it is a data of 24 bytes about 1 peers, expected any bytes about 0",
    ),
    "no entries": (
        planted((DATA[0], b""), LENGTH, "I", 0),
        "its array of 0 bytes has no whole number of entries of 8 bytes",
    ),
    "half an entry": (
        arrayed(DATA, [1, 2, 3], "<f4"),
        "its array of 12 bytes has no whole number of entries of 8 bytes",
    ),
    "NaN in the array": (arrayed(DATA, [1.0, np.nan]), "its array holds NaN or infinity"),
    "infinity in the array": (
        planted(arrayed(DATA, [1.0, -np.inf], "<f4"), TYPE, "B", 1),
        "its array holds NaN or infinity",
    ),
    "NaN in the sketch": (
        (STATUS[0], bytes(STATUS[1])[:-8] + struct.pack("<d", np.nan)),
        "its array holds NaN or infinity",
    ),
    "counts nothing": (introduced(weight=0.0), "it introduces a peer with the weight 0.0, expected a positive number"),
    "counts less": (introduced(weight=-1.0), "it introduces a peer with the weight -1.0, expected a positive number"),
    "counts NaN": (introduced(weight=np.nan), "it introduces a peer with the weight nan"),
    "version -2": (introduced(newest=-1, before=-2), "it introduces a peer with impossible versions"),
    "versions reversed": (introduced(newest=4, before=5), "it introduces a peer with impossible versions"),
    "version too late": (introduced(newest=2**31), "it introduces a peer with impossible versions"),
    "introduced epoch too late": (introduced(epoch=2**31), "it introduces a peer with impossible versions"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_every_refusal_says_what_was_found(case):
    (head, body), sentence = REFUSALS[case]
    with pytest.raises(WireError) as refused:
        read(head, body)
    assert str(refused.value).startswith(sentence)
    assert str(refused.value).endswith(".")


def test_longer_than_anything_here_needs():
    assert read(*DATA, max_bytes=24).array.tolist() == [1.0, -2.0, 3.5]
    with pytest.raises(WireError, match="it has 24 bytes, more than the 23 that any message of this run needs"):
        read(*DATA, max_bytes=23)


def test_one_of_another_number_of_peers():
    with pytest.raises(WireError, match="it is a beat of 32 bytes about 4 peers, expected 40 bytes about 5"):
        unpack(*BEAT, num_peers=5)


def test_the_edges_of_ranges_are_inside():
    assert read(*introduced(newest=-1, before=-1)).introduction.versions == (Version(-1, 1), Version(-1, 1))
    assert read(*introduced(newest=2**31 - 1, epoch=2**31 - 1)).introduction.epoch == 2**31 - 1
    assert read(*planted(BEAT, EPOCH, "I", 2**31 - 1)).epoch == 2**31 - 1


# ---- garbage -------------------------------------------------------------------------------------------------------------------


def mutated(random, head, body):
    """One valid message, made wrong in a few of the ways that there are."""
    head, body = bytearray(head), bytearray(body)
    for _ in range(random.integers(1, 4)):
        match random.integers(9):
            case 0:
                head[random.integers(len(head))] ^= 1 << random.integers(8)
            case 1 if body:
                body[random.integers(len(body))] ^= 1 << random.integers(8)
            case 2:
                body = body[: random.integers(len(body) + 1)]
            case 3:
                body += random.bytes(int(random.integers(1, 17)))
            case 4:  # two fields of four bytes change places
                one, other = 4 * random.integers(16, size=2)
                head[one : one + 4], head[other : other + 4] = head[other : other + 4], head[one : one + 4]
            case 5 if len(body) >= 8:
                place = 8 * random.integers(len(body) // 8)
                body[place : place + 8] = struct.pack("<d", random.choice([np.nan, np.inf, -np.inf, -0.0, 1e308]))
            case 6:
                struct.pack_into("<H", head, COUNT, random.integers(8))
            case 7:
                head[KIND] = random.integers(8)
            case 8:
                struct.pack_into("<d", head, WEIGHT, random.choice([np.nan, np.inf, -1.0, 0.0, 1e308]))
    if random.integers(4):  # mostly past the first check
        struct.pack_into("<I", head, LENGTH, len(body))
    if random.integers(12) == 0:
        head = head[: random.integers(len(head))]
    return bytes(head), bytes(body)


def parsed(head, body):
    """A message or None; anything but a WireError is raised."""
    try:
        message = read(head, body)
    except WireError:
        return None
    assert flat(read(*pack(message))) == flat(message)
    return message


@settings(max_examples=150)
@given(st.binary(max_size=200), st.binary(max_size=400), st.integers(0, 2**32 - 1))
def test_bytes_are_a_letter_or_refused(head, body, seed):
    random = np.random.default_rng(seed)
    parsed(head, body)
    for _ in range(20):
        assert parsed(random.bytes(64), body) is None  # no magic
        told = bytearray(b"FBP1" + bytes([random.integers(7), random.integers(3)]) + random.bytes(58))
        struct.pack_into("<I", told, LENGTH, len(body))
        parsed(bytes(told), body)


@settings(max_examples=300)
@given(messages(), st.integers(0, 2**32 - 1))
def test_a_letter_made_wrong_is_a_letter_or_refused(message, seed):
    random, packed = np.random.default_rng(seed), pack(message)
    for _ in range(20):
        parsed(*mutated(random, packed[0], bytes(packed[1])))


# ---- garbage at an office --------------------------------------------------------------------------------------------------------


class Drawer:
    """A transport that keeps what it is given."""

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
    """In the middle of things: it has begun with all in epoch 3, is at step 5, and keeps a message of every kind of peers 1 and 2."""
    office = Office(Drawer(), 0, list("abcd"), "one run", quorum=3)
    office.outbox.incarnation = office.membership.view[0] = NOW
    nobody = (NOW, *(NOW + 2 * peer for peer in range(1, PEERS)))
    office.outbox.epoch, office.outbox.step, office.exchange._awaited, office.outbox.finished = 3, 5, 4, 2
    for peer in range(1, PEERS):
        message = PeerMessage("beat", RUN, nobody[peer], 3, 2, 1, 5, view=nobody)
        office._take(peer, *pack(message))
        for kind in KINDS[1:4] if peer < 3 else ():
            office._take(peer, *pack(fitting(example(kind, step=5, averaging=int(kind == "status")), nobody, peer)))
        office._take(peer, *pack(fitting(example("data", step=5, averaging=1), nobody, peer)))
    office.agreement.formed, office.agreement._formed_view = (
        Formation((0, 1, 2, 3), (1.0,) * 4, 3, 2, False, 7),
        tuple(office.membership.view),
    )
    office.exchange.send_row(4, np.ones(3), 1.0, ())
    office.transport.sent.clear()
    office.refusals.counts.clear()
    return office


def fitting(message, view, sender):
    """Of this run and of the sender's process, so that it is looked at."""
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
    """Hand a message over and compare what the office knows before and after."""
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
    other = {
        peer for peer in range(PEERS) if before["view"][peer] != after["view"][peer]
    }  # what earlier processes of these said is forgotten
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


def test_an_office_changes_only_by_letters_that_are_whole():
    met = Counter()
    office_with_garbage(met)
    assert min(met[kind] for kind in KINDS) > 50, met  # both ways out are taken, and all kinds are met
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
def test_an_office_refuses_bytes(head, body, sender):
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


def test_letters_that_fit_are_taken():
    """So that the refusals below are refusals of what would have been taken."""
    for number in range(12):
        office = busy_office()
        message = messages_of(office, 1)[number]
        before = state(office)
        assert check_taken(office, 1, *map(bytes, pack(message)))
        if message.kind != "want" and (message.kind, message.averaging) != (
            "status",
            0,
        ):  # which is older than the one that it has
            assert state(office) != before, message.kind


@pytest.mark.parametrize(("reason", "change", "sender"), [
    ("another run", {"run": b"x" * 16}, 1),
    ("outdated", {"incarnation": NOW + 2 - 2}, 1),
    ("outdated", {"incarnation": NOW + 3}, 1),  # odd: of one that is gone
    ("outdated", {}, 0),  # as if from this peer itself
    ("banned", {}, 3),
])  # fmt: skip
def test_letters_that_do_not_count_change_nothing(reason, change, sender):
    for number in range(12):
        office = busy_office()
        office.membership.banned.add(3)
        message = replace(messages_of(office, sender)[number], **change)
        assert not check_taken(office, sender, *map(bytes, pack(message)))
        assert office.refusals.counts == {reason: 1}


@pytest.mark.parametrize("kind", ["beat", "ready", "bye"])
def test_incarnations_progress_in_the_future_are_refused(kind):
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


def test_a_view_that_denies_its_sender_is_refused():
    office = busy_office()
    for wrong in (NOW, NOW + 4):
        message = replace(fitting(example("beat"), office.membership.view, 1), view=(NOW, wrong, NOW + 4, NOW + 6))
        assert not check_taken(office, 1, *map(bytes, pack(message)))


def test_rows_and_sums_before_the_first_beat_of_a_process_wait_for_it():
    for kind in ("data", "status", "want"):
        office = busy_office()
        before = state(office)
        office._take(
            1, *pack(replace(fitting(example(kind, step=4), office.membership.view, 1), incarnation=NOW + 100))
        )
        assert state(office) == before
        assert not office.transport.sent


def test_rows_progress_ahead_are_not_kept():
    """Whoever sends without end must not fill the memory."""
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


def test_a_flood_is_said_once():
    office, lines = busy_office(), []
    office.refusals.log = lines.append
    for _ in range(50):
        office._take(1, b"", memoryview(b""))
    assert len(lines) == 1
    assert office.refusals.counts == {"malformed": 50}


def test_rows_of_one_later_epoch_are_kept_and_averages_that_cannot_have_begun_are_refused():
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
