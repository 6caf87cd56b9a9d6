"""Step sizes: schedules, the curvature of the lower level, and whether the upper step is slow enough against the lower ones."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.clients import Clients
from fedbilevel.data.clients import Holdings
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import SettingError
from fedbilevel.federation import Algorithm, Federation, ServerAlgorithm, phase
from fedbilevel.hypergradient import hypergradient, largest_curvature, lower_solution
from fedbilevel.population import Population
from fedbilevel.problem import Problem
from fedbilevel.settings import setting


class Schedule(NamedTuple):
    """Step sizes at outer iteration t are multiplied by ((offset + 1) / (offset + t))^power: 1 at t = 1, constant for power 0.

    power 1/3 is the decay of the variance-reduced methods, 1/2 and 1 those of stochastic gradient theory. Local drift of methods with
    several local steps is proportional to the step, so a decaying step removes it.
    """

    power: float = 0.0
    offset: float = 100.0

    def __call__(self, iteration: int) -> float:
        return ((self.offset + 1) / (self.offset + iteration)) ** self.power

    def checked(self) -> Schedule:
        if not 0 <= self.power <= 1:
            raise SettingError(f"the schedule's power is {self.power}, expected a value between 0 (constant) and 1.")
        if self.offset < 0:
            raise SettingError(f"the schedule's offset is {self.offset}, expected at least 0.")
        return self


class Curvature(NamedTuple):
    """largest: the largest eigenvalue of any client's Hessian (a step of 0.8 / largest is safe for local steps, while one of the mean Hessian is
    not if one client is stiffer); smallest: of the mean Hessian, or of the flattest client for a local lower level; f_y: the largest |f_y,i|.
    Maxima over clients are 32-norms of what clients send, so that only sums leave the clients: at most num_clients^(1/32) too large."""

    largest: float
    smallest: float
    f_y: float
    ledger: dict[str, int]

    @property
    def radius(self) -> float:
        """A ball that holds u*: |u*| <= max |f_y| / mu."""
        return self.f_y / self.smallest


_NORM = 32


@dataclass(frozen=True, kw_only=True)
class _Probe(ServerAlgorithm):
    """Power iterations across clients, through the same verbs as any algorithm, so that the ledger counts them."""

    num_products: int = setting(30, "products H v per eigenvalue", least=1)

    lower_space = ("y", "v")

    def measure(self, fed: Federation, x: Any, y: Any) -> tuple[Tensor, float]:
        ends = fed.mean(self.ends, x=x, y=y).ends
        n = fed.num_clients
        largest, flattest, f_y = (n * ends).pow(1 / _NORM)
        return torch.stack([largest, 1 / flattest, f_y]), float(largest)

    @phase
    def ends(self, clients: Clients, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """This client's own largest and smallest eigenvalue and |f_y|, as powers whose sum is dominated by the extreme client."""
        batch, start = clients.batch("train", "curvature"), clients.rows(torch.linspace(1.0, 2.0, y.shape[-1], dtype=y.dtype, device=y.device).cos())
        v = start
        for _ in range(self.num_products):
            v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True)
            v = clients.hessian_product(x, y, v, batch)
        largest = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        v = start
        for _ in range(self.num_products):
            v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True)
            v = largest * v - clients.hessian_product(x, y, v, batch)
        smallest = (largest - torch.linalg.vector_norm(v, dim=1, keepdim=True)).clamp(min=1e-12 * largest)
        f_y = torch.linalg.vector_norm(clients.upper_grad_y(x, y, clients.batch("val", "curvature")), dim=1, keepdim=True)
        return {"ends": torch.cat([largest, 1 / smallest, f_y], dim=1).pow(_NORM)}

    @phase
    def shifted(self, clients: Clients, x: Tensor, y: Tensor, v: Tensor, shift: float) -> dict[str, Tensor]:
        return {"v": shift * clients.rows(v) - clients.hessian_product(x, y, v, clients.batch("train", "curvature"))}


def curvature(problem: Problem, clients: Sequence[Holdings], *, num_products: int = 30) -> Curvature:
    """L and mu of the lower level at the initial point, by power iterations across clients in float64, with what they cost."""
    probe = _Probe(num_products=num_products)
    fed = Simulation(probe, problem, clients, dtype=torch.float64)
    x, y = fed.initial()
    ends, largest = probe.measure(fed, x, y)
    smallest = float(ends[1])
    if problem.scopes.lower == "global":
        v = torch.linspace(1.0, 2.0, fed.host.y0.numel(), dtype=torch.float64).cos()
        for _ in range(num_products):  # lambda_max(s I - H) = s - lambda_min(H)
            v = fed.mean(probe.shifted, x=x, y=y, v=v / torch.linalg.vector_norm(v), shift=largest).v
        smallest = max(largest - float(torch.linalg.vector_norm(v)), 1e-12 * largest)
    return Curvature(largest, smallest, float(ends[2]), fed.ledger.totals())


def upper_curvature(problem: Problem, clients: Sequence[Holdings], *, num_products: int = 10, step: float = 1e-4) -> float:
    """L_Phi, the curvature of Phi at the initial point: power iteration on differences of the exact hypergradient. Sees all data at once."""
    population = Population(problem, clients, dtype=torch.float64)
    x = population.x0
    y = lower_solution(population, x)
    here = hypergradient(population, x, y).value

    def product(v: Tensor) -> Tensor:
        near = x + step * v.view_as(x)
        return ((hypergradient(population, near, lower_solution(population, near, y)).value - here) / step).reshape(1, -1)

    return largest_curvature(product, here.reshape(1, -1), num_products=num_products)[0]


def suggest(problem: Problem, clients: Sequence[Holdings]) -> dict[str, float]:
    """Step sizes for single-loop methods: lower and system steps 0.8 / L, the upper step at the edge of the two-timescale check.

    0.8 / L is longer than the papers' theory allows (1/(2L), 1/(6L)); it is what heterogeneous quadratics bear.
    """
    found = curvature(problem, clients)
    lr = 0.8 / found.largest
    return {"lr_lower": lr, "lr_system": lr, "lr_upper": 0.5 * lr * found.smallest / upper_curvature(problem, clients), "radius": found.radius}


def check_timescales(algorithm: Algorithm, problem: Problem, clients: Sequence[Holdings]) -> str | None:
    """Warns when lr_upper * L_Phi > 0.5 * min(lr_lower, lr_system) * mu: sufficient for stability of single-loop methods, not necessary."""
    lower = [getattr(algorithm, name) for name in ("lr_lower", "lr_system") if hasattr(algorithm, name)]
    if not hasattr(algorithm, "lr_upper") or not lower:
        return None
    bound = 0.5 * min(lower) * curvature(problem, clients).smallest / upper_curvature(problem, clients)
    if algorithm.lr_upper <= bound:
        return None
    text = (
        f"lr_upper = {algorithm.lr_upper:g} may be too large against lr_lower and lr_system: the two-timescale check allows up to {bound:.3g} here; "
        "lower it, or raise the lower steps, if the run is unstable"
    )
    warnings.warn(text, stacklevel=2)
    return text
