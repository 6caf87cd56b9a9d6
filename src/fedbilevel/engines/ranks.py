"""The processes that run one federation together.

Every process (a rank) runs the same loop and the same server algorithm on the same numbers; only clients are divided.
Ranks exchange what they do not know through a `Group`. The group here is that of one process, which asks nobody;
`distributed` has the group of several.
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
    """One process. All of these are asked by every rank at the same place of the program."""

    rank, size = 0, 1
    engine: EngineName = "simulation"

    def shares(self, num_clients: int) -> list[range]:
        """The places of the clients that each rank hosts."""
        return [range(num_clients)]

    def only(self, clients: Sequence[Holdings]) -> Sequence[Holdings]:
        """Those that this rank hosts, at their places; the others are let go."""
        return clients

    def device(self, asked: torch.device | str) -> torch.device | str:
        return asked

    def sum(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Float64 vectors, added over the ranks."""
        return parts

    def joined(self, part: Tensor, lengths: Sequence[int], *, everywhere: bool = True) -> Tensor:
        """Flat parts of the ranks one after the other; with `everywhere=False` only rank 0 gets them and the others nothing."""
        return part

    def swapped(self, parts: Sequence[Tensor], lengths: Sequence[int]) -> Sequence[Tensor]:
        """Flat bytes for every rank, for those of the given lengths from every rank; nothing passes where they are empty."""
        return parts

    def largest(self, value: int) -> int:
        return value

    def told(self, make: Callable[[], Any]) -> Any:
        """What rank 0 makes, plain enough for JSON. The others do not make it."""
        return make()

    def told_tensors(self, make: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        return make()

    def check_same(self, what: bytes, complaint: str) -> None:
        """An error with that complaint at all ranks unless all were given the same."""

    def meet(self) -> None:
        """Go on when everybody is here."""

    def together(self) -> AbstractContextManager[None]:
        """What fails inside at one rank fails at all of them, with the same message."""
        return nullcontext()
