"""ShroFBO against dense algebra and closed forms; unequal work leaves no bias beyond the drift."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_simfbo import (
    SMALL,
    STEPS,
    check_against_dense,
    check_ledger,
    check_mean_over_cohorts,
    check_resume,
    check_unequal_work,
    scopes,
)

from fedbilevel.algorithms.shrofbo import ShroFBO
from fedbilevel.algorithms.simfbo import SimFBO
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.yardstick import drive, fixed_point, relative


def test_reaches_the_closed_form_solution() -> None:
    task = Quadratic(**SMALL)
    _, state = drive(ShroFBO(**STEPS, minibatches="shared"), task.build(), 220)
    assert relative(state.x, task.closed_form().solution()) < 1e-8


@given(st.data())
def test_equals_dense_algebra(data: st.DataObject) -> None:
    check_against_dense(ShroFBO, data, divide=True)


def test_residual_under_unequal_work_falls_with_the_local_step() -> None:
    task = Quadratic(**SMALL)
    closed = task.closed_form()
    check_unequal_work(ShroFBO, closed, closed._replace(share=np.array([1, 2, 3]) / 6), task.build())


@scopes
def test_unequal_work_in_every_scope(lower: str, upper: str) -> None:
    task = Quadratic(**SMALL, lower=lower, upper=upper)  # type: ignore[arg-type]
    assert ShroFBO().check_scopes(task.build().problem.scopes) == []
    errors = []
    for scale in (0.01, 0.001):
        factors = {f"server_{name}": 1 / scale for name in STEPS}
        point, radius = fixed_point(
            ShroFBO(**{name: 0.5 * scale * lr for name, lr in STEPS.items()}, **factors, num_local_steps=(1, 2, 3)),
            task.build(),
        )
        assert radius < 0.995
        errors.append(relative(point["x"], task.closed_form().solution()))
    if (lower, upper) == ("local", "private"):  # nobody is averaged with anybody: no drift
        assert max(errors) < 1e-11
    else:
        assert errors[0] < 1e-2
        assert errors[0] / errors[1] == pytest.approx(10, rel=0.02)


@pytest.mark.parametrize("tau", [1, 3, (2, 2, 2)])
def test_is_simfbo_when_work_is_equal(tau: int | tuple[int, ...]) -> None:
    built = Quadratic(**SMALL).build()
    settings = {**STEPS, "num_local_steps": tau, "server_lr_upper": 0.7, "radius": 0.5}
    one, a = drive(ShroFBO(**settings), built, 3, batch_size=2)
    two, b = drive(SimFBO(**settings), built, 3, batch_size=2)
    for value, other in zip(a, b, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-13, atol=1e-14)
    assert one.ledger.totals() == two.ledger.totals()


def test_rho_does_not_depend_on_the_cohort() -> None:
    check_mean_over_cohorts(ShroFBO(**STEPS, num_local_steps=(1, 2, 4)))


@given(st.data())
def test_ledger(data: st.DataObject) -> None:
    check_ledger(ShroFBO, data)


@scopes
def test_resume_is_bit_identical(lower: str, upper: str) -> None:
    check_resume(ShroFBO(**STEPS, num_local_steps=(1, 2, 3, 1), radius=1.0), lower, upper)
