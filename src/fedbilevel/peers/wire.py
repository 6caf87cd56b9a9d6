"""What peers say to each other: a head of 64 bytes, and a body whose form the kind decides. Little-endian; nothing in it is executed or unpickled.

    magic "FBP1", kind, type of the array, 2 spare, run (16 bytes), incarnation (u64), epoch, finished, averaging, step (u32 each), weight (f64),
    length of the body (u32), number of peers (u16), 2 spare

    beat      view                               I am here; this is who I think is; this is how far I am
    ready     view, Introduction                 I am about to begin with these, and this is what I have
    data      one array                          a row of one step, or running sums
    status    numbers of messages, sketch        how far a robust averaging is here
    want      nothing                            your row of that step has not arrived
    bye       view                               I have finished and go

Who sent it is not in the message: the connection knows.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from fedbilevel.errors import WireError

Kind = Literal["beat", "ready", "data", "status", "want", "bye"]
KINDS: tuple[Kind, ...] = ("beat", "ready", "data", "status", "want", "bye")
SKETCH = 64  # numbers that stand for a whole row
_MAGIC = b"FBP1"
_HEAD = struct.Struct("<4sBB2x16sQIIIIdIH2x")
HEAD = _HEAD.size
_TYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<f8")}
_CODES = {dtype: code for code, dtype in _TYPES.items()}
_INTRODUCTION = struct.Struct("<d16s16s16sIQqQqQ")
MOST = 2**31  # bytes of a body
_HIGHEST = 2**31  # epochs and outer iterations stay below, so that the next one still fits into a head


class Version(NamedTuple):
    """State that a peer could go on from: after which outer iteration, and a mark of who made it together. -1: none."""

    iteration: int = -1
    members: int = 0


@dataclass(frozen=True)
class Introduction:
    """What the others must know of a peer before they begin with it. The three digests must be equal everywhere."""

    weight: float  # how much it counts in a mean
    plan: bytes
    roster: bytes
    start: bytes  # of the version installed, the form of x and y, and where they start
    epoch: int  # the last one it was part of
    mark: int  # of the run that its stored states belong to; 0: it has none
    versions: tuple[Version, Version]


@dataclass(frozen=True)
class PeerMessage:
    kind: Kind
    run: bytes
    incarnation: int  # of the sender's process
    epoch: int = 0
    finished: int = 0  # outer iterations that the sender has finished and stored
    averaging: int = 0
    step: int = 0
    weight: float = 0.0
    view: tuple[int, ...] = ()
    introduction: Introduction | None = None
    array: np.ndarray | None = None
    numbers: tuple[np.ndarray, np.ndarray] | None = (
        None  # status: of the newest messages from everybody, and to everybody when the value settled
    )
    sketch: np.ndarray | None = None


def pack(message: PeerMessage) -> tuple[bytes, bytes | memoryview]:
    body: bytes | memoryview = b""
    code, peers = 0, len(message.view)
    if message.kind in ("beat", "ready", "bye"):
        body = np.array(message.view, "<u8").tobytes()
        if message.introduction is not None:
            me = message.introduction
            body += _INTRODUCTION.pack(
                me.weight, me.plan, me.roster, me.start, me.epoch, me.mark, *me.versions[0], *me.versions[1]
            )
    elif message.kind == "data":
        assert message.array is not None
        array = np.ascontiguousarray(message.array)
        code, body = (
            _CODES[array.dtype.newbyteorder("<")],
            array.astype(array.dtype.newbyteorder("<"), copy=False).data.cast("B"),
        )
    elif message.kind == "status":
        assert message.numbers is not None
        assert message.sketch is not None
        peers = len(message.numbers[0])
        body = np.concatenate(message.numbers).astype("<u4").tobytes() + message.sketch.astype("<f8").tobytes()
    head = _HEAD.pack(
        _MAGIC,
        KINDS.index(message.kind),
        code,
        message.run,
        message.incarnation,
        message.epoch,
        message.finished,
        message.averaging,
        message.step,
        message.weight,
        len(body),
        peers,
    )
    return head, body


def unpack(head: bytes, body: bytes | memoryview, *, num_peers: int, max_bytes: int = MOST) -> PeerMessage:
    """A message of which every number is in its range, or a WireError. The array is a view of the body."""
    if len(head) != HEAD:
        raise WireError(f"its head has {len(head)} bytes, expected {HEAD}.")
    magic, kind, code, run, incarnation, epoch, finished, averaging, step, weight, length, peers = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise WireError("it does not begin as a message of peers does.")
    if kind >= len(KINDS):
        raise WireError(f"it is of the unknown kind {kind}.")
    if length != len(body):
        raise WireError(f"it says that {length} bytes follow, and {len(body)} do.")
    if length > max_bytes:
        raise WireError(f"it has {length} bytes, more than the {max_bytes} that any message here needs.")
    if not (math.isfinite(weight) and weight >= 0):
        raise WireError(f"its weight is {weight}, expected a finite number that is not negative.")
    if max(epoch, finished) >= _HIGHEST:
        raise WireError(f"it is of epoch {epoch} after {finished} outer iterations, and no run comes that far.")
    name = KINDS[kind]
    if code not in ((1, 2) if name == "data" else (0,)):
        raise WireError(f"its array is of the unknown type {code}.")
    expected = {
        "beat": 8 * num_peers,
        "bye": 8 * num_peers,
        "ready": 8 * num_peers + _INTRODUCTION.size,
        "want": 0,
        "status": 8 * num_peers + 8 * SKETCH,
    }.get(name)
    about = 0 if name in ("want", "data") else num_peers
    if peers != about or (expected is not None and length != expected):
        raise WireError(
            f"it is a {name} of {length} bytes about {peers} peers, expected {'any' if expected is None else expected} bytes about {about}."
        )
    parts: dict[str, object] = {}
    if name in ("beat", "ready", "bye"):
        parts["view"] = tuple(np.frombuffer(body, "<u8", num_peers).tolist())
        parts["introduction"] = _introduction(bytes(body[8 * num_peers :])) if name == "ready" else None
    elif name == "status":
        counts = np.frombuffer(body, "<u4", 2 * num_peers)
        parts["numbers"], parts["sketch"] = (
            (counts[:num_peers], counts[num_peers:]),
            _finite(np.frombuffer(body, "<f8", SKETCH, 8 * num_peers)),
        )
    elif name == "data":
        dtype = _TYPES[code]
        if length == 0 or length % dtype.itemsize:
            raise WireError(f"its array of {length} bytes has no whole number of entries of {dtype.itemsize} bytes.")
        parts["array"] = _finite(np.frombuffer(body, dtype))
    return PeerMessage(name, run, incarnation, epoch, finished, averaging, step, weight, **parts)  # type: ignore[arg-type]


def _introduction(body: bytes) -> Introduction:
    weight, plan, roster, start, epoch, run, *versions = _INTRODUCTION.unpack(body)
    if not (math.isfinite(weight) and weight > 0):
        raise WireError(f"it introduces a peer that counts {weight}, expected more than nothing.")
    newest, before = Version(*versions[:2]), Version(*versions[2:])
    if epoch >= _HIGHEST or not -1 <= before.iteration <= newest.iteration < _HIGHEST:
        raise WireError("it introduces a peer with impossible versions.")
    return Introduction(weight, plan, roster, start, epoch, run, (newest, before))


def _finite(array: np.ndarray) -> np.ndarray:
    if not np.isfinite(array).all():
        raise WireError("its array holds NaN or infinity.")
    return array
