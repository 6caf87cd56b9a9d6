"""FedAvg+: the y of FedAvg, and copies of it that the clients tune, measure and never send."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedavg_plus import FedAvgPlus
from fedbilevel.federation.algorithm import Cohort, Kept
from fedbilevel.runs.solve import solve
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.by_hand import Samples, gy, states
from support.numeric.yardstick import X0, Y0, check_continues, drive, relative, small, start_at


@pytest.mark.parametrize("batch_size", [None, 2], ids=["all samples", "minibatches"])
@pytest.mark.parametrize(
    "scopes", [{}, {"client_weights": "by_samples"}, {"upper": "private"}, {"lower": "local"}], ids=str
)
def test_agrees_with_the_equations_by_hand(scopes: dict[str, Any], batch_size: int | None) -> None:
    task, counts, lr = small(**scopes), (2, 4, 3), 0.2
    samples, share = Samples(task, seed=4, batch_size=batch_size), task.closed_form().share
    sent, tuned = [Y0] * 3, [Y0] * 3
    algorithm = FedAvgPlus(lr_lower=lr, num_local_steps=counts, num_tuning_steps=2)
    for k, (fed, state) in enumerate(states(algorithm, start_at(task, X0, Y0), 3, seed=4, batch_size=batch_size)):
        if k > 0:
            for i in range(3):
                for s in range(counts[i]):
                    sent[i] = sent[i] - lr * gy(samples.drawn(i, "train", "B", (k, 1, s)), X0, sent[i])
            sent = sent if task.lower == "local" else [sum(w * row for w, row in zip(share, sent, strict=True))] * 3
            tuned = list(sent)
            for i in range(3):
                for s in range(2):
                    tuned[i] = tuned[i] - lr * gy(samples.drawn(i, "train", "tune", (k, 2, s)), X0, tuned[i])
        np.testing.assert_allclose(fed.collect(state.sent).expand(3, -1), np.stack(sent), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(fed.collect(state.y), np.stack(tuned), rtol=1e-12, atol=1e-14)
        np.testing.assert_array_equal(fed.collect(state.x).expand(3, -1), np.stack([X0] * 3))
        assert isinstance(state.y, Kept)


@pytest.mark.parametrize("num_tuning_steps", [0, 3])
def test_tuning_leaves_the_y_of_fedavg_alone_bit_for_bit(num_tuning_steps: int) -> None:
    built, options = (
        start_at(Quadratic(bend=0.5), np.ones(4), np.full(6, 0.3)),
        {"batch_size": 2, "cohort": Cohort(0.6), "seed": 1},
    )
    _, plain = drive(FedAvg(num_local_steps=2), built, 4, **options)
    _, state = drive(FedAvgPlus(num_local_steps=2, num_tuning_steps=num_tuning_steps), built, 4, **options)
    assert torch.equal(plain.y, state.sent)


def test_without_tuning_steps_the_copies_are_the_y_of_fedavg() -> None:
    built = start_at(small(), X0, Y0)
    fed, state = drive(FedAvgPlus(num_tuning_steps=0), built, 3)
    assert torch.equal(fed.collect(state.y), state.sent.expand(3, -1))
    plain, theirs = drive(FedAvg(), built, 3)
    assert fed.measure(state.x, state.y)["lower_loss"] == pytest.approx(plain.measure(*theirs)["lower_loss"], rel=1e-14)


def test_many_tuning_steps_reach_each_clients_own_minimiser_and_that_is_what_is_measured() -> None:
    task = small()
    closed = task.closed_form()
    fed, state = drive(FedAvgPlus(lr_lower=0.3, num_tuning_steps=120), start_at(task, X0, Y0), 2)
    own = closed._replace(local=True).lower_solution(X0)
    assert relative(fed.collect(state.y), own) < 1e-9
    s = closed.stacked
    losses = [y @ A @ y / 2 - y @ (B @ X0 + c) for y, A, B, c in zip(own, s["A"], s["B"], s["c"], strict=True)]
    assert fed.measure(state.x, state.y)["lower_loss"] == pytest.approx(np.mean(losses), rel=1e-12)


def test_who_is_not_in_the_cohort_keeps_its_copy_and_starts_from_the_initial_point() -> None:
    built, seen, before = (
        start_at(Quadratic(), np.ones(4), np.full(6, 0.3)),
        torch.zeros(5, dtype=torch.bool),
        torch.full((5, 6), 0.3, dtype=torch.float64),
    )
    here = torch.zeros(5, dtype=torch.int64)
    for fed, state in states(FedAvgPlus(), built, 4, cohort=Cohort(0.2), seed=2):
        present = fed.ledger.columns["gy"] > here
        here, seen, now = fed.ledger.columns["gy"].clone(), seen | present, fed.collect(state.y).clone()
        assert torch.equal((now != before).any(1), present)
        before = now
    assert not bool(seen.all())
    assert torch.equal(before[~seen], torch.full((int((~seen).sum()), 6), 0.3, dtype=torch.float64))


@pytest.mark.parametrize("num_tuning_steps", [0, 4])
def test_ledger_with_all_clients_is_that_of_fedavg_and_of_the_tuning_steps(num_tuning_steps: int) -> None:
    algorithm = FedAvgPlus(num_local_steps=2, num_tuning_steps=num_tuning_steps)
    for k, (fed, _) in enumerate(states(algorithm, small().build(), 3, batch_size=2)):
        ledger = fed.ledger.columns
        assert fed.ledger.rounds == k
        assert ledger["floats_up"].tolist() == [3 * k] * 3
        assert (
            ledger["floats_down"].tolist() == [3 * (k + 1) + 2 if k else 0] * 3
        )  # the initial point once, then each new y once
        assert ledger["gy"].tolist() == [(2 + num_tuning_steps) * k] * 3
        assert ledger["samples"].tolist() == [2 * (2 + num_tuning_steps) * k] * 3
        assert all(int(ledger[name].sum()) == 0 for name in ("gx", "fx", "fy", "hvp", "jvp"))


def test_ledger_with_cohorts() -> None:
    times, gy_before = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    last, down = torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    for fed, _ in states(FedAvgPlus(num_local_steps=2, num_tuning_steps=1), small().build(), 6, cohort=Cohort(0.34)):
        here = fed.ledger.columns["gy"] > gy_before
        gy_before = fed.ledger.columns["gy"].clone()
        down += here * (3 + 3 * ~last + 2 * (times == 0))
        times, last = times + here, here
        assert torch.equal(gy_before, 3 * times)
        assert torch.equal(fed.ledger.columns["floats_up"], 3 * times)
        assert torch.equal(fed.ledger.columns["floats_down"], down)


def test_nothing_travels_with_a_local_lower_level_and_a_private_x() -> None:
    fed, _ = drive(FedAvgPlus(), small(lower="local", upper="private").build(), 2)
    assert fed.ledger.rounds == fed.ledger.totals()["floats_up"] == fed.ledger.totals()["floats_down"] == 0


@pytest.mark.parametrize("lower", ["global", "local"])
def test_continues_from_a_checkpoint_bit_by_bit(lower: Any) -> None:
    check_continues(FedAvgPlus(num_local_steps=(2, 1, 3, 2)), small(num_clients=4, lower=lower).build())


def test_a_recorded_run_resumes_with_the_copies_at_their_clients(tmp_path: Any) -> None:
    built, options = start_at(small(), X0, Y0), {"cohort": Cohort(0.34), "dtype": torch.float64}
    whole = solve(*built, FedAvgPlus(), residuals=False, num_iterations=4, **options)
    solve(*built, FedAvgPlus(), residuals=False, num_iterations=1, record=tmp_path / "run", **options)
    again = solve(
        *built, FedAvgPlus(), residuals=False, num_iterations=4, record=tmp_path / "run", resume=True, **options
    )
    assert len(whole.y) == 3
    assert all(torch.equal(a["y"], b["y"]) for a, b in zip(whole.y, again.y, strict=True))
    assert again.rows[-1]["lower_loss"] == whole.rows[-1]["lower_loss"]
    assert again.ledger == whole.ledger
