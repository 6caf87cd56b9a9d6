"""How much of a hypergradient a method takes: the part of it that passes through the lower level.

At the end of a run, one more outer iteration is watched with all clients. The first product J p in
it names the point (x, y) and the p that the method multiplies. Over all data at that point:

    indirect_share    |mean J p| / |mean f_x|
    solved_share      the same with the solution u of (mean H) u = mean f_y
    system_residual   |mean (H p - f_y)| / |mean f_y|

A share near zero says that the method alternates between the two levels. If clients have their own
p, the means are those of J_i p_i and H_i p_i.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fedbilevel.engines import simulate
from fedbilevel.errors import ExperimentError
from fedbilevel.federation.algorithm import Algorithm, ServerAlgorithm
from fedbilevel.oracle.hypergradient import solve_cg
from fedbilevel.oracle.population import Population
from fedbilevel.runs.result import Result
from fedbilevel.tasks.task import Built

FIGURES = ("indirect_share", "solved_share", "system_residual")
_TOLERANCE, _MOST_PRODUCTS = 1e-4, 500
_KEPT = ("seed", "batch_size", "sampling", "dtype", "device")


class Multiplied(NamedTuple):
    """A point and the vector that a method multiplies by J there."""

    x: Tensor
    y: Tensor
    p: Tensor


class _Noted(Exception):
    """The first product J p of an outer iteration is known."""


class _Watched:
    """An oracle that ends at the first product J p, which every way to compute it takes as (x, y, p)."""

    def __init__(self, oracle: Any) -> None:
        self._oracle = oracle

    def __getattr__(self, name: str) -> Any:
        if name not in ("jacobian_product", "second_order", "directions"):
            return getattr(self._oracle, name)

        def noted(x: Tensor, y: Tensor, p: Tensor, *_: Any, **__: Any) -> Any:
            raise _Noted(Multiplied(x, y, p))

        return noted


def measured(built: Built, algorithm: Algorithm, result: Result, options: Mapping[str, Any]) -> dict[str, float]:
    """Return FIGURES at the end of a run, or nothing if the method has no product J p."""
    scopes = built.problem.scopes
    if not isinstance(algorithm, ServerAlgorithm) or (scopes.upper, scopes.lower) != ("shared", "global"):
        raise ExperimentError(
            f"indirect needs a method with a server, a shared x and a global lower level, and {algorithm.name()} runs "
            f"with x {scopes.upper} and y {scopes.lower}: leave indirect out."
        )
    after, settled = result.iteration + 1, dataclasses.replace(algorithm, **result.steps)
    now = settled.scaled(options["schedule"](after)) if "schedule" in options else settled
    fed = simulate(now, built.problem, built.clients, **{name: options[name] for name in _KEPT if name in options})
    plain = fed.host.oracle
    fed.host.oracle = cast(Any, _Watched(plain))
    try:
        with torch.no_grad():
            fed.begin(after, now)
            now.round(cast(Any, fed), result.state)
    except _Noted as noted:
        fed.host.oracle = plain
        return shares(fed.host, noted.args[0])
    return {}


def shares(population: Population, at: Multiplied) -> dict[str, float]:
    """Return FIGURES at a point over all data of all clients."""
    oracle, everyone, (x, y) = population.oracle, torch.arange(len(population)), map(_shared, at[:2])
    train, val = (population.data.batch(everyone, role) for role in ("train", "val"))
    weights, size = population.weights(everyone), torch.linalg.vector_norm
    pooled = (weights / weights.sum()).to(x)  # one derivative of the pooled samples, where p is shared
    mean = lambda rows: population.average(rows, weights)

    def through(kind: Callable[..., Tensor], v: Tensor) -> Tensor:
        return mean(kind(x, y, v, train, shares=pooled if v.ndim == 1 else None))

    with torch.no_grad():
        direct = size(mean(oracle.upper_grad_x(x, y, val, shares=pooled)))
        right = mean(oracle.upper_grad_y(x, y, val, shares=pooled))
        product = lambda v: through(oracle.hessian_product, v[0])[None]
        solved = solve_cg(product, right[None], tolerance=_TOLERANCE, max_products=_MOST_PRODUCTS)
        return {
            "indirect_share": float(size(through(oracle.jacobian_product, at.p)) / direct),
            "solved_share": float(size(through(oracle.jacobian_product, solved.u[0])) / direct),
            "system_residual": float(size(through(oracle.hessian_product, at.p) - right) / size(right)),
        }


def _shared(value: Tensor) -> Tensor:
    """Return the point of all clients; local steps begin with it in every row."""
    if value.ndim == 2 and not bool((value == value[:1]).all()):
        raise ExperimentError("clients multiply J at points of their own, so there is no share: leave indirect out.")
    return value if value.ndim == 1 else value[0]
