"""Named tensors as one flat vector, and the rows of many clients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedbilevel.errors import ProblemError

Tree = Mapping[str, Tensor]


class Layout:
    """The order of named tensors in one flat vector.

    A ragged leaf, whose length differs between clients, is last, so that its padding is at the end.
    """

    def __init__(self, tree: Tree, ragged: str | None = None) -> None:
        self.shapes = {name: tuple(leaf.shape) for name, leaf in tree.items() if name != ragged}
        self.ragged = ragged
        self.num_fixed = sum(leaf.numel() for name, leaf in tree.items() if name != ragged)

    def ravel(self, tree: Tree) -> Tensor:
        names = [*self.shapes, *([self.ragged] if self.ragged else [])]
        if set(tree) != set(names):
            raise ProblemError(
                f"expected tensors named {', '.join(names)}, got {', '.join(tree)}: "
                "use the same names as in the initial point."
            )
        return torch.cat([tree[name].reshape(-1) for name in names])

    def unravel(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views into `vector`; the entries after the fixed leaves are the ragged leaf."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        parts = vector.split([*sizes, vector.shape[0] - self.num_fixed] if self.ragged else sizes)
        tree = {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=False)}
        if self.ragged:
            tree[self.ragged] = parts[-1]
        return tree

    def describe(self) -> dict[str, Any]:
        return {
            **{name: list(shape) for name, shape in self.shapes.items()},
            **({self.ragged: "ragged"} if self.ragged else {}),
        }


def one_row(value: Tensor) -> Tensor:
    """Return the vector that all rows share, or the tensor itself if rows are separate."""
    return value[0] if value.ndim == 2 and value.stride(0) == 0 and value.shape[0] > 0 else value


def check_tree(label: str, tree: Any) -> None:
    """Raise unless `tree` is a dict of real tensors."""
    if not isinstance(tree, Mapping):
        got = type(tree).__name__
    elif not tree:
        got = "an empty dict"
    else:
        wrong = [
            f"{name!r} of type {leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__}"
            for name, leaf in tree.items()
            if not isinstance(leaf, Tensor) or leaf.is_complex()
        ]
        if not wrong:
            return
        got = f"an entry {wrong[0]}"
    raise ProblemError(f"{label} must be a dict of named tensors with at least one entry, got {got}.")
