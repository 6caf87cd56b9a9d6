"""Plain scores of training instances beside the predicted change, without a linear system.

    gradient_product   <grad loss_ij, mean f_y> at the trained y: the prediction with H = I
    trajectory         the sum of this product over five checkpoints of gradient descent (as TracIn:
                       Pruthi, Liu, Kale, Sundararajan, NeurIPS 2020)
    own_loss           the loss of the instance at the trained y, which never leaves its client

The first two are negative for harmful instances, as a predicted change is. Their scale means
nothing: only their order does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedbilevel.oracle.lanczos import lanczos
from fedbilevel.oracle.population import Population

NAMES = ("gradient_product", "trajectory", "own_loss")
_NUM_STEPS, _EVERY = 40, 8


def plain_scores(population: Population, y: Tensor) -> dict[str, list[Tensor]]:
    """Return scores by name, each with one tensor per client.

    y: the trained model; gradient descent starts at the problem's initial point.
    """
    everyone, x, oracle = torch.arange(len(population)), population.x0, population.oracle
    weights, data = population.weights(everyone), population.data
    train, val = (data.batch(everyone, role) for role in ("train", "val"))
    mean = lambda rows: population.average(rows, weights)

    def product(y: Tensor) -> Tensor:
        return oracle.jacobian_product(x, y, mean(oracle.upper_grad_y(x, y, val)), train)

    with torch.no_grad():
        at = population.y0
        curve = lambda v: mean(oracle.hessian_product(x, at, v[0], train))[None]
        step = 1 / float(lanczos(curve, torch.zeros_like(at)[None])[1])
        summed, now = torch.zeros_like(x), at
        for number in range(1, _NUM_STEPS + 1):
            now = now - step * mean(oracle.lower_grad(x, now, train))
            if number % _EVERY == 0:
                summed = summed + product(now)
        assert population.x_sizes is not None
        sizes = population.x_sizes
        found = {
            "gradient_product": product(y),
            "trajectory": summed,
            "own_loss": oracle.lower_grad_x(x, y, train) * sizes.to(x.device)[:, None],
        }
    return {
        name: [row[:size].double().cpu() for row, size in zip(rows, sizes.tolist(), strict=True)]
        for name, rows in found.items()
    }


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, or None where one side has a single value."""
    ranks = [_ranks(torch.tensor(list(values), dtype=torch.float64)) for values in (one, other)]
    a, b = (rank - rank.mean() for rank in ranks)
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size > 0 else None


def _ranks(values: Tensor) -> Tensor:
    """Return ranks; equal values have the mean of their ranks."""
    below = (values[None] < values[:, None]).sum(1)
    same = (values[None] == values[:, None]).sum(1)
    return below + (same - 1) / 2
