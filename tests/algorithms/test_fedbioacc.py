from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.algorithms.fedbioacc import FedBiOAcc
from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.by_hand import Samples, fx, fy, global_directions, gy, states, storm_rounds
from support.numeric.yardstick import check_continues, drive, relative

SCOPES = [("global", "shared"), ("global", "private"), ("local", "shared"), ("local", "private")]
INDEPENDENT, SHARED = "B_y B_f1 B_f2 B_g1 B_g2", "B_g B_f B_f B_g B_g"
VARIABLES, ESTIMATES = ("x", "y", "u"), ("nu", "om", "q")


def small(**settings: Any) -> Quadratic:
    return Quadratic(**{"num_clients": 3, "dim_upper": 2, "dim_lower": 3, **settings})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lower", "upper", "num_clients", "lr_upper", "num_local_steps", "num_iterations"),
    [
        ("global", "shared", 3, 0.09, 1, 120),
        ("global", "shared", 2, 0.07, 2, 75),
        ("global", "private", 2, 0.1, 1, 190),
        ("local", "shared", 3, 0.07, 1, 120),
    ],
)
def test_reaches_the_solution(
    lower: str, upper: str, num_clients: int, lr_upper: float, num_local_steps: int, num_iterations: int
) -> None:
    """Whole batches; offset is large, so that a hardly falls."""
    task = small(num_clients=num_clients, lower=lower, upper=upper)
    algorithm = FedBiOAcc(
        lr_upper=lr_upper, lr_lower=0.5, lr_system=0.5, num_local_steps=num_local_steps, delta=100.0, offset=1e6
    )
    fed, state = drive(algorithm, task.build(), num_iterations)
    x, closed = fed.collect(state.x), task.closed_form()
    assert relative(x, closed.solution()) < 1e-8
    assert relative(fed.collect(state.y), closed.lower_solution(x.numpy())) < 1e-8
    assert relative(fed.collect(state.u), closed.system_solution(x.numpy())) < 1e-8


