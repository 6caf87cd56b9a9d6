"""The penalty method in numpy, client by client; its bias by dense algebra, and what it costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_adafbio import SCOPES, SMALL

import fedbilevel as fb
from fedbilevel.algorithms.penalty import Penalty
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.problem.problem import Scopes
from fedbilevel.tasks.quadratic import ClosedForm, Quadratic
from fedbilevel.tasks.task import Built
from support.numeric.by_hand import Samples, fx, fy, gy
from support.numeric.yardstick import drive, fixed_point, relative

STEPS = {"lr_upper": 0.05, "lr_lower": 0.25}
COEFFICIENTS = {
    1: {1: 1, 0: -1},
    2: {1: 1 / 2, -1: -1 / 2},
    4: {1: 2 / 3, -1: -2 / 3, 2: -1 / 12, -2: 1 / 12},
}  # of the derivative at 0 of a function that is known at these points


def offsets(algorithm: Penalty, ys: dict[int, np.ndarray]) -> dict[str, np.ndarray]:
    """The y of the run, and what is sent beside it."""
    centre = ys[0] if algorithm.order == 1 else (ys[1] + ys[-1]) / 2
    y = ys[1] if algorithm.answer == "penalised" else centre
    d = ys[1] - y if algorithm.answer == "lower" else ys[0 if algorithm.order == 1 else -1] - y
    return {"y": y, "d": d, **({"e_plus": ys[2] - y, "e_minus": ys[-2] - y} if 2 in ys else {})}


def by_hand(
    algorithm: Penalty, task: Quadratic, num: int, batch_size: int | None, absent: Callable[[int, int], Any]
) -> dict[str, np.ndarray]:
    samples, m = Samples(task, batch_size=batch_size), task.num_clients
    taus = (
        algorithm.num_local_steps if isinstance(algorithm.num_local_steps, tuple) else (algorithm.num_local_steps,) * m
    )
    x = np.zeros((m, task.dim_upper))
    ys = {j: np.zeros((m, task.dim_lower)) for j in COEFFICIENTS[algorithm.order]}
    for iteration in range(1, num + 1):
        lam = algorithm.penalty * algorithm.penalty_growth ** (iteration - 1) + algorithm.penalty_increment * (
            iteration - 1
        )
        lam = lam if algorithm.max_penalty is None else min(lam, algorithm.max_penalty)
        here = [i for i in range(m) if i not in absent(iteration, 1)]
        for i in here:
            for step in range(taus[i]):
                upper, lower, cross = (
                    samples.drawn(i, role, name, (iteration, 1, step))
                    for role, name in (("val", "B_f"), ("train", "B_g"), ("train", "B_x"))
                )
                dx, new = 0.0, {}
                for j, c in COEFFICIENTS[algorithm.order].items():
                    y, s = ys[j][i], j / lam
                    dx = dx + c * lam * (s * fx(upper, x[i], y) - cross["B"].mean(0).T @ y)
                    dy = s * fy(upper, x[i], y) + gy(lower, x[i], y)
                    new[j] = y - algorithm.lr_lower / (1 + abs(s)) * dy
                x[i] = x[i] - algorithm.lr_upper * dx
                for j, y in new.items():
                    ys[j][i] = y
        for rows, kept in ((x, task.upper == "private"), *((rows, task.lower == "local") for rows in ys.values())):
            if not kept:
                rows[:] = rows[here].mean(0)
    return {"x": x, **offsets(algorithm, ys)}


@pytest.mark.parametrize("answer", ["lower", "penalised"])
@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize(
    "growth",
    [{}, {"penalty_growth": 3.0, "max_penalty": 20.0}, {"penalty_increment": 4.0}],
    ids=["constant", "growing by a factor", "growing by a sum"],
)
@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_three_outer_iterations_by_hand_on_minibatches_with_unequal_work_and_drops(lower, upper, growth, order, answer):
    task = Quadratic(**SMALL, lower=lower, upper=upper)
    algorithm = Penalty(**STEPS, penalty=3.0, num_local_steps=(3, 1, 2), order=order, answer=answer, **growth)
    drops = lambda iteration, call: [iteration % 3]
    fed, state = drive(algorithm, task.build(), 3, batch_size=2, drops=drops)
    for name, expected in by_hand(algorithm, task, 3, 2, drops).items():
        np.testing.assert_allclose(fed.collect(getattr(state, name)).expand(3, -1), expected, rtol=1e-11, atol=1e-12)


def penalty_solution(closed: ClosedForm, lam: float, order: int) -> np.ndarray:
    """Solve for x where the difference of gradients vanishes.

    It is affine in x, with J' = -B and every y_j from its normal equations."""
    s, n = closed.stacked, len(closed.share)
    shape = (n, s["B"].shape[2]) if closed.private else (s["B"].shape[2],)
    lower = (
        (lambda rows: rows)
        if closed.local
        else (lambda rows: np.broadcast_to(np.tensordot(closed.share, rows, axes=1), rows.shape))
    )

    def gradient(x: np.ndarray) -> np.ndarray:
        xs = np.broadcast_to(x, (n, shape[-1]))
        right = np.einsum("nij,nj->ni", s["B"], xs) + s["c"]
        solve = lambda matrix, rows: np.linalg.solve(lower(matrix), lower(rows)[..., None])[..., 0]
        through = sum(
            c * solve(j * s["D"] + lam * s["A"], j * s["Dt"] + lam * right) for j, c in COEFFICIENTS[order].items()
        )
        blocks = np.einsum("nij,nj->ni", s["R"], xs) - s["r"] - lam * np.einsum("nij,ni->nj", s["B"], through)
        return blocks if closed.private else closed.share @ blocks

    zero = gradient(np.zeros(shape)).ravel()
    columns = np.stack([gradient(unit.reshape(shape)).ravel() - zero for unit in np.eye(len(zero))], axis=1)
    return np.linalg.solve(columns, -zero).reshape(shape)


