"""RASGP: the mass that faults leave on edges, the limit, and SGP where there are no faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel.algorithms.rasgp import RASGP
from fedbilevel.algorithms.sgp import SGP
from fedbilevel.checks import check_algorithm
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.engines.ranks import Group
from fedbilevel.errors import SettingError
from fedbilevel.federation.network import Network
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.yardstick import check_continues, drive

FOUR = {"num_clients": 4, "dim_upper": 2, "dim_lower": 3, "client_weights": "by_samples"}
LOSSY = Network(kind="ring", shares="out_degree", loss=0.3, max_delay=3, activity=0.8, seed=2)


@pytest.mark.parametrize("network", [Network(kind="random_directed", seed=3), Network(kind="exponential")], ids=str)
def test_without_faults_it_is_sgp(network: Network) -> None:
    task = Quadratic(**FOUR)
    options = {"network": network, "seed": 5, "batch_size": 2}
    peers, expected = drive(SGP(num_lower_steps=4), task.build(), 3, **options)
    robust, state = drive(RASGP(num_lower_steps=4), task.build(), 3, **options)
    for name in ("z", "w", "y"):
        torch.testing.assert_close(getattr(state, name), getattr(expected, name), rtol=0, atol=1e-13)
    for column in ("floats_up", "gy"):
        assert torch.equal(robust.ledger.columns[column], peers.ledger.columns[column])
    assert robust.ledger.rounds == peers.ledger.rounds == 12


def test_pushes_reach_the_average_although_messages_are_lost_late_and_reordered() -> None:
    peers = PeerSimulation(RASGP(), *Quadratic(**FOUR).build(), network=LOSSY, dtype=torch.float64)
    rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    w, z = peers.weights, rows * peers.weights
    total = torch.cat([z, w], dim=1).sum(0)
    waiting = []
    for _ in range(400):
        w, z = peers.running_push(w, y=z)
        assert peers._pushes is not None
        waiting.append(float(peers._pushes.on_edges()[-1]))
        now = torch.cat([z, w], dim=1).sum(0) + peers._pushes.on_edges()
        torch.testing.assert_close(now, total, rtol=0, atol=1e-12)  # nothing is ever lost
    assert max(waiting) > 0.3
    torch.testing.assert_close(z / w, (total[:-1] / total[-1]).expand(4, -1), rtol=0, atol=1e-9)
    assert peers.time == peers.ledger.rounds == 400


def test_the_distance_to_the_solution_falls_with_the_step_under_faults() -> None:
    """The distance is a mean over forty outer iterations, because faults go on at the limit."""
    task, far = Quadratic(**FOUR), []
    target = torch.from_numpy(task.closed_form().lower_solution(np.zeros(2)))
    network = Network(kind="ring", shares="out_degree", loss=0.3, seed=2)
    for lr in (0.08, 0.01):
        settings = RASGP(lr_lower=lr, num_lower_steps=5)
        peers, state = drive(settings, task.build(), int(2.5 / lr), network=network)
        ends = []
        for iteration in range(40):
            peers.begin(1000 + iteration)
            state = settings.round(peers, state)
            ends.append(float((state.y - target).norm(dim=1).mean()))
        far.append(np.mean(ends))
    assert far[1] < 0.02
    assert far[0] > 3 * far[1]


def test_a_resumed_run_continues_with_the_sums_and_the_messages_under_way() -> None:
    check_continues(RASGP(num_lower_steps=3), Quadratic(**FOUR).build(), network=LOSSY)


def test_with_a_local_lower_level_nothing_is_pushed() -> None:
    peers, state = drive(RASGP(num_lower_steps=3), Quadratic(**FOUR, lower="local").build(), 2, network=LOSSY)
    assert (peers.time, peers.ledger.rounds) == (0, 0)
    assert float(state.y.abs().max()) > 0.1


def test_it_keeps_the_contract_of_algorithms() -> None:
    report = check_algorithm(RASGP(), show=False)
    assert report.ok, str(report)


def test_a_run_with_faults_needs_it_and_several_processes_are_refused() -> None:
    built = Quadratic(**FOUR).build()
    options: dict[str, Any] = {"network": LOSSY, "num_iterations": 3, "lr_lower": "auto"}
    result = fb.solve(*built, "rasgp", **options)
    assert result.rows[-1]["lower_loss"] < result.rows[0]["lower_loss"]
    with pytest.raises(SettingError, match="sgp pushes without running sums"):
        fb.solve(*built, "sgp", **options)

    class Two(Group):
        size = 2

    with pytest.raises(SettingError, match="rasgp follows single messages"):
        PeerSimulation(RASGP(), *built, network=LOSSY, group=Two())
