"""The penalty method in numpy, client by client; its bias by dense algebra, and what it costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_adafbio import SCOPES, SMALL

from fedbilevel.algorithms.penalty import Penalty
from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.problem.problem import Scopes
from fedbilevel.tasks.quadratic import ClosedForm, Quadratic
from support.numeric.by_hand import Samples, fx, fy, gy
from support.numeric.yardstick import drive, fixed_point, relative

STEPS = {"lr_upper": 0.05, "lr_lower": 0.25}


def by_hand(
    algorithm: Penalty, task: Quadratic, num: int, batch_size: int | None, absent: Callable[[int, int], Any]
) -> dict[str, np.ndarray]:
    samples, m = Samples(task, batch_size=batch_size), task.num_clients
    taus = (
        algorithm.num_local_steps if isinstance(algorithm.num_local_steps, tuple) else (algorithm.num_local_steps,) * m
    )
    x, y, z = np.zeros((m, task.dim_upper)), np.zeros((m, task.dim_lower)), np.zeros((m, task.dim_lower))
    for iteration in range(1, num + 1):
        lam = algorithm.penalty * algorithm.penalty_growth ** (iteration - 1) + algorithm.penalty_increment * (
            iteration - 1
        )
        lam = lam if algorithm.max_penalty is None else min(lam, algorithm.max_penalty)
        here = [i for i in range(m) if i not in absent(iteration, 1)]
        for i in here:
            for step in range(taus[i]):
                upper, lower, cross = (
                    samples.drawn(i, role, name, (iteration, 1, step))
                    for role, name in (("val", "B_f"), ("train", "B_g"), ("train", "B_x"))
                )
                gx = lambda y, cross=cross: -cross["B"].mean(0).T @ y
                dx = fx(upper, x[i], y[i]) + lam * (gx(y[i]) - gx(z[i]))
                dy = fy(upper, x[i], y[i]) + lam * gy(lower, x[i], y[i])
                dz = gy(lower, x[i], z[i])
                x[i], y[i], z[i] = (
                    x[i] - algorithm.lr_upper * dx,
                    y[i] - algorithm.lr_lower / (1 + lam) * dy,
                    z[i] - algorithm.lr_lower * dz,
                )
        for rows, kept in ((x, task.upper == "private"), (y, task.lower == "local"), (z, task.lower == "local")):
            if not kept:
                rows[:] = rows[here].mean(0)
    return {"x": x, "y": y, "d": z - y}


@pytest.mark.parametrize(
    "growth",
    [{}, {"penalty_growth": 3.0, "max_penalty": 20.0}, {"penalty_increment": 4.0}],
    ids=["constant", "growing by a factor", "growing by a sum"],
)
@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_three_outer_iterations_by_hand_on_minibatches_with_unequal_work_and_drops(lower, upper, growth):
    task = Quadratic(**SMALL, lower=lower, upper=upper)
    algorithm = Penalty(**STEPS, penalty=3.0, num_local_steps=(3, 1, 2), **growth)
    drops = lambda iteration, call: [iteration % 3]
    fed, state = drive(algorithm, task.build(), 3, batch_size=2, drops=drops)
    for name, expected in by_hand(algorithm, task, 3, 2, drops).items():
        np.testing.assert_allclose(fed.collect(getattr(state, name)).expand(3, -1), expected, rtol=1e-11, atol=1e-12)


def penalty_solution(closed: ClosedForm, lam: float) -> np.ndarray:
    """Solve for x where the gradient of the penalised problem vanishes.

    The gradient is affine in x, with J' = -B and y_lam, z from their normal equations."""
    s, n = closed.stacked, len(closed.share)
    shape = (n, s["B"].shape[2]) if closed.private else (s["B"].shape[2],)
    lower = (
        (lambda rows: rows)
        if closed.local
        else (lambda rows: np.broadcast_to(np.tensordot(closed.share, rows, axes=1), rows.shape))
    )

    def gradient(x: np.ndarray) -> np.ndarray:
        xs = np.broadcast_to(x, (n, shape[-1]))
        right = np.einsum("nij,nj->ni", s["B"], xs) + s["c"]
        solve = lambda matrix, rows: np.linalg.solve(lower(matrix), lower(rows)[..., None])[..., 0]
        y, z = solve(s["D"] + lam * s["A"], s["Dt"] + lam * right), solve(s["A"], right)
        blocks = np.einsum("nij,nj->ni", s["R"], xs) - s["r"] - lam * np.einsum("nij,ni->nj", s["B"], y - z)
        return blocks if closed.private else closed.share @ blocks

    zero = gradient(np.zeros(shape)).ravel()
    columns = np.stack([gradient(unit.reshape(shape)).ravel() - zero for unit in np.eye(len(zero))], axis=1)
    return np.linalg.solve(columns, -zero).reshape(shape)


