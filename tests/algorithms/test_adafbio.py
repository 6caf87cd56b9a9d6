"""AdaFBiO against its printed equations in numpy, client by client; its limit and its cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.algorithms import _local_neumann
from fedbilevel.algorithms.adafbio import AdaFBiO, Point, directions
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import ScopeWarning, SettingError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.federation.clients import Clients
from fedbilevel.problem.draws import Stream
from fedbilevel.problem.problem import Scopes
from fedbilevel.tasks.quadratic import ClosedForm, Quadratic
from support.numeric.by_hand import Samples, fx, fy, global_directions, gy, hessian, jacobian, states
from support.numeric.yardstick import drive, relative

SMALL = {"num_clients": 3, "dim_upper": 2, "dim_lower": 3}
SCOPES = [(lower, upper) for lower in ("global", "local") for upper in ("shared", "private")]
LOCAL = ("local-neumann", "local-neumann-sum")
CONSTANT = {"offset": 10**9, "step_scale": 0.5 * (1e9 / 3) ** (1 / 3)}  # eta = 0.5 for three clients, in every step
THETA, K = 0.3, 3


def value(fed: Simulation, name: str, state: Any) -> np.ndarray:
    """A value of the state as one row per client."""
    return fed.collect(getattr(state, name)).expand(3, -1).numpy()


# ---- the paper in numpy --------------------------------------------------------------------------


def drawn_k(seed: int, client: int, num_terms: int, where: tuple[int, int, int]) -> int:
    iteration, call, step = where
    words = Stream(seed).integers(
        "k",
        torch.tensor([client]),
        torch.tensor([num_terms]),
        iteration=iteration,
        call=call,
        steps=range(step, step + 1),
        width=1,
    )
    return int(words)


def by_hand(
    algorithm: AdaFBiO, samples: Samples, seed: int, i: int, p: dict[str, np.ndarray], where: tuple[int, int, int]
) -> dict[str, np.ndarray]:
    """The directions that w, v and s estimate, of client i at p; `where` decides about samples and k."""
    if algorithm.hypergradient == "shared-u":
        d = global_directions(samples, i, p, where, "B_y B_f1 B_f2 B_g1 B_g2")
        return {"w": d["x"], "v": d["y"], "s": d["u"]}
    train = lambda purpose: samples.drawn(i, "train", purpose, where)
    upper, theta, num = samples.drawn(i, "val", "xi", where), algorithm.lr_system, algorithm.num_terms
    terms = [fy(upper, p["x"], p["y"])]
    for j in range(1, num):
        terms.append(terms[-1] - theta * hessian(train(f"zeta_{j}")) @ terms[-1])
    inverse = (
        theta * sum(terms)
        if algorithm.hypergradient == "local-neumann-sum"
        else num * theta * terms[drawn_k(seed, i, num, where)]
    )
    return {
        "w": fx(upper, p["x"], p["y"]) - jacobian(train("zeta_0")) @ inverse,
        "v": gy(train("zeta"), p["x"], p["y"]),
    }


def algorithm_1(
    algorithm: AdaFBiO, task: Quadratic, num: int, *, seed: int, batch_size: int | None, absent: Any
) -> Iterator[list[dict[str, np.ndarray]]]:
    """Yield every client's values at the start and after every sync of the paper's Algorithm 1.

    The old point is kept, and v and w are averaged."""
    samples = Samples(task, seed=seed, batch_size=batch_size)
    m, q, rho, r = task.num_clients, algorithm.num_local_steps, algorithm.damping, algorithm.decay
    pairs = {"x": "w", "y": "v", **({"u": "s"} if algorithm.hypergradient == "shared-u" else {})}
    kept = ("xwa" if task.upper == "private" else "") + ("yvbus" if task.lower == "local" else "")
    widths = {"x": task.dim_upper, "y": task.dim_lower, "u": task.dim_lower}
    n = max(100, m) if algorithm.offset is None else algorithm.offset

    def sync(rows: list[dict], now: dict[int, dict], first: bool) -> list[dict]:
        """Average the values that travel and compute a and b from the values their owner now holds.

        Kept values change only at the clients of the cohort."""
        new = [dict(row) for row in rows]
        for name in next(iter(now.values())):
            mean = np.mean([row[name] for row in now.values()], axis=0)
            for i in range(m):
                new[i][name] = mean if name not in kept else now[i][name] if i in now else rows[i][name]
        for i in range(m):
            for name, estimate, size in (("a", "w", np.square), ("b", "v", np.linalg.norm)):
                if name in kept and i not in now:
                    continue
                change = new[i][estimate] - (
                    rows[i][estimate] if algorithm.adaptive == "adabelief" and not first else 0
                )
                new[i][name] = r * rows[i][name] + (1 - r) * size(change)
        return new

    start = {name: np.zeros(width) for name, width in widths.items() if name in pairs}
    rows = [
        {**start, **{e: np.zeros(widths[name]) for name, e in pairs.items()}, "a": np.zeros(widths["x"]), "b": 0.0}
        for _ in range(m)
    ]
    here = [i for i in range(m) if i not in absent(0)]
    rows = sync(
        rows,
        {i: mean_of([by_hand(algorithm, samples, seed, i, start, (0, 1, j)) for j in range(q)]) for i in here},
        True,
    )
    yield rows
    old: dict[int, dict] = {}
    for iteration in range(1, num + 1):
        now = {}
        for i in range(m):
            if i in absent(iteration):
                continue
            p, e = ({name: rows[i][name] for name in names} for names in (pairs, pairs.values()))
            A, B = (np.sqrt(rows[i]["a"]) + rho, rows[i]["b"] + rho) if algorithm.adaptive != "none" else (1, 1)
            before = old.get(i, p)
            for step in range(q):
                eta = algorithm.step_scale * (m / (n + (iteration - 1) * q + step + 1)) ** (1 / 3)
                rate = {"x": algorithm.lr_upper / A, "y": algorithm.lr_lower / B, "u": algorithm.lr_system}
                weight = {
                    "w": 1 - algorithm.c2 * eta**2,
                    "v": 1 - algorithm.c1 * eta**2,
                    "s": 1 - algorithm.c1 * eta**2,
                }
                p = {name: p[name] - eta * rate[name] * e[pairs[name]] for name in p}
                new, past = (by_hand(algorithm, samples, seed, i, point, (iteration, 1, step)) for point in (p, before))
                e = {name: new[name] + weight[name] * (e[name] - past[name]) for name in e}
                before = p
            old[i], now[i] = p, {**p, **e}
        rows = sync(rows, now, False)
        yield rows


def mean_of(points: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.mean([point[name] for point in points], axis=0) for name in points[0]}


GONE = {0: [1], 1: [1, 2], 3: [0]}  # client 1 misses the start and the first sync


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adaptive", "gone"),
    [("adam", {}), ("adam", GONE), ("adabelief", GONE), ("none", {})],
    ids=["adam", "adam-gone", "adabelief-gone", "none"],
)
@pytest.mark.parametrize("hypergradient", [*LOCAL, "shared-u"])
@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_every_value_follows_the_printed_equations_on_minibatches(lower, upper, adaptive, hypergradient, gone):
    task = Quadratic(**SMALL, lower=lower, upper=upper)
    algorithm = AdaFBiO(
        lr_upper=0.2,
        lr_lower=0.3,
        lr_system=THETA,
        num_local_steps=2,
        num_terms=4,
        hypergradient=hypergradient,
        adaptive=adaptive,
        step_scale=1.5,
        offset=20,
        c1=1.2,
        c2=0.7,
        damping=0.1,
        decay=0.6,
    )
    absent = lambda iteration, call=1: gone.get(iteration, ())
    paper = algorithm_1(algorithm, task, 3, seed=5, batch_size=2, absent=absent)
    for (fed, state), rows in zip(
        states(algorithm, task.build(), 3, seed=5, batch_size=2, drops=absent), paper, strict=True
    ):
        for name in (name for name in state._fields if getattr(state, name) is not None):
            expected = np.stack([np.atleast_1d(row[name]) for row in rows])
            got = value(fed, name, state)[:, : expected.shape[1]]  # b of a client that never took part is as wide as y
            np.testing.assert_allclose(
                got, expected, rtol=1e-11, atol=1e-12, err_msg=f"{name} in outer iteration {fed.iteration}"
            )
        assert (state.a is None) == (adaptive == "none")
        assert (state.u is None) == (hypergradient != "shared-u")


def test_the_first_two_steps_by_hand():
    """Two steps of one client with one number at each level.

    g = y^2/2 - xy - y and f = (y - 2)^2/2 + x^2/2 - x, so J = -1 and H = 1; theta = 1 and K = 1
    give h = x - 1 + y - 2."""
    one = np.ones((1, 1, 1))
    client = {"train": {"A": one, "B": one, "c": one[0]}, "val": {"D": one, "t": 2 * one[0], "R": one, "r": one[0]}}
    built = Quadratic(num_clients=1, dim_upper=1, dim_lower=1).build()._replace(clients=[client])
    steps = {
        "lr_upper": 0.1,
        "lr_lower": 0.4,
        "lr_system": 1.0,
        "num_local_steps": 1,
        "num_terms": 1,
        "damping": 1.0,
        "decay": 0.75,
        "offset": 7,
        "c1": 2.0,
        "c2": 3.0,
    }
    for adaptive, dw, dv in (("adam", 2.78, 0.9), ("adabelief", 0.22, 0.1)):
        first, second, third = (state for _, state in states(AdaFBiO(adaptive=adaptive, **steps), built, 2))
        assert [float(first.w), float(first.v), float(first.a), float(first.b)] == [-3.0, -1.0, 2.25, 0.25]
        # eta = (1/8)^(1/3) = 1/2:  x = 0.05 * 3 / (1.5 + 1),  y = 0.2 * 1 / (0.25 + 1)
        # whole batches, so w and v are the directions at the new point
        np.testing.assert_allclose(
            [float(v) for v in (second.x, second.y, second.w, second.v)], [0.06, 0.16, -2.78, -0.9], rtol=1e-13
        )
        a, b = 0.75 * 2.25 + 0.25 * dw**2, 0.75 * 0.25 + 0.25 * dv
        np.testing.assert_allclose([float(second.a), float(second.b)], [a, b], rtol=1e-13)
        eta = (1 / 9) ** (1 / 3)
        np.testing.assert_allclose(
            [float(third.x), float(third.y)],
            [0.06 + 0.1 * eta * 2.78 / (a**0.5 + 1), 0.16 + 0.4 * eta * 0.9 / (b + 1)],
            rtol=1e-13,
        )


# ---- eq. (13) ------------------------------------------------------------------------------------


def clients_at(task: Quadratic, algorithm: AdaFBiO, **options: Any) -> tuple[Clients, torch.Tensor, torch.Tensor]:
    built = task.build()
    fed = Simulation(algorithm, built.problem, built.clients, dtype=torch.float64, **options)
    rng = np.random.default_rng(0)
    x, y = (
        torch.from_numpy(rng.standard_normal((task.num_clients, width))) for width in (task.dim_upper, task.dim_lower)
    )
    return Clients(fed.host, torch.arange(task.num_clients), 3, 1), x, y


def test_the_mean_of_eq_13_over_k_is_the_neumann_series_of_num_terms_terms():
    task, num = Quadratic(**SMALL, bend=0.5), 4  # the curvature of g depends on y
    clients, x, y = clients_at(task, AdaFBiO())
    s = task.closed_form().stacked
    H = s["A"] + 0.5 * np.stack([np.diag(1 - np.tanh(row) ** 2) for row in y.numpy()])
    direct = np.einsum("nij,nj->ni", s["D"], y) - s["Dt"]
    powers = [
        np.stack([np.linalg.matrix_power(np.eye(3) - THETA * h, k) @ r for h, r in zip(H, direct, strict=True)])
        for k in range(num)
    ]
    dense = lambda p: np.einsum("nij,nj->ni", s["R"], x) - s["r"] + np.einsum("nij,ni->nj", s["B"], p)
    found: dict[tuple[int, int], np.ndarray] = {}
    for step in clients.steps(40):
        h = _local_neumann.sampled(clients, step, x, y, num, THETA).numpy()
        for i, k in enumerate(step.draw("k", num).tolist()):
            np.testing.assert_allclose(h[i], dense(num * THETA * powers[k])[i], rtol=0, atol=1e-12)
            found[i, k] = h[i]
    assert sorted(found) == [(i, k) for i in range(3) for k in range(num)]  # k runs from 0 to K - 1
    mean = np.stack([np.mean([found[i, k] for k in range(num)], axis=0) for i in range(3)])
    np.testing.assert_allclose(mean, dense(THETA * sum(powers)), rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        _local_neumann.summed(clients, clients.steps(1)[0], x, y, num, THETA), mean, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("hypergradient", [*LOCAL, "shared-u"])
def test_both_evaluations_of_a_step_share_k_and_every_sample(hypergradient):
    algorithm = AdaFBiO(num_terms=6, hypergradient=hypergradient)
    clients, x, y = clients_at(Quadratic(**SMALL, noise=0.9), algorithm, batch_size=1)
    u = y + 1 if hypergradient == "shared-u" else None
    first, second = clients.steps(2)
    one, again, other = (
        directions(algorithm, clients, step, Point(x.clone(), y.clone(), None if u is None else u.clone()))
        for step in (first, first, second)
    )
    assert (one.s is None) == (u is None)
    for a, b, c in list(zip(one, again, other, strict=True))[: 2 if u is None else 3]:
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


@pytest.mark.parametrize("hypergradient", ["local-neumann-sum", "shared-u"])
def test_averaged_estimators_are_the_means_of_the_clients_own_directions_before_averaging(hypergradient):
    """With whole batches STORM has no error for any drift, because the old point is the local one."""
    task = Quadratic(**SMALL)
    algorithm = AdaFBiO(
        lr_upper=0.1,
        lr_lower=0.3,
        lr_system=THETA,
        num_local_steps=3,
        num_terms=K,
        hypergradient=hypergradient,
        damping=0.5,
    )
    samples = Samples(task)
    for fed, state in states(algorithm, task.build(), 4):
        memory = fed.host.memory.rows
        if not memory:
            continue
        own = [{name: memory[name][i].numpy() for name in memory} for i in range(3)]
        assert max(relative(memory["x"][i], memory["x"][0]) for i in (1, 2)) > 1e-2
        expected = mean_of(
            [by_hand(algorithm, samples, 0, i, point, (fed.iteration, 1, 0)) for i, point in enumerate(own)]
        )
        for name, mean in expected.items():
            np.testing.assert_allclose(getattr(state, name), mean, rtol=0, atol=1e-12)


# ---- limit ---------------------------------------------------------------------------------------


def local_solution(closed: ClosedForm, num_terms: int | None = None, theta: float = THETA) -> np.ndarray:
    """Solve by dense algebra for the shared x where the mean local hypergradient vanishes.

    The hypergradients use a series of num_terms terms, or are exact if num_terms is None."""
    s, (n, d) = closed.stacked, closed.stacked["c"].shape
    series = lambda H: theta * sum(np.linalg.matrix_power(np.eye(d) - theta * H, j) for j in range(num_terms))
    inverse = np.linalg.inv(s["A"]) if num_terms is None else np.stack([series(H) for H in s["A"]])

    def mean_of_local(x: np.ndarray) -> np.ndarray:
        y = np.broadcast_to(closed.lower_solution(x), (n, d))
        u = np.einsum("nij,nj->ni", inverse, np.einsum("nij,nj->ni", s["D"], y) - s["Dt"])
        return closed.share @ (np.einsum("nij,j->ni", s["R"], x) - s["r"] + np.einsum("nij,ni->nj", s["B"], u))

    zero = mean_of_local(np.zeros(s["B"].shape[2]))
    columns = np.stack([mean_of_local(unit) - zero for unit in np.eye(len(zero))], axis=1)
    return np.linalg.solve(columns, -zero)


def settles(algorithm: Any, task: Quadratic, num: int, target: np.ndarray, tolerance: float = 1e-8) -> torch.Tensor:
    """Runs until it stands, and it stands at the target."""
    _, state = drive(algorithm, task.build(), num)
    assert relative(state.x, target) < tolerance
    return state.x


STEADY = {"lr_upper": 0.5, "lr_lower": 0.8, "lr_system": THETA, "num_local_steps": 1, "num_terms": K, **CONSTANT}


def test_heterogeneous_clients_settle_where_the_mean_of_local_hypergradients_vanishes():
    task = Quadratic(**SMALL)
    closed = task.closed_form()
    settles(AdaFBiO(**STEADY, damping=1.0, hypergradient="local-neumann-sum"), task, 80, local_solution(closed, K))
    # more terms do not bring it to the solution
    assert relative(local_solution(closed, 400), local_solution(closed)) < 1e-10
    assert relative(local_solution(closed), closed.solution()) > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("same", [{"heterogeneity": 0.0}, {"lower": "local"}], ids=str)
def test_identical_clients_or_a_local_lower_level_settle_at_the_solution_up_to_the_series(same):
    task = Quadratic(**SMALL, **same)
    closed = task.closed_form()
    settles(AdaFBiO(**STEADY, damping=1.0, hypergradient="local-neumann-sum"), task, 80, local_solution(closed, K))
    assert relative(local_solution(closed, 400), closed.solution()) < 1e-10


def test_sampled_k_scatters_around_the_biased_point():
    task = Quadratic(**SMALL)
    algorithm = AdaFBiO(**{**STEADY, "lr_upper": 0.2, "lr_lower": 0.6}, c1=0.3, c2=0.3, adaptive="none")
    tail = [state.x for fed, state in states(algorithm, task.build(), 70) if fed.iteration > 20]
    centre, target, solution = (
        torch.stack(tail).mean(0),
        local_solution(task.closed_form(), K),
        task.closed_form().solution(),
    )
    assert relative(centre, target) < 0.25 * relative(solution, target)


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", ["adam", "adabelief"])
def test_a_shared_u_settles_at_the_solution_of_heterogeneous_clients(adaptive):
    task = Quadratic(**SMALL)
    algorithm = AdaFBiO(
        **{**STEADY, "lr_upper": 0.3, "lr_lower": 1.0, "lr_system": 1.2},
        hypergradient="shared-u",
        adaptive=adaptive,
        damping=1.0,
    )
    settles(algorithm, task, 100, task.closed_form().solution())


def test_local_steps_drift_by_the_weight_of_the_newest_direction():
    task = Quadratic(**SMALL)
    far = []
    for c in (0.1, 0.01):
        steps = {"lr_upper": 0.1, "lr_lower": 0.4, "lr_system": 0.4, "num_local_steps": 3}
        algorithm = AdaFBiO(**{**STEADY, **steps}, hypergradient="shared-u", adaptive="none", c1=c, c2=c)
        far.append(relative(drive(algorithm, task.build(), 40)[1].x, task.closed_form().solution()))
    assert 5 < far[0] / far[1] < 20


# ---- scopes, costs, failures ---------------------------------------------------------------------


@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_a_global_lower_level_is_warned_of_unless_u_is_shared(lower, upper):
    for hypergradient in LOCAL:
        found = AdaFBiO(hypergradient=hypergradient).check_scopes(Scopes(lower, upper))
        assert [type(warning) for warning in found] == [ScopeWarning] * (lower == "global")
        assert all("mean of local hypergradients" in str(warning) for warning in found)
    assert AdaFBiO(hypergradient="shared-u").check_scopes(Scopes(lower, upper)) == []


@given(st.data())
def test_the_ledger_holds_what_the_docstring_says(data):
    lower, upper = data.draw(st.sampled_from(SCOPES))
    dx, dy, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    algorithm = AdaFBiO(
        num_local_steps=data.draw(st.integers(1, 3)),
        num_terms=data.draw(st.integers(1, 5)),
        hypergradient=data.draw(st.sampled_from([*LOCAL, "shared-u"])),
        adaptive=data.draw(st.sampled_from(["adam", "adabelief", "none"])),
    )
    num, seed, size = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 99)), data.draw(st.sampled_from([None, 2]))
    task = Quadratic(num_clients=m, dim_upper=dx, dim_lower=dy, lower=lower, upper=upper)
    fed, _ = drive(algorithm, task.build(), num, seed=seed, batch_size=size)
    q, u, columns = algorithm.num_local_steps, algorithm.hypergradient == "shared-u", fed.ledger.columns
    X, Y = dx * (upper == "shared"), dy * (lower == "global")
    travels = X + Y > 0
    assert fed.ledger.rounds == travels * (1 + num)
    assert columns["floats_up"].tolist() == [X + Y + u * Y + num * (2 * X + 2 * Y + 2 * u * Y)] * m
    matrices = (X + (lower == "global")) * (algorithm.adaptive != "none")
    start = X + Y + u * Y
    assert (
        columns["floats_down"].tolist() == [num * (2 * X + 2 * Y + 2 * u * Y + matrices) if num else start] * m
    )  # x and y of the start are sent once
    for name in ("gy", "fx", "fy", "jvp"):
        assert columns[name].tolist() == [q + 2 * q * num] * m
    products = [q + 2 * q * num] * m
    if not u:
        each = lambda i, it, step: (
            drawn_k(seed, i, algorithm.num_terms, (it, 1, step))
            if algorithm.hypergradient == "local-neumann"
            else algorithm.num_terms - 1
        )
        products = [
            sum(each(i, it, step) * (2 if it else 1) for it in range(num + 1) for step in range(q)) for i in range(m)
        ]
    assert columns["hvp"].tolist() == products
    assert columns["gx"].tolist() == [0] * m


@pytest.mark.parametrize("hypergradient", ["local-neumann", "shared-u"])
@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_a_checkpoint_goes_on_bit_for_bit_with_cohorts_and_memory(lower, upper, hypergradient):
    built = Quadratic(**{**SMALL, "num_clients": 4}, lower=lower, upper=upper).build()
    algorithm = AdaFBiO(hypergradient=hypergradient, num_terms=3, num_local_steps=2)
    options = {"cohort": Cohort(0.5), "batch_size": 2, "seed": 4}
    whole, end = drive(algorithm, built, 5, **options)
    half, middle = drive(algorithm, built, 2, **options)
    assert not bool(half.host.memory.written["x"].all())  # one client has not been there yet
    tensors, plain = half.state_dict(middle)
    fresh = Simulation(algorithm, built.problem, built.clients, dtype=torch.float64, **options)
    state = fresh.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, plain, algorithm.State)
    for iteration in (3, 4, 5):
        fresh.begin(iteration)
        state = algorithm.round(fresh, state)
    for name in (name for name in end._fields if getattr(end, name) is not None):
        assert torch.equal(whole.collect(getattr(end, name)), fresh.collect(getattr(state, name)))
    assert whole.ledger.totals() == fresh.ledger.totals()


@pytest.mark.parametrize(
    ("settings", "clients"),
    [
        ({"step_scale": 3.0}, 4),
        ({"offset": 0, "step_scale": 0.9}, 3),
        ({"c1": 12.0}, 3),
        ({"c2": 12.0}, 3),
        ({"offset": 2}, 4),
    ],
    ids=str,
)
def test_steps_or_weights_beyond_one_are_refused_before_anything_runs(settings, clients):
    built = Quadratic(**{**SMALL, "num_clients": clients}).build()
    algorithm = AdaFBiO(**settings)
    fed = Simulation(algorithm, built.problem, built.clients)
    with pytest.raises(
        SettingError, match=f"with {clients} clients the first eta is .* lower step_scale, c1 or c2, or raise offset"
    ):
        algorithm.init(fed)
    assert fed.ledger.totals() == {name: 0 for name in fed.ledger.totals()}


def test_the_default_schedule_suits_any_number_of_clients():
    built = Quadratic(num_clients=150, dim_upper=1, dim_lower=1, num_samples=1).build()
    AdaFBiO(num_terms=1, num_local_steps=1).init(
        Simulation(AdaFBiO(num_terms=1, num_local_steps=1), built.problem, built.clients)
    )
