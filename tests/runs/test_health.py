"""Decisions about measurements alone; tests/runs/test_recovery.py runs whole runs."""

import math
import random

import pytest

from fedbilevel.runs.health import PATIENCE, WINDOW, Health


def fed(losses, lower=None, scale=1.0, **figures):
    """Return the health and the answers after a sequence of measurements."""
    health = Health()
    lower = lower or [1.0] * len(losses)
    rows = [
        {"upper_loss": scale * one, "lower_loss": scale * other, **{name: some[i] for name, some in figures.items()}}
        for i, (one, other) in enumerate(zip(losses, lower, strict=True))
    ]
    return health, [health.add(row) for row in rows]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_loss_far_above_its_best_in_three_measurements_is_divergence_at_any_scale(scale):
    _, said = fed([2.0, 1.0, 30.0, 40.0, 1.0, 30.0, 30.0, 30.0], [1.0, 1.0, 2.0, 2.0, 1.0, 2.0, 2.0, 2.0], scale)
    assert [bool(one) for one in said] == [False] * 7 + [True]
    assert said[-1].startswith("upper_loss rose to")


def test_loss_beyond_all_measure_or_not_finite_counts_at_once():
    assert fed([2.0, 1.0, 1e27])[1][-1].startswith("upper_loss rose to 1e+27")
    assert fed([2.0, 1.0, math.nan])[1][-1] == "upper_loss is not finite"
    assert fed([2.0, 1.0], [1.0, math.inf])[1][-1] == "lower_loss is not finite"


def test_upper_loss_above_its_start_is_wrong_only_if_the_lower_loss_is_too():
    losses = [2.0, 1.0, 4.0, 4.0, 4.0]
    assert fed(losses, [3.0, 2.0, 4.0, 4.0, 4.0])[1][-1].endswith("lower_loss exceeds its first value")
    assert fed(losses, [3.0, 2.0, 1.0, 1.0, 1.0])[1] == [""] * 5  # y goes to y*(x), where the upper loss is higher


def test_residual_that_grows_is_wrong_only_if_the_upper_loss_is_worse_than_at_the_start():
    grown = [1.0, 1.0, 20.0, 30.0, 40.0]
    assert fed([2.0, 2.0, 2.1, 2.1, 2.1], residual=grown)[1][-1].startswith("residual grew from 1 to 40")
    assert fed([2.0, 1.0, 0.5, 0.2, 0.1], residual=grown)[1] == [""] * 5  # f_y vanishes, so its share in it grows


def test_y_that_falls_to_zero_while_the_upper_loss_returns_is_a_collapse():
    health = Health()
    rows = [(2.0, 0.0), (0.5, 10.0), (2.0, 0.05), (2.0, 0.01), (2.0, 0.01)]
    said = [health.add({"upper_loss": loss, "lower_loss": 1.0}, norm) for loss, norm in rows]
    assert said[:-1] == [""] * 4
    assert said[-1].startswith("the norm of y fell from 10 to 0.01")


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_a_falling_loss_triggers_nothing(seed):
    """Log-normal noise of 50 %, as of batches of a few samples."""
    draw = random.Random(seed)
    noisy = lambda start, end: [
        (end + (start - end) * math.exp(-i / 10)) * math.exp(draw.gauss(0, 0.5)) for i in range(100)
    ]
    health, said = fed(noisy(2.3, 0.3), noisy(2.3, 0.1), lower_gradient=noisy(1, 0.2), residual=noisy(1, 0.3))
    assert said == [""] * 100
    assert not health.is_still()


def test_loss_that_starts_at_zero_may_rise_to_its_plateau():
    _, said = fed([0.0] + [5.0 * (1 - math.exp(-i / 3)) for i in range(1, 30)], [2.0 - 0.05 * i for i in range(30)])
    assert said == [""] * 30


def test_still_figures_are_converged_and_those_of_the_start_are_stalled():
    health, _ = fed([2.0, 1.0] + [0.5] * WINDOW, lower_gradient=[1.0, 0.5] + [0.2] * WINDOW)
    assert health.is_still()
    assert not health.is_stalled()
    health, _ = fed([2.0] * WINDOW, lower_gradient=[1.0] * WINDOW)
    assert health.is_still()
    assert health.is_stalled()
    falling = [0.5**i for i in range(WINDOW)]
    assert not fed([2.0] * WINDOW, lower_gradient=falling)[0].is_still()  # y is still on its way


def test_summary_survives_a_checkpoint():
    health, _ = fed([2.0, 1.0, 30.0, 40.0], [1.0, 1.0, 2.0, 2.0])
    again = Health(**health.asdict())
    assert again == health
    assert PATIENCE == 3
    assert again.add({"upper_loss": 30.0, "lower_loss": 2.0})


def test_end_of_a_short_run_is_judged_mildly_and_that_of_a_long_run_strictly():
    health, _ = fed([2.0, 1.0])
    row = {"upper_loss": 100.0, "lower_loss": 2.0}
    assert health.wrong_at_end({**row, "iteration": 3}) == ""
    assert health.wrong_at_end({**row, "iteration": 30}).startswith("upper_loss rose to 100")
    assert health.wrong_at_end({**row, "upper_loss": 1e27, "iteration": 3}).startswith("upper_loss rose to 1e+27")
