"""FBO-AggITD against eq. (5) of its paper in dense matrices, without derivatives of the library."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from fedbilevel.algorithms.fbo_aggitd import FBOAggITD
from fedbilevel.algorithms.fednest import FedNest
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.yardstick import Drawing, drive, relative

TAUS = (3, 1, 4, 2, 5)  # unequal local work
SCOPES = [
    {},
    {"client_weights": "by_samples"},
    {"upper": "private"},
    {"upper": "private", "client_weights": "by_samples"},
    {"lower": "local"},
    {"lower": "local", "upper": "private"},
]


class Dense:
    """The clients of a Quadratic in numpy: derivatives by hand, one row per client."""

    def __init__(self, task: Quadratic, x: np.ndarray) -> None:
        form = task.closed_form()
        self.s, self.share, self.local, self.private, self.bend = (
            form.stacked,
            form.share,
            form.local,
            form.private,
            task.bend,
        )
        self.n, self.dy = self.s["c"].shape
        self.x = np.broadcast_to(x, (self.n, len(self.s["r"][0])))

    def lower_mean(self, rows: np.ndarray) -> np.ndarray:
        """Averaged for a global lower level, left alone for a local one; rows either way."""
        return rows if self.local else np.broadcast_to(np.tensordot(self.share, rows, axes=1), rows.shape).copy()

    def upper_mean(self, rows: np.ndarray) -> np.ndarray:
        return rows if self.private else np.broadcast_to(np.tensordot(self.share, rows, axes=1), rows.shape).copy()

    def gy(self, y: np.ndarray) -> np.ndarray:
        s = self.s
        return (
            np.einsum("nij,nj->ni", s["A"], y)
            - np.einsum("nij,nj->ni", s["B"], self.x)
            - s["c"]
            + self.bend * np.tanh(y)
        )

    def hessian(self, y: np.ndarray) -> np.ndarray:
        return self.s["A"] + self.bend * np.stack([np.diag(1 - np.tanh(row) ** 2) for row in y])

    def fy(self, y: np.ndarray) -> np.ndarray:
        return np.einsum("nij,nj->ni", self.s["D"], y) - self.s["Dt"]

    def fx(self, x: np.ndarray) -> np.ndarray:
        return np.einsum("nij,nj->ni", self.s["R"], x) - self.s["r"]

    def factor(self, y: np.ndarray, lam: float) -> np.ndarray:
        """I - lam H at y, with the Hessian of the mean or of each client."""
        return np.eye(self.dy) - lam * self.lower_mean(self.hessian(y))

    def path(self, y: np.ndarray, num: int, beta: float, taus: Any, *, svrg: bool = True) -> list[np.ndarray]:
        """y^0 .. y^N, each as rows."""
        taus = np.broadcast_to(taus, self.n)
        points = [np.broadcast_to(y, (self.n, self.dy))]
        for _ in range(num):
            start = points[-1]
            q, now = self.lower_mean(self.gy(start)), start.copy()
            for v in range(taus.max()):
                step = self.gy(now) - self.gy(start) + q if svrg else self.gy(now)
                now = np.where((taus > v)[:, None], now - beta / taus[:, None] * step, now)
            points.append(self.lower_mean(now))
        return points

    def hypergradient(self, p: np.ndarray) -> np.ndarray:
        """mean f_x - mean J p, with J = -B'; rows."""
        return self.upper_mean(
            self.fx(self.x) + np.einsum("nij,ni->nj", self.s["B"], np.broadcast_to(p, (self.n, self.dy)))
        )

    def terms(self, path: list[np.ndarray], lam: float) -> list[np.ndarray]:
        """For every Q the product of (I - lam H(y^t)), latest t leftmost, on f_y(y^Q)."""
        chain = []
        for Q in range(len(path)):
            z = self.lower_mean(self.fy(path[Q]))
            for y in path[Q + 1 :]:
                z = np.einsum("nij,nj->ni", self.factor(y, lam), z)
            chain.append(z)
        return chain

    def upper_steps(self, h: np.ndarray, alpha: float, taus: Any) -> np.ndarray:
        taus, x = np.broadcast_to(taus, self.n), self.x
        for v in range(taus.max()):
            x = np.where((taus > v)[:, None], x - alpha / taus[:, None] * (h - self.fx(self.x) + self.fx(x)), x)
        return self.upper_mean(x)


def federate(algorithm: Any, task: Quadratic, **options: Any) -> Drawing:
    built = task.build()
    return Drawing(algorithm, built.problem, built.clients, dtype=torch.float64, **options)


