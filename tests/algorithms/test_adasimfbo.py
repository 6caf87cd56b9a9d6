"""AdaSimFBO against dense algebra; its limit, its messages, and its form without moments."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_simfbo import SMALL, STEPS, check_against_dense, check_ledger, check_resume, scopes

from fedbilevel.algorithms.adasimfbo import AdaSimFBO
from fedbilevel.algorithms.simfbo import SimFBO
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.yardstick import drive, fixed_point, relative


def adam(algorithm: Any) -> Any:
    """Compute the server's directions; the moments of a row change only where the row is real."""
    m: dict[str, Any] = {}
    s: dict[str, Any] = {}

    def direction(name: str, q: np.ndarray, moved: list[int]) -> np.ndarray:
        m.setdefault(name, np.zeros_like(q))
        s.setdefault(name, np.zeros_like(q))
        step = np.zeros_like(q)
        for i in moved:
            m[name][i] += (1 - algorithm.server_momentum) * (q[i] - m[name][i])
            s[name][i] += (1 - algorithm.server_decay) * (q[i] * q[i] - s[name][i])
            step[i] = m[name][i] / (s[name][i] ** 0.5 + algorithm.server_damping)
        return step

    return direction


@given(st.data())
def test_equals_dense_algebra(data: st.DataObject) -> None:
    """Any scope, local steps, server steps, moments, radius, weights and cohort of each call."""
    weights = {
        "server_momentum": data.draw(st.sampled_from([0.0, 0.4, 0.9])),
        "server_decay": data.draw(st.sampled_from([0.0, 0.8])),
    }
    kind = partial(AdaSimFBO, **weights, server_averaging=0.0, server_damping=data.draw(st.sampled_from([0.01, 0.5])))
    check_against_dense(kind, data, divide=False, server=adam)


