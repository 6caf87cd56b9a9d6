"""Messages between peers: a header of 64 bytes, and a body whose form depends on the kind.

All numbers are little-endian. Nothing in a message is executed or unpickled. The header holds

    magic "FBP1", kind, type of the array, 2 spare bytes, run (16 bytes), incarnation (u64),
    epoch, finished, averaging, step (u32 each), weight (f64), length of the body (u32),
    number of peers (u16), 2 spare bytes

    kind      body                               meaning
    beat      view                               the sender is present; its view and its progress
    ready     view, Introduction                 the sender is ready to start with the peers in view
    data      one array                          a row of one step, or running sums
    status    numbers of messages, sketch        progress of a robust average at the sender
    want      empty                              request for a row of one step that has not arrived
    bye       view                               the sender has finished and leaves

The message does not contain its sender: the transport knows the sender from the connection.
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
Packed = tuple[bytes, bytes | memoryview]  # head, body
SKETCH = 64  # numbers in the sketch of a row
_MAGIC = b"FBP1"
_HEAD = struct.Struct("<4sBB2x16sQIIIIdIH2x")
HEAD = _HEAD.size
_TYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<f8"), 3: np.dtype("u1")}  # 3: compressed
_CODES = {dtype: code for code, dtype in _TYPES.items()}
_INTRODUCTION = struct.Struct("<d16s16s16sIQqQqQ")
MOST = 2**31  # most bytes of a body
_HIGHEST = 2**31  # epochs and outer iterations stay below, so that the next one fits into a head


class Version(NamedTuple):
    """Stored state: its outer iteration (-1 for none) and the mark of the group that produced it."""

    iteration: int = -1
    members: int = 0


@dataclass(frozen=True)
class Introduction:
    """Facts about a peer that the others need before they start.

    The digests `plan`, `roster` and `start` must be equal at all peers.
    """

    weight: float  # in means
    plan: bytes
    roster: bytes
    start: bytes  # digest of the installed version, and the form and initial values of x and y
    epoch: int  # the last one it took part in
    mark: int  # of the run that its stored states belong to; 0: none
    versions: tuple[Version, Version]


@dataclass(frozen=True)
class PeerMessage:
    """Parsed message; fields that its kind does not use keep their defaults."""

    kind: Kind
    run: bytes
    incarnation: int  # of the sender's process
    epoch: int = 0
    finished: int = 0  # outer iterations finished and stored at the sender
    averaging: int = 0
    step: int = 0
    weight: float = 0.0
    view: tuple[int, ...] = ()
    introduction: Introduction | None = None
    array: np.ndarray | None = None
    numbers: tuple[np.ndarray, np.ndarray] | None = None  # `got` and `settled` of an AveragingStatus
    sketch: np.ndarray | None = None


def pack(message: PeerMessage) -> Packed:
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
        dtype = array.dtype.newbyteorder("<")
        code, body = _CODES[dtype], array.astype(dtype, copy=False).data.cast("B")
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
    """Parse and check a message, whose array is a view of the body."""
    if len(head) != HEAD:
        raise WireError(f"its head has {len(head)} bytes, expected {HEAD}.")
    magic, kind, code, run, incarnation, epoch, finished, averaging, step, weight, length, peers = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise WireError("it does not begin like a message between peers.")
    if kind >= len(KINDS):
        raise WireError(f"it is of the unknown kind {kind}.")
    if length != len(body):
        raise WireError(f"its head announces {length} bytes, but {len(body)} follow.")
    if length > max_bytes:
        raise WireError(f"it has {length} bytes, more than the {max_bytes} that any message of this run needs.")
    if not (math.isfinite(weight) and weight >= 0):
        raise WireError(f"its weight is {weight}, expected a finite number that is not negative.")
    if max(epoch, finished) >= _HIGHEST:
        raise WireError(
            f"it is of epoch {epoch} after {finished} outer iterations, expected less than {_HIGHEST} of each."
        )
    name = KINDS[kind]
    if code not in (_TYPES if name == "data" else (0,)):
        raise WireError(f"its array is of the unknown type {code}.")
    _check_size(name, peers, length, num_peers)
    parts: dict[str, Any] = {}
    if name in ("beat", "ready", "bye"):
        parts["view"] = tuple(np.frombuffer(body, "<u8", num_peers).tolist())
        parts["introduction"] = _introduction(bytes(body[8 * num_peers :])) if name == "ready" else None
    elif name == "status":
        counts = np.frombuffer(body, "<u4", 2 * num_peers)
        parts["numbers"] = (counts[:num_peers], counts[num_peers:])
        parts["sketch"] = _finite(np.frombuffer(body, "<f8", SKETCH, 8 * num_peers))
    elif name == "data":
        dtype = _TYPES[code]
        if length == 0 or length % dtype.itemsize:
            raise WireError(f"its array of {length} bytes has no whole number of entries of {dtype.itemsize} bytes.")
        parts["array"] = _finite(np.frombuffer(body, dtype))
    return PeerMessage(name, run, incarnation, epoch, finished, averaging, step, weight, **parts)


def _check_size(name: Kind, peers: int, length: int, num_peers: int) -> None:
    sizes = {
        "beat": 8 * num_peers,
        "bye": 8 * num_peers,
        "ready": 8 * num_peers + _INTRODUCTION.size,
        "want": 0,
        "status": 8 * num_peers + 8 * SKETCH,
    }
    expected, about = sizes.get(name), 0 if name in ("want", "data") else num_peers
    if peers != about or (expected is not None and length != expected):
        size = "any" if expected is None else expected
        raise WireError(f"it is a {name} of {length} bytes about {peers} peers, expected {size} bytes about {about}.")


def _introduction(body: bytes) -> Introduction:
    weight, plan, roster, start, epoch, run, *versions = _INTRODUCTION.unpack(body)
    if not (math.isfinite(weight) and weight > 0):
        raise WireError(f"it introduces a peer with the weight {weight}, expected a positive number.")
    newest, before = Version(*versions[:2]), Version(*versions[2:])
    if epoch >= _HIGHEST or not -1 <= before.iteration <= newest.iteration < _HIGHEST:
        raise WireError("it introduces a peer with impossible versions.")
    return Introduction(weight, plan, roster, start, epoch, run, (newest, before))


def _finite(array: np.ndarray) -> np.ndarray:
    if not np.isfinite(array).all():
        raise WireError("its array holds NaN or infinity.")
    return array