@pytest.mark.parametrize(("order", "lam"), [(1, 1.0), (1, 10.0), (1, 300.0), (2, 10.0), (2, 300.0), (4, 20.0)])
@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_it_converges_to_the_solution_of_the_penalised_problem(lower, upper, order, lam):
    task = Quadratic(**SMALL, lower=lower, upper=upper)
    point, radius = fixed_point(Penalty(**STEPS, penalty=lam, order=order, num_local_steps=1), task.build())
    assert radius < 1
    np.testing.assert_allclose(point["x"], penalty_solution(task.closed_form(), lam, order), rtol=0, atol=1e-9)


@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_the_bias_falls_like_the_weight_to_the_power_of_minus_p(lower, upper, order):
    closed = Quadratic(**SMALL, lower=lower, upper=upper).closed_form()
    far = [relative(penalty_solution(closed, lam, order), closed.solution()) for lam in (20.0, 80.0, 320.0)]
    assert far[0] > 1e-6
    assert far[0] / far[1] == pytest.approx(4**order, rel=0.3)
    assert far[1] / far[2] == pytest.approx(4**order, rel=0.1)


@pytest.mark.parametrize("order", [2, 4])
def test_central_differences_diverge_exactly_where_the_upper_loss_outweighs_the_lower(order):
    """g - j f / lam has a minimum while j / lam is below mu_g / L_f."""
    task = Quadratic(**SMALL, lower="local", upper="private")
    s, far = task.closed_form().stacked, max(COEFFICIENTS[order])
    limit = far * max(np.linalg.eigvals(np.linalg.solve(a, d)).real.max() for a, d in zip(s["A"], s["D"], strict=True))
    for lam, converges in ((1.1 * limit, True), (0.9 * limit, False)):
        algorithm = Penalty(lr_upper=1e-9, lr_lower=0.1, penalty=lam, order=order, num_local_steps=1)
        assert (fixed_point(algorithm, task.build())[1] < 1 + 1e-6) is converges  # x stands almost still


def quartic(num: int = 5, dx: int = 3, dy: int = 4) -> tuple[fb.Problem, list[Any]]:
    """Clients that differ, a lower loss of degree four, an upper loss that depends on x and y."""
    draw = torch.Generator().manual_seed(3)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)
    clients = [
        {
            "train": {
                "A": (a := normal(1, dy, dy) / 2) @ a.mT + torch.eye(dy),
                "B": normal(1, dy, dx),
                "c": normal(1, dy),
            },
            "val": {"D": 0.7 * normal(1, dy, dy), "t": normal(1, dy), "r": normal(1, dx)},
        }
        for _ in range(num)
    ]
    rows = lambda matrix, vector: (matrix @ vector[..., None])[..., 0]

    def lower(x, y, batch):
        quadratic = (rows(batch["A"], y["y"]) * y["y"]).sum(-1) / 2
        return quadratic + (y["y"] ** 4).sum(-1) / 4 - ((rows(batch["B"], x["x"]) + batch["c"]) * y["y"]).sum(-1)

    def upper(x, y, batch):
        return ((rows(batch["D"], y["y"]) - batch["t"]) ** 2).sum(-1) / 2 + ((x["x"] - batch["r"]) ** 2).sum(-1) / 20

    start = {"x0": {"x": normal(dx)}, "y0": {"y": torch.zeros(dy, dtype=torch.float64)}}
    return fb.Problem(upper=upper, lower=lower, **start), clients


