"""FedNest and FBO-AggITD in the style of published code: a loop over clients with `torch.autograd`.

Gradients share nothing. Every gradient runs the whole network on its images, H v and J v
differentiate a gradient that was made with `create_graph`, and the server averages the results of
the clients. Images are tensors in memory and batches are taken by index: published code that
decodes images in a DataLoader is even slower. Cohorts and minibatches are those of the library, so
both must reach the same x and y.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from benchmarks.problems import L2
from fedbilevel.algorithms.fedbio import PURPOSES
from fedbilevel.engines.simulation import Simulation
from fedbilevel.federation.algorithm import ServerAlgorithm, phase
from fedbilevel.tasks.task import Built

Parameters = list[Tensor]


class Call(NamedTuple):
    """One phase: who takes part, and (k, steps, b) sample numbers where it takes minibatches.

    FedBiO takes five minibatches, whose sample numbers are stacked in front.
    """

    name: str
    positions: list[int]
    indices: Tensor | None


def calls_of(
    fed: Simulation, algorithm: ServerAlgorithm, iterations: Sequence[int], batch: int
) -> dict[int, list[Call]]:
    """The draws of the library in these outer iterations, from a separate run."""
    seen: list[tuple[str, Any]] = []
    fed.host.captures = None  # a replayed phase could not be watched
    state = algorithm.init(fed)
    plans = {}
    watched = watching(algorithm, seen)
    for iteration in iterations:
        seen.clear()
        fed.begin(iteration, watched)
        state = watched.round(fed, state)
        plans[iteration] = [
            Call(name, clients.positions.tolist(), _indices(name, clients, algorithm, batch)) for name, clients in seen
        ]
    return plans


def watching(algorithm: Any, seen: list[tuple[str, Any]]) -> Any:
    """The same algorithm; its phases note the clients that run them."""
    kind = type(algorithm)

    def noting(name: str) -> Any:
        inner = getattr(kind, name)

        def noted(self: Any, clients: Any, **values: Any) -> Any:
            seen.append((name, clients))
            return inner(self, clients, **values)

        noted.__name__ = name
        return phase(noted)

    names = [name for name in dir(kind) if getattr(getattr(kind, name), "__is_phase__", False)]
    watched = type(kind.__name__, (kind,), {"__module__": kind.__module__, **{name: noting(name) for name in names}})
    return watched(**algorithm.asdict())


def _indices(name: str, clients: Any, algorithm: Any, batch: int) -> Tensor | None:
    if name == "lower_steps":
        return clients.sample_indices("train", "zeta", range(algorithm.num_local_steps), batch)
    if name == "local_steps":
        steps, roles = range(algorithm.num_local_steps), ("train", "val", "val", "train", "train")
        purposes = PURPOSES[algorithm.minibatches]
        return torch.stack([clients.sample_indices(*one, steps, batch) for one in zip(roles, purposes, strict=True)])
    if name == "upper_steps":
        return clients.sample_indices("val", "xi", range(algorithm.num_upper_steps), batch)
    return None


class Loop:
    """The server and its clients.

    `fednest` and `fbo_aggitd` run one outer iteration from (x, y), which are parameter lists.
    """

    def __init__(
        self, built: Built, algorithm: Any, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        self.algorithm = algorithm
        tensor = lambda value: torch.as_tensor(value).to(
            device=device, dtype=dtype if torch.as_tensor(value).is_floating_point() else None
        )
        self.data = [
            {
                role: (tensor(held["image"]), tensor(held["label"]))
                for role, held in client.items()
                if role in ("train", "val")
            }
            for client in built.clients
        ]
        self.x = [leaf.to(device=device, dtype=dtype) for leaf in built.problem.initial_x({}).values()]
        self.y = [leaf.to(device=device, dtype=dtype) for leaf in built.problem.y0.values()]

    # ---- one client ------------------------------------------------------------------------------------------------

    def batch(self, client: int, role: str, index: Tensor | None = None) -> Any:
        images, labels = self.data[client][role]
        return (images, labels) if index is None else (images[index], labels[index])

    def upper(self, x: Parameters, y: Parameters, batch: Any) -> Tensor:
        return cross_entropy(linear(linear(batch[0], *x).relu(), *y), batch[1])

    def lower(self, x: Parameters, y: Parameters, batch: Any) -> Tensor:
        return self.upper(x, y, batch) + 0.5 * L2 * sum((leaf**2).sum() for leaf in y)

    def lower_gradient(self, x: Parameters, y: Parameters, batch: Any) -> Parameters:
        y = _leaves(y)
        return list(torch.autograd.grad(self.lower(x, y, batch), y))

    def upper_gradient_x(self, x: Parameters, y: Parameters, batch: Any) -> Parameters:
        x = _leaves(x)
        return list(torch.autograd.grad(self.upper(x, y, batch), x))

    def upper_gradient_y(self, x: Parameters, y: Parameters, batch: Any) -> Parameters:
        y = _leaves(y)
        return list(torch.autograd.grad(self.upper(x, y, batch), y))

    def product(self, x: Parameters, y: Parameters, v: Parameters, batch: Any, *, by_x: bool) -> Parameters:
        """J v by x, H v by y."""
        x, y = _leaves(x) if by_x else x, _leaves(y)
        gradient = torch.autograd.grad(self.lower(x, y, batch), y, create_graph=True)
        along: Any = sum((g * leaf).sum() for g, leaf in zip(gradient, v, strict=True))
        return list(torch.autograd.grad(along, x if by_x else y))

    def local_lower_steps(
        self, client: int, x: Parameters, start: Parameters, q: Parameters, indices: Tensor
    ) -> Parameters:
        y, lr = start, self.algorithm.lr_lower / len(indices)
        for index in indices:
            batch = self.batch(client, "train", index)
            new, old = self.lower_gradient(x, y, batch), self.lower_gradient(x, start, batch)
            y = [leaf - lr * (a - b + c) for leaf, a, b, c in zip(y, new, old, q, strict=True)]
        return y

    def local_upper_steps(
        self, client: int, start: Parameters, y: Parameters, h: Parameters, indices: Tensor
    ) -> Parameters:
        x, lr = start, self.algorithm.lr_upper / len(indices)
        for index in indices:
            batch = self.batch(client, "val", index)
            new, old = self.upper_gradient_x(x, y, batch), self.upper_gradient_x(start, y, batch)
            x = [leaf - lr * (c + a - b) for leaf, a, b, c in zip(x, new, old, h, strict=True)]
        return x

    # ---- the server ------------------------------------------------------------------------------------------------

    def _lower_round(self, call: Call, x: Parameters, y: Parameters, q: Parameters) -> Parameters:
        assert call.indices is not None
        return _mean(
            [self.local_lower_steps(i, x, y, q, own) for i, own in zip(call.positions, call.indices, strict=True)]
        )

    def _finish(self, calls: Sequence[Call], x: Parameters, y: Parameters, p: Parameters) -> Parameters:
        """The hypergradient from p = (an approximation of) H^-1 f_y, and the steps of x."""
        hyper, steps = calls
        each = []
        for i in hyper.positions:
            direct = self.upper_gradient_x(x, y, self.batch(i, "val"))
            indirect = self.product(x, y, p, self.batch(i, "train"), by_x=True)
            each.append([a - b for a, b in zip(direct, indirect, strict=True)])
        h = _mean(each)
        assert steps.indices is not None
        return _mean(
            [self.local_upper_steps(i, x, y, h, own) for i, own in zip(steps.positions, steps.indices, strict=True)]
        )

    def fednest(self, calls: Sequence[Call], x: Parameters, y: Parameters) -> tuple[Parameters, Parameters]:
        first, second, start, *factors, hyper, steps = calls
        lam = self.algorithm.lr_system
        q = _mean([self.lower_gradient(x, y, self.batch(i, "train")) for i in first.positions])
        y = self._lower_round(second, x, y, q)
        p = _mean(
            [
                [lam * self.algorithm.num_terms * leaf for leaf in self.upper_gradient_y(x, y, self.batch(i, "val"))]
                for i in start.positions
            ]
        )
        for factor in factors:
            p = _mean([self._factor(i, x, y, p) for i in factor.positions])
        return self._finish((hyper, steps), x, y, p), y

    def fbo_aggitd(self, calls: Sequence[Call], x: Parameters, y: Parameters) -> tuple[Parameters, Parameters]:
        *inner, hyper, steps = calls
        lam, z, num = self.algorithm.lr_system, None, self.algorithm.num_lower_rounds
        for t in range(num + 1):
            gradients, terms = [], []
            for i in inner[2 * t].positions:
                if t < num:
                    gradients.append(self.lower_gradient(x, y, self.batch(i, "train")))
                term = [lam * leaf for leaf in self.upper_gradient_y(x, y, self.batch(i, "val"))]
                terms.append(
                    term if z is None else [a + b for a, b in zip(term, self._factor(i, x, y, z), strict=True)]
                )
            z = _mean(terms)
            if t < num:
                y = self._lower_round(inner[2 * t + 1], x, y, _mean(gradients))
        assert z is not None
        return self._finish((hyper, steps), x, y, z), y

    def _factor(self, client: int, x: Parameters, y: Parameters, p: Parameters) -> Parameters:
        hp = self.product(x, y, p, self.batch(client, "train"), by_x=False)
        return [a - self.algorithm.lr_system * b for a, b in zip(p, hp, strict=True)]


class KeepingLoop(Loop):
    """The same loop, which keeps the features of a client's samples while x stands still."""

    _at: Parameters | None = None
    _kept: dict[tuple[int, str], Tensor]

    def batch(self, client: int, role: str, index: Tensor | None = None) -> Any:
        return client, role, index

    def upper(self, x: Parameters, y: Parameters, batch: Any) -> Tensor:
        client, role, index = batch
        images, labels = self.data[client][role]
        if x[0].requires_grad:
            return super().upper(x, y, super().batch(client, role, index))
        if x is not self._at:
            self._at, self._kept = x, {}
        if (client, role) not in self._kept:
            self._kept[client, role] = linear(images, *x).relu()
        features = self._kept[client, role]
        if index is not None:
            features, labels = features[index], labels[index]
        return cross_entropy(linear(features, *y), labels)


def _leaves(parameters: Parameters) -> Parameters:
    return [leaf.detach().requires_grad_() for leaf in parameters]


def _mean(each: Sequence[Parameters]) -> Parameters:
    return [torch.stack(leaves).mean(0) for leaves in zip(*each, strict=True)]


def flat(parameters: Parameters) -> Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in parameters])
