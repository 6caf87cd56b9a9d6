"""Packing and parsing of messages between peers, every refusal, and random bytes."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.errors import WireError
from fedbilevel.peers.wire import HEAD, KINDS, SKETCH, Version, pack, unpack
from support.peers.messages import (
    COUNT,
    EPOCH,
    FINISHED,
    KIND,
    LENGTH,
    PEERS,
    TYPE,
    WEIGHT,
    example,
    flat,
    messages,
    mutated,
    parsed,
    planted,
    read,
)

# ---- round trips ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(st.data())
def test_unpack_inverts_pack_for_every_kind(kind, data):
    message = data.draw(messages(kinds=(kind,)))
    head, body = pack(message)
    assert len(head) == HEAD == 64
    assert flat(read(head, body)) == flat(message)


def test_head_has_the_documented_layout():
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


def test_array_is_not_copied_and_any_byte_order_is_accepted():
    row = np.arange(6.0)
    assert np.shares_memory(np.frombuffer(pack(example("data", array=row))[1], "<f8"), row)
    for form in (">f8", ">f4"):
        there = read(*pack(example("data", array=row.astype(form))))
        assert there.array.dtype == np.dtype(form.replace(">", "<"))
        assert there.array.tolist() == row.tolist()
    every_other = np.arange(12.0)[::2]
    assert read(*pack(example("data", array=every_other))).array.tolist() == every_other.tolist()


# ---- refusals ------------------------------------------------------------------------------------

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
    "type": (planted(DATA, TYPE, "B", 4), "its array is of the unknown type 4"),
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
def test_malformed_message_is_refused_with_the_reason(case):
    (head, body), sentence = REFUSALS[case]
    with pytest.raises(WireError) as refused:
        read(head, body)
    assert str(refused.value).startswith(sentence)
    assert str(refused.value).endswith(".")


def test_body_above_the_limit_is_refused():
    assert read(*DATA, max_bytes=24).array.tolist() == [1.0, -2.0, 3.5]
    with pytest.raises(WireError, match="it has 24 bytes, more than the 23 that any message of this run needs"):
        read(*DATA, max_bytes=23)


def test_message_for_another_number_of_peers_is_refused():
    with pytest.raises(WireError, match="it is a beat of 32 bytes about 4 peers, expected 40 bytes about 5"):
        unpack(*BEAT, num_peers=5)


def test_limits_of_ranges_are_accepted():
    assert read(*introduced(newest=-1, before=-1)).introduction.versions == (Version(-1, 1), Version(-1, 1))
    assert read(*introduced(newest=2**31 - 1, epoch=2**31 - 1)).introduction.epoch == 2**31 - 1
    assert read(*planted(BEAT, EPOCH, "I", 2**31 - 1)).epoch == 2**31 - 1


# ---- random bytes --------------------------------------------------------------------------------


@settings(max_examples=150)
@given(st.binary(max_size=200), st.binary(max_size=400), st.integers(0, 2**32 - 1))
def test_random_bytes_are_parsed_or_refused(head, body, seed):
    random = np.random.default_rng(seed)
    parsed(head, body)
    for _ in range(20):
        assert parsed(random.bytes(64), body) is None  # no magic
        told = bytearray(b"FBP1" + bytes([random.integers(7), random.integers(3)]) + random.bytes(58))
        struct.pack_into("<I", told, LENGTH, len(body))
        parsed(bytes(told), body)


@settings(max_examples=300)
@given(messages(), st.integers(0, 2**32 - 1))
def test_mutated_message_is_parsed_or_refused(message, seed):
    random, packed = np.random.default_rng(seed), pack(message)
    for _ in range(20):
        parsed(*mutated(random, packed[0], bytes(packed[1])))
