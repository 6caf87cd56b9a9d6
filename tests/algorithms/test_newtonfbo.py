"""NewtonFBO against dense algebra: measured curvature, steps, limit, bias of rho and e, messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_simfbo import check_resume

import fedbilevel as fb
from fedbilevel.algorithms.newtonfbo import MOST_COLUMNS, NewtonFBO, matrices, measurable, polar, solved
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import ProblemError, ScopeError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.federation.schedule import Schedule
from fedbilevel.tasks.hyper_representation import HyperRepresentation
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.yardstick import drive, relative

SMALL = {"num_clients": 3, "dim_upper": 2, "dim_lower": 4}
PLAIN = {"move_upper": 0.1, "least_lower": 1.0, "least_system": 1.0, "eps": 1.0, "momentum": 0.0, "averaging": 0.5}


def dense_run(task: Quadratic, algorithm: NewtonFBO, num_iterations: int, absent: Any) -> dict[str, np.ndarray]:
    """Run the method in numpy; y is one vector, so the measured curvature is the Hessian itself."""
    closed = task.closed_form()
    s = closed.stacked
    x, y = np.zeros(s["B"].shape[2]), np.zeros(s["A"].shape[1])
    z_x, z_y, u, m, v, B = x, y, y, 0 * x, 0 * x, 0
    of = algorithm
    for t in range(1, num_iterations + 1):
        here = [i for i in range(len(closed.share)) if i not in absent(t)]
        share = closed.share[here] / closed.share[here].sum()
        mean = lambda rows, share=share: np.tensordot(share, np.stack(rows), 1)
        one = [{name: s[name][i] for name in ("A", "B", "c", "D", "Dt", "R", "r")} for i in here]
        g_y = mean([c["A"] @ z_y - c["B"] @ z_x - c["c"] for c in one])
        f_y = mean([c["D"] @ z_y - c["Dt"] for c in one])
        h = mean([c["R"] @ z_x - c["r"] + c["B"].T @ u - of.lower_share * c["B"].T @ z_y for c in one])
        H = mean([c["A"] for c in one])
        a = 2 / (t + 1)
        if t <= of.curvature_every or t % of.curvature_every == 0:
            w = max(1 - of.curvature_averaging, a)
            B = (1 - w) * B + w * H
        inverse = lambda e, B=B, H=H: np.linalg.inv(B + (of.damping + e) * np.eye(len(H)))
        m, v = of.momentum * m + (1 - of.momentum) * h, of.decay * v + (1 - of.decay) * h**2
        step = m / (1 - of.momentum**t)
        if of.upper_direction == "adam":
            step = step / (np.sqrt(v / (1 - of.decay**t)) + of.eps)
        else:  # x is one vector, whose only singular value is its norm
            step = np.sqrt(len(x)) * step / np.sqrt(step @ step + of.eps**2)
        e = of.system_damping
        g_u = H @ u - f_y + e * u
        z_x = z_x - of.move_upper * min(1, t / of.warm_up) * step
        z_y, u = z_y - max(of.least_lower, a) * inverse(0) @ g_y, u - max(of.least_system, a) * inverse(e) @ g_u
        w = max(1 - of.averaging, a)
        x, y = (1 - w) * x + w * z_x, (1 - w) * y + w * z_y
    return {"x": x, "y": y, "z_x": z_x, "z_y": z_y, "u": u, "m": m, "s": v}


@pytest.mark.parametrize("direction", ["adam", "polar"])
@pytest.mark.parametrize(("share", "e", "every"), [(0.0, 0.0, 1), (0.7, 0.0, 3), (0.0, 0.4, 2), (1.5, 0.2, 1)])
def test_equals_dense_algebra(share: float, e: float, every: int, direction: Any) -> None:
    """Seven iterations with clients that differ and drop out, beyond warm-up and least shares."""
    task = Quadratic(**SMALL)
    gone = [set(), {0}, {1, 2}, set(), {2}, {0}, set()]
    algorithm = NewtonFBO(
        move_upper=0.05, least_lower=0.5, least_system=0.4, damping=0.1, system_damping=e, lower_share=share, warm_up=3,
        averaging=0.6, curvature_averaging=0.5, curvature_every=every, eps=0.1, upper_direction=direction,
    )  # fmt: skip
    expected = dense_run(task, algorithm, 7, lambda t: gone[t - 1])
    _, state = drive(algorithm, task.build(), 7, drops=lambda iteration, call: gone[iteration - 1])
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(state, name), value, rtol=1e-10, atol=1e-12, err_msg=name)


def _network() -> Any:
    return HyperRepresentation(num_clients=3, share=0.1, num_hidden=3).build()


def test_measured_curvature_of_a_matrix_is_the_signed_mean_of_blocks() -> None:
    """The reference is the dense Hessian of every client by autograd, at the point of the third round."""
    built, algorithm = _network(), NewtonFBO(curvature_averaging=0.0, least_lower=0.2)
    fed, before = drive(algorithm, built, 2)
    fed.begin(3)
    signs = fed.draw("signs", 2**31)
    after = algorithm.round(fed, before)
    host, (places,) = fed.host, matrices(built.problem.y0)
    assert places.shape == (10, 4)
    x, y = host.layout_x.unravel(before.z_x), before.z_y
    hessian = torch.zeros(len(y), len(y), dtype=torch.float64)
    for client in built.clients:
        batch = {"image": torch.as_tensor(client["train"]["image"], dtype=torch.float64),
                 "label": torch.as_tensor(client["train"]["label"]).long()}  # fmt: skip
        batch["features"] = built.problem.features(x, batch)
        loss = lambda flat, batch=batch: built.problem.lower(x, host.layout_y.unravel(flat), batch).mean()
        hessian += torch.autograd.functional.hessian(loss, y) / len(built.clients)
    s = (2 * torch.randint(2, (10,), generator=torch.Generator().manual_seed(signs)) - 1).double()
    blocks = hessian[places[:, :, None, None], places[None, None]]  # (rows, columns, rows, columns)
    expected = torch.einsum("k,l,kilj->ij", s, s, blocks) / 10
    w = 2 / 4  # of the third measurement; curvature_averaging is 0, so the new value counts fully
    assert w < 1 - algorithm.curvature_averaging
    row, column = torch.tril_indices(4, 4)
    torch.testing.assert_close(after.curvature, expected[row, column], rtol=1e-9, atol=1e-12)


def test_signs_differ_between_iterations() -> None:
    fed, _ = drive(NewtonFBO(), _network(), 1)
    fed.begin(1)
    first = fed.draw("signs", 2**31)
    fed.begin(2)
    assert first != fed.draw("signs", 2**31)


def test_matrices_of_y() -> None:
    """A weight and its bias are one matrix; vectors are one row each; every entry is in one place."""
    y0 = {"w": torch.zeros(2, 3), "b": torch.zeros(2), "v": torch.zeros(4), "t": torch.zeros(3, 2, 2)}
    first, second, third = matrices(y0)
    assert first.tolist() == [[0, 1, 2, 6], [3, 4, 5, 7]]
    assert second.tolist() == [[8, 9, 10, 11]]
    assert third.tolist() == [[12, 13, 14, 15], [16, 17, 18, 19], [20, 21, 22, 23]]


def test_solves_with_every_matrix_in_its_place() -> None:
    draw = torch.Generator().manual_seed(0)
    places = [torch.tensor([[0, 1, 4], [2, 3, 5]]), torch.tensor([[6, 7]])]
    dense = [torch.randn(n, n, generator=draw, dtype=torch.float64) for n in (3, 2)]
    dense = [one @ one.T for one in dense]
    packed = torch.cat([one[tuple(torch.tril_indices(len(one), len(one)))] for one in dense])
    v = torch.randn(8, generator=draw, dtype=torch.float64)
    whole = torch.zeros(8, 8, dtype=torch.float64)
    for where, one in zip(places, dense, strict=True):
        for row in where:
            whole[row[:, None], row] = one
    expected = torch.linalg.solve(whole + 0.3 * torch.eye(8, dtype=v.dtype), v)
    torch.testing.assert_close(solved(places, packed, v, 0.3), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("eps", [0.0, 0.7])
def test_polar_factor_of_every_matrix(eps: float) -> None:
    """The reference is M (M'M + eps^2)^-1/2 by eigenvalues, without singular values."""
    draw = torch.Generator().manual_seed(0)
    v = torch.randn(24, generator=draw, dtype=torch.float64)
    start = {"w": torch.zeros(3, 5), "b": torch.zeros(3), "t": torch.zeros(1, 2), "v": torch.zeros(4)}
    places = matrices(start)
    assert [tuple(one.shape) for one in places] == [(3, 6), (1, 2), (1, 4)]
    found = polar(places, v, eps)
    for one in places:
        M = v[one]
        values, vectors = torch.linalg.eigh(M @ M.T + eps**2 * torch.eye(len(M), dtype=v.dtype))
        expected = max(M.shape) ** 0.5 * vectors @ torch.diag(values**-0.5) @ vectors.T @ M
        torch.testing.assert_close(found[one], expected, rtol=1e-9, atol=1e-12)
        if eps == 0:
            assert float(found[one].square().mean()) == pytest.approx(1.0)


def test_polar_steps_reach_the_closed_form_solution_when_they_decrease() -> None:
    task = Quadratic(**SMALL)
    algorithm = NewtonFBO(**{**PLAIN, "eps": 1e-8}, upper_direction="polar")  # type: ignore[arg-type]
    result = fb.solve(*task.build(), algorithm, num_iterations=600, schedule=Schedule(power=1.0, offset=10.0))
    constant = fb.solve(*task.build(), algorithm, num_iterations=600)
    gaps = [relative(one.x["x"], task.closed_form().solution()) for one in (result, constant)]
    assert gaps[0] < 2e-3 < gaps[1]


def test_first_step_is_a_newton_step() -> None:
    """On a quadratic y is the minimiser for x0 after one round, up to the damping."""
    task = Quadratic(**SMALL)
    _, state = drive(NewtonFBO(damping=1e-9), task.build(), 1)
    closed = task.closed_form()
    assert relative(state.y, closed.lower_solution(np.zeros(2))) < 1e-8


def test_reaches_the_closed_form_solution() -> None:
    task = Quadratic(**SMALL)
    closed = task.closed_form()
    _, state = drive(NewtonFBO(**PLAIN), task.build(), 500)
    assert relative(state.x, closed.solution()) < 1e-7
    assert relative(state.y, closed.lower_solution(closed.solution())) < 1e-7
    assert relative(state.u, closed.system_solution(closed.solution())) < 1e-7


def test_limit_with_a_share_of_the_lower_loss_and_a_damped_system() -> None:
    """The limit is the point where f_x + rho g_x - J u vanishes, with y = y*(x) and (H + e) u = f_y."""
    task, rho, e = Quadratic(**SMALL), 0.3, 0.2
    closed = task.closed_form()
    s = {name: closed._mean(rows) for name, rows in closed.stacked.items()}
    _, state = drive(NewtonFBO(**PLAIN, lower_share=rho, system_damping=e), task.build(), 500)
    x, y = state.x.numpy(), closed.lower_solution(state.x.numpy())
    assert relative(state.y, y) < 1e-7
    u = np.linalg.solve(s["A"] + e * np.eye(4), s["D"] @ y - s["Dt"])
    assert relative(state.u, u) < 1e-7
    direct, indirect = s["R"] @ x - s["r"], s["B"].T @ (u - rho * y)
    assert np.abs(direct + indirect).max() < 1e-6 * np.abs(direct).max()
    assert relative(state.x, closed.solution()) > 0.01


@pytest.mark.parametrize(("every", "share"), [(1, 0.0), (3, 0.5)])
def test_ledger(every: int, share: float) -> None:
    """One round; c (c + 1) / 2 floats and c products in iterations that measure: 1, 2, 3 and 6 of 7."""
    built, n = Quadratic(**SMALL).build(), 7
    fed, _ = drive(NewtonFBO(curvature_every=every, lower_share=share), built, n, cohort=Cohort(0.67))
    measured = {1: 7, 3: 4}[every]
    totals = fed.ledger.totals()
    assert totals["rounds"] == n
    assert totals["floats_down"] == 2 * n * (2 + 2 * 4)
    assert totals["floats_up"] == 2 * (n * (2 + 2 * 4) + measured * 10)
    assert totals["hvp"] == 2 * (n + 4 * measured)
    assert totals["gx"] == (2 * n if share else 0)
    assert {totals[name] for name in ("gy", "fx", "fy", "jvp")} == {2 * n}


def test_resume_is_bit_identical() -> None:
    check_resume(NewtonFBO(curvature_every=2), "global", "shared")


def test_measured_step_moves_an_entry_by_a_share_of_its_size() -> None:
    result = fb.solve(*Quadratic(**SMALL).build(), "newtonfbo", move_upper="auto", num_iterations=2)
    assert 0 < float(result.x["x"].abs().max()) < 0.2


def test_refuses_what_it_cannot_solve() -> None:
    for scope in ({"lower": "local"}, {"upper": "private"}):
        built = Quadratic(**SMALL, **scope).build()  # type: ignore[arg-type]
        with pytest.raises(ScopeError, match=r"means? over clients that share"):
            fb.solve(*built, "newtonfbo", num_rounds=1)
    with pytest.raises(ProblemError, match=f"expected at most {MOST_COLUMNS} for newtonfbo"):
        measurable({"y": torch.zeros(MOST_COLUMNS + 1)})


def test_a_schedule_scales_the_step_of_x_and_the_least_steps() -> None:
    built, algorithm = Quadratic(**SMALL).build(), NewtonFBO(least_lower=0.8, least_system=0.8)
    fed = Simulation(algorithm, built.problem, built.clients, dtype=torch.float64)
    state = algorithm.init(fed)
    fed.begin(4)
    long = algorithm.round(fed, state)
    fed.begin(4)
    short = algorithm.scaled(0.75).round(fed, state)
    for name in ("z_x", "z_y", "u"):
        one, other = (getattr(after, name) - getattr(state, name) for after in (long, short))
        torch.testing.assert_close(other, 0.75 * one, rtol=1e-9, atol=1e-14)