@pytest.mark.parametrize("lam", [1.0, 10.0, 300.0])
@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_it_converges_to_the_solution_of_the_penalised_problem(lower, upper, lam):
    task = Quadratic(**SMALL, lower=lower, upper=upper)
    point, radius = fixed_point(Penalty(**STEPS, penalty=lam, num_local_steps=1), task.build())
    assert radius < 1
    np.testing.assert_allclose(point["x"], penalty_solution(task.closed_form(), lam), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_the_bias_falls_like_the_inverse_of_the_weight(lower, upper):
    closed = Quadratic(**SMALL, lower=lower, upper=upper).closed_form()
    far = [relative(penalty_solution(closed, lam), closed.solution()) for lam in (10.0, 100.0, 1000.0, 10000.0)]
    assert far[0] > 1e-3
    assert far[1] / far[2] == pytest.approx(10, rel=0.1)
    assert far[2] / far[3] == pytest.approx(10, rel=0.01)


def test_a_growing_weight_removes_the_bias():
    task = Quadratic(**SMALL)
    closed = task.closed_form()
    algorithm = Penalty(
        lr_upper=0.25, lr_lower=0.4, num_local_steps=1, penalty=1.0, penalty_growth=1.3, max_penalty=1e5
    )
    _, state = drive(algorithm, task.build(), 120)
    assert relative(state.x, closed.solution()) < 1e-4
    assert relative(penalty_solution(closed, 1.0), closed.solution()) > 0.05


def test_noise_of_samples_is_not_multiplied_by_the_weight():
    """y and z start at the same point and use the same samples, so they differ by O(1/lam).

    Hence lam times the difference does not grow with lam."""
    built = Quadratic(**SMALL, noise=0.9).build()
    small, large = (
        drive(Penalty(**STEPS, penalty=lam, num_local_steps=1), built, 1, batch_size=1)[1] for lam in (1.0, 1e9)
    )
    assert torch.equal(small.x, large.x)  # lam (g_x(y) - g_x(z)) is exactly zero at y = z
    assert float(small.d.norm()) > 1e-2
    assert float(large.d.norm()) < 1e-7


def test_a_client_that_joins_late_starts_z_where_y_starts():
    built = Quadratic(**SMALL, lower="local", upper="private").build()
    problem = dataclasses.replace(built.problem, y0={"y": torch.tensor([1.0, -2.0, 0.5])})
    algorithm = Penalty(**STEPS, num_local_steps=2)
    prompt, first = drive(algorithm, built._replace(problem=problem), 1)
    late, second = drive(
        algorithm, built._replace(problem=problem), 2, drops=lambda iteration, call: [1] if iteration == 1 else []
    )
    for name in "xyd":
        assert torch.equal(prompt.collect(getattr(first, name))[1], late.collect(getattr(second, name))[1])
        assert not torch.equal(prompt.collect(getattr(first, name))[0], late.collect(getattr(second, name))[0])


@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_no_scope_is_warned_of(lower, upper):
    assert Penalty().check_scopes(Scopes(lower, upper)) == []


@given(st.data())
def test_the_ledger_holds_what_the_docstring_says(data):
    lower, upper = data.draw(st.sampled_from(SCOPES))
    dx, dy, num = (data.draw(st.integers(1, 3)) for _ in range(3))
    taus = data.draw(st.tuples(*[st.integers(1, 3)] * 2))
    task = Quadratic(num_clients=2, dim_upper=dx, dim_lower=dy, lower=lower, upper=upper)
    fed, _ = drive(Penalty(num_local_steps=taus), task.build(), num, batch_size=data.draw(st.sampled_from([None, 2])))
    X, Y, columns = dx * (upper == "shared"), dy * (lower == "global"), fed.ledger.columns
    assert fed.ledger.rounds == (X + Y > 0) * num
    assert columns["floats_up"].tolist() == columns["floats_down"].tolist() == [num * (X + 2 * Y)] * 2
    for name, times in {"gy": 2, "gx": 2, "fx": 1, "fy": 1, "hvp": 0, "jvp": 0}.items():
        assert columns[name].tolist() == [num * times * tau for tau in taus]


@pytest.mark.parametrize(("lower", "upper"), [SCOPES[0], SCOPES[3]])
def test_a_checkpoint_goes_on_bit_for_bit(lower, upper):
    built = Quadratic(**SMALL, lower=lower, upper=upper).build()
    algorithm, options = Penalty(penalty_increment=1.0), {"batch_size": 2, "cohort": Cohort(0.6)}
    whole, end = drive(algorithm, built, 4, **options)
    half, middle = drive(algorithm, built, 2, **options)
    fresh, _ = drive(algorithm, built, 0, **options)
    tensors, plain = half.state_dict(middle)
    state = fresh.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, plain, algorithm.State)
    for iteration in (3, 4):
        fresh.begin(iteration)
        state = algorithm.round(fresh, state)
    for name in end._fields:
        assert torch.equal(whole.collect(getattr(end, name)), fresh.collect(getattr(state, name)))


def test_the_weight_grows_as_asked_and_never_overflows():
    assert [Penalty(penalty=2.0).weight(t) for t in (0, 7, 10**6)] == [2.0, 2.0, 2.0]
    assert [Penalty(penalty=2.0, penalty_increment=0.5).weight(t) for t in (0, 1, 8)] == [2.0, 2.5, 6.0]
    growing = Penalty(penalty=2.0, penalty_growth=1.5, max_penalty=100.0)
    np.testing.assert_allclose([growing.weight(t) for t in (0, 1, 2, 10**6)], [2.0, 3.0, 4.5, 100.0], rtol=1e-12)
    with pytest.raises(SettingError, match="set max_penalty"):
        Penalty(penalty_growth=1.1)
    with pytest.raises(SettingError, match=r"max_penalty is 1.0, expected at least penalty, which is 2.0"):
        Penalty(penalty=2.0, max_penalty=1.0)
