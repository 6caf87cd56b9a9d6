"""Encoding of a client's rows, and decoding at the server, for every engine.

A row that leaves a client is a difference to the base, the array of the same name and length that
the server sent with the call. A phase that returns a model under the name of the model that it
received therefore sends the change of the model. Other rows, such as gradients, have the base zero.
Sparse rows have the base zero, too, because a difference would not be sparse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedbilevel.aggregation import ring
from fedbilevel.aggregation.compression import Compressor, packed_topk, unpacked_topk
from fedbilevel.aggregation.settings import Aggregation
from fedbilevel.errors import NonFiniteError, RangeError, WireError
from fedbilevel.federation.algorithm import Algorithm, Sparse
from fedbilevel.federation.probing import PHASES
from fedbilevel.federation.store import Store
from fedbilevel.problem.draws import Stream

HEADROOM = 2.0**14  # largest entry of a row, relative to what was sent, if no setting bounds it
_REST = 32.0  # largest entry of a row with error feedback: 1 + 32 / share sent, times the clip norm


class At(NamedTuple):
    """Address of the rows of one sequence in one call."""

    phase: str
    name: str
    iteration: int
    call: int


class Fixed(NamedTuple):
    """What clients need to make integers of their rows.

    weights: of the clients here.
    bits: of an entry.
    largest: largest weight of any client.
    members: fewest clients whose noise is in the sum.
    """

    weights: Tensor
    bits: int
    largest: int
    members: int


class Way(NamedTuple):
    """How the rows of one sequence are encoded in one call, which both ends know without the rows."""

    at: At
    settings: Aggregation
    width: int
    base: Tensor | None
    bound: float  # largest entry, a power of two
    derived: bool  # from what was sent, so that a larger row is one of a run that diverges
    compressor: Compressor | None
    dtype: torch.dtype


class Ring(Protocol):
    """What is done to the weighted integers of clients: the place of noise and of masks."""

    def noised(self, integers: Tensor, ids: Tensor, way: Way, fixed: Fixed) -> Tensor:
        """Add noise to rows of weighted integers, at the clients."""

    def masked(self, integers: Tensor, ids: Tensor, at: At) -> Tensor:
        """Add masks to rows of integers, at the clients, wrapping at 2^64."""

    def unmasked(self, total: Tensor, at: At) -> Tensor:
        """Return the sum of the clients' integers from the sum of their masked integers."""


