"""The exact hypergradient against closed forms, dense algebra and finite differences.

The differences are those of Phi(x) = mean f(x, y*(x)).
"""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.errors import ProblemError, ResidualWarning, SettingError
from fedbilevel.oracle import population as populations
from fedbilevel.oracle.hypergradient import (
    SOLVERS,
    hypergradient,
    largest_curvature,
    lower_solution,
    project,
    solve_cg,
    solve_exact,
    solve_fixed_point,
    solve_neumann,
)
from fedbilevel.oracle.population import Population
from fedbilevel.oracle.stationarity import measured
from fedbilevel.problem.problem import Problem
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.task import Built
from support.numeric.yardstick import relative

SCOPES = list(itertools.product(("global", "local"), ("shared", "private"), ("equal", "by_samples")))
OPTIONS = {"exact": {}, "cg": {}, "neumann": {"num_terms": 150}, "fixed_point": {"tolerance": 1e-12}}


def meet(built, **options):
    return Population(built.problem, built.clients, **{"dtype": torch.float64, **options})


def point(population, seed=0):
    """A random x by its scope; padding stays zero."""
    x = torch.randn(population.x0.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (
        x
        if population.x_sizes is None
        else torch.where(torch.arange(x.shape[1]) < population.x_sizes[:, None], x, torch.zeros(()))
    )


def task(lower, upper, weights, **more):
    return Quadratic(
        **{
            "num_clients": 4,
            "dim_upper": 3,
            "dim_lower": 4,
            "lower": lower,
            "upper": upper,
            "client_weights": weights,
            **more,
        }
    )


# ---- its length, for a look at a run ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("lower", "upper", "weights"), SCOPES)
@pytest.mark.parametrize("at_once", [1, 2**27])
def test_measured_norm_is_that_of_the_closed_form(lower, upper, weights, at_once, monkeypatch):
    """From any y, however many clients are looked at together. The oracle of the run is left alone."""
    monkeypatch.setattr(populations, "_LOOK", at_once)
    made = task(lower, upper, weights)
    built, closed = made.build(), made.closed_form()
    population = meet(built)
    x = point(population)
    y = torch.randn(
        (4, 4) if lower == "local" else (4,), generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    value = np.asarray(closed.hypergradient(x.numpy()))
    share = (
        np.array([len(one["train"]["A"]) for one in built.clients], float) if weights == "by_samples" else np.ones(4)
    )
    wanted = np.sqrt((share / share.sum() * (value**2).sum(1)).sum()) if upper == "private" else np.linalg.norm(value)
    assert measured(population, x, y) == pytest.approx(wanted, rel=1e-6)
    assert not population.oracle._plans


@pytest.mark.parametrize("lower", ["global", "local"])
def test_where_every_client_has_its_own_point_the_mean_is_over_those(lower):
    """Peers that disagree: H, J, f_x and f_y of every client at its own x, by dense algebra.

    y is the solution of all clients or of the client.
    """
    built = task(lower, "shared", "by_samples", cross=0.3).build()
    population = meet(built)
    rng = torch.Generator().manual_seed(1)
    x, begin = (torch.randn(4, d, generator=rng, dtype=torch.float64) for d in (3, 4))
    share = np.array([len(one["train"]["A"]) for one in built.clients], float)
    share /= share.sum()
    mean = lambda rows: np.tensordot(share, np.array(rows), 1)
    oracle, units = population.oracle, torch.eye(4, dtype=torch.float64)
    batch = lambda i, role: population.data.batch(torch.tensor([i]), role)
    H = [
        torch.cat([oracle.hessian_product(x[i], begin[i], unit, batch(i, "train")) for unit in units]).numpy()
        for i in range(4)
    ]
    g = [oracle.lower_grad(x[i], torch.zeros(4, dtype=torch.float64), batch(i, "train"))[0].numpy() for i in range(4)]
    own = (
        [-np.linalg.solve(H[i], g[i]) for i in range(4)]
        if lower == "local"
        else [-np.linalg.solve(mean(H), mean(g))] * 4
    )
    J, fx, fy, y = [], [], [], torch.tensor(np.array(own))
    for i in range(4):
        train, val = batch(i, "train"), batch(i, "val")
        J.append(torch.cat([oracle.jacobian_product(x[i], y[i], unit, train) for unit in units]).numpy().T)
        fx.append(oracle.upper_grad_x(x[i], y[i], val)[0].numpy())
        fy.append(oracle.upper_grad_y(x[i], y[i], val)[0].numpy())
    if lower == "local":
        wanted = mean([fx[i] - J[i] @ np.linalg.solve(H[i], fy[i]) for i in range(4)])
    else:
        wanted = mean(fx) - mean(J) @ np.linalg.solve(mean(H), mean(fy))
    assert measured(population, x, begin) == pytest.approx(np.linalg.norm(wanted), rel=1e-6)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-6), (torch.float32, 1e-3)])
