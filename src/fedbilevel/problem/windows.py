"""Samples that are cut out of long arrays of tokens when a batch needs them.

The arrays may be memory-mapped files that are larger than memory: of a file only the windows are
read that a batch addresses. Arrays with few tokens are kept as one tensor on the device of the run.
Batches of later steps are announced, so that the system reads their windows while earlier steps compute.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbilevel.errors import ProblemError

KEPT = 2**26  # tokens that are kept on the device; more are read from their files for every batch


class Windows:
    """Rows (n, length) of whole numbers; row i is tokens[array[i]][start[i] : start[i] + length].

    tokens: arrays with one dimension of uint8, uint16 or int64.
    array, start: for every row, the number of its array and its first position there.
    """

    ndim = 2
    dtype = torch.int64

    def __init__(self, tokens: Sequence[np.ndarray], array: Any, start: Any, length: int) -> None:
        self.tokens, self.length = tuple(tokens), length
        self.array, self.start = (np.asarray(value, dtype=np.int64) for value in (array, start))
        self.device = torch.device("cpu")
        self._kept: tuple[Tensor, Tensor] | None = None  # all tokens, and the first place of every row there
        ends = np.array([len(one) for one in self.tokens], dtype=np.int64)
        if len(self.start) and (self.start.min() < 0 or (self.start + length > ends[self.array]).any()):
            raise ProblemError(
                f"a window of {length} tokens ends after its array: give starts of at most len(tokens) - {length}."
            )

    @classmethod
    def joined(cls, parts: Sequence[Windows]) -> Windows:
        before = np.cumsum([0, *(len(part.tokens) for part in parts)])
        return cls(
            [one for part in parts for one in part.tokens],
            np.concatenate([part.array + first for part, first in zip(parts, before, strict=False)]),
            np.concatenate([part.start for part in parts]),
            parts[0].length,
        )

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.start), self.length))

    def __len__(self) -> int:
        return len(self.start)

    def is_floating_point(self) -> bool:
        return False

    def element_size(self) -> int:
        return 8

    def to(self, device: torch.device | str) -> Windows:
        """Return these windows with their rows on a device."""
        made = Windows(self.tokens, self.array, self.start, self.length)
        made.device = torch.device(device)
        used = {id(one): one for one in self.tokens}  # one array may be given several times
        if sum(map(len, used.values())) <= KEPT:
            firsts = dict(zip(used, np.cumsum([0, *(len(one) for one in used.values())]), strict=False))
            places = np.array([firsts[id(one)] for one in self.tokens], dtype=np.int64)[self.array] + self.start
            whole = np.concatenate([np.asarray(one) for one in used.values()])
            narrow = whole if whole.dtype == np.uint8 else whole.astype(np.int32)
            made._kept = tuple(torch.from_numpy(one).to(device) for one in (narrow, places))  # type: ignore[assignment]
        return made

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        """Read rows, as `Tensor.index_select` along the first dimension."""
        if self._kept is not None:
            whole, places = self._kept
            within = torch.arange(self.length, device=self.device)
            return whole[places.index_select(0, rows)[:, None] + within].long()
        picked = rows.cpu().numpy()
        found = np.empty((len(picked), self.length), dtype=np.int64)
        arrays, places = self.array[picked], self.start[picked][:, None] + np.arange(self.length)
        for array in np.unique(arrays):  # all windows of an array in one read
            own = arrays == array
            found[own] = self.tokens[array][places[own]]
        return torch.from_numpy(found).to(self.device)

    def announce(self, rows: Tensor) -> None:
        """Let the system read these rows of memory-mapped files ahead; this does not wait for them."""
        if self._kept is not None:
            return
        picked = rows.reshape(-1).cpu().numpy()
        arrays = self.array[picked]
        for array in np.unique(arrays):
            tokens = self.tokens[array]
            mapped, first = _place(tokens)
            if mapped is None:
                continue
            starts = np.unique(first + self.start[picked[arrays == array]] * tokens.itemsize)
            for start in starts.tolist():
                page = start - start % mmap.PAGESIZE
                _read_ahead(mapped, page, start + self.length * tokens.itemsize - page)

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        if isinstance(rows, slice):
            rows = torch.arange(*rows.indices(len(self)), device=self.device)
        return self.index_select(0, rows.to(self.device))

    def view(self, *shape: int) -> Tensor:
        return self[:].view(*shape)


def _place(tokens: np.ndarray) -> tuple[mmap.mmap | None, int]:
    """Return the map of a file to which an array belongs, and the array's first byte there; None: no map."""
    mapped = getattr(tokens, "_mmap", None)
    if not isinstance(mapped, mmap.mmap):
        return None, 0
    return mapped, tokens.__array_interface__["data"][0] - np.frombuffer(mapped, np.uint8, 1).ctypes.data


def _read_ahead(mapped: mmap.mmap, start: int, length: int) -> None:
    if hasattr(mmap, "MADV_WILLNEED"):  # not on Windows
        mapped.madvise(mmap.MADV_WILLNEED, start, length)