def exact_points(problem: fb.Problem, clients: list[Any], j: float, lam: float) -> torch.Tensor:
    """argmin_y of the mean of g + j f / lam at x0, by Newton's method on dense Hessians."""
    whole = lambda role: {name: torch.cat([c[role][name] for c in clients]) for name in clients[0][role]}
    train, val = whole("train"), whole("val")
    loss = lambda y: (
        problem.lower(problem.x0, {"y": y}, train).mean() + j / lam * problem.upper(problem.x0, {"y": y}, val).mean()
    )
    y = problem.y0["y"]
    for _ in range(60):
        y = y - torch.linalg.solve(torch.func.jacrev(torch.func.grad(loss))(y), torch.func.grad(loss)(y))
    assert float(torch.func.grad(loss)(y).norm()) < 1e-12
    return y


def dense_hypergradient(problem: fb.Problem, clients: list[Any]) -> torch.Tensor:
    whole = lambda role: {name: torch.cat([c[role][name] for c in clients]) for name in clients[0][role]}
    g = lambda x, y: problem.lower({"x": x}, {"y": y}, whole("train")).mean()
    f = lambda x, y: problem.upper({"x": x}, {"y": y}, whole("val")).mean()
    x, y = problem.x0["x"], exact_points(problem, clients, 0, 1)
    hessian, jacobian = (torch.func.jacrev(torch.func.grad(g, 1), k)(x, y) for k in (1, 0))
    fx, fy = torch.func.grad(f, (0, 1))(x, y)
    return fx - jacobian.mT @ torch.linalg.solve(hessian, fy)


def direction(problem: fb.Problem, clients: list[Any], order: int, lam: float) -> torch.Tensor:
    """The algorithm's step of x, with every y_j at its solution."""
    algorithm = Penalty(lr_upper=1.0, lr_lower=1e-12, num_local_steps=1, order=order, penalty=lam)
    fed = Simulation(algorithm, problem, clients, dtype=torch.float64)
    ys = {j: exact_points(problem, clients, j, lam) for j in COEFFICIENTS[order]}
    state = algorithm.State(x=problem.x0["x"], **offsets(algorithm, ys))
    fed.begin(1)
    return problem.x0["x"] - algorithm.round(fed, state).x


def test_the_bias_of_the_hypergradient_on_a_quartic_lower_loss():
    """Lower levels are solved, so that the bias of the differences is all that is left."""
    problem, clients = quartic()
    exact = dense_hypergradient(problem, clients)
    error = {
        (order, lam): relative(direction(problem, clients, order, lam), exact)
        for order in (1, 2, 4)
        for lam in (10.0, 100.0)
    }
    assert 1e-2 < error[1, 10.0] < 1e-1
    assert error[2, 10.0] < 5e-3
    assert error[4, 10.0] < 5e-4
    for order in (1, 2, 4):
        assert error[order, 10.0] / error[order, 100.0] == pytest.approx(10**order, rel=0.2)


@pytest.mark.parametrize("order", [1, 2, 4])
def test_the_y_of_a_run_fits_the_lower_loss_alone(order):
    problem, clients = quartic()
    options = {"lr_upper": 1e-12, "lr_lower": 0.2, "num_local_steps": 1, "penalty": 30.0, "order": order}
    run = lambda **more: drive(Penalty(**options, **more), Built(problem, clients), 400)[1].y
    lower, fitted = (exact_points(problem, clients, j, 30.0) for j in (0, 1))
    assert relative(run(answer="penalised"), fitted) < 1e-7
    assert relative(fitted, lower) > 1e-3
    assert relative(run(), lower) < (1e-7 if order == 1 else relative(fitted, lower) ** 2 * 2)
    if order > 1:
        plus, minus = (exact_points(problem, clients, j, 30.0) for j in (1, -1))
        assert relative(run(), (plus + minus) / 2) < 1e-7


def test_a_growing_weight_removes_the_bias():
    task = Quadratic(**SMALL)
    closed = task.closed_form()
    algorithm = Penalty(
        lr_upper=0.25, lr_lower=0.4, num_local_steps=1, order=1, penalty=1.0, penalty_growth=1.3, max_penalty=1e5
    )
    _, state = drive(algorithm, task.build(), 120)
    assert relative(state.x, closed.solution()) < 1e-4
    assert relative(penalty_solution(closed, 1.0, 1), closed.solution()) > 0.05


