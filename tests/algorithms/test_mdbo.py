"""MDBO against its recursion in numpy, and its limit against dense algebra."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_adafbio import LOCAL, SCOPES, THETA, by_hand, drawn_k, local_solution

import fedbilevel as fb
from fedbilevel.algorithms.mdbo import MDBO
from fedbilevel.checks import check_algorithm
from fedbilevel.errors import ScopeWarning, SettingError
from fedbilevel.federation.network import Network
from fedbilevel.problem.problem import Scopes
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.by_hand import Samples
from support.numeric.yardstick import check_continues, drive, relative, settled_peers

K, FOUR = 3, {"num_clients": 4, "dim_upper": 2, "dim_lower": 3}
RING, CHANGING = Network(kind="ring"), Network(kind="random_undirected", seed=2)
STEADY = {"lr_upper": 0.1, "lr_lower": 0.3, "lr_system": THETA, "num_terms": K, "hypergradient": "local-neumann-sum"}


@pytest.mark.parametrize("hypergradient", LOCAL)
@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_four_outer_iterations_follow_the_recursion(lower: Any, upper: Any, hypergradient: Any) -> None:
    task = Quadratic(**FOUR, lower=lower, upper=upper, client_weights="by_samples")
    settings = MDBO(
        lr_upper=0.3, lr_lower=0.4, lr_system=0.2, num_terms=K, hypergradient=hypergradient, relaxation=0.7,
        momentum_upper=0.8, momentum_lower=1.2,
    )  # fmt: skip
    samples, share = Samples(task, seed=5, batch_size=2), 4 * task.closed_form().share[:, None]
    stays = {"x": upper == "private", "y": lower == "local"}
    rows = {"x": np.zeros((4, 2)), "y": np.zeros((4, 3))}
    mean, tracked = ({name: np.zeros_like(value) for name, value in rows.items()} for _ in range(2))
    eta, rate = 0.7, {"x": (0.8, 0.3), "y": (1.2, 0.4)}
    for k in range(4):
        W = CHANGING.between(4).mixing(k).matrix.numpy()
        points = [{name: rows[name][i] for name in rows} for i in range(4)]
        found = [by_hand(settings, samples, 5, i, point, (k + 1, 1, 0)) for i, point in enumerate(points)]
        for name, letter in (("x", "w"), ("y", "v")):
            d = np.stack([one[letter] for one in found]) * (1 if stays[name] else share)
            mixing = np.eye(4) if stays[name] else W
            weight, step = rate[name]
            new = (1 - weight * eta) * mean[name] + weight * eta * d
            tracked[name] = mixing @ tracked[name] + new - mean[name]
            mean[name] = new
            rows[name] = (1 - eta) * rows[name] + eta * (mixing @ rows[name] - step * tracked[name])
    _, state = drive(settings, task.build(), 4, network=CHANGING, seed=5, batch_size=2)
    for name, value in rows.items():
        assert np.ptp(value, axis=0).min() > 1e-3  # the peers disagree
        np.testing.assert_allclose(getattr(state, name), value, rtol=0, atol=1e-12, err_msg=name)
        np.testing.assert_allclose(state.z if name == "x" else state.v, tracked[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("network", [RING, Network(kind="complete")], ids=lambda network: network.kind)
@pytest.mark.parametrize("weights", ["equal", "by_samples"])
def test_peers_agree_where_the_mean_of_local_hypergradients_vanishes(network: Network, weights: Any) -> None:
    task = Quadratic(**FOUR, client_weights=weights)
    closed = task.closed_form()
    found, radius = settled_peers(MDBO(**STEADY), task.build(), network)
    target = local_solution(closed, K)
    np.testing.assert_allclose(found["x"], np.tile(target, (4, 1)), rtol=0, atol=1e-8)
    np.testing.assert_allclose(found["y"], np.tile(closed.lower_solution(target), (4, 1)), rtol=0, atol=1e-8)
    assert radius < 0.99
    assert relative(local_solution(closed), closed.solution()) > 0.2  # the bias, without truncation


@pytest.mark.parametrize("same", [{"heterogeneity": 0.0}, {"lower": "local"}], ids=str)
def test_identical_clients_or_a_local_lower_level_have_no_bias_but_the_truncation(same: Any) -> None:
    task = Quadratic(**FOUR, **same)
    errors = []
    for num_terms in (4, 8, 60):
        found, radius = settled_peers(MDBO(**{**STEADY, "num_terms": num_terms}), task.build(), RING)
        assert radius < 0.99
        errors.append(max(relative(row, task.closed_form().solution()) for row in found["x"]))
    assert errors[0] > 3 * errors[1] > 1e-4
    assert errors[2] < 1e-6


def test_without_tracking_the_peers_would_disagree() -> None:
    """The trackers hold the mean: each peer's own momentum differs from it at the limit."""
    found, _ = settled_peers(MDBO(**STEADY), Quadratic(**FOUR).build(), RING)
    assert float(found["m"].abs().max()) > 0.1
    for name in ("z", "v"):
        np.testing.assert_allclose(found[name], 0, rtol=0, atol=1e-8)


@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_a_global_lower_level_is_warned_of(lower: Any, upper: Any) -> None:
    warned = [type(warning) for warning in MDBO().check_scopes(Scopes(lower, upper))]
    assert warned == [ScopeWarning] * (lower == "global")


@pytest.mark.parametrize("hypergradient", LOCAL)
@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_the_ledger_counts_what_the_module_says(lower: Any, upper: Any, hypergradient: Any) -> None:
    task, num = Quadratic(**FOUR, lower=lower, upper=upper), 3
    peers, _ = drive(MDBO(num_terms=K, hypergradient=hypergradient), task.build(), num, network=CHANGING)
    floats = 4 * (upper == "shared") + 6 * (lower == "global")
    rounds = num if floats else 0
    none = torch.zeros(4, 4, dtype=torch.int64)
    sent = sum((CHANGING.between(4).mixing(step).sent.long() for step in range(rounds)), none)
    assert peers.ledger.rounds == rounds
    assert torch.equal(peers.ledger.edges["floats"], floats * sent)
    for column in ("gy", "fx", "fy", "jvp"):
        assert peers.ledger.columns[column].tolist() == [num] * 4
    each = [
        sum(K - 1 if hypergradient != LOCAL[0] else drawn_k(0, i, K, (k, 1, 0)) for k in range(1, num + 1))
        for i in range(4)
    ]
    assert peers.ledger.columns["hvp"].tolist() == each


def test_it_keeps_the_contract_of_algorithms_and_resumes() -> None:
    report = check_algorithm(MDBO(lr_system=0.1), show=False)
    assert report.ok, str(report)
    check_continues(MDBO(lr_system=0.1), Quadratic(**FOUR).build(), network=CHANGING)


def test_steps_of_auto_descend_and_too_much_momentum_is_refused() -> None:
    auto = dict.fromkeys(("lr_upper", "lr_lower", "lr_system"), "auto")
    settings = {"num_iterations": 60, "hypergradient": "local-neumann-sum", "network": RING, "dtype": torch.float64}
    with pytest.warns(ScopeWarning):
        result = fb.solve(*Quadratic(**FOUR).build(), "mdbo", **auto, **settings)
    assert result.rows[-1]["distance"] < 0.5 * result.rows[0]["distance"]
    with pytest.raises(SettingError, match=r"MDBO: the largest momentum times relaxation is 1\.5, expected at most 1"):
        MDBO(relaxation=0.5, momentum_lower=3.0)
