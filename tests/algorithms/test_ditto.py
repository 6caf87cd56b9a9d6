"""Ditto: the common model of FedAvg, and personal models that satisfy their proximal equations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedbilevel.algorithms.ditto import Ditto
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.federation.algorithm import Cohort, Kept
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.by_hand import Samples, gy, states
from support.numeric.yardstick import X0, Y0, check_continues, drive, relative, small, start_at


@pytest.mark.parametrize("batch_size", [None, 2], ids=["all samples", "minibatches"])
@pytest.mark.parametrize(
    "scopes", [{}, {"client_weights": "by_samples"}, {"upper": "private"}, {"lower": "local"}], ids=str
)
def test_agrees_with_the_equations_by_hand(scopes: dict[str, Any], batch_size: int | None) -> None:
    task, counts, lr, lam, T = small(**scopes), (2, 4, 3), 0.15, 0.7, 2
    samples, share = Samples(task, seed=4, batch_size=batch_size), task.closed_form().share
    w, v = [Y0] * 3, [Y0] * 3
    algorithm = Ditto(lr_lower=lr, prox_weight=lam, num_local_steps=counts, num_personal_steps=T)
    for k, (fed, state) in enumerate(states(algorithm, start_at(task, X0, Y0), 3, seed=4, batch_size=batch_size)):
        if k > 0:
            own = list(w)
            for i in range(3):
                for s in range(counts[i]):
                    own[i] = own[i] - lr * gy(samples.drawn(i, "train", "B", (k, 1, s)), X0, own[i])
                for s in range(T):
                    gradient = gy(samples.drawn(i, "train", "personal", (k, 1, s)), X0, v[i])
                    v[i] = v[i] - lr * (gradient + lam * (v[i] - w[i]))
            mean = sum(one * row for one, row in zip(share, own, strict=True))
            w = own if task.lower == "local" else [mean] * 3
        np.testing.assert_allclose(fed.collect(state.w).expand(3, -1), np.stack(w), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(fed.collect(state.y), np.stack(v), rtol=1e-12, atol=1e-14)
        np.testing.assert_array_equal(fed.collect(state.x).expand(3, -1), np.stack([X0] * 3))
        assert isinstance(state.y, Kept)


@pytest.mark.parametrize("lam", [0.0, 0.5, 30.0])
def test_at_rest_every_personal_model_solves_its_proximal_problem(lam: float) -> None:
    task = small(client_weights="by_samples")
    closed = task.closed_form()
    s = closed.stacked
    lr = 1 / (np.linalg.eigvalsh(s["A"]).max() + lam)
    fed, state = drive(
        Ditto(lr_lower=lr, prox_weight=lam, num_local_steps=1, num_personal_steps=6), start_at(task, X0, Y0), 500
    )
    w = closed.lower_solution(X0)
    right = np.einsum("nij,j->ni", s["B"], X0) + s["c"]
    v = np.stack([np.linalg.solve(A + lam * np.eye(3), b + lam * w) for A, b in zip(s["A"], right, strict=True)])
    assert relative(state.w, w) < 1e-8
    assert relative(fed.collect(state.y), v) < 1e-8
    if lam == 0:
        assert relative(v, closed._replace(local=True).lower_solution(X0)) < 1e-12


def test_the_common_model_is_that_of_fedavg_bit_for_bit() -> None:
    built, options = (
        start_at(Quadratic(bend=0.5), np.ones(4), np.full(6, 0.3)),
        {"batch_size": 2, "cohort": Cohort(0.6), "seed": 1},
    )
    _, plain = drive(FedAvg(num_local_steps=2), built, 4, **options)
    _, state = drive(Ditto(num_local_steps=2, num_personal_steps=3), built, 4, **options)
    assert torch.equal(plain.y, state.w)


def test_the_personal_models_are_measured() -> None:
    task = small()
    s = task.closed_form().stacked
    fed, state = drive(Ditto(), start_at(task, X0, Y0), 2)
    losses = [
        y @ A @ y / 2 - y @ (B @ X0 + c)
        for y, A, B, c in zip(fed.collect(state.y).numpy(), s["A"], s["B"], s["c"], strict=True)
    ]
    assert fed.measure(state.x, state.y)["lower_loss"] == pytest.approx(np.mean(losses), rel=1e-12)


def test_who_was_never_in_a_cohort_has_the_initial_point() -> None:
    fed, state = drive(Ditto(), start_at(Quadratic(), np.ones(4), np.full(6, 0.3)), 2, cohort=Cohort(0.2))
    absent = fed.ledger.columns["gy"] == 0
    assert torch.equal((fed.collect(state.y) == 0.3).all(1), absent)
    assert bool(absent.any())


def test_ledger() -> None:
    counts, times = torch.tensor([2, 1, 3]), torch.zeros(3, dtype=torch.int64)
    algorithm = Ditto(num_local_steps=(2, 1, 3), num_personal_steps=4)
    for k, (fed, _) in enumerate(states(algorithm, small().build(), 5, cohort=Cohort(0.67), batch_size=2)):
        ledger = fed.ledger.columns
        times += ledger["gy"] > times * (4 + counts)
        assert int(times.sum()) == 2 * k
        assert fed.ledger.rounds == k
        assert torch.equal(ledger["floats_up"], 3 * times)
        assert torch.equal(ledger["floats_down"], 3 * times + 2 * (times > 0))
        assert torch.equal(ledger["gy"], (4 + counts) * times)
        assert torch.equal(ledger["samples"], 2 * (4 + counts) * times)
        assert all(int(ledger[name].sum()) == 0 for name in ("gx", "fx", "fy", "hvp", "jvp"))


def test_nothing_travels_with_a_local_lower_level_and_a_private_x() -> None:
    fed, _ = drive(Ditto(), small(lower="local", upper="private").build(), 2)
    assert fed.ledger.rounds == fed.ledger.totals()["floats_up"] == fed.ledger.totals()["floats_down"] == 0


def test_a_measured_step_counts_the_proximal_term() -> None:
    algorithm = Ditto(lr_lower="auto", prox_weight=3.0)
    found = next(iter(algorithm.auto_steps(_Found(lower=0.5)).values()))
    assert found == pytest.approx(1 / (2 + 3))


class _Found:
    def __init__(self, lower: float) -> None:
        self.lower = lower


@pytest.mark.parametrize("lower", ["global", "local"])
def test_continues_from_a_checkpoint_bit_by_bit(lower: Any) -> None:
    check_continues(Ditto(num_local_steps=(2, 1, 3, 2)), small(num_clients=4, lower=lower).build())
