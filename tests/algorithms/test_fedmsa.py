"""FedMSA against its recursion in numpy, and its limit against the closed-form solution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.fedmsa import FedMSA
from fedbilevel.checks import check_algorithm
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.by_hand import Samples, global_directions, states
from support.numeric.yardstick import check_continues, drive, relative

STEPS = {"lr_upper": 0.03, "lr_lower": 0.1, "lr_system": 0.1}
THREE = {"num_clients": 3, "dim_upper": 2, "dim_lower": 3}
SCOPES = [(lower, upper) for lower in ("global", "local") for upper in ("shared", "private")]
PURPOSES = "B_y B_f1 B_f2 B_g1 B_g2"


def mean_of(share: Any, rows: list[dict[str, Any]], stays: dict[str, bool]) -> list[dict[str, Any]]:
    """Average what is sent; every client keeps the rest."""
    mean = {name: share @ np.stack([row[name] for row in rows]) for name in "xyu"}
    return [{name: row[name] if stays[name] else mean[name] for name in "xyu"} for row in rows]


@pytest.mark.parametrize("taus", [(3, 3, 3), (1, 4, 2)], ids=str)
@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_four_outer_iterations_follow_the_recursion(lower: Any, upper: Any, taus: Any) -> None:
    """The order is that of the authors' program: estimates first, then local steps, then means."""
    task = Quadratic(**THREE, lower=lower, upper=upper, cross=0.4, client_weights="by_samples")
    samples, share, rho = Samples(task, seed=5, batch_size=2), task.closed_form().share, 0.3
    stays = {"x": upper == "private", "y": lower == "local", "u": lower == "local"}
    rates = dict(zip("xyu", STEPS.values(), strict=True))
    at = lambda i, point, where: global_directions(samples, i, point, where, PURPOSES)
    points = [{"x": np.zeros(2), "y": np.zeros(3), "u": np.zeros(3)} for _ in range(3)]
    last: Any = None
    for r in range(4):
        if r == 0:
            h = [at(i, points[i], (0, 1, 0)) for i in range(3)]
        else:
            now, then = ([at(i, one[i], (r, 2, 0)) for i in range(3)] for one in (points, last))
            h = [{s: now[i][s] + (1 - rho) * (h[i][s] - then[i][s]) for s in "xyu"} for i in range(3)]
        h = mean_of(share, h, stays)
        ends = []
        for i in range(3):
            path, h_i = [points[i]], dict(h[i])
            for k in range(taus[i]):
                if k > 0:
                    new, old = at(i, path[k], (r + 1, 1, k)), at(i, path[k - 1], (r + 1, 1, k))
                    h_i = {s: h_i[s] + new[s] - old[s] for s in "xyu"}
                path.append({s: path[k][s] - rates[s] * h_i[s] for s in "xyu"})
            ends.append(path[-1])
        last, points = points, mean_of(share, ends, stays)
    settings = FedMSA(**STEPS, momentum=rho, num_local_steps=taus[0] if len({*taus}) == 1 else taus)
    fed, state = drive(settings, task.build(), 4, seed=5, batch_size=2)
    for name in "xyu":
        expected = np.stack([one[name] for one in points])
        assert np.abs(expected).max() > 0.05
        found = fed.collect(getattr(state, name)).expand(3, -1)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("taus", [5, (1, 4, 2)], ids=str)
@pytest.mark.parametrize("weights", ["equal", "by_samples"])
def test_local_steps_leave_no_drift(weights: Any, taus: Any) -> None:
    task = Quadratic(**THREE, client_weights=weights)
    closed = task.closed_form()
    x = closed.solution()
    _, state = drive(FedMSA(**STEPS, num_local_steps=taus), task.build(), 200)
    for name, target in {"x": x, "y": closed.lower_solution(x), "u": closed.system_solution(x)}.items():
        assert relative(getattr(state, name), target) < 1e-5, name
    _, plain = drive(FedBiO(**STEPS, num_local_steps=taus), task.build(), 200)
    assert relative(plain.x, x) > 1e-2


