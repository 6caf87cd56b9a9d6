from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.fedbio_local import FedBiOLocal
from fedbilevel.errors import ScopeError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.problem.problem import Scopes
from fedbilevel.tasks.quadratic import ClosedForm, Quadratic
from support.numeric.by_hand import (
    Samples,
    fx,
    fy,
    global_directions,
    hessian,
    jacobian,
    neumann_directions,
    plain_rounds,
    states,
)
from support.numeric.yardstick import check_continues, drive, relative


def small(**settings: Any) -> Quadratic:
    return Quadratic(**{"num_clients": 3, "dim_upper": 2, "dim_lower": 3, "lower": "local", **settings})


def neumann_solution(closed: ClosedForm, tau: float, Q: int) -> np.ndarray:
    """Solve for x where the mean of Phi_i(x, y_i*(x)) vanishes.

    Every A_i^-1 is replaced by its Neumann series of Q + 1 terms."""
    s, eye = closed.stacked, np.eye(closed.stacked["A"].shape[1])

    def phi(x: np.ndarray) -> np.ndarray:
        y = closed.lower_solution(x)
        rows = []
        for i in range(len(y)):
            short = np.linalg.solve(s["A"][i], eye - np.linalg.matrix_power(eye - tau * s["A"][i], Q + 1))
            rows.append(s["R"][i] @ x - s["r"][i] + s["B"][i].T @ short @ (s["D"][i] @ y[i] - s["Dt"][i]))
        return np.mean(rows, axis=0)

    zero = np.zeros(s["B"].shape[2])
    return np.linalg.solve(np.stack([phi(unit) - phi(zero) for unit in np.eye(len(zero))], axis=1), -phi(zero))


def test_local_u_reaches_the_solution() -> None:
    task = small()
    fed, state = drive(
        FedBiOLocal(lr_upper=0.07, lr_lower=0.5, lr_system=0.5, num_local_steps=1, u="local"), task.build(), 130
    )
    x, closed = state.x.numpy(), task.closed_form()
    assert relative(x, closed.solution()) < 1e-8
    assert relative(fed.collect(state.y), closed.lower_solution(x)) < 1e-8
    assert relative(fed.collect(state.u), closed.system_solution(x)) < 1e-8


@pytest.mark.slow
def test_the_neumann_series_reaches_a_point_whose_bias_vanishes_with_its_length() -> None:
    task = small()
    closed, distances = task.closed_form(), []
    for Q in (0, 2, 8):
        state = drive(
            FedBiOLocal(lr_upper=0.14, lr_lower=0.5, lr_system=0.3, num_local_steps=1, num_factors=Q), task.build(), 75
        )[1]
        assert relative(state.x, neumann_solution(closed, 0.3, Q)) < 1e-8
        distances.append(relative(state.x, closed.solution()))
    assert distances[0] > 0.05
    assert distances[0] > 2 * distances[1] > 4 * distances[2]


def test_the_bias_of_the_neumann_series() -> None:
    """Compare Phi_i, read from one step of length one, with dense algebra.

    The series differs from H^-1 f_y by H^-1 (I - tau H)^(Q+1) f_y, so the bias decays like
    (1 - tau mu)^(Q+1)."""
    task, tau = small(num_clients=1, dim_upper=3), 0.3
    (client,) = Samples(task).clients
    A, J = hessian(client["train"]), jacobian(client["train"])
    zero = (np.zeros(3), np.zeros(3))
    b = fy(client["val"], *zero)
    mu = np.linalg.eigvalsh(A)[0]
    errors = {}
    for Q in (0, 1, 2, 7, 25, 26):
        state = drive(
            FedBiOLocal(lr_upper=1.0, lr_lower=0.1, lr_system=tau, num_local_steps=1, num_factors=Q), task.build(), 1
        )[1]
        phi = -state.x.numpy()
        left = np.linalg.solve(A, np.linalg.matrix_power(np.eye(3) - tau * A, Q + 1) @ b)
        np.testing.assert_allclose(
            phi - (fx(client["val"], *zero) - J @ np.linalg.solve(A, b)), J @ left, rtol=1e-9, atol=1e-14
        )
        assert np.linalg.norm(left) <= (1 - tau * mu) ** (Q + 1) * np.linalg.norm(b) / mu
        errors[Q] = np.linalg.norm(J @ left)
    assert errors[26] / errors[25] == pytest.approx(1 - tau * mu, rel=1e-2)


