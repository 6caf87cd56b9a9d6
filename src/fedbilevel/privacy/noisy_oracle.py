"""Derivatives with noise that hides one example of a client.

Every derivative that a phase asks for is a release by itself. Of each client it is

    (sum over the examples that take part of clip(derivative of the example) + noise) / (rate * n)

Each example takes part by a coin of its own (Poisson sampling), drawn anew for every release. Its
derivative is scaled to the norm `clip` if it is longer, and rounded to integers. The sum of integers
is exact, and one example changes it by at most `clip` and the rounding. The noise is discrete
Gaussian, with steps of 2^-30 of the norm, far below the noise: the accountant's figures for continuous
noise hold for it. Whatever a phase makes of derivatives, such as local steps, corrections and models, is
computed from releases, and so is all that the server sees. No other use of data is private.

Neighbours are data sets in which the derivatives of one example are zero. The number of examples n
is public. An example whose derivative is not finite counts as zero, because an error would tell
about it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten

from fedbilevel.errors import SettingError
from fedbilevel.oracle import derivatives
from fedbilevel.oracle.derivatives import Build
from fedbilevel.oracle.oracle import Oracle
from fedbilevel.privacy.accountant import Release, joint
from fedbilevel.privacy.noise import Words, ring_noise, ring_sigma
from fedbilevel.problem.client_data import Batch, ClientData

KINDS = ("gy", "gx", "fy", "fx", "hv", "jv")  # derivatives, which may have a norm of clipping each
OF_X = ("gx", "fx", "jv")  # have the length of x
PARTS = (1, 2)  # sums that share the coins of a release
_UNITS = 2.0**30  # integers of the norm of clipping
_LIMIT = 1 - 1e-9  # rounding of float64 never makes a clipped derivative longer than the norm
_AT_ONCE = 2**25  # entries of examples' derivatives in memory

Draws = Callable[[str, int, int, int], Words]  # purpose, client, outer iteration, call


class Hosted(Protocol):
    """What the noise needs of the host of clients."""

    oracle: Oracle
    data: ClientData
    ids: Tensor
    x0: Tensor
    y0: Tensor
    x_sizes: Tensor | None


@dataclass
class ExampleNoise:
    """Noise of example-level privacy for the derivatives of a host.

    clips: norms of clipping, by kind of derivative.
    noise: standard deviation of the noise, divided by the most that one example changes a sum.
    rate: probability with which an example takes part in a release.
    draws: random words for an address.
    counts: releases since they were last taken, by the number of their sums.
    """

    clips: Mapping[str, float]
    noise: float
    rate: float
    draws: Draws
    counts: Counter[int] = field(default_factory=Counter)

    def at(self, host: Hosted, positions: Tensor, iteration: int, call: int) -> NoisyOracle:
        """Return the derivatives for a phase of one call."""
        return NoisyOracle(self, host, host.ids[positions].tolist(), iteration, call)

    def taken(self) -> dict[int, int]:
        """Return the releases since the last time, by the number of their sums."""
        found = {parts: self.counts[parts] for parts in PARTS}
        self.counts.clear()
        return found


def releases(noise: float, rate: float, counts: Mapping[int, int]) -> list[Release]:
    """Return releases for the accountant, from their numbers by number of sums.

    Sums that share the coins are one release. Other releases have coins of their own.
    """
    return [joint([noise] * parts, rate, times) for parts, times in counts.items() if times]


class _Address(NamedTuple):
    iteration: int
    call: int


class NoisyOracle:
    """Derivatives like those of `Oracle`, with noise. There is nothing else to ask for."""

    def __init__(self, how: ExampleNoise, host: Hosted, clients: list[int], iteration: int, call: int) -> None:
        self._how, self._host, self._clients, self._when = how, host, clients, _Address(iteration, call)
        self._number = 0  # of releases in this call, which addresses their draws

    def lower_grad(self, x: Tensor, y: Tensor, batch: Batch, *, shares: None = None) -> Tensor:
        return self._release(("gy",), derivatives.lower_grad, (x, y), batch)[0]

    def lower_grad_x(self, x: Tensor, y: Tensor, batch: Batch, *, shares: None = None) -> Tensor:
        return self._release(("gx",), derivatives.lower_grad_x, (x, y), batch)[0]

    def upper_grad_x(self, x: Tensor, y: Tensor, batch: Batch, *, shares: None = None) -> Tensor:
        return self._release(("fx",), derivatives.upper_grad_x, (x, y), batch)[0]

    def upper_grad_y(self, x: Tensor, y: Tensor, batch: Batch, *, shares: None = None) -> Tensor:
        return self._release(("fy",), derivatives.upper_grad_y, (x, y), batch)[0]

    def upper_grads(self, x: Tensor, y: Tensor, batch: Batch, *, shares: None = None) -> tuple[Tensor, Tensor]:
        fx, fy = self._release(("fx", "fy"), derivatives.upper_grads, (x, y), batch)
        return fx, fy

    def jacobian_product(self, x: Tensor, y: Tensor, v: Tensor, batch: Batch, *, shares: None = None) -> Tensor:
        return self._release(("jv",), derivatives.pull_x, (x, y, v), batch)[0]

    def hessian_product(self, x: Tensor, y: Tensor, v: Tensor, batch: Batch, *, shares: None = None) -> Tensor:
        return self._release(("hv",), derivatives.pull_y, (x, y, v), batch)[0]

    def second_order(
        self, x: Tensor, y: Tensor, v: Tensor, batch: Batch, *, shares: None = None
    ) -> tuple[Tensor, Tensor]:
        jv, hv = self._release(("jv", "hv"), derivatives.pull_both, (x, y, v), batch)
        return jv, hv

    def directions(
        self,
        x: Tensor,
        y: Tensor,
        u: Tensor,
        *,
        gy: Batch,
        fx: Batch,
        fy: Batch,
        ju: Batch,
        hu: Batch,
        shares: None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        d_fx, d_fy = (
            self.upper_grads(x, y, fx) if fx is fy else (self.upper_grad_x(x, y, fx), self.upper_grad_y(x, y, fy))
        )
        d_ju, d_hu = (
            self.second_order(x, y, u, ju)
            if ju is hu
            else (self.jacobian_product(x, y, u, ju), self.hessian_product(x, y, u, hu))
        )
        return d_fx - d_ju, self.lower_grad(x, y, gy), d_hu - d_fy

    def __getattr__(self, name: str) -> Any:
        raise SettingError(
            f"the algorithm asks for {name!r}, which noise of the level 'example' does not cover: use an algorithm "
            "that needs derivatives only."
        )

    def _release(
        self, kinds: tuple[str, ...], build: Build, vectors: Sequence[Tensor], batch: Batch
    ) -> tuple[Tensor, ...]:
        """Return the noisy mean of each kind, with one row per client."""
        how, oracle = self._how, self._host.oracle
        if oracle.tick is not None:
            oracle.tick()
        how.counts[len(kinds)] += bool(self._clients)  # a process without a client releases nothing
        self._number += 1
        lengths = [(self._host.x0 if kind in OF_X else self._host.y0).shape[-1] for kind in kinds]
        found = [vectors[0].new_zeros(len(batch), length) for length in lengths]
        for row, client in enumerate(self._clients):
            points = [v if v.ndim == 1 else v[row] for v in vectors]
            taking_part = self._coins(client, int(batch.counts[row]))
            clips = [how.clips[kind] for kind in kinds]
            sums = clipped_integers(oracle, build, points, batch.row(row), taking_part, clips)
            for place, (kind, clip, total) in enumerate(zip(kinds, clips, sums, strict=True)):
                own = self._own_length(kind, batch, row, len(total))  # padding of a private x has no noise
                sigma = ring_sigma(clip, how.noise, _UNITS / clip, own)
                noise = ring_noise((own,), sigma, self._words(f"noise.{place}", client))
                mean = (total[:own] + noise.to(total.device)).double() * (clip / _UNITS)
                found[place][row, :own] = (mean / (how.rate * int(batch.counts[row]))).to(found[place].dtype)
        return tuple(found)

    def _own_length(self, kind: str, batch: Batch, row: int, whole: int) -> int:
        sizes = self._host.x_sizes
        return whole if sizes is None or kind not in OF_X else int(sizes[batch.positions[row]])

    def _coins(self, client: int, num: int) -> Tensor:
        """Return the numbers of the examples that take part, each by its own coin."""
        if self._how.rate == 1:
            return torch.arange(num)
        words = self._words("coins", client)(num)
        uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return torch.from_numpy(np.flatnonzero(uniform < self._how.rate))

    def _words(self, purpose: str, client: int) -> Words:
        return self._how.draws(f"{purpose}.{self._number}", client, *self._when)


def clipped_integers(
    oracle: Oracle,
    build: Build,
    points: Sequence[Tensor],
    fields: Mapping[str, Tensor],
    numbers: Tensor,
    clips: Sequence[float],
) -> list[Tensor]:
    """Return the sums of clipped derivatives of some examples of one client, in units of clip / 2^30.

    points: x, y and perhaps v.
    fields: all examples of the client.
    numbers: of the examples that take part.
    clips: norm of clipping of each part of the derivative.
    """
    problem = oracle.problem
    each = build(*(oracle.flat(loss, padded=False) for loss in (problem.upper, problem.lower)))

    def of_one(sample: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        alone = {name: value.unsqueeze(0) for name, value in sample.items()}
        found = each(*points, {**alone, "weight": torch.ones_like(alone["weight"])})
        return found if isinstance(found, tuple) else (found,)

    some = numbers if len(numbers) else torch.zeros(1, dtype=torch.int64)  # of no examples: a derivative times zero
    totals: list[Tensor] = []
    for part in some.split(max(1, _AT_ONCE // sum(len(point) for point in points))):
        rows = vmap(of_one)({name: value.index_select(0, part.to(value.device)) for name, value in fields.items()})
        new = [_integers(leaf, clip) for leaf, clip in zip(rows, clips, strict=True)]
        totals = [one + other for one, other in zip(totals, new, strict=True)] if totals else new
    return totals if len(numbers) else [torch.zeros_like(total) for total in totals]


def _integers(rows: Tensor, clip: float) -> Tensor:
    """Return the sum of rows (b, d) as integers, each scaled to the norm `clip` if it is longer."""
    rows = rows.double()
    rows = torch.where(torch.isfinite(rows).all(1, keepdim=True), rows, 0.0)
    largest = rows.abs().amax(1, keepdim=True).clamp(min=1e-300)
    long = largest * torch.linalg.vector_norm(rows / largest, dim=1, keepdim=True)  # squares do not overflow
    limit = clip * _LIMIT
    scaled = (rows / largest) * (largest * (limit / long.clamp(min=limit)) * (_UNITS / clip))
    return scaled.round().to(torch.int64).sum(0)


def check_means(host: Hosted, num: int = 4) -> None:
    """Raise unless both losses are means over examples, because clipping needs the part of each.

    num: examples of the first client that are compared, alone and together.
    """
    losses = [host.oracle.flat(loss) for loss in (host.oracle.problem.upper, host.oracle.problem.lower)]
    x = host.x0 if host.x0.ndim == 1 else host.x0[0]
    for role, build, label in (("train", derivatives.lower_grad, "lower"), ("val", derivatives.upper_grads, "upper")):
        few = torch.arange(min(num, int(host.data.sizes[role][0])), device=host.x0.device)
        derivative = lambda index, role=role, build=build: tree_flatten(
            build(*losses)(x, host.y0, host.data.batch(host.data.positions[:1], role, index[None]).row(0))
        )[0]
        alone = [derivative(few[i : i + 1]) for i in range(len(few))]
        for one, *parts in zip(derivative(few), *alone, strict=True):
            each = torch.stack(parts)
            apart, size = (one - each.mean(0)).abs(), each.abs()
            if one.numel() and not float(apart.max()) <= 1e-3 * float(size.max()) + 1e-12:
                raise SettingError(
                    f"the {label} loss is no mean over examples, so the part of one example cannot be clipped: "
                    "use aggregation.level = 'client'."
                )
