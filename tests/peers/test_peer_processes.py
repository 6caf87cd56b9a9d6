"""Peers as processes over encrypted loopback: equality with the simulator, loss, stops and kills."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import torch

pytest.importorskip("zmq")

from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.network import Network
from fedbilevel.oracle.hypergradient import hypergradient, lower_solution
from fedbilevel.oracle.population import Population
from fedbilevel.runs.solve import solve
from support.numeric.yardstick import relative
from support.peers.processes import Processes, own_rows, wide_clients, wide_plan, wide_problem

pytestmark = [pytest.mark.wait, pytest.mark.slow]

WIDTH = 20_000
DIRECTED = {"kind": "random_directed", "seed": 1}


_MIX = {"lower_solver": "mix"}
_GOSSIP = {"network": {"kind": "ring"}, "averaging": {"kind": "gossip", "num_steps": 3}}


def settings(**more: Any) -> dict[str, Any]:
    return {"num_iterations": 2, "suspect": 5.0, "join_deadline": 60.0, **more}


@pytest.mark.parametrize(
    ("num", "algorithm", "options"),
    [
        (
            4,
            {"name": "hgp", "lr_lower": 0.02, "lr_system": 0.02, "num_terms": 2, "num_lower_steps": 3},
            {"network": DIRECTED, "averaging": {"num_steps": 3}},
        ),
        (8, {"name": "sgp", "lr_lower": 0.02, "num_lower_steps": 4}, {"network": DIRECTED}),
        (4, {"name": "sparkle", "lr_lower": 0.02, "lr_system": 0.02}, {"network": {"kind": "ring"}}),
        (
            4,
            {"name": "hgp", "lr_lower": 0.02, "lr_system": 0.02, "num_terms": 2, "num_lower_steps": 2, **_MIX},
            {**_GOSSIP, "aggregation": {"compress": "int8", "robust": "centred:1.0"}},
        ),
    ],
    ids=["hgp", "sgp-8", "sparkle", "int8"],
)
def test_synchronous_processes_equal_the_simulator_in_values_and_bytes(tmp_path, num, algorithm, options):
    content = settings(algorithm=algorithm, options={"strategy": "loop", **options})
    plan = wide_plan(content, num, WIDTH)
    with Processes(tmp_path, plan, num) as peers:
        peers.start(*range(num))
        states = peers.join()
        sent = sum(peers.sent(number) for number in range(num))
    own = {name: value for name, value in plan.keywords().items() if value is not None}
    simulated = solve(
        wide_problem(WIDTH), wide_clients(num, WIDTH), plan.built_algorithm(), residuals=False, num_iterations=2, **own
    )
    for number, state in enumerate(states):
        for name, rows in simulated.state._asdict().items():
            assert torch.equal(state[name][0], rows[number]), name
    for name, total in simulated.ledger.items():
        paid = [int(state[f"ledger {name}"]) for state in states]
        assert (max(paid) if name == "rounds" else sum(paid)) == total, name
    assert 1.0 <= sent / simulated.ledger["bytes_up"] < 1.05


def averages(num: int, members: list[int] | None = None) -> torch.Tensor:
    rows = own_rows(torch.tensor(members or list(range(num))), torch.zeros(1, 5000))
    return rows.double().mean(0)


def test_robust_average_is_exact_with_lost_messages_and_a_stopped_peer(tmp_path):
    content = settings(algorithm={"name": "hgp", "lower_solver": "mix"}, options={"network": {**DIRECTED, "loss": 0.3}})
    with Processes(tmp_path, wide_plan(content, 8, 5000, averages=True), 8) as peers:
        peers.start(*range(8))
        peers.wait_for("begin", 3)
        peers.signal(3, signal.SIGSTOP)
        time.sleep(3)
        assert not any("done 2" in peers.log(number) for number in range(8))  # they wait for the stopped peer
        peers.signal(3, signal.SIGCONT)
        states = peers.join()
        assert not any("gone" in peers.log(number) for number in range(8))
    for state in states:
        assert relative(state["y"][0].double(), averages(8)) < 1e-6


def killed_in_the_middle(peers: Processes, victim: int) -> list[int]:
    """Kill the victim in the middle of the first average, after some of its messages."""
    peers.start(*range(peers.num), stops={victim: 20})
    peers.wait_for_stop(victim)
    survivors = [number for number in range(peers.num) if number != victim]
    for number in survivors:
        peers.wait_for("begin", number)
    peers.signal(victim, signal.SIGKILL)
    return survivors


@pytest.mark.parametrize("policy", ["reclaim", "absorb", "restart"])
def test_survivors_of_a_kill_average_by_the_on_crash_policy(tmp_path, policy):
    content = settings(
        algorithm={"name": "hgp", "lower_solver": "mix"},
        num_iterations=1,
        suspect=2.0,
        on_change="continue",
        on_crash=policy,
        options={"network": {**DIRECTED, "loss": 0.3}},
    )
    with Processes(tmp_path, wide_plan(content, 5, 5000, averages=True), 5) as peers:
        survivors = killed_in_the_middle(peers, 2)
        states = peers.join(survivors)
        for number in survivors:  # only the killed peer is declared gone, although all wait for each other
            assert "p2 is gone" in peers.log(number)
            assert not any(f"p{other} is gone" in peers.log(number) for other in survivors)
    exact = averages(5, survivors)
    errors = [relative(state["y"][0].double(), exact) for state in states]
    if policy == "absorb":  # they agree on a value between both averages
        assert max(relative(state["y"][0], states[0]["y"][0]) for state in states) < 1e-6
        assert min(errors) > 1e-5
        assert max(errors) < relative(own_rows(torch.tensor([2]), torch.zeros(1, 5000))[0].double(), exact)
    else:
        assert max(errors) < 1e-6


@pytest.mark.parametrize("averaging", ["robust", "exact"])
def test_hypergradient_after_a_kill_is_that_of_the_survivors(tmp_path, averaging):
    steps = (
        {"num_lower_steps": 3, "num_terms": 3} if averaging == "robust" else {"num_lower_steps": 100, "num_terms": 100}
    )
    limit = {"tolerance": 1e-9} if averaging == "robust" else {}
    content = settings(
        algorithm={"name": "hgp", "optimiser": "none", "lower_solver": "mix", **steps},
        num_iterations=1,
        suspect=2.0,
        options={
            "dtype": "float64",
            "network": {**DIRECTED, "loss": 0.3 if averaging == "robust" else 0.0},
            "averaging": {"kind": averaging, **limit},
        },
    )
    plan = wide_plan(content, 4)
    with Processes(tmp_path, plan, 4) as peers:
        survivors = killed_in_the_middle(peers, 1)
        states = peers.join(survivors)
    built = plan.built_task().build()
    left = [built.clients[number] for number in survivors]
    simulated = solve(
        built.problem,
        left,
        plan.built_algorithm(),
        residuals=False,
        num_iterations=1,
        averaging=Averaging(kind="exact"),
        network=Network(),
        dtype=torch.float64,
    )
    for number, state in enumerate(states):
        assert relative(state["h"][0], simulated.state.h[number]) < (1e-7 if limit else 1e-12)
    if averaging == "exact":  # equal to the exact hypergradient, not only to the simulator's
        population = Population(built.problem, left, dtype=torch.float64)
        exact = hypergradient(
            population, population.x0, lower_solution(population, population.x0), method="exact"
        ).value
        everybody = Population(built.problem, built.clients, dtype=torch.float64)
        other = hypergradient(everybody, everybody.x0, lower_solution(everybody, everybody.x0), method="exact").value
        assert relative(states[0]["h"][0], exact) < 1e-4 < 1e-2 < relative(other, exact)


def test_killed_and_restarted_peer_resumes_from_its_own_record(tmp_path):
    content = settings(
        algorithm={"name": "sgp", "num_lower_steps": 3},
        num_iterations=40,
        options={"strategy": "loop", "network": DIRECTED},
    )
    plan = wide_plan(content, 4)
    with Processes(tmp_path, plan, 4) as peers:
        peers.start(*range(4))
        peers.wait_for("done 5", 2)
        peers.signal(2, signal.SIGKILL)
        peers.start(2)
        states = peers.join()
        assert "begin after outer iteration" in peers.log(0)
        assert not any("of 4 peers begin" in line and "4 of 4" not in line for line in peers.log(0).splitlines())
    own = {name: value for name, value in plan.keywords().items() if value is not None}
    built = plan.built_task().build()
    simulated = solve(built.problem, built.clients, plan.built_algorithm(), residuals=False, num_iterations=40, **own)
    for number, state in enumerate(states):
        assert torch.equal(state["z"][0], simulated.state.z[number])
