"""Replays of small traces: the operations of a trace with memory that is allocated once.

On small problems a trace spends its time on calls, not on numbers: most of its operations are views,
and some depend on the samples alone. A replay keeps the result of every operation in its own memory,
so that views are made once, and operations on samples that stay the same are computed once. The other
operations run again with the same kernels on the same shapes, and write into the same memory. No
number changes, and results are copies, so that a caller may keep them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten

_aten = torch.ops.aten
_MOST = 2**20  # bytes that a replay may hold: with larger tensors, calls are not what takes the time
_RANDOM = torch.Tag.nondeterministic_seeded
INTO: dict[Any, Callable[..., Any]] = {  # functions that write into given memory, with less overhead than operators
    _aten.bmm.default: torch.bmm,
    _aten.mm.default: torch.mm,
    _aten.mv.default: torch.mv,
    _aten.dot.default: torch.dot,
    _aten.addmm.default: torch.addmm,
    _aten.mul.Tensor: torch.mul,
    _aten.div.Tensor: torch.div,
    _aten.add.Tensor: torch.add,
    _aten.sub.Tensor: torch.sub,
    _aten.neg.default: torch.neg,
    _aten.exp.default: torch.exp,
    _aten.log.default: torch.log,
    _aten.sqrt.default: torch.sqrt,
    _aten.tanh.default: torch.tanh,
    _aten.sigmoid.default: torch.sigmoid,
    _aten.pow.Tensor_Scalar: torch.pow,
    _aten.sum.dim_IntList: torch.sum,
    _aten.cat.default: torch.cat,
    _aten.gather.default: torch.gather,
}


class Unfit(Exception):
    """Signal that a trace cannot be replayed: it is large, random or writes into its inputs."""


class Replay:
    """One trace for inputs of which some are always the same tensors.

    fixed: the same tensors in every call; the others are copied into the replay's memory.
    """

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Tensor | None], fixed: Sequence[bool]) -> None:
        self._calls: list[Callable[[], Any]] = []
        self._bytes = 0
        self._kept: list[tuple[int, Tensor]] = []  # inputs that must be these tensors
        self._fed: list[tuple[int, Tensor]] = []  # inputs that are copied, and where to
        values: dict[fx.Node, Any] = {}
        known: set[fx.Node] = set()  # values that are the same in every call
        number = 0
        for node in module.graph.nodes:
            if node.op == "placeholder":
                given = inputs[number]
                if given is not None:
                    values[node] = self._input(number, given, fixed[number])
                    if fixed[number]:
                        known.add(node)
                number += 1
            elif node.op == "get_attr":
                values[node] = getattr(module, str(node.target))
                known.add(node)
            elif node.op == "call_function":
                self._add(node, values, known)
            elif node.op == "output":
                self._results = [_core(values[result]) for result in node.args[0]]

    def __call__(self, inputs: Sequence[Tensor | None]) -> list[Tensor] | None:
        """Return the results, or None if an input that is always the same is another one."""
        for number, tensor in self._kept:
            if inputs[number] is not tensor:
                return None
        for number, memory in self._fed:
            memory.copy_(inputs[number])  # type: ignore[arg-type]
        for call in self._calls:
            call()
        return [core.clone() if shape is None else core.clone().expand(shape) for core, shape in self._results]

    def _input(self, number: int, given: Tensor, is_fixed: bool) -> Tensor:
        memory = given if is_fixed else given.clone()
        self._count(memory)
        if is_fixed:
            self._kept.append((number, given))
            return given
        self._fed.append((number, memory))
        return memory

    def _add(self, node: fx.Node, values: dict[fx.Node, Any], known: set[fx.Node]) -> None:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and (schema.is_mutable or _RANDOM in node.target.tags):  # type: ignore[union-attr]
            raise Unfit
        args: Any = fx.map_arg(node.args, values.__getitem__)
        kwargs: Any = fx.map_arg(node.kwargs, values.__getitem__)
        operation: Any = node.target
        if operation is _aten.cat.default and len(args[0]) == 1:
            operation, args = _aten.alias.default, (args[0][0],)  # joining one part copies it
        result = values[node] = operation(*args, **kwargs)
        if all(one in known for one in node.all_input_nodes):
            known.add(node)
        elif operation is _aten.mul.Tensor and (other := _times_one(node, values, known)) is not None:
            values[node] = other
            return
        args = _with_tensors(operation, args, result)
        memory = _own(result, (args, kwargs))
        if memory is None:  # views, or parts of a result that has been counted
            return
        for tensor in memory:
            self._count(tensor)
        if node in known:
            return
        into = INTO.get(operation)
        if into is not None:
            self._calls.append(partial(into, *args, **kwargs, out=memory[0]))
        elif operation is _aten.clone.default:
            self._calls.append(partial(memory[0].copy_, args[0]))
        else:
            self._calls.append(partial(_again, memory, operation, args, kwargs))

    def _count(self, memory: Tensor) -> None:
        self._bytes += memory.untyped_storage().nbytes()
        if self._bytes > _MOST:
            raise Unfit


class Replayed:
    """The replay of a trace, made when it is seen which inputs stay the same tensors.

    run: the trace, a bound method of its module.
    num_vectors: number of inputs at the beginning that are points, which change.
    """

    def __init__(self, run: Any, num_vectors: int) -> None:
        self._module: fx.GraphModule | None = getattr(run, "__self__", None)
        self._num_vectors = num_vectors
        self._last: Sequence[Tensor | None] | None = None
        self._fixed: list[bool] | None = None
        self._replay: Replay | None = None

    def __call__(self, inputs: Sequence[Tensor | None]) -> list[Tensor] | None:
        """Return the results, or None if the trace must be run."""
        if self._module is None or torch.is_grad_enabled():
            return None
        if self._replay is not None and (results := self._replay(inputs)) is not None:
            return results
        last, self._last = self._last, inputs
        if last is None:
            return None
        same = [
            one is other and number >= self._num_vectors
            for number, (one, other) in enumerate(zip(inputs, last, strict=True))
        ]
        if self._fixed is not None:  # an input that has changed once is copied from now on
            same = [now and before for now, before in zip(same, self._fixed, strict=True)]
        try:
            self._replay, self._fixed = Replay(self._module, inputs, same), same
        except Unfit:
            self._module = self._replay = self._last = None
            return None
        self._last = inputs
        return self._replay(inputs)


def _again(memory: Sequence[Tensor], operation: Callable[..., Any], args: Any, kwargs: Any) -> None:
    result = operation(*args, **kwargs)
    for own, new in zip(memory, (result,) if isinstance(result, Tensor) else result, strict=True):
        own.copy_(new)


def _times_one(node: fx.Node, values: dict[fx.Node, Any], known: set[fx.Node]) -> Tensor | None:
    """Return the other factor of a product with ones, such as the first step of a backward pass."""
    for one, other in (node.args, node.args[::-1]):
        if one in known and isinstance(other, fx.Node) and bool((values[one] == 1).all()):  # type: ignore[index]
            factor: Tensor = values[other]
            if (factor.shape, factor.stride(), factor.dtype) == _form(values[node]):
                return factor
    return None


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _with_tensors(operation: Any, args: Any, result: Any) -> Any:
    """Return the arguments with a factor as a tensor, because torch converts a number in every call."""
    if operation is not _aten.mul.Tensor or isinstance(args[1], Tensor):
        return args
    first, number = args
    exact = result.dtype == first.dtype and first.is_floating_point() and isinstance(number, int | float)
    return (first, torch.tensor(number, dtype=first.dtype)) if exact else args


def _own(result: Any, given: Any) -> list[Tensor] | None:
    """Return the tensors of a result, or None if they are views of what was given."""
    tensors, _ = tree_flatten(result)
    if not all(isinstance(one, Tensor) for one in tensors):
        raise Unfit
    theirs = {one.untyped_storage().data_ptr() for one in tree_flatten(given)[0] if isinstance(one, Tensor)}
    shared = [one.untyped_storage().data_ptr() in theirs and one.numel() > 0 for one in tensors]
    if any(shared) != all(shared):
        raise Unfit
    return None if any(shared) else tensors


def _core(result: Tensor) -> tuple[Tensor, tuple[int, ...] | None]:
    """Return a result without its repeated entries, and the shape that repeats them."""
    core = result
    for axis, stride in enumerate(result.stride()):
        if stride == 0 and result.shape[axis] > 1:
            core = core.narrow(axis, 0, 1)
    return core, None if core is result else tuple(result.shape)
