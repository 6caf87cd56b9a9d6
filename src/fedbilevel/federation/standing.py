"""Charges that recur: groups of clients that pay the same amounts every time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor


class Each(NamedTuple):
    """A charge of a group that differs between clients."""

    group: int
    column: str
    own: np.ndarray  # (n,) by client
    times: int


class Standing:
    """Charges of several groups of clients.

    amounts: by group, what each of its clients pays, by column.
    each: charges that differ between clients.
    """

    def __init__(self, amounts: Sequence[Mapping[str, int]], each: Sequence[Each]) -> None:
        self._amounts, self._each = amounts, each

    def settle(self, times: Sequence[Sequence[np.ndarray]], columns: Mapping[str, Tensor], num_clients: int) -> None:
        """Add the charges of several times to the columns.

        times: numbers of the clients, by time and group.
        """
        found = [np.bincount(np.concatenate(ids), minlength=num_clients) for ids in zip(*times, strict=True)]
        for amounts, number in zip(self._amounts, found, strict=True):
            for column, amount in amounts.items():
                columns[column].numpy()[:] += amount * number
        for group, column, own, many in self._each:
            columns[column].numpy()[:] += many * own * found[group]
