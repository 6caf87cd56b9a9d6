"""CUDA graphs of whole phases: a repeated phase is replayed instead of run.

On a GPU a small phase is hundreds of kernels of a few microseconds, and launching them from Python
takes many times as long. A phase is captured when it is called for the third time with the same
settings, shapes and plain values. Only the contents of its arrays, its clients and its place in the
run (the address of its draws) may differ; these are tensors that are filled in before a replay. So
a replay computes the same numbers as the phase. The charges of a phase are recorded during the
capture. Where step sizes change from call to call (a schedule), they are such tensors too.

Other phases run as usual: phases that read memory or scratch, and phases whose clients take unequal
numbers of steps. `outer_graphs` captures whole outer iterations, which may do both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.engines.addressed import Addressed, NotCapturable, Whereabouts, rooms
from fedbilevel.federation.algorithm import Sparse
from fedbilevel.federation.clients import Bill
from fedbilevel.problem.layout import one_row

if TYPE_CHECKING:
    from fedbilevel.federation.host import Host

Result = dict[str, Any]
_TIMES = 3  # occurrences after which a phase is captured
_REMEMBERED = 10_000  # phases whose occurrences are counted
_FINITE = "finite"
_MOST = 64  # captured phases that are kept: each holds memory


class _Pool(NamedTuple):
    """Memory that the graphs of a device share.

    anchor: a graph that is never replayed. Without it the pool ends with its last other graph, and
        while a tensor still lies in the pool, torch refuses to record into it again.
    """

    handle: Any
    anchor: Any


_POOLS: dict[torch.device, _Pool] = {}


class _Captured(NamedTuple):
    address: Tensor  # positions and numbers of the clients, outer iteration, call
    values: dict[str, Tensor]
    steps: dict[str, Tensor]  # step sizes that change from call to call
    shares: Tensor | None
    results: Result
    finite: Tensor
    bill: Bill
    replay: Callable[[], None]


class Captures:
    """Captured phases of one host."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.refused: dict[str, str] = {}  # by phase: why it is not captured
        self._times: Counter[Any] = Counter()
        self._kept: dict[Any, _Captured] = {}
        self._unseen: list[tuple[Tensor, tuple[Any, ...]]] = []  # whether results were finite, and what was replayed

    def run(
        self,
        method: Any,
        values: Mapping[str, Any],
        positions: Tensor,
        iteration: int,
        call: int,
        shares: Tensor | None,
    ) -> Result | None:
        """Return the results of the phase, or None if it must run as usual."""
        name = method.__name__
        if name in self.refused or len(positions) == 0:
            return None
        rest = (
            len(positions),
            shares is None,
            *(_form(label, value) for label, value in values.items()),
            rooms_of(self.host, positions),
        )
        key, open_key = (name, self.host.algorithm, *rest), (name, without_steps(self.host.algorithm), *rest)
        if len(self._times) > _REMEMBERED:
            self._times.clear()
        self._times.update((key, open_key))
        kept = self._kept.get(key) or self._kept.get(open_key)
        if kept is None:
            moving = self._times[key] < _TIMES <= self._times[open_key] - _TIMES
            if (self._times[key] < _TIMES and not moving) or len(self._kept) >= _MOST:
                return None
            try:
                kept = self._capture(method, values, positions, shares, moving)
                self._kept[open_key if moving else key] = kept
            except (NotCapturable, RuntimeError) as reason:  # RuntimeError: it waits for the device, or copies to it
                self.refused[name] = str(reason).split("\n", 1)[0]
                return None
        address = torch.cat([positions, self.host.ids[positions], torch.tensor([iteration, call])])
        kept.address.copy_(
            address.pin_memory() if kept.address.is_cuda else address, non_blocking=True
        )  # from other memory, a copy would wait
        for label, buffer in kept.values.items():
            buffer.copy_(one_row(values[label]))
        for label, step in kept.steps.items():
            step.fill_(getattr(self.host.algorithm, label))
        if kept.shares is not None and shares is not None:
            kept.shares.copy_(shares)
        kept.replay()
        kept.bill.pay(self.host, positions)
        self._unseen.append((kept.finite.clone(), (name, values, positions, iteration, call)))
        return {label: copied(value) for label, value in kept.results.items()}

    def suspect(self) -> tuple[Any, ...] | None:
        """Return the first phase with a non-finite result among new replays, or None.

        New replays are those since the last call of this method.
        """
        unseen, self._unseen = self._unseen, []
        if not unseen:
            return None
        fine = torch.stack([finite for finite, _ in unseen]).tolist()
        return next((what for one, (_, what) in zip(fine, unseen, strict=True) if not one), None)

    def _capture(
        self, method: Any, values: Mapping[str, Any], positions: Tensor, shares: Tensor | None, moving: bool
    ) -> _Captured:
        """Record a phase.

        moving: whether its step sizes become tensors.
        """
        host, k = self.host, len(positions)
        method, steps = with_steps(method, host.device) if moving else (method, {})
        address = torch.zeros(2 * k + 2, dtype=torch.int64, device=host.device)
        address[:k] = positions.to(host.device)  # valid numbers, should anything look at them before they are filled in
        buffers = {label: one_row(value).clone() for label, value in values.items() if isinstance(value, Tensor)}
        given = {
            label: like(buffers[label], values[label]) if label in buffers else value for label, value in values.items()
        }
        static, bill = None if shares is None else shares.clone(), Bill()

        def run(buys: Collection[str], *, frozen: bool, bill: Bill) -> tuple[Result, Mapping[str, int]]:
            with ExitStack() as stack:
                stack.enter_context(addressed(host, positions, address[:k], rooms_of(host, positions)))
                asked = stack.enter_context(host.oracle.alone(buys, frozen=frozen))
                where = Whereabouts(address[:k], address[k : 2 * k], address[2 * k], address[2 * k + 1])
                return method(Addressed(host, positions, where, static, bill), **given), asked

        _, asked = run((), frozen=False, bill=Bill())
        buys = [
            role for role, number in asked.items() if number >= int(host.data_of(role).sizes[role][positions].sum())
        ]
        for _ in range(2):  # so that every derivative has been measured, traced and, if asked for, compiled
            run(buys, frozen=False, bill=Bill())

        def last() -> Result:
            results = run(buys, frozen=True, bill=bill)[0]
            sums = [one_row(_rows(value)).sum() for value in results.values() if value is not None]
            return {**results, _FINITE: torch.isfinite(torch.stack(sums)).all()[None]}

        results, replay = recorded(last, host.device)
        return _Captured(address, buffers, steps, static, results, results.pop(_FINITE)[0], deepcopy(bill), replay)