@pytest.mark.parametrize("condition", [10.0, 1e4])
def test_measured_norm_is_found_for_badly_conditioned_lower_levels_in_both_precisions(dtype, near, condition):
    """g = y'Hy/2 - x'y and f = |y - b|^2/2: the gradient at x is H^-1 (H^-1 x - b)."""
    eigenvalues = torch.logspace(0, -np.log10(condition), 40, dtype=torch.float64)
    problem = Problem(
        upper=lambda x, y, batch: (batch["weight"] * ((y["y"] - batch["b"]) ** 2).sum(-1)).sum() / 2,
        lower=lambda x, y, batch: (
            (batch["weight"] * (batch["h"] * y["y"] ** 2).sum(-1)).sum() / 2 - (x["x"] * y["y"]).sum()
        ),
        x0={"x": torch.ones(40)},
        y0={"y": torch.zeros(40)},
    )
    clients = [
        {"train": {"h": (eigenvalues * scale)[None]}, "val": {"b": torch.full((1, 40), scale)}} for scale in (0.5, 1.5)
    ]
    population = Population(problem, clients, dtype=dtype)
    wanted = torch.linalg.vector_norm((1 / eigenvalues - 1) / eigenvalues)
    assert measured(population, population.x0, population.y0) == pytest.approx(float(wanted), rel=near)


def test_measured_norm_is_nan_where_no_solution_was_found_although_j_is_zero():
    """A lower level without x has J = 0, whatever u is."""
    fit = lambda y, batch: (batch["weight"] * (batch["a"] @ y["y"] - 1) ** 2).sum()
    made = lambda sign: Problem(
        upper=lambda x, y, batch: fit(y, batch) + 0 * x["x"].sum(),
        lower=lambda x, y, batch: sign * fit(y, batch),
        x0={"x": torch.ones(2)},
        y0={"y": torch.zeros(2)},
    )
    clients = [{role: {"a": torch.tensor([[1.0, 0.0], [0.3, 2.0 + i]])} for role in ("train", "val")} for i in range(2)]
    lengths = [
        measured(population, population.x0, population.y0)
        for sign in (1, -1)
        for population in [Population(made(sign), clients)]
    ]
    assert lengths[0] == 0
    assert np.isnan(lengths[1])


@pytest.mark.parametrize("lower", ["global", "local"])
def test_measured_norm_is_nan_where_the_lower_level_is_not_solved(lower, monkeypatch):
    problem, clients = task(lower, "shared", "equal").build()
    bent = dataclasses.replace(problem, lower=lambda x, y, batch: problem.lower(x, y, batch) - 50 * (y["y"] ** 2).sum())
    population = meet(Built(bent, clients))
    assert np.isnan(measured(population, population.x0, torch.ones(4, dtype=torch.float64)))
    population = meet(task(lower, "shared", "equal").build())
    monkeypatch.setattr("fedbilevel.oracle.stationarity._MOST_PRODUCTS", 1)
    assert np.isnan(measured(population, point(population), torch.ones(4, dtype=torch.float64)))


