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


def uneven() -> Built:
    """Clients with 3, 4, 2, 4 and 1 training samples."""
    built = Quadratic().build()
    sizes = (3, 4, 2, 4, 1)
    cut = lambda client, n: {**client, "train": {name: value[:n] for name, value in client["train"].items()}}
    return Built(built.problem, [cut(client, n) for client, n in zip(built.clients, sizes, strict=True)])


def test_epochs_are_as_many_steps_as_make_passes_over_each_clients_samples():
    options = {"batch_size": 2, "sampling": "epochs", "seed": 3}
    one, a = drive(FedAvg(lr_lower=0.1, num_local_epochs=3), uneven(), 4, **options)
    two, b = drive(FedAvg(lr_lower=0.1, num_local_steps=(4, 6, 3, 6, 2)), uneven(), 4, **options)
    assert torch.equal(a.y, b.y)
    assert one.ledger.totals() == two.ledger.totals()
    whole, c = drive(FedAvg(lr_lower=0.1, num_local_epochs=3), uneven(), 2)  # all samples: one step per pass
    _, d = drive(FedAvg(lr_lower=0.1, num_local_steps=3), uneven(), 2)
    assert torch.equal(c.y, d.y)
    assert whole.ledger.totals()["gy"] == 2 * 5 * 3


def test_momentum_is_that_of_torch_and_begins_anew_in_every_round():
    built, taus = away_from_zero(Quadratic()), (3, 1, 4, 2, 5)
    fed, state = drive(FedAvg(lr_lower=0.1, num_local_steps=taus, momentum=0.8), built, 2)
    y = fed.host.y0.clone()
    for _ in range(2):
        ends = []
        for i, tau in enumerate(taus):
            mine = y.clone().requires_grad_()
            optimiser = torch.optim.SGD([mine], lr=0.1, momentum=0.8)
            batch = fed.host.data.batch(torch.tensor([i]), "train")
            for _ in range(tau):
                mine.grad = fed.host.oracle.lower_grad(fed.host.x0, mine.detach(), batch)[0]
                optimiser.step()
            ends.append(mine.detach())
        y = torch.stack(ends).mean(0)
    torch.testing.assert_close(state.y, y, rtol=1e-12, atol=1e-14)