@pytest.mark.parametrize("order", [1, 2, 4])
def test_noise_of_samples_is_not_multiplied_by_the_weight(order):
    """All y_j start at the same point and use the same samples, so they differ by O(1/lam).

    Hence lam times the difference does not grow with lam."""
    built = Quadratic(**SMALL, noise=0.9).build()
    small, large = (
        drive(Penalty(**STEPS, penalty=lam, order=order, num_local_steps=1), built, 1, batch_size=1)[1]
        for lam in (1.0, 1e9)
    )
    assert torch.equal(small.x, large.x)  # the difference of g_x is exactly zero where all y_j are equal
    assert float(small.d.norm()) > 1e-2
    assert float(large.d.norm()) < 1e-7


@pytest.mark.parametrize("order", [1, 2, 4])
def test_a_client_that_joins_late_starts_every_point_where_y_starts(order):
    built = Quadratic(**SMALL, lower="local", upper="private").build()
    problem = dataclasses.replace(built.problem, y0={"y": torch.tensor([1.0, -2.0, 0.5])})
    algorithm = Penalty(**STEPS, num_local_steps=2, order=order)
    prompt, first = drive(algorithm, built._replace(problem=problem), 1)
    late, second = drive(
        algorithm, built._replace(problem=problem), 2, drops=lambda iteration, call: [1] if iteration == 1 else []
    )
    for name in ("x", "y", "d", *(("e_plus", "e_minus") if order == 4 else ())):
        assert torch.equal(prompt.collect(getattr(first, name))[1], late.collect(getattr(second, name))[1])
        assert not torch.equal(prompt.collect(getattr(first, name))[0], late.collect(getattr(second, name))[0])


@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_no_scope_is_warned_of(lower, upper):
    assert Penalty().check_scopes(Scopes(lower, upper)) == []


@given(st.data())
def test_the_ledger_holds_what_the_docstring_says(data):
    lower, upper = data.draw(st.sampled_from(SCOPES))
    dx, dy, num = (data.draw(st.integers(1, 3)) for _ in range(3))
    taus = data.draw(st.tuples(*[st.integers(1, 3)] * 2))
    order, answer = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from(["lower", "penalised"]))
    task = Quadratic(num_clients=2, dim_upper=dx, dim_lower=dy, lower=lower, upper=upper)
    algorithm = Penalty(num_local_steps=taus, order=order, answer=answer)
    fed, _ = drive(algorithm, task.build(), num, batch_size=data.draw(st.sampled_from([None, 2])))
    n, X, Y, columns = len(COEFFICIENTS[order]), dx * (upper == "shared"), dy * (lower == "global"), fed.ledger.columns
    assert fed.ledger.rounds == (X + Y > 0) * num
    assert columns["floats_up"].tolist() == columns["floats_down"].tolist() == [num * (X + n * Y)] * 2
    f = 1 if order == 1 else n
    for name, times in {"gy": n, "gx": n, "fx": f, "fy": f, "hvp": 0, "jvp": 0}.items():
        assert columns[name].tolist() == [num * times * tau for tau in taus]


@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize(("lower", "upper"), [SCOPES[0], SCOPES[3]])
def test_a_checkpoint_goes_on_bit_for_bit(lower, upper, order):
    built = Quadratic(**SMALL, lower=lower, upper=upper).build()
    algorithm, options = Penalty(penalty_increment=1.0, order=order), {"batch_size": 2, "cohort": Cohort(0.6)}
    whole, end = drive(algorithm, built, 4, **options)
    half, middle = drive(algorithm, built, 2, **options)
    fresh, _ = drive(algorithm, built, 0, **options)
    tensors, plain = half.state_dict(middle)
    state = fresh.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, plain, algorithm.State)
    for iteration in (3, 4):
        fresh.begin(iteration)
        state = algorithm.round(fresh, state)
    for name in (name for name, value in end._asdict().items() if value is not None):
        assert torch.equal(whole.collect(getattr(end, name)), fresh.collect(getattr(state, name)))


def test_the_weight_grows_as_asked_and_never_overflows():
    assert [Penalty(penalty=2.0).weight(t) for t in (0, 7, 10**6)] == [2.0, 2.0, 2.0]
    assert [Penalty(penalty=2.0, penalty_increment=0.5).weight(t) for t in (0, 1, 8)] == [2.0, 2.5, 6.0]
    growing = Penalty(penalty=2.0, penalty_growth=1.5, max_penalty=100.0)
    np.testing.assert_allclose([growing.weight(t) for t in (0, 1, 2, 10**6)], [2.0, 3.0, 4.5, 100.0], rtol=1e-12)
    with pytest.raises(SettingError, match="set max_penalty"):
        Penalty(penalty_growth=1.1)
    with pytest.raises(SettingError, match=r"max_penalty is 1.0, expected at least penalty, which is 2.0"):
        Penalty(penalty=2.0, max_penalty=1.0)
