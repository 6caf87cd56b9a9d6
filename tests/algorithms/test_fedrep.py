"""FedRep: iterates by hand, and the joint minimum of the training losses over body and heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedrep import FedRep
from fedbilevel.errors import ScopeError
from fedbilevel.federation.algorithm import Cohort, Kept
from support.numeric.bodies import RHO, bodies, gx
from support.numeric.by_hand import Samples, gy, states
from support.numeric.yardstick import X0, Y0, check_continues, drive, fixed_point, relative, small


@pytest.mark.parametrize("batch_size", [None, 2], ids=["all samples", "minibatches"])
@pytest.mark.parametrize("scopes", [{}, {"client_weights": "by_samples"}, {"upper": "private"}], ids=str)
def test_agrees_with_the_equations_by_hand(scopes: dict[str, Any], batch_size: int | None) -> None:
    (task, built), counts, eta, gamma, T = bodies(X0, Y0, **scopes), (2, 4, 3), 0.05, 0.2, 3
    samples, share = Samples(task, seed=4, batch_size=batch_size), task.closed_form().share
    x, y = [X0] * 3, [Y0] * 3
    algorithm = FedRep(lr_upper=eta, lr_lower=gamma, num_head_steps=T, num_local_steps=counts)
    for k, (fed, state) in enumerate(states(algorithm, built, 3, seed=4, batch_size=batch_size)):
        if k > 0:
            for i in range(3):
                for s in range(T):
                    y[i] = y[i] - gamma * gy(samples.drawn(i, "train", "head", (k, 1, s)), x[i], y[i])
                for s in range(counts[i]):
                    x[i] = x[i] - eta * gx(samples.drawn(i, "train", "body", (k, 1, s)), x[i], y[i])
            x = x if task.upper == "private" else [sum(w * row for w, row in zip(share, x, strict=True))] * 3
        np.testing.assert_allclose(fed.collect(state.x).expand(3, -1), np.stack(x), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(fed.collect(state.y), np.stack(y), rtol=1e-12, atol=1e-14)
        assert isinstance(state.y, Kept)


def joint_minimum(task: Any) -> tuple[np.ndarray, np.ndarray]:
    """x and all y_i at which the mean of the lower losses is smallest, by dense algebra."""
    closed = task.closed_form()
    s = closed.stacked
    inner = closed._mean(np.einsum("nji,njk,nkl->nil", s["B"], np.linalg.inv(s["A"]), s["B"]))
    right = closed._mean(np.einsum("nji,njk,nk->ni", s["B"], np.linalg.inv(s["A"]), s["c"]))
    x = np.linalg.solve(RHO * np.eye(2) - inner, right)
    return x, np.stack([np.linalg.solve(A, B @ x + c) for A, B, c in zip(s["A"], s["B"], s["c"], strict=True)])


@pytest.mark.parametrize("weights", ["equal", "by_samples"])
def test_rests_at_the_joint_minimum_of_the_training_losses(weights: Any) -> None:
    task, built = bodies(X0, Y0, client_weights=weights)
    points, radius = fixed_point(FedRep(lr_upper=0.05, lr_lower=0.2, num_head_steps=4, num_local_steps=1), built)
    x, y = joint_minimum(task)
    assert radius < 1
    assert relative(points["x"], x) < 1e-10
    assert relative(points["y"], y) < 1e-10
    assert relative(x, task.closed_form().solution()) > 0.1  # the bilevel problem has another solution


def test_the_upper_loss_has_no_part_in_it() -> None:
    _, (problem, clients) = bodies(X0, Y0)
    changed = [
        {**client, "val": {name: 3 * value + 1 for name, value in client["val"].items()}}  # type: ignore[operator]
        for client in clients
    ]
    one, two = (
        fb.solve(problem, mine, "fedrep", num_iterations=3, lr_upper=0.05, lr_lower=0.2, dtype=torch.float64)
        for mine in (clients, changed)
    )
    assert torch.equal(one.x["x"], two.x["x"])
    assert all(torch.equal(a["y"], b["y"]) for a, b in zip(one.y, two.y, strict=True))


def test_its_heads_under_a_body_that_stands_still_are_those_of_clients_that_train_alone() -> None:
    _, built = bodies(X0, Y0)
    fed, state = drive(FedRep(lr_upper=1e-300, lr_lower=0.2, num_head_steps=3), built, 4)
    alone, plain = drive(FedAvg(lr_lower=0.2, num_local_steps=3), built, 4)
    np.testing.assert_allclose(fed.collect(state.y), alone.collect(plain.y), rtol=1e-12)


def test_who_is_not_in_the_cohort_keeps_its_head() -> None:
    _, built = bodies(X0, Y0)
    before, here = torch.as_tensor(np.stack([Y0] * 3)), torch.zeros(3, dtype=torch.int64)
    for fed, state in states(FedRep(lr_upper=0.05), built, 5, cohort=Cohort(0.34), seed=2):
        present = fed.ledger.columns["gy"] > here
        here, now = fed.ledger.columns["gy"].clone(), fed.collect(state.y).clone()
        assert torch.equal((now != before).any(1), present)
        before = now


def test_ledger() -> None:
    counts, times = torch.tensor([2, 1, 3]), torch.zeros(3, dtype=torch.int64)
    algorithm = FedRep(lr_upper=0.05, num_head_steps=4, num_local_steps=(2, 1, 3))
    for k, (fed, _) in enumerate(states(algorithm, bodies(X0, Y0)[1], 5, cohort=Cohort(0.67), batch_size=2)):
        ledger = fed.ledger.columns
        times += ledger["gy"] > 4 * times
        assert int(times.sum()) == 2 * k
        assert fed.ledger.rounds == k
        assert torch.equal(ledger["floats_up"], 2 * times)
        assert torch.equal(ledger["floats_down"], 2 * times)
        assert torch.equal(ledger["gy"], 4 * times)
        assert torch.equal(ledger["gx"], counts * times)
        assert torch.equal(ledger["samples"], 2 * (4 + counts) * times)
        assert all(int(ledger[name].sum()) == 0 for name in ("fx", "fy", "hvp", "jvp"))


def test_nothing_travels_with_a_private_body() -> None:
    fed, _ = drive(FedRep(lr_upper=0.05), bodies(X0, Y0, upper="private")[1], 2)
    assert fed.ledger.rounds == fed.ledger.totals()["floats_up"] == fed.ledger.totals()["floats_down"] == 0


def test_refuses_one_head_of_all_clients() -> None:
    with pytest.raises(ScopeError, match="y holds the heads, of which every client has its own"):
        fb.solve(*small().build(), "fedrep", num_iterations=1)


def test_a_schedule_shortens_both_steps() -> None:
    assert FedRep(lr_upper=0.2, lr_lower=0.4).scaled(0.5) == FedRep(lr_upper=0.1, lr_lower=0.2)


def test_continues_from_a_checkpoint_bit_by_bit() -> None:
    check_continues(FedRep(lr_upper=0.05, num_local_steps=(2, 1, 3, 2)), bodies(X0, Y0, num_clients=4)[1])
