"""FedAvg on the lower level: where it settles is known exactly."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.tasks.quadratic import ClosedForm, Quadratic
from fedbilevel.tasks.task import Built
from support.numeric.yardstick import drive, relative

X0 = np.array([0.7, -1.1, 0.4, 0.9])


def away_from_zero(task: Quadratic) -> Built:
    built = task.build()
    x0 = {"x": torch.tensor(X0)}
    return Built(
        dataclasses.replace(built.problem, x0=(lambda sizes: x0) if task.upper == "private" else x0), built.clients
    )


def settled(closed: ClosedForm, lr: float, taus: tuple[int, ...]) -> np.ndarray:
    """Compute the fixed point of averaged local gradient descent.

    After tau steps y_i = M^tau y + (I - M^tau) y_i*, with M = I - lr A_i."""
    powers = np.stack(
        [np.linalg.matrix_power(np.eye(len(A)) - lr * A, tau) for A, tau in zip(closed.stacked["A"], taus, strict=True)]
    )
    own = closed._replace(local=True).lower_solution(X0)
    pull = np.eye(powers.shape[1]) - powers
    return np.linalg.solve(closed._mean(pull), closed._mean(np.einsum("nij,nj->ni", pull, own)))


@pytest.mark.parametrize(
    "scopes", [{}, {"client_weights": "by_samples"}, {"upper": "private"}, {"lower": "local"}], ids=str
)
def test_one_local_step_settles_at_the_lower_solution_and_leaves_x_alone(scopes):
    task = Quadratic(**scopes)
    fed, state = drive(FedAvg(lr_lower=0.35, num_local_steps=1), away_from_zero(task), 80)
    assert relative(fed.collect(state.y), task.closed_form().lower_solution(X0)) < 1e-11
    assert np.array_equal(np.broadcast_to(fed.collect(state.x), (5, 4)), np.broadcast_to(X0, (5, 4)))


@pytest.mark.parametrize("taus", [(5, 5, 5, 5, 5), (3, 1, 4, 2, 5)], ids=str)
@pytest.mark.parametrize("weights", ["equal", "by_samples"])
def test_more_local_steps_settle_where_dense_algebra_says(taus, weights):
    task = Quadratic(client_weights=weights)
    num = 5 if len(set(taus)) == 1 else taus
    _, state = drive(FedAvg(lr_lower=0.1, num_local_steps=num), away_from_zero(task), 60)
    assert relative(state.y, settled(task.closed_form(), 0.1, taus)) < 1e-8


def test_that_point_is_off_the_lower_solution_in_proportion_to_the_step():
    closed = Quadratic().closed_form()
    distances = [relative(settled(closed, lr, (5,) * 5), closed.lower_solution(X0)) for lr in (0.02, 0.01)]
    assert distances[1] > 1e-3
    assert 1.8 < distances[0] / distances[1] < 2.2


def test_a_client_with_a_local_lower_level_trains_as_if_alone():
    task = Quadratic(lower="local")
    built = away_from_zero(task)
    fed, state = drive(FedAvg(lr_lower=0.1, num_local_steps=3), built, 4)
    for i in range(5):
        _, alone = drive(
            FedAvg(lr_lower=0.1, num_local_steps=3),
            Built(away_from_zero(Quadratic()).problem, built.clients[i : i + 1]),
            4,
        )
        np.testing.assert_allclose(fed.collect(state.y)[i], alone.y, rtol=0, atol=1e-13)
