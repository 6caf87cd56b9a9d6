"""Reference programs of single-machine bilevel methods, written from their papers: SOBA, SABA and F2SA.

They take minibatches in an order that is drawn anew for every pass. `spent` counts samples as the
ledger of the library does: derivatives that share a minibatch count it once.

SOBA, SABA  Dagreou, Ablin, Vaiter, Moreau, "A framework for bilevel optimization that enables
            stochastic and global variance reduction algorithms", NeurIPS 2022
F2SA        Kwon, Kwon, Wright, Nowak, "A Fully First-Order Method for Stochastic Bilevel
            Optimization", ICML 2023
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.judge.problems import Fields, Judged

BATCH = 64


class Batches:
    """Minibatches of one level; a number of a minibatch names the same samples in every pass."""

    def __init__(self, samples: Fields, seed: int, batch: int = BATCH) -> None:
        size = len(next(iter(samples.values())))
        self.batch = min(batch, size)
        self.num, self.samples, self.spent = size // self.batch, samples, 0
        self._draw = np.random.default_rng(seed)
        self._order: Iterator[int] = iter(())

    def next(self) -> tuple[int, Fields]:
        try:
            k = next(self._order)
        except StopIteration:
            self._order = iter(self._draw.permutation(self.num).tolist())
            k = next(self._order)
        self.spent += self.batch
        return k, {name: one[k * self.batch : (k + 1) * self.batch] for name, one in self.samples.items()}


class Levels:
    """Derivatives of both levels on minibatches."""

    def __init__(self, judged: Judged, seed: int, batch: int = BATCH) -> None:
        self.judged = judged
        self.train, self.val = Batches(judged.train, 2 * seed, batch), Batches(judged.val, 2 * seed + 1, batch)

    @property
    def spent(self) -> int:
        return self.train.spent + self.val.spent

    def lower(self, x: Tensor, y: Tensor, some: Fields, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return g_y, H v and J v."""
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        [gy] = torch.autograd.grad(self.judged.lower(x, y, some).mean(), y, create_graph=True)
        jv, hv = torch.autograd.grad(gy, (x, y), v)
        return gy.detach(), hv, jv

    def both(self, x: Tensor, y: Tensor, some: Fields, *, upper: bool) -> tuple[Tensor, Tensor]:
        """Return the gradients in x and in y of one level."""
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        loss = (self.judged.upper if upper else self.judged.lower)(x, y, some).mean()
        gx, gy = torch.autograd.grad(loss, (x, y), allow_unused=True)
        return torch.zeros_like(x) if gx is None else gx, gy


class _Average:
    """SAGA: the newest value of every minibatch, and their mean."""

    def __init__(self, num: int, like: Tensor) -> None:
        self.rows, self.mean = torch.zeros(num, len(like)), torch.zeros_like(like)

    def reduced(self, k: int, value: Tensor) -> Tensor:
        change = value - self.rows[k]
        direction = change + self.mean
        self.mean, self.rows[k] = self.mean + change / len(self.rows), value
        return direction


def soba(judged: Judged, step: float, ratio: float, seed: int, budget: int, batch: int = BATCH) -> Tensor:
    """Step all three variables at once, with steps that fall by the root."""
    return _single_loop(judged, step, ratio, seed, budget, batch, lambda t: (t + 1) ** -0.5, reduces=False)


def saba(judged: Judged, step: float, ratio: float, seed: int, budget: int, batch: int = BATCH) -> Tensor:
    """Take the steps of SOBA along directions of SAGA, of constant length."""
    return _single_loop(judged, step, ratio, seed, budget, batch, lambda t: 1.0, reduces=True)


def _single_loop(
    judged: Judged, step: float, ratio: float, seed: int, budget: int, batch: int, falls: Any, *, reduces: bool
) -> Tensor:
    levels, x, y = Levels(judged, seed, batch), judged.x0.clone(), judged.y0.clone()
    v, t = torch.zeros_like(y), 0  # v = -u
    sizes = {"gy": y, "hv": y, "jv": x, "fx": x, "fy": y}
    side = lambda name: levels.val if name in ("fx", "fy") else levels.train
    kept = {name: _Average(side(name).num, like) for name, like in sizes.items()} if reduces else {}
    while levels.spent < budget:
        (k, some), (q, other) = levels.train.next(), levels.val.next()
        found = dict(zip(("gy", "hv", "jv"), levels.lower(x, y, some, v), strict=True))
        found |= dict(zip(("fx", "fy"), levels.both(x, y, other, upper=True), strict=True))
        if reduces:
            found = {name: kept[name].reduced(q if name in ("fx", "fy") else k, one) for name, one in found.items()}
        a, t = step * falls(t), t + 1
        y, v = y - a * found["gy"], v - a * (found["hv"] + found["fy"])
        x = x - a / ratio * (found["fx"] + found["jv"])
    return x


def f2sa(judged: Judged, step: float, ratio: float, seed: int, budget: int, batch: int = BATCH) -> Tensor:
    """Step with gradients only: a lower variable of g, another of f + lam g, and lam that grows."""
    levels, x = Levels(judged, seed, batch), judged.x0.clone()
    y, z, lam, t = judged.y0.clone(), judged.y0.clone(), 1.0, 0
    while levels.spent < budget:
        lr_y, lr_z, growth = step * (t + 1) ** (-5 / 7), step * (t + 1) ** (-4 / 7), 0.01 * (t + 1) ** (-1 / 7)
        for _ in range(10):
            gy = levels.both(x, y, levels.train.next()[1], upper=False)[1]
            fy = levels.both(x, y, levels.val.next()[1], upper=True)[1]
            gz = levels.both(x, z, levels.train.next()[1], upper=False)[1]
            y, z = y - lr_y * (lam * gy + fy), z - lr_z * gz
        fx = levels.both(x, y, levels.val.next()[1], upper=True)[0]
        near, far = (levels.both(x, one, levels.train.next()[1], upper=False)[0] for one in (y, z))
        x = x - step / ratio * (t + 1) ** (-4 / 7) * (fx + lam * (near - far))
        lam, t = lam + growth, t + 1
    return x


RIVALS: dict[str, Callable[..., Tensor]] = {"SOBA": soba, "SABA": saba, "F2SA": f2sa}