def start(fed: Simulation, task: Quadratic) -> tuple[Any, Any, np.ndarray, np.ndarray]:
    """Return a nonzero point for the algorithm and for numpy; it differs per client if allowed."""
    rng, n = np.random.default_rng(3), task.num_clients
    x = rng.standard_normal((n, task.dim_upper) if task.upper == "private" else task.dim_upper)
    y = rng.standard_normal((n, task.dim_lower) if task.lower == "local" else task.dim_lower)
    return fed.place("x", torch.tensor(x)), fed.place("y", torch.tensor(y)), x, y


def estimates(task: Quadratic, **settings: Any) -> tuple[list[np.ndarray], Dense, list[np.ndarray]]:
    """Return the library's hypergradient for every Q (rows), the dense problem and its lower path.

    Both start from the same point."""
    algorithm = FBOAggITD(**settings)
    fed = federate(algorithm, task)
    values = []
    for Q in range(algorithm.num_lower_rounds + 1 if algorithm.estimator == "sampled" else 1):
        fed.drawn = Q
        x, y, x_rows, y_rows = start(fed, task)
        h, end = algorithm.estimate(fed, x, y)
        dense = Dense(task, x_rows)
        path = dense.path(
            y_rows,
            algorithm.num_lower_rounds,
            algorithm.lr_lower,
            algorithm.num_local_steps,
            svrg=algorithm.lower_solver == "svrg",
        )
        np.testing.assert_allclose(np.broadcast_to(fed.collect(end), path[-1].shape), path[-1], rtol=0, atol=1e-12)
        values.append(np.broadcast_to(fed.collect(h), dense.x.shape).copy())
    return values, dense, path


