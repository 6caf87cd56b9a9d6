"""`check_hypergradient`: estimators against the exact hypergradient and finite differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedbilevel import discovery
from fedbilevel.checks.differences import compare, difference, inside
from fedbilevel.engines import simulate
from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import Algorithm
from fedbilevel.oracle.hypergradient import SOLVERS, hypergradient, lower_solution
from fedbilevel.oracle.population import Population
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.verdict import Check, Report

Estimator = str | Algorithm | Callable[[Population, Tensor, Tensor], Tensor]


def check_hypergradient(
    problem: Problem,
    clients: Sequence[Holdings],
    *,
    estimators: Sequence[Estimator] = tuple(SOLVERS),
    x: Tensor | None = None,
    tolerance: float = 1e-5,
    num_directions: int = 3,
    step: float = 1e-4,
    seed: int = 0,
    show: bool = True,
) -> Report:
    """Compare estimators with the exact hypergradient, and the latter with finite differences.

    Finite differences of Phi(x) = mean f_i(x, y*(x)) are in float64, with steps of at most `step`.
    An estimator is the name of a solver (exact, cg, neumann, fixed_point), an algorithm that has
    `estimate` (or its name), or a function (population, x, y*) -> value. The value is a vector for
    a shared x, and one row f_x,i - J_i u per client for a private x.

    >>> import fedbilevel as fb
    >>> from fedbilevel.tasks.quadratic import Quadratic
    >>> problem, clients = Quadratic(num_clients=3, dim_upper=2, dim_lower=2).build()
    >>> fb.check_hypergradient(problem, clients, estimators=["cg"], show=False).ok
    True
    >>> local = lambda population, x, y: 0 * x  # a wrong estimator
    >>> fb.check_hypergradient(problem, clients, estimators=[local], show=False).ok
    False
    """
    population = Population(problem, clients, dtype=torch.float64)
    point = population.x0 if x is None else x.to(torch.float64)
    y = lower_solution(population, point)
    exact = hypergradient(population, point, y, method="exact").value
    draw = torch.Generator().manual_seed(seed)
    directions = [
        torch.randn(point.shape, generator=draw, dtype=torch.float64) * inside(population)
        for _ in range(num_directions)
    ]
    checks = [_by_differences(population, point, y, exact, directions, step, tolerance)]
    for estimator in estimators:
        name, value, note = _estimate(estimator, population, clients, point, y)
        checks.append(compare(name, value, exact, tolerance, "the exact hypergradient", note))
    size = float(torch.linalg.vector_norm(exact))
    return Report(f"Hypergradient of {problem.name!r}, |value| = {size:.6g}", checks).shown(show)


def _by_differences(
    population: Population,
    x: Tensor,
    y: Tensor,
    exact: Tensor,
    directions: Sequence[Tensor],
    step: float,
    tolerance: float,
) -> Check:
    """Compare finite differences of Phi with the exact hypergradient along each direction."""
    everyone = torch.arange(len(population))
    share = population.weights(everyone).double()
    share = share / share.sum()
    val = population.data.batch(everyone, "val")

    def phi(at: Tensor) -> Tensor:
        solution = lower_solution(population, at, y)
        return (share * population.oracle.evaluate(population.problem.upper, at, solution, val)).sum()

    slopes = torch.stack([(exact * d * (share[:, None] if d.ndim == 2 else 1)).sum() for d in directions])
    along = lambda t: torch.stack([phi(x + t * d) for d in directions])
    found, note = difference(along, slopes, step, tolerance)
    against = f"the exact hypergradient along {len(directions)} directions"
    return compare("finite differences", found, slopes, tolerance, against, note)


def _estimate(
    estimator: Estimator, population: Population, clients: Sequence[Holdings], x: Tensor, y: Tensor
) -> tuple[str, Tensor, str]:
    """Return the name, the value and a note of one estimator."""
    if isinstance(estimator, str) and estimator in SOLVERS:
        found = hypergradient(population, x, y, method=estimator)  # type: ignore[arg-type]
        return estimator, found.value, f"; residual {found.residual:.1e}, {found.num_products} products"
    if isinstance(estimator, str):
        estimator = discovery.algorithm(estimator)()
    if isinstance(estimator, Algorithm):
        if not hasattr(estimator, "estimate"):
            raise SettingError(
                f"{estimator.name()} has no estimate of its own (it tracks the hypergradient along the run): "
                "check it by running it."
            )
        fed = simulate(estimator, population.problem, clients, dtype=torch.float64)
        h, _ = estimator.estimate(fed, fed.place("x", x), fed.place("y", y))
        value = fed.collect(h)
        if value.ndim > x.ndim:  # each peer has an estimate of a shared x: take the farthest from their mean
            value = value[torch.linalg.vector_norm(value - value.mean(0), dim=1).argmax()]
        return estimator.name(), value, ""
    assert callable(estimator)
    return getattr(estimator, "__name__", "estimator"), estimator(population, x, y), ""
