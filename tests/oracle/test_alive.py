"""Counted bytes, and chunks of clients that follow from them."""

import math

import numpy as np
import pytest
import torch
from torch.func import grad, vmap
from torch.nn.functional import avg_pool2d, conv2d, cross_entropy

from fedbilevel.oracle import evaluation, oracle
from fedbilevel.oracle.alive import Alive
from fedbilevel.oracle.population import Population
from fedbilevel.problem.problem import Problem
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.task import Built

CLIENTS = 6


def test_results_are_counted_until_they_are_gone():
    given = torch.ones(1000)  # 4000 bytes, which were there before
    with Alive() as alive:
        first = given * 2
        second = first + 1
        assert alive.now == alive.peak == 8000
        del first
        rows = second.view(10, 100)
        del second
        assert (alive.now, alive.peak) == (4000, 8000)  # a view keeps its memory
        rows.add_(1)
        given.view(10, 100)[:1].mul_(2)
        assert (alive.now, alive.peak) == (4000, 8000)  # changes in place and views of what was there make nothing
        vmap(grad(lambda row: row.exp().sum()))(rows)
        assert alive.now == 4000
        assert alive.peak >= 12000


def network():
    """Six clients with a network of 272 weights and images whose maps are large."""

    def entropy(y, batch):
        maps = conv2d(batch["image"][:, None], y["kernel"], padding=1).tanh()
        return cross_entropy(avg_pool2d(maps, 16).flatten(1) @ y["head"], batch["label"], reduction="none")

    generator = torch.Generator().manual_seed(0)
    start = {"kernel": torch.randn(16, 1, 3, 3, generator=generator), "head": torch.randn(64, 2, generator=generator)}
    problem = Problem(
        upper=lambda x, y, batch: entropy(y, batch),
        lower=lambda x, y, batch: x["log"].exp()[batch["label"]] * entropy(y, batch),
        x0={"log": torch.zeros(2)},
        y0=start,
    )
    rng = np.random.default_rng(0)
    role = lambda: {"image": rng.standard_normal((4, 32, 32)), "label": rng.integers(0, 2, 4)}
    return Built(problem, [{"train": role(), "val": role()} for _ in range(CLIENTS)])


def evaluated(built, *, counts=True, strategy="auto"):
    """A population with directions at own points, their bytes at the peak, and the chunk."""
    population = Population(built.problem, built.clients, strategy=strategy)
    population.oracle.counts, population.oracle.long = counts, math.inf
    k = len(population)
    train, val = (population.data.batch(torch.arange(k), role) for role in ("train", "val"))
    x, y = (start.expand(k, -1) + 0.1 * torch.arange(k)[:, None] for start in (population.x0, population.y0))
    batches = {"gy": train, "fx": val, "fy": val, "ju": train, "hu": train}
    for batch in (train, val):
        dict(batch.fields)  # samples are there already
    with torch.no_grad(), Alive() as alive:
        found = population.oracle.directions(x, y, y, **batches)
    (plan,) = population.oracle._plans.values()
    return population, found, alive.peak, plan.chunk


@pytest.mark.parametrize("fitting", [1, 2, 4])
def test_as_many_clients_as_their_intermediate_values_allow(fitting, monkeypatch):
    built = network()
    _, whole, at_once, none = evaluated(built, counts=False)
    assert none is None
    one = next(iter(evaluated(built)[0].oracle._counted.values()))
    limit = one * (fitting + 0.5)
    assert at_once > limit
    monkeypatch.setattr(oracle, "BUDGET", int(limit))
    _, found, peak, chunk = evaluated(built)
    assert chunk == fitting
    rows = sum(leaf.nbytes for leaf in found)
    assert peak <= limit + rows  # the results of all clients stay
    assert rows < limit / 100
    for mine, theirs in zip(found, whole, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_choice_does_not_depend_on_how_many_clients_are_asked(monkeypatch):
    built = network()
    population = evaluated(built)[0]
    (one,) = population.oracle._counted.values()
    two = [{"train": c["train"], "val": c["val"]} for c in built.clients[:2]]
    assert evaluated(Built(built.problem, two))[0].oracle._counted == population.oracle._counted
    assert one > 4 * 4 * 16 * 32 * 32  # the maps of one client in one pass


def test_small_problems_are_evaluated_at_once_and_with_the_same_bits():
    built = Quadratic(num_clients=5).build()
    (_, found, _, chunk), (_, before, _, usual) = evaluated(built), evaluated(built, counts=False)
    assert chunk is usual is None
    assert all(torch.equal(one, other) for one, other in zip(found, before, strict=True))


def test_nothing_is_counted_where_nothing_can_be_chosen():
    built = network()
    assert not evaluated(built, strategy="vmap")[0].oracle._counted
    assert not evaluated(built, strategy="loop")[0].oracle._counted
    alone = Built(built.problem, built.clients[:1])
    assert not evaluated(alone)[0].oracle._counted


@pytest.mark.parametrize("sizes", [[5], [2, 2, 1], [1] * 5])
def test_parts_are_joined_in_order_and_dropped_early(sizes):
    start = [sum(sizes[:place]) for place in range(len(sizes))]
    rows = torch.arange(5000.0).view(5, 1000)
    make = lambda first, num: {"a": rows[first : first + num] * 2, "b": (rows[first : first + num, 0] + 1,)}
    with Alive() as alive:
        joined = evaluation._collected(iter(map(make, start, sizes)), 5)
    assert torch.equal(joined["a"], rows * 2)
    assert torch.equal(joined["b"][0], rows[:, 0] + 1)
    whole, part = 5 * 4004, max(sizes) * 4004
    assert alive.peak == whole + (part if len(sizes) > 1 else 0)


def test_clients_with_results_of_unequal_shapes_are_named_as_an_error():
    parts = iter([torch.zeros(1, 3), torch.zeros(1, 1)])
    with pytest.raises(RuntimeError, match=r"shapes \(3,\) and \(1,\)"):
        evaluation._collected(parts, 2)


def test_named_results_are_joined_by_name():
    parts = iter([{"a": torch.zeros(1), "b": torch.ones(1)}, {"b": torch.ones(1), "a": torch.zeros(1)}])
    joined = evaluation._collected(parts, 2)
    assert (joined["a"].tolist(), joined["b"].tolist()) == ([0, 0], [1, 1])
    with pytest.raises(ValueError, match="expected 1, but got 2"):
        evaluation._collected(iter([{"a": torch.zeros(1)}, {"a": torch.zeros(1), "b": torch.ones(1)}]), 2)


def test_losses_may_use_sparse_tensors():
    edges = torch.eye(3, dtype=torch.float32).to_sparse()

    def smooth(y, batch):
        return (batch["a"] @ y["w"]) ** 2 + 0.1 * torch.sparse.sum(2 * edges) + (y["w"] ** 2).sum()

    problem = Problem(
        upper=lambda x, y, batch: smooth(y, batch),
        lower=lambda x, y, batch: x["s"].exp() * smooth(y, batch),
        x0={"s": torch.zeros(())},
        y0={"w": torch.ones(3)},
    )
    role = {"a": np.eye(3)}
    population = Population(problem, [{"train": role, "val": role}] * 2)
    train = population.data.batch(torch.arange(2), "train")
    found = population.oracle.lower_grad(population.x0, population.y0, train)
    torch.testing.assert_close(found, torch.full((2, 3), 2 / 3 + 2))
    assert population.oracle._counted
