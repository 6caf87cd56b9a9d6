"""FedBiO-CV against its recursion in numpy, and its limit against the closed-form solution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.fedbio_cv import FedBiOCV
from fedbilevel.checks import check_algorithm
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.by_hand import Samples, global_directions
from support.numeric.yardstick import check_continues, drive, relative

STEPS = {"lr_upper": 0.03, "lr_lower": 0.1, "lr_system": 0.1}
THREE = {"num_clients": 3, "dim_upper": 2, "dim_lower": 3}
SCOPES = [(lower, upper) for lower in ("global", "local") for upper in ("shared", "private")]


@pytest.mark.parametrize("taus", [(3, 3, 3), (1, 4, 2)], ids=str)
@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_four_outer_iterations_follow_the_recursion(lower: Any, upper: Any, taus: Any) -> None:
    task = Quadratic(**THREE, lower=lower, upper=upper, cross=0.4, client_weights="by_samples")
    samples, share = Samples(task, seed=5, batch_size=2), task.closed_form().share
    stays = {"x": upper == "private", "y": lower == "local", "u": lower == "local"}
    rates = dict(zip("xyu", STEPS.values(), strict=True))
    start = {"x": np.zeros(2), "y": np.zeros(3), "u": np.zeros(3)}
    points, c = ([{name: value.copy() for name, value in start.items()} for _ in range(3)] for _ in range(2))
    for k in range(1, 5):
        mean_c = {name: share @ np.stack([one[name] for one in c]) for name in "xyu"}
        new_c = []
        for i in range(3):
            total = {name: np.zeros_like(value) for name, value in start.items()}
            for j in range(taus[i]):
                d = global_directions(samples, i, points[i], (k, 1, j), "B_y B_f1 B_f2 B_g1 B_g2")
                shift = {name: 0 if stays[name] else mean_c[name] - c[i][name] for name in "xyu"}
                points[i] = {name: points[i][name] - rates[name] * (d[name] + shift[name]) for name in "xyu"}
                total = {name: total[name] + d[name] for name in "xyu"}
            new_c.append({name: total[name] / taus[i] for name in "xyu"})
        for name in "xyu":
            if not stays[name]:
                mean = share @ np.stack([one[name] for one in points])
                points = [{**one, name: mean} for one in points]
        c = new_c
    settings = FedBiOCV(**STEPS, num_local_steps=taus[0] if len({*taus}) == 1 else taus)
    fed, state = drive(settings, task.build(), 4, seed=5, batch_size=2)
    for name in "xyu":
        expected = np.stack([one[name] for one in points])
        found = fed.collect(getattr(state, name)).expand(3, -1)
        assert np.abs(expected).max() > 0.05
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("taus", [5, (1, 4, 2)], ids=str)
@pytest.mark.parametrize("weights", ["equal", "by_samples"])
def test_local_steps_leave_no_drift(weights: Any, taus: Any) -> None:
    task = Quadratic(**THREE, client_weights=weights)
    closed = task.closed_form()
    x = closed.solution()
    _, state = drive(FedBiOCV(**STEPS, num_local_steps=taus), task.build(), 200)
    for name, target in {"x": x, "y": closed.lower_solution(x), "u": closed.system_solution(x)}.items():
        assert relative(getattr(state, name), target) < 1e-5, name
    for name in ("c_x", "c_y", "c_u"):
        assert float(getattr(state, name).abs().max()) < 1e-4
    _, plain = drive(FedBiO(**STEPS, num_local_steps=taus), task.build(), 200)
    assert relative(plain.x, x) > 1e-2


def test_cohorts_of_equal_clients_and_clients_that_drop_leave_no_drift_either() -> None:
    task = Quadratic(**THREE)
    drops = lambda iteration, call: [iteration % 3] if iteration % 2 else []
    for some in ({"cohort": Cohort(0.67)}, {"drops": drops}):
        fed, state = drive(FedBiOCV(**STEPS, num_local_steps=3), task.build(), 400, **some)
        assert relative(state.x, task.closed_form().solution()) < 1e-5
        for name, place in {"c_x": 0, "c_y": 1, "c_u": 2}.items():
            mean = fed.host.memory.rows[f"c.{place}"].mean(0)
            torch.testing.assert_close(getattr(state, name), mean, rtol=0, atol=1e-12)


def test_one_local_step_per_round_is_fedbio() -> None:
    """The mean of c - c_i over clients is zero, so all control variates cancel."""
    task = Quadratic(**THREE)
    _, plain = drive(FedBiO(**STEPS, num_local_steps=1), task.build(), 5)
    _, state = drive(FedBiOCV(**STEPS, num_local_steps=1), task.build(), 5)
    torch.testing.assert_close(state.x, plain.x, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_the_ledger_counts_what_the_module_says(lower: Any, upper: Any) -> None:
    task = Quadratic(**THREE, lower=lower, upper=upper)
    fed, _ = drive(FedBiOCV(num_local_steps=4), task.build(), 2, batch_size=2)
    floats = 2 * 2 * (upper == "shared") + 4 * 3 * (lower == "global")
    assert fed.ledger.rounds == (2 if floats else 0)
    for column in ("floats_up", "floats_down"):
        assert fed.ledger.columns[column].tolist() == [2 * floats] * 3
    for column in ("gy", "fx", "fy", "hvp", "jvp"):
        assert fed.ledger.columns[column].tolist() == [8] * 3


def test_it_keeps_the_contract_of_algorithms() -> None:
    report = check_algorithm(FedBiOCV(), show=False)
    assert report.ok, str(report)
    check_continues(FedBiOCV(), Quadratic(**THREE).build())


def test_steps_of_auto_reach_the_solution() -> None:
    auto = dict.fromkeys(("lr_upper", "lr_lower", "lr_system"), "auto")
    result = fb.solve(*Quadratic(**THREE).build(), "fedbio_cv", num_iterations=150, dtype=torch.float64, **auto)
    assert result.rows[-1]["distance"] < 0.1 * result.rows[0]["distance"]
