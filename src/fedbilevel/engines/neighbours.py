"""The layer between peers: robust rules over neighbours' rows, and compressed rows, in gossip.

Every peer keeps copies of its own row and of the rows of its neighbours, as they know them. A step is

    q_i = C(x_i - c_i),   c_j <- c_j + q_j for all neighbours j,   x_i <- x_i + g (R_i(c) - c_i)

with the compressor C, the share of entries g that C sends, and R_i the rule over the copies with the
shares of the network. What C leaves out is in the next difference, which is error feedback. Without
C the copy is the row and g = 1. Copies begin at zero in every average, so nothing is kept between
averages. Without a rule, and with centred clipping, the sum over peers is kept.

References: Koloskova, Stich, Jaggi, "Decentralized stochastic optimization and gossip algorithms with
compressed communication", ICML 2019 (copies); He, Karimireddy, Jaggi, "Byzantine-robust
decentralized learning via ClippedGossip", 2022 (centred clipping around the own row); Yang, Bajwa,
"ByRDiE", IEEE TSIPN 2019 (trimmed means of neighbours).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedbilevel.aggregation.compression import Compressor
from fedbilevel.aggregation.robust import trimmed
from fedbilevel.aggregation.settings import Aggregation, Choice
from fedbilevel.federation.mixing import Mixing
from fedbilevel.problem.draws import Stream

_CALLS = 2**15  # addresses of draws within an outer iteration


class Part(NamedTuple):
    """The columns of one sequence in a message."""

    columns: slice
    compressor: Compressor | None
    rule: Choice | None
    step: float  # the share of entries that is sent

    @property
    def width(self) -> int:
        return int(self.columns.stop - self.columns.start)


class NeighbourLayer:
    """The layer of one run between peers."""

    def __init__(self, settings: Aggregation, stream: Stream) -> None:
        self.settings, self._stream = settings, stream
        self._own: dict[str, tuple[Choice | None, Choice | None]] = {}  # compressor and rule by name

    def parts(self, widths: Mapping[str, int], iteration: int, time: int) -> list[Part]:
        """Return the parts of a message of one step.

        widths: columns of each sequence, in the order of the columns.
        time: number of the step.
        """
        found, start = [], 0
        for name, width in widths.items():
            if name not in self._own:
                own = self.settings.of(name)
                self._own[name] = own.compressor, own.rule
            choice, rule = self._own[name]
            choice = choice if width > 1 else None
            compressor = choice and Compressor(choice, width, self._stream, f"peers/{name}", iteration, time % _CALLS)
            step = 1.0 if choice is None or choice.kind == "int8" else choice.number
            found.append(Part(slice(start, start + width), compressor, rule, step))
            start += width
        return found


def message(parts: Sequence[Part], rows: Tensor, copies: Tensor) -> Tensor:
    """Return what peers with these rows send, given the copies of their own rows.

    The result is (k, d) rows, or (k, bytes) if a part is compressed.
    """
    if all(part.compressor is None for part in parts):
        return rows
    pieces = []
    for part in parts:
        own = rows[:, part.columns]
        arrays = [own] if part.compressor is None else part.compressor.pack(own - copies[:, part.columns])
        pieces += [_packed(array).view(torch.uint8) for array in arrays]
    return torch.cat(pieces, dim=1)


def heard(parts: Sequence[Part], copies: Tensor, messages: Tensor) -> Tensor:
    """Return the copies after the messages of a step; no message is a message of zeros."""
    if messages.dtype != torch.uint8:
        return messages
    new = copies.clone()
    for part, arrays in zip(parts, unpacked(parts, messages, copies.dtype), strict=True):
        if part.compressor is None:
            new[:, part.columns] = arrays[0]
        else:
            new[:, part.columns] += part.compressor.unpack(arrays)
    return new


def unpacked(parts: Sequence[Part], messages: Tensor, dtype: torch.dtype) -> list[list[Tensor]]:
    """Return the arrays of each part of messages."""
    found, start = [], 0
    for part in parts:
        arrays = []
        for length, kind in _form(part, dtype):
            size = length * kind.itemsize
            arrays.append(_packed(messages[:, start : start + size]).view(kind))
            start += size
        found.append(arrays)
    return found


def is_valid(parts: Sequence[Part], sent: Tensor, dtype: torch.dtype) -> bool:
    """Check a message of another peer, (bytes,), before it is used."""
    for part, arrays in zip(parts, unpacked(parts, sent[None], dtype), strict=True):
        if not all(bool(torch.isfinite(array).all()) for array in arrays):
            return False
        if part.compressor is not None and part.compressor.kind == "topk":
            places = arrays[1]
            if not 0 <= int(places.min()) <= int(places.max()) < part.width:
                return False
    return True


def cost(parts: Sequence[Part], dtype: torch.dtype) -> tuple[int, int]:
    """Return the floats and bytes of one message."""
    forms = [_form(part, dtype) for part in parts]
    return sum(form[0][0] for form in forms), sum(length * kind.itemsize for form in forms for length, kind in form)


class Near(NamedTuple):
    """A peer, the peers that it receives from, itself included, and their shares."""

    number: int
    senders: Tensor
    shares: Tensor


def near_of(numbers: Sequence[int], mixing: Mixing, device: torch.device) -> list[Near]:
    """Return the neighbours of some peers."""
    matrix, found = mixing.matrix, []
    for number in numbers:
        senders = mixing.adjacency[:, number].nonzero()[:, 0]
        found.append(Near(number, senders.to(device), matrix[number, senders].to(device)))
    return found


def moved(parts: Sequence[Part], rows: Tensor, copies: Tensor, near: Sequence[Near]) -> Tensor:
    """Return the rows of some peers after a step.

    copies: of all peers, by number.
    near: neighbours of the peers of the rows.
    """
    new = rows.clone()
    wide = copies.double()
    for place, (number, senders, shares) in enumerate(near):
        theirs, own = wide[senders], wide[number]
        for part in parts:
            some, mine = theirs[:, part.columns], own[part.columns]
            change = _rule(part.rule, some, mine, shares) - mine
            new[place, part.columns] = (rows[place, part.columns].double() + part.step * change).to(rows.dtype)
    return new


def _rule(rule: Choice | None, near: Tensor, own: Tensor, shares: Tensor) -> Tensor:
    """Return one row from the copies of a peer's neighbours, itself included."""
    if rule is not None and rule.kind == "trimmed":
        return trimmed(near, shares, rule.number)
    away = near - own
    if rule is not None:
        norms = torch.linalg.vector_norm(away, dim=1).clamp(min=1e-300)
        shares = shares * (rule.number / norms).clamp(max=1.0)
    return own + (shares[:, None] * away).sum(0)


def _packed(array: Tensor) -> Tensor:
    """Return a copy with rows one after another, which can be viewed as another type."""
    return array.clone(memory_format=torch.contiguous_format)


def _form(part: Part, dtype: torch.dtype) -> list[tuple[int, torch.dtype]]:
    """Return lengths and types of the arrays of a part."""
    if part.compressor is None:
        return [(part.width, dtype)]
    types = {"int8": (torch.int8, dtype), "topk": (dtype, torch.int32)}.get(part.compressor.kind, (dtype,))
    return [*zip(part.compressor.lengths, types, strict=True)]
