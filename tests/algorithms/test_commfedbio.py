"""CommFedBiO against dense algebra: top-k with and without error feedback, sketches, and costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_fedmbo import check_fresh_clients
from test_simfbo import SMALL, check_resume

from fedbilevel.algorithms.commfedbio import CommFedBiO, orthonormal_rows
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import ScopeError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.problem.problem import Scopes
from fedbilevel.tasks.quadratic import ClosedForm, Quadratic
from support.numeric.yardstick import drive, fixed_point, relative

STEPS = {"lr_upper": 0.05, "lr_lower": 0.2, "lr_system": 0.2}
FROZEN = 1e-15  # a step of x that leaves x where it starts


def dense_run(
    closed: ClosedForm,
    algorithm: CommFedBiO,
    num_iterations: int,
    sketches: list[np.ndarray],
    absent: Any = lambda *_: (),
) -> dict[str, np.ndarray]:
    """The docstring's update a second time: numpy, client by client, for a global lower level."""
    s, n, lam = closed.stacked, len(closed.share), algorithm.lr_system
    x, y, u, e = (
        np.zeros((n, s["B"].shape[2])),
        np.zeros(s["A"].shape[1]),
        np.zeros(s["A"].shape[1]),
        np.zeros(s["c"].shape),
    )
    for iteration in range(1, num_iterations + 1):
        call = 0

        def cohort(iteration: int = iteration) -> tuple[list[int], np.ndarray]:
            nonlocal call
            call += 1
            here = [i for i in range(n) if i not in absent(iteration, call)]
            return here, closed.share[here] / closed.share[here].sum()

        for _ in range(algorithm.num_lower_rounds):
            here, share = cohort()
            ends = []
            for i in here:
                yi, tau = y, np.broadcast_to(algorithm.num_local_steps, n)[i]
                for _ in range(tau):
                    yi = yi - algorithm.lr_lower / tau * (s["A"][i] @ yi - s["B"][i] @ x[i] - s["c"][i])
                ends.append(yi)
            y = share @ np.stack(ends)
        fy = s["D"] @ y - s["Dt"]
        if algorithm.compression == "sketch":
            here, share = cohort()
            S = sketches[iteration - 1]
            H, D = np.tensordot(share, s["A"][here], axes=1), share @ (s["A"][here] @ u - fy[here])
            u = u - S.T @ np.linalg.solve(S @ H @ S.T, S @ D)
        else:
            for _ in range(algorithm.num_system_rounds):
                here, share = cohort()
                sent = []
                for i in here:
                    v = s["A"][i] @ u - fy[i] + e[i]
                    small = np.argsort(-np.abs(v))[algorithm.num_kept :] if algorithm.compression == "top_k" else []
                    c = v.copy()
                    c[small] = 0
                    if algorithm.error_feedback:
                        e[i] = v - c
                    sent.append(c)
                u = u - lam * share @ np.stack(sent)
        here, share = cohort()
        h = np.einsum("nij,nj->ni", s["R"], x) - s["r"] + s["B"].transpose(0, 2, 1) @ u
        if closed.private:
            x[here] -= algorithm.lr_upper * h[here]
        else:
            x = x - algorithm.lr_upper * share @ h[here]
    return {"x": x, "y": y, "u": u, "e": e}