def test_one_round_by_hand() -> None:
    """With two clients and one round, m = 0.3 q and s = 0.1 q^2 use the mean q of the clients."""
    built = Quadratic(num_clients=2, dim_upper=1, dim_lower=1).build()
    plain, moved = drive(SimFBO(**STEPS), built, 1)
    factors = {"server_lr_upper": 0.5, "server_lr_lower": 0.6, "server_lr_system": 0.7}
    fed, state = drive(
        AdaSimFBO(**STEPS, **factors, server_momentum=0.7, server_decay=0.9, server_damping=0.2), built, 1
    )
    for name, lr, factor in (("x", 0.05, 0.5), ("y", 0.2, 0.6), ("u", 0.2, 0.7)):
        before = fed.collect(dict(zip("xyu", (*fed.initial(), fed.zeros("u")), strict=True))[name])
        q = (before - getattr(moved, name)) / lr
        expected = before - factor * lr * 0.3 * q / (0.1**0.5 * q.abs() + 0.2)
        torch.testing.assert_close(getattr(state, name), expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(getattr(state, f"m_{name}"), 0.3 * q, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(getattr(state, f"s_{name}"), 0.1 * q**2, rtol=1e-12, atol=1e-14)
    assert fed.ledger.totals() == plain.ledger.totals()


@scopes
def test_stands_still_where_simfbo_does(lower: str, upper: str) -> None:
    """Also with unequal work and drift."""
    built = Quadratic(**SMALL, lower=lower, upper=upper).build()  # type: ignore[arg-type]
    work = {**STEPS, "num_local_steps": (1, 2, 3), "minibatches": "shared"}
    limit, _ = fixed_point(SimFBO(**work), built)
    if lower == "local" and upper == "shared":  # each client's q_y and q_u vanish, those of x only in the mean
        assert float(limit["y"].std(0).min()) > 0.01
    algorithm = AdaSimFBO(**work)
    fed, state = drive(algorithm, built, 1)
    assert min(relative(fed.collect(getattr(state, name)), limit[name]) for name in "xyu") > 0.1
    state = algorithm.init(fed)._replace(
        **{name: fed.place(name, limit[name[-1]]) for name in ("x", "y", "z_x", "z_y", "u")}
    )
    for iteration in (1, 2):
        fed.begin(iteration)
        state = algorithm.round(fed, state)
    for name in "xyu":
        assert relative(fed.collect(getattr(state, name)), limit[name]) < 1e-10, name


def test_one_step_of_all_clients_together_is_that_of_each_alone() -> None:
    """One number of steps allows one pooled derivative; a number per client does not."""
    built = Quadratic(**SMALL).build()
    options = {"batch_size": 2, "cohort": Cohort(0.67), "seed": 3}
    ends = [
        drive(AdaSimFBO(**STEPS, num_local_steps=num), built, 3, **options) for num in (1, (1,) * SMALL["num_clients"])
    ]
    (one, a), (two, b) = ends
    for name in a._fields:
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-12, atol=1e-14)
    assert one.ledger.totals() == two.ledger.totals()


def test_reaches_the_closed_form_solution() -> None:
    task = Quadratic(**SMALL)
    closed = task.closed_form()
    factors = {f"server_{name}": 2.0 for name in STEPS}
    _, state = drive(
        AdaSimFBO(**STEPS, **factors, server_momentum=0.3, server_damping=2.0, minibatches="shared"), task.build(), 250
    )
    assert relative(state.x, closed.solution()) < 1e-7
    assert relative(state.y, closed.lower_solution(closed.solution())) < 1e-7
    assert relative(state.u, closed.system_solution(closed.solution())) < 1e-7


@scopes
def test_answers_with_an_average_of_iterates_that_it_leaves_alone(lower: str, upper: str) -> None:
    """The first two iterates have equal weight in the average, later ones have weight 1 - kappa.

    An average kept by a client changes only when that client takes part."""
    built = Quadratic(**SMALL, lower=lower, upper=upper).build()  # type: ignore[arg-type]
    gone = [set(), {0}, {1}, set(), {0, 2}]
    options = {"drops": lambda iteration, call: gone[iteration - 1]}
    averages: dict[str, Any] = {}
    for t in range(1, 6):
        plain, a = drive(AdaSimFBO(**STEPS, server_averaging=0.0), built, t, **options)
        fed, b = drive(AdaSimFBO(**STEPS, server_averaging=0.6), built, t, **options)
        for name, kept in (("x", upper == "private"), ("y", lower == "local")):
            iterate = plain.collect(getattr(a, name)).clone()
            assert torch.equal(iterate, fed.collect(getattr(b, f"z_{name}")))
            k = {1: 0.0, 2: 0.5}.get(t, 0.6)
            before = averages.get(name, iterate)
            averages[name] = k * before + (1 - k) * iterate
            if kept:
                averages[name][list(gone[t - 1])] = before[list(gone[t - 1])]
            torch.testing.assert_close(fed.collect(getattr(b, name)), averages[name], rtol=1e-12, atol=1e-14)


@scopes
def test_is_simfbo_without_momentum_and_with_a_damping_that_drowns_the_second_moment(lower: str, upper: str) -> None:
    built = Quadratic(**SMALL, lower=lower, upper=upper).build()  # type: ignore[arg-type]
    options = {"batch_size": 2, "cohort": Cohort(0.67), "seed": 3}
    work = {**STEPS, "num_local_steps": 2, "radius": 0.1}
    factors = {f"server_{name}": 1e9 for name in STEPS}
    one, a = drive(
        AdaSimFBO(**work, **factors, server_momentum=0.0, server_damping=1e9, server_averaging=0.0), built, 4, **options
    )
    two, b = drive(SimFBO(**work), built, 4, **options)
    for name in "xyu":
        torch.testing.assert_close(one.collect(getattr(a, name)), two.collect(getattr(b, name)), rtol=1e-7, atol=1e-8)
    assert one.ledger.totals() == two.ledger.totals()


def test_a_schedule_scales_steps_and_leaves_moments() -> None:
    built = Quadratic(**SMALL).build()
    algorithm = AdaSimFBO(**STEPS)
    fed = Simulation(algorithm, built.problem, built.clients, dtype=torch.float64)
    start, moved = algorithm.init(fed), []
    for factor in (1.0, 0.25):
        fed.begin(1, algorithm.scaled(factor))
        moved.append(algorithm.scaled(factor).round(fed, start))
    for name in "xyu":
        long, short = (getattr(state, name) - getattr(start, name) for state in moved)
        torch.testing.assert_close(short, 0.25 * long, rtol=1e-10, atol=1e-14)
        assert torch.equal(getattr(moved[0], f"m_{name}"), getattr(moved[1], f"m_{name}"))
        assert torch.equal(getattr(moved[0], f"s_{name}"), getattr(moved[1], f"s_{name}"))


@given(st.data())
def test_ledger(data: st.DataObject) -> None:
    check_ledger(AdaSimFBO, data)


@scopes
def test_resume_is_bit_identical(lower: str, upper: str) -> None:
    check_resume(AdaSimFBO(**STEPS, num_local_steps=(1, 2, 3, 1), radius=1.0), lower, upper)


def test_settings_are_checked() -> None:
    for name in ("server_momentum", "server_decay", "server_averaging"):
        with pytest.raises(SettingError, match=name):
            AdaSimFBO(**{name: 1.1})
    with pytest.raises(SettingError, match="server_damping"):
        AdaSimFBO(server_damping=0.0)
