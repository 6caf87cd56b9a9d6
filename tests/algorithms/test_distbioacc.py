from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.algorithms.distbioacc import DistBiOAcc
from fedbilevel.algorithms.fedbioacc_local import FedBiOAccLocal
from fedbilevel.errors import ScopeError, SettingError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.problem.problem import Scopes
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.yardstick import drive, relative


def small(**settings: Any) -> Quadratic:
    return Quadratic(**{"num_clients": 3, "dim_upper": 2, "dim_lower": 3, "lower": "local", **settings})


def test_reaches_the_solution() -> None:
    task = small()
    state = drive(
        DistBiOAcc(lr_upper=0.07, lr_lower=0.5, lr_system=0.5, delta=100.0, offset=1e6, u="local"), task.build(), 130
    )[1]
    assert relative(state.x, task.closed_form().solution()) < 1e-8


@pytest.mark.parametrize("u", ["neumann", "local"])
def test_is_fedbioacc_local_with_one_step(u: str) -> None:
    task, settings, options = (
        small(num_clients=4),
        {"lr_upper": 0.05, "lr_lower": 0.3, "u": u},
        {"seed": 3, "batch_size": 2, "cohort": Cohort(0.5)},
    )
    a, one = drive(DistBiOAcc(**settings), task.build(), 3, **options)
    b, two = drive(FedBiOAccLocal(**settings, num_local_steps=1), task.build(), 3, **options)
    tensors, others = a.state_dict(one)[0], b.state_dict(two)[0]
    assert tensors.keys() == others.keys()
    for name, value in tensors.items():
        assert torch.equal(value, others[name]), name


@given(num_factors=st.integers(0, 4), u=st.sampled_from(["neumann", "local"]), num_iterations=st.integers(1, 4))
def test_ledger(num_factors: int, u: str, num_iterations: int) -> None:
    fed, _ = drive(DistBiOAcc(num_factors=num_factors, u=u), small().build(), num_iterations)
    n = 3 * (2 * num_iterations + 1)
    expected = {
        "floats_up": 2 * n,
        "floats_down": 2 * n,
        "gy": n,
        "fx": n,
        "fy": n,
        "jvp": n,
        "hvp": n if u == "local" else num_factors * n,
    }
    assert fed.ledger.rounds == 2 * num_iterations + 1
    assert {name: int(fed.ledger.columns[name].sum()) for name in expected} == expected


def test_what_is_refused() -> None:
    assert "num_local_steps" not in DistBiOAcc().asdict()
    with pytest.raises(TypeError, match="num_local_steps"):
        DistBiOAcc(num_local_steps=2)
    with pytest.raises(ScopeError, match="distbioacc cannot"):
        DistBiOAcc().check_scopes(Scopes(lower="global"))
    with pytest.raises(SettingError, match="DistBiOAcc: momentum_lower"):
        DistBiOAcc(delta=1.0, offset=0.0, momentum_lower=1.0)
