"""FedNest against the Neumann series of the mean Hessian, evaluated with dense matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_fbo_aggitd import SCOPES, TAUS, Dense, federate, start

from fedbilevel.algorithms.fednest import FedNest
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.yardstick import relative

LAM, TERMS = 0.2, 5


def settings(**changes):
    return {
        "lr_upper": 0.1,
        "lr_lower": 0.15,
        "lr_system": LAM,
        "num_lower_rounds": 2,
        "num_local_steps": TAUS,
        "num_terms": TERMS,
        **changes,
    }


@pytest.mark.parametrize(("num_lower_rounds", "lower_solver"), [(0, "svrg"), (2, "svrg"), (2, "sgd")])
@pytest.mark.parametrize("scopes", SCOPES, ids=str)
def test_the_mean_over_n_prime_is_the_neumann_series_of_num_terms_terms(scopes, num_lower_rounds, lower_solver):
    task, algorithm = (
        Quadratic(bend=0.5, **scopes),
        FedNest(**settings(num_lower_rounds=num_lower_rounds, lower_solver=lower_solver)),
    )
    fed, values = federate(algorithm, task), []
    for fed.drawn in range(TERMS):
        x, y, x_rows, y_rows = start(fed, task)
        h, end = algorithm.estimate(fed, x, y)
        dense = Dense(task, x_rows)
        last = dense.path(y_rows, num_lower_rounds, 0.15, TAUS, svrg=lower_solver == "svrg")[-1]
        np.testing.assert_allclose(np.broadcast_to(fed.collect(end), last.shape), last, rtol=0, atol=1e-12)
        power = np.stack([np.linalg.matrix_power(factor, fed.drawn) for factor in dense.factor(last, LAM)])
        term = np.einsum("nij,nj->ni", power, dense.lower_mean(dense.fy(last)))
        values.append(np.broadcast_to(fed.collect(h), dense.x.shape).copy())
        np.testing.assert_allclose(values[-1], dense.hypergradient(LAM * TERMS * term), rtol=0, atol=1e-12)
    series = sum(
        np.stack(
            [
                np.linalg.matrix_power(factor, j) @ fy
                for factor, fy in zip(dense.factor(last, LAM), dense.lower_mean(dense.fy(last)), strict=True)
            ]
        )
        for j in range(TERMS)
    )
    np.testing.assert_allclose(np.mean(values, axis=0), dense.hypergradient(LAM * series), rtol=0, atol=1e-12)


def test_with_many_lower_rounds_and_terms_the_mean_over_n_prime_is_the_exact_hypergradient():
    task, algorithm = (
        Quadratic(),
        FedNest(**settings(lr_lower=0.35, lr_system=0.35, num_lower_rounds=30, num_local_steps=1, num_terms=30)),
    )
    fed = federate(algorithm, task)
    x, y, x_rows, _ = start(fed, task)
    _, y = algorithm.estimate(fed, x, y)  # y*(x), so that the sweep over N' can do without lower rounds
    at_rest = FedNest(**settings(lr_system=0.35, num_lower_rounds=0, num_local_steps=1, num_terms=30))
    fed, total = federate(at_rest, task), torch.zeros(4, dtype=torch.float64)
    for fed.drawn in range(30):
        total += at_rest.estimate(fed, x, y)[0] / 30
    assert relative(total, task.closed_form().hypergradient(x_rows)) < 1e-6


@pytest.mark.parametrize("scopes", [{}, {"upper": "private"}], ids=str)
def test_one_outer_iteration_moves_x_by_local_svrg_around_the_hypergradient(scopes):
    task, algorithm = Quadratic(bend=0.5, **scopes), FedNest(**settings())
    fed = federate(algorithm, task)
    fed.drawn = 3
    x, y, x_rows, y_rows = start(fed, task)
    new = algorithm.round(fed, algorithm.State(x, y))
    dense = Dense(task, x_rows)
    last = dense.path(y_rows, 2, 0.15, TAUS)[-1]
    p = np.linalg.matrix_power(dense.factor(last, LAM)[0], 3) @ dense.lower_mean(dense.fy(last))[0]
    h = dense.hypergradient(LAM * TERMS * p)
    np.testing.assert_allclose(
        np.broadcast_to(fed.collect(new.x), h.shape), dense.upper_steps(h, 0.1, TAUS), rtol=0, atol=1e-12
    )
    np.testing.assert_allclose(new.y, last[0], rtol=0, atol=1e-12)


def test_rounds_are_two_per_lower_call_one_per_factor_and_three():
    for num_lower_rounds, num_factors in ((0, 0), (1, 4), (3, 2)):
        algorithm = FedNest(**settings(num_lower_rounds=num_lower_rounds))
        fed = federate(algorithm, Quadratic())
        fed.drawn = num_factors
        algorithm.round(fed, algorithm.init(fed))
        assert fed.ledger.rounds == 2 * num_lower_rounds + num_factors + 3


@pytest.mark.parametrize("redraw", ["per_factor", "per_iteration"])
def test_a_local_hypergradient_never_uses_p_of_an_earlier_outer_iteration(redraw):
    """Each client's h is its own, whoever else takes part. One term, no lower rounds: p = lam f_y."""
    task = Quadratic(lower="local", upper="private")
    algorithm = FedNest(**settings(num_lower_rounds=0, num_terms=1))
    fed = federate(algorithm, task, cohort=Cohort(fraction=0.6, redraw=redraw))
    state = algorithm.init(fed)
    for iteration in range(1, 4):
        fed.begin(iteration)
        h, _ = algorithm.estimate(fed, state.x, state.y)
        x, y = fed.collect(state.x).numpy(), fed.collect(state.y).numpy()
        expected = Dense(task, x).hypergradient(LAM * Dense(task, x).fy(y))
        state = algorithm.State(fed.mean(algorithm.upper_steps, x=state.x, y=state.y, h=h).x, state.y)
        moved = np.abs(fed.collect(state.x).numpy() - x).max(1) > 0
        assert moved.sum() == 3
        np.testing.assert_allclose(fed.collect(h).numpy()[moved], expected[moved], rtol=0, atol=1e-12)
