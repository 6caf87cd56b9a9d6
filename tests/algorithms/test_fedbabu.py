"""FedBABU: the body of a fixed head, and heads that the clients tune, measure and never send."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel.algorithms.fedbabu import FedBABU
from fedbilevel.errors import ScopeError
from fedbilevel.federation.algorithm import Cohort, Kept
from support.numeric.bodies import RHO, bodies, gx
from support.numeric.by_hand import Samples, gy, states
from support.numeric.yardstick import X0, Y0, check_continues, drive, relative, small


@pytest.mark.parametrize("batch_size", [None, 2], ids=["all samples", "minibatches"])
@pytest.mark.parametrize("scopes", [{}, {"client_weights": "by_samples"}, {"upper": "private"}], ids=str)
def test_agrees_with_the_equations_by_hand(scopes: dict[str, Any], batch_size: int | None) -> None:
    (task, built), counts, eta, gamma, T = bodies(X0, Y0, **scopes), (2, 4, 3), 0.05, 0.2, 3
    samples, share = Samples(task, seed=4, batch_size=batch_size), task.closed_form().share
    x, tuned = [X0] * 3, [Y0] * 3
    algorithm = FedBABU(lr_upper=eta, lr_lower=gamma, num_tuning_steps=T, num_local_steps=counts)
    for k, (fed, state) in enumerate(states(algorithm, built, 3, seed=4, batch_size=batch_size)):
        if k > 0:
            for i in range(3):
                for s in range(counts[i]):
                    x[i] = x[i] - eta * gx(samples.drawn(i, "train", "body", (k, 1, s)), x[i], Y0)
            x = x if task.upper == "private" else [sum(w * row for w, row in zip(share, x, strict=True))] * 3
            tuned = [Y0] * 3
            for i in range(3):
                for s in range(T):
                    tuned[i] = tuned[i] - gamma * gy(samples.drawn(i, "train", "tune", (k, 2, s)), x[i], tuned[i])
        np.testing.assert_allclose(fed.collect(state.x).expand(3, -1), np.stack(x), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(fed.collect(state.y), np.stack(tuned), rtol=1e-12, atol=1e-14)
        assert isinstance(state.y, Kept)


@pytest.mark.parametrize("weights", ["equal", "by_samples"])
def test_rests_at_the_minimum_of_the_body_under_the_initial_head(weights: Any) -> None:
    task, built = bodies(X0, Y0, client_weights=weights)
    closed = task.closed_form()
    fed, state = drive(FedBABU(lr_upper=0.05, lr_lower=0.3, num_local_steps=1, num_tuning_steps=150), built, 60)
    x = closed._mean(closed.stacked["B"]).T @ Y0 / RHO
    assert relative(state.x, x) < 1e-10
    own = [np.linalg.solve(A, B @ x + c) for A, B, c in zip(*(closed.stacked[name] for name in "ABc"), strict=True)]
    assert relative(fed.collect(state.y), np.stack(own)) < 1e-9


def test_an_initial_head_of_zeros_gives_the_body_no_gradient_from_the_heads() -> None:
    _, state = drive(FedBABU(lr_upper=1 / RHO, lr_lower=0.2), bodies(X0, np.zeros(3))[1], 2)
    assert float(state.x.abs().max()) < 1e-15


def test_tuning_leaves_the_body_alone_bit_for_bit() -> None:
    built, options = bodies(X0, Y0)[1], {"batch_size": 2, "cohort": Cohort(0.67), "seed": 1}
    _, one = drive(FedBABU(lr_upper=0.05, num_tuning_steps=0), built, 4, **options)
    _, two = drive(FedBABU(lr_upper=0.05, num_tuning_steps=3), built, 4, **options)
    assert torch.equal(one.x, two.x)


def test_without_tuning_steps_the_heads_are_the_initial_head() -> None:
    fed, state = drive(FedBABU(lr_upper=0.05, num_tuning_steps=0), bodies(X0, Y0)[1], 3)
    np.testing.assert_array_equal(fed.collect(state.y), np.stack([Y0] * 3))


@pytest.mark.parametrize("num_tuning_steps", [0, 4])
def test_ledger_with_all_clients(num_tuning_steps: int) -> None:
    algorithm = FedBABU(lr_upper=0.05, num_local_steps=3, num_tuning_steps=num_tuning_steps)
    for k, (fed, _) in enumerate(states(algorithm, bodies(X0, Y0)[1], 3, batch_size=2)):
        ledger = fed.ledger.columns
        assert fed.ledger.rounds == k
        assert ledger["floats_up"].tolist() == [2 * k] * 3
        assert ledger["floats_down"].tolist() == [2 * (k + 1) if k else 0] * 3  # the initial x, then each new x once
        assert ledger["gx"].tolist() == [3 * k] * 3
        assert ledger["gy"].tolist() == [num_tuning_steps * k] * 3
        assert ledger["samples"].tolist() == [2 * (3 + num_tuning_steps) * k] * 3
        assert all(int(ledger[name].sum()) == 0 for name in ("fx", "fy", "hvp", "jvp"))


def test_ledger_with_cohorts() -> None:
    times, before = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    last, down = torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    algorithm = FedBABU(lr_upper=0.05, num_local_steps=2)
    for fed, _ in states(algorithm, bodies(X0, Y0)[1], 6, cohort=Cohort(0.34)):
        here = fed.ledger.columns["gx"] > before
        before = fed.ledger.columns["gx"].clone()
        down += here * (2 + 2 * ~last)
        times, last = times + here, here
        assert torch.equal(before, 2 * times)
        assert torch.equal(fed.ledger.columns["floats_up"], 2 * times)
        assert torch.equal(fed.ledger.columns["floats_down"], down)


def test_nothing_travels_with_a_private_body() -> None:
    fed, _ = drive(FedBABU(lr_upper=0.05), bodies(X0, Y0, upper="private")[1], 2)
    assert fed.ledger.rounds == fed.ledger.totals()["floats_up"] == fed.ledger.totals()["floats_down"] == 0


def test_refuses_one_head_of_all_clients() -> None:
    with pytest.raises(ScopeError, match="y holds the heads, of which every client has its own"):
        fb.solve(*small().build(), "fedbabu", num_iterations=1)


def test_a_schedule_shortens_the_step_of_the_body_and_not_of_tuning() -> None:
    assert FedBABU(lr_upper=0.2, lr_lower=0.4).scaled(0.5) == FedBABU(lr_upper=0.1, lr_lower=0.4)


def test_continues_from_a_checkpoint_bit_by_bit() -> None:
    check_continues(FedBABU(lr_upper=0.05, num_local_steps=(2, 1, 3, 2)), bodies(X0, Y0, num_clients=4)[1])