# ---- closed form -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("lower", "upper", "weights"), SCOPES)
@pytest.mark.parametrize("method", SOLVERS)
def test_every_solver_finds_the_closed_form_hypergradient(lower, upper, weights, method):
    made = task(lower, upper, weights)
    population, closed = meet(made.build()), made.closed_form()
    x = point(population)
    y = torch.as_tensor(closed.lower_solution(x.numpy()))
    got = hypergradient(population, x, y, method=method, **OPTIONS[method])
    assert got.value.shape == population.x0.shape
    assert relative(got.value, closed.hypergradient(x.numpy())) < 1e-8
    assert relative(got.u, closed.system_solution(x.numpy())) < 1e-8
    assert got.residual < 1e-8


@pytest.mark.parametrize(("lower", "upper", "weights"), SCOPES)
def test_newton_finds_the_closed_form_lower_solution(lower, upper, weights):
    made = task(lower, upper, weights)
    population = meet(made.build())
    x = point(population)
    expected = made.closed_form().lower_solution(x.numpy())
    assert relative(lower_solution(population, x), expected) < 1e-10
    assert relative(lower_solution(population, x, torch.ones(4, dtype=torch.float64)), expected) < 1e-10


@pytest.mark.parametrize("method", SOLVERS)
def test_at_the_solution_the_hypergradient_vanishes(method):
    made = Quadratic(num_clients=4, dim_upper=3, dim_lower=4)
    population, closed = meet(made.build()), made.closed_form()
    x = torch.as_tensor(closed.solution())
    got = hypergradient(
        population, x, torch.as_tensor(closed.lower_solution(x.numpy())), method=method, **OPTIONS[method]
    )
    assert float(got.value.norm()) < 1e-8


def test_the_yardstick_tells_the_hypergradient_from_the_mean_of_the_clients_own():
    """With these clients an estimator that averages local hypergradients is wrong by a wide margin."""
    made = Quadratic(num_clients=4, dim_upper=3, dim_lower=4)
    closed = made.closed_form()
    x = np.ones(3)
    biased = closed._replace(local=True).hypergradient(x)
    assert relative(biased, closed.hypergradient(x)) > 0.05
    by_samples = closed._replace(share=np.array([0.1, 0.2, 0.3, 0.4])).hypergradient(x)
    assert relative(by_samples, closed.hypergradient(x)) > 0.05


any_quadratic = {
    "num_clients": st.integers(1, 4),
    "dim_upper": st.integers(1, 4),
    "dim_lower": st.integers(1, 5),
    "heterogeneity": st.floats(0, 3),
    "noise": st.floats(0, 0.9),
    "num_samples": st.integers(1, 5),
    "lower": st.sampled_from(["global", "local"]),
    "upper": st.sampled_from(["shared", "private"]),
    "client_weights": st.sampled_from(["equal", "by_samples"]),
    "data_seed": st.integers(0, 10_000),
}


@given(
    st.builds(Quadratic, **any_quadratic),
    st.sampled_from(["exact", "cg"]),
    st.sampled_from(["vmap", "loop"]),
    st.integers(0, 99),
)
def test_any_quadratic_has_its_closed_form_hypergradient(made, method, strategy, seed):
    population, closed = meet(made.build(), strategy=strategy), made.closed_form()
    x = point(population, seed)
    y = lower_solution(population, x)
    assert relative(y, closed.lower_solution(x.numpy())) < 1e-9
    got = hypergradient(population, x, y, method=method)
    assert relative(got.value, closed.hypergradient(x.numpy())) < 1e-8
    assert relative(got.u, closed.system_solution(x.numpy())) < 1e-8


@settings(max_examples=8)
@given(st.builds(Quadratic, **{**any_quadratic, "bend": st.floats(0.1, 2)}), st.randoms(use_true_random=False))
def test_the_order_of_clients_leaves_no_trace_and_doubling_all_of_them_changes_nothing(made, random):
    built = made.build()
    order = random.sample(range(made.num_clients), made.num_clients)
    first, shuffled, twice = (
        meet(Built(built.problem, [built.clients[i] for i in who]))
        for who in (range(made.num_clients), order, [*order, *order])
    )
    x = point(first)
    results = []
    for population, who in ((first, list(range(made.num_clients))), (shuffled, order), (twice, [*order, *order])):
        at = x if made.upper == "shared" else x[who]
        value = hypergradient(population, at, lower_solution(population, at), method="exact").value
        results.append((value, who))
    expected = results[0][0]
    for value, who in results[1:]:
        torch.testing.assert_close(value, expected if made.upper == "shared" else expected[who], rtol=1e-8, atol=1e-9)


