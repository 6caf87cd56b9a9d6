"""SimFBO against dense algebra, closed forms and FedBiO, and its limit under unequal local work."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.simfbo import SimFBO
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.tasks.quadratic import ClosedForm, Quadratic
from support.numeric.yardstick import drive, fixed_point, relative

SMALL = {"num_clients": 3, "dim_upper": 2, "dim_lower": 3}
STEPS = {"lr_upper": 0.05, "lr_lower": 0.2, "lr_system": 0.2}
SCOPES = [(lower, upper) for lower in ("global", "local") for upper in ("shared", "private")]
scopes = pytest.mark.parametrize(("lower", "upper"), SCOPES)


# ---- what the tests of single-loop algorithms share ----------------------------------------------


def plain(name: str, q: np.ndarray, moved: list[int]) -> np.ndarray:
    return q


def dense_run(
    closed: ClosedForm,
    algorithm: Any,
    num_iterations: int,
    *,
    divide: bool,
    absent: Any = lambda iteration: (),
    server: Any = plain,
) -> dict[str, np.ndarray]:
    """Run SimFBO (ShroFBO with `divide`) in numpy, client by client.

    The server takes its own step. `server` computes its direction from the rows of q, of which
    only the rows of the clients `moved` are real."""
    s, n = closed.stacked, len(closed.share)
    x, y, u = np.zeros((n, s["B"].shape[2])), np.zeros((n, s["A"].shape[1])), np.zeros((n, s["A"].shape[1]))
    taus = (
        algorithm.num_local_steps if isinstance(algorithm.num_local_steps, tuple) else (algorithm.num_local_steps,) * n
    )
    for iteration in range(1, num_iterations + 1):
        here = [i for i in range(n) if i not in absent(iteration)]
        share = closed.share[here] / closed.share[here].sum()
        steps = {"x": np.zeros_like(x), "y": np.zeros_like(y), "u": np.zeros_like(u)}
        for i in here:
            A, B, c, D, Dt, R, r = (s[name][i] for name in ("A", "B", "c", "D", "Dt", "R", "r"))
            xi, yi, ui = x[i], y[i], u[i]
            for _ in range(taus[i]):
                dx, dy, du = R @ xi - r + B.T @ ui, A @ yi - B @ xi - c, A @ ui - (D @ yi - Dt)
                for name, d in (("x", dx), ("y", dy), ("u", du)):
                    steps[name][i] += d * (np.mean(taus) / taus[i] if divide else 1)
                xi, yi, ui = xi - algorithm.lr_upper * dx, yi - algorithm.lr_lower * dy, ui - algorithm.lr_system * du
        for name, kept in (("x", closed.private), ("y", closed.local), ("u", closed.local)):
            if not kept:
                steps[name][:] = share @ steps[name][here]
            steps[name] = server(name, steps[name], here if kept else [*range(n)])
        x = x - algorithm.server_lr_upper * algorithm.lr_upper * steps["x"]
        y = y - algorithm.server_lr_lower * algorithm.lr_lower * steps["y"]
        u = u - algorithm.server_lr_system * algorithm.lr_system * steps["u"]
        if algorithm.radius is not None:
            u = u * np.minimum(1, algorithm.radius / np.linalg.norm(u, axis=1, keepdims=True).clip(1e-300))
    return {"x": x, "y": y, "u": u}


def draw_settings(data: st.DataObject, num_clients: int) -> dict[str, Any]:
    factor = st.floats(0.2, 2.0)
    return {
        **STEPS,
        "server_lr_upper": data.draw(factor),
        "server_lr_lower": data.draw(factor),
        "server_lr_system": data.draw(factor),
        "num_local_steps": data.draw(st.one_of(st.integers(1, 3), st.tuples(*[st.integers(1, 4)] * num_clients))),
        "radius": data.draw(st.sampled_from([None, 0.05, 0.5])),
        "minibatches": data.draw(st.sampled_from(["independent", "shared"])),
    }


def check_against_dense(kind: Any, data: st.DataObject, *, divide: bool, server: Any = lambda algorithm: plain) -> None:
    lower, upper = data.draw(st.sampled_from(SCOPES))
    task = Quadratic(
        **SMALL, lower=lower, upper=upper, client_weights=data.draw(st.sampled_from(["equal", "by_samples"]))
    )
    algorithm = kind(**draw_settings(data, task.num_clients))
    gone = data.draw(st.lists(st.sets(st.integers(0, 2), max_size=2), min_size=3, max_size=3))
    fed, state = drive(algorithm, task.build(), 3, drops=lambda iteration, call: gone[iteration - 1])
    target = dense_run(
        task.closed_form(),
        algorithm,
        3,
        divide=divide,
        absent=lambda iteration: gone[iteration - 1],
        server=server(algorithm),
    )
    u = fed.collect(state.u).expand(3, -1)
    if algorithm.radius is not None:
        u = u * (algorithm.radius / u.norm(dim=1, keepdim=True)).clamp(max=1)
    torch.testing.assert_close(
        fed.collect(state.x).expand(3, -1), torch.from_numpy(target["x"]), rtol=1e-11, atol=1e-12
    )
    torch.testing.assert_close(
        fed.collect(state.y).expand(3, -1), torch.from_numpy(target["y"]), rtol=1e-11, atol=1e-12
    )
    torch.testing.assert_close(u, torch.from_numpy(target["u"]), rtol=1e-11, atol=1e-12)


def check_mean_over_cohorts(algorithm: Any) -> None:
    """The mean over all cohorts of two is the step of all clients, so sampling adds no bias."""
    built = Quadratic(**SMALL).build()
    _, start = drive(algorithm, built, 2)
    totals = [torch.zeros_like(value) for value in start]
    cohorts = list(combinations(range(3), 2))
    whole = None
    for cohort in [*cohorts, (0, 1, 2)]:
        fed = Simulation(
            algorithm,
            built.problem,
            built.clients,
            dtype=torch.float64,
            drops=lambda *_, cohort=cohort: {0, 1, 2} - set(cohort),
        )
        fed.begin(1)
        new = algorithm.round(fed, start)
        if len(cohort) == 3:
            whole = new
        else:
            totals = [total + value / len(cohorts) for total, value in zip(totals, new, strict=True)]
            assert min(relative(value, other) for value, other in zip(new, start, strict=True)) > 1e-3
    for total, value in zip(totals, whole, strict=True):
        torch.testing.assert_close(total, value, rtol=1e-12, atol=1e-13)


def check_ledger(kind: Any, data: st.DataObject) -> None:
    lower, upper = data.draw(st.sampled_from(SCOPES))
    task = Quadratic(num_clients=4, dim_upper=2, dim_lower=3, lower=lower, upper=upper)
    size = data.draw(st.sampled_from([None, 2]))
    algorithm = kind(**draw_settings(data, 4))
    built, cohort, num = task.build(), Cohort(data.draw(st.sampled_from([0.5, 1.0]))), data.draw(st.integers(1, 4))
    fed, _ = drive(algorithm, built, num, batch_size=size, cohort=cohort)
    taus = torch.tensor(algorithm.num_local_steps).expand(4)
    floats = (2 if upper == "shared" else 0) + (2 * 3 if lower == "global" else 0)
    columns = fed.ledger.columns
    came = columns["fx"] // taus  # how many cohorts each client was in
    assert int(came.sum()) == num * cohort.size(4)
    for name in ("gy", "fx", "fy", "jvp", "hvp"):
        assert torch.equal(columns[name], came * taus)
    assert fed.ledger.rounds == (num if floats else 0)
    assert torch.equal(columns["floats_up"], came * floats)
    assert torch.equal(columns["floats_down"], came * floats)
    assert torch.equal(columns["bytes_up"], came * floats * 8)


def check_resume(algorithm: Any, lower: str, upper: str, **options: Any) -> None:
    """A checkpoint after three of six outer iterations resumes with the same bits."""
    task = Quadratic(num_clients=4, dim_upper=2, dim_lower=3, lower=lower, upper=upper)  # type: ignore[arg-type]
    built = task.build()
    options = {"seed": 5, "batch_size": 2, "cohort": Cohort(0.5), **options}
    whole, target = drive(algorithm, built, 6, **options)
    half, state = drive(algorithm, built, 3, **options)
    tensors, plain = half.state_dict(state)
    fed = Simulation(algorithm, built.problem, built.clients, dtype=torch.float64, **options)
    algorithm.init(fed)
    state = fed.load_state_dict({name: value.clone() for name, value in tensors.items()}, plain, type(state))
    for iteration in range(4, 7):
        fed.begin(iteration)
        state = algorithm.round(fed, state)
    for name in state._fields:
        assert torch.equal(fed.collect(getattr(state, name)), whole.collect(getattr(target, name))), name
    assert fed.ledger.totals() == whole.ledger.totals()
    for name, rows in whole.host.memory.rows.items():
        assert torch.equal(fed.host.memory.rows[name], rows)


def check_unequal_work(kind: Any, target: ClosedForm, other: ClosedForm, built: Any) -> None:
    """Check the limit for tau_i = 1, 2, 3 as the local step shrinks.

    Its distance to the solution of `target` is proportional to the step, and it does not approach
    the solution of `other`."""
    gap = relative(target.solution(), other.solution())
    errors = []
    for scale in (0.1, 0.01, 0.001):
        factors = {f"server_{name}": 1 / scale for name in STEPS}
        point, radius = fixed_point(
            kind(**{name: 0.5 * scale * lr for name, lr in STEPS.items()}, **factors, num_local_steps=(1, 2, 3)), built
        )
        assert radius < 0.99
        errors.append(relative(point["x"], target.solution()))
        assert relative(point["x"], other.solution()) > 0.8 * gap
    assert gap > 0.1
    assert errors[0] < 0.01
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.05)
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.01)


# ---- SimFBO --------------------------------------------------------------------------------------


def test_reaches_the_closed_form_solution() -> None:
    task = Quadratic(**SMALL)
    closed = task.closed_form()
    _, state = drive(SimFBO(**STEPS, minibatches="shared"), task.build(), 220)
    assert relative(state.x, closed.solution()) < 1e-8
    assert relative(state.y, closed.lower_solution(closed.solution())) < 1e-8
    assert relative(state.u, closed.system_solution(closed.solution())) < 1e-8


@scopes
def test_exact_in_every_scope(lower: str, upper: str) -> None:
    task = Quadratic(**SMALL, lower=lower, upper=upper)  # type: ignore[arg-type]
    closed = task.closed_form()
    point, radius = fixed_point(
        SimFBO(**STEPS, server_lr_upper=0.7, server_lr_lower=1.3, server_lr_system=0.9), task.build()
    )
    assert radius < 0.98
    assert SimFBO().check_scopes(task.build().problem.scopes) == []
    assert relative(point["x"], closed.solution()) < 1e-11
    assert relative(point["y"], closed.lower_solution(closed.solution())) < 1e-11
    assert relative(point["u"], closed.system_solution(closed.solution())) < 1e-11


@given(st.data())
def test_equals_dense_algebra(data: st.DataObject) -> None:
    """Any scope, local steps, server steps, radius, weights and cohort of each call."""
    check_against_dense(SimFBO, data, divide=False)


@pytest.mark.parametrize("minibatches", ["independent", "shared"])
@scopes
def test_is_fedbio_with_server_factors_of_one(minibatches: str, lower: str, upper: str) -> None:
    built = Quadratic(**SMALL, lower=lower, upper=upper).build()  # type: ignore[arg-type]
    options = {"batch_size": 2, "cohort": Cohort(0.67), "seed": 3}
    for tau, tolerance in ((1, 0.0), (3, 1e-13)):
        settings = {**STEPS, "num_local_steps": tau, "minibatches": minibatches}
        one, a = drive(SimFBO(**settings), built, 4, **options)
        two, b = drive(FedBiO(**settings), built, 4, **options)
        for name in a._fields:
            torch.testing.assert_close(
                one.collect(getattr(a, name)), two.collect(getattr(b, name)), rtol=tolerance, atol=tolerance
            )
        assert one.ledger.totals() == two.ledger.totals()


def test_unequal_work_solves_the_problem_weighted_by_it() -> None:
    task = Quadratic(**SMALL)
    closed = task.closed_form()
    check_unequal_work(SimFBO, closed._replace(share=np.array([1, 2, 3]) / 6), closed, task.build())


def test_projects_the_mean_and_not_the_clients() -> None:
    """A radius just above |u*| has no effect here, but FedBiO, which projects per client, is wrong."""
    task = Quadratic(**SMALL)
    closed = task.closed_form()
    radius = 1.01 * float(np.linalg.norm(closed.system_solution(closed.solution())))
    _, state = drive(SimFBO(**STEPS, radius=radius, minibatches="shared"), task.build(), 220)
    assert relative(state.x, closed.solution()) < 1e-8
    _, other = drive(FedBiO(**STEPS, num_local_steps=1, radius=radius, minibatches="shared"), task.build(), 220)
    assert relative(other.x, closed.solution()) > 1e-3


def test_sampled_cohorts_are_unbiased() -> None:
    check_mean_over_cohorts(SimFBO(**STEPS, num_local_steps=(1, 2, 3), server_lr_upper=0.8))


def test_sampled_cohorts_reach_the_neighbourhood_of_the_solution() -> None:
    """Started at the solution, the iterates stay around it."""
    task = Quadratic(**SMALL)
    small = {name: lr / 10 for name, lr in STEPS.items()}
    built, xs = task.build(), []
    algorithm = SimFBO(**small, minibatches="shared")
    fed = Simulation(algorithm, built.problem, built.clients, dtype=torch.float64, cohort=Cohort(0.67))
    point, _ = fixed_point(algorithm, built)
    state = algorithm.State(point["x"], point["y"], point["u"])
    for iteration in range(1, 151):
        fed.begin(iteration)
        state = algorithm.round(fed, state)
        xs.append(state.x)
    assert max(relative(x, task.closed_form().solution()) for x in xs) < 0.1
    assert relative(torch.stack(xs).mean(0), task.closed_form().solution()) < 0.03
    assert int(fed.ledger.columns["fx"].sum()) == 300


def test_private_blocks_of_absent_clients_stay() -> None:
    built = Quadratic(**SMALL, upper="private").build()
    algorithm = SimFBO(**STEPS)
    one, a = drive(algorithm, built, 1)
    before = one.collect(a.x).clone()
    two, b = drive(algorithm, built, 2, drops=lambda iteration, call: {1} if iteration == 2 else ())
    after = two.collect(b.x)
    assert torch.equal(after[1], before[1])
    assert min(relative(after[i], before[i]) for i in (0, 2)) > 1e-3


@given(st.data())
def test_ledger(data: st.DataObject) -> None:
    check_ledger(SimFBO, data)


@scopes
def test_resume_is_bit_identical(lower: str, upper: str) -> None:
    check_resume(SimFBO(**STEPS, num_local_steps=(1, 2, 3, 1), radius=1.0), lower, upper)


def test_settings_are_checked() -> None:
    with pytest.raises(SettingError, match="server_lr_upper"):
        SimFBO(server_lr_upper=0.0)
    with pytest.raises(SettingError, match="one per client"):
        drive(SimFBO(num_local_steps=(1, 2)), Quadratic(**SMALL).build(), 1)
