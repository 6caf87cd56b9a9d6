"""Contracts that anybody can run: on their own problem, their own estimator, their own algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedbilevel import discovery
from fedbilevel.engines import simulate
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import FedBilevelError, ScopeError, SettingError
from fedbilevel.federation.algorithm import Algorithm, Cohort, PeerAlgorithm
from fedbilevel.federation.network import Network
from fedbilevel.oracle.hypergradient import SOLVERS, hypergradient, lower_solution
from fedbilevel.oracle.population import Population
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.verdict import Check, Report

Estimator = str | Algorithm | Callable[[Population, Tensor, Tensor], Tensor]


# ---- the user's problem ---------------------------------------------------------------------------------------------


def check_problem(
    problem: Problem, clients: Sequence[Holdings], *, tolerance: float = 1e-5, seed: int = 0, show: bool = True
) -> Report:
    """The losses are what the library takes them for: derivatives against finite differences in float64, at a random point near the initial one.

    >>> import fedbilevel as fb
    >>> from fedbilevel.tasks.quadratic import Quadratic
    >>> fb.check_problem(*Quadratic().build(), show=False)
    <Problem 'quadratic', 5 clients: all 6 checks passed>
    """
    population = Population(problem, clients, dtype=torch.float64)
    oracle, everyone = population.oracle, torch.arange(len(population))
    train, val = population.data.batch(everyone, "train"), population.data.batch(everyone, "val")
    draw = torch.Generator().manual_seed(seed)
    inside = _inside(population)
    x = population.x0 + 0.1 * torch.randn(population.x0.shape, generator=draw, dtype=torch.float64) * inside
    y = population.y0 + 0.1 * torch.randn(population.y0.shape, generator=draw, dtype=torch.float64)
    dx = torch.randn(x.shape, generator=draw, dtype=torch.float64) * inside
    dy, v = (torch.randn(y.shape, generator=draw, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        jv, hv = oracle.second_order(x, y, v, train)
        pairs = {
            "grad_x upper": (
                oracle.upper_grad_x(x, y, val),
                dx,
                lambda t: oracle.evaluate(problem.upper, x + t * dx, y, val),
            ),
            "grad_y upper": (
                oracle.upper_grad_y(x, y, val),
                dy,
                lambda t: oracle.evaluate(problem.upper, x, y + t * dy, val),
            ),
            "grad_y lower": (
                oracle.lower_grad(x, y, train),
                dy,
                lambda t: oracle.evaluate(problem.lower, x, y + t * dy, train),
            ),
            "H v": (hv, dy, lambda t: (oracle.lower_grad(x, y + t * dy, train) * v).sum(1)),
            "J v": (jv, dx, lambda t: (oracle.lower_grad(x + t * dx, y, train) * v).sum(1)),
        }
        checks = []
        for name, (gradient, direction, along) in pairs.items():
            slope = (gradient * direction).sum(1)
            difference, trust = _difference(along, slope, 1e-5, tolerance)
            checks.append(_compare(name, slope, difference, tolerance, "finite differences", trust))
        if population.x_sizes is not None:
            wider = torch.cat([x, x.new_ones(len(x), 3)], dim=1)  # values that no sample points to
            changed = (
                max(
                    float((oracle.evaluate(loss, wider, y, batch) - oracle.evaluate(loss, x, y, batch)).abs().max())
                    for loss, batch in ((problem.lower, train), (problem.upper, val))
                )
                if population.layout_x.ragged
                else 0.0
            )
            checks.append(
                Check(
                    "padding of x",
                    changed < 1e-12,
                    f"three more padded entries of a private x change a loss by {changed:.1e} (use sums over batch['index'])",
                )
            )
        symmetric = oracle.hessian_product(x, y, dy, train)
        checks.append(_compare("H symmetric", (hv * dy).sum(1), (symmetric * v).sum(1), 1e-8, "the transposed product"))
    return _shown(Report(f"Problem {problem.name!r}, {len(population)} clients", checks), show)


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
    """Estimators against the exact hypergradient, and that against finite differences of Phi(x) = mean f_i(x, y*(x)), in float64.

    An estimator is the name of a solver (exact, cg, neumann, fixed_point), an algorithm that has `estimate` (or its name), or a function
    (population, x, y*) -> value: a vector for a shared x, one row f_x,i - J_i u per client for a private one. step: the longest of finite differences.

    >>> import fedbilevel as fb
    >>> from fedbilevel.tasks.quadratic import Quadratic
    >>> problem, clients = Quadratic(num_clients=3, dim_upper=2, dim_lower=2).build()
    >>> fb.check_hypergradient(problem, clients, estimators=["cg"], show=False).ok
    True
    >>> local = lambda population, x, y: 0 * x  # an estimator that is wrong
    >>> fb.check_hypergradient(problem, clients, estimators=[local], show=False).ok
    False
    """
    population = Population(problem, clients, dtype=torch.float64)
    point = population.x0 if x is None else x.to(torch.float64)
    y = lower_solution(population, point)
    exact = hypergradient(population, point, y, method="exact")
    everyone = torch.arange(len(population))
    share = population.weights(everyone).double()
    share = share / share.sum()
    val = population.data.batch(everyone, "val")

    def phi(at: Tensor) -> Tensor:
        return (share * population.oracle.evaluate(problem.upper, at, lower_solution(population, at, y), val)).sum()

    draw = torch.Generator().manual_seed(seed)
    directions = [
        torch.randn(point.shape, generator=draw, dtype=torch.float64) * _inside(population)
        for _ in range(num_directions)
    ]
    slopes = torch.stack([(exact.value * d * (share[:, None] if d.ndim == 2 else 1)).sum() for d in directions])
    difference, trust = _difference(
        lambda t: torch.stack([phi(point + t * d) for d in directions]), slopes, step, tolerance
    )
    checks = [
        _compare(
            "finite differences",
            difference,
            slopes,
            tolerance,
            f"the exact hypergradient along {num_directions} directions",
            trust,
        )
    ]
    for estimator in estimators:
        name, value, note = _estimate(estimator, population, clients, point, y)
        checks.append(_compare(name, value, exact.value, tolerance, "the exact hypergradient", note))
    return _shown(
        Report(
            f"Hypergradient of {problem.name!r}, |value| = {float(torch.linalg.vector_norm(exact.value)):.6g}", checks
        ),
        show,
    )


def _estimate(
    estimator: Estimator, population: Population, clients: Sequence[Holdings], x: Tensor, y: Tensor
) -> tuple[str, Tensor, str]:
    if isinstance(estimator, str) and estimator in SOLVERS:
        found = hypergradient(population, x, y, method=estimator)  # type: ignore[arg-type]
        return estimator, found.value, f"; residual {found.residual:.1e}, {found.num_products} products"
    if isinstance(estimator, str):
        estimator = discovery.algorithm(estimator)()
    if isinstance(estimator, Algorithm):
        if not hasattr(estimator, "estimate"):
            raise SettingError(
                f"{estimator.name()} has no estimate of its own (it tracks the hypergradient along the run): check it by running it."
            )
        fed = simulate(estimator, population.problem, clients, dtype=torch.float64)
        h, _ = estimator.estimate(fed, fed.place("x", x), fed.place("y", y))
        value = fed.collect(h)
        if (
            value.ndim > x.ndim
        ):  # a shared x, and every peer has its own estimate: the one that is farthest from the others
            value = value[torch.linalg.vector_norm(value - value.mean(0), dim=1).argmax()]
        return estimator.name(), value, ""
    assert callable(estimator)
    return getattr(estimator, "__name__", "estimator"), estimator(population, x, y), ""


def _compare(name: str, value: Tensor, target: Tensor, tolerance: float, against: str, note: str = "") -> Check:
    if value.shape != target.shape:
        return Check(name, False, f"has shape {tuple(value.shape)}, expected {tuple(target.shape)}")
    relative = _relative(value, target)
    return Check(name, relative <= tolerance, f"relative error {relative:.1e} against {against}{note}")


def _relative(value: Tensor, target: Tensor) -> float:
    """|value - target| / |target|, or without the division where the target is zero."""
    size, error = float(torch.linalg.vector_norm(target)), float(torch.linalg.vector_norm(value - target))
    return error / size if size > 0 else error


def _difference(
    along: Callable[[float], Tensor], expected: Tensor, step: float, tolerance: float
) -> tuple[Tensor, str]:
    """The derivative at 0 by central differences, and a word on how far it can be trusted.

    Long steps cross kinks (ReLU, the largest of several), short ones leave few digits. Where the first step does not give what is expected, steps shrink until
    two in a row agree with each other, or else the two that are nearest count. What is expected has no say in that, so a wrong value gains nothing by it.
    """
    before = best = (along(step) - along(-step)) / (2 * step)
    if _relative(before, expected) <= tolerance:
        return best, ""
    least, chosen = float("inf"), step
    for k in range(1, 5):
        t = step / 10**k
        now = (along(t) - along(-t)) / (2 * t)
        apart = _relative(before, now)
        if apart < least:
            best, least, chosen = now, apart, t
        if apart <= tolerance / 10:
            break
        before = now
    trust = f"; differences of steps {10 * chosen:.0e} and {chosen:.0e} agree up to {least:.1e}"
    return best, trust if least <= tolerance else f"{trust} only, too little to tell right from wrong"


def _inside(population: Population) -> Tensor:
    """1 on entries of x that exist, 0 on padding."""
    if population.x_sizes is None:
        return torch.ones_like(population.x0)
    return (torch.arange(population.x0.shape[1]) < population.x_sizes[:, None]).double()


# ---- anybody's algorithm ---------------------------------------------------------------------------------------------


def check_algorithm(algorithm: Algorithm, *, show: bool = True) -> Report:
    """The contract of every algorithm, on small heterogeneous quadratics with minibatches and cohorts.

    One that needs every client is run with all of them, and must refuse a cohort and a client that drops instead of going on without them.

    >>> import fedbilevel as fb
    >>> from fedbilevel.algorithms.fedavg import FedAvg
    >>> fb.check_algorithm(FedAvg(num_local_steps=1), show=False).ok
    True
    """
    checks = [_in_scope(algorithm, lower, upper) for lower in ("global", "local") for upper in ("shared", "private")]
    pairs = [(lower, upper) for upper in ("shared", "private") for lower in ("global", "local")]
    scopes = next((pair for pair in pairs if not {*pair} & {*algorithm.refuses}), None)
    if scopes is None:
        raise SettingError(
            f"{algorithm.name()} refuses every combination of scopes, so there is nothing to check it on: mend its `refuses`."
        )
    built = Quadratic(num_clients=4, lower=scopes[0], upper=scopes[1]).build()  # type: ignore[arg-type]
    everywhere = [
        ("deterministic", _deterministic),
        ("input untouched", _untouched),
        ("order of clients", _order),
        ("checkpoint and resume", _resumed),
    ]
    with_a_server = [("cohort of one", _cohort_of_one), ("a client that drops", _dropping)]
    for name, check in everywhere if isinstance(algorithm, PeerAlgorithm) else everywhere + with_a_server:
        try:
            ok, text = check(algorithm, built.problem, built.clients)
        except (FedBilevelError, ValueError, TypeError, RuntimeError, LookupError) as error:
            ok, text = False, f"raised {type(error).__name__}: {error}"
        checks.append(Check(name, ok, text))
    return _shown(Report(f"Algorithm {algorithm.name()!r}", checks), show)


Engine = Simulation | PeerSimulation


def _noisy(algorithm: Algorithm) -> dict[str, Any]:
    """Minibatches, and a cohort or a network that changes from step to step."""
    if not isinstance(algorithm, PeerAlgorithm):
        return {"batch_size": 2, "cohort": Cohort() if algorithm.needs_everyone else Cohort(0.5)}
    return {
        "batch_size": 2,
        "network": Network(kind="random_undirected" if "gossip" in algorithm.verbs() else "random_directed"),
    }


def _go(
    algorithm: Algorithm, problem: Problem, clients: Sequence[Holdings], num: int = 3, **options: Any
) -> tuple[Engine, Any]:
    fed = simulate(algorithm, problem, clients, dtype=torch.float64, **options)
    fed.begin(0)
    return fed, _go_on(algorithm, fed, algorithm.init(fed), 1, num)


def _go_on(algorithm: Algorithm, fed: Engine, state: Any, first: int, last: int) -> Any:
    for iteration in range(first, last + 1):
        fed.begin(iteration)
        state = algorithm.round(fed, state)
    return state


def _end(fed: Engine, state: Any) -> Tensor:
    return torch.cat([fed.collect(value).reshape(-1) for value in (state.x, state.y)])


def _in_scope(algorithm: Algorithm, lower: Any, upper: Any) -> Check:
    name = f"{lower} lower, {upper} upper"
    built = Quadratic(num_clients=3, lower=lower, upper=upper).build()
    try:
        warned = algorithm.check_scopes(built.problem.scopes)
    except ScopeError as error:
        return Check(name, True, f"refuses: {error}")
    # between peers rows are always at hand: what travels shows in the bill, which must not depend on the size of what stays
    wider = Quadratic(
        num_clients=3,
        lower=lower,
        upper=upper,
        dim_upper=5 if upper == "private" else 4,
        dim_lower=7 if lower == "local" else 6,
    ).build()
    try:
        fed, state = _go(algorithm, built.problem, built.clients)
        other = _go(algorithm, *wider)[0] if isinstance(algorithm, PeerAlgorithm) else fed
    except (FedBilevelError, ValueError, TypeError, RuntimeError, LookupError) as error:
        return Check(name, False, f"raised {type(error).__name__}: {error}")
    must_stay = [label for label, stays in (("x", upper == "private"), ("y", lower == "local")) if stays]
    if isinstance(algorithm, PeerAlgorithm):
        bills = [engine.ledger.totals()["floats_up"] for engine in (fed, other)]
        travelled = must_stay if bills[0] != bills[1] else []
    else:
        travelled = [label for label in must_stay if isinstance(getattr(state, label), Tensor)]
    if travelled:
        return Check(name, False, f"{travelled[0]} left its client although its scope says it must not")
    return Check(
        name, bool(torch.isfinite(_end(fed, state)).all()), "runs" + "".join(f"; warns: {text}" for text in warned)
    )


def _deterministic(algorithm: Algorithm, problem: Problem, clients: Sequence[Holdings]) -> tuple[bool, str]:
    first, second = (_end(*_go(algorithm, problem, clients, **_noisy(algorithm))) for _ in range(2))
    return torch.equal(first, second), "two runs agree bit for bit"


def _untouched(algorithm: Algorithm, problem: Problem, clients: Sequence[Holdings]) -> tuple[bool, str]:
    before = [
        torch.as_tensor(value).clone() for client in clients for role in client.values() for value in role.values()
    ]
    fed, _ = _go(algorithm, problem, clients, **_noisy(algorithm))
    after = [torch.as_tensor(value) for client in clients for role in client.values() for value in role.values()]
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    start = Population(problem, clients, dtype=torch.float64)
    return same and torch.equal(start.x0, fed.host.x0) and torch.equal(
        start.y0, fed.host.y0
    ), "data and initial point are as they were"


def _order(algorithm: Algorithm, problem: Problem, clients: Sequence[Holdings]) -> tuple[bool, str]:
    forwards = _end(*_go(algorithm, problem, clients, **_noisy(algorithm)))
    ids = list(reversed(range(len(clients))))
    backwards = _go(algorithm, problem, [clients[i] for i in ids], ids=ids, **_noisy(algorithm))
    fed, state = backwards
    rows = [fed.collect(value) for value in (state.x, state.y)]
    end = torch.cat([(row.flip(0) if row.ndim == 2 else row).reshape(-1) for row in rows])
    error = float((forwards - end).abs().max() / forwards.abs().max())
    return error < 1e-10, f"clients in reverse order change the result by {error:.1e}"


def _resumed(algorithm: Algorithm, problem: Problem, clients: Sequence[Holdings]) -> tuple[bool, str]:
    whole, state = _go(algorithm, problem, clients, 4, **_noisy(algorithm))
    half, middle = _go(algorithm, problem, clients, 2, **_noisy(algorithm))
    tensors, plain = half.state_dict(middle)
    fresh = simulate(algorithm, problem, clients, dtype=torch.float64, **_noisy(algorithm))
    again = fresh.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, plain, algorithm.State)
    end = _go_on(algorithm, fresh, again, 3, 4)
    same_bill = whole.ledger.totals() == fresh.ledger.totals()
    return torch.equal(
        _end(whole, state), _end(fresh, end)
    ) and same_bill, "a resumed run agrees bit for bit, and in cost"


def _cohort_of_one(algorithm: Algorithm, problem: Problem, clients: Sequence[Holdings]) -> tuple[bool, str]:
    try:
        end = _end(*_go(algorithm, problem, clients, cohort=Cohort(0.01), batch_size=2))
    except SettingError as error:
        return algorithm.needs_everyone, f"refuses: {error}"
    return bool(torch.isfinite(end).all()), "one client per round is enough to run"


def _dropping(algorithm: Algorithm, problem: Problem, clients: Sequence[Holdings]) -> tuple[bool, str]:
    refused = ""
    for call in range(1, 5):
        try:
            end = _end(
                *_go(
                    algorithm,
                    problem,
                    clients,
                    drops=lambda iteration, now, call=call: {1} if iteration == 2 and now == call else (),
                )
            )
        except FedBilevelError as error:
            if not algorithm.needs_everyone:
                raise
            refused = f"stops: {error}"
            continue
        if not bool(torch.isfinite(end).all()):
            return False, f"a client that misses call {call} leaves a value that is not finite"
    return bool(
        refused
    ) == algorithm.needs_everyone, refused or "a client that misses any one call of an outer iteration does no harm"


def _shown(report: Report, show: bool) -> Report:
    if show:
        print(report)
    return report