# ---- finite differences ----------------------------------------------------------------------------------------------


def small_cleaning():
    """Three clients with 6, 9 and 12 noisy training images and 1, 2 and 3 clean ones."""
    built = DataCleaning(num_clients=3, num_clean=3, test_share=0.9, l2=0.1).build()
    keep = [{"train": 6 + 3 * i, "val": 1 + i, "test": 2} for i in range(3)]
    return Built(
        built.problem,
        [
            {r: {f: v[: sizes[r]] for f, v in fs.items()} for r, fs in c.items()}
            for c, sizes in zip(built.clients, keep, strict=True)
        ],
    )


def shares(population):
    sizes = population.data.sizes["train"].double()
    return (
        sizes / sizes.sum()
        if population.problem.client_weights == "by_samples"
        else torch.full_like(sizes, 1 / len(sizes))
    )


def losses(built, population, x, y, role, loss):
    """Each client's loss, evaluated on the user's own arrays outside the library's batches."""
    values = []
    for i, client in enumerate(built.clients):
        fields = {name: torch.as_tensor(value) for name, value in client[role].items()}
        fields = {name: value.double() if value.is_floating_point() else value for name, value in fields.items()}
        num = len(next(iter(fields.values())))
        batch = {"index": torch.arange(num), "weight": torch.full((num,), 1 / num, dtype=torch.float64), **fields}
        row_x, row_y = (w if w.ndim == 1 else w[i] for w in (x, y))
        value = loss(population.layout_x.unravel(row_x), population.layout_y.unravel(row_y), batch)
        values.append((batch["weight"] * value).sum() if value.ndim else value)  # one value per sample, or their sum
    return torch.stack(values)


def outer_value(built, population, x, start):
    y = lower_solution(population, x, start)
    return float(shares(population) @ losses(built, population, x, y, "val", built.problem.upper))


def slope(function, h):
    """Central difference, with the leading error removed by a second step."""
    coarse, fine = ((function(s) - function(-s)) / (2 * s) for s in (h, h / 2))
    return (4 * fine - coarse) / 3


BENT = {
    f"bent quadratic, {' '.join(s)}": (lambda s=s: task(*s, num_clients=3, bend=0.5, num_samples=2).build())
    for s in SCOPES
}


@pytest.mark.slow
@pytest.mark.parametrize("make", [*BENT.values(), small_cleaning], ids=[*BENT, "data cleaning"])
def test_the_hypergradient_is_the_slope_of_the_outer_objective(make):
    built = make()
    population = meet(built)
    x = point(population)
    y = lower_solution(population, x)
    value = hypergradient(population, x, y, tolerance=1e-12).value
    if built.problem.scopes.upper == "private":
        value = shares(population)[:, None] * value  # a private block's value omits the client's weight in the mean
    rng = torch.Generator().manual_seed(5)
    directions = [torch.randn(x.shape, generator=rng, dtype=torch.float64) for _ in range(2)]
    for place in torch.randint(x.numel(), (2,), generator=rng).tolist():
        directions.append(torch.zeros_like(x))
        directions[-1].view(-1)[place] = 1.0
    for direction in directions:
        if population.x_sizes is not None:
            direction = torch.where(torch.arange(x.shape[1]) < population.x_sizes[:, None], direction, torch.zeros(()))
        expected = slope(lambda t, d=direction: outer_value(built, population, x + t * d, y), 1e-3)
        assert float((value * direction).sum()) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("make", [*BENT.values(), small_cleaning], ids=[*BENT, "data cleaning"])
def test_the_lower_solution_has_zero_gradient(make):
    built = make()
    population = meet(built)
    x = point(population)
    y = lower_solution(population, x)
    local = built.problem.scopes.lower == "local"
    assert y.shape == ((len(population), len(population.y0)) if local else (len(population.y0),))
    for at, goal in ((y, 1e-10), (torch.zeros_like(y), None)):
        at = at.clone().requires_grad_()
        values = losses(built, population, x, at, "train", built.problem.lower)
        (gradient,) = torch.autograd.grad(values.sum() if local else shares(population) @ values, at)
        if goal is None:
            assert float(gradient.norm()) > 1e-2
        else:
            assert float(gradient.norm()) < goal


