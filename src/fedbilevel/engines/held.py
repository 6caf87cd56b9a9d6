"""Arrays of the server that clients hold."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Held:
    """The server's arrays that each client holds, so that an array is sent to each client once.

    Every array has its own number.
    """

    def __init__(self, num_clients: int) -> None:
        self.num_clients = num_clients
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Tensor, int]] = {}  # with version, mask and number
        # by number of an array: places whose clients all hold it, and an empty part of them
        self._at: dict[int, tuple[Tensor, Tensor]] = {}
        self._count, self._nobody = 0, torch.zeros(num_clients, dtype=torch.bool)

    def mask(self, array: Tensor) -> Tensor:
        """Return (n,) flags of the clients that hold the array, by place, for changes in place.

        An array that was modified in place counts as new.
        """
        _, _, mask, number = self._entry(array)
        self._at.pop(number, None)
        return mask

    def lacking(self, array: Tensor, places: Tensor) -> Tensor:
        """Return the places whose clients do not hold the array; they hold it from now on."""
        before = self._count
        _, _, mask, number = self._entry(array)
        known = self._at.get(number)
        if known is not None and known[0] is places:
            return known[1]
        lacks = places if number > before else places[~mask[places]]
        if lacks.shape[0] == self.num_clients:
            mask.fill_(True)
        else:
            mask[lacks] = True
        self._at[number] = (places, places[:0])
        return lacks

    def number(self, array: Tensor) -> int:
        return self._entry(array)[3]

    def at(self, place: int) -> list[int]:
        """Return the numbers of the live arrays that the client at this place holds."""
        return sorted(number for _, _, mask, number in self._known.values() if mask[place])

    def forget(self, place: int) -> None:
        """Record that the client at this place no longer holds any array."""
        self._at.clear()
        for _, _, mask, _ in self._known.values():
            mask[place] = False

    def _entry(self, array: Tensor) -> tuple[weakref.ref[Tensor], int, Tensor, int]:
        key = id(array)
        known = self._known.get(key)
        if known is None or known[0]() is not array or known[1] != array._version:
            if known is not None:
                self._at.pop(known[3], None)
            self._count += 1
            known = (
                weakref.ref(array, self._dropped(key)),
                array._version,
                self._nobody.clone(),
                self._count,
            )
            self._known[key] = known
        return known

    def _dropped(self, key: int) -> Callable[[Any], None]:
        def forget(dead: Any) -> None:
            if (
                key in self._known and self._known[key][0] is dead
            ):  # the number may have been given to a new array meanwhile
                self._at.pop(self._known.pop(key)[3], None)

        return forget
