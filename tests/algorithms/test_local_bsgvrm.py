"""The limit and the cost of Local-BSGVRM, which is AdaFBiO without its matrices.

test_adafbio compares AdaFBiO with the printed equations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_adafbio import CONSTANT, LOCAL, SCOPES, SMALL, THETA, drawn_k, local_solution, settles

from fedbilevel.algorithms.adafbio import AdaFBiO
from fedbilevel.algorithms.local_bsgvrm import LocalBSGVRM
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import ScopeWarning, SettingError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.problem.problem import Scopes
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.yardstick import drive, relative

K = 2
STEADY = {
    "lr_upper": 0.4,
    "lr_lower": 0.8,
    "lr_system": THETA,
    "num_local_steps": 1,
    "num_terms": K,
    "hypergradient": "local-neumann-sum",
    **CONSTANT,
}


@pytest.mark.parametrize("hypergradient", LOCAL)
@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_it_is_adafbio_with_identity_matrices(lower, upper, hypergradient):
    built = Quadratic(**SMALL, lower=lower, upper=upper).build()
    settings = {
        "lr_upper": 0.2,
        "lr_lower": 0.3,
        "lr_system": 0.25,
        "num_local_steps": 3,
        "num_terms": 3,
        "step_scale": 0.8,
        "offset": 20,
        "c1": 0.9,
        "c2": 1.1,
        "hypergradient": hypergradient,
    }
    options = {"batch_size": 2, "cohort": Cohort(0.6), "seed": 3}
    fed, state = drive(LocalBSGVRM(**settings), built, 3, **options)
    other, expected = drive(AdaFBiO(**settings, adaptive="none"), built, 3, **options)
    for name in state._fields:
        assert torch.equal(fed.collect(getattr(state, name)), other.collect(getattr(expected, name)))
        assert float(fed.collect(getattr(state, name)).abs().max()) > 1e-3
    assert fed.ledger.totals() == other.ledger.totals()


def test_heterogeneous_clients_settle_where_the_mean_of_local_hypergradients_vanishes():
    task = Quadratic(**SMALL)
    closed = task.closed_form()
    settles(LocalBSGVRM(**STEADY), task, 80, local_solution(closed, K))
    assert relative(local_solution(closed), closed.solution()) > 0.2


@pytest.mark.parametrize("same", [{"heterogeneity": 0.0}, {"lower": "local"}], ids=str)
def test_identical_clients_or_a_local_lower_level_settle_at_the_solution_up_to_the_series(same):
    task = Quadratic(**SMALL, **same)
    closed = task.closed_form()
    settles(LocalBSGVRM(**STEADY), task, 80, local_solution(closed, K))
    assert relative(local_solution(closed, 400), closed.solution()) < 1e-10


@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_a_global_lower_level_is_warned_of(lower, upper):
    assert [type(warning) for warning in LocalBSGVRM().check_scopes(Scopes(lower, upper))] == [ScopeWarning] * (
        lower == "global"
    )


@given(st.data())
def test_the_ledger_holds_what_the_docstring_says(data):
    lower, upper = data.draw(st.sampled_from(SCOPES))
    dx, dy, p, num = (data.draw(st.integers(1, 3)) for _ in range(4))
    algorithm = LocalBSGVRM(
        num_local_steps=p, num_terms=data.draw(st.integers(1, 4)), hypergradient=data.draw(st.sampled_from(LOCAL))
    )
    task = Quadratic(num_clients=2, dim_upper=dx, dim_lower=dy, lower=lower, upper=upper)
    fed, _ = drive(algorithm, task.build(), num, batch_size=data.draw(st.sampled_from([None, 2])))
    X, Y, columns = dx * (upper == "shared"), dy * (lower == "global"), fed.ledger.columns
    assert fed.ledger.rounds == (X + Y > 0) * (1 + num)
    assert columns["floats_up"].tolist() == [X + Y + num * (2 * X + 2 * Y)] * 2
    assert columns["floats_down"].tolist() == [num * (2 * X + 2 * Y)] * 2
    for name in ("gy", "fx", "fy", "jvp"):
        assert columns[name].tolist() == [p + 2 * p * num] * 2
    K, sampled = algorithm.num_terms, algorithm.hypergradient == "local-neumann"
    for i in range(2):
        each = [
            (drawn_k(0, i, K, (iteration, 1, step)) if sampled else K - 1) * (2 if iteration else 1)
            for iteration in range(num + 1)
            for step in range(p)
        ]
        assert int(columns["hvp"][i]) == sum(each)


@pytest.mark.parametrize(("lower", "upper"), [SCOPES[0], SCOPES[3]])
def test_a_checkpoint_goes_on_bit_for_bit_and_a_client_may_drop(lower, upper):
    built = Quadratic(**SMALL, lower=lower, upper=upper).build()
    algorithm = LocalBSGVRM(num_terms=3, num_local_steps=2)
    options = {"batch_size": 2, "drops": lambda iteration, call: [iteration % 3]}
    whole, end = drive(algorithm, built, 4, **options)
    half, middle = drive(algorithm, built, 2, **options)
    tensors, plain = half.state_dict(middle)
    fresh = Simulation(algorithm, built.problem, built.clients, dtype=torch.float64, **options)
    state = fresh.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, plain, algorithm.State)
    for iteration in (3, 4):
        fresh.begin(iteration)
        state = algorithm.round(fresh, state)
    for name in end._fields:
        assert torch.equal(whole.collect(getattr(end, name)), fresh.collect(getattr(state, name)))


def test_weights_beyond_one_are_refused():
    built = Quadratic(**SMALL).build()
    algorithm = LocalBSGVRM(c2=12.0)
    with pytest.raises(SettingError, match=r"LocalBSGVRM: with 3 clients .* c2 eta"):
        algorithm.init(Simulation(algorithm, built.problem, built.clients))
