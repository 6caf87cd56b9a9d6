"""Bytes of tensors that exist at the same time, counted and not measured.

The count depends on shapes alone, so that a choice by it is the same on a busy machine. It covers
the results of operations, and not the memory that a kernel uses within one operation. Sparse tensors
have no storage of their own, and do not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Alive(TorchDispatchMode):
    """Count the storages that operations within this context have made.

    peak: the most bytes of them that existed at the same time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._most = 0  # bytes of `_seen`, some of which may be gone
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}  # an address is not reused while a reference exists

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                given = any(one.untyped_storage()._cdata == storage._cdata for one in _tensors((args, kwargs)))
                size = 0 if given else storage.nbytes()  # a view of what was there before
                self._seen[storage._cdata] = StorageWeakRef(storage), size
                self._most += size
        if self._most > self.peak:
            self.peak = max(self.peak, self.now)
        return result

    @property
    def now(self) -> int:
        """Bytes that exist now."""
        self._seen = {key: pair for key, pair in self._seen.items() if not pair[0].expired()}
        self._most = sum(size for _, size in self._seen.values())
        return self._most


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        if values.layout == torch.strided:
            yield values
    elif isinstance(values, list | tuple | dict):
        for one in values.values() if isinstance(values, dict) else values:
            yield from _tensors(one)
