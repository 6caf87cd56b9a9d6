import dataclasses

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.federation.schedule import Schedule
from fedbilevel.runs import step_sizes
from fedbilevel.runs.step_sizes import curvature, projection_radius, suggest_steps
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
    assert ledger["floats_up"] == n * (3 + num * dy)
    assert ledger["floats_down"] == n * (dx + dy + num * dy)
    assert ledger["hvp"] == n * 2 * num
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


@pytest.mark.slow
def test_suggested_steps_are_stable():
    task = Quadratic(data_seed=3)
    method = FedBiO(num_local_steps=1)
    steps = suggest_steps(*task.build(), method)
    fed, state = drive(dataclasses.replace(method, **steps), task.build(), 1500)
    assert fed.measure(state.x, state.y)["distance"] < 1e-6


def test_suggested_steps_are_those_that_a_run_measures_for_its_own_settings():
    built = Quadratic().build()
    steps = suggest_steps(*built, "fedbio", seconds=1e6)  # all samples, also on a busy machine
    auto = dict.fromkeys(steps, "auto")
    assert fb.solve(*built, "fedbio", num_iterations=1, dtype=torch.float64, **auto).steps == pytest.approx(steps)
    assert suggest_steps(*built, "fedavg").keys() == {"lr_lower"}
    assert suggest_steps(*built, "pfedme").keys() == {"lr_lower", "lr_model"}
    assert suggest_steps(*built, "hgp", strategy="loop", seconds=1e6)["lr_lower"] == pytest.approx(steps["lr_lower"])


def test_suggestion_uses_minibatches_where_all_samples_take_too_long(monkeypatch):
    problem, clients = Quadratic(num_samples=8).build()
    sizes = []
    real = step_sizes.measured_steps
    monkeypatch.setattr(
        step_sizes, "measured_steps", lambda *given, **more: sizes.append(more["batch_size"]) or real(*given, **more)
    )
    monkeypatch.setattr(step_sizes, "_seconds", lambda action: 1.0)  # per 12 samples
    suggest_steps(problem, clients, seconds=50.0)
    suggest_steps(problem, clients, seconds=1e6)
    assert sizes == [5, None]


def network():
    """A lower level that is not convex: a network with two layers."""
    problem, clients = Quadratic(dim_lower=6).build()

    def lower(x, y, batch):
        hidden = torch.tanh(batch["c"][:, :2] @ y["y"][:4].view(2, 2))
        return (hidden @ y["y"][4:] - batch["c"][:, 2]) ** 2 + (x["x"] ** 2).sum() * (y["y"] ** 2).sum() / 100

    y0 = {"y": torch.tensor([0.1, -0.2, 0.3, 0.1, 0.5, -0.5])}
    x0 = {"x": torch.ones(4)}
    return dataclasses.replace(problem, lower=lower, y0=y0, x0=x0, diagnostics=None), clients


def test_lower_level_that_is_not_convex_has_steps_a_radius_and_one_warning():
    problem, clients = network()
    found = curvature(problem, clients)
    assert found.smallest < 0 < found.flattest == pytest.approx(0.02 * found.largest)
    assert 0 < projection_radius(problem, clients) < 1e4
    with pytest.warns(UserWarning, match="the lower level is not convex near its start: its curvature is between -"):
        steps = suggest_steps(problem, clients)
    assert all(step > 0 for step in steps.values())


def test_every_round_of_a_suggestion_is_shown_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(step_sizes.sys.stderr, "isatty", lambda: True, raising=False)
    suggest_steps(*Quadratic().build())
    assert "measuring step sizes: round 18 \r" in capsys.readouterr().err


def test_schedules_start_at_one_and_fall():
    schedule = Schedule(power=0.5, offset=3.0)
    assert schedule(1) == 1
    assert schedule(13) == pytest.approx(0.5)
    assert Schedule()(1000) == 1


def test_a_linear_schedule_falls_to_its_last_step_and_multiplies_the_other_decay():
    linear = Schedule(end=5)
    assert [linear(t) for t in (1, 2, 3, 4, 5, 6, 500)] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    both = Schedule(power=0.5, offset=0.0, end=10)
    assert both(4) == pytest.approx(0.5 * 0.7)
