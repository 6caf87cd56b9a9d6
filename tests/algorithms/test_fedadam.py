"""FedAdam on the lower level: every round by hand, and where it settles."""

from __future__ import annotations

import numpy as np
import pytest

from fedbilevel.algorithms.fedadam import FedAdam
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.errors import ScopeError
from fedbilevel.problem.problem import Scopes
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.yardstick import drive, relative


def by_hand(task, num, *, gamma, steps, eta, beta1, beta2, tau):
    """Run Adam of the server on changes of local gradient descent, from the matrices of the task."""
    closed = task.closed_form()
    own = closed._replace(local=True).lower_solution(np.zeros(4))  # y_i*, where client i has no gradient
    y = m = np.zeros(own.shape[1])
    s = np.full(len(y), tau**2)
    for _ in range(num):
        moved = []
        for A, best in zip(closed.stacked["A"], own, strict=True):
            z = y
            for _ in range(steps):
                z = z - gamma * A @ (z - best)
            moved.append(z - y)
        d = closed._mean(np.stack(moved))
        m, s = beta1 * m + (1 - beta1) * d, beta2 * s + (1 - beta2) * d**2
        y = y + eta * m / (np.sqrt(s) + tau)
    return y


@pytest.mark.parametrize("weights", ["equal", "by_samples"])
def test_rounds_are_those_of_the_equations(weights):
    task = Quadratic(client_weights=weights)
    chosen = FedAdam(
        lr_lower=0.1, num_local_steps=3, server_lr=0.05, server_momentum=0.8, server_decay=0.95, server_damping=0.02
    )
    _, state = drive(chosen, task.build(), 7)
    wanted = by_hand(task, 7, gamma=0.1, steps=3, eta=0.05, beta1=0.8, beta2=0.95, tau=0.02)
    assert np.abs(wanted).max() > 0.05
    assert relative(state.y, wanted) < 1e-12


def test_it_settles_where_fedavg_settles_which_is_off_the_lower_solution():
    task = Quadratic()
    chosen = FedAdam(lr_lower=0.1, num_local_steps=5, server_lr=0.5, server_momentum=0.5, server_damping=1.0)
    _, state = drive(chosen, task.build(), 400)
    _, plain = drive(FedAvg(lr_lower=0.1, num_local_steps=5), task.build(), 200)
    assert relative(state.y, plain.y.numpy()) < 1e-8
    assert relative(state.y, task.closed_form().lower_solution(np.zeros(4))) > 1e-3


def test_one_local_step_settles_at_the_lower_solution():
    task = Quadratic()
    chosen = FedAdam(lr_lower=0.3, num_local_steps=1, server_lr=1.0, server_momentum=0.0, server_damping=1.0)
    _, state = drive(chosen, task.build(), 300)
    assert relative(state.y, task.closed_form().lower_solution(np.zeros(4))) < 1e-9


@pytest.mark.parametrize("strategy", ["loop", "vmap", "auto"])
def test_one_local_step_is_adam_on_the_mean_gradient_however_it_is_evaluated(strategy):
    task = Quadratic()
    chosen = FedAdam(lr_lower=0.1, num_local_steps=1, server_lr=0.05, server_momentum=0.8, server_damping=0.02)
    fed, state = drive(chosen, task.build(), 7, strategy=strategy)
    wanted = by_hand(task, 7, gamma=0.1, steps=1, eta=0.05, beta1=0.8, beta2=0.99, tau=0.02)
    assert np.abs(wanted).max() > 0.05
    assert relative(state.y, wanted) < 1e-12
    assert fed.ledger.totals()["gy"] == 7 * task.num_clients  # also where one derivative serves all


def test_a_schedule_shortens_the_servers_step_alone():
    half = FedAdam(server_lr=0.2, lr_lower=0.1).scaled(0.5)
    assert (half.server_lr, half.lr_lower) == (0.1, 0.1)


def test_a_local_lower_level_is_refused():
    with pytest.raises(ScopeError, match="use fedavg"):
        FedAdam().check_scopes(Scopes(lower="local"))
