"""Penalty and FedBiO on a language model, as a program for this one problem: a loop over clients.

Weights are separate tensors, derivatives come from `torch.autograd.grad`, and steps are in place.
One client is at work at a time and adds its result to running means, so that memory hardly depends
on the number of clients. Gradients use fused attention; the products with second derivatives share
one graph with the gradient, and their attention is written in plain operations, so that it works in
bfloat16 too. Samples are those that the library draws, so both must reach the same x and y.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpt import KL, Size, shares
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.penalty import DIFFERENCES, Penalty
from fedbilevel.problem.draws import Stream
from fedbilevel.tasks.gpt import Attention, causal, entropy, plain_causal
from fedbilevel.tasks.mixing import divergence
from fedbilevel.tasks.task import Built

Parameters = list[Tensor]


class ByHand:
    """The server and its clients; `advance` runs one outer iteration.

    algorithm: settings of Penalty, or of FedBiO with shared minibatches.
    """

    def __init__(
        self, size: Size, built: Built, algorithm: Any, *, dtype: torch.dtype = torch.float32, device: str = "cpu",
        low: bool = False,
    ) -> None:  # fmt: skip
        self.size, self.algorithm, self.device, self.low = size, algorithm, device, low
        self.data = [
            {role: {name: torch.as_tensor(value).to(device) for name, value in held.items()}
             for role, held in client.items()}
            for client in built.clients
        ]  # fmt: skip
        self.names = list(built.problem.y0)
        self.x = built.problem.initial_x({})["logit"].to(device=device, dtype=dtype)
        first = [leaf.to(device=device, dtype=dtype) for leaf in built.problem.y0.values()]
        zero = isinstance(algorithm, FedBiO)  # u starts at zero, and every y_j at y
        self.rows = [first, [torch.zeros_like(leaf) if zero else leaf.clone() for leaf in first]]
        self.iteration = 0

    def y(self) -> Tensor:
        """The y of a run, as one vector."""
        first, second = self.rows
        if isinstance(self.algorithm, Penalty):
            first = second if self.algorithm.order == 1 else [(a + b) / 2 for a, b in zip(first, second, strict=True)]
        return torch.cat([leaf.detach().reshape(-1) for leaf in first])

    def advance(self) -> None:
        self.iteration += 1
        penalty = isinstance(self.algorithm, Penalty)
        purposes = ("train/B_g", "train/B_x", "val/B_f") if penalty else ("train/B_g", "val/B_f")
        drawn = {purpose: self._indices(purpose) for purpose in purposes}
        x_mean, means = torch.zeros_like(self.x), [[torch.zeros_like(leaf) for leaf in row] for row in self.rows]
        share = 1 / len(self.data)
        for client in range(len(self.data)):
            x, rows = self.x, [[leaf.clone() for leaf in row] for row in self.rows]
            for step in range(self.algorithm.num_local_steps):
                batches = {
                    purpose.split("/")[1]: self._batch(client, purpose, index[client, step])
                    for purpose, index in drawn.items()
                }
                x = self._penalty(x, rows, batches) if penalty else self._fedbio(x, rows, batches)
            x_mean += share * x
            for mean, row in zip(means, rows, strict=True):
                torch._foreach_add_(mean, row, alpha=share)
        self.x, self.rows = x_mean, means

    # ---- one local step of one client: rows are changed in place, the new x is returned ----------------------------

    def _penalty(self, x: Tensor, rows: Sequence[Parameters], batches: Any) -> Tensor:
        lam, lr = self.algorithm.penalty, self.algorithm.lr_lower
        h = torch.zeros_like(x)
        for (j, c), y in zip(DIFFERENCES[self.algorithm.order].items(), rows, strict=True):
            at = x.detach().requires_grad_()
            value = self._lower(at, y, batches["B_x"], low=False)  # the rounding would be multiplied by lam
            h += c * lam * torch.autograd.grad(value, at)[0]
            leaves = [leaf.detach().requires_grad_() for leaf in y]
            gy = torch.autograd.grad(self._lower(x, leaves, batches["B_g"]), leaves)
            if j:
                fx, *fy = torch.autograd.grad(self._upper(at, leaves, batches["B_f"]), [at, *leaves])
                h += c * j * fx
                torch._foreach_add_(y, fy, alpha=-lr * j / (abs(j) + lam))
            torch._foreach_add_(y, gy, alpha=-lr * lam / (abs(j) + lam))
        return x - self.algorithm.lr_upper * h

    def _fedbio(self, x: Tensor, rows: Sequence[Parameters], batches: Any) -> Tensor:
        y, u = rows
        tau = self.algorithm.lr_system
        at, leaves = x.detach().requires_grad_(), [leaf.detach().requires_grad_() for leaf in y]
        value = self._lower(at, leaves, batches["B_g"], attention=plain_causal)
        with_graph = torch.autograd.grad(value, leaves, create_graph=True)
        ju, *hu = torch.autograd.grad(with_graph, [at, *leaves], grad_outputs=u)
        gy = [leaf.detach() for leaf in with_graph]
        del value, with_graph  # and the memory of the graph
        torch._foreach_add_(u, hu, alpha=-tau)
        del hu
        fx, *fy = torch.autograd.grad(self._upper(at, leaves, batches["B_f"]), [at, *leaves])
        torch._foreach_add_(u, fy, alpha=tau)
        torch._foreach_add_(y, gy, alpha=-self.algorithm.lr_lower)
        return x - self.algorithm.lr_upper * (fx - ju)

    # ---- losses and samples ----------------------------------------------------------------------------------------

    def _lower(
        self, x: Tensor, y: Parameters, batch: Any, *, low: bool = True, attention: Attention = causal
    ) -> Tensor:
        return (shares(x, batch["source"]) * self._entropy(y, batch, low, attention)).mean()

    def _upper(self, x: Tensor, y: Parameters, batch: Any) -> Tensor:
        return self._entropy(y, batch, True, causal).mean() + KL * divergence(x)

    def _entropy(self, y: Parameters, batch: Any, low: bool, attention: Attention) -> Tensor:
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.low and low):
            return entropy(dict(zip(self.names, y, strict=True)), batch["text"], self.size, attention)

    def _indices(self, purpose: str) -> Tensor:
        """Sample numbers (clients, steps, batch), from the library's stream."""
        role, ids = purpose.split("/")[0], torch.arange(len(self.data))
        sizes = torch.tensor([len(client[role]["text"]) for client in self.data])
        steps = range(self.algorithm.num_local_steps)
        drawn = Stream(0).integers(
            purpose, ids, sizes, iteration=self.iteration, call=1, steps=steps, width=self.size.batch
        )
        return drawn.to(self.device)

    def _batch(self, client: int, purpose: str, index: Tensor) -> dict[str, Tensor]:
        return {name: value[index] for name, value in self.data[client][purpose.split("/")[0]].items()}