@given(st.data())
def test_equals_dense_algebra(data: st.DataObject) -> None:
    """Any compression, lengths, local steps, weights, upper scope and cohort of each call."""
    task = Quadratic(
        **{**SMALL, "dim_lower": 4},
        upper=data.draw(st.sampled_from(["shared", "private"])),
        client_weights=data.draw(st.sampled_from(["equal", "by_samples"])),
    )
    algorithm = CommFedBiO(
        **STEPS,
        compression=data.draw(st.sampled_from(["top_k", "top_k", "sketch", "none"])),
        error_feedback=data.draw(st.booleans()),
        num_lower_rounds=data.draw(st.integers(0, 2)),
        num_local_steps=data.draw(st.sampled_from([1, 2, (1, 2, 3)])),
        num_system_rounds=data.draw(st.integers(0, 3)),
        num_kept=data.draw(st.integers(1, 5)),
        num_sketch=data.draw(st.integers(1, 5)),
    )
    gone = data.draw(st.lists(st.sets(st.integers(0, 2), max_size=2), min_size=7, max_size=7))
    absent = lambda iteration, call: gone[(iteration + call) % 7]
    fed, state = drive(algorithm, task.build(), 3, seed=4, drops=absent)
    sketches = []
    for iteration in (1, 2, 3):
        fed.begin(iteration)
        sketches.append(
            orthonormal_rows(
                fed.draw("sketch", 2**31), algorithm.num_sketch, torch.zeros(4, dtype=torch.float64)
            ).numpy()
        )
    target = dense_run(task.closed_form(), algorithm, 3, sketches, absent)
    for name in "xyu":
        value = fed.collect(getattr(state, name))
        torch.testing.assert_close(
            value.expand(target[name].shape), torch.from_numpy(target[name]), rtol=1e-10, atol=1e-11
        )


def test_sketches_are_orthonormal_and_differ() -> None:
    like = torch.zeros(5, dtype=torch.float64)
    for num in (1, 3, 5, 9):
        S = orthonormal_rows(1, num, like)
        assert S.shape == (min(num, 5), 5)
        torch.testing.assert_close(S @ S.T, torch.eye(min(num, 5), dtype=torch.float64))
        assert torch.equal(S, orthonormal_rows(1, num, like))
    assert relative(orthonormal_rows(2, 3, like), orthonormal_rows(1, 3, like)) > 0.1


# ---- where it converges --------------------------------------------------------------------------


@pytest.mark.parametrize("upper", ["shared", "private"])
@pytest.mark.parametrize(("compression", "num"), [("none", 3), ("top_k", 3), ("sketch", 3), ("sketch", 8)])
def test_exact_when_nothing_is_left_out(upper: str, compression: str, num: int) -> None:
    """k = d_y and r = d_y lose nothing; neither do larger numbers."""
    task = Quadratic(**SMALL, upper=upper)  # type: ignore[arg-type]
    closed = task.closed_form()
    algorithm = CommFedBiO(
        **STEPS,
        compression=compression,
        num_kept=num,
        num_sketch=num,
        num_local_steps=1,
        num_lower_rounds=2,
        num_system_rounds=2,
    )  # type: ignore[arg-type]
    point, radius = fixed_point(algorithm, task.build())
    assert radius < 0.99
    assert relative(point["x"], closed.solution()) < 1e-11
    assert relative(point["y"], closed.lower_solution(closed.solution())) < 1e-11
    assert relative(point["u"], closed.system_solution(closed.solution())) < 1e-11


def test_full_sketch_solves_the_system_at_once() -> None:
    task = Quadratic(**SMALL)
    _, state = drive(CommFedBiO(**STEPS, compression="sketch", num_sketch=3, num_local_steps=1), task.build(), 1)
    s, y = task.closed_form().stacked, state.y.numpy()
    assert relative(state.u, np.linalg.solve(s["A"].mean(0), (s["D"] @ y - s["Dt"]).mean(0))) < 1e-12


def test_full_sketch_uses_one_minibatch_for_both_sides() -> None:
    """u - H^-1 (H u - f_y) does not depend on u when both H are of the same samples."""
    built = Quadratic(**SMALL).build()
    algorithm = CommFedBiO(**STEPS, compression="sketch", num_sketch=3, num_local_steps=1)
    ends = []
    for start in (0.0, 5.0):
        fed = Simulation(algorithm, built.problem, built.clients, dtype=torch.float64, batch_size=1)
        fed.begin(1)
        ends.append(
            algorithm.round(fed, algorithm.init(fed)._replace(u=torch.full((3,), start, dtype=torch.float64))).u
        )
    torch.testing.assert_close(*ends, rtol=1e-11, atol=1e-12)


