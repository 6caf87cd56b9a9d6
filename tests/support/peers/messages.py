"""Valid, generated and mutated messages between peers."""

import struct

import numpy as np
from hypothesis import strategies as st

from fedbilevel.errors import WireError
from fedbilevel.peers.wire import KINDS, SKETCH, Introduction, PeerMessage, Version, pack, unpack

PEERS = 4
U32, WAY = st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1)
U64 = st.integers(0, 2**64 - 1)
DIGESTS = st.binary(min_size=16, max_size=16)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
# Offsets of the fields of a head.
KIND, TYPE, EPOCH, FINISHED, WEIGHT, LENGTH, COUNT = 4, 5, 32, 36, 48, 56, 60


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
    """Fields for a comparison, with arrays as type and bytes."""
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


def mutated(random, head, body):
    """A valid message with up to three random errors."""
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
    """Parse a message. Return None after a WireError; other errors are raised."""
    try:
        message = read(head, body)
    except WireError:
        return None
    assert flat(read(*pack(message))) == flat(message)
    return message
