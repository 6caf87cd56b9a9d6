"""All samples of clients in portions, so that a measurement needs no more memory than a run.

A portion holds a few clients. If a run takes minibatches of a large model, a portion holds one
client, and its samples are evaluated a minibatch at a time. Minibatches have the meaning that they
have in a run, so a loss may also be the user's own sum with the weights.

Of samples that are windows into long arrays (problem/windows.py), losses are measured on evenly
spread ones, because there may be as many windows as tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fedbilevel.problem.client_data import Batch, ClientData
from fedbilevel.problem.problem import Fields, Statistics

SPREAD = 256  # windows of each client in a measurement
LARGE = 2**20  # entries of x and y from which memory is that of activations, not of samples


@dataclass(frozen=True)
class Portion:
    """A few clients with their own points and weights, and batches of all their samples.

    limit: number of samples that may be evaluated at once; None: all of these clients.
    """

    data: ClientData
    positions: Tensor
    x: Tensor
    y: Tensor
    weights: Tensor
    limit: int | None = None

    @cached_property
    def train(self) -> Batch:
        return self.data.look(self.positions, "train")

    @cached_property
    def val(self) -> Batch:
        return self.data.look(self.positions, "val")

    def mean(self, role: str, ask: Callable[[Batch], Tensor]) -> Tensor:
        """Return `ask` of all samples of a role, where it is a mean over samples for any batch."""
        if self._is_whole(role):
            return ask(self._all(role))
        parts = [ask(batch).double() * share for batch, share in self._minibatches(role)]
        return torch.stack(parts).sum(0).to(self.y.dtype) if len(parts) > 1 else parts[0].to(self.y.dtype)

    def sums(self, role: str, ask: Callable[[Batch], Any], *, divides: bool) -> Any:
        """Return `ask` of all samples of a role, where it holds sums over samples.

        divides: whether these sums may be added over minibatches.
        """
        if not divides or self._is_whole(role):
            return ask(self._all(role))
        parts = [ask(batch) for batch, _ in self._minibatches(role)]
        return tree_map(lambda *leaves: torch.stack([leaf.double() for leaf in leaves]).sum(0), *parts)

    def _is_whole(self, role: str) -> bool:
        return self.limit is None or len(self.positions) * self._num(role) <= self.limit

    def _num(self, role: str) -> int:
        """Return the most samples of a client that are measured."""
        most = int(self.data.sizes[role][self.positions].max())
        return min(SPREAD, most) if self.data.is_cut(role) else most

    def _all(self, role: str) -> Batch:
        if self.data.is_cut(role):
            return self.data.batch(self.positions, role, self.data.spread(self.positions, role, SPREAD))
        whole: Batch = getattr(self, role) if role in ("train", "val") else self.data.look(self.positions, role)
        return whole

    def _minibatches(self, role: str) -> Iterator[tuple[Batch, float]]:
        """Yield all samples of one client, with shares that sum to one."""
        assert self.limit is not None
        spread = self.data.spread(self.positions, role, self._num(role))[0]
        for index in spread.split(self.limit):
            yield self.data.batch(self.positions, role, index[None]), len(index) / len(spread)


def per_sample_statistics(function: Statistics, x: Any, y: Any, fields: Fields) -> bool:
    """Return whether all statistics are values per sample, which may be added over minibatches."""
    return all(value.ndim == 1 for value in function(x, y, fields).values())


def squares(rows: Tensor) -> Tensor:
    """Return the squared norm of every row, (k, 1)."""
    return (rows.double() ** 2).sum(1, keepdim=True)


def size(summed: Tensor, number: Tensor, *, of_squares: bool) -> float:
    """Return the norm of a mean, or a root mean square, from a weighted sum.

    number: sum of the weights.
    """
    return float((summed / number).sqrt()) if of_squares else float(torch.linalg.vector_norm(summed) / number)


def total(rows: Tensor, weights: Tensor, *, alike: bool | None = None) -> Tensor:
    """Return the weighted sum in float64, which is exact for float32 rows and whole weights.

    alike: whether all weights are one; None: look.
    """
    if rows.stride(0) == 0 and len(rows) > 0:  # every row is the mean already
        return rows[0].double() * float(weights.sum())
    if bool((weights == 1).all()) if alike is None else alike:
        return rows.sum(0, dtype=torch.float64)
    return (rows.double() * weights.to(rows.device, torch.float64)[:, None]).sum(0)
