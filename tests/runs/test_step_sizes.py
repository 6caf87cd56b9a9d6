import dataclasses

import numpy as np
import pytest
import torch

from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.federation.schedule import Schedule
from fedbilevel.runs.step_sizes import check_timescales, curvature, projection_radius, suggest_steps, upper_curvature
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.yardstick import drive


@pytest.mark.slow
@pytest.mark.parametrize("lower", ["global", "local"])
@pytest.mark.parametrize("weights", ["equal", "by_samples"])
def test_curvature_agrees_with_dense_eigenvalues(lower, weights):
    task = Quadratic(lower=lower, client_weights=weights)
    closed = task.closed_form()
    found = curvature(*task.build(), num_products=300)
    ends = [np.linalg.eigvalsh(A) for A in closed.stacked["A"]]
    largest = max(values[-1] for values in ends)
    assert largest <= found.largest * (1 + 1e-9)
    assert found.largest <= largest * len(ends) ** (1 / 16)
    if lower == "global":
        assert found.smallest == pytest.approx(np.linalg.eigvalsh(closed._mean(closed.stacked["A"]))[0], rel=1e-6)
    else:
        smallest = min(values[0] for values in ends)
        assert smallest / len(ends) ** (1 / 16) * (1 - 1e-6) <= found.smallest <= smallest * (1 + 1e-6)


def test_curvature_is_counted_in_the_ledger():
    num, n, dy, dx = 7, 5, 6, 4
    ledger = curvature(*Quadratic().build(), num_products=num).ledger
    assert ledger["rounds"] == 1 + num
    assert ledger["floats_up"] == n * (2 + num * dy)
    assert ledger["floats_down"] == n * (dx + dy + num * dy)
    assert ledger["hvp"] == n * 3 * num
    assert ledger["fy"] == 0


def test_the_radius_holds_every_clients_own_solution_wherever_y_starts():
    task = Quadratic()
    s, y = task.closed_form().stacked, task.closed_form().lower_solution(np.zeros(4))
    own = [np.linalg.norm(np.linalg.solve(A, D @ y - Dt)) for A, D, Dt in zip(s["A"], s["D"], s["Dt"], strict=True)]
    problem, clients = task.build()
    for start in (0.0, 5.0):
        moved = dataclasses.replace(problem, y0={"y": torch.full((6,), start)})
        assert max(own) < projection_radius(moved, clients) < 100 * max(own)


@pytest.mark.parametrize("lower", ["global", "local"])
def test_curvature_of_a_multiple_of_the_identity_and_of_a_flat_client(lower):
    scalar = Quadratic(dim_lower=1, lower=lower)
    found = curvature(*scalar.build())
    assert found.flattest == pytest.approx(min(float(A[0, 0]) for A in scalar.closed_form().stacked["A"]), rel=0.2)
    problem, clients = Quadratic(dim_lower=2, lower=lower).build()
    flat = [
        {
            **client,
            "train": {
                **client["train"],
                "A": np.broadcast_to(np.diag([1.0, float(i > 0)]), client["train"]["A"].shape),
            },
        }
        for i, client in enumerate(clients)
    ]
    found = curvature(problem, flat)
    assert found.flattest < 1e-6
    assert found.smallest == pytest.approx(0.8 if lower == "global" else found.flattest, rel=1e-6)


@pytest.mark.parametrize("upper", ["shared", "private"])
def test_upper_curvature_agrees_with_the_closed_form(upper):
    task = Quadratic(upper=upper)
    closed = task.closed_form()
    shape = closed.solution().shape
    zero = closed.hypergradient(np.zeros(shape)).ravel()
    matrix = np.stack(
        [closed.hypergradient(unit.reshape(shape)).ravel() - zero for unit in np.eye(int(np.prod(shape)))], axis=1
    )
    assert upper_curvature(*task.build(), num_products=60) == pytest.approx(
        np.abs(np.linalg.eigvals(matrix)).max(), rel=1e-2
    )


@pytest.mark.slow
def test_suggested_steps_are_stable_and_pass_their_own_check():
    task = Quadratic(data_seed=3)
    steps = suggest_steps(*task.build())
    method = FedBiO(
        num_local_steps=1, lr_upper=steps["lr_upper"], lr_lower=steps["lr_lower"], lr_system=steps["lr_system"]
    )
    fed, state = drive(method, task.build(), 1500)
    assert fed.measure(state.x, state.y)["distance"] < 1e-6
    assert check_timescales(method, *task.build()).ok


def test_upper_step_above_the_bound_fails_the_check_and_warns(capsys):
    with pytest.warns(UserWarning, match=r"lr_upper = 5 may be too large .* allows up to 0\.0"):
        report = check_timescales(FedBiO(lr_upper=5.0), *Quadratic().build())
    assert not report.ok
    assert "FAIL  two timescales  lr_upper = 5 may be too large" in capsys.readouterr().out


def test_algorithm_without_an_upper_step_passes_the_check_without_a_warning(recwarn):
    report = check_timescales(FedAvg(), *Quadratic().build(), show=False)
    assert report.ok
    assert "has no lr_upper" in str(report)
    assert not recwarn.list


def test_schedules_start_at_one_and_fall():
    schedule = Schedule(power=0.5, offset=3.0)
    assert schedule(1) == 1
    assert schedule(13) == pytest.approx(0.5)
    assert Schedule()(1000) == 1
