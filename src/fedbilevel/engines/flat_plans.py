"""Flat plans: a recorded function as a list of calls that write into memory which is allocated once.

A small outer iteration spends its time in Python and in allocations. A plan has neither: operations
on memory that never changes are computed when the plan is made, equal operations are merged,
operations whose result nobody reads are dropped, and results that are no longer read give their
memory to later ones. Every operation that remains runs with the same kernel on the same numbers, so
a replay has the bits of the function.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbilevel.engines.addressed import NotCapturable
from fedbilevel.engines.recording import Operation, Recording, Region, frozen, mapped
from fedbilevel.oracle.replay import INTO
from fedbilevel.oracle.tracing import SHAPE_ONLY

_aten = torch.ops.aten
_MOST = 2**27  # bytes of a plan; with more of them, calls are not what takes the time
_SMALL = 2**12  # entries of a result up to which the overhead of a call counts
_FLOATS = (torch.float32, torch.float64)
_EXACT = {
    _aten.mul.Tensor: np.multiply,
    _aten.add.Tensor: np.add,
    _aten.sub.Tensor: np.subtract,
    _aten.div.Tensor: np.divide,
    _aten.neg.default: np.negative,
}
_COPIES = (_aten.clone.default, _aten._to_copy.default, _aten.alias.default)


class FlatPlan:
    """The operations of a recording, ready to run.

    results: tensors of the function, by name; afterwards `self.results` has those of a replay.
    live: tensors that change between replays, or that a replay may change.
    """

    def __init__(self, recording: Recording, results: Mapping[str, Tensor], live: Iterable[Tensor]) -> None:
        self._sizes, self._outer = recording.sizes, recording.outer
        wanted = {name: recording.region(value) for name, value in results.items()}
        self._live = {recording.region(one).storage for one in live}
        self._changed = {one for step in recording.operations if step.changes for one in step.writes}
        if self._changed & self._outer.keys() - self._live:
            raise NotCapturable("it changes tensors that are not its own")
        self._memory: dict[int, torch.UntypedStorage] = dict(self._outer)  # by storage, as far as it is known
        self._constant = set(self._outer.keys() - self._live)
        self._same: dict[int, int] = {}  # storages with the content of an earlier one
        self.num_bytes = 0
        steps = self._simplified(recording.operations)
        wanted = {name: self._now(one) for name, one in wanted.items()}
        ends = {one.storage for one in wanted.values()} | self._live
        steps = self._needed(steps, ends)
        self._allocate(steps, ends)
        self.results = {name: self._tensor(one) for name, one in wanted.items()}
        self._calls = [self._call(step) for step in steps]
        read = {one.storage for step in steps for one in step.reads} | {one.storage for one in wanted.values()}
        self._read = {self._memory[one].data_ptr() for one in read}

    def __call__(self) -> None:
        with np.errstate(all="ignore"):  # values that are not finite are looked for afterwards
            for call in self._calls:
                call()

    def __len__(self) -> int:
        return len(self._calls)

    def reads(self, tensor: Tensor) -> bool:
        """Return whether a replay reads this memory, or has a result there."""
        return tensor.untyped_storage().data_ptr() in self._read

    # ---- fewer operations -----------------------------------------------------------------------------------------

    def _simplified(self, operations: Sequence[Operation]) -> list[Operation]:
        """Compute what is constant, and merge operations that are equal."""
        kept: list[Operation] = []
        seen: dict[Any, Operation] = {}
        for given in operations:
            step = Operation(given.function, mapped(given.args, self._now), mapped(given.kwargs, self._now),
                             mapped(given.result, self._now))  # fmt: skip
            known = step.function in SHAPE_ONLY or all(one.storage in self._constant for one in step.reads)
            if step.reads_values and not known:
                raise NotCapturable(f"{step.function} reads values that change")
            steady = not step.changes and not ({one.storage for one in step.reads} | step.writes) & self._changed
            if steady and (source := self._copied(step)) is not None:
                self._same[step.results[0].storage] = source.storage
                continue
            if steady:
                first = seen.setdefault((step.function, frozen(step.args), frozen(step.kwargs)), step)
                if first is not step:
                    for mine, theirs in zip(step.results, first.results, strict=True):
                        self._same[mine.storage] = theirs.storage
                    continue
            if steady and known:
                self._compute(step)
                continue
            kept.append(step)
        return kept

    def _now(self, region: Region) -> Region:
        return region._replace(storage=self._same.get(region.storage, region.storage))

    def _compute(self, step: Operation) -> None:
        if not step.writes:
            return
        at = _form_of if step.function in SHAPE_ONLY else self._tensor
        found = step.function(*mapped(step.args, at), **mapped(step.kwargs, at))
        for region, value in zip(step.results, _tensors(found), strict=True):
            self._constant.add(region.storage)
            self._memory[region.storage] = value.untyped_storage()
            self._count(value.untyped_storage().nbytes())

    def _copied(self, step: Operation) -> Region | None:
        """Return what the result repeats: a copy, or a product with one."""
        if len(step.results) != 1 or not step.args:
            return None
        (result,), first = step.results, step.args[0]
        if step.function is _aten.cat.default:
            first = first[0] if len(first) == 1 else None
        elif step.function is _aten.mul.Tensor:
            pairs = (step.args[:2], step.args[1::-1])
            first = next((one for one, other in pairs if isinstance(one, Region) and self._is_one(other)), None)
        elif step.function not in _COPIES:
            return None
        alike = isinstance(first, Region) and first._replace(storage=result.storage) == result
        return first if alike else None

    def _is_one(self, value: Any) -> bool:
        if isinstance(value, Region):
            return value.storage in self._constant and bool((self._tensor(value) == 1).all())
        return isinstance(value, int | float) and value == 1

    @staticmethod
    def _needed(steps: Sequence[Operation], ends: Iterable[int]) -> list[Operation]:
        """Drop operations whose results are not used."""
        used, kept = set(ends), list[Operation]()
        for step in reversed(steps):
            if step.writes & used:
                used |= {one.storage for one in step.reads}
                kept.append(step)
        return kept[::-1]

    # ---- memory and calls -----------------------------------------------------------------------------------------

    def _allocate(self, steps: Sequence[Operation], ends: Iterable[int]) -> None:
        """Give memory to every result until its last use."""
        last = {one: place for place, step in enumerate(steps) for one in self._touched(step)}
        last |= dict.fromkeys(ends, len(steps))
        free: defaultdict[int, list[torch.UntypedStorage]] = defaultdict(list)
        for place, step in enumerate(steps):
            for one in sorted(one for one in self._touched(step) if one not in self._memory):
                size = self._sizes[one]
                if not free[size]:
                    self._count(size)
                    free[size].append(torch.UntypedStorage(size))
                self._memory[one] = free[size].pop()
            for one in self._touched(step):
                if last[one] == place and one not in self._constant and one not in self._outer:
                    free[self._sizes[one]].append(self._memory[one])

    @staticmethod
    def _touched(step: Operation) -> set[int]:
        return {one.storage for one in (*step.reads, *step.results)}

    def _count(self, size: int) -> None:
        self.num_bytes += size
        if self.num_bytes > _MOST:
            raise NotCapturable(f"its plan needs more than {_MOST >> 20} MiB")

    def _tensor(self, region: Region) -> Tensor:
        return region.at(self._memory[region.storage])

    def _call(self, step: Operation) -> Callable[[], Any]:
        function = step.function
        args, kwargs = (mapped(one, self._tensor) for one in (step.args, step.kwargs))
        if step.changes:
            return partial(function, *args, **kwargs)
        memory = [self._tensor(one) for one in step.results]
        if (exact := _in_numpy(step, args, memory)) is not None:
            return exact
        if function in _COPIES:
            floats = memory[0].dtype in _FLOATS and args[0].dtype in _FLOATS
            if floats and memory[0].numel() <= _SMALL:
                return partial(np.copyto, memory[0].numpy(), args[0].numpy())
            return partial(memory[0].copy_, args[0])
        if function in INTO:
            return partial(INTO[function], *_with_tensors(function, args, memory[0]), **kwargs, out=memory[0])
        variant = _variant(function)
        if variant is not None and len(variant[1]) == len(memory):
            return partial(variant[0], *args, **kwargs, **dict(zip(variant[1], memory, strict=True)))
        return partial(_again, memory, function, args, kwargs)


def _form_of(region: Region) -> Tensor:
    """Return a tensor of this form whose content does not matter."""
    return torch.empty_strided(region.shape, region.strides, dtype=region.dtype)


def planned(function: Callable[[], dict[str, Tensor]], live: Callable[[], Iterable[Tensor]]) -> FlatPlan:
    """Record a function of no arguments, and return its plan.

    live: returns the tensors that change between replays, after the function has run.
    """
    with Recording() as recording:
        results = function()
    return FlatPlan(recording, results, live())


def _in_numpy(step: Operation, args: Sequence[Any], memory: Sequence[Tensor]) -> Callable[[], Any] | None:
    """Return a small exact operation as a call of numpy, which takes half as long as one of torch.

    Sums, products and quotients of two numbers are rounded once, so that they have the same bits in
    every library.
    """
    function, out = _EXACT.get(step.function), memory[0]
    if function is None or step.kwargs or out.numel() > _SMALL or out.dtype not in _FLOATS:
        return None
    given = [torch.tensor(one, dtype=out.dtype) if isinstance(one, int | float) else one for one in args]
    if not all(isinstance(one, Tensor) and one.dtype == out.dtype for one in given):
        return None
    return partial(function, *(one.numpy() for one in given), out.numpy())


@cache
def _variant(function: Any) -> tuple[Any, tuple[str, ...]] | None:
    """Return the operator that writes into given memory, with the names of that memory."""
    wanted = [(one.name, str(one.type)) for one in function._schema.arguments]
    for name in function.overloadpacket.overloads():
        other = getattr(function.overloadpacket, name)
        given = [one for one in other._schema.arguments if not one.is_out]
        outs = tuple(one.name for one in other._schema.arguments if one.is_out)
        if outs and [(one.name, str(one.type)) for one in given] == wanted:
            return other, outs
    return None


def _with_tensors(function: Any, args: Any, result: Tensor) -> Any:
    """Return a number as a tensor, because torch converts a factor in every call."""
    if function is not _aten.mul.Tensor or isinstance(args[1], Tensor):
        return args
    exact = result.dtype == args[0].dtype and args[0].is_floating_point() and isinstance(args[1], int | float)
    return (args[0], torch.tensor(args[1], dtype=args[0].dtype)) if exact else args


def _again(memory: Sequence[Tensor], function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    for own, new in zip(memory, _tensors(function(*args, **kwargs)), strict=True):
        own.copy_(new)


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors of a result; a derivative that is not asked for is None there."""
    found: list[Tensor] = []
    mapped(values, found.append, Tensor)
    return found


def counted(plan: FlatPlan) -> Counter[str]:
    """Return how often a plan calls each function, for benchmarks."""
    return Counter(str(getattr(call, "func", call)) for call in plan._calls)
