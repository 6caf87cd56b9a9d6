"""The processes that run one federation together.

Every process (a rank) runs the same loop and the same server algorithm on the same numbers; only
clients are divided. Ranks exchange what they do not know through a `Group`. The group here is that
of one process, which asks nobody; `distributed` has the group of several.
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
    """A group of one process. Every rank calls these methods at the same place of the program."""

    rank, size = 0, 1
    engine: EngineName = "simulation"

    def shares(self, num_clients: int) -> list[range]:
        """The places of the clients that each rank hosts."""
        return [range(num_clients)]

    def only(self, clients: Sequence[Holdings]) -> Sequence[Holdings]:
        """The clients that this rank hosts, at their places; the data of others are dropped."""
        return clients

    def device(self, asked: torch.device | str) -> torch.device | str:
        return asked

    def sum(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Sums of float64 vectors over the ranks."""
        return parts

    def joined(self, part: Tensor, lengths: Sequence[int], *, everywhere: bool = True) -> Tensor:
        """The flat parts of all ranks, joined; with `everywhere=False` only rank 0 receives them."""
        return part

    def swapped(self, parts: Sequence[Tensor], lengths: Sequence[int]) -> Sequence[Tensor]:
        """Exchange flat bytes with every rank; `lengths` are those to receive. Empty parts are not
        sent."""
        return parts

    def largest(self, value: int) -> int:
        return value

    def told(self, make: Callable[[], Any]) -> Any:
        """The value that `make` returns at rank 0, as JSON. Other ranks do not call `make`."""
        return make()

    def told_tensors(self, make: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        return make()

    def check_same(self, what: bytes, complaint: str) -> None:
        """Raise an error with that complaint at all ranks unless all give the same bytes."""

    def meet(self) -> None:
        """Wait until every rank is here."""

    def together(self) -> AbstractContextManager[None]:
        """A context in which an error at one rank is raised at all ranks, with the same message."""
        return nullcontext()
