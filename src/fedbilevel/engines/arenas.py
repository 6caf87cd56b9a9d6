"""Parts of a captured outer iteration: numbers that a replay reads, and comparisons of states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedbilevel.engines import cuda_graphs
from fedbilevel.engines.addressed import NotCapturable, Partly
from fedbilevel.problem.layout import one_row

_CHANGE, _ROUNDING = 0.5, 64  # how far a replay may be off: this power of eps times the change, or these roundings


class Arena:
    """Numbers that a replay reads, in one tensor that one copy fills.

    The first run evaluates the functions that make the numbers; later runs use parts of the tensor.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._makers: list[Callable[[Any], Tensor]] = []
        self._first: list[Tensor] = []
        self._parts: list[Tensor] | None = None
        self._next = 0

    def begin(self) -> None:
        self._next = 0

    def take(self, walk: Any, make: Callable[[Any], Tensor]) -> Tensor:
        """Return the next numbers on the device."""
        number, self._next = self._next, self._next + 1
        if self._parts is not None:
            return self._parts[number]
        self._makers.append(make)
        self._first.append(make(walk).to(self.dtype))
        return self._first[-1].to(self.device)

    def pack(self) -> None:
        """Put all numbers of the first run into one tensor."""
        whole = torch.cat([torch.zeros(1, dtype=self.dtype), *self._first])
        self._hosts: list[Tensor] = []
        self.memory = whole.to(self.device, copy=True)
        self._parts = list(self.memory[1:].split([len(part) for part in self._first]))

    def drop(self) -> None:
        """Make no numbers from now on, because no replay reads them."""
        self._makers.clear()

    def fill(self, walk: Any, slot: int = 0) -> None:
        """Give the device new numbers.

        slot: number of earlier copies that may still be running, each from memory of its own.
        """
        if self._makers:
            made = [make(walk).to(self.dtype) for make in self._makers]
            while len(self._hosts) <= slot:
                pinned = self.device.type == "cuda"  # from other memory, a copy would wait
                self._hosts.append(torch.zeros(len(self.memory), dtype=self.dtype, pin_memory=pinned))
            torch.cat(made, out=self._hosts[slot][1:])
            self.memory.copy_(self._hosts[slot], non_blocking=True)


class Flags:
    """A copy of flags or counts to the processor, which waits only when they are read."""

    def __init__(self, flags: Tensor) -> None:
        self._event = None
        if not flags.is_cuda:
            self._copy = flags.clone()
            return
        self._copy = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
        self._copy.copy_(flags, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def read(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._copy


@dataclass
class Setting:
    """Where and how an outer iteration is traced.

    buys: roles whose features are computed at once for all samples, by cohort.
    exact: whether features are computed as usual, for the same bits.
    steady: whether all cohorts of the run are the same, so that their numbers never change.
    asked: numbers of samples that the trace requests, by cohort and role.
    """

    walk: Any
    ints: Arena
    floats: Arena
    buys: Mapping[int, Sequence[str]]
    frozen: bool
    exact: bool = False
    steady: bool = False
    asked: dict[int, Mapping[str, int]] = field(default_factory=dict)

    def of_cohort(self, arena: Arena, make: Callable[[Any], Tensor]) -> Tensor:
        """Return numbers that depend on a cohort alone."""
        return make(self.walk).to(arena.device, arena.dtype) if self.steady else arena.take(self.walk, make)

    def number(self, make: Callable[[Any], Any]) -> Tensor:
        return self.ints.take(self.walk, lambda walk: torch.tensor([make(walk)]))


@dataclass
class Traced:
    """One outer iteration as it was recorded.

    script: what an engine needs to repeat its bookkeeping.
    partly: charges of clients whose flags the replay computes, with their place in the script.
    saved: rows of stores before they were written: memory, places and the name of the result.
    fixed: rows of stores that must still be where they were, by store and name.
    """

    state: Any
    script: Any
    results: dict[str, Tensor]
    partly: list[tuple[Any, Partly]]
    saved: list[tuple[Tensor, Tensor, str]] = field(default_factory=list)
    fixed: dict[tuple[Any, str], Tensor] = field(default_factory=dict)

    def moved(self) -> bool:
        """Return whether rows of a store are no longer where they were; if they can be, put them there."""
        return any(store.fixed(name, rows) is not rows for (store, name), rows in self.fixed.items())


def form(values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what the shapes of an outer iteration depend on in a state."""
    seen: dict[int, int] = {}
    found: list[Any] = []
    for name, value in values.items():
        if isinstance(value, Tensor):
            shared = value.ndim == 2 and value.stride(0) == 0
            found.append((name, tuple(value.shape), value.dtype, shared, seen.setdefault(id(value), len(seen))))
        else:
            found.append((name, type(value), getattr(value, "name", value)))
    return tuple(found)


def distinct(values: Mapping[str, Any]) -> list[Tensor]:
    return list({id(value): value for value in values.values() if isinstance(value, Tensor)}.values())


def shown(values: Mapping[str, Any], inputs: Sequence[Tensor]) -> dict[str, Any]:
    """Return the values with tensors of the capture in place of the given ones."""
    known = {id(value): cuda_graphs.like(buffer, value) for value, buffer in zip(distinct(values), inputs, strict=True)}
    return {name: known[id(value)] if isinstance(value, Tensor) else value for name, value in values.items()}


def unchanged(value: Tensor, buffer: Tensor) -> bool:
    """Return whether a value of the new state is an input, unchanged."""
    one = one_row(value)
    return one.data_ptr() == buffer.data_ptr() and one.shape == buffer.shape and one.stride() == buffer.stride()


def off(got: Tensor, expected: Tensor, before: Any) -> float:
    """Return the distance of two results, in units of what rounding explains."""
    eps = torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
    got, expected = got.double(), expected.double()
    if not bool(torch.isfinite(got).all()) or not bool(torch.isfinite(expected).all()):
        return 0.0 if torch.equal(torch.isfinite(got), torch.isfinite(expected)) else float("inf")
    norm = lambda value: float(torch.linalg.vector_norm(value))
    same = isinstance(before, Tensor) and before.shape == expected.shape
    change = norm(expected - before.double()) if same else norm(expected)
    allowed = eps**_CHANGE * change + _ROUNDING * eps * norm(expected)
    apart = norm(got - expected)
    return apart / allowed if allowed else float("inf") if apart else 0.0


def reason(error: BaseException) -> str:
    """Return the first line of the first error of a chain: a failed capture fails again when it ends."""
    while isinstance(error.__context__, Exception):
        error = error.__context__
    text = str(error).split("\n", 1)[0]
    return text if isinstance(error, NotCapturable | RuntimeError) else f"{type(error).__name__}: {text}"
