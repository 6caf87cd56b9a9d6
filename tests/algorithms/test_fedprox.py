"""FedProx: iterates by hand, and the proximal points that it tends to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedprox import FedProx
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.by_hand import Samples, gy, states
from support.numeric.yardstick import X0, Y0, check_continues, drive, relative, small, start_at


@pytest.mark.parametrize("batch_size", [None, 2], ids=["all samples", "minibatches"])
@pytest.mark.parametrize(
    "scopes", [{}, {"client_weights": "by_samples"}, {"upper": "private"}, {"lower": "local"}], ids=str
)
def test_agrees_with_the_equations_by_hand(scopes: dict[str, Any], batch_size: int | None) -> None:
    task, counts, lr, mu = small(**scopes), (2, 4, 3), 0.2, 0.9
    samples, share = Samples(task, seed=4, batch_size=batch_size), task.closed_form().share
    y = [Y0] * 3
    algorithm = FedProx(lr_lower=lr, prox_weight=mu, num_local_steps=counts)
    for k, (fed, state) in enumerate(states(algorithm, start_at(task, X0, Y0), 3, seed=4, batch_size=batch_size)):
        if k > 0:
            for i in range(3):
                local = y[i]
                for s in range(counts[i]):
                    local = local - lr * (
                        gy(samples.drawn(i, "train", "B", (k, 1, s)), X0, local) + mu * (local - y[i])
                    )
                y[i] = local
            y = y if task.lower == "local" else [sum(w * row for w, row in zip(share, y, strict=True))] * 3
        np.testing.assert_allclose(fed.collect(state.y).expand(3, -1), np.stack(y), rtol=1e-12, atol=1e-14)
        np.testing.assert_array_equal(fed.collect(state.x).expand(3, -1), np.stack([X0] * 3))


def test_without_the_proximal_term_it_is_fedavg_bit_for_bit() -> None:
    built, options = (
        start_at(Quadratic(bend=0.5), np.ones(4), np.full(6, 0.3)),
        {"batch_size": 2, "cohort": Cohort(0.6), "seed": 1},
    )
    settings: dict[str, Any] = {"lr_lower": 0.15, "num_local_steps": (3, 1, 2, 4, 1)}
    _, plain = drive(FedAvg(**settings), built, 4, **options)
    _, none = drive(FedProx(**settings, prox_weight=0.0), built, 4, **options)
    _, some = drive(FedProx(**settings, prox_weight=0.1), built, 4, **options)
    assert torch.equal(plain.y, none.y)
    assert relative(some.y, plain.y) > 1e-3


def test_many_local_steps_solve_the_proximal_problems_and_a_heavy_term_freezes() -> None:
    task = small()
    stacked = task.closed_form().stacked
    gradients = np.einsum("nij,j->ni", stacked["A"], Y0) - np.einsum("nij,j->ni", stacked["B"], X0) - stacked["c"]
    steepest = np.linalg.eigvalsh(stacked["A"]).max()
    for mu in (3.0, 1e2, 1e5):
        _, state = drive(
            FedProx(lr_lower=1 / (steepest + mu), prox_weight=mu, num_local_steps=60), start_at(task, X0, Y0), 1
        )
        moved = -np.mean(
            [np.linalg.solve(A + mu * np.eye(3), g) for A, g in zip(stacked["A"], gradients, strict=True)], axis=0
        )
        np.testing.assert_allclose(state.y.numpy() - Y0, moved, rtol=1e-9, atol=1e-14)
    assert relative(-mu * (state.y.numpy() - Y0), gradients.mean(0)) < 1e-4  # it moves by 1 / mu and no further


def test_settles_where_the_mean_of_proximal_steps_vanishes_and_not_at_the_lower_solution() -> None:
    task, mu = small(), 1.5
    closed = task.closed_form()
    stacked, steepest = closed.stacked, np.linalg.eigvalsh(closed.stacked["A"]).max()
    inverse = np.linalg.inv(stacked["A"] + mu * np.eye(3))
    right = np.einsum("nij,j->ni", stacked["B"], X0) + stacked["c"]
    limit = np.linalg.solve((inverse @ stacked["A"]).mean(0), np.einsum("nij,nj->ni", inverse, right).mean(0))
    _, state = drive(
        FedProx(lr_lower=1 / (steepest + mu), prox_weight=mu, num_local_steps=35), start_at(task, X0, Y0), 40
    )
    assert relative(state.y, limit) < 1e-8
    assert relative(limit, closed.lower_solution(X0)) > 1e-2


def test_ledger() -> None:
    counts, times = torch.tensor([2, 1, 3]), torch.zeros(3, dtype=torch.int64)
    for k, (fed, _) in enumerate(
        states(FedProx(num_local_steps=(2, 1, 3)), small().build(), 5, cohort=Cohort(0.67), batch_size=2)
    ):
        ledger = fed.ledger.columns
        times += ledger["gy"] > times * counts
        assert int(times.sum()) == 2 * k
        assert fed.ledger.rounds == k
        assert torch.equal(ledger["floats_up"], 3 * times)
        assert torch.equal(ledger["floats_down"], 3 * times + 2 * (times > 0))
        assert torch.equal(ledger["gy"], counts * times)
        assert torch.equal(ledger["samples"], 2 * counts * times)
        assert all(int(ledger[name].sum()) == 0 for name in ("gx", "fx", "fy", "hvp", "jvp"))


@pytest.mark.parametrize("lower", ["global", "local"])
def test_continues_from_a_checkpoint_bit_by_bit(lower: Any) -> None:
    check_continues(FedProx(num_local_steps=(2, 1, 3, 2)), small(num_clients=4, lower=lower).build())