class Encoded(NamedTuple):
    """Rows of one sequence between clients and server.

    kind: the form, for the header of a message.
    arrays: what travels, with one row per client.
    rows: the differences that the arrays stand for; under a ring, the integers themselves.
    """

    way: Way
    kind: str
    arrays: list[Tensor]
    rows: Tensor

    @property
    def floats(self) -> int:
        return self.arrays[0].shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of one client."""
        return sum(array.shape[1] * array.element_size() for array in self.arrays)

    def absolute(self) -> Tensor:
        """Return rows with the base."""
        return self.rows if self.way.base is None else self.rows + self.way.base


class Layer:
    """The layer of one run.

    ring: noise and masks; None sends differences as they are, and the server makes them integers.
    """

    def __init__(self, settings: Aggregation, algorithm: Algorithm, stream: Stream, ring: Ring | None = None) -> None:
        self.settings, self.ring, self._of_rows = settings, ring, settings.of_rows()
        self._exact, self._stream = algorithm.exact, stream

    # ---- both ends ------------------------------------------------------------------------------------------------

    def way(self, at: At, width: int, sent: Mapping[str, Any], dtype: torch.dtype, *, sparse: bool = False) -> Way:
        """Return the encoding of rows of this length.

        sent: the values that the server sent with the call.
        """
        own = self._of_rows.of(at.name)
        shared = {name: value for name, value in sent.items() if isinstance(value, Tensor) and value.ndim == 1}
        base = None if sparse else base_of(at.name, width, shared)
        exact = (at.name in self._exact or at.phase in PHASES) and at.name not in (self.settings.sequences or {})
        choice = None if exact or sparse or width < 2 else own.compressor
        compressor = choice and Compressor(choice, width, self._stream, at.name, at.iteration, at.call)
        derived = (own.clip is None or exact) and own.bound is None
        if own.clip is not None and not exact:
            share = 1.0 if choice is None or choice.kind not in ("topk", "randk") else choice.number
            bound = own.clip * (1 if choice is None else 1 + _REST / share)
        elif own.bound is not None:
            bound = own.bound
        else:
            arrays = shared.values() if base is None else (base,)
            bound = HEADROOM * max([1.0, *(float(array.abs().max()) for array in arrays if array.numel())])
        settings = dataclasses.replace(own, clip=None, compress=None) if exact else own
        return Way(at, settings, width, base, ring.power_of_two(bound), derived, compressor, dtype)

    # ---- client ---------------------------------------------------------------------------------------------------

    def encode(
        self,
        phase: str,
        answers: Mapping[str, Any],
        sent: Mapping[str, Any],
        kept: set[str],
        feedback: Store,
        positions: Tensor,
        ids: Tensor,
        *,
        iteration: int,
        call: int,
        fixed: Fixed | None = None,
    ) -> dict[str, Any]:
        """Return the answers of a phase with every row that is sent as `Encoded`.

        feedback: what compression has left at each client; `positions` are those of the clients.
        ids: numbers of the clients.
        fixed: needed with a ring only.
        """
        found: dict[str, Any] = {}
        for name, value in answers.items():
            if value is None or name in kept:
                found[name] = value
                continue
            rows, sparse = (value.rows, value) if isinstance(value, Sparse) else (value, None)
            at = At(phase, name, iteration, call)
            way = self.way(at, rows.shape[1], sent, rows.dtype, sparse=sparse is not None)
            rows = rows if way.base is None else rows - way.base
            one = self._packed(way, clipped(rows, way.settings.clip), sparse, feedback, positions)
            _check_fits(way, one.rows, ids)
            found[name] = one if self.ring is None else self._sealed(self.ring, one, ids, fixed)
        return found

    def _packed(self, way: Way, rows: Tensor, sparse: Sparse | None, feedback: Store, positions: Tensor) -> Encoded:
        if sparse is not None:
            arrays = packed_topk(rows, sparse.num_kept)
            return Encoded(way, "sparse", arrays, unpacked_topk(arrays[0], arrays[1], way.width))
        if way.compressor is None:
            return Encoded(way, "rows", [rows], rows)
        label = f"{way.at.phase}.{way.at.name}"
        whole = rows + feedback.read(label, positions, torch.zeros_like(rows))
        arrays = way.compressor.pack(whole)
        sent = way.compressor.unpack(arrays)
        feedback.write(label, positions, whole - sent)
        return Encoded(way, way.compressor.kind, arrays, sent)

    def _sealed(self, own: Ring, one: Encoded, ids: Tensor, fixed: Fixed | None) -> Encoded:
        """Return the last form of rows: integers with noise and masks."""
        assert fixed is not None
        way = one.way
        values = one.arrays[0] if one.kind == "randk" else one.rows
        integers = ring.weighted(ring.fixed(values, way.bound, fixed.bits), fixed.weights)
        integers = own.masked(own.noised(integers, ids, way, fixed), ids, way.at)
        return Encoded(way, "ring", [integers], integers)

    # ---- server ---------------------------------------------------------------------------------------------------

    def received(
        self, at: At, kind: Any, arrays: Sequence[Tensor], sent: Mapping[str, Any], width: int, dtype: torch.dtype
    ) -> Encoded:
        """Return rows that arrived in a message, whose number and finiteness were checked."""
        way = self.way(at, width, sent, dtype, sparse=kind == "sparse")
        usual = "ring" if self.ring is not None else way.compressor.kind if way.compressor else "rows"
        if kind != usual and (kind != "sparse" or self.ring is not None):
            raise WireError(f"it sent {at.name} in the form {kind!r:.40}, expected {usual}.")
        arrays = list(arrays)
        if kind in ("rows", "ring"):
            lengths: tuple[int, ...] = way.compressor.lengths[:1] if kind == "ring" and way.compressor else (width,)
        else:
            lengths = (arrays[0].shape[1],) * 2 if way.compressor is None else way.compressor.lengths
        types = {"int8": (torch.int8, dtype), "ring": (torch.int64,)}.get(kind, (dtype, torch.int32))
        if [array.shape[1:] for array in arrays] != [(length,) for length in lengths] or any(
            array.dtype != one for array, one in zip(arrays, types, strict=False)
        ):
            raise WireError(f"it sent {at.name} with arrays of other lengths or types than {kind} has.")
        if kind in ("sparse", "topk"):
            places = arrays[1]
            if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < width:
                raise WireError(f"it sent {at.name} with entries outside its length.")
            rows = unpacked_topk(arrays[0], places, width)
        else:
            rows = arrays[0] if kind in ("rows", "ring") or way.compressor is None else way.compressor.unpack(arrays)
        if kind != "ring" and rows.numel() and not float(rows.abs().max()) <= way.bound:
            raise WireError(f"it sent {at.name} with an entry above the agreed bound of {way.bound:g}.")
        clip = way.settings.clip
        if kind in ("rows", "sparse") and clip is not None and bool((norms(rows) > clip * (1 + 1e-6)).any()):
            raise WireError(f"it sent {at.name} with a norm above the agreed {clip:g}.")
        return Encoded(way, str(kind), arrays, rows)

    def integers(self, one: Encoded, weights: Tensor, bits: int) -> Tensor:
        """Return the weighted integers of the clients here."""
        return one.rows if one.kind == "ring" else ring.weighted(ring.fixed(one.rows, one.way.bound, bits), weights)

    def mean(self, one: Encoded, total: Tensor, whole: int, bits: int) -> Tensor:
        """Return the mean difference in float64, from the sum of all clients' integers."""
        total = total if self.ring is None else self.ring.unmasked(total, one.way.at)
        found = ring.decoded(total, whole, one.way.bound, bits)
        compressor = one.way.compressor
        if one.kind == "ring" and compressor is not None and compressor.kind == "randk":
            return compressor.unpack([found[None]])[0]
        return found


