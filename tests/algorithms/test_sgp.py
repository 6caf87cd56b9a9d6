"""Stochastic gradient push against numpy, FedAvg on a complete network, and its own limit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.sgp import SGP, gradient_push
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.errors import NonFiniteError, SettingError
from fedbilevel.federation.network import Network, given
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.by_hand import Samples, gy
from support.numeric.yardstick import drive, relative, start_at

DIRECTED = Network(kind="random_directed", seed=5)
LOPSIDED = given(
    4, lambda step: [[0, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]]
)  # one peer talks to all, the others to one


def engine(algorithm: Any, built: Any, network: Any = DIRECTED, **options: Any) -> PeerSimulation:
    return PeerSimulation(
        algorithm, built.problem, built.clients, network=network, **{"dtype": torch.float64, **options}
    )


def after(num: int, algorithm: Any, built: Any, *args: Any, **options: Any) -> Any:
    peers = engine(algorithm, built, *args, **options)
    state = algorithm.init(peers)
    for k in range(1, num + 1):
        peers.begin(k)
        state = algorithm.round(peers, state)
    return state


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("weights", ["equal", "by_samples"])
def test_steps_on_a_directed_network_are_those_written_by_hand(weights, batch_size):
    task = Quadratic(num_clients=4, client_weights=weights)
    algorithm, n = SGP(lr_lower=0.1, num_lower_steps=5), 4
    start = start_at(task, np.linspace(-1, 1, 4), np.linspace(1, 2, 6))
    peers = engine(algorithm, start, batch_size=batch_size)
    state, samples, links = algorithm.init(peers), Samples(task, batch_size=batch_size), DIRECTED.between(n)
    counts = np.array([4.0, 5.0, 6.0, 7.0])
    p = counts / counts.mean() if weights == "by_samples" else np.ones(n)
    w, z, time = p.copy(), np.outer(p, np.linspace(1, 2, 6)), 0
    for k in (1, 2):
        peers.begin(k)
        state = algorithm.round(peers, state)
        for s in range(5):
            stepped = [
                z[i] - 0.1 * p[i] * gy(samples.drawn(i, "train", "B", (k, 1, s)), np.linspace(-1, 1, 4), z[i] / w[i])
                for i in range(n)
            ]
            out, time = links.adjacency(time).numpy(), time + 1
            z, w = (
                np.array([sum(value[j] / out[j].sum() for j in range(n) if out[j, i]) for i in range(n)])
                for value in (stepped, w)
            )
        assert relative(state.z, z) < 1e-12
        assert relative(state.w[:, 0], w) < 1e-12
        assert relative(state.y, z / w[:, None]) < 1e-12
    assert np.ptp(w) > 0.1
    assert torch.equal(state.x, peers.host.x0.expand(n, -1))


@pytest.mark.parametrize("batch_size", [None, 2])
def test_on_the_complete_network_it_is_fedavg_with_one_local_step(batch_size):
    """With one step per outer iteration both draw the same minibatches."""
    built = start_at(Quadratic(num_clients=4), np.linspace(-1, 1, 4), np.zeros(6))
    state = after(5, SGP(lr_lower=0.1, num_lower_steps=1), built, Network(), batch_size=batch_size)
    _, server = drive(FedAvg(lr_lower=0.1, num_local_steps=1), built, 5, batch_size=batch_size)
    assert max(relative(row, server.y) for row in state.y) < 1e-12
    if batch_size is None:
        assert relative(after(1, SGP(lr_lower=0.1, num_lower_steps=5), built, Network()).y[2], server.y) < 1e-12


@pytest.mark.parametrize("weights", ["equal", "by_samples"])
def test_it_settles_at_a_distance_proportional_to_the_step(weights):
    task = Quadratic(num_clients=4, dim_lower=3, client_weights=weights)
    target = torch.tensor(task.closed_form().lower_solution(np.zeros(4)))
    distances = []
    for lr, steps in ((0.03, 160), (0.015, 320)):
        y = after(1, SGP(lr_lower=lr, num_lower_steps=steps), task.build(), LOPSIDED).y
        distances.append(torch.stack([(y - target).norm(), (y - y.mean(0)).norm()]))
    assert float(distances[0].min()) > 1e-3
    assert ((distances[0] / distances[1] - 2).abs() < 0.15).all(), distances


@pytest.mark.parametrize("weights", ["equal", "by_samples"])
def test_weights_are_conserved_by_every_push_and_start_at_the_clients_shares(weights):
    algorithm = SGP(num_lower_steps=1)
    peers = engine(algorithm, Quadratic(num_clients=4, client_weights=weights).build(), LOPSIDED)
    state = algorithm.init(peers)
    assert (
        relative(state.w[:, 0], [4 / 5.5, 5 / 5.5, 6 / 5.5, 7 / 5.5] if weights == "by_samples" else [1, 1, 1, 1])
        < 1e-15
    )
    for k in range(1, 8):
        peers.begin(k)
        state = algorithm.round(peers, state)
        assert float(state.w.sum()) == pytest.approx(4, rel=1e-14)
        assert float(state.w.min()) > 0
    assert float(state.w.max() / state.w.min()) > 2


@pytest.mark.parametrize(
    ("num", "marks"), [(600, (500, 550)), (60, (50, 55)), (12, (10, 11)), (6, (5, 6)), (7, (6, 7)), (1, (1, 1))]
)
def test_milestones_are_where_the_paper_has_them(num, marks):
    """Peers whose gradient is one: what z loses is the step that was taken."""
    z = torch.zeros(1, 1, dtype=torch.float64)
    path = [z]
    peers = SimpleNamespace(
        weights=torch.ones(1, 1, dtype=torch.float64),
        steps=lambda num: [SimpleNamespace(index=i, batch=lambda *_: None) for i in range(num)],
        clients=SimpleNamespace(lower_grad=lambda x, y, batch: torch.ones_like(y)),
        push=lambda w, y: (path.append(y), (w, y))[1],
    )
    gradient_push(peers, z, z, peers.weights, lr=2.0, num_steps=num, schedule="milestones")
    taken = -torch.cat(path).diff(dim=0)[:, 0]
    wanted = [2.0 if i < marks[0] else 0.2 if i < marks[1] else 0.02 for i in range(num)]
    assert torch.allclose(taken, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-12)


def test_with_a_local_lower_level_nothing_is_pushed_and_everybody_trains_alone():
    task = Quadratic(num_clients=3, lower="local")
    algorithm = SGP(lr_lower=0.2, num_lower_steps=100)
    peers = engine(algorithm, task.build())
    peers.begin(1)
    state = algorithm.round(peers, algorithm.init(peers))
    assert relative(state.y, task.closed_form().lower_solution(np.zeros(4))) < 1e-9
    assert peers.ledger.totals() | {"gy": 0, "samples": 0} == dict.fromkeys(peers.ledger.totals(), 0)
    assert peers.time == 0


def test_order_strategy_and_precision_change_nothing_that_matters():
    built, algorithm, ids = (
        Quadratic(num_clients=4, bend=0.5, client_weights="by_samples").build(),
        SGP(num_lower_steps=4),
        [3, 1, 0, 2],
    )
    y = after(2, algorithm, built, batch_size=2).y
    assert relative(after(2, algorithm, built, batch_size=2, strategy="loop").y, y) < 1e-12
    assert relative(after(2, algorithm, built, batch_size=2, dtype=torch.float32).y, y) < 1e-5
    moved = type(built)(built.problem, [built.clients[i] for i in ids])
    assert relative(after(2, algorithm, moved, batch_size=2, ids=ids).y, y[ids]) < 1e-12


def test_lost_messages_and_steps_that_explode_are_errors():
    built = Quadratic(num_clients=3).build()
    for network in (
        Network(kind="ring", loss=0.1),
        Network(kind="ring", max_delay=2),
        Network(kind="ring", activity=0.5),
    ):
        with pytest.raises(
            SettingError, match="sgp pushes without running sums, so a lost message would be lost for good"
        ):
            engine(SGP(), built, network)
    with pytest.raises(
        NonFiniteError,
        match=r"client \d has a value of 'y' that is not finite in outer iteration 1: the steps are too long",
    ):
        after(1, SGP(lr_lower=1e30, num_lower_steps=30), built)
