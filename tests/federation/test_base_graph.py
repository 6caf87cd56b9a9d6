"""Base-(k+1) graphs: exact averages after one cycle, and the algorithms that run on them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from fedbilevel.algorithms.hgp import HGP
from fedbilevel.algorithms.sparkle import Sparkle
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.errors import NetworkError
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.base_graph import base_graph
from fedbilevel.federation.network import Network
from fedbilevel.oracle.hypergradient import hypergradient, lower_solution
from fedbilevel.runs.solve import solve
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.yardstick import drive


@pytest.mark.parametrize("degree", range(1, 6))
def test_one_cycle_averages_exactly_with_few_receivers_for_any_number_of_peers(degree: int) -> None:
    for n in range(1, 61):
        links = Network(kind="base", degree=degree).between(n)
        product = np.eye(n)
        for step in range(links.cycle):
            mixing = links.mixing(step)
            W = mixing.matrix.numpy()
            np.testing.assert_array_equal(W, W.T)
            np.testing.assert_allclose(W.sum(0), 1, rtol=0, atol=1e-15)
            assert W.min() >= 0
            np.testing.assert_array_equal(mixing.adjacency.numpy(), (W > 0) | np.eye(n, dtype=bool))
            assert mixing.sent.sum(1).max() <= degree
            before, product = product, W @ product
            np.testing.assert_array_equal(links.mixing(step + links.cycle).matrix, W)
        np.testing.assert_allclose(product, 1 / n, rtol=0, atol=1e-15, err_msg=f"{n} peers, degree {degree}")
        if n > 1:  # no step too many
            assert np.abs(before - 1 / n).max() > 1e-3
        assert links.connected_within <= links.cycle


@pytest.mark.parametrize(
    ("num_peers", "degree", "num_steps"),
    [(10, 1, 6), (10, 4, 2), (25, 1, 9), (25, 4, 2), (100, 1, 11), (100, 4, 3)],
)
def test_the_cycles_are_as_long_as_in_the_paper(num_peers: int, degree: int, num_steps: int) -> None:
    assert len(base_graph(num_peers, degree)) == num_steps


@pytest.mark.parametrize("degree", range(1, 6))
def test_the_cycle_is_at_most_twice_the_logarithm_and_two_steps_long(degree: int) -> None:
    """Theorem 1 of the paper: 2 log_{k+1}(n) + 2; no cycle is below log_{k+1}(n)."""
    for n in range(2, 61):
        shortest = np.log(n) / np.log(degree + 1)
        assert shortest - 1e-9 <= len(base_graph(n, degree)) <= 2 * shortest + 2


def test_six_peers_by_hand() -> None:
    """Six at degree 1: three peers of each half run 2 + 1, then the halves exchange."""
    third = [np.eye(3) for _ in range(3)]
    third[0][:2, :2] = third[2][:2, :2] = 0.5
    third[1][np.ix_([0, 2], [0, 2])] = [[1 / 3, 2 / 3], [2 / 3, 1 / 3]]
    expected = [np.kron(np.eye(2), step) for step in third] + [np.kron(np.full((2, 2), 0.5), np.eye(3))]
    for found, matrix in zip(base_graph(6, 1), expected, strict=True):
        np.testing.assert_allclose(found, matrix, rtol=0, atol=1e-15)


def test_an_average_begins_with_a_cycle_whatever_was_sent_before() -> None:
    task = Quadratic(num_clients=7, client_weights="by_samples")
    network = Network(kind="base")
    rows = torch.randn(7, task.dim_lower, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    share = torch.from_numpy(task.closed_form().share)[:, None]
    exact = (share * rows).sum(0).expand_as(rows)
    cycle = network.between(7).cycle
    for averaging in (Averaging(), Averaging(kind="gossip"), Averaging(num_steps=2 * cycle)):
        for before in range(cycle):
            algorithm = HGP(lower_solver="mix")
            peers = PeerSimulation(algorithm, *task.build(), network=network, averaging=averaging, dtype=torch.float64)
            for _ in range(before):
                peers.gossip(y=rows)
            torch.testing.assert_close(peers.mix(y=rows), exact, rtol=0, atol=1e-14)
            assert peers.ledger.rounds == before + averaging.steps(peers.links)
            assert averaging.steps(peers.links) == (averaging.num_steps or cycle)
    short = PeerSimulation(
        HGP(), *task.build(), network=network, averaging=Averaging(num_steps=cycle - 1), dtype=torch.float64
    )
    assert float((short.mix(y=rows) - exact).abs().max()) > 1e-3


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_the_estimate_of_hgp_has_no_mixing_error(degree: int) -> None:
    task = Quadratic(num_clients=5, upper="private", cross=0.4)
    settings = HGP(num_terms=400, lr_system=0.15, num_curvature_products=0)
    peers = PeerSimulation(settings, *task.build(), network=Network(kind="base", degree=degree), dtype=torch.float64)
    x = peers.initial()[0] + torch.linspace(0, 1, 5, dtype=torch.float64)[:, None]
    y = lower_solution(peers.host, x).expand(5, -1)
    peers.begin(1)
    v, _ = settings.estimate(peers, x, y)
    target = hypergradient(peers.host, x, y[0], method="exact").value
    torch.testing.assert_close(v, target, rtol=0, atol=1e-9)


def test_sparkle_reaches_the_solution_although_no_step_connects_the_peers() -> None:
    task = Quadratic(num_clients=5, dim_upper=2, dim_lower=3)
    settings = Sparkle(lr_upper=0.03, lr_lower=0.1, lr_system=0.1)
    _, state = drive(settings, task.build(), 500, network=Network(kind="base"))
    np.testing.assert_allclose(state.x, np.tile(task.closed_form().solution(), (5, 1)), rtol=0, atol=1e-8)


def test_a_run_names_it_and_other_shares_are_refused() -> None:
    result = solve(*Quadratic(num_clients=5).build(), "hgp", num_iterations=2, network=Network(kind="base", degree=2))
    assert result.ledger["rounds"] > 0
    with pytest.raises(NetworkError, match="shares are 'metropolis', but a network of kind 'base' averages exactly"):
        Network(kind="base", shares="metropolis")


def test_the_table_of_the_documentation_is_the_length_of_the_cycles() -> None:
    text = (Path(__file__).parents[2] / "docs/concepts/networks.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", text, flags=re.MULTILINE)
    assert len(rows) == 4
    for num_peers, *lengths in rows:
        assert [len(base_graph(int(num_peers), degree)) for degree in (1, 2, 4)] == list(map(int, lengths))
