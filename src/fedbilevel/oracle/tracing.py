"""Traces: a function of tensors as the list of its operations, so that calls have no overhead.

torch.func builds derivatives anew at every call, which takes most of the time for small clients.
This module runs the function once under `make_fx`, which records every operation. Then constants
are computed beforehand, repeated operations are merged, and unused results are dropped (such as the
value of a loss if only the gradient is needed). Every remaining operation is unchanged and has the
same inputs. A trace is valid for one set of shapes, and for functions without side effects, such as
losses.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

Flat = Callable[..., tuple[Tensor, ...]]
_aten = torch.ops.aten
_LARGEST = 2**18  # bytes of a constant that is kept; larger ones are computed in every call
SHAPE_ONLY = {
    _aten.ones_like.default,
    _aten.zeros_like.default,
    _aten.full_like.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
}
_RESHAPES = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.expand.default,
    _aten.reshape.default,
    _aten.alias.default,
    _aten.detach.default,
}
_VIEWS = _RESHAPES | {
    _aten.transpose.int,
    _aten.permute.default,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.t.default,
    _aten.split_with_sizes.default,
    _aten.split.Tensor,
}
_OUT_OF_PLACE = {  # products of a matrix and a vector use these on their own results
    _aten.squeeze_.dim: _aten.squeeze.dim,
    _aten.squeeze_.dims: _aten.squeeze.dims,
    _aten.unsqueeze_.default: _aten.unsqueeze.default,
}
_RANDOM = torch.Tag.nondeterministic_seeded


def traced(function: Flat, example: Sequence[Tensor]) -> tuple[Flat, list[bool]]:
    """Trace `function(*tensors) -> tuple of tensors` for the shapes and types of the example.

    Return the trace, and flags of the tensors that it reads; None may be passed for the others.
    """
    # these import the compiler, which a process without traces does not need
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    # one mode for the metadata of all values; otherwise make_fx makes one for each, which doubles the time
    with tracing(TracingContext(FakeTensorMode())):
        module = make_fx(function)(*example)
    graph = module.graph
    _without_changes(graph)
    values = _Values(module)
    values.run(*example)
    mutable = any(_schema(node).is_mutable for node in graph.nodes if _schema(node) is not None)
    if not mutable:  # an operation that writes into its input would change shared values
        _fold(module, values)
        _merge(graph)
    _own_results(graph)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    forward: Flat = module.forward
    return forward, [bool(node.users) for node in graph.nodes if node.op == "placeholder"]


def compiled(run: Flat) -> Flat:
    """Compile the operations into few kernels, if there is a compiler for the device.

    Sums may be rounded differently.
    """
    return torch.compile(run, fullgraph=True, dynamic=False)


class _Values(fx.Interpreter):
    """Interpreter that runs the graph once and records all shapes and small values.

    Small values may be constants.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.forms: dict[fx.Node, Any] = {}
        self.small: dict[fx.Node, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.forms[n] = (tuple(result.shape), result.stride(), result.dtype)
            if result.untyped_storage().nbytes() <= _LARGEST:
                self.small[n] = result
        return result


def _without_changes(graph: fx.Graph) -> None:
    """Replace changes of a shape in place, if nothing else reads the tensor that they change."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _OUT_OF_PLACE and len(node.args[0].users) == 1:
            node.target = _OUT_OF_PLACE[node.target]


def _schema(node: fx.Node) -> Any:
    return getattr(node.target, "_schema", None) if node.op == "call_function" else None


def _fold(module: fx.GraphModule, values: _Values) -> None:
    """Fold operations that depend on no input, and drop operations without effect."""
    graph, constant = module.graph, set()
    for node in list(graph.nodes):
        if _schema(node) is None or _RANDOM in node.target.tags:
            continue
        fixed = node.target in SHAPE_ONLY or all(one in constant for one in node.all_input_nodes)
        if fixed and node in values.small:
            constant.add(node)
        elif _changes_nothing(node, values.forms):
            node.replace_all_uses_with(node.args[0])
    for node in list(graph.nodes):
        if node in constant and any(user not in constant for user in node.users):
            name = f"_known_{node.name}"
            module.register_buffer(name, values.small[node], persistent=False)
            with graph.inserting_before(node):
                known = graph.get_attr(name)
            for user in [user for user in node.users if user not in constant]:
                user.replace_input_with(node, known)


def _changes_nothing(node: fx.Node, forms: dict[fx.Node, Any]) -> bool:
    first = node.args[0] if node.args else None
    if (
        not isinstance(first, fx.Node)
        or node not in forms
        or first not in forms
        or forms[node][::2] != forms[first][::2]
    ):
        return False
    if forms[node][1] != forms[first][1] and any(user.target in _RESHAPES for user in node.users):
        return False  # the layout differs, which matters to a view
    if node.target in _RESHAPES:
        return forms[node][1] == forms[first][1]
    scales = node.target in (
        _aten.pow.Tensor_Scalar,
        _aten.mul.Scalar,
        _aten.div.Scalar,
        _aten.mul.Tensor,
        _aten.div.Tensor,
    )
    return scales and isinstance(node.args[1], int | float) and node.args[1] == 1


def _own_results(graph: fx.Graph) -> None:
    """Copy every result that is a view of a constant, an input or another result.

    A caller can then change a result in place.
    """
    output = next(node for node in graph.nodes if node.op == "output")
    roots: set[fx.Node] = set()

    def own(node: fx.Node) -> fx.Node:
        root = node
        while root.op == "call_function" and (root.target in _VIEWS or root.target is operator.getitem):
            root = root.all_input_nodes[0]
        if root.op == "call_function" and root not in roots:
            roots.add(root)
            return node
        with graph.inserting_before(output):
            return graph.call_function(_aten.clone.default, (node,))

    output.args = (fx.map_arg(output.args[0], own),)


def _merge(graph: fx.Graph) -> None:
    """Merge equal operations on equal values."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if (
            _schema(node) is None
            and node.op != "get_attr"
            and not (node.op == "call_function" and node.target.__name__ == "getitem")
        ):
            continue
        if _schema(node) is not None and _RANDOM in node.target.tags:
            continue
        key = (node.op, node.target, repr(node.args), repr(node.kwargs))
        if key in seen:
            node.replace_all_uses_with(seen[key])
        else:
            seen[key] = node
