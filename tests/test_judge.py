"""The external judge: its measures against differences and dense algebra, its rivals against FedBiO."""

from __future__ import annotations

import json
import math

import pytest
import torch

from benchmarks.judge import problems, rivals, runs
from fedbilevel.federation.schedule import Schedule
from fedbilevel.runs.solve import solve

SMALL = {"num_train": 256, "num_val": 128, "d_y": 8, "d_x": 3}


def small():
    return problems.quadratics(**SMALL)


@pytest.mark.parametrize("make", [small, problems.logistic_digits])
def test_the_gradient_is_the_difference_of_the_value_function(make):
    judged = make()
    x = judged.x0.double()
    step = 1e-5
    slopes = [
        (judged.measures(x + step * unit)["value"] - judged.measures(x - step * unit)["value"]) / (2 * step)
        for unit in torch.eye(len(x), dtype=torch.float64)
    ]
    assert sum(slope**2 for slope in slopes) == pytest.approx(judged.measures(x)["gradient"], rel=1e-5)


@pytest.mark.parametrize("make", [small, problems.logistic_digits])
def test_the_curvature_is_the_second_derivative(make):
    judged = make()
    train = {name: one.double() for name, one in judged.train.items()}
    x, y = judged.x0.double(), 0.1 + judged.y0.double()
    exact = torch.autograd.functional.hessian(lambda y: judged.lower(x, y, train).mean(), y)
    assert torch.allclose(judged.curvature(x, y, train), exact, atol=1e-10)


def test_quadratics_have_the_spectra_of_the_benchmark():
    judged = problems.quadratics(num_train=32_768, num_val=1024, d_y=20, d_x=5)
    values = torch.linalg.eigvalsh(judged.curvature(judged.x0, judged.y0, judged.train))
    assert values[0] == pytest.approx(0.1, rel=0.1)
    assert values[-1] == pytest.approx(1.0, rel=0.1)
    cross = torch.linalg.svdvals(judged.train["c"].T @ judged.train["e"] / 32_768)
    assert cross[0] == pytest.approx(0.1, rel=0.3)


def test_soba_with_full_batches_is_fedbio_with_one_client_and_one_local_step():
    judged, step, num = small(), 0.1, 40
    sizes = sum(len(some["a"]) for some in judged.roles().values())
    x = rivals.soba(judged, step, 0.5, 0, num * sizes, batch=10**6)
    result = solve(
        judged.problem(), [judged.client()], "fedbio", num_iterations=num, num_local_steps=1, lr_lower=step,
        lr_system=step, lr_upper=step / 0.5, schedule=Schedule(power=0.5, offset=0), residuals=False,
    )  # fmt: skip
    assert torch.allclose(x, result.x["x"], atol=1e-5)
    assert not torch.allclose(x, judged.x0, atol=1e-2)


@pytest.mark.parametrize("name", list(rivals.RIVALS))
def test_rivals_lower_the_gradient_of_the_value_function(name):
    judged = small()
    x = rivals.RIVALS[name](judged, 0.1, 0.3, 0, 60_000, batch=16)
    assert judged.measures(x)["gradient"] < 0.05 * judged.measures(judged.x0)["gradient"]


def test_directions_of_saba_have_no_variance_at_a_fixed_point():
    """At a fixed point, every row of the memory is known after a pass, and directions are the full mean."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 3, generator=draw)
    average = rivals._Average(5, rows[0])
    for k in range(5):
        average.reduced(k, rows[k])
    assert torch.allclose(average.reduced(2, rows[2]), rows.mean(0), atol=1e-6)


def test_a_sample_is_counted_once_for_derivatives_that_share_its_minibatch():
    judged = small()
    levels = rivals.Levels(judged, 0, batch=16)
    x, y = judged.x0, judged.y0
    levels.lower(x, y, levels.train.next()[1], y)
    levels.both(x, y, levels.val.next()[1], upper=True)
    assert levels.spent == 32
    seen = [levels.train.next()[0] for _ in range(levels.train.num - 1)]
    assert len(set(seen)) == len(seen)  # an order without repetition until the pass ends


def test_every_tuned_method_has_the_same_trials_and_a_seed_of_its_own():
    some, other = runs.trials("quadratics", "SOBA", 100), runs.trials("quadratics", "fedbio", 100)
    assert [one[2:] for one in some] == [one[2:] for one in other]
    assert {one.seed for one in some} == {runs.TUNING_SEED}


def test_the_command_writes_a_table_with_diverged_rows_last(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "STEPS", (0.1,))
    monkeypatch.setattr(runs, "RATIOS", (1.0,))
    monkeypatch.setitem(runs.PROBLEMS, "small", small)

    class Here:
        imap_unordered = staticmethod(map)

    found = runs.judge("small", ["SOBA", "fedbio", "self_tuned"], 4000, 2, Here)
    assert [row["trials"] for row in sorted(found, key=lambda row: row["method"])] == [1, 1, 0]
    sizes = [row["gradient"] for row in found]
    assert sizes == sorted(sizes)
    lost = runs.Found(runs.Task("small", "SABA", 1.0, 1.0, 0, 1), math.inf, math.inf, 1, 0.0)
    table = runs.rows(
        [lost, lost._replace(task=lost.task._replace(method="F2SA"), gradient=1.0, value=1.0)], {"SABA": 1, "F2SA": 1}
    )
    assert [row["gradient"] for row in table] == [1.0, "diverged"]
    json.dumps(table, allow_nan=False)