def test_plain_sketched_solution_from_zero_is_far_and_corrections_make_it_exact() -> None:
    """With one row of three the first u is the best on a line; corrections reach the solution."""
    task = Quadratic(**SMALL)
    closed = task.closed_form()
    algorithm = CommFedBiO(**STEPS, compression="sketch", num_sketch=1, num_local_steps=1, num_lower_rounds=2)
    _, first = drive(algorithm, task.build(), 1)
    assert relative(first.u, closed.system_solution(np.zeros(2))) > 0.1
    _, state = drive(algorithm, task.build(), 250)
    assert relative(state.x, closed.solution()) < 1e-8
    assert relative(state.u, closed.system_solution(closed.solution())) < 1e-8


def rounds_on_u(num: int, *, every: int = 1, **settings: Any) -> tuple[torch.Tensor, np.ndarray, Simulation]:
    """Return u after each `every` of `num` rounds of top-2 of 5 entries, and the exact u.

    x = 0 and y = y*(0) are fixed."""
    task = Quadratic(**{**SMALL, "dim_lower": 5})
    closed, built = task.closed_form(), task.build()
    algorithm = CommFedBiO(lr_upper=FROZEN, num_lower_rounds=0, num_system_rounds=every, num_kept=2, **settings)
    fed = Simulation(algorithm, built.problem, built.clients, dtype=torch.float64)
    state = algorithm.init(fed)._replace(y=torch.from_numpy(closed.lower_solution(np.zeros(2))))
    us = [state.u]
    for iteration in range(1, num // every + 1):
        fed.begin(iteration)
        state = algorithm.round(fed, state)
        us.append(state.u)
    return torch.stack(us), closed.system_solution(np.zeros(2)), fed


def test_error_feedback_loses_nothing() -> None:
    """Entries that are not sent in one round are sent in a later round.

    u_T = u_0 - tau (sum of the full mean directions - mean e_T), so the mean of H u - f_y over T
    rounds is (u_0 - u_T) / (tau T) + mean e_T / T, which vanishes for any step size."""
    us, _, fed = rounds_on_u(60, lr_system=0.1)
    s = Quadratic(**{**SMALL, "dim_lower": 5}).closed_form().stacked
    fy = s["D"] @ np.linalg.solve(s["A"].mean(0), s["c"].mean(0)) - s["Dt"]
    directions = us[:-1] @ torch.from_numpy(s["A"].mean(0)) - torch.from_numpy(fy.mean(0))
    left = fed.host.memory.rows["e"].mean(0)
    assert float(left.norm()) > 0.1
    torch.testing.assert_close(us[-1], us[0] - 0.1 * (directions.sum(0) - left), rtol=1e-10, atol=1e-12)
    naive, _, fed = rounds_on_u(1, lr_system=0.1, error_feedback=False)
    assert "e" not in fed.host.memory.rows
    assert torch.equal(naive[1], us[1])  # e_i starts at zero


@pytest.mark.slow
def test_distance_falls_with_the_step_only_with_error_feedback() -> None:
    """Compare the largest distance to the exact u over the last rounds for two step sizes.

    With error feedback the distance is proportional to tau (0.06 and 0.01 here); without it the
    distance has a floor at any step size (0.15 and 0.17)."""
    worst: dict[bool, list[float]] = {True: [], False: []}
    for error_feedback, distances in worst.items():
        for lr_system, num in ((0.1, 150), (0.02, 400)):
            us, exact, _ = rounds_on_u(num, every=10, lr_system=lr_system, error_feedback=error_feedback)
            distances.append(max(relative(u, exact) for u in us[-6:]))
    assert worst[True][0] < 0.1
    assert worst[True][1] < 0.3 * worst[True][0]
    assert min(worst[False]) > 0.13


@pytest.mark.slow
def test_top_k_with_error_feedback_finds_x_up_to_its_step() -> None:
    task = Quadratic(**{**SMALL, "dim_lower": 5})
    settings = {
        "lr_upper": 0.05,
        "lr_lower": 0.2,
        "lr_system": 0.05,
        "num_local_steps": 1,
        "num_system_rounds": 3,
        "num_kept": 2,
    }
    _, state = drive(CommFedBiO(**settings), task.build(), 80)
    _, naive = drive(CommFedBiO(**settings, error_feedback=False), task.build(), 80)
    assert relative(state.x, task.closed_form().solution()) < 0.03
    assert relative(naive.x, task.closed_form().solution()) > 0.2


def test_refuses_a_local_lower_level() -> None:
    for upper in ("shared", "private"):
        with pytest.raises(ScopeError, match="nothing to compress"):
            CommFedBiO().check_scopes(Scopes(lower="local", upper=upper))  # type: ignore[arg-type]
        assert CommFedBiO().check_scopes(Scopes(upper=upper)) == []  # type: ignore[arg-type]


# ---- cost ----------------------------------------------------------------------------------------


@given(st.data())
def test_ledger(data: st.DataObject) -> None:
    upper = data.draw(st.sampled_from(["shared", "private"]))
    compression = data.draw(st.sampled_from(["top_k", "sketch", "none"]))
    E, R, r, tau = (data.draw(st.integers(low, 3)) for low in (0, 0, 1, 1))
    num = data.draw(st.integers(1, 3))
    algorithm = CommFedBiO(
        **STEPS,
        compression=compression,
        num_lower_rounds=E,
        num_system_rounds=R,
        num_sketch=r,
        num_kept=2,
        num_local_steps=tau,
    )
    fed, _ = drive(
        algorithm, Quadratic(**SMALL, upper=upper).build(), num, batch_size=data.draw(st.sampled_from([None, 2]))
    )
    sketch, dx, dy = compression == "sketch", 2 * (upper == "shared"), 3
    columns, one = fed.ledger.columns, torch.ones(3, dtype=torch.int64)
    system = 1 if sketch else R
    sent = r * r + r if sketch else R * (2 if compression == "top_k" else dy)
    places = 4 * R * 2 * (compression == "top_k")
    assert fed.ledger.rounds == num * (E + system + (dx > 0))
    assert torch.equal(columns["floats_up"], one * num * (E * dy + sent + dx))
    assert torch.equal(columns["bytes_up"], one * num * (8 * (E * dy + sent + dx) + places))
    assert torch.equal(
        columns["floats_down"], one * (num * ((E + system) * dy + dx) + 2 * dy)
    )  # y and u of the start once
    products = r + 1 if sketch else R
    for name, count in {"gy": E * tau, "fy": system, "hvp": products, "fx": 1, "jvp": 1, "gx": 0}.items():
        assert torch.equal(columns[name], one * num * count), name


def test_cohorts_pay_and_remember_for_themselves() -> None:
    algorithm = CommFedBiO(**STEPS, num_kept=1, num_system_rounds=3, num_local_steps=1)
    fed, _ = drive(algorithm, Quadratic(**{**SMALL, "num_clients": 8}).build(), 2, cohort=Cohort(0.25))
    assert int(fed.ledger.columns["hvp"].sum()) == 2 * 3 * 2
    assert torch.equal(fed.host.memory.written["e"], fed.ledger.columns["hvp"] > 0)
    assert not bool(fed.host.memory.written["e"].all())


def test_every_round_has_fresh_clients() -> None:
    chance = {("gy", "gy"): 1 / 4, ("hvp", "hvp"): 1 / 4, ("gy", "hvp"): 43 / 64, ("hvp", "jvp"): 7 / 16}
    algorithm = CommFedBiO(**STEPS, num_lower_rounds=2, num_local_steps=1, num_system_rounds=2)
    assert set(check_fresh_clients(algorithm, chance, "per_factor", 80)) == {2}
    chance = {("gy", "gy"): 1 / 4, ("gy", "hvp"): 7 / 16, ("hvp", "jvp"): 1 / 4}
    assert set(check_fresh_clients(replace(algorithm, compression="sketch"), chance, "per_factor", 80)) == {
        2
    }  # one row, and u


@pytest.mark.parametrize("compression", ["top_k", "sketch", "none"])
@pytest.mark.parametrize("upper", ["shared", "private"])
def test_resume_is_bit_identical(compression: str, upper: str) -> None:
    check_resume(
        CommFedBiO(**STEPS, compression=compression, num_kept=1, num_sketch=2, num_system_rounds=3), "global", upper
    )  # type: ignore[arg-type]
