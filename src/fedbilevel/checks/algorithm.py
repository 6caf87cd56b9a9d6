"""`check_algorithm`: the contract of every algorithm, on small quadratics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedbilevel.aggregation.layer import Layer
from fedbilevel.aggregation.sealing import addressed, ring_of
from fedbilevel.aggregation.validity import TRIED, check_aggregation
from fedbilevel.engines import simulate
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import FedBilevelError, ScopeError, SettingError
from fedbilevel.federation.algorithm import Algorithm, Cohort, PeerAlgorithm
from fedbilevel.federation.network import Network
from fedbilevel.oracle.population import Population
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.verdict import Check, Report

Engine = Simulation | PeerSimulation


def check_algorithm(algorithm: Algorithm, *, show: bool = True) -> Report:
    """Check the contract of every algorithm, with minibatches and cohorts, on small quadratics.

    An algorithm that needs every client runs with all of them. It must refuse a cohort, and it must
    stop when a client drops.

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
            f"{algorithm.name()} refuses every combination of scopes, so there is no problem to check it on: "
            "fix its `refuses`."
        )
    built = Quadratic(num_clients=4, lower=scopes[0], upper=scopes[1]).build()  # type: ignore[arg-type]
    everywhere = [
        ("deterministic", _deterministic),
        ("input untouched", _untouched),
        ("order of clients", _order),
        ("checkpoint and resume", _resumed),
    ]
    with_a_server = [
        ("cohort of one", _cohort_of_one),
        ("a client that drops", _dropping),
        ("aggregation", _aggregated),
    ]
    for name, check in everywhere if isinstance(algorithm, PeerAlgorithm) else everywhere + with_a_server:
        try:
            ok, text = check(algorithm, built.problem, built.clients)
        except (FedBilevelError, ValueError, TypeError, RuntimeError, LookupError) as error:
            ok, text = False, f"raised {type(error).__name__}: {error}"
        checks.append(Check(name, ok, text))
    return Report(f"Algorithm {algorithm.name()!r}", checks).shown(show)


def _noisy(algorithm: Algorithm) -> dict[str, Any]:
    """Return options with minibatches, and with a random cohort or a random network."""
    if not isinstance(algorithm, PeerAlgorithm):
        return {"batch_size": 2, "cohort": Cohort() if algorithm.needs_everyone else Cohort(0.5)}
    undirected = "gossip" in algorithm.verbs()
    network = Network(kind="random_undirected") if undirected else Network(kind="random_directed")
    return {"batch_size": 2, "network": network}


def _go(
    algorithm: Algorithm, problem: Problem, clients: Sequence[Holdings], num: int = 3, **options: Any
) -> tuple[Engine, Any]:
    fed = simulate(algorithm, problem, clients, dtype=torch.float64, **options)
    fed.begin(0)
    return fed, _continue(algorithm, fed, algorithm.init(fed), 1, num)


def _continue(algorithm: Algorithm, fed: Engine, state: Any, first: int, last: int) -> Any:
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
    # peers always hold rows, so a variable that travels shows only in the bytes sent: they must not depend on its size
    wide: dict[str, Any] = {"dim_upper": 5 if upper == "private" else 4, "dim_lower": 7 if lower == "local" else 6}
    wider = Quadratic(num_clients=3, lower=lower, upper=upper, **wide).build()
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
    finite = bool(torch.isfinite(_end(fed, state)).all())
    return Check(name, finite, "runs" + "".join(f"; warns: {text}" for text in warned))


def _deterministic(algorithm: Algorithm, problem: Problem, clients: Sequence[Holdings]) -> tuple[bool, str]:
    first, second = (_end(*_go(algorithm, problem, clients, **_noisy(algorithm))) for _ in range(2))
    return torch.equal(first, second), "two runs agree bit for bit"


def _untouched(algorithm: Algorithm, problem: Problem, clients: Sequence[Holdings]) -> tuple[bool, str]:
    values = [torch.as_tensor(value) for client in clients for role in client.values() for value in role.values()]
    before = [value.clone() for value in values]
    fed, _ = _go(algorithm, problem, clients, **_noisy(algorithm))
    after = [torch.as_tensor(value) for client in clients for role in client.values() for value in role.values()]
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    start = Population(problem, clients, dtype=torch.float64)
    same = same and torch.equal(start.x0, fed.host.x0) and torch.equal(start.y0, fed.host.y0)
    return same, "data and initial point are unchanged"


def _order(algorithm: Algorithm, problem: Problem, clients: Sequence[Holdings]) -> tuple[bool, str]:
    forwards = _end(*_go(algorithm, problem, clients, **_noisy(algorithm)))
    ids = list(reversed(range(len(clients))))
    fed, state = _go(algorithm, problem, [clients[i] for i in ids], ids=ids, **_noisy(algorithm))
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
    end = _continue(algorithm, fresh, again, 3, 4)
    same = torch.equal(_end(whole, state), _end(fresh, end)) and whole.ledger.totals() == fresh.ledger.totals()
    return same, "a resumed run agrees bit for bit, and in cost"


def _cohort_of_one(algorithm: Algorithm, problem: Problem, clients: Sequence[Holdings]) -> tuple[bool, str]:
    try:
        end = _end(*_go(algorithm, problem, clients, cohort=Cohort(0.01), batch_size=2))
    except SettingError as error:
        return algorithm.needs_everyone, f"refuses: {error}"
    return bool(torch.isfinite(end).all()), "one client per round is enough to run"


def _dropping(algorithm: Algorithm, problem: Problem, clients: Sequence[Holdings]) -> tuple[bool, str]:
    refused = ""
    for call in range(1, 5):
        drops = lambda iteration, now, call=call: {1} if iteration == 2 and now == call else ()
        try:
            end = _end(*_go(algorithm, problem, clients, drops=drops))
        except FedBilevelError as error:
            if not algorithm.needs_everyone:
                raise
            refused = f"stops: {error}"
            continue
        if not bool(torch.isfinite(end).all()):
            return False, f"a client that misses call {call} leads to a value that is not finite"
    text = refused or "the run survives a client that misses any one call of an outer iteration"
    return bool(refused) == algorithm.needs_everyone, text


def _aggregated(algorithm: Algorithm, problem: Problem, clients: Sequence[Holdings]) -> tuple[bool, str]:
    """Run an outer iteration under every setting of the aggregation, or see it refused."""
    nine = [*clients, *clients, *clients][:9]  # three groups of three
    fed, refused = simulate(algorithm, problem, nine, dtype=torch.float64), 0
    assert isinstance(fed, Simulation)
    for one in TRIED:
        try:
            check_aggregation(one, algorithm, fed.cohort, fed.num_clients, fed.largest_weight)
        except SettingError as error:
            if not (algorithm.gathers and (one.robust or one.secure)):
                return False, f"refuses {one}: {error}"
            refused += 1
            continue
        fed.layer = Layer(one, algorithm, fed.stream, ring_of(one, addressed(fed.stream)))
        for store in (fed.host.memory, fed.host.kept, fed.host.feedback):
            store.clear()
        fed.begin(0)
        end = _end(fed, _continue(algorithm, fed, algorithm.init(fed), 1, 1))
        if not bool(torch.isfinite(end).all()):
            return False, f"{one} leads to a value that is not finite"
    return True, f"runs under {len(TRIED) - refused} of {len(TRIED)} settings" + (
        "; refuses robust means and secure sums, because it reads single rows" if refused else ""
    )
