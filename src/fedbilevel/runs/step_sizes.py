"""Step sizes from measurements of a problem: curvatures, a radius for u, and suggested steps."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel import discovery
from fedbilevel.engines import simulate
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import ProblemError
from fedbilevel.federation.algorithm import Algorithm, Federation, ServerAlgorithm, phase
from fedbilevel.federation.auto_steps import measured
from fedbilevel.federation.clients import Clients
from fedbilevel.federation.probing import Found
from fedbilevel.oracle.hypergradient import lower_solution
from fedbilevel.oracle.lanczos import lanczos
from fedbilevel.oracle.oracle import Strategy
from fedbilevel.oracle.population import Population
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.settings import setting

_NORM = 16
_DAMPED = 0.02  # of the largest eigenvalue: curvature that is left where it is negative
_EVALUATIONS = 120  # of a measurement, in evaluations of all directions of all clients
_TRIAL = 64  # samples


class Curvature(NamedTuple):
    """Extreme eigenvalues of the lower level's Hessians, and the cost of finding them.

    largest: the largest absolute eigenvalue of any client's Hessian. A step of 0.8 / largest is
        safe for local steps.
    smallest: the smallest eigenvalue of the mean Hessian, or of any client for a local lower level;
        negative for a lower level that is not convex.
    flattest: the smallest eigenvalue of any client, at least 1e-8 of the largest. If it is
        negative, the value with damping, which is 0.02 of the largest.

    Extremes over clients are 16-norms of the clients' values, so that only sums leave the clients.
    They are conservative by a factor of at most num_clients^(1/16).
    """

    largest: float
    smallest: float
    flattest: float
    ledger: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Probe(ServerAlgorithm):
    """Measurements of a problem without an algorithm, whose cost the ledger counts."""

    num_products: int = setting(30, "products H v per client", least=1)

    lower_space = ("y", "v")

    def extremes(self, fed: Federation, x: Any, y: Any) -> tuple[float, float, float]:
        """Return the largest |eigenvalue|, the smallest positive and the size of the most negative one."""
        powers = fed.num_clients * fed.mean(self.ends, x=x, y=y).ends
        largest, flattest, negative = powers.pow(1 / _NORM).tolist()
        return largest, 1 / flattest, negative

    @phase
    def ends(self, clients: Clients, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return each client's extreme eigenvalues, to the power 16: the extreme client dominates the sum."""
        batch = clients.batch("train", "curvature")
        low, high = lanczos(lambda v: clients.hessian_product(x, y, v, batch), clients.rows(y), self.num_products)
        largest = torch.maximum(high, -low)
        flattest = torch.maximum(low, 1e-8 * largest)
        return {"ends": torch.stack([largest, 1 / flattest, (-low).clamp(min=0)], dim=1).pow(_NORM)}

    @phase
    def product(self, clients: Clients, x: Tensor, y: Tensor, v: Tensor) -> dict[str, Tensor]:
        return {"v": clients.hessian_product(x, y, v, clients.batch("train", "curvature"))}


def curvature(problem: Problem, clients: Sequence[Holdings], *, num_products: int = 30) -> Curvature:
    """Return L and mu of the lower level at the initial point, and the cost of finding them.

    The method is the Lanczos iteration in float64, at every client and across clients.

    >>> import fedbilevel as fb
    >>> from fedbilevel.tasks.quadratic import Quadratic
    >>> found = fb.curvature(*Quadratic().build())
    >>> print(f"L = {found.largest:.2f}, mu = {found.smallest:.2f}")
    L = 4.33, mu = 1.65
    >>> found.ledger["rounds"]
    31
    """
    probe = Probe(num_products=num_products)
    fed = Simulation(probe, problem, clients, dtype=torch.float64)
    x, y = fed.initial()
    largest, flattest, negative = probe.extremes(fed, x, y)
    if negative > 1e-6 * largest:
        flattest = _DAMPED * largest
    smallest = -negative if negative > 1e-6 * largest else flattest
    if problem.scopes.lower == "global":
        low, _ = lanczos(lambda v: fed.mean(probe.product, x=x, y=y, v=v[0]).v[None], fed.host.y0[None], num_products)
        smallest = float(low) if float(low) < -1e-6 * largest else max(float(low), 1e-8 * largest)
    return Curvature(largest, smallest, flattest, fed.ledger.totals())


