"""FedBiO against its own recursion in dense matrices and against the closed-form solution."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.engines.simulation import Simulation
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.yardstick import drive, relative

TAUS = (3, 1, 4, 2, 5)  # unequal local work
SCOPES = [
    ({}, 0.1, 250),
    ({"client_weights": "by_samples"}, 0.1, 250),
    ({"upper": "private"}, 0.12, 350),
    ({"upper": "private", "client_weights": "by_samples"}, 0.12, 350),
    ({"lower": "local"}, 0.06, 300),
    ({"lower": "local", "upper": "private"}, 0.05, 600),
]


class DenseFedBiO:
    """One row (x, y, u) per client: a local step is v <- v - S (K_i v - k_i) in dense matrices.

    x: R x - r + B'u    y: A y - B x - c    u: A u - D y + Dt
    """

    def __init__(self, task: Quadratic, lr_upper: float, lr_lower: float, lr_system: float) -> None:
        form = task.closed_form()
        s, self.share = form.stacked, form.share
        self.n, self.dx, self.dy = len(form.share), task.dim_upper, task.dim_lower
        no_xy, no_yy = np.zeros((self.dx, self.dy)), np.zeros((self.dy, self.dy))
        self.K = np.stack(
            [
                np.block(
                    [[s["R"][i], no_xy, s["B"][i].T], [-s["B"][i], s["A"][i], no_yy], [no_xy.T, -s["D"][i], s["A"][i]]]
                )
                for i in range(self.n)
            ]
        )
        self.k = np.concatenate([s["r"], s["c"], -s["Dt"]], axis=1)
        self.S = np.concatenate([np.full(self.dx, lr_upper), np.full(self.dy, lr_lower), np.full(self.dy, lr_system)])
        stays = [form.private] * self.dx + [form.local] * (2 * self.dy)
        self.stays = np.array(stays)

    def round(self, v: np.ndarray, taus: Any) -> np.ndarray:
        taus = np.broadcast_to(taus, self.n)
        for step in range(taus.max()):
            new = v - self.S * (np.einsum("nij,nj->ni", self.K, v) - self.k)
            v = np.where((taus > step)[:, None], new, v)
        return np.where(self.stays, v, np.tensordot(self.share, v, axes=1))

    def fixed_point(self, num_local_steps: int) -> np.ndarray:
        """Of the averaged round: it is affine, so one linear system."""
        size = self.K.shape[1]
        at = lambda v: self.round(np.broadcast_to(v, (self.n, size)), num_local_steps)[0]
        constant = at(np.zeros(size))
        linear = np.stack([at(unit) - constant for unit in np.eye(size)], axis=1)
        return np.linalg.solve(np.eye(size) - linear, constant)


def rows(fed: Simulation, state: Any) -> np.ndarray:
    return np.concatenate(
        [np.broadcast_to(fed.collect(value), (fed.num_clients, fed.collect(value).shape[-1])) for value in state[:3]],
        axis=1,
    )


def state_of(algorithm: FedBiO, task: Quadratic, v: np.ndarray) -> Any:
    return algorithm.State(*torch.tensor(v).split([task.dim_upper, task.dim_lower, task.dim_lower]))


@pytest.mark.slow
@pytest.mark.parametrize(("scopes", "lr_upper", "num_iterations"), SCOPES, ids=str)
def test_one_local_step_reaches_the_closed_form_solution(scopes, lr_upper, num_iterations):
    task = Quadratic(**scopes)
    closed = task.closed_form()
    x = closed.solution()
    fed, state = drive(
        FedBiO(lr_upper=lr_upper, lr_lower=0.3, lr_system=0.3, num_local_steps=1), task.build(), num_iterations
    )
    assert relative(fed.collect(state.x), x) < 1e-8
    assert relative(fed.collect(state.y), closed.lower_solution(x)) < 1e-8
    assert relative(fed.collect(state.u), closed.system_solution(x)) < 1e-8


@pytest.mark.parametrize("minibatches", ["independent", "shared"])
@pytest.mark.parametrize("scopes", [scopes for scopes, *_ in SCOPES], ids=str)
def test_rounds_with_unequal_local_work_follow_the_dense_recursion(scopes, minibatches):
    task = Quadratic(**scopes)
    dense, expected = DenseFedBiO(task, 0.07, 0.2, 0.15), np.zeros((5, 16))
    fed, state = drive(
        FedBiO(lr_upper=0.07, lr_lower=0.2, lr_system=0.15, num_local_steps=TAUS, minibatches=minibatches),
        task.build(),
        4,
    )
    for _ in range(4):
        expected = dense.round(expected, TAUS)
    assert np.abs(expected).min(0).max() > 0.1
    np.testing.assert_allclose(rows(fed, state), expected, rtol=0, atol=1e-12)


def test_five_local_steps_settle_where_the_dense_recursion_does_at_a_distance_proportional_to_the_step():
    task = Quadratic()
    solution = task.closed_form().solution()
    distances = []
    for scale in (1.0, 0.5, 0.25):
        steps = {"lr_upper": 0.02 * scale, "lr_lower": 0.04 * scale, "lr_system": 0.04 * scale}
        settles = DenseFedBiO(task, **steps).fixed_point(5)
        algorithm = FedBiO(num_local_steps=5, **steps)
        fed = Simulation(algorithm, task.build().problem, task.clients(), dtype=torch.float64)
        after = algorithm.round(fed, state_of(algorithm, task, settles))
        np.testing.assert_allclose(rows(fed, after)[0], settles, rtol=0, atol=1e-12)
        distances.append(relative(settles[: task.dim_upper], solution))
    assert distances[-1] > 1e-3
    for coarse, fine in itertools.pairwise(distances):
        assert 1.8 < coarse / fine < 2.2


def test_a_run_with_five_local_steps_reaches_that_fixed_point():
    task, steps = Quadratic(), {"lr_upper": 0.05, "lr_lower": 0.1, "lr_system": 0.1}
    fed, state = drive(FedBiO(num_local_steps=5, **steps), task.build(), 150)
    np.testing.assert_allclose(rows(fed, state)[0], DenseFedBiO(task, **steps).fixed_point(5), rtol=0, atol=1e-8)


# ---- the projection of u -------------------------------------------------------------------------


def test_u_is_projected_at_each_client_before_the_mean():
    task, radius = Quadratic(), 2.0
    closed = task.closed_form()
    _, state = drive(FedBiO(lr_system=0.3, num_local_steps=1, radius=radius), task.build(), 1)
    step = -0.3 * closed.stacked["Dt"]  # u - tau (H u - f_y) at u = y = 0
    norms = np.linalg.norm(step, axis=1, keepdims=True)
    assert (norms > radius).any()
    assert (norms < radius).any()
    expected = (step * np.minimum(1, radius / norms)).mean(0)
    np.testing.assert_allclose(state.u, expected, rtol=0, atol=1e-12)


def test_a_radius_that_bounds_every_client_does_not_move_the_solution():
    task = Quadratic()
    closed = task.closed_form()
    x, s = closed.solution(), closed.stacked
    fy = np.einsum("nij,j->ni", s["D"], closed.lower_solution(x)) - s["Dt"]
    radius = float(np.linalg.norm(fy, axis=1).max() / min(np.linalg.eigvalsh(matrix)[0] for matrix in s["A"]))
    _, state = drive(
        FedBiO(lr_upper=0.1, lr_lower=0.24, lr_system=0.24, num_local_steps=1, radius=radius), task.build(), 300
    )
    assert relative(state.x, x) < 1e-8
    assert relative(state.u, closed.system_solution(x)) < 1e-8


def test_a_radius_just_above_the_norm_of_the_solution_is_not_enough():
    """The projection is done at each client, whose own u is longer than the mean's."""
    task = Quadratic()
    closed = task.closed_form()
    x = closed.solution()
    radius = 1.01 * float(np.linalg.norm(closed.system_solution(x)))
    _, state = drive(
        FedBiO(lr_upper=0.1, lr_lower=0.24, lr_system=0.24, num_local_steps=1, radius=radius), task.build(), 200
    )
    assert float(torch.linalg.vector_norm(state.u)) <= radius * (1 + 1e-12)
    assert np.linalg.norm(closed.hypergradient(state.x.numpy())) > 0.01
