"""Step sizes: curvatures, suggested steps, and the two-timescale check of the upper step."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.engines.simulation import Simulation
from fedbilevel.federation.algorithm import Algorithm, Federation, ServerAlgorithm, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.oracle.hypergradient import hypergradient, largest_curvature, lower_solution, start_vector
from fedbilevel.oracle.population import Population
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.settings import setting
from fedbilevel.verdict import Check, Report


class Curvature(NamedTuple):
    """Extreme eigenvalues of the lower level's Hessians, and the cost of finding them.

    largest: the largest eigenvalue of any client's Hessian. A step of 0.8 / largest is safe for
        local steps; a step from the mean Hessian is not safe if one client's Hessian is larger.
    smallest: the smallest eigenvalue of the mean Hessian, or of any client for a local lower level.
    flattest: the smallest eigenvalue of any client, at least 1e-8 of the client's largest.

    Extremes over clients are 16-norms of the clients' values, so that only sums leave the clients.
    They are conservative by a factor of at most num_clients^(1/16).
    """

    largest: float
    smallest: float
    flattest: float
    ledger: dict[str, int]


_NORM = 16


@dataclass(frozen=True, kw_only=True)
class _Probe(ServerAlgorithm):
    """Power iteration across clients, as an `Algorithm` so that the ledger counts its cost."""

    num_products: int = setting(30, "products H v per eigenvalue", least=1)

    lower_space = ("y", "v")

    def extremes(self, fed: Federation, x: Any, y: Any) -> tuple[float, float]:
        """Return the largest and the smallest eigenvalue over all clients."""
        largest, flattest = (fed.num_clients * fed.mean(self.ends, x=x, y=y).ends).pow(1 / _NORM).tolist()
        return largest, 1 / flattest

    @phase
    def ends(self, clients: Clients, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return each client's largest and inverse smallest eigenvalue, to the power 16.

        The extreme client dominates the sum of these powers.
        """
        batch, start = clients.batch("train", "curvature"), clients.rows(start_vector(y))
        v = start
        for _ in range(self.num_products):
            v = clients.hessian_product(x, y, _unit(v), batch)
        largest = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        v = start
        for _ in range(self.num_products):
            v = largest * _unit(v) - clients.hessian_product(x, y, _unit(v), batch)
        smallest = torch.maximum(largest - torch.linalg.vector_norm(v, dim=1, keepdim=True), 1e-8 * largest)
        return {"ends": torch.cat([largest, 1 / smallest], dim=1).pow(_NORM)}

    @phase
    def shifted(self, clients: Clients, x: Tensor, y: Tensor, v: Tensor, shift: float) -> dict[str, Tensor]:
        return {"v": shift * clients.rows(v) - clients.hessian_product(x, y, v, clients.batch("train", "curvature"))}


def _unit(v: Tensor) -> Tensor:
    """Return v / |v|, or 0 for v = 0, which occurs for s I - H if H = s I."""
    return v / torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)


def curvature(problem: Problem, clients: Sequence[Holdings], *, num_products: int = 30) -> Curvature:
    """Return L and mu of the lower level at the initial point, and the cost of finding them.

    The method is power iteration across clients in float64.

    >>> import fedbilevel as fb
    >>> from fedbilevel.tasks.quadratic import Quadratic
    >>> found = fb.curvature(*Quadratic().build())
    >>> print(f"L = {found.largest:.2f}, mu = {found.smallest:.2f}")
    L = 4.33, mu = 1.65
    >>> found.ledger["rounds"]
    31
    """
    probe = _Probe(num_products=num_products)
    fed = Simulation(probe, problem, clients, dtype=torch.float64)
    x, y = fed.initial()
    largest, flattest = probe.extremes(fed, x, y)
    smallest = flattest
    if problem.scopes.lower == "global":
        v = start_vector(fed.host.y0)
        for _ in range(num_products):  # lambda_max(s I - H) = s - lambda_min(H)
            v = fed.mean(probe.shifted, x=x, y=y, v=_unit(v), shift=largest).v
        smallest = max(largest - float(torch.linalg.vector_norm(v)), 1e-8 * largest)
    return Curvature(largest, smallest, flattest, fed.ledger.totals())


