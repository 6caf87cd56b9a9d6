"""`check_problem`: derivatives of a problem's losses against finite differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedbilevel.checks.differences import compare, difference, inside
from fedbilevel.checks.selection import selected
from fedbilevel.oracle.dependence import dependence_faults
from fedbilevel.oracle.population import Population
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.data_faults import data_faults
from fedbilevel.problem.problem import Problem
from fedbilevel.verdict import Check, Report


def check_problem(
    problem: Problem, clients: Sequence[Holdings], *, tolerance: float = 1e-5, seed: int = 0, show: bool = True
) -> Report:
    """Check the losses of a problem in float64, at a random point near the initial one.

    The derivatives are compared with finite differences, H must be symmetric, and padded entries of
    a private x must not change a loss. The levels must depend on each other, labels must not be
    constant, and `train` and `val` must not be the same samples. The derivatives of a large problem
    are checked on a random part of its clients and samples, and the report says which.

    >>> import fedbilevel as fb
    >>> from fedbilevel.tasks.quadratic import Quadratic
    >>> fb.check_problem(*Quadratic().build(), show=False)
    <Problem 'quadratic', 5 clients: all 8 checks passed>
    """
    whole = Population(problem, clients, dtype=torch.float64)
    part, selection = selected(whole.data, clients, seed)
    population = Population(problem, part, dtype=torch.float64) if selection else whole
    draw = torch.Generator().manual_seed(seed)
    real = inside(population)
    x = population.x0 + 0.1 * torch.randn(population.x0.shape, generator=draw, dtype=torch.float64) * real
    y = population.y0 + 0.1 * torch.randn(population.y0.shape, generator=draw, dtype=torch.float64)
    dx = torch.randn(x.shape, generator=draw, dtype=torch.float64) * real
    dy, v = (torch.randn(y.shape, generator=draw, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        checks = _derivatives(population, (x, y), (dx, dy), v, tolerance)
        if population.x_sizes is not None:
            checks.append(_padding(population, x, y))
        checks.append(_symmetry(population, x, y, dy, v))
    checks += _meaning(whole, seed)
    title = f"Problem {problem.name!r}, {selection or f'{len(whole)} clients'}"
    return Report(title, checks).shown(show)


def _derivatives(
    population: Population, point: tuple[Tensor, Tensor], directions: tuple[Tensor, Tensor], v: Tensor, tolerance: float
) -> list[Check]:
    """Compare each derivative along a direction with the finite difference along it."""
    problem, oracle, (x, y), (dx, dy) = population.problem, population.oracle, point, directions
    everyone = torch.arange(len(population))
    train, val = population.data.batch(everyone, "train"), population.data.batch(everyone, "val")
    jv, hv = oracle.second_order(x, y, v, train)
    upper_x, upper_y = oracle.upper_grad_x(x, y, val), oracle.upper_grad_y(x, y, val)
    lower_y = oracle.lower_grad(x, y, train)
    triples: dict[str, tuple[Tensor, Tensor, Callable[[float], Tensor]]] = {
        "grad_x upper": (upper_x, dx, lambda t: oracle.evaluate(problem.upper, x + t * dx, y, val)),
        "grad_y upper": (upper_y, dy, lambda t: oracle.evaluate(problem.upper, x, y + t * dy, val)),
        "grad_y lower": (lower_y, dy, lambda t: oracle.evaluate(problem.lower, x, y + t * dy, train)),
        "H v": (hv, dy, lambda t: (oracle.lower_grad(x, y + t * dy, train) * v).sum(1)),
        "J v": (jv, dx, lambda t: (oracle.lower_grad(x + t * dx, y, train) * v).sum(1)),
    }
    checks = []
    for name, (gradient, direction, along) in triples.items():
        slope = (gradient * direction).sum(1)
        found, note = difference(along, slope, 1e-5, tolerance)
        checks.append(compare(name, slope, found, tolerance, "finite differences", note))
    return checks


def _padding(population: Population, x: Tensor, y: Tensor) -> Check:
    """Check that more padded entries of a private x change no loss."""
    problem, oracle, everyone = population.problem, population.oracle, torch.arange(len(population))
    wider = torch.cat([x, x.new_ones(len(x), 3)], dim=1)  # entries that no sample refers to
    changed = 0.0
    if population.layout_x.ragged:
        for loss, role in ((problem.lower, "train"), (problem.upper, "val")):
            batch = population.data.batch(everyone, role)
            change = oracle.evaluate(loss, wider, y, batch) - oracle.evaluate(loss, x, y, batch)
            changed = max(changed, float(change.abs().max()))
    text = f"three more padded entries of a private x change a loss by {changed:.1e} (use sums over batch['index'])"
    return Check("padding of x", changed < 1e-12, text)


def _symmetry(population: Population, x: Tensor, y: Tensor, dy: Tensor, v: Tensor) -> Check:
    train = population.data.batch(torch.arange(len(population)), "train")
    _, hv = population.oracle.second_order(x, y, v, train)
    hd = population.oracle.hessian_product(x, y, dy, train)
    return compare("H symmetric", (hv * dy).sum(1), (hd * v).sum(1), 1e-8, "the transposed product")


def _meaning(population: Population, seed: int) -> list[Check]:
    """Check that the solution of the problem means something."""
    levels = [fault.text for fault in dependence_faults(population, seed)]
    data = data_faults(population.problem, population.data)
    return [
        Check("levels", not levels, "; ".join(levels) or "upper() depends on y, and y*(x) depends on x"),
        Check("data", not data, "; ".join(data) or "no label is constant, and 'train' and 'val' differ"),
    ]
