"""Clustered federated learning: the best bipartition, the time of a split, and the limits."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.algorithms.clustered_fl import ClusteredFL, _two_parts
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.errors import ScopeError, SettingError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.problem.problem import Scopes
from fedbilevel.runs.solve import solve
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.task import Built
from support.numeric.by_hand import Samples, gy, states
from support.numeric.yardstick import check_continues, drive, relative, start_at

NEVER = 1e9


def groups(labels: list[int], scale: float = 1.0, **settings: Any) -> Built:
    """Build clients whose y* nearly agree within a group.

    Between groups the y* are opposite or orthogonal. Every client has its own A_i and c_i."""
    task = Quadratic(**{"num_clients": len(labels), "dim_upper": 2, "dim_lower": 3, "heterogeneity": 0.15, **settings})
    wishes = 5 * np.array([[1, -2, 1], [-1, 2, -1], [2, 1, 0]])
    built = task.build()
    for client, label in zip(built.clients, labels, strict=True):
        client["train"]["c"] = scale * (client["train"]["c"] + wishes[label])
    return built


def group_solution(built: Built, members: list[int], weights: np.ndarray) -> np.ndarray:
    """At x = 0."""
    A, c = (np.stack([np.asarray(built.clients[i]["train"][name]).mean(0) for i in members]) for name in "Ac")
    return np.linalg.solve(np.tensordot(weights[members], A, axes=1), weights[members] @ c)


def worst_pair(change: np.ndarray, inside: list[int]) -> float:
    """The largest cosine across the two parts."""
    outside = [i for i in range(len(change)) if i not in inside]
    return max(
        change[i] @ change[j] / np.linalg.norm(change[i]) / np.linalg.norm(change[j]) for i in inside for j in outside
    )


@given(seed=st.integers(0, 10**6), num=st.integers(2, 7), dim=st.integers(1, 4))
def test_no_other_bipartition_has_a_smaller_largest_similarity_across(seed: int, num: int, dim: int) -> None:
    change = np.random.default_rng(seed).standard_normal((num, dim))
    found = _two_parts(torch.tensor(change))
    assert found.any()
    assert not found[0]
    every = [
        list(part) for size in range(1, num) for part in itertools.combinations(range(1, num), size)
    ]  # those without client 0: all, once each
    values = [worst_pair(change, part) for part in every]
    assert worst_pair(change, found.nonzero()[:, 0].tolist()) <= min(values) + 1e-12
    if dim > 1 and num == 6:
        assert len(values) == 31
        assert max(values) > min(values)


def test_the_lengths_of_changes_do_not_matter_and_a_client_that_did_not_move_is_no_error() -> None:
    change = torch.tensor(np.random.default_rng(3).standard_normal((6, 3)))
    assert torch.equal(
        _two_parts(change), _two_parts(change * torch.tensor([[1.0], [1e3], [1e-3], [7.0], [0.1], [50.0]]))
    )
    still = torch.tensor([[1.0, 0.1], [0.0, 0.0], [-1.0, 0.0], [1.0, 0.2]])
    assert _two_parts(still).tolist() in ([False, True, True, False], [False, False, True, False])


@pytest.mark.parametrize("weights", ["equal", "by_samples"])
def test_two_groups_are_found_and_each_settles_at_its_own_solution(weights: Any) -> None:
    labels = [0, 1, 1, 0, 1, 0]
    built = groups(labels, client_weights=weights)
    algorithm = ClusteredFL(lr_lower=0.3, num_local_steps=1, tolerance_mean=0.05, tolerance_max=0.5)
    sizes = (
        np.array([len(client["train"]["c"]) for client in built.clients], float)
        if weights == "by_samples"
        else np.ones(6)
    )
    run_of_90 = list(states(algorithm, built, 90))
    (fed, state), before = run_of_90[-1], [state.y[0] for _, state in run_of_90 if state.cluster.max() == 0][-1]
    assert run_of_90[1][1].cluster.tolist() == [0] * 6  # not before the common y has settled
    assert state.cluster.tolist() == labels  # the part of the first client keeps its number
    assert relative(before, group_solution(built, list(range(6)), sizes)) < 0.2
    for label in (0, 1):
        members = [i for i in range(6) if labels[i] == label]
        assert relative(state.y[members], np.stack([group_solution(built, members, sizes)] * 3)) < 1e-8
    s = {name: np.stack([np.asarray(client["train"][name]).mean(0) for client in built.clients]) for name in "Ac"}
    losses = np.einsum("ni,nij,nj->n", state.y, s["A"], state.y) / 2 - np.einsum("ni,ni->n", state.y, s["c"])
    assert fed.measure(state.x, state.y)["lower_loss"] == pytest.approx(sizes @ losses / sizes.sum(), rel=1e-12)


def test_three_groups_are_found_in_two_splits_whatever_the_order_in_memory() -> None:
    labels, order = [0, 1, 2, 1, 0, 2, 2], [4, 2, 6, 0, 5, 1, 3]
    built = groups(labels)
    algorithm = ClusteredFL(lr_lower=0.3, num_local_steps=1, tolerance_mean=0.05, tolerance_max=0.4)
    fed, state = drive(algorithm, built, 80)
    same = [[a == b for b in state.cluster.tolist()] for a in state.cluster.tolist()]
    assert same == [[a == b for b in labels] for a in labels]
    moved, other = drive(algorithm, Built(built.problem, [built.clients[i] for i in order]), 80, ids=order)
    assert torch.equal(other.cluster, state.cluster)
    torch.testing.assert_close(other.y, state.y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(moved.collect(other.y), fed.collect(state.y)[order], rtol=1e-12, atol=1e-12)


def test_one_cluster_splits_while_another_goes_on_as_it_is() -> None:
    """Clients one and three pull apart; clients two and four, the other cluster, move together."""
    built = groups([0, 2, 1, 2])
    algorithm = ClusteredFL(lr_lower=0.3, num_local_steps=1, tolerance_mean=1.5, tolerance_max=2.0)
    fed, state = drive(algorithm, built, 0)
    fed.begin(1)
    after = algorithm.round(fed, state._replace(cluster=torch.tensor([0, 1, 0, 1])))
    assert after.cluster.tolist() == [0, 1, 2, 1]  # the new cluster gets a number that nobody has
    own = 0.3 * np.stack([np.asarray(client["train"]["c"]).mean(0) for client in built.clients])  # one step from y = 0
    together = (own[1] + own[3]) / 2
    np.testing.assert_allclose(after.y, [own[0], together, own[2], together], rtol=1e-12)


def test_one_outer_iteration_by_hand_around_both_tolerances() -> None:
    """A split and the averages of the new clusters happen in the same outer iteration."""
    task = Quadratic(num_clients=4, dim_upper=2, dim_lower=3, heterogeneity=2.0, client_weights="by_samples")
    samples, x, start, weights = (
        Samples(task),
        np.array([0.7, -1.1]),
        np.array([0.2, -0.1, 0.3]),
        np.array([4, 5, 6, 7.0]),
    )
    rows = np.tile(start, (4, 1))
    for i in range(4):
        for _ in range(3):
            rows[i] = rows[i] - 0.1 * gy(samples.clients[i]["train"], x, rows[i])
    change = rows - start
    mean, longest = np.linalg.norm(weights @ change / weights.sum()), np.linalg.norm(change, axis=1).max()
    every = [list(part) for size in range(1, 4) for part in itertools.combinations(range(1, 4), size)]
    part = min(every, key=lambda inside: worst_pair(change, inside))
    for eps1, eps2, splits in ((1.01, 0.99, True), (0.99, 0.99, False), (1.01, 1.01, False)):
        algorithm = ClusteredFL(
            lr_lower=0.1, num_local_steps=3, tolerance_mean=eps1 * mean, tolerance_max=eps2 * longest
        )
        _, state = drive(algorithm, start_at(task, x, start), 1)
        expected = np.isin(np.arange(4), part).astype(int) * splits
        assert state.cluster.tolist() == expected.tolist()
        for number in set(expected):
            members = expected == number
            target = weights[members] @ rows[members] / weights[members].sum()
            np.testing.assert_allclose(state.y[torch.tensor(members)], np.stack([target] * members.sum()), rtol=1e-12)
        first = ClusteredFL(
            lr_lower=0.1,
            num_local_steps=3,
            tolerance_mean=eps1 * mean / longest,
            tolerance_max=eps2,
            tolerance_unit="first",
        )
        _, again = drive(first, start_at(task, x, start), 1)
        assert torch.equal(again.cluster, state.cluster)
        assert again.unit == pytest.approx(longest, rel=1e-12)


def test_the_unit_is_that_of_the_first_outer_iteration_and_makes_tolerances_free_of_scale() -> None:
    labels, found = [0, 1, 1, 0], {}
    for unit, scale in itertools.product(("absolute", "first"), (1.0, 1e-3)):
        algorithm = ClusteredFL(
            lr_lower=0.3, num_local_steps=1, tolerance_mean=0.03, tolerance_max=0.5, tolerance_unit=unit
        )
        _, one = drive(algorithm, groups(labels, scale), 1)
        _, state = drive(algorithm, groups(labels, scale), 40)
        assert state.unit == one.unit
        found[unit, scale] = state.cluster.tolist()
    assert found["first", 1.0] == found["first", 1e-3] == found["absolute", 1.0] == labels
    assert found["absolute", 1e-3] == [0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("weights", ["equal", "by_samples"])
def test_a_single_cluster_is_fedavg_bit_for_bit(weights: Any, dtype: torch.dtype) -> None:
    built, options = (
        Quadratic(bend=0.5, client_weights=weights).build(),
        {"batch_size": 2, "seed": 1, "dtype": dtype, "strategy": "loop"},
    )
    settings: dict[str, Any] = {"lr_lower": 0.15, "num_local_steps": (3, 1, 2, 4, 1)}
    _, plain = drive(FedAvg(**settings), built, 4, **options)
    _, state = drive(ClusteredFL(**settings, tolerance_max=NEVER), built, 4, **options)
    assert torch.equal(state.y, plain.y.expand(5, -1))
    assert state.y.dtype == dtype


def test_clusters_split_once_per_outer_iteration_until_every_client_is_alone() -> None:
    met = [
        state.cluster.tolist()
        for _, state in states(ClusteredFL(tolerance_mean=NEVER, tolerance_max=1e-12), groups([0, 1, 0]), 4)
    ]
    assert met == [[0, 0, 0], [0, 1, 0], [0, 1, 2], [0, 1, 2], [0, 1, 2]]


def test_ledger() -> None:
    algorithm = ClusteredFL(num_local_steps=(2, 1, 3), tolerance_mean=NEVER, tolerance_max=1e-12)
    for k, (fed, _) in enumerate(states(algorithm, groups([0, 1, 1]), 3, batch_size=2)):
        ledger, counts = fed.ledger.columns, torch.tensor([2, 1, 3])
        assert fed.ledger.rounds == k
        assert ledger["floats_up"].tolist() == [3 * k] * 3
        assert ledger["floats_down"].tolist() == [3 * k + 2 * (k > 0)] * 3
        assert torch.equal(ledger["bytes_up"], 8 * ledger["floats_up"])
        assert torch.equal(ledger["gy"], k * counts)
        assert torch.equal(ledger["samples"], 2 * k * counts)
        assert all(int(ledger[name].sum()) == 0 for name in ("gx", "fx", "fy", "hvp", "jvp"))


@pytest.mark.parametrize("unit", ["absolute", "first"])
def test_continues_from_a_checkpoint_bit_by_bit(unit: Any) -> None:
    algorithm = ClusteredFL(
        tolerance_mean=NEVER, tolerance_max=1e-12, tolerance_unit=unit
    )  # splits in every outer iteration
    check_continues(algorithm, groups([0, 1, 2, 1, 0, 2, 2]))


def test_a_recorded_run_resumes_and_gives_one_y_per_client(tmp_path: Any) -> None:
    built, algorithm = (
        groups([0, 1, 1, 0]),
        ClusteredFL(lr_lower=0.3, tolerance_mean=0.1, tolerance_max=0.5, tolerance_unit="first"),
    )
    whole = solve(*built, algorithm, residuals=False, num_iterations=12, dtype=torch.float64)
    solve(*built, algorithm, residuals=False, num_iterations=2, dtype=torch.float64, record=tmp_path / "run")
    again = solve(
        *built, algorithm, residuals=False, num_iterations=12, dtype=torch.float64, record=tmp_path / "run", resume=True
    )
    assert whole.state.cluster.tolist() == again.state.cluster.tolist() == [0, 1, 1, 0]
    assert all(torch.equal(a["y"], b["y"]) for a, b in zip(whole.y, again.y, strict=True))
    assert again.ledger == whole.ledger


@pytest.mark.parametrize("cohort", [Cohort(0.5), Cohort(replacement=True)], ids=["half", "with replacement"])
def test_a_cohort_is_refused_before_anything_runs(cohort: Cohort) -> None:
    with pytest.raises(
        SettingError,
        match=r"clustered_fl needs every client in every round, but the cohort is .*: run it with all clients",
    ):
        solve(*groups([0, 1, 0]), ClusteredFL(), residuals=False, num_iterations=1, cohort=cohort)


def test_a_cohort_that_rounds_to_everybody_is_accepted() -> None:
    assert (
        solve(*groups([0, 1, 0]), ClusteredFL(), residuals=False, num_iterations=1, cohort=Cohort(0.95)).iteration == 1
    )


def test_a_local_lower_level_is_refused() -> None:
    with pytest.raises(ScopeError, match="nothing to cluster"):
        ClusteredFL().check_scopes(Scopes(lower="local"))
