"""A function of tensors as the list of its operations, with the memory that each reads and writes.

Views are no operations of the list: a view is a region of the memory of another tensor. Memory is
identified by its storage, and results that the function drops are freed while it is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fedbilevel.engines.addressed import NotCapturable


class Region(NamedTuple):
    """A tensor as a part of a storage."""

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def at(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.strides)


@dataclass(eq=False)
class Operation:
    """One call; tensors of `args`, `kwargs` and `result` are regions."""

    function: Any
    args: Any
    kwargs: Any
    result: Any

    def __post_init__(self) -> None:
        self.reads = regions((self.args, self.kwargs))
        self.results = regions(self.result)
        schema = self.function._schema
        self.changes = schema.is_mutable
        self.writes = {one.storage for one in self.results} - {one.storage for one in self.reads}
        if self.changes:
            values = [*self.args, *(self.kwargs.get(one.name) for one in schema.arguments[len(self.args) :])]
            for about, value in zip(schema.arguments, values, strict=False):
                if about.alias_info is not None and about.alias_info.is_write:
                    self.writes |= {one.storage for one in regions(value)}

    @property
    def reads_values(self) -> bool:
        """Return whether Python sees values, or the shape of the result depends on values."""
        tags = self.function.tags
        if self.function is torch.ops.aten.index.Tensor:
            return any(one.dtype in (torch.bool, torch.uint8) for one in regions(self.args[1]))
        return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


class Recording(TorchDispatchMode):
    """Record the operations within this context.

    outer: storages that existed before, by number.
    sizes: bytes of all storages, by number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.outer: dict[int, torch.UntypedStorage] = {}
        self.sizes: list[int] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[StorageWeakRef] = []  # an address is not reused while a weak reference exists

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotCapturable(f"{func} draws random numbers")
        places, names = mapped((args, kwargs), self.region, Tensor)
        result = func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:  # another shape of the same memory
            return result
        fresh = func._schema.is_mutable or not isinstance(result, Tensor)
        if not fresh and result.untyped_storage()._cdata in self._numbers:
            return result  # a view
        operation = Operation(func, places, names, mapped(result, self._made, Tensor))
        if operation.writes or operation.reads_values:
            self.operations.append(operation)
        return result

    def region(self, tensor: Tensor) -> Region:
        """Return the region of a tensor; memory that no operation made is outer memory."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self.outer[self._number(storage)] = storage
        return self._region(tensor)

    def _made(self, value: Tensor) -> Region:
        if value.is_conj() or value.is_neg() or value.layout != torch.strided or value.device.type != "cpu":
            raise NotCapturable("it uses tensors that are not plain memory of the processor")
        if value.untyped_storage()._cdata not in self._numbers:
            self._number(value.untyped_storage())
        return self._region(value)

    def _number(self, storage: torch.UntypedStorage) -> int:
        self._alive.append(StorageWeakRef(storage))
        self.sizes.append(storage.nbytes())
        self._numbers[storage._cdata] = len(self.sizes) - 1
        return len(self.sizes) - 1

    def _region(self, tensor: Tensor) -> Region:
        number = self._numbers[tensor.untyped_storage()._cdata]
        return Region(number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


def regions(values: Any) -> list[Region]:
    found: list[Region] = []
    mapped(values, found.append)
    return found


def mapped(values: Any, change: Callable[[Any], Any], kind: type = Region) -> Any:
    """Return nested arguments with every region, or every value of another kind, replaced."""
    if isinstance(values, kind):
        return change(values)
    if isinstance(values, list | tuple):
        return type(values)([mapped(one, change, kind) for one in values])
    if isinstance(values, dict):
        return {name: mapped(one, change, kind) for name, one in values.items()}
    return values


def frozen(values: Any) -> Any:
    """Return nested arguments as something that can be compared fast; numbers of different types differ."""
    if isinstance(values, Region):
        return values
    if isinstance(values, list | tuple):
        return tuple([frozen(one) for one in values])
    if isinstance(values, dict):
        return tuple([(name, frozen(one)) for name, one in values.items()])
    return type(values), repr(values) if isinstance(values, float) else values