@pytest.mark.slow
@pytest.mark.parametrize("scopes", SCOPES, ids=str)
def test_every_draw_of_q_is_its_term_of_eq_5_on_a_lower_level_that_is_not_quadratic(scopes):
    lam, N = 0.2, 4
    settings = {"lr_lower": 0.15, "lr_system": lam, "num_lower_rounds": N, "num_local_steps": TAUS}
    sampled, dense, path = estimates(Quadratic(bend=0.5, **scopes), estimator="sampled", **settings)
    terms = dense.terms(path, lam)
    for value, term in zip(sampled, terms, strict=True):
        np.testing.assert_allclose(value, dense.hypergradient(lam * (N + 1) * term), rtol=0, atol=1e-12)
    whole = dense.hypergradient(lam * sum(terms))  # eq. (5)
    np.testing.assert_allclose(np.mean(sampled, axis=0), whole, rtol=0, atol=1e-12)
    [summed], _, _ = estimates(Quadratic(bend=0.5, **scopes), estimator="sum", **settings)
    np.testing.assert_allclose(summed, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("N", [0, 1])
@pytest.mark.parametrize("estimator", ["sum", "sampled"])
def test_the_shortest_paths_are_eq_5_too(N, estimator):
    settings = {"lr_lower": 0.15, "lr_system": 0.2, "num_lower_rounds": N, "num_local_steps": 2}
    values, dense, path = estimates(Quadratic(bend=0.5), estimator=estimator, **settings)
    np.testing.assert_allclose(
        np.mean(values, axis=0), dense.hypergradient(0.2 * sum(dense.terms(path, 0.2))), rtol=0, atol=1e-12
    )
    assert len(path) == N + 1


def test_hessians_are_taken_along_the_path_and_not_at_its_end():
    """Guards the test above: with all Hessians at y^N eq. (5) would be another number."""
    [summed], dense, path = estimates(Quadratic(bend=0.5), lr_lower=0.15, lr_system=0.2, num_lower_rounds=4)
    at_end = 0.2 * sum(dense.terms([path[-1]] * 5, 0.2))
    assert np.abs(summed - dense.hypergradient(at_end)).max() > 1e-3


def test_the_error_of_the_hypergradient_falls_geometrically_to_1e_8():
    task = Quadratic()
    errors = []
    for N in (10, 20, 40):
        [value], dense, _ = estimates(task, lr_lower=0.25, lr_system=0.25, num_lower_rounds=N, num_local_steps=TAUS)
        errors.append(relative(value[0], task.closed_form().hypergradient(dense.x[0])))
    assert errors[1] < 1e-2 * errors[0]
    assert errors[2] < 1e-8


@pytest.mark.parametrize("scopes", [{}, {"upper": "private"}], ids=str)
def test_one_outer_iteration_moves_x_by_local_svrg_around_the_hypergradient(scopes):
    task = Quadratic(bend=0.5, **scopes)
    algorithm = FBOAggITD(lr_upper=0.1, lr_lower=0.15, lr_system=0.2, num_lower_rounds=2, num_local_steps=TAUS)
    fed = federate(algorithm, task)
    x, y, x_rows, y_rows = start(fed, task)
    new = algorithm.round(fed, algorithm.State(x, y))
    dense = Dense(task, x_rows)
    path = dense.path(y_rows, 2, 0.15, TAUS)
    h = dense.hypergradient(0.2 * sum(dense.terms(path, 0.2)))
    np.testing.assert_allclose(
        np.broadcast_to(fed.collect(new.x), h.shape), dense.upper_steps(h, 0.1, TAUS), rtol=0, atol=1e-12
    )
    np.testing.assert_allclose(fed.collect(new.y), path[-1][0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [FBOAggITD, FedNest])
def test_steps_on_x_may_be_fewer_than_those_on_y(kind):
    task = Quadratic(bend=0.5)
    same = {"lr_upper": 0.1, "lr_lower": 0.15, "lr_system": 0.2, "num_lower_rounds": 2}
    ends = {}
    for name, settings in {"apart": {"num_local_steps": 4, "num_upper_steps": 2}, "y": {"num_local_steps": 4}}.items():
        fed = federate(kind(**same, **settings), task)
        x, y, x_rows, _ = start(fed, task)
        ends[name] = fed.algorithm.round(fed, fed.algorithm.State(x, y))
        ends[f"h {name}"], _ = fed.algorithm.estimate(fed, x, y)
    np.testing.assert_array_equal(ends["apart"].y, ends["y"].y)
    dense = Dense(task, x_rows)
    h = np.broadcast_to(ends["h apart"], dense.x.shape)
    for name, tau in (("apart", 2), ("y", 4)):
        np.testing.assert_allclose(
            np.broadcast_to(ends[name].x, h.shape), dense.upper_steps(h, 0.1, tau), rtol=0, atol=1e-12
        )
    assert np.abs(np.asarray(ends["apart"].x - ends["y"].x)).max() > 1e-4


def test_converges_to_the_solution_within_its_truncation_error():
    task = Quadratic()
    solution = task.closed_form().solution()
    algorithm = FBOAggITD(lr_upper=0.4, lr_lower=0.35, lr_system=0.35, num_lower_rounds=18)
    _, state = drive(algorithm, task.build(), 28)
    assert relative(state.x, solution) < 1e-6
    assert relative(state.y, task.closed_form().lower_solution(solution)) < 1e-6


# ---- the printed algorithm -----------------------------------------------------------------------


@pytest.mark.parametrize("N", [0, 1, 4])
def test_literal_computes_what_is_printed(N):
    """z <- z - H z without lam, and z^{N-1} instead of z^N for Q < N."""
    lam = 0.2
    values, dense, path = estimates(
        Quadratic(bend=0.5),
        estimator="sampled",
        literal=True,
        lr_lower=0.15,
        lr_system=lam,
        num_lower_rounds=N,
        num_local_steps=TAUS,
    )
    for Q, value in enumerate(values):
        printed = dense.terms(path[: max(N, Q + 1)], 1.0)[Q]
        np.testing.assert_allclose(value, dense.hypergradient(lam * (N + 1) * printed), rtol=1e-12, atol=1e-12)


def test_literal_blows_up_where_the_corrected_algorithm_converges():
    task = Quadratic()
    settings = {"lr_lower": 0.25, "lr_system": 0.25, "num_lower_rounds": 10}
    [right], dense, _ = estimates(task, **settings)
    printed, _, _ = estimates(task, estimator="sampled", literal=True, **settings)
    truth = task.closed_form().hypergradient(dense.x[0])
    assert relative(right[0], truth) < 0.01
    assert relative(np.mean(printed, axis=0)[0], truth) > 30


def test_the_wrong_index_of_the_print_leaves_a_bias_of_lam_times_fy():
    """With lam = 1 the missing factor lam has no effect, so only z^{N-1} in place of z^N remains.

    Then E[p] -> H^-1 f_y + lam f_y."""
    task, N, scale = Quadratic(), 10, 0.25
    built, closed = task.build(), task.closed_form()
    lower = built.problem.lower
    problem = dataclasses.replace(built.problem, lower=lambda x, y, batch: scale * lower(x, y, batch))  # so that L < 1
    x = np.array([0.3, -0.2, 0.5, 0.1])
    y = closed.lower_solution(x)  # the lower path stands still there
    dense = Dense(task, x)
    rows = np.broadcast_to(y, (dense.n, dense.dy))
    fy, factor = dense.lower_mean(dense.fy(rows))[0], dense.factor(rows, scale)[0]
    powers = [np.linalg.matrix_power(factor, j) @ fy for j in range(N + 1)]
    expected = {False: sum(powers), True: sum(powers[:-1]) + fy}
    for literal in (False, True):
        algorithm = FBOAggITD(lr_lower=0.1, lr_system=1.0, num_lower_rounds=N, estimator="sampled", literal=literal)
        fed = Drawing(algorithm, problem, built.clients, dtype=torch.float64)
        values = []
        for Q in range(N + 1):
            fed.drawn = Q
            values.append(algorithm.estimate(fed, torch.tensor(x), torch.tensor(y))[0].numpy())
        np.testing.assert_allclose(
            np.mean(values, axis=0), dense.hypergradient(scale * expected[literal])[0], rtol=0, atol=1e-12
        )
    assert relative(expected[True] - expected[False], fy) < 0.01  # the bias is f_y but for a truncated power
    assert relative(dense.hypergradient(scale * expected[True])[0], closed.hypergradient(x)) > 0.1


def test_literal_without_a_sampled_q_is_refused():
    with pytest.raises(SettingError, match="estimator='sampled'"):
        FBOAggITD(literal=True)


# ---- the lower solver ----------------------------------------------------------------------------


def test_plain_local_sgd_follows_its_own_dense_path_and_its_eq_5():
    settings = {
        "lr_lower": 0.15,
        "lr_system": 0.2,
        "num_lower_rounds": 3,
        "num_local_steps": TAUS,
        "lower_solver": "sgd",
    }
    values, dense, path = estimates(
        Quadratic(bend=0.5), estimator="sampled", **settings
    )  # compares the end of the path
    np.testing.assert_allclose(
        np.mean(values, axis=0), dense.hypergradient(0.2 * sum(dense.terms(path, 0.2))), rtol=0, atol=1e-12
    )


@pytest.mark.slow
def test_plain_local_sgd_drifts_in_proportion_to_the_step_and_svrg_does_not():
    task = Quadratic()

    def distance(lr_lower: float, lower_solver: str) -> float:
        algorithm = FBOAggITD(
            lr_lower=lr_lower,
            lr_system=0.2,
            num_lower_rounds=round(12 / lr_lower),
            num_local_steps=5,
            lower_solver=lower_solver,
        )
        fed = federate(algorithm, task)
        x, y = torch.ones(4, dtype=torch.float64), fed.initial()[1]
        target = torch.tensor(task.closed_form().lower_solution(np.ones(4)))
        for _ in range(algorithm.num_lower_rounds):
            q = fed.mean(algorithm.aggregate, x=x, y=y, z=None, t=0, Q=1).q
            y = fed.mean(algorithm.lower_steps, x=x, y=y, q=q).y
        return relative(y, target)

    drift = [distance(lr, "sgd") for lr in (0.2, 0.1)]
    assert 1.7 < drift[0] / drift[1] < 2.3
    assert drift[1] > 1e-3
    assert distance(0.2, "svrg") < 1e-7


# ---- partial participation -----------------------------------------------------------------------


@pytest.mark.parametrize("redraw", ["per_factor", "per_iteration"])
def test_a_local_hypergradient_never_uses_a_chain_of_an_earlier_outer_iteration(redraw):
    """Each client's h is its own eq. (5) for any cohort.

    With N = 0, z = lam f_y at the only point of the path."""
    task, lam = Quadratic(lower="local", upper="private"), 0.2
    algorithm = FBOAggITD(lr_upper=0.1, lr_system=lam, num_lower_rounds=0)
    fed = federate(algorithm, task, cohort=Cohort(fraction=0.6, redraw=redraw))
    state = algorithm.init(fed)
    for iteration in range(1, 4):
        fed.begin(iteration)
        h, _ = algorithm.estimate(fed, state.x, state.y)
        x, y = fed.collect(state.x).numpy(), fed.collect(state.y).numpy()
        dense = Dense(task, x)
        expected = dense.hypergradient(lam * dense.fy(y))
        answered = fed.ledger.columns["jvp"].clone()
        state = algorithm.State(fed.mean(algorithm.upper_steps, x=state.x, y=state.y, h=h).x, state.y)
        moved = np.abs(fed.collect(state.x).numpy() - x).max(1) > 0
        assert moved.sum() == 3
        assert int(answered.sum()) == 3 * iteration
        np.testing.assert_allclose(fed.collect(h).numpy()[moved], expected[moved], rtol=0, atol=1e-12)