def test_the_lower_solution_is_found_from_far_away():
    """Backtracking: with a flat far field a full Newton step from here overshoots."""
    built = task("local", "shared", "equal", bend=20.0).build()
    population = meet(built)
    x = point(population)
    far = 50 * torch.ones(len(population), 4, dtype=torch.float64)
    torch.testing.assert_close(lower_solution(population, x, far), lower_solution(population, x), rtol=1e-8, atol=1e-9)


def test_the_hypergradient_in_single_precision_is_close_and_single():
    built = task("global", "shared", "equal", bend=0.5).build()
    single, double = meet(built, dtype=torch.float32), meet(built)
    x = point(double)
    exact = hypergradient(double, x, lower_solution(double, x))
    rough = hypergradient(single, x.float(), lower_solution(single, x.float(), tolerance=1e-5))
    assert rough.value.dtype == torch.float32
    assert relative(rough.value, exact.value) < 1e-4


@pytest.mark.parametrize("options", [{"strategy": "loop"}, {"strategy": "vmap", "chunk_size": 2}])
def test_the_strategy_leaves_no_trace(options):
    for scopes in SCOPES[::3]:
        built = task(*scopes, bend=0.5).build()
        one, other = meet(built), meet(built, **options)
        x = point(one)
        y = lower_solution(one, x)
        torch.testing.assert_close(lower_solution(other, x), y, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(
            hypergradient(other, x, y, method="exact").value,
            hypergradient(one, x, y, method="exact").value,
            rtol=1e-11,
            atol=1e-11,
        )


def test_features_do_not_change_the_hypergradient():
    """batch["features"] = B x, which the lower loss is linear in."""
    made = task("global", "shared", "equal", bend=0.5).build()
    plain = made.problem

    def lower(x, y, batch):
        v = y["y"]
        quadratic = 0.5 * torch.einsum("s,sij,i,j->", batch["weight"], batch["A"], v, v)
        return (
            quadratic
            - torch.einsum("s,si,i->", batch["weight"], batch["features"] + batch["c"], v)
            + 0.5 * torch.log(torch.cosh(v)).sum()
        )

    def features(x, batch):
        return batch["B"] @ x["x"] if "B" in batch else batch["r"]

    rich = type(plain)(upper=plain.upper, lower=lower, x0=plain.x0, y0=plain.y0, features=features)
    one, other = meet(made), meet(Built(rich, made.clients))
    x = point(one)
    torch.testing.assert_close(lower_solution(other, x), lower_solution(one, x), rtol=1e-11, atol=1e-11)
    y = lower_solution(one, x)
    torch.testing.assert_close(hypergradient(other, x, y).value, hypergradient(one, x, y).value, rtol=1e-11, atol=1e-11)


# ---- solvers on dense matrices ---------------------------------------------------------------------------------------


class Counted:
    """(r, d) -> (r, d): one symmetric matrix per right-hand side, with a count of its uses."""

    def __init__(self, matrices):
        self.matrices, self.count = torch.as_tensor(matrices), 0

    def __call__(self, v):
        self.count += 1
        return torch.einsum("rij,rj->ri", self.matrices, v)


def spd(num, dim, condition, seed):
    """Random rotations of eigenvalues from 1/condition to 1; every system has its own scale."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(num):
        basis, _ = np.linalg.qr(rng.standard_normal((dim, dim)))
        eigenvalues = np.geomspace(1 / condition, 1, dim) if dim > 1 else np.ones(1)
        made.append(10 ** rng.uniform(-1, 1) * basis @ np.diag(eigenvalues) @ basis.T)
    return np.stack(made), rng.standard_normal((num, dim))


def truth(matrices, b):
    return torch.as_tensor(np.linalg.solve(matrices, b[..., None])[..., 0])


def true_residual(matrices, b, u):
    return float(
        (np.linalg.norm(np.einsum("rij,rj->ri", matrices, u.numpy()) - b, axis=1) / np.linalg.norm(b, axis=1)).max()
    )


@given(st.integers(1, 4), st.integers(1, 8), st.floats(1, 1e4), st.integers(0, 10_000))
def test_direct_solvers_solve_any_positive_definite_system(num, dim, condition, seed):
    matrices, b = spd(num, dim, condition, seed)
    for solve in (solve_exact, solve_cg):
        product = Counted(matrices)
        got = solve(product, torch.as_tensor(b))
        torch.testing.assert_close(got.u, truth(matrices, b), rtol=1e-5, atol=1e-8 * condition)
        assert got.residual == pytest.approx(true_residual(matrices, b, got.u), rel=1e-2, abs=1e-12)
        assert got.residual < 1e-9
        assert got.num_products == product.count


@given(st.integers(1, 4), st.integers(1, 8), st.floats(1, 20), st.integers(0, 10_000))
def test_series_solve_any_positive_definite_system(num, dim, condition, seed):
    matrices, b = spd(num, dim, condition, seed)
    matrices /= np.linalg.norm(matrices, 2, axis=(1, 2))[:, None, None]  # one step length serves all systems
    for solve, options in ((solve_neumann, {"num_terms": 600}), (solve_fixed_point, {"tolerance": 1e-12})):
        product = Counted(matrices)
        got = solve(product, torch.as_tensor(b), **options)
        torch.testing.assert_close(got.u, truth(matrices, b), rtol=1e-8, atol=1e-8)
        assert got.num_products == product.count


@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 12), st.floats(0.01, 0.2), st.integers(0, 10_000))
def test_neumann_is_the_series_with_that_many_terms(num, dim, num_terms, step, seed):
    matrices, b = spd(num, dim, 10.0, seed)
    expected = np.stack(
        [
            step * sum(np.linalg.matrix_power(np.eye(dim) - step * h, j) @ r for j in range(num_terms))
            for h, r in zip(matrices, b, strict=True)
        ]
    )
    product = Counted(matrices)
    got = solve_neumann(product, torch.as_tensor(b), step=step, num_terms=num_terms)
    torch.testing.assert_close(got.u, torch.as_tensor(expected), rtol=1e-11, atol=1e-12)
    assert got.num_products == product.count == num_terms  # one of them for the certificate


@pytest.mark.parametrize(("lower", "upper", "weights"), SCOPES)
def test_neumann_across_clients_is_the_series_of_the_mean_hessian(lower, upper, weights):
    made = task(lower, upper, weights)
    population, closed = meet(made.build()), made.closed_form()
    x, step, num_terms = point(population), 0.1, 3
    y = closed.lower_solution(x.numpy())
    s = closed.stacked
    fy = np.einsum("nij,nj->ni", s["D"], np.broadcast_to(y, s["c"].shape)) - s["Dt"]
    hessians, right = (s["A"], fy) if lower == "local" else (closed._mean(s["A"])[None], closed._mean(fy)[None])
    u = np.stack(
        [
            step * sum(np.linalg.matrix_power(np.eye(4) - step * h, j) @ r for j in range(num_terms))
            for h, r in zip(hessians, right, strict=True)
        ]
    )
    got = hypergradient(population, x, torch.as_tensor(y), method="neumann", step=step, num_terms=num_terms)
    assert relative(got.u, u if lower == "local" else u[0]) < 1e-12
    assert got.residual == pytest.approx(true_residual(hessians, right, torch.as_tensor(u)), rel=1e-10)
    rows = (
        np.einsum("nij,nj->ni", s["R"], np.broadcast_to(x, (4, 3)))
        - s["r"]
        + np.einsum("nij,ni->nj", s["B"], np.broadcast_to(u, s["c"].shape))
    )
    assert relative(got.value, rows if upper == "private" else closed._mean(rows)) < 1e-10


@pytest.mark.parametrize(
    ("method", "options"),
    [("cg", {"max_products": 2}), ("fixed_point", {"max_products": 3}), ("neumann", {"num_terms": 3}), ("exact", {})],
)
@pytest.mark.parametrize(("lower", "upper", "weights"), SCOPES)
def test_the_certificate_of_an_unfinished_solve_is_its_true_residual(lower, upper, weights, method, options):
    made = task(lower, upper, weights)
    population, closed = meet(made.build()), made.closed_form()
    x = point(population)
    y = closed.lower_solution(x.numpy())
    s = closed.stacked
    fy = np.einsum("nij,nj->ni", s["D"], np.broadcast_to(y, s["c"].shape)) - s["Dt"]
    hessians, right = (s["A"], fy) if lower == "local" else (closed._mean(s["A"])[None], closed._mean(fy)[None])
    got = hypergradient(population, x, torch.as_tensor(y), method=method, **options)
    expected = true_residual(hessians, right, got.u.reshape(right.shape))
    assert got.residual == pytest.approx(expected, rel=1e-6, abs=1e-13)
    assert got.residual < 1e-12 if method == "exact" else got.residual > 1e-4


@pytest.mark.parametrize("solve", [solve_cg, solve_fixed_point])
def test_a_warm_start_at_the_solution_is_kept_and_any_start_is_forgotten(solve):
    matrices, b = spd(3, 5, 10.0, 0)
    matrices /= np.linalg.norm(matrices, 2, axis=(1, 2))[:, None, None]
    expected = truth(matrices, b)
    product = Counted(matrices)
    kept = solve(
        product, torch.as_tensor(b), u0=expected.clone(), **({"step": 0.9} if solve is solve_fixed_point else {})
    )
    torch.testing.assert_close(kept.u, expected, rtol=1e-10, atol=1e-10)
    assert kept.num_products == product.count == 2  # the residual at the start, and the certificate
    moved = solve(
        Counted(matrices),
        torch.as_tensor(b),
        u0=expected + 3,
        **({"tolerance": 1e-12} if solve is solve_fixed_point else {}),
    )
    torch.testing.assert_close(moved.u, expected, rtol=1e-8, atol=1e-8)


def test_conjugate_gradients_end_after_as_many_products_as_dimensions():
    matrices, b = spd(1, 6, 30.0, 3)
    got = solve_cg(Counted(matrices), torch.as_tensor(b), tolerance=1e-8)
    assert got.num_products <= 6 + 1
    assert got.residual < 1e-8


def test_a_zero_right_hand_side_has_the_zero_solution():
    matrices, b = spd(2, 3, 5.0, 1)
    b[0] = 0
    for solve in SOLVERS.values():
        got = solve(Counted(matrices), torch.as_tensor(b))
        assert bool((got.u[0] == 0).all())
        torch.testing.assert_close(got.u[1], truth(matrices, b)[1], rtol=1e-2, atol=1e-2)


def test_negative_curvature_is_named():
    matrices, b = spd(2, 4, 5.0, 1)
    matrices[1] -= 2 * np.linalg.norm(matrices[1], 2) * np.eye(4)
    with pytest.raises(ProblemError, match=r"curvature -\d.* <= 0 along a direction, so it is not strongly convex"):
        solve_cg(Counted(matrices), torch.as_tensor(b))


@pytest.mark.parametrize("lower", ["global", "local"])
def test_a_lower_level_that_is_not_convex_is_named_through_the_population(lower):
    made = task(lower, "shared", "equal")
    built = made.build()
    for client in built.clients:
        client["train"]["A"] = client["train"]["A"] - 20 * np.eye(4)
    population = meet(built)
    with pytest.raises(ProblemError, match="not strongly convex"):
        hypergradient(
            population,
            point(population),
            population.y0 if lower == "global" else population.y0.expand(4, -1),
            method="cg",
        )
    with pytest.raises(ProblemError, match="not strongly convex"):
        lower_solution(population, point(population))


def test_a_lower_level_without_curvature_is_named():
    zero = Counted(np.zeros((1, 3, 3)))
    for solve in (solve_neumann, solve_fixed_point):
        with pytest.raises(ProblemError, match="the Hessian of the lower level is zero"):
            solve(zero, torch.ones(1, 3, dtype=torch.float64))


@given(st.integers(1, 3), st.integers(1, 8), st.integers(0, 10_000))
def test_largest_curvature_never_exceeds_the_largest_eigenvalue_and_comes_close(num, dim, seed):
    matrices, b = spd(num, dim, 10.0, seed)
    estimate, count = largest_curvature(Counted(matrices), torch.as_tensor(b), num_products=60)
    largest = np.linalg.eigvalsh(matrices).max()
    assert 0.9 * largest < estimate <= largest * (1 + 1e-12)
    assert count == 60


@pytest.mark.parametrize("step", [0, -0.1])
@pytest.mark.parametrize("solve", [solve_neumann, solve_fixed_point])
def test_steps_that_are_not_positive_are_refused(solve, step):
    with pytest.raises(SettingError, match=f"step is {step}, expected a value greater than 0"):
        solve(lambda v: v, torch.ones(1, 2), step=step)


@pytest.mark.parametrize("num_terms", [0, -3])
def test_a_series_without_terms_is_refused(num_terms):
    with pytest.raises(SettingError, match=f"num_terms is {num_terms}"):
        solve_neumann(lambda v: v, torch.ones(1, 2), step=0.5, num_terms=num_terms)


def test_unknown_methods_are_refused():
    population = meet(Quadratic().build())
    with pytest.raises(SettingError, match="method is 'newton', expected one of exact, cg, neumann, fixed_point"):
        hypergradient(population, population.x0, population.y0, method="newton")


@given(st.floats(0.01, 100), st.integers(0, 999))
def test_projection_is_the_nearest_point_of_the_ball(radius, seed):
    rng = np.random.default_rng(seed)
    rows = torch.as_tensor(rng.standard_normal((5, 3)) * 10.0 ** rng.integers(-3, 3, (5, 1)))
    rows[0] = 0
    got = project(rows, radius)
    norms = rows.norm(dim=1)
    for i in range(5):
        expected = rows[i] if norms[i] <= radius else rows[i] * radius / norms[i]
        torch.testing.assert_close(got[i], expected, rtol=1e-14, atol=0)
    assert project(rows, None) is rows


@pytest.mark.parametrize("solve", [solve_neumann, solve_fixed_point])
def test_a_system_that_is_stopped_at_its_limit_is_warned_of_with_its_residual(solve):
    """At condition 1e4 the solution is a third off while the residual is a few thousandths."""
    eigenvalues = torch.logspace(-4, 0, 5, dtype=torch.float64)
    product, b = (lambda v: v * eigenvalues), torch.ones(1, 5, dtype=torch.float64)
    with pytest.warns(ResidualWarning, match=r"stopped after 10,000 products with a residual of 0\.\d+, ") as said:
        got = solve(product, b, step=0.9)
    [sentence] = {str(warning.message) for warning in said}
    assert f"residual of {got.residual:.2g}," in sentence
    assert got.num_products == 10_001
    # closed form: the error of each entry is (1 - 0.9 mu)^(k), of the residual the same times mu
    left = (1 - 0.9 * eigenvalues) ** (10_001 if solve is solve_neumann else 10_000)
    torch.testing.assert_close(got.u[0], (1 - left) / eigenvalues, rtol=1e-9, atol=0)
    torch.testing.assert_close(got.residual, float(torch.linalg.vector_norm(left)) / 5**0.5, rtol=1e-6, atol=0)
    assert relative(got.u[0], 1 / eigenvalues) > 0.3


@pytest.mark.parametrize(
    ("solve", "options"),
    [
        (solve_neumann, {"num_terms": 3}),
        (solve_neumann, {"max_products": 3}),
        (solve_fixed_point, {"max_products": 3}),
        (solve_neumann, {}),
        (solve_fixed_point, {}),
    ],
)
def test_a_limit_of_the_user_or_a_solved_system_is_not_warned_of(solve, options):
    product, b = (lambda v: v * torch.tensor([0.2, 1.0], dtype=torch.float64)), torch.ones(1, 2, dtype=torch.float64)
    got = solve(product, b, step=0.9, **options)  # pytest makes warnings errors
    assert (got.residual > 1e-3) == bool(options)