def recorded(function: Callable[[], Result], device: torch.device) -> tuple[Result, Callable[[], None]]:
    """Return the results of a function, and a replay that recomputes them in place.

    All graphs of a device share memory: results are copied before the next replay.
    """
    if device not in _POOLS:
        _POOLS[device] = _new_pool(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with _recording(graph, _POOLS[device].handle, device):
            results = function()
    except BaseException:
        del _POOLS[device]  # the allocator still records to it
        raise
    return results, graph.replay


def _new_pool(device: torch.device) -> _Pool:
    pool = _Pool(torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph())
    torch.zeros(1, device=device)  # a kernel is loaded before it is recorded
    with _recording(pool.anchor, pool.handle, device):
        torch.zeros(1, device=device)  # torch warns of a graph without a kernel
    return pool


@contextmanager
def _recording(graph: Any, handle: Any, device: torch.device) -> Iterator[None]:
    """Record into a graph; afterwards the stream is the present one, even if recording fails."""
    with (
        torch.cuda.device(device),
        torch.cuda.stream(torch.cuda.current_stream(device)),
        torch.cuda.graph(graph, pool=handle),
    ):
        yield


@contextmanager
def without_waits(device: torch.device) -> Iterator[None]:
    """Raise within this context where the processor waits for a GPU, before a capture fails at that place."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def rooms_of(host: Host, positions: Tensor) -> tuple[Any, ...]:
    """Return the facts that shapes inside a phase depend on: room for the samples of a client."""
    return tuple(tuple(rooms(data, positions).items()) for data in (host.data, *host.parts.values()))


@contextmanager
def addressed(host: Host, positions: Tensor, here: Tensor, found: Sequence[Any]) -> Iterator[None]:
    """Read the clients from the device tensor `here` within this context.

    found: rooms of every data set, as `rooms_of` returns them.
    """
    with ExitStack() as stack:
        for data, room in zip((host.data, *host.parts.values()), found, strict=True):
            stack.enter_context(data.addressed(positions, here, dict(room)))
        yield


def without_steps(algorithm: Any) -> tuple[Any, ...]:
    """Return the settings of an algorithm that a schedule does not change."""
    return type(algorithm), *(
        getattr(algorithm, one.name) for one in fields(algorithm) if one.name not in algorithm.decays
    )


def with_steps(method: Any, device: torch.device) -> tuple[Any, dict[str, Tensor]]:
    """Return a phase of an algorithm whose step sizes are tensors, and these tensors.

    A tensor without dimensions has the same effect on rows as the number, in every dtype of rows.
    """
    algorithm = copy(method.__self__)
    steps = {
        name: torch.full((), value, dtype=torch.float64, device=device)  # a fill waits for nothing
        for name in algorithm.decays
        if isinstance(value := getattr(algorithm, name, None), float)
    }
    for name, step in steps.items():
        object.__setattr__(algorithm, name, step)  # settings are frozen
    return getattr(algorithm, method.__name__), steps


def _form(label: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return label, tuple(value.shape), value.dtype, value.ndim == 2 and value.stride(0) == 0
    return label, type(value), value


def like(buffer: Tensor, value: Tensor) -> Tensor:
    return buffer.expand(value.shape) if buffer.ndim < value.ndim else buffer


def _rows(value: Any) -> Tensor:
    return value.rows if isinstance(value, Sparse) else value


def copied(value: Any) -> Any:
    """Return a copy of a result, because the next replay overwrites the result.

    Rows that are views of one vector stay views.
    """
    if value is None:
        return None
    rows = _rows(value)
    copy = like(one_row(rows).clone(), rows)
    return Sparse(copy, value.num_kept) if isinstance(value, Sparse) else copy
