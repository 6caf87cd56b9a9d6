"""FedMBO against dense algebra: every path of cohorts, the expectation over paths, and its cost."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_simfbo import SCOPES, SMALL, check_resume, scopes

from fedbilevel.algorithms.fedmbo import FedMBO
from fedbilevel.engines.simulation import Simulation
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.tasks.quadratic import ClosedForm, Quadratic
from support.numeric.yardstick import drive, relative

STEPS = {"lr_upper": 0.05, "lr_lower": 0.2, "lr_system": 0.25}
BEND = 0.5


class Dense:
    """The clients' derivatives as matrices at (x, y), for the quadratic with its non-quadratic term."""

    def __init__(self, closed: ClosedForm, bend: float) -> None:
        self.closed, self.s, self.bend, self.n = closed, closed.stacked, bend, len(closed.share)

    def mean(self, rows: np.ndarray, here: list[int], *, kept: bool) -> np.ndarray:
        """What everybody holds after a round of the clients `here`: their mean, or their own row."""
        if kept:
            return rows
        share = self.closed.share[here] / self.closed.share[here].sum()
        return np.tile(share @ rows[here], (self.n, 1))

    def gy(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        s = self.s
        return np.einsum("nij,nj->ni", s["A"], y) - np.einsum("nij,nj->ni", s["B"], x) - s["c"] + self.bend * np.tanh(y)

    def fy(self, y: np.ndarray) -> np.ndarray:
        return np.einsum("nij,nj->ni", self.s["D"], y) - self.s["Dt"]

    def H(self, y: np.ndarray) -> np.ndarray:
        return self.s["A"] + self.bend * np.einsum("ni,ij->nij", 1 / np.cosh(y) ** 2, np.eye(y.shape[1]))

    def h(self, x: np.ndarray, p: np.ndarray) -> np.ndarray:
        return np.einsum("nij,nj->ni", self.s["R"], x) - self.s["r"] + np.einsum("nij,ni->nj", self.s["B"], p)

    def path(
        self, algorithm: FedMBO, x: np.ndarray, y: np.ndarray, cohorts: Iterator[list[int]], num_factors: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """h and y after one outer iteration in which the calls went to `cohorts`, one after the other."""
        local, lam = self.closed.local, algorithm.lr_system
        for _ in range(algorithm.num_lower_rounds):
            y = self.mean(y - algorithm.lr_lower * self.gy(x, y), next(cohorts), kept=local)
        p = self.mean(lam * algorithm.num_terms * self.fy(y), next(cohorts), kept=local)
        for _ in range(num_factors):
            p = self.mean(p - lam * np.einsum("nij,nj->ni", self.H(y), p), next(cohorts), kept=local)
        return self.mean(self.h(x, p), next(cohorts), kept=self.closed.private), y

    def series(self, algorithm: FedMBO, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Compute f_x - J lam sum_{j<N} (I - lam H)^j f_y.

        H is the mean Hessian, or each client's own for a local lower level."""
        everyone, local, lam = list(range(self.n)), self.closed.local, algorithm.lr_system
        H = self.H(y) if local else np.broadcast_to(np.tensordot(self.closed.share, self.H(y), axes=1), self.H(y).shape)
        term = self.mean(self.fy(y), everyone, kept=local)
        total = np.zeros_like(term)
        for _ in range(algorithm.num_terms):
            total = total + lam * term
            term = term - lam * np.einsum("nij,nj->ni", H, term)
        return self.mean(self.h(x, total), everyone, kept=self.closed.private)


def at(fed: Simulation, task: Quadratic, seed: int = 0) -> tuple[np.ndarray, np.ndarray, Any, Any]:
    """A point off the solution: as numpy rows, and where the scopes say."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((3, 2)) if task.upper == "private" else np.tile(rng.standard_normal(2), (3, 1))
    y = rng.standard_normal((3, 3)) if task.lower == "local" else np.tile(rng.standard_normal(3), (3, 1))
    return (
        x,
        y,
        fed.place("x", torch.from_numpy(x if task.upper == "private" else x[0])),
        fed.place("y", torch.from_numpy(y if task.lower == "local" else y[0])),
    )


def iterations_by_factors(fed: Simulation, num_terms: int) -> dict[int, int]:
    """For each value that N' can take, an outer iteration in which it takes it."""
    found: dict[int, int] = {}
    for iteration in range(1, 400):
        fed.begin(iteration)
        found.setdefault(fed.draw("N'", num_terms), iteration)
    assert sorted(found) == list(range(num_terms))
    return found


# ---- expectation ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_expectation_over_cohorts_and_lengths_is_the_global_series(size: int) -> None:
    """The mean over all N' and all sequences of cohorts is the N-term series of the mean Hessian.

    The engine runs every case. With one cohort for the whole outer iteration the mean is wrong by
    more than a percent."""
    task = Quadratic(**SMALL, bend=BEND)
    algorithm = FedMBO(**STEPS, num_lower_rounds=0, num_terms=3)
    cohorts = [set(cohort) for cohort in combinations(range(3), size)]
    script: list[set[int]] = []
    built = task.build()
    fed = Simulation(
        algorithm,
        built.problem,
        built.clients,
        dtype=torch.float64,
        drops=lambda iteration, call: {0, 1, 2} - script[call - 1],
    )
    x, y, fx, fy = at(fed, task)
    total = fixed = torch.zeros(2, dtype=torch.float64)
    for num_factors, iteration in iterations_by_factors(fed, 3).items():
        paths = list(product(cohorts, repeat=num_factors + 2))
        for path in paths:
            script[:] = path
            fed.begin(iteration)
            h = algorithm.estimate(fed, fx, fy)[0]
            total = total + h / len(paths) / 3
            fixed = fixed + (h / len(cohorts) / 3 if len({*map(tuple, path)}) == 1 else 0)
    target = Dense(task.closed_form(), BEND).series(algorithm, x, y)[0]
    assert relative(total, target) < 1e-12
    assert relative(fixed, target) > 0.01


@scopes
def test_expectation_over_lengths_in_every_scope(lower: str, upper: str) -> None:
    task = Quadratic(  # type: ignore[arg-type]
        **SMALL, bend=BEND, lower=lower, upper=upper, client_weights="by_samples"
    )
    algorithm = FedMBO(**STEPS, num_lower_rounds=0, num_terms=5)
    built = task.build()
    fed = Simulation(algorithm, built.problem, built.clients, dtype=torch.float64)
    assert algorithm.check_scopes(built.problem.scopes) == []
    x, y, fx, fy = at(fed, task)
    total = torch.zeros(3, 2, dtype=torch.float64)
    for iteration in iterations_by_factors(fed, 5).values():
        fed.begin(iteration)
        total = total + fed.collect(algorithm.estimate(fed, fx, fy)[0]) / 5
        fx, fy = at(fed, task)[2:]
    assert relative(total, Dense(task.closed_form(), BEND).series(algorithm, x, y)) < 1e-12


@pytest.mark.slow
@scopes
def test_expected_step_vanishes_at_the_solution(lower: str, upper: str) -> None:
    """At y*(x) the expected step is affine in x, and its root is the closed-form solution.

    The root is exact up to the truncation of the series."""
    task = Quadratic(**SMALL, lower=lower, upper=upper)  # type: ignore[arg-type]
    closed, built, errors = task.closed_form(), task.build(), []
    shape = (3, 2) if upper == "private" else (2,)
    for num_terms in (4, 12):
        algorithm = FedMBO(**STEPS, num_lower_rounds=0, num_terms=num_terms)
        fed = Simulation(algorithm, built.problem, built.clients, dtype=torch.float64)
        iterations = iterations_by_factors(fed, num_terms).values()

        def expected(
            x: np.ndarray, algorithm: FedMBO = algorithm, fed: Simulation = fed, iterations: Any = iterations
        ) -> np.ndarray:
            moved = np.zeros(x.size)
            for iteration in iterations:
                state = algorithm.State(
                    fed.place("x", torch.from_numpy(x)), fed.place("y", torch.from_numpy(closed.lower_solution(x)))
                )
                fed.begin(iteration)
                moved += (fed.collect(algorithm.round(fed, state).x).numpy() - x).ravel() / len(iterations)
            return moved

        constant = expected(np.zeros(shape))
        columns = [expected(unit.reshape(shape)) - constant for unit in np.eye(constant.size)]
        errors.append(relative(np.linalg.solve(np.stack(columns, 1), -constant), closed.solution().ravel()))
    assert errors[1] < 0.005
    assert errors[1] < 0.1 * errors[0]


# ---- every path ----------------------------------------------------------------------------------


@given(st.data())
def test_every_path_equals_dense_algebra(data: st.DataObject) -> None:
    """Two outer iterations with any scope, weights, lengths and cohort of each call.

    The Hessian of the lower level depends on y."""
    lower, upper = data.draw(st.sampled_from(SCOPES))
    weights = data.draw(st.sampled_from(["equal", "by_samples"]))
    task = Quadratic(**SMALL, bend=BEND, lower=lower, upper=upper, client_weights=weights)
    algorithm = FedMBO(**STEPS, num_lower_rounds=data.draw(st.integers(0, 3)), num_terms=data.draw(st.integers(1, 5)))
    present = st.just({0, 1, 2}) if lower == "local" or upper == "private" else st.sets(st.integers(0, 2), min_size=1)
    script = data.draw(st.lists(present, min_size=10, max_size=10))
    built = task.build()
    fed = Simulation(
        algorithm,
        built.problem,
        built.clients,
        dtype=torch.float64,
        drops=lambda iteration, call: {0, 1, 2} - script[call - 1],
        seed=11,
    )
    dense = Dense(task.closed_form(), BEND)
    x, y, *placed = at(fed, task)
    state = algorithm.State(*placed)
    for iteration in (1, 2):
        fed.begin(iteration)
        num_factors = fed.draw("N'", algorithm.num_terms)
        state = algorithm.round(fed, state)
        h, y = dense.path(algorithm, x, y, (sorted(cohort) for cohort in script), num_factors)
        x = x - algorithm.lr_upper * h
        torch.testing.assert_close(fed.collect(state.x).expand(3, -1), torch.from_numpy(x), rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(
            fed.collect(state.y).expand(3, -1), torch.from_numpy(np.array(y)), rtol=1e-11, atol=1e-12
        )


def test_private_blocks_move_only_for_the_last_cohort() -> None:
    task = Quadratic(**SMALL, upper="private")
    algorithm = FedMBO(**STEPS, num_lower_rounds=1, num_terms=1)  # calls: y, p, x
    fed, state = drive(algorithm, task.build(), 1, drops=lambda iteration, call: {1} if call == 3 else {2})
    x = fed.collect(state.x)
    assert torch.equal(x[1], torch.zeros(2, dtype=torch.float64))
    assert min(float(x[i].norm()) for i in (0, 2)) > 1e-3


# ---- draws and cost ------------------------------------------------------------------------------


def check_fresh_clients(algorithm: Any, chance: dict[tuple[str, str], float], redraw: str, num: int) -> list[int]:
    """Check by the charges of `num` outer iterations that cohorts of one of four are independent.

    Two kinds of derivative (or two of one kind) are charged to the same client with the given
    probability if all cohorts are independent, and always if one cohort is kept. Returns the
    numbers of H v."""
    built = Quadratic(num_clients=4, dim_upper=1, dim_lower=1).build()
    fed = Simulation(algorithm, built.problem, built.clients, dtype=torch.float64, cohort=Cohort(0.25, redraw=redraw))
    state, products = algorithm.init(fed), []
    met, trials = dict.fromkeys(chance, 0), dict.fromkeys(chance, 0)
    for iteration in range(1, num + 1):
        before = {name: column.clone() for name, column in fed.ledger.columns.items()}
        fed.begin(iteration)
        state = algorithm.round(fed, state)
        paid = {name: column - before[name] for name, column in fed.ledger.columns.items()}
        products.append(int(paid["hvp"].sum()))
        for one, two in chance:
            met[one, two] += bool((paid[one] > 1).any() if one == two else (paid[one] * paid[two]).any())
            trials[one, two] += bool(paid[one].any() and paid[two].any())
    for pair, p in chance.items():
        if redraw == "per_iteration":
            assert met[pair] == trials[pair], pair
        else:
            assert abs(met[pair] - trials[pair] * p) < 4 * (trials[pair] * p * (1 - p)) ** 0.5, pair
    return products


@pytest.mark.parametrize("redraw", ["per_factor", "per_iteration"])
def test_every_line_has_fresh_clients(redraw: str) -> None:
    chance = {
        ("gy", "gy"): 1 / 4,
        ("gy", "fy"): 7 / 16,
        ("fy", "fx"): 1 / 4,
        ("fy", "hvp"): 1 / 4,
        ("hvp", "jvp"): 1 / 4,
    }
    lengths = check_fresh_clients(FedMBO(**STEPS, num_lower_rounds=2, num_terms=2), chance, redraw, 150)
    assert set(lengths) == {0, 1}
    assert abs(sum(lengths) - 75) < 4 * (150 / 4) ** 0.5  # N' is uniform


@given(st.data())
def test_ledger(data: st.DataObject) -> None:
    lower, upper = data.draw(st.sampled_from(SCOPES))
    task = Quadratic(num_clients=3, dim_upper=2, dim_lower=3, lower=lower, upper=upper)
    T, N, num = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    fed, _ = drive(
        FedMBO(**STEPS, num_lower_rounds=T, num_terms=N),
        task.build(),
        num,
        batch_size=data.draw(st.sampled_from([None, 2])),
    )
    other = Simulation(FedMBO(), task.build().problem, task.build().clients)
    factors = 0
    for iteration in range(1, num + 1):
        other.begin(iteration)
        factors += other.draw("N'", N)
    dx, dy = 2 * (upper == "shared"), 3 * (lower == "global")
    columns, one = fed.ledger.columns, torch.ones(3, dtype=torch.int64)
    assert fed.ledger.rounds == (num * (T + 1) + factors) * (dy > 0) + num * (dx > 0)
    assert torch.equal(columns["floats_up"], one * ((num * (T + 1) + factors) * dy + num * dx))
    assert torch.equal(
        columns["floats_down"], one * ((num * (T + 1) + factors) * dy + num * dx + dy)
    )  # y of the start once
    for name, count in {"gy": num * T, "fy": num, "hvp": factors, "fx": num, "jvp": num, "gx": 0}.items():
        assert torch.equal(columns[name], one * count), name


def test_sampled_clients_pay_for_their_own_calls() -> None:
    fed, _ = drive(
        FedMBO(**STEPS, num_lower_rounds=2, num_terms=3),
        Quadratic(num_clients=4, dim_upper=2, dim_lower=3).build(),
        5,
        cohort=Cohort(0.5),
    )
    columns = fed.ledger.columns
    calls = columns["gy"] + columns["fy"] + columns["hvp"]
    assert torch.equal(columns["floats_up"], 3 * calls + 2 * columns["fx"])
    assert int(columns["gy"].sum()) == 5 * 2 * 2
    assert int(columns["fx"].sum()) == 5 * 2


@pytest.mark.parametrize("upper", ["shared", "private"])
def test_resume_is_bit_identical(upper: str) -> None:
    check_resume(FedMBO(**STEPS, num_lower_rounds=2, num_terms=3), "global", upper)


@pytest.mark.parametrize("upper", ["shared", "private"])
def test_resume_is_bit_identical_with_a_local_lower_level(upper: str) -> None:
    check_resume(FedMBO(**STEPS, num_lower_rounds=2, num_terms=3), "local", upper, cohort=Cohort(1.0))
