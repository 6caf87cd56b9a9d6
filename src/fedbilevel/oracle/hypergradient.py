"""Hypergradient from all data of all clients at once, with a residual.

It is the reference for every federated estimator:

    grad Phi = mean f_x - (mean J) u,   (mean H) u = mean f_y    at y*(x)      global lower level
    grad Phi = mean (f_x,i - J_i u_i),   H_i u_i = f_y,i         at y_i*(x)    local lower level

Linear systems are solved for r right-hand sides at once: r = 1 for a global lower level, and one
right-hand side per client for a local lower level.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedbilevel.errors import ConvexityError, ProblemError, ResidualWarning, SettingError
from fedbilevel.oracle.population import Population

Product = Callable[[Tensor], Tensor]  # (r, d) -> (r, d), row by row
LIMIT = 10_000  # products of a series or a fixed point without max_products
Method = Literal["exact", "cg", "neumann", "fixed_point"]


def project(rows: Tensor, radius: float | None) -> Tensor:
    """Project each row onto the ball of the given radius; None changes nothing."""
    if radius is None:
        return rows
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return rows * (radius / norms.clamp(min=radius))


class Solution(NamedTuple):
    """Solution u, its largest residual |H u - b| / |b|, and the number of products H v."""

    u: Tensor
    residual: float
    num_products: int


def _certified(product: Product, b: Tensor, u: Tensor, num_products: int) -> Solution:
    size = torch.linalg.vector_norm(b, dim=1)
    error = torch.linalg.vector_norm(product(u) - b, dim=1)
    residual = torch.where(size > 0, error / size, error)
    return Solution(u, float(residual.max()), num_products + 1)


def solve_exact(product: Product, b: Tensor) -> Solution:
    """Solve a small system with a dense matrix: one product per column, then a factorisation."""
    columns = [product(unit.expand_as(b)) for unit in torch.eye(b.shape[1], dtype=b.dtype, device=b.device)]
    matrix = torch.stack(columns, dim=2)
    return _certified(product, b, torch.linalg.solve(matrix, b[:, :, None])[:, :, 0], b.shape[1])


def solve_cg(
    product: Product, b: Tensor, *, tolerance: float = 1e-10, max_products: int | None = None, u0: Tensor | None = None
) -> Solution:
    """Solve by conjugate gradients; raise an error if H is not positive definite."""
    u = torch.zeros_like(b) if u0 is None else u0
    r = b.clone() if u0 is None else b - product(u)
    p, rr = r, (r * r).sum(1, keepdim=True)
    goal = (_reachable(tolerance, b) ** 2) * (b * b).sum(1, keepdim=True)
    count = 0 if u0 is None else 1
    for _ in range(10 * b.shape[1] if max_products is None else max_products):
        if bool((rr <= goal).all()):
            break
        hp = product(p)
        count += 1
        curvature = (p * hp).sum(1, keepdim=True)
        if bool(((curvature <= 0) & (rr > goal)).any()):
            raise ConvexityError(
                f"the lower level has curvature {float(curvature.min()):.3g} <= 0 along a direction, so it is not "
                "strongly convex there: add a regulariser to the lower loss, "
                "or use method='fixed_point' with few steps."
            )
        step = torch.where(rr > goal, rr / curvature.clamp(min=torch.finfo(b.dtype).tiny), torch.zeros_like(rr))
        u, r = u + step * p, r - step * hp
        rr, old = (r * r).sum(1, keepdim=True), rr
        p = r + torch.where(old > 0, rr / old, torch.zeros_like(rr)) * p
    return _certified(product, b, u, count)


def solve_neumann(
    product: Product,
    b: Tensor,
    *,
    step: float | None = None,
    num_terms: int | None = None,
    tolerance: float = 1e-10,
    max_products: int | None = None,
) -> Solution:
    """Return step * sum_{j < num_terms} (I - step H)^j b.

    The error is (1 - step mu)^num_terms.

    num_terms: number of terms; None stops when a term is small relative to the first term.
    max_products: number of products without num_terms; None stops after 10,000, with a warning.
    """
    if num_terms is not None and num_terms < 1:
        raise SettingError(f"num_terms is {num_terms}, expected at least 1.")
    step, count = _step(product, b, step)
    term, total = b, b
    goal = _reachable(tolerance, b) * torch.linalg.vector_norm(b, dim=1)
    limit = LIMIT if max_products is None else max_products
    for _ in range(limit if num_terms is None else num_terms - 1):
        if num_terms is None and bool((torch.linalg.vector_norm(term, dim=1) <= goal).all()):
            break
        term = term - step * product(term)
        total, count = total + term, count + 1
    else:
        return _cut_off(_certified(product, b, step * total, count), max_products is None and num_terms is None)
    return _certified(product, b, step * total, count)


def solve_fixed_point(
    product: Product,
    b: Tensor,
    *,
    step: float | None = None,
    tolerance: float = 1e-10,
    max_products: int | None = None,
    u0: Tensor | None = None,
) -> Solution:
    """Iterate u <- u - step (H u - b) from any start until the residual is small.

    Single-loop methods take one such step per round.

    max_products: number of products; None stops after 10,000, with a warning.
    """
    step, count = _step(product, b, step)
    u = torch.zeros_like(b) if u0 is None else u0
    goal = _reachable(tolerance, b) * torch.linalg.vector_norm(b, dim=1)
    for _ in range(LIMIT if max_products is None else max_products):
        residual = product(u) - b
        count += 1
        if bool((torch.linalg.vector_norm(residual, dim=1) <= goal).all()):
            break
        u = u - step * residual
    else:
        return _cut_off(_certified(product, b, u, count), max_products is None)
    return _certified(product, b, u, count)


def _cut_off(solution: Solution, warns: bool) -> Solution:
    """Return a solution that was stopped at a limit, with a warning if the user gave no limit."""
    if warns:
        warnings.warn(
            ResidualWarning(
                f"the linear system was stopped after {LIMIT:,} products with a residual of {solution.residual:.2g}, "
                "and an error that can be larger by the condition number: use method 'cg', or give max_products."
            ),
            stacklevel=4,
        )
    return solution


def _reachable(tolerance: float, like: Tensor) -> float:
    """Return the tolerance, or the smallest tolerance that the number type allows."""
    return max(tolerance, 100 * torch.finfo(like.dtype).eps if like.dtype != torch.float64 else 0.0)


def _step(product: Product, b: Tensor, step: float | None) -> tuple[float, int]:
    if step is not None:
        if step <= 0:
            raise SettingError(f"step is {step}, expected a value greater than 0 and at most 1/L.")
        return step, 0
    largest, count = largest_curvature(product, b)
    return 0.9 / largest, count


def start_vector(like: Tensor) -> Tensor:
    """Return the fixed start (d,) of power iterations, not orthogonal to special directions."""
    return torch.linspace(1.0, 2.0, like.shape[-1], dtype=like.dtype, device=like.device).cos()


def largest_curvature(product: Product, like: Tensor, *, num_products: int = 30) -> tuple[float, int]:
    """Return the largest |eigenvalue| of H by power iteration, and the number of products.

    The value is a lower estimate, which is close after a few dozen products.
    """
    v = start_vector(like).expand_as(like)
    size = like.new_ones(len(like), 1)
    for _ in range(num_products):
        v = product(v / torch.linalg.vector_norm(v, dim=1, keepdim=True))
        size = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        if bool((size == 0).any()):
            raise ProblemError(
                "the Hessian of the lower level is zero: y*(x) is not determined; add a regulariser to the lower loss."
            )
    return float(size.max()), num_products


SOLVERS: dict[str, Callable[..., Solution]] = {
    "exact": solve_exact,
    "cg": solve_cg,
    "neumann": solve_neumann,
    "fixed_point": solve_fixed_point,
}


class Hypergradient(NamedTuple):
    """Hypergradient and the quality of its linear system.

    value: (d_x,) tensor for a shared x; for a private x one row f_x,i - J_i u per client, without
        the client's weight in the mean.
    """

    value: Tensor
    u: Tensor
    residual: float
    num_products: int


def hypergradient(
    population: Population, x: Tensor, y: Tensor, *, method: Method = "cg", **options: object
) -> Hypergradient:
    """Return the hypergradient at (x, y) over all data of all clients.

    The result is exact if y = y*(x) and the residual is zero.
    """
    if method not in SOLVERS:
        raise SettingError(f"method is {method!r}, expected one of {', '.join(SOLVERS)}.")
    pool, oracle = _Pool(population), population.oracle
    with torch.no_grad():
        fx, fy = oracle.upper_grads(x, y, pool.val)
        solution = SOLVERS[method](
            lambda v: pool.lower(oracle.hessian_product(x, y, pool.spread(v), pool.train)), pool.lower(fy), **options
        )
        blocks = fx - oracle.jacobian_product(x, y, pool.spread(solution.u), pool.train)
        value = blocks if population.problem.scopes.upper == "private" else population.average(blocks, pool.weights)
    return Hypergradient(value, pool.spread(solution.u), solution.residual, solution.num_products)


def lower_solution(
    population: Population, x: Tensor, y0: Tensor | None = None, *, tolerance: float = 1e-12, max_iterations: int = 100
) -> Tensor:
    """Return y*(x) by Newton's method with conjugate gradients and backtracking.

    The result is (d_y,), or one row per client for a local lower level.
    """
    pool, oracle = _Pool(population), population.oracle
    start = population.y0 if y0 is None else y0
    y = pool.lower(start.expand(len(population), -1) if start.ndim == 1 else start)

    def value(y: Tensor) -> Tensor:
        return pool.lower(oracle.evaluate(population.problem.lower, x, pool.spread(y), pool.train)[:, None])[:, 0]

    def gradient(y: Tensor) -> Tensor:
        return pool.lower(oracle.lower_grad(x, pool.spread(y), pool.train))

    def product(y: Tensor, v: Tensor) -> Tensor:
        return pool.lower(oracle.hessian_product(x, pool.spread(y), pool.spread(v), pool.train))

    with torch.no_grad():
        return pool.spread(newton(y, value, gradient, product, tolerance=tolerance, max_iterations=max_iterations)[0])


def newton(
    y: Tensor,
    value: Callable[[Tensor], Tensor],
    gradient: Callable[[Tensor], Tensor],
    product: Callable[[Tensor, Tensor], Tensor],
    *,
    tolerance: float,
    max_iterations: int,
    max_products: int | None = None,
) -> tuple[Tensor, bool]:
    """Minimise r functions at once, starting from the rows of y.

    Return the minimisers, and whether the gradients are small there, up to rounding.
    """
    tolerance, rounding = _reachable(tolerance, y), 50 * torch.finfo(y.dtype).eps
    g = gradient(y)
    scale = 1 + torch.linalg.vector_norm(g, dim=1)
    small = lambda limit: bool((torch.linalg.vector_norm(g, dim=1) <= limit * scale).all())
    for _ in range(max_iterations):
        if small(tolerance):
            break
        hessian = lambda v: product(y, v)  # noqa: B023 - called in this iteration only
        d = solve_cg(hessian, -g, tolerance=1e-4, max_products=max_products).u
        slope, now, t = (g * d).sum(1), value(y), y.new_ones(len(y))
        for _ in range(40):
            falls = value(y + t[:, None] * d) <= now + 1e-4 * t * slope + rounding * now.abs()
            if bool(falls.all()):
                break
            t = torch.where(falls, t, t / 2)
        y = y + t[:, None] * d
        g = gradient(y)
    return y, small(100 * tolerance)


class _Pool:
    """Batches of all samples, and the mean over clients for a global lower level.

    For a local lower level there is one row per client.
    """

    def __init__(self, population: Population) -> None:
        self.population = population
        everyone = torch.arange(len(population))
        self.train, self.val = population.data.batch(everyone, "train"), population.data.batch(everyone, "val")
        self.weights = population.weights(everyone)
        self.local = population.problem.scopes.lower == "local"

    def lower(self, rows: Tensor) -> Tensor:
        return rows if self.local else self.population.average(rows, self.weights)[None]

    def spread(self, rows: Tensor) -> Tensor:
        return rows if self.local else rows[0]