def projection_radius(problem: Problem, clients: Sequence[Holdings]) -> float:
    """Return the radius of the ball onto which algorithms project u.

    The radius is 2 max_i |f_y,i| / min_i mu_i at y*(x0). The factor 2 allows for the change of x
    during the run. The computation needs the data of all clients.

    >>> import fedbilevel as fb
    >>> from fedbilevel.tasks.quadratic import Quadratic
    >>> problem, clients = Quadratic().build()
    >>> radius = fb.projection_radius(problem, clients)
    >>> result = fb.solve(problem, clients, "fedbio", num_rounds=2, radius=radius)
    >>> result.ledger["rounds"]
    2
    """
    population = Population(problem, clients, dtype=torch.float64)
    y = lower_solution(population, population.x0)
    f_y = population.oracle.upper_grad_y(population.x0, y, population.data.batch(torch.arange(len(population)), "val"))
    return 2 * float(torch.linalg.vector_norm(f_y, dim=1).max()) / curvature(problem, clients).flattest


def upper_curvature(
    problem: Problem, clients: Sequence[Holdings], *, num_products: int = 10, step: float = 1e-4
) -> float:
    """Return L_Phi, the curvature of Phi at the initial point.

    The method is power iteration on differences of the exact hypergradient. It needs the data of
    all clients.
    """
    population = Population(problem, clients, dtype=torch.float64)
    x = population.x0
    y = lower_solution(population, x)
    here = hypergradient(population, x, y).value

    def product(v: Tensor) -> Tensor:
        near = x + step * v.view_as(x)
        there = hypergradient(population, near, lower_solution(population, near, y)).value
        return ((there - here) / step).reshape(1, -1)

    return largest_curvature(product, here.reshape(1, -1), num_products=num_products)[0]


def slow_enough(step: float, found: Curvature, problem: Problem, clients: Sequence[Holdings]) -> float:
    """Return the longest upper step that passes the two-timescale check: 0.5 * step * mu / L_Phi.

    step: the shorter of the lower and the system step.
    """
    return 0.5 * step * found.smallest / upper_curvature(problem, clients)


def suggest_steps(problem: Problem, clients: Sequence[Holdings]) -> dict[str, float]:
    """Suggest step sizes for single-loop methods, from the curvatures at the initial point.

    The lower and system steps are 0.8 / L. The upper step is the longest that passes
    `check_timescales`. 0.8 / L exceeds the bounds of the papers' theory (1/(2L), 1/(6L)), but is
    stable on heterogeneous quadratics.

    >>> import fedbilevel as fb
    >>> from fedbilevel.tasks.quadratic import Quadratic
    >>> steps = fb.suggest_steps(*Quadratic().build())
    >>> {name: f"{step:.2g}" for name, step in steps.items()}
    {'lr_lower': '0.18', 'lr_system': '0.18', 'lr_upper': '0.043'}
    """
    found = curvature(problem, clients)
    lr = 0.8 / found.largest
    return {"lr_lower": lr, "lr_system": lr, "lr_upper": slow_enough(lr, found, problem, clients)}


def check_timescales(
    algorithm: Algorithm, problem: Problem, clients: Sequence[Holdings], *, show: bool = True
) -> Report:
    """Check that lr_upper * L_Phi <= 0.5 * min(lr_lower, lr_system) * mu, and warn if it is not.

    The condition is sufficient for stability of single-loop methods, but not necessary. An
    algorithm without these settings passes.

    >>> import fedbilevel as fb
    >>> from fedbilevel.algorithms.fedbio import FedBiO
    >>> from fedbilevel.tasks.quadratic import Quadratic
    >>> problem, clients = Quadratic().build()
    >>> steps = fb.suggest_steps(problem, clients)
    >>> fb.check_timescales(FedBiO(**steps), problem, clients, show=False)
    <Steps of 'fedbio': the check passed>
    """
    check = _timescales(algorithm, problem, clients)
    if not check.ok:
        warnings.warn(check.text, stacklevel=2)
    return Report(f"Steps of {algorithm.name()!r}", [check]).shown(show)


def _timescales(algorithm: Algorithm, problem: Problem, clients: Sequence[Holdings]) -> Check:
    name = "two timescales"
    lower = [getattr(algorithm, step) for step in ("lr_lower", "lr_system") if hasattr(algorithm, step)]
    if not hasattr(algorithm, "lr_upper") or not lower:
        return Check(name, True, "has no lr_upper to compare with lr_lower and lr_system")
    bound = slow_enough(min(lower), curvature(problem, clients), problem, clients)
    if algorithm.lr_upper <= bound:
        return Check(name, True, f"lr_upper = {algorithm.lr_upper:g}; the bound is {bound:.3g}")
    text = (
        f"lr_upper = {algorithm.lr_upper:g} may be too large relative to lr_lower and lr_system: the two-timescale "
        f"check allows up to {bound:.3g} here; reduce it, or increase the lower steps, if the run is unstable"
    )
    return Check(name, False, text)
