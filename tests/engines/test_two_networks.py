"""A network for x and another for y and u, against recursions with two dense matrices per step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedbilevel.algorithms.hgp import HGP
from fedbilevel.algorithms.sparkle import Sparkle
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.errors import NetworkError, SettingError
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.network import Network
from fedbilevel.runs.solve import solve
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric import by_hand
from support.numeric.yardstick import check_continues, drive

STEPS = {"lr_upper": 0.05, "lr_lower": 0.15, "lr_system": 0.12}
TWO = Network(kind="random_undirected", upper_kind="base", seed=2)


def matrices(network: Network, num: int) -> list[np.ndarray]:
    return [network.between(5).mixing(step).matrix.numpy() for step in range(num)]


@pytest.mark.parametrize("correction", ["none", "gradient_tracking"])
def test_sparkle_takes_the_steps_of_two_networks(correction: Any) -> None:
    task, num = Quadratic(dim_upper=2, dim_lower=3, cross=0.4), 7  # more steps than the cycle of five peers
    lower, upper = matrices(Network(kind="random_undirected", seed=2), num), matrices(Network(kind="base"), num)
    by_name = {"x": upper, "y": lower, "u": lower}
    samples = by_hand.Samples(task, seed=5, batch_size=2)
    S = {name: np.zeros((5, 2 if name == "x" else 3)) for name in "xyu"}
    t, before = {name: None for name in "xyu"}, {}
    for k in range(num):
        found = [
            by_hand.global_directions(
                samples, i, {name: S[name][i] for name in "xyu"}, (k + 1, 1, 0), "B_y B_f1 B_f2 B_g1 B_g2"
            )
            for i in range(5)
        ]
        for name, a in zip("xyu", STEPS.values(), strict=True):
            W, d = by_name[name], np.stack([point[name] for point in found])
            if correction == "none":
                t[name] = d
            else:
                t[name] = d if k == 0 else W[k - 1] @ t[name] + d - before[name]
            before[name], S[name] = d, W[k] @ (S[name] - a * t[name])
    _, state = drive(Sparkle(**STEPS, correction=correction), task.build(), num, network=TWO, seed=5, batch_size=2)
    for name, rows in S.items():
        assert np.abs(rows).max() > 0.1
        np.testing.assert_allclose(getattr(state, name), rows, rtol=0, atol=1e-12, err_msg=name)


def test_with_tracking_two_networks_reach_the_solution() -> None:
    task = Quadratic(dim_upper=2, dim_lower=3, client_weights="by_samples")
    _, state = drive(Sparkle(**STEPS), task.build(), 300, network=Network(kind="ring", upper_kind="complete"))
    np.testing.assert_allclose(state.x, np.tile(task.closed_form().solution(), (5, 1)), rtol=0, atol=1e-8)


def test_averages_of_x_and_y_use_their_own_networks_and_their_own_clocks() -> None:
    task = Quadratic()
    network = Network(kind="ring", upper_kind="base", upper_degree=2)
    peers = PeerSimulation(HGP(), *task.build(), network=network, averaging=Averaging(num_steps=3), dtype=torch.float64)
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randn(5, 3, generator=draw, dtype=torch.float64) for _ in range(2))
    mixed_x, mixed_y = peers.mix(x=x, y=y)
    ring = np.linalg.matrix_power(matrices(Network(kind="ring"), 1)[0], 3)
    np.testing.assert_allclose(mixed_x, np.tile(x.numpy().mean(0), (5, 1)), rtol=0, atol=1e-14)
    np.testing.assert_allclose(mixed_y, ring @ y.numpy(), rtol=0, atol=1e-14)
    assert (peers.time, peers.upper_time, peers.ledger.rounds) == (3, 3, 6)
    peers.push(peers.weights, y=y)
    assert (peers.time, peers.upper_time) == (4, 3)
    assert list(peers.ledger.phases) == ["mix y", "mix x", "push y"]
    floats = sum(Network(kind="base", degree=2).between(5).mixing(step).sent.long() for step in range(3))
    floats = 4 * floats + 4 * 4 * Network(kind="ring").between(5).mixing(0).sent.long()  # three values and a weight
    assert torch.equal(peers.ledger.edges["floats"], floats)


@pytest.mark.parametrize("algorithm", [Sparkle(**STEPS), HGP(lr_system=0.1, num_terms=2, num_lower_steps=3)], ids=str)
def test_a_resumed_run_continues_on_both_networks(algorithm: Any) -> None:
    check_continues(algorithm, Quadratic(dim_upper=2, dim_lower=3).build(), network=TWO)


def test_a_private_x_needs_no_network() -> None:
    task = Quadratic(upper="private")
    one, two = (
        drive(Sparkle(**STEPS), task.build(), 3, network=network)[1]
        for network in (Network(kind="ring"), Network(kind="ring", upper_kind="complete"))
    )
    assert torch.equal(one.x, two.x)
    assert torch.equal(one.y, two.y)


def test_what_two_networks_cannot_do_is_refused() -> None:
    built = Quadratic().build()
    with pytest.raises(SettingError, match="sparkle pushes x and y with the same weights"):
        drive(Sparkle(**STEPS, exchange="push"), built, 1, network=Network(kind="ring", upper_kind="complete"))
    kept = Averaging(weights="kept")
    with pytest.raises(SettingError, match="weights of Push-Sum are kept between averages"):
        solve(*built, "hgp", num_iterations=1, network=Network(kind="ring", upper_kind="complete"), averaging=kept)
    with pytest.raises(SettingError, match="sparkle needs an undirected network"):
        solve(*built, "sparkle", num_iterations=1, network=Network(kind="ring", upper_kind="random_directed"))
    sparse = Network(kind="ring", upper_kind="erdos_renyi", probability=0.01)
    with pytest.raises(NetworkError, match="never connects"):
        solve(*built, "sparkle", num_iterations=1, network=sparse)
