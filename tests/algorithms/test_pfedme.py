"""pFedMe: iterates by hand, and personal models that satisfy their proximal equations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.pfedme import PFedMe
from fedbilevel.federation.algorithm import Cohort, Kept
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.by_hand import Samples, gy, states
from support.numeric.yardstick import X0, Y0, check_continues, drive, relative, small, start_at


@pytest.mark.parametrize("batch_size", [None, 2], ids=["all samples", "minibatches"])
@pytest.mark.parametrize(
    "scopes", [{}, {"client_weights": "by_samples"}, {"upper": "private"}, {"lower": "local"}], ids=str
)
def test_agrees_with_the_equations_by_hand(scopes: dict[str, Any], batch_size: int | None) -> None:
    task, counts, lr, eta, lam, beta, K = small(**scopes), (2, 4, 3), 0.15, 0.3, 1.7, 1.3, 2
    samples, share = Samples(task, seed=4, batch_size=batch_size), task.closed_form().share
    w, theta = [Y0] * 3, [Y0] * 3
    algorithm = PFedMe(
        lr_lower=lr, lr_model=eta, prox_weight=lam, server_mix=beta, num_local_steps=counts, num_prox_steps=K
    )
    for k, (fed, state) in enumerate(states(algorithm, start_at(task, X0, Y0), 3, seed=4, batch_size=batch_size)):
        if k > 0:
            own = list(w)
            for i in range(3):
                theta[i] = w[i]
                for s in range(counts[i]):
                    batch = samples.drawn(i, "train", "B", (k, 1, s))  # one for all steps on theta
                    for _ in range(K):
                        theta[i] = theta[i] - lr * (gy(batch, X0, theta[i]) + lam * (theta[i] - own[i]))
                    own[i] = own[i] - eta * lam * (own[i] - theta[i])
            mean = sum(v * row for v, row in zip(share, own, strict=True))
            w = [(1 - beta) * w[i] + beta * (own[i] if task.lower == "local" else mean) for i in range(3)]
        np.testing.assert_allclose(fed.collect(state.w).expand(3, -1), np.stack(w), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(fed.collect(state.y), np.stack(theta), rtol=1e-12, atol=1e-14)
        np.testing.assert_array_equal(fed.collect(state.x).expand(3, -1), np.stack([X0] * 3))
        assert isinstance(state.y, Kept)


def test_at_rest_every_theta_is_the_prox_of_w_and_w_is_their_mean() -> None:
    task, lam = small(client_weights="by_samples"), 2.0
    closed = task.closed_form()
    s, eye = closed.stacked, np.eye(3)
    lr = 1 / (np.linalg.eigvalsh(s["A"]).max() + lam)
    fed, state = drive(
        PFedMe(lr_lower=lr, lr_model=0.5, prox_weight=lam, num_local_steps=1, num_prox_steps=35),
        start_at(task, X0, Y0),
        45,
    )
    theta, w = fed.collect(state.y).numpy(), state.w.numpy()
    right = np.einsum("nij,j->ni", s["B"], X0) + s["c"]
    for i in range(3):
        np.testing.assert_allclose(s["A"][i] @ theta[i] - right[i] + lam * (theta[i] - w), 0, atol=1e-8)
    inverse = np.linalg.inv(s["A"] + lam * eye)
    limit = np.linalg.solve(eye - lam * closed._mean(inverse), closed._mean(np.einsum("nij,nj->ni", inverse, right)))
    assert relative(w, limit) < 1e-8
    assert relative(closed._mean(theta), w) < 1e-8
    assert (
        relative(limit, closed.lower_solution(X0)) > 1e-2
    )  # envelopes of different clients have another minimiser than the losses


def test_with_one_local_round_and_one_step_it_is_fedavg_with_the_product_of_the_steps() -> None:
    built = start_at(small(bend=0.5), X0, Y0)
    _, state = drive(
        PFedMe(lr_lower=0.2, lr_model=0.3, prox_weight=1.5, num_local_steps=1, num_prox_steps=1), built, 4, batch_size=2
    )
    _, plain = drive(FedAvg(lr_lower=0.2 * 0.3 * 1.5, num_local_steps=1), built, 4, batch_size=2)
    np.testing.assert_allclose(state.w, plain.y, rtol=1e-12)


def test_the_personal_models_are_measured() -> None:
    task = small()
    s = task.closed_form().stacked
    fed, state = drive(PFedMe(), start_at(task, X0, Y0), 2)
    losses = [
        y @ A @ y / 2 - y @ (B @ X0 + c)
        for y, A, B, c in zip(fed.collect(state.y).numpy(), s["A"], s["B"], s["c"], strict=True)
    ]
    assert fed.measure(state.x, state.y)["lower_loss"] == pytest.approx(np.mean(losses), rel=1e-12)


def test_who_was_never_in_a_cohort_has_the_initial_point() -> None:
    fed, state = drive(PFedMe(), start_at(Quadratic(), np.ones(4), np.full(6, 0.3)), 2, cohort=Cohort(0.2))
    absent = fed.ledger.columns["gy"] == 0
    assert torch.equal((fed.collect(state.y) == 0.3).all(1), absent)
    assert bool(absent.any())


def test_ledger() -> None:
    counts, times = torch.tensor([2, 1, 3]), torch.zeros(3, dtype=torch.int64)
    for k, (fed, _) in enumerate(
        states(
            PFedMe(num_local_steps=(2, 1, 3), num_prox_steps=4), small().build(), 5, cohort=Cohort(0.67), batch_size=2
        )
    ):
        ledger = fed.ledger.columns
        times += ledger["gy"] > times * 4 * counts
        assert int(times.sum()) == 2 * k
        assert fed.ledger.rounds == k
        assert torch.equal(ledger["floats_up"], 3 * times)
        assert torch.equal(ledger["floats_down"], 3 * times + 2 * (times > 0))
        assert torch.equal(ledger["gy"], 4 * counts * times)
        assert torch.equal(ledger["samples"], 2 * 4 * counts * times)
        assert all(int(ledger[name].sum()) == 0 for name in ("gx", "fx", "fy", "hvp", "jvp"))


def test_nothing_travels_with_a_local_lower_level_and_a_private_x() -> None:
    fed, _ = drive(PFedMe(), small(lower="local", upper="private").build(), 2)
    assert fed.ledger.rounds == fed.ledger.totals()["floats_up"] == fed.ledger.totals()["floats_down"] == 0


def test_a_schedule_shortens_the_step_of_w_and_not_the_steps_of_the_prox() -> None:
    assert PFedMe(lr_lower=0.2, lr_model=0.4).scaled(0.5) == PFedMe(lr_lower=0.2, lr_model=0.2)


@pytest.mark.parametrize("lower", ["global", "local"])
def test_continues_from_a_checkpoint_bit_by_bit(lower: Any) -> None:
    check_continues(PFedMe(num_local_steps=(2, 1, 3, 2), num_prox_steps=2), small(num_clients=4, lower=lower).build())
