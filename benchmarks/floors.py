"""Floors: only the matrix products and gathers of a computation, at their real shapes.

The results go into memory that is already allocated. On CUDA the operations are captured in one
graph, so that launching them costs nothing. All other work of a method (activations, losses, steps,
averages, draws, the ledger, Python) is overhead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.clock import Row, Setup, Timing, compare


class Floor:
    """Products and gathers in the order in which they are requested. A call runs all of them again."""

    def __init__(self, setup: Setup, dtype: torch.dtype = torch.float32) -> None:
        self.setup, self.dtype = setup, dtype
        self._calls: list[Callable[[], Any]] = []
        self._buffers: dict[tuple[int, ...], list[Tensor]] = {}
        self._graph: Any = None
        self.operations = self.gathered = 0  # multiplications and additions; numbers that are gathered

    def full(self, *shape: int) -> Tensor:
        """An operand of standard normal numbers."""
        return torch.randn(shape, dtype=self.dtype, device=self.setup.device)

    def mm(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b, of matrices or of stacks of them."""
        out = self._out((*a.shape[:-1], b.shape[-1]), a, b)
        self.operations += 2 * out.numel() * a.shape[-1]
        if a.ndim == 2:
            self._calls.append(lambda: torch.mm(a, b, out=out))
        else:
            self._calls.append(lambda: torch.bmm(a, b, out=out))
        return out

    def gather(self, rows: Tensor, index: Tensor) -> Tensor:
        out = self._out((len(index), *rows.shape[1:]), rows)
        self.gathered += out.numel()
        self._calls.append(lambda: torch.index_select(rows, 0, index, out=out))
        return out

    def also(self, call: Callable[[], Any]) -> None:
        self._calls.append(call)

    def _out(self, shape: tuple[int, ...], *operands: Tensor) -> Tensor:
        """Return memory for a result. Results of one shape share it, but never with an operand."""
        busy = {operand.untyped_storage().data_ptr() for operand in operands}
        known = self._buffers.setdefault(shape, [])
        for buffer in known:
            if buffer.untyped_storage().data_ptr() not in busy:
                return buffer
        known.append(torch.empty(shape, dtype=self.dtype, device=self.setup.device))
        return known[-1]

    def __call__(self) -> None:
        if not self.setup.cuda:
            self._go()
            return
        if self._graph is None:
            self._capture()
        self._graph.replay()

    def _go(self) -> None:
        for call in self._calls:
            call()

    def _capture(self) -> None:
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(2):
                self._go()
        torch.cuda.current_stream().wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._go()


def product_rate(setup: Setup, dtype: torch.dtype = torch.float32) -> tuple[float, Timing]:
    """Operations per second of a large square product."""
    side = 128 if setup.small else 8192 if setup.cuda else 2048
    floor = Floor(setup, dtype)
    floor.mm(floor.full(side, side), floor.full(side, side))
    timing = compare({"product": floor}, setup)["product"]
    return 2 * side**3 / timing.median, timing


def copy_bandwidth(setup: Setup) -> tuple[float, Timing]:
    """Bytes per second of a large copy: read and written."""
    num = 2**16 if setup.small else 2**28 if setup.cuda else 2**26
    floor = Floor(setup)
    source, target = floor.full(num), floor.full(num)
    floor.also(lambda: target.copy_(source))
    timing = compare({"copy": floor}, setup)["copy"]
    return 2 * num * source.element_size() / timing.median, timing


def limits(setup: Setup) -> list[Row]:
    """The best rates of this machine, to interpret floors."""
    rate, product = product_rate(setup)
    bandwidth, copy = copy_bandwidth(setup)
    row = lambda what, timing: {"name": "machine", "what": what, "seconds": timing.median, "spread": timing.spread}
    return [
        {**row(f"large product, {rate / 1e9:.4g} GFLOP/s in float32", product), "gflops": rate / 1e9},
        {**row(f"large copy, {bandwidth / 1e9:.4g} GB/s", copy), "gigabytes_per_second": bandwidth / 1e9},
    ]


class Network:
    """Products of a network pixels - hidden - classes, without activations and losses.

    x is the hidden layer, y the head.
    """

    def __init__(self, floor: Floor, pixels: int, hidden: int, classes: int) -> None:
        self.floor, self.pixels, self.hidden, self.classes = floor, pixels, hidden, classes
        self.inner, self.head, self.vector = (
            floor.full(pixels, hidden),
            floor.full(hidden, classes),
            floor.full(hidden, classes),
        )

    def features(self, images: Tensor) -> Tensor:
        return self.floor.mm(images, self.inner)

    def lower_gradient(self, features: Tensor) -> Tensor:
        """Gradient over all rows together, with one head."""
        return self.floor.mm(features.mT, self.floor.mm(features, self.head))

    def lower_gradient_each(self, features: Tensor, heads: Tensor) -> Tensor:
        """Gradients from (k, b, hidden) features, with one head or one per client."""
        return self.floor.mm(features.mT, self.floor.mm(features, heads))

    def hessian_product(self, features: Tensor, *, scored: bool = False) -> Tensor:
        """Scores (unless known), their derivative along v, and the way back."""
        if not scored:
            self.floor.mm(features, self.head)
        return self.floor.mm(features.mT, self.floor.mm(features, self.vector))

    def upper_gradient(self, features: Tensor, images: Tensor) -> Tensor:
        """Scores, back to the features, back to the hidden layer.

        Over all rows together, or per client if the operands are stacks.
        """
        head = self.head if features.ndim == 2 else self.head.expand(len(features), -1, -1)
        back = self.floor.mm(self.floor.mm(features, head), head.mT)
        return self.floor.mm(back.mT, images)

    def jacobian_product(self, features: Tensor, images: Tensor) -> Tensor:
        """The upper gradient, plus the derivative of the scores along v and a second way back."""
        head, vector = (
            one if features.ndim == 2 else one.expand(len(features), -1, -1) for one in (self.head, self.vector)
        )
        scores, change = self.floor.mm(features, head), self.floor.mm(features, vector)
        self.floor.mm(scores, vector.mT)
        return self.floor.mm(self.floor.mm(change, head.mT).mT, images)