def projection_radius(problem: Problem, clients: Sequence[Holdings]) -> float:
    """Return the radius of the ball onto which algorithms project u.

    The radius is 2 max_i |f_y,i| / min_i mu_i at y*(x0). The factor 2 allows for the change of x
    during the run. If the lower level is not convex, f_y is taken at y0 and mu is 0.02 of the
    largest curvature. The computation needs the data of all clients.

    >>> import fedbilevel as fb
    >>> from fedbilevel.tasks.quadratic import Quadratic
    >>> problem, clients = Quadratic().build()
    >>> radius = fb.projection_radius(problem, clients)
    >>> result = fb.solve(problem, clients, "fedbio", num_rounds=2, radius=radius)
    >>> result.ledger["rounds"]
    2
    """
    population = Population(problem, clients, dtype=torch.float64)
    try:
        y = lower_solution(population, population.x0)
    except ProblemError:  # not strongly convex
        y = population.y0
    f_y = population.oracle.upper_grad_y(population.x0, y, population.data.batch(torch.arange(len(population)), "val"))
    return 2 * float(torch.linalg.vector_norm(f_y, dim=1).max()) / curvature(problem, clients).flattest


def suggest_steps(
    problem: Problem,
    clients: Sequence[Holdings],
    algorithm: Algorithm | str = "fedbio",
    *,
    seconds: float = 10.0,
    strategy: Strategy = "auto",
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """Suggest the step sizes of an algorithm, from measurements at the initial point.

    The steps are those of `lr_upper="auto"` and so on, which a run measures itself. A warning says
    if the lower level is not convex there.

    algorithm: a name, or an algorithm with settings, such as FedBiO(num_local_steps=1).
    seconds: time for the measurement; if all samples would take longer, it uses minibatches.

    >>> import fedbilevel as fb
    >>> from fedbilevel.tasks.quadratic import Quadratic
    >>> steps = fb.suggest_steps(*Quadratic().build(), "fedbio")
    >>> {name: f"{step:.2g}" for name, step in steps.items()}
    {'lr_upper': '0.0049', 'lr_lower': '0.19', 'lr_system': '0.19'}
    """
    chosen = discovery.algorithm(algorithm)() if isinstance(algorithm, str) else algorithm
    options: dict[str, Any] = {"strategy": strategy, "device": device}
    size = _samples_within(seconds, problem, clients, options)
    found = measured_steps(problem, clients, batch_size=size, dtype=torch.float64, **options)
    if found.negative > 1e-3 * found.curvature:
        warnings.warn(
            f"the lower level is not convex near its start: its curvature is between {-found.negative:.3g} and "
            f"{found.curvature:.3g}. The steps follow the larger size; set radius to bound u",
            stacklevel=2,
        )
    return {name: step for name, step in chosen.auto_steps(found).items() if hasattr(chosen, name)}


def measured_steps(problem: Problem, clients: Sequence[Holdings], **options: Any) -> Found:
    """Measure a problem in a simulation with a server, for an algorithm of any kind."""
    fed: Any = simulate(Probe(), problem, clients, **options)
    fed.begin(0)
    with torch.no_grad():
        return measured(fed.algorithm, _Shown(fed) if sys.stderr.isatty() else fed, upper=True)


def _samples_within(
    seconds: float, problem: Problem, clients: Sequence[Holdings], options: dict[str, Any]
) -> int | None:
    """Return the number of samples per minibatch that keeps a measurement within its time.

    None stands for all samples.
    """
    population = Population(problem, clients, dtype=torch.float64, **options)
    everybody, sizes = torch.arange(len(population)), population.data.sizes
    most = max(int(sizes[role].max()) for role in ("train", "val"))
    num = min(most, _TRIAL)
    index = torch.zeros(len(population), num, dtype=torch.int64, device=population.device)
    train, val = (population.data.batch(everybody, role, index) for role in ("train", "val"))
    y = population.y0.expand(len(population), -1)

    def evaluate() -> None:
        population.oracle.directions(population.x0, y, y, gy=train, fx=val, fy=val, ju=train, hu=train)

    with torch.no_grad():
        evaluate()  # the first evaluation is slower
        each = _seconds(evaluate) / num
    fits = int(seconds / (_EVALUATIONS * each))
    return None if fits >= most else max(1, fits)


def _seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class _Shown:
    """A federation that shows every round of a measurement on a terminal."""

    def __init__(self, fed: Any) -> None:
        self._fed = fed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fed, name)

    def mean(self, phase: Callable[..., Any], /, **broadcast: Any) -> Any:
        found = self._fed.mean(phase, **broadcast)
        print(f"\rmeasuring step sizes: round {self._fed.ledger.rounds} \r", end="", file=sys.stderr, flush=True)
        return found
