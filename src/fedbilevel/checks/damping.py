"""The lower solution and the exact hypergradient, with damping if the lower level is not convex."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.checks.clock import Clock
from fedbilevel.errors import ConvexityError
from fedbilevel.oracle.hypergradient import hypergradient, largest_curvature, lower_solution
from fedbilevel.oracle.population import Population
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Fields, Problem

_DAMPINGS = (0.03, 0.1, 0.3, 1.0, 3.0)  # relative to the largest curvature at the start
_DENSE = 300  # entries of y up to which a dense system is solved


class Reference(NamedTuple):
    """A population, a point, its lower solution and its hypergradient; `note` names the damping."""

    population: Population
    x: Tensor
    y: Tensor
    value: Tensor
    note: str


def reference(population: Population, clients: Sequence[Holdings], x: Tensor | None, clock: Clock) -> Reference:
    """Return the reference of a check.

    If the lower level is not convex, (damping/2) |y - y0|^2 is added to its loss. The derivatives of
    that problem use the same losses, so that a wrong estimator is found there, too.
    """
    population.oracle.tick, clock.doing = clock, "solution of the lower level"
    point = population.x0 if x is None else x.to(torch.float64)
    try:
        return Reference(population, point, *_solved(population, point), "")
    except ConvexityError as error:
        last = error
    largest = _largest(population)
    for damping in (share * largest for share in _DAMPINGS):
        convex = Population(damped(population.problem, damping), clients, dtype=torch.float64)
        convex.oracle.tick = clock
        note = f"the lower level is not convex: {damping:.2g}/2 |y - y0|^2 is added to its loss"
        try:
            return Reference(convex, point, *_solved(convex, point), note)
        except ConvexityError as error:
            last = error
    raise last


def _solved(population: Population, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return y*(x) and the hypergradient."""
    y = lower_solution(population, x)
    if y.shape[-1] <= _DENSE:
        return y, hypergradient(population, x, y, method="exact").value
    return y, hypergradient(population, x, y, method="cg", tolerance=1e-12).value


def _largest(population: Population) -> float:
    """Return the largest curvature of a client's lower loss at the start."""
    train = population.data.batch(torch.arange(len(population)), "train")
    product = lambda v: population.oracle.hessian_product(population.x0, population.y0, v, train)
    like = population.y0.expand(len(population), -1)
    with torch.no_grad():
        return largest_curvature(product, like, num_products=10)[0]


def damped(problem: Problem, damping: float) -> Problem:
    """Return the problem with (damping/2) |y - y0|^2 added to the lower loss."""

    def lower(x: Any, y: Any, batch: Fields) -> Tensor:
        distance = sum(((y[name] - start.to(y[name])) ** 2).sum() for name, start in problem.y0.items())
        return problem.lower(x, y, batch) + 0.5 * damping * distance

    return dataclasses.replace(problem, lower=lower)