@pytest.mark.parametrize(("lower", "upper"), SCOPES[1:])
def test_every_scope_reaches_its_solution(lower: Any, upper: Any) -> None:
    task = Quadratic(**THREE, lower=lower, upper=upper)
    fed, state = drive(FedMSA(**{**STEPS, "lr_upper": 0.08}, num_local_steps=4), task.build(), 400)
    assert relative(fed.collect(state.x), task.closed_form().solution()) < 1e-5


@pytest.mark.parametrize("rho", [0.1, 1.0])
def test_with_whole_batches_the_estimates_are_the_mean_directions(rho: float) -> None:
    task = Quadratic(**THREE, cross=0.4)
    samples = Samples(task)
    for _, state in states(FedMSA(**STEPS, num_local_steps=4, momentum=rho), task.build(), 4):
        point = {name: getattr(state, name).numpy() for name in "xyu"}
        at = [global_directions(samples, i, point, (0, 0, 0), PURPOSES) for i in range(3)]
        for name, estimate in zip("xyu", ("nu", "om", "q"), strict=True):
            assert relative(getattr(state, estimate), np.mean([row[name] for row in at], axis=0)) < 1e-12


def test_cohorts_leave_an_error_that_falls_with_the_momentum() -> None:
    """The error of an estimate has about the variance rho / (2 - rho) of a cohort's direction."""
    task = Quadratic(**{**THREE, "num_clients": 6})
    y = task.closed_form().lower_solution(task.closed_form().solution())

    def error(rho: float) -> float:
        algorithm = FedMSA(**{**STEPS, "lr_upper": 0.01}, num_local_steps=2, momentum=rho)
        path = [state.y for _, state in states(algorithm, task.build(), 600, cohort=Cohort(0.34))][200:]
        return float(np.mean([relative(one, y) ** 2 for one in path]) ** 0.5)

    rough, smooth = error(1.0), error(0.05)
    assert rough > 0.02
    assert smooth < 0.6 * rough


@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_the_ledger_counts_what_the_module_says(lower: Any, upper: Any) -> None:
    task = Quadratic(**THREE, lower=lower, upper=upper)
    fed, _ = drive(FedMSA(num_local_steps=4), task.build(), 2, batch_size=2)
    floats = 2 * (upper == "shared") + 2 * 3 * (lower == "global")
    assert fed.ledger.rounds == (5 if floats else 0)
    for column in ("floats_up", "floats_down"):
        assert fed.ledger.columns[column].tolist() == [5 * floats] * 3
    for column in ("gy", "fx", "fy", "hvp", "jvp"):
        assert fed.ledger.columns[column].tolist() == [1 + 2 * 8] * 3


def test_a_client_that_missed_the_first_round_takes_the_averaged_point_as_its_old_point() -> None:
    """Then its share of R2 is rho d_i(s+) + (1 - rho) e."""
    task, rho = Quadratic(**THREE), 0.3
    samples, drops = Samples(task), lambda iteration, call: [0, 1] if (iteration, call) == (1, 2) else [2] * (call == 1)
    algorithm = FedMSA(**STEPS, num_local_steps=2, momentum=rho)
    (_, before), (_, after) = states(algorithm, task.build(), 1, drops=drops)
    point = {name: getattr(after, name).numpy() for name in "xyu"}
    d = global_directions(samples, 2, point, (0, 0, 0), PURPOSES)
    for name, estimate in zip("xyu", ("nu", "om", "q"), strict=True):
        expected = rho * d[name] + (1 - rho) * getattr(before, estimate).numpy()
        np.testing.assert_allclose(getattr(after, estimate), expected, rtol=0, atol=1e-12)


def test_it_keeps_the_contract_of_algorithms() -> None:
    report = check_algorithm(FedMSA(), show=False)
    assert report.ok, str(report)
    check_continues(FedMSA(num_local_steps=(2, 1, 3)), Quadratic(**THREE).build())


def test_steps_of_auto_reach_the_solution() -> None:
    auto = dict.fromkeys(("lr_upper", "lr_lower", "lr_system"), "auto")
    result = fb.solve(*Quadratic(**THREE).build(), "fedmsa", num_iterations=150, dtype=torch.float64, **auto)
    assert result.rows[-1]["distance"] < 0.1 * result.rows[0]["distance"]
