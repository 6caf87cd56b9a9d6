"""LFedNest against a numpy transcription, its limit and its cost.

Also the variant of FedNest that uses the same lower steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_adafbio import SCOPES, SMALL, THETA, local_solution
from test_fbo_aggitd import TAUS, Dense, federate, start

from fedbilevel.algorithms.fednest import FedNest
from fedbilevel.algorithms.lfednest import LFedNest
from fedbilevel.errors import ScopeWarning
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.problem.problem import Scopes
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.by_hand import Samples, fx, fy, gy, hessian, jacobian
from support.numeric.yardstick import drive, fixed_point, relative

STEPS = {"lr_upper": 0.1, "lr_lower": 0.3, "lr_system": THETA}
SOLVERS = ["sgd", "svrg"]


def lfednest(
    algorithm: LFedNest, task: Quadratic, num: int, batch_size: int | None, absent: Callable[[int, int], Any]
) -> tuple[np.ndarray, np.ndarray]:
    """x and y after `num` outer iterations, one row per client."""
    samples, m = Samples(task, batch_size=batch_size), task.num_clients
    taus = (
        algorithm.num_local_steps if isinstance(algorithm.num_local_steps, tuple) else (algorithm.num_local_steps,) * m
    )
    upper_taus = taus if algorithm.num_upper_steps is None else (algorithm.num_upper_steps,) * m
    x, y = np.zeros((m, task.dim_upper)), np.zeros((m, task.dim_lower))

    def averaged(old: np.ndarray, new: dict[int, np.ndarray], kept: bool) -> np.ndarray:
        return (
            np.stack([new.get(i, old[i]) for i in range(m)])
            if kept
            else np.tile(np.mean(list(new.values()), axis=0), (m, 1))
        )

    for iteration in range(1, num + 1):
        call = 0
        for _ in range(algorithm.num_lower_rounds):
            q = np.zeros_like(y)
            if algorithm.lower_solver == "svrg":
                call += 1
                here = [i for i in range(m) if i not in absent(iteration, call)]
                q = averaged(
                    q,
                    {i: gy(samples.drawn(i, "train", "q", (iteration, call, 0)), x[i], y[i]) for i in here},
                    task.lower == "local",
                )
            call, new = call + 1, {}
            for i in (i for i in range(m) if i not in absent(iteration, call)):
                new[i] = y[i]
                for step in range(taus[i]):
                    batch = samples.drawn(i, "train", "zeta", (iteration, call, step))
                    corrected = q[i] - gy(batch, x[i], y[i]) if algorithm.lower_solver == "svrg" else 0
                    new[i] = new[i] - algorithm.lr_lower / taus[i] * (gy(batch, x[i], new[i]) + corrected)
            y = averaged(y, new, task.lower == "local")
        call, new = call + 1, {}
        for i in (i for i in range(m) if i not in absent(iteration, call)):
            new[i] = x[i]
            for step in range(upper_taus[i]):
                where = (iteration, call, step)
                upper = samples.drawn(i, "val", "xi", where)
                terms = [fy(upper, new[i], y[i])]
                for j in range(1, algorithm.num_factors + 1):
                    terms.append(
                        terms[-1]
                        - algorithm.lr_system * hessian(samples.drawn(i, "train", f"zeta_{j}", where)) @ terms[-1]
                    )
                p = algorithm.lr_system * np.sum(terms, axis=0)
                new[i] = new[i] - algorithm.lr_upper / upper_taus[i] * (
                    fx(upper, new[i], y[i]) - jacobian(samples.drawn(i, "train", "zeta_0", where)) @ p
                )
        x = averaged(x, new, task.upper == "private")
    return x, y


@pytest.mark.parametrize("num_upper_steps", [None, 4])
@pytest.mark.parametrize(
    "drops", [lambda iteration, call: (), lambda iteration, call: [iteration % 3]], ids=["everybody", "one drops"]
)
@pytest.mark.parametrize("lower_solver", SOLVERS)
@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_two_outer_iterations_by_hand_on_minibatches_with_unequal_work(
    lower, upper, lower_solver, drops, num_upper_steps
):
    task = Quadratic(**SMALL, lower=lower, upper=upper)
    algorithm = LFedNest(
        **STEPS,
        num_lower_rounds=2,
        num_local_steps=(3, 1, 2),
        num_upper_steps=num_upper_steps,
        num_factors=2,
        lower_solver=lower_solver,
    )
    fed, state = drive(algorithm, task.build(), 2, batch_size=2, drops=drops)
    for name, expected in zip("xy", lfednest(algorithm, task, 2, 2, drops), strict=True):
        np.testing.assert_allclose(fed.collect(getattr(state, name)).expand(3, -1), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("lower_solver", SOLVERS)
def test_heterogeneous_clients_settle_where_the_mean_of_local_hypergradients_vanishes(lower_solver):
    task = Quadratic(**SMALL)
    closed = task.closed_form()
    for num_factors in (0, 2, 60):
        algorithm = LFedNest(**STEPS, num_local_steps=1, num_factors=num_factors, lower_solver=lower_solver)
        point, radius = fixed_point(algorithm, task.build())
        assert radius < 1
        np.testing.assert_allclose(point["x"], local_solution(closed, num_factors + 1), rtol=0, atol=1e-10)
    np.testing.assert_allclose(point["x"], local_solution(closed), rtol=0, atol=1e-8)
    assert relative(point["x"], closed.solution()) > 0.2


@pytest.mark.parametrize(
    "same", [{"heterogeneity": 0.0}, {"lower": "local"}, {"lower": "local", "upper": "private"}], ids=str
)
def test_identical_clients_or_a_local_lower_level_settle_at_the_solution(same):
    task = Quadratic(**SMALL, **same)
    point, radius = fixed_point(LFedNest(**STEPS, num_local_steps=1, num_factors=60), task.build())
    assert radius < 1
    np.testing.assert_allclose(point["x"], task.closed_form().solution(), rtol=0, atol=1e-8)


def test_local_steps_leave_a_drift_of_y_that_svrg_does_not_have():
    """x hardly moves, so y is the fixed point of its own steps at x."""
    task, drift = Quadratic(**SMALL), {}
    for lower_solver in SOLVERS:
        algorithm = LFedNest(lr_upper=1e-12, lr_lower=0.5, num_local_steps=3, num_factors=0, lower_solver=lower_solver)
        _, state = drive(algorithm, task.build(), 30)
        drift[lower_solver] = relative(state.y, task.closed_form().lower_solution(np.zeros(2)))
    assert drift["svrg"] < 1e-7
    assert drift["sgd"] > 1e-3


@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_a_global_lower_level_is_warned_of(lower, upper):
    assert [type(warning) for warning in LFedNest().check_scopes(Scopes(lower, upper))] == [ScopeWarning] * (
        lower == "global"
    )


@given(st.data())
def test_the_ledger_holds_what_the_docstring_says(data):
    lower, upper = data.draw(st.sampled_from(SCOPES))
    dx, dy, num = (data.draw(st.integers(1, 3)) for _ in range(3))
    T, N, solver = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 3)), data.draw(st.sampled_from(SOLVERS))
    taus = data.draw(st.tuples(*[st.integers(1, 3)] * 2))
    algorithm = LFedNest(num_lower_rounds=T, num_local_steps=taus, num_factors=N, lower_solver=solver)
    task = Quadratic(num_clients=2, dim_upper=dx, dim_lower=dy, lower=lower, upper=upper)
    fed, _ = drive(algorithm, task.build(), num, batch_size=data.draw(st.sampled_from([None, 2])))
    X, Y, svrg, columns = dx * (upper == "shared"), dy * (lower == "global"), solver == "svrg", fed.ledger.columns
    assert fed.ledger.rounds == num * ((1 + svrg) * T * (Y > 0) + (X > 0))
    assert columns["floats_up"].tolist() == [num * ((1 + svrg) * T * Y + X)] * 2
    for name, per_client in {
        "gy": [T * (1 + 2 * tau) if svrg else T * tau for tau in taus],
        "hvp": [N * tau for tau in taus],
        "jvp": taus,
        "fx": taus,
        "fy": taus,
    }.items():
        assert columns[name].tolist() == [num * calls for calls in per_client]


@pytest.mark.parametrize("kind", [LFedNest, FedNest])
def test_a_checkpoint_goes_on_bit_for_bit(kind):
    built = Quadratic(**SMALL, lower="local").build()
    algorithm = kind(**STEPS, lower_solver="sgd")
    options = {"batch_size": 2, "cohort": Cohort(0.6)}
    whole, end = drive(algorithm, built, 4, **options)
    half, middle = drive(algorithm, built, 2, **options)
    fresh, _ = drive(algorithm, built, 0, **options)
    tensors, plain = half.state_dict(middle)
    state = fresh.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, plain, algorithm.State)
    for iteration in (3, 4):
        fresh.begin(iteration)
        state = algorithm.round(fresh, state)
    assert torch.equal(end.x, state.x)
    assert torch.equal(whole.collect(end.y), fresh.collect(state.y))


# ---- FedNest with the same lower steps -----------------------------------------------------------


@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_fednest_with_sgd_has_no_q_and_the_neumann_series_of_the_mean_hessian(lower, upper):
    task = Quadratic(bend=0.5, lower=lower, upper=upper)
    algorithm = FedNest(
        **{**STEPS, "lr_lower": 0.15}, num_lower_rounds=2, num_local_steps=TAUS, num_terms=4, lower_solver="sgd"
    )
    fed = federate(algorithm, task)
    fed.drawn = 3
    x, y, x_rows, y_rows = start(fed, task)
    h, end = algorithm.estimate(fed, x, y)
    dense = Dense(task, x_rows)
    last = dense.path(y_rows, 2, 0.15, TAUS, svrg=False)[-1]
    if lower == "global":  # alone, a client's SVRG steps on whole batches are its SGD steps
        assert np.abs(last - dense.path(y_rows, 2, 0.15, TAUS)[-1]).max() > 1e-4
    np.testing.assert_allclose(fed.collect(end).expand(5, -1), last, rtol=0, atol=1e-12)
    power = np.stack([np.linalg.matrix_power(factor, 3) for factor in dense.factor(last, THETA)])
    p = np.einsum("nij,nj->ni", power, dense.lower_mean(dense.fy(last)))
    np.testing.assert_allclose(fed.collect(h).expand(5, -1), dense.hypergradient(THETA * 4 * p), rtol=0, atol=1e-12)
    X, Y, columns = 4 * (upper == "shared"), 6 * (lower == "global"), fed.ledger.columns
    assert fed.ledger.rounds == (2 + 3 + 1) * (Y > 0) + (X > 0)
    assert columns["floats_up"].tolist() == [(2 + 3 + 1) * Y + X] * 5
    assert columns["gy"].tolist() == [2 * tau for tau in TAUS]
