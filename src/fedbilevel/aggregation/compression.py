"""Compression of rows: the arrays that travel, and the rows that they stand for.

Each compressor returns arrays with one row per client. The first array holds the values. No row
depends on the other rows, so a client sends the same bytes wherever it is hosted.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from fedbilevel.aggregation.settings import Choice
from fedbilevel.problem.draws import SERVER, Stream

_LEVELS = 127


def num_kept(share: float, width: int) -> int:
    return min(width, max(1, round(share * width)))


class Compressor:
    """A compressor for rows of one length in one call.

    stream, purpose, iteration, call: address of the draws that all clients share.
    """

    def __init__(self, choice: Choice, width: int, stream: Stream, purpose: str, iteration: int, call: int) -> None:
        self.kind, self.number, self.width = *choice, width
        self._draw = stream, purpose, iteration, call

    def pack(self, rows: Tensor) -> list[Tensor]:
        match self.kind:
            case "int8":
                return packed_int8(rows)
            case "topk":
                return packed_topk(rows, num_kept(self.number, self.width))
            case "randk":
                return [rows[:, self._places.to(rows.device)]]
        return [torch.stack([self._factors(row) for row in rows]) if len(rows) else rows.new_empty(0, self.lengths[0])]

    def unpack(self, arrays: list[Tensor]) -> Tensor:
        match self.kind:
            case "int8":
                return unpacked_int8(*arrays)
            case "topk":
                return unpacked_topk(arrays[0], arrays[1], self.width)
            case "randk":
                return (
                    arrays[0]
                    .new_zeros(len(arrays[0]), self.width)
                    .index_copy_(1, self._places.to(arrays[0].device), arrays[0])
                )
        num, (a, b, rank) = len(arrays[0]), self._shape()
        left, right = arrays[0][:, : a * rank].view(num, a, rank), arrays[0][:, a * rank :].view(num, b, rank)
        if not num:
            return arrays[0].new_empty(0, self.width)
        products = torch.stack([one @ other.T for one, other in zip(left, right, strict=True)])
        return products.reshape(num, a * b)[:, : self.width]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the arrays of one client."""
        a, b, rank = self._shape()
        kept = num_kept(self.number, self.width) if self.kind in ("topk", "randk") else 0
        return {"int8": (self.width, 1), "topk": (kept, kept), "randk": (kept,)}.get(self.kind, (rank * (a + b),))

    @cached_property
    def _places(self) -> Tensor:
        stream, purpose, iteration, call = self._draw
        first = num_kept(self.number, self.width)
        order = stream.order(f"randk/{purpose}", SERVER, self.width, iteration=iteration, call=call, first=first)
        return order.sort().values

    def _shape(self) -> tuple[int, int, int]:
        """Return the shape of a row as a matrix that is nearly square, and the rank."""
        a = math.isqrt(self.width - 1) + 1
        b = -(-self.width // a)
        return a, b, min(int(self.number) or 1, a, b)

    @cached_property
    def _start(self) -> Tensor:
        """The start of the subspace iteration, (b, rank), with entries from -1 to 1."""
        stream, purpose, iteration, call = self._draw
        _, b, rank = self._shape()
        purpose, server, width = f"powersgd/{purpose}", torch.tensor([SERVER]), b * rank
        words = stream.bits(purpose, server, iteration=iteration, call=call, steps=range(1), width=width)
        return (words.double() * 2.0**-31 - 1).view(b, rank)

    def _factors(self, row: Tensor) -> Tensor:
        """Return P and Q of one step of subspace iteration, P Q' being a projection of the row.

        PowerSGD averages P before it computes Q, which takes two rounds; here every client has its
        own factors, and one round suffices.
        """
        a, b, _ = self._shape()
        start = self._start.to(row)
        matrix = torch.cat([row, row.new_zeros(a * b - self.width)]).view(a, b)
        p = torch.linalg.qr(matrix @ start)[0]
        return torch.cat([p.reshape(-1), (matrix.T @ p).reshape(-1)])


def packed_int8(rows: Tensor) -> list[Tensor]:
    """Return entries as multiples of 1/127 of the row's largest entry, and that entry."""
    largest = rows.abs().amax(1, keepdim=True)
    codes = (rows / largest.clamp(min=torch.finfo(rows.dtype).tiny) * _LEVELS).round()
    return [codes.to(torch.int8), largest]


def unpacked_int8(codes: Tensor, largest: Tensor) -> Tensor:
    return codes.to(largest.dtype) * (largest / _LEVELS)


def packed_topk(rows: Tensor, kept: int) -> list[Tensor]:
    """Return the largest entries of every row and their places."""
    places = rows.abs().topk(kept, dim=1).indices.sort(dim=1).values
    return [rows.gather(1, places), places.to(torch.int32)]


def unpacked_topk(values: Tensor, places: Tensor, width: int) -> Tensor:
    return values.new_zeros(len(values), width).scatter_(1, places.long(), values)
