"""Processes that run one federation together.

Every process (a rank) runs the same loop and the same server algorithm on the same numbers; only
clients are divided. Ranks exchange the values that they lack through a `Group`. The group in this
module has one process and exchanges nothing; `distributed` has the group of several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from fedbilevel.problem.client_data import Holdings

EngineName = Literal["simulation", "distributed"]


class Group:
    """Group of one process; every rank calls these methods at the same point of the program."""

    rank, size = 0, 1
    engine: EngineName = "simulation"

    def shares(self, num_clients: int) -> list[range]:
        """Return the places of the clients that each rank hosts."""
        return [range(num_clients)]

    def only(self, clients: Sequence[Holdings]) -> Sequence[Holdings]:
        """Return the clients that this rank hosts, at their places, without the data of others."""
        return clients

    def device(self, asked: torch.device | str) -> torch.device | str:
        return asked

    def sum(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return sums of float64 vectors over the ranks."""
        return parts

    def joined(self, part: Tensor, lengths: Sequence[int], *, everywhere: bool = True) -> Tensor:
        """Return the joined flat parts of all ranks; only at rank 0 if `everywhere` is False."""
        return part

    def swapped(self, parts: Sequence[Tensor], lengths: Sequence[int]) -> Sequence[Tensor]:
        """Exchange flat bytes with every rank; empty parts are not sent.

        lengths: number of bytes to receive from each rank.
        """
        return parts

    def largest(self, value: int) -> int:
        return value

    def told(self, make: Callable[[], Any]) -> Any:
        """Return the JSON value that `make` returns at rank 0; other ranks do not call `make`."""
        return make()

    def told_tensors(self, make: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        return make()

    def check_same(self, what: bytes, complaint: str) -> None:
        """Raise an error with this complaint at all ranks unless all give the same bytes."""

    def meet(self) -> None:
        """Wait until every rank has called this method."""

    def together(self) -> AbstractContextManager[None]:
        """Return a context in which an error at one rank is raised at all ranks with one message."""
        return nullcontext()
