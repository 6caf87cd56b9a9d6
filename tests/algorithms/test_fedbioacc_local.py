from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.algorithms.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.fedbioacc_local import FedBiOAccLocal
from fedbilevel.errors import ScopeError, SettingError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.problem.problem import Scopes
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.by_hand import Samples, global_directions, neumann_directions, states, storm_rounds
from support.numeric.yardstick import check_continues, drive, relative

VARIABLES, ESTIMATES = ("x", "y", "u"), ("nu", "om", "q")


def small(**settings: Any) -> Quadratic:
    return Quadratic(**{"num_clients": 3, "dim_upper": 2, "dim_lower": 3, "lower": "local", **settings})


@pytest.mark.slow
@pytest.mark.parametrize("num_local_steps", [1, 2])
def test_local_u_reaches_the_solution(num_local_steps: int) -> None:
    """Whole batches; offset is large, so that a hardly falls."""
    task = small()
    algorithm = FedBiOAccLocal(
        lr_upper=0.07, lr_lower=0.5, lr_system=0.5, num_local_steps=num_local_steps, delta=100.0, offset=1e6, u="local"
    )
    fed, state = drive(algorithm, task.build(), 130 // num_local_steps)
    x, closed = state.x.numpy(), task.closed_form()
    assert relative(x, closed.solution()) < 1e-8
    assert relative(fed.collect(state.y), closed.lower_solution(x)) < 1e-8
    assert relative(fed.collect(state.u), closed.system_solution(x)) < 1e-8


@pytest.mark.slow
def test_the_neumann_series_reaches_the_solution_up_to_its_bias() -> None:
    """A_i = 1.25 I at every client, so the bias of the series is known whatever else differs.

    A series of Q + 1 terms is the inverse times 1 - (1 - tau mu)^(Q+1)."""
    task = small()
    built = task.build()
    clients = [{role: dict(fields) for role, fields in client.items()} for client in built.clients]
    for client in clients:
        client["train"]["A"] = np.broadcast_to(1.25 * np.eye(3), client["train"]["A"].shape).copy()
    closed = task.closed_form()
    closed.stacked["A"] = np.broadcast_to(1.25 * np.eye(3), closed.stacked["A"].shape)
    for Q in (0, 3):
        algorithm = FedBiOAccLocal(
            lr_upper=0.14, lr_lower=0.8, lr_system=0.4, num_local_steps=1, delta=100.0, offset=1e6, num_factors=Q
        )
        state = drive(algorithm, built._replace(clients=clients), 100)[1]
        # u_i is short by one factor everywhere, which is what D_i scaled by it does
        factor = 1 - (1 - 0.4 * 1.25) ** (Q + 1)
        short = closed._replace(
            stacked={**closed.stacked, "D": factor * closed.stacked["D"], "Dt": factor * closed.stacked["Dt"]}
        )
        assert relative(state.x, short.solution()) < 1e-8
        assert relative(state.x, closed.solution()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("u", ["neumann", "local"])
@pytest.mark.parametrize("upper", ["shared", "private"])
@pytest.mark.parametrize("case", ["one client", "unequal steps", "absent in R1", "absent in R2"])
def test_agrees_with_algorithm_4_by_hand(case: str, upper: str, u: str) -> None:
    """Every iterate agrees, with minibatches.

    The new and the old point share all of xi, zeta_0..zeta_Q, and the old point is not averaged."""
    counts = [3] if case == "one client" else [2, 3, 1]
    task, num = small(num_clients=len(counts), upper=upper, cross=0.4), len(counts)
    drops = lambda k, call: [1] if case == f"absent in R{call}" and k in (1, 3) else []
    samples = Samples(task, seed=5, batch_size=2)
    start = {"x": np.zeros(2), "y": np.zeros(3)}
    if u == "local":
        start["u"] = np.zeros(3)
        directions = lambda i, p, where, times=1: global_directions(
            samples, i, p, where, "B_y xi xi zeta_0 zeta_1", times
        )
    else:
        directions = lambda i, p, where, times=1: neumann_directions(samples, i, p, where, 0.15, 3, times)
    algorithm = FedBiOAccLocal(
        lr_upper=0.07,
        lr_lower=0.2,
        lr_system=0.15,
        num_local_steps=tuple(counts),
        num_factors=3,
        u=u,
        delta=2.0,
        offset=3.0,
        momentum_upper=0.5,
        momentum_lower=0.3,
        momentum_system=0.4,
    )
    expected = storm_rounds(
        start, 4, directions, counts, {"x": 0.07, "y": 0.2, "u": 0.15}, "x" if upper == "shared" else "",
        delta=2.0, offset=3.0, weights={"x": 0.5, "y": 0.3, "u": 0.4}, drops=drops,
    )  # fmt: skip
    for (fed, state), (points, est) in zip(
        states(algorithm, task.build(), 4, seed=5, batch_size=2, drops=drops), expected, strict=True
    ):
        for name, momentum in zip(start, ESTIMATES, strict=False):
            for rows, target in (
                (fed.collect(getattr(state, name)), points),
                (fed.collect(getattr(state, momentum)), est),
            ):
                np.testing.assert_allclose(
                    rows.expand(num, -1).numpy(), np.stack([row[name] for row in target]), rtol=1e-11, atol=1e-13
                )
    assert (state.u is None, state.q is None) == (u == "neumann", u == "neumann")


def test_the_estimate_of_x_follows_the_mean_of_the_hypergradients() -> None:
    """With whole batches nu is the mean of Phi_i at the averaged x and every client's own y_i.

    This holds for any drift of x_i only if each client keeps its own old point."""
    task = small(cross=0.4)
    samples = Samples(task)
    algorithm = FedBiOAccLocal(
        lr_upper=0.1, lr_lower=0.3, lr_system=0.3, num_local_steps=4, num_factors=2, delta=2.0, offset=7.0
    )
    for fed, state in states(algorithm, task.build(), 4):
        y, om = fed.collect(state.y), fed.collect(state.om)
        rows = [
            neumann_directions(samples, i, {"x": state.x.numpy(), "y": y[i].numpy()}, (0, 0, 0), 0.3, 2)
            for i in range(3)
        ]
        assert relative(state.nu, np.mean([row["x"] for row in rows], axis=0)) < 1e-12
        assert relative(om, np.stack([row["y"] for row in rows])) < 1e-12


def test_local_u_is_fedbioacc_on_a_local_lower_level() -> None:
    task, settings = small(), {"lr_upper": 0.05, "lr_lower": 0.3, "lr_system": 0.2, "num_local_steps": (1, 3, 2)}
    a, one = drive(FedBiOAccLocal(**settings, u="local"), task.build(), 3)
    b, two = drive(FedBiOAcc(**settings), task.build(), 3)
    for name in VARIABLES + ESTIMATES:
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
    algorithm = FedBiOAccLocal(num_local_steps=num_local_steps, num_factors=num_factors, u=u)
    up, down, evaluations, batches = (torch.zeros(3, dtype=torch.int64) for _ in range(4))
    rounds, was_there = 0, torch.zeros(3, dtype=torch.bool)
    for k, (fed, _) in enumerate(
        states(algorithm, small(upper=upper).build(), 3, seed=seed, cohort=Cohort(fraction), batch_size=2)
    ):
        ledger = fed.ledger.columns
        here = ledger["gy"] > evaluations
        assert int(here.sum()) == round(3 * fraction)
        rounds += (1 if k == 0 else 2) * (floats > 0)
        up += here * (1 if k == 0 else 2) * floats
        down += here * (1 if k == 0 else 2 + ~was_there) * floats  # one that is new also needs the x it starts from
        evaluations += here * (1 if k == 0 else 2 * counts)
        batches += here * (max(counts.tolist()) if k == 0 else 2 * counts)
        assert fed.ledger.rounds == rounds
        assert torch.equal(ledger["floats_up"], up)
        assert torch.equal(ledger["floats_down"], down)
        for name, calls in (("gy", 1), ("fx", 1), ("fy", 1), ("jvp", 1), ("hvp", products), ("gx", 0)):
            assert torch.equal(ledger[name], calls * evaluations), name
        assert torch.equal(ledger["samples"], 2 * (3 + products) * batches)
        was_there = here


@pytest.mark.parametrize("u", ["neumann", "local"])
def test_continues_from_a_checkpoint_bit_by_bit(u: str) -> None:
    task = small(num_clients=4)
    algorithm = FedBiOAccLocal(num_local_steps=(2, 1, 3, 2), num_factors=2, u=u)
    check_continues(algorithm, task.build())


def test_what_is_refused() -> None:
    assert FedBiOAccLocal().check_scopes(Scopes(lower="local")) == []
    with pytest.raises(ScopeError, match="fedbioacc_local cannot solve a problem with a global lower level"):
        FedBiOAccLocal().check_scopes(Scopes(lower="global"))
    with pytest.raises(SettingError, match=r"FedBiOAccLocal: momentum_upper \* a\^2 is 1\.02 in the first step"):
        FedBiOAccLocal(delta=1.0, offset=7.0, momentum_upper=4.1)