@pytest.mark.parametrize("u", ["neumann", "local"])
@pytest.mark.parametrize("upper", ["shared", "private"])
@pytest.mark.parametrize("counts", [[2, 3, 1], [3]])
def test_agrees_with_algorithm_3_by_hand(u: str, upper: str, counts: list[int]) -> None:
    """Every iterate agrees: f_x and f_y share a minibatch, J and every factor have their own."""
    task, num = small(num_clients=len(counts), upper=upper, cross=0.4), len(counts)
    samples = Samples(task, seed=2, batch_size=2)
    start = {"x": np.zeros(2), "y": np.zeros(3)}
    if u == "local":
        start["u"] = np.zeros(3)
        directions = lambda i, p, where: global_directions(samples, i, p, where, "B_y xi xi zeta_0 zeta_1")
    else:
        directions = lambda i, p, where: neumann_directions(samples, i, p, where, 0.15, 3)
    radius, sizes = 0.1 if u == "local" else None, []
    algorithm = FedBiOLocal(
        lr_upper=0.07, lr_lower=0.2, lr_system=0.15, num_local_steps=tuple(counts), num_factors=3, u=u, radius=radius
    )
    expected = plain_rounds(
        start, 4, directions, counts, {"x": 0.07, "y": 0.2, "u": 0.15}, "x" if upper == "shared" else "", radius
    )
    for (fed, state), points in zip(states(algorithm, task.build(), 4, seed=2, batch_size=2), expected, strict=True):
        for name in start:
            rows = fed.collect(getattr(state, name)).expand(num, -1).numpy()
            np.testing.assert_allclose(rows, np.stack([point[name] for point in points]), rtol=1e-11, atol=1e-13)
        sizes += [np.linalg.norm(point["u"]) for point in points if u == "local"]
    assert u == "neumann" or max(sizes) == pytest.approx(0.1)  # u goes where the ball matters


def test_local_u_is_fedbio_on_a_local_lower_level() -> None:
    task, settings = small(), {"lr_upper": 0.05, "lr_lower": 0.3, "lr_system": 0.2, "num_local_steps": (1, 3, 2)}
    a, one = drive(FedBiOLocal(**settings, u="local"), task.build(), 3)
    b, two = drive(FedBiO(**settings), task.build(), 3)
    for name in ("x", "y", "u"):
        assert torch.equal(a.collect(getattr(one, name)), b.collect(getattr(two, name)))


@given(
    num_local_steps=st.integers(1, 3) | st.tuples(*[st.integers(1, 3)] * 3),
    num_factors=st.integers(0, 3),
    u=st.sampled_from(["neumann", "local"]),
    fraction=st.sampled_from([0.34, 0.67, 1.0]),
    upper=st.sampled_from(["shared", "private"]),
    seed=st.integers(0, 50),
)
def test_ledger(num_local_steps: Any, num_factors: int, u: str, fraction: float, upper: str, seed: int) -> None:
    counts = torch.tensor(num_local_steps if isinstance(num_local_steps, tuple) else [num_local_steps] * 3)
    floats = 2 if upper == "shared" else 0  # d_x
    products = 1 if u == "local" else num_factors
    algorithm = FedBiOLocal(num_local_steps=num_local_steps, num_factors=num_factors, u=u)
    times_there = torch.zeros(3, dtype=torch.int64)
    for k, (fed, _) in enumerate(
        states(algorithm, small(upper=upper).build(), 3, seed=seed, cohort=Cohort(fraction), batch_size=2)
    ):
        ledger = fed.ledger.columns
        here = ledger["gy"] > times_there * counts
        assert int(here.sum()) == (0 if k == 0 else round(3 * fraction))
        times_there += here
        assert fed.ledger.rounds == (k if floats else 0)
        assert torch.equal(ledger["floats_up"], floats * times_there)
        assert torch.equal(ledger["floats_down"], floats * times_there)
        for name, calls in (("gy", 1), ("fx", 1), ("fy", 1), ("jvp", 1), ("hvp", products), ("gx", 0)):
            assert torch.equal(ledger[name], calls * counts * times_there), name
        assert torch.equal(ledger["samples"], 2 * (3 + products) * counts * times_there)


@pytest.mark.parametrize("u", ["neumann", "local"])
def test_continues_from_a_checkpoint_bit_by_bit(u: str) -> None:
    task = small(num_clients=4)
    algorithm = FedBiOLocal(num_local_steps=(2, 1, 3, 2), num_factors=2, u=u)
    check_continues(algorithm, task.build())


def test_a_client_that_does_not_answer_keeps_its_own_and_the_others_are_averaged() -> None:
    task = small()
    algorithm = FedBiOLocal(num_local_steps=2, num_factors=2)
    fed, state = drive(algorithm, task.build(), 1, drops=lambda k, call: [1])
    one = Quadratic(**{**task.asdict()}).build()
    alone = drive(algorithm, one._replace(clients=[one.clients[0], one.clients[2]]), 1)[1]
    assert torch.equal(fed.collect(state.y)[1], torch.zeros(3, dtype=torch.float64))
    assert relative(state.x, alone.x) < 1e-14


def test_a_global_lower_level_is_refused() -> None:
    assert FedBiOLocal().check_scopes(Scopes(lower="local")) == []
    with pytest.raises(
        ScopeError,
        match=(
            "fedbio_local cannot solve a problem with a global lower level: "
            "it solves a linear system with the Hessian of each"
        ),
    ):
        FedBiOLocal().check_scopes(Scopes(lower="global"))
