"""`check_hypergradient`: estimators against the exact hypergradient and finite differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedbilevel import discovery
from fedbilevel.checks.clock import Clock, OutOfTime
from fedbilevel.checks.damping import Reference, reference
from fedbilevel.checks.differences import compare, difference, inside
from fedbilevel.checks.selection import selected
from fedbilevel.engines import simulate
from fedbilevel.errors import ConvexityError, SettingError
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
    seconds: float | None = 20.0,
    show: bool = True,
) -> Report:
    """Compare estimators with the exact hypergradient, and the latter with finite differences.

    Finite differences of Phi(x) = mean f_i(x, y*(x)) are in float64, with steps of at most `step`.
    An estimator is the name of a solver (exact, cg, neumann, fixed_point), an algorithm that has
    `estimate` (or its name), or a function (population, x, y*) -> value. The value is a vector for
    a shared x, and one row f_x,i - J_i u per client for a private x.

    A random part of many clients or samples is used, and the report says which. If the lower level
    is not convex, a quadratic is added to its loss, and the report names it. After `seconds` the
    remaining checks are reported as not checked; None means no limit.

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
    selection = ""
    if x is None:  # a given x may hold rows of all clients
        clients, selection = selected(population.data, clients, seed)
        population = Population(problem, clients, dtype=torch.float64) if selection else population
    estimators = sorted(estimators, key=lambda one: one == "exact")  # last, because a dense system is expensive
    clock = Clock("check_hypergradient", seconds)
    names, checks, title = ["finite differences", *map(_name, estimators)], [], [f"Hypergradient of {problem.name!r}"]
    try:
        known = reference(population, clients, x, clock)
        title[0] += f", |value| = {float(torch.linalg.vector_norm(known.value)):.6g}"
        title += [known.note] if known.note else []
        clock.doing = names[0]
        checks.append(_by_differences(known, _directions(known, num_directions, seed), step, tolerance))
        for name, estimator in zip(names[1:], estimators, strict=True):
            clock.doing = name
            value, note = _estimate(estimator, known, clients)
            checks.append(compare(name, value, known.value, tolerance, "the exact hypergradient", note))
        undone = ""
    except OutOfTime:
        undone = f"not checked within {seconds:g} seconds: give more seconds, or seconds=None for no limit"
    except ConvexityError as error:
        undone = f"not checked, because {str(error).removesuffix('.')}"
    finally:
        clock.clear()
    checks += [Check(name, None, undone) for name in names[len(checks) :]]
    return Report("; ".join([*title, *([selection] if selection else [])]), checks).shown(show)


def _name(estimator: Estimator) -> str:
    if isinstance(estimator, str):
        return estimator
    return estimator.name() if isinstance(estimator, Algorithm) else getattr(estimator, "__name__", "estimator")


def _directions(known: Reference, number: int, seed: int) -> list[Tensor]:
    draw, like = torch.Generator().manual_seed(seed), known.x
    real = inside(known.population)
    return [torch.randn(like.shape, generator=draw, dtype=torch.float64) * real for _ in range(number)]


def _by_differences(known: Reference, directions: Sequence[Tensor], step: float, tolerance: float) -> Check:
    """Compare finite differences of Phi with the exact hypergradient along each direction."""
    population, x, y, exact, _ = known
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


def _estimate(estimator: Estimator, known: Reference, clients: Sequence[Holdings]) -> tuple[Tensor, str]:
    """Return the value and a note of one estimator."""
    population, x, y, *_ = known
    if isinstance(estimator, str) and estimator in SOLVERS:
        found = hypergradient(population, x, y, method=estimator)  # type: ignore[arg-type]
        return found.value, f"; residual {found.residual:.1e}, {found.num_products} products"
    if isinstance(estimator, str):
        estimator = discovery.algorithm(estimator)()
    if isinstance(estimator, Algorithm):
        if not hasattr(estimator, "estimate"):
            raise SettingError(
                f"{estimator.name()} has no estimate of its own (it tracks the hypergradient along the run): "
                "check it by running it."
            )
        fed = simulate(estimator, population.problem, clients, dtype=torch.float64)
        fed.host.oracle.tick = population.oracle.tick
        h, _ = estimator.estimate(fed, fed.place("x", x), fed.place("y", y))
        value = fed.collect(h)
        if value.ndim > x.ndim:  # each peer has an estimate of a shared x: take the farthest from their mean
            value = value[torch.linalg.vector_norm(value - value.mean(0), dim=1).argmax()]
        return value, ""
    assert callable(estimator)
    return estimator(population, x, y), ""