@pytest.mark.slow
def test_three_local_steps_leave_a_distance_proportional_to_c_and_to_the_cube_of_a() -> None:
    task = small(num_clients=2)

    def distance(c: float, delta: float, num_iterations: int) -> float:
        algorithm = FedBiOAcc(
            lr_upper=0.1,
            lr_lower=0.5,
            lr_system=0.5,
            num_local_steps=3,
            delta=delta,
            offset=1e6,
            momentum_upper=c,
            momentum_lower=c,
            momentum_system=c,
        )
        return relative(drive(algorithm, task.build(), num_iterations)[1].x, task.closed_form().solution())

    far = distance(0.8, 100.0, 40)
    assert far > 1e-2
    assert far / distance(0.2, 100.0, 40) == pytest.approx(4, rel=0.1)
    assert far / distance(0.8, 50.0, 80) == pytest.approx(8, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("scopes", SCOPES)
@pytest.mark.parametrize(
    "case",
    ["one client", "unequal steps", "shared minibatches", "ball", "absent in R1", "absent in R2", "absent in both"],
)
def test_agrees_with_algorithm_1_by_hand(case: str, scopes: tuple[str, str]) -> None:
    """Every iterate agrees, with minibatches.

    The new and the old point use the same samples, the old point is not averaged, and every a_t
    has the right index."""
    num = 1 if case == "one client" else 3
    counts = [3] if case == "one client" else [2, 3, 1] if case == "unequal steps" else [2, 2, 2]
    task = small(num_clients=num, lower=scopes[0], upper=scopes[1], cross=0.4)
    calls = {"absent in R1": (1,), "absent in R2": (2,), "absent in both": (1, 2)}.get(case, ())
    drops = lambda k, call: [1] if call in calls and k in (1, 3) else []
    shared = case == "shared minibatches"
    radius = 0.1 if case == "ball" else None
    algorithm = FedBiOAcc(
        lr_upper=0.07,
        lr_lower=0.2,
        lr_system=0.15,
        num_local_steps=tuple(counts),
        delta=2.0,
        offset=3.0,
        radius=radius,
        momentum_upper=0.5,
        momentum_lower=0.3,
        momentum_system=0.4,
        minibatches="shared" if shared else "independent",
    )
    samples = Samples(task, seed=5, batch_size=2)
    expected = storm_rounds(
        {"x": np.zeros(2), "y": np.zeros(3), "u": np.zeros(3)},
        4,
        lambda i, p, where, times=1: global_directions(samples, i, p, where, SHARED if shared else INDEPENDENT, times),
        counts,
        {"x": 0.07, "y": 0.2, "u": 0.15},
        ("x" if scopes[1] == "shared" else "") + ("yu" if scopes[0] == "global" else ""),
        delta=2.0,
        offset=3.0,
        weights={"x": 0.5, "y": 0.3, "u": 0.4},
        radius=radius,
        drops=drops,
    )
    for (fed, state), (points, est) in zip(
        states(algorithm, task.build(), 4, seed=5, batch_size=2, drops=drops), expected, strict=True
    ):
        for name, momentum in zip(VARIABLES, ESTIMATES, strict=True):
            for rows, target in (
                (fed.collect(getattr(state, name)), points),
                (fed.collect(getattr(state, momentum)), est),
            ):
                target = np.stack([row[name] for row in target])
                np.testing.assert_allclose(rows.expand(num, -1).numpy(), target, rtol=1e-11, atol=1e-13)
    size = float(torch.linalg.vector_norm(fed.collect(state.u), dim=-1).max())
    assert size <= 0.1 + 1e-12 if case == "ball" else size > 0.2  # u goes where the ball matters


def test_estimates_follow_the_mean_of_the_directions() -> None:
    """With whole batches the means of nu, om, q are the mean directions at the averaged point.

    This holds for any drift between rounds only if each client keeps its own old point and R2
    averages after STORM."""
    task = small(num_clients=4, cross=0.4)
    samples = Samples(task)
    algorithm = FedBiOAcc(lr_upper=0.1, lr_lower=0.3, lr_system=0.3, num_local_steps=4, delta=2.0, offset=7.0)
    for _, state in states(algorithm, task.build(), 4):
        p = {name: getattr(state, name).numpy() for name in VARIABLES}
        at = [global_directions(samples, i, p, (0, 0, 0), INDEPENDENT) for i in range(4)]
        for name, momentum in zip(VARIABLES, ESTIMATES, strict=True):
            assert relative(getattr(state, momentum), np.mean([row[name] for row in at], axis=0)) < 1e-12


def test_both_points_see_the_same_samples() -> None:
    """The steps are too short to change a float64, so the new and the old point are equal.

    Then est <- d + (1 - c a^2) (est - d), with a direction d of ONE sample."""
    task = small(num_clients=1, num_samples=6)
    a, c = 10 / 1001 ** (1 / 3), 0.3
    algorithm = FedBiOAcc(
        lr_upper=1e-300, lr_lower=1e-300, lr_system=1e-300, num_local_steps=1, delta=10.0, offset=1000.0,
        momentum_upper=c, momentum_lower=c, momentum_system=c,
    )  # fmt: skip
    (_, before), (_, after) = states(algorithm, task.build(), 1, batch_size=1)
    (client,) = Samples(task).clients
    zero = (np.zeros(2), np.zeros(3))
    one = lambda role, s: {name: value[s : s + 1] for name, value in client[role].items()}
    possible = {
        "nu": [fx(one("val", s), *zero) for s in range(6)],
        "om": [gy(one("train", s), *zero) for s in range(6)],
        "q": [-fy(one("val", s), *zero) for s in range(6)],
    }
    for name, directions in possible.items():
        d = getattr(before, name) + (getattr(after, name) - getattr(before, name)) / (c * a**2)
        assert min(relative(d, target) for target in directions) < 1e-12


@given(
    num_local_steps=st.integers(1, 3) | st.tuples(*[st.integers(1, 3)] * 3),
    fraction=st.sampled_from([0.34, 0.67, 1.0]),
    scopes=st.sampled_from(SCOPES),
    seed=st.integers(0, 50),
)
def test_ledger(num_local_steps: Any, fraction: float, scopes: tuple[str, str], seed: int) -> None:
    task = small(lower=scopes[0], upper=scopes[1])
    counts = torch.tensor(num_local_steps if isinstance(num_local_steps, tuple) else [num_local_steps] * 3)
    floats = 2 * (scopes[1] == "shared") + 2 * 3 * (scopes[0] == "global")  # d_x + 2 d_y of what travels
    algorithm = FedBiOAcc(num_local_steps=num_local_steps)
    up, down, calls, samples = (torch.zeros(3, dtype=torch.int64) for _ in range(4))
    rounds, was_there, paid = 0, torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    for k, (fed, _) in enumerate(states(algorithm, task.build(), 3, seed=seed, cohort=Cohort(fraction), batch_size=2)):
        ledger = fed.ledger.columns
        here = ledger["gy"] > paid
        assert int(here.sum()) == round(3 * fraction)
        rounds += (1 if k == 0 else 2) * (floats > 0)
        up += here * (1 if k == 0 else 2) * floats
        down += here * (1 if k == 0 else 2 + ~was_there) * floats  # one that is new also needs the point it starts from
        calls += here * (1 if k == 0 else 2 * counts)
        samples += here * (5 * 2 * max(counts.tolist()) if k == 0 else 5 * 2 * 2 * counts)
        assert fed.ledger.rounds == rounds
        assert torch.equal(ledger["floats_up"], up)
        assert torch.equal(ledger["floats_down"], down)
        for name in ("gy", "fx", "fy", "hvp", "jvp"):
            assert torch.equal(ledger[name], calls)
        assert torch.equal(ledger["gx"], torch.zeros_like(calls))
        assert torch.equal(ledger["samples"], samples)
        was_there, paid = here, ledger["gy"].clone()


@pytest.mark.parametrize("scopes", SCOPES)
def test_continues_from_a_checkpoint_bit_by_bit(scopes: tuple[str, str]) -> None:
    task = small(num_clients=4, lower=scopes[0], upper=scopes[1])
    algorithm = FedBiOAcc(num_local_steps=(2, 1, 3, 2))
    check_continues(algorithm, task.build())


def test_the_first_momentum_weights_must_be_below_one() -> None:
    FedBiOAcc(delta=1.0, offset=7.0, momentum_upper=3.99, momentum_lower=3.99, momentum_system=3.99)  # a = 1/2
    for name in ("momentum_upper", "momentum_lower", "momentum_system"):
        with pytest.raises(SettingError, match=rf"{name} \* a\^2 is 1 in the first step, expected less than 1"):
            FedBiOAcc(**{"delta": 1.0, "offset": 0.0, name: 1.0})
        with pytest.raises(SettingError, match=name):
            FedBiOAcc(**{"delta": 1.0, "offset": 7.0, name: 4.1})


def test_steps_per_client_must_name_every_client() -> None:
    with pytest.raises(SettingError, match="2 numbers of local steps for 3 clients"):
        drive(FedBiOAcc(num_local_steps=(1, 2)), small().build(), 1)


@pytest.mark.parametrize("phase", ["initial_momenta", "local_steps", "momenta"])
def test_a_process_without_a_client_of_the_cohort_returns_no_rows(phase: str) -> None:
    fed, state = drive(FedBiOAcc(num_local_steps=2), small().build(), 1)
    values = {
        name: getattr(state, name) for name in (VARIABLES if phase == "initial_momenta" else VARIABLES + ESTIMATES)
    }
    result = fed.host.run_phase(phase, values, torch.zeros(0, dtype=torch.int64), 2, 1)
    assert [tuple(rows.shape) for rows in result.values()] == [(0, 2), (0, 3), (0, 3)]
    assert list(result) == list(VARIABLES if phase == "local_steps" else ESTIMATES)
