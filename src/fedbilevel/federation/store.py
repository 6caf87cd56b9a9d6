"""Rows that clients keep, by name and client."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedbilevel.problem.layout import one_row

Rows = Tensor | tuple[Tensor, ...]
ROOM = 2**32  # bytes that fixed rows of all clients may take


@dataclass
class _Shelf:
    """Rows of one name, for all clients in order or only for clients that have written.

    In the second case rows are in the order of first writes, with capacity for more rows.
    """

    rows: Tensor
    slots: Tensor | None = None  # (n,) the place of a client's row, or -1; None: rows are those of all clients in order
    count: int = 0  # slots taken
    common: Tensor | None = None  # (d,) the row of every client without a slot
    lent: bool = False  # another object may hold `rows`


class Store:
    """Rows of hosted clients, by name.

    Memory is used only for clients that have written. Rows are copied only when a part is written
    over shared rows.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.changes = 0  # a counter, so that a save can be skipped when nothing is new
        self._shelves: dict[str, _Shelf] = {}
        self._fixed: dict[str, Tensor] = {}  # memory of rows that captured outer iterations use
        self._on_cpu = False

    def move_to_cpu(self) -> None:
        """Keep all rows in the memory of the CPU, from which a GPU can copy; reads are where their default is."""
        self._on_cpu = True
        for shelf in self._shelves.values():
            shelf.rows, shelf.common = shelf.rows.cpu(), None if shelf.common is None else shelf.common.cpu()

    @property
    def written(self) -> dict[str, Tensor]:
        """Flags (n,) by name of the clients that have written."""
        everybody = torch.ones(self.num_rows, dtype=torch.bool)
        return {
            name: everybody if shelf.slots is None or shelf.common is not None else shelf.slots >= 0
            for name, shelf in self._shelves.items()
        }

    @property
    def rows(self) -> dict[str, Tensor]:
        """Rows (n, d) by name, zero for clients that have not written.

        This property is for inspection, because it may build a matrix.
        """
        return {name: self._whole(shelf) for name, shelf in self._shelves.items()}

    def read(self, name: str, positions: Tensor, default: Tensor) -> Tensor:
        if name not in self._shelves:
            return default
        shelf = self._shelves[name]
        if self._on_cpu:
            slot = positions if shelf.slots is None else shelf.slots[positions]
            pinned = len(slot) == 1 and int(slot) >= 0
            found = shelf.rows[int(slot)][None] if pinned else self._taken(shelf, positions, default)
            # pinned rows are copied while the CPU goes on; the copy in `write` waits for the device
            return found.to(default.device, non_blocking=True, copy=True)
        if self._is_all(positions):
            if shelf.slots is None:
                shelf.lent = True
                return shelf.rows
            if shelf.common is not None and shelf.count == 0:
                return shelf.common.expand(self.num_rows, -1)
        return self._taken(shelf, positions, default)

    def own(self, name: str, positions: Tensor) -> Tensor:
        """Return a copy of the rows of the clients at `positions`, in any order.

        All of these clients must have written.
        """
        shelf = self._shelves[name]
        return self._taken(shelf, positions, shelf.rows[:0])

    def write(self, name: str, positions: Tensor, rows: Tensor) -> None:
        self.changes += 1
        if self._on_cpu and rows.device.type != "cpu":
            rows = one_row(rows).cpu().expand(rows.shape)
        if self._is_all(positions):
            if rows.stride(0) == 0 and self.num_rows > 1:  # views of one vector
                self._shelves[name] = _Shelf(
                    rows.new_empty(0, rows.shape[1]), torch.full((self.num_rows,), -1), common=rows[0].clone()
                )
            else:
                self._shelves[name] = _Shelf(rows.contiguous(), lent=True)  # the phase may still use these rows
            return
        shelf = self._shelves.setdefault(
            name, _Shelf(rows.new_empty(0, rows.shape[1]), torch.full((self.num_rows,), -1))
        )
        if shelf.slots is None:
            if shelf.lent:
                shelf.rows, shelf.lent = shelf.rows.clone(), False
            slots = positions
        else:
            new = positions[shelf.slots[positions] < 0]
            self._make_room(shelf, shelf.count + len(new))
            shelf.slots[new] = torch.arange(shelf.count, shelf.count + len(new))
            shelf.count += len(new)
            slots = shelf.slots[positions]
        shelf.rows.index_copy_(0, slots.to(rows.device), rows)

    def fixed(self, name: str, like: Tensor) -> Tensor:
        """Return the rows of a name in memory with room for all clients, which stays where it is.

        like: rows of the width and type of the name, if no client has written it.
        """
        shelf = self._shelves.get(name)
        if shelf is None:
            shelf = self._shelves[name] = _Shelf(like.new_empty(0, like.shape[1]), torch.full((self.num_rows,), -1))
        if shelf.common is not None:
            zeros = shelf.rows.new_zeros(1, shelf.rows.shape[1])
            shelf = self._shelves[name] = _Shelf(self._taken(shelf, torch.arange(self.num_rows), zeros))
        if shelf.slots is not None:
            self._make_room(shelf, self.num_rows)
        before = self._fixed.get(name)
        if shelf.rows is not before:
            if before is not None and before.shape == shelf.rows.shape and before.dtype == shelf.rows.dtype:
                before.copy_(shelf.rows)
                shelf.rows = before
            else:
                self._fixed[name] = shelf.rows = shelf.rows.clone() if shelf.lent else shelf.rows
        shelf.lent = False
        return shelf.rows

    def slots(self, name: str, positions: Tensor) -> Tensor:
        """Return the places of clients in fixed rows, or -1 for clients that have not written."""
        own = self._shelves[name].slots
        return positions if own is None else own[positions]

    def claim(self, name: str, positions: Tensor) -> Tensor:
        """Count clients as having written, and return their places in fixed rows."""
        shelf = self._shelves[name]
        self.changes += 1
        if shelf.slots is not None:
            new = positions[shelf.slots[positions] < 0]
            shelf.slots[new] = torch.arange(shelf.count, shelf.count + len(new))
            shelf.count += len(new)
        return self.slots(name, positions)

    def marks(self) -> dict[str, tuple[Tensor, int]]:
        """Return by name which clients have written, for `unmark`."""
        return {
            name: (shelf.slots.clone(), shelf.count) for name, shelf in self._shelves.items() if shelf.slots is not None
        }

    def unmark(self, marks: dict[str, tuple[Tensor, int]]) -> None:
        """Count clients that have claimed a place since `marks` as new again."""
        for name, (slots, count) in marks.items():
            self._shelves[name].slots, self._shelves[name].count = slots, count

    def copied(self) -> dict[str, _Shelf]:
        """Return a copy of everything, for `restore`."""
        return {
            name: replace(shelf, rows=shelf.rows.clone(), lent=False, slots=_clone(shelf.slots))
            for name, shelf in self._shelves.items()
        }

    def restore(self, copied: dict[str, _Shelf]) -> None:
        self._shelves = {
            name: replace(shelf, rows=shelf.rows.clone(), slots=_clone(shelf.slots)) for name, shelf in copied.items()
        }

    def clear(self) -> None:
        self.changes += 1
        self._shelves.clear()

    def _make_room(self, shelf: _Shelf, count: int) -> None:
        """Double the capacity, so that a row is moved about once on average."""
        if count > len(shelf.rows):
            size = self.num_rows if self._on_cpu else max(count, min(2 * len(shelf.rows), self.num_rows))
            pinned = self._on_cpu and torch.cuda.is_available()
            rows = shelf.rows.new_empty((size, shelf.rows.shape[1]), pin_memory=pinned)
            rows[: shelf.count] = shelf.rows[: shelf.count]
            shelf.rows = rows

    def _taken(self, shelf: _Shelf, positions: Tensor, default: Tensor) -> Tensor:
        if shelf.slots is None:
            return shelf.rows[positions.to(shelf.rows.device)]
        slots, rest = (
            shelf.slots[positions],
            default if shelf.common is None else shelf.common.expand(len(positions), -1),
        )
        has, place = slots >= 0, slots.clamp(min=0).to(shelf.rows.device)
        if bool(has.all()):
            return shelf.rows[place]
        return (
            torch.where(has.to(place.device)[:, None], shelf.rows[place], rest.to(place.device))
            if bool(has.any())
            else rest.contiguous()
        )

    def _whole(self, shelf: _Shelf) -> Tensor:
        zeros = shelf.rows.new_zeros(shelf.rows.shape[1]).expand(self.num_rows, -1)
        return shelf.rows if shelf.slots is None else self._taken(shelf, torch.arange(self.num_rows), zeros)

    def _is_all(self, positions: Tensor) -> bool:
        return len(positions) == self.num_rows  # positions are distinct and sorted


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


class StoreView:
    """View of a store for a phase: the rows of the phase's own clients.

    Reading needs a default, because a client may be new.
    """

    def __init__(self, store: Store, positions: Tensor) -> None:
        self._store, self._positions = store, positions

    def read(self, name: str, *, default: Any) -> Any:
        if isinstance(default, tuple):
            return tuple(self._store.read(f"{name}.{i}", self._positions, part) for i, part in enumerate(default))
        return self._store.read(name, self._positions, default)

    def write(self, **values: Rows) -> None:
        for name, rows in values.items():
            if isinstance(rows, tuple):
                for i, part in enumerate(rows):
                    self._store.write(f"{name}.{i}", self._positions, part)
            else:
                self._store.write(name, self._positions, rows)