def base_of(name: str, width: int, sent: Mapping[str, Any]) -> Tensor | None:
    """Return the array that rows of this name and length are changes of, or None."""
    base = sent.get(name)
    return base if isinstance(base, Tensor) and base.ndim == 1 and len(base) == width else None


def norms(rows: Tensor) -> Tensor:
    """Return the norm of each row in float64.

    Rows are taken one by one: a norm of several rows at once may add in another order.
    """
    if not len(rows):
        return rows.new_zeros(0, dtype=torch.float64)
    return torch.stack([torch.linalg.vector_norm(row.double()) for row in rows])


def clipped(rows: Tensor, clip: float | None) -> Tensor:
    """Return rows with norms of at most `clip`, also after rounding."""
    if clip is None or not len(rows):
        return rows
    limit = clip * (1 - 4 * torch.finfo(rows.dtype).eps)
    long = norms(rows)
    factors = (limit / long.clamp(min=limit)).to(rows.dtype)
    return rows if bool((long <= limit).all()) else rows * factors[:, None]


def _check_fits(way: Way, rows: Tensor, ids: Tensor) -> None:
    if rows.numel() and not bool(rows.abs().max() <= way.bound):
        client = int(ids[(rows.abs().amax(1) > way.bound).cpu()][0])
        entry = f"client {client} has an entry of {way.at.name!r} in phase {way.at.phase!r} above {way.bound:g}"
        if way.derived:  # a run that diverges returns to its best state, as after a value that is not finite
            raise NonFiniteError(
                f"{entry}, far above all that was sent: the steps are too long (lower the step sizes), or such entries "
                "are usual (set aggregation.bound)."
            )
        raise RangeError(
            f"{entry}, the bound of a row that was agreed before: raise aggregation.clip or aggregation.bound, or "
            "lower the step sizes."
        )
