"""Cohorts drawn in proportion to weight: expectations over every draw, and the limit of a run.

The expectations are enumerated in every engine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedbilevel.algorithms.simfbo import SimFBO
from fedbilevel.engines.simulation import Simulation
from fedbilevel.federation import sampling
from fedbilevel.federation.algorithm import Cohort, ServerAlgorithm, phase
from fedbilevel.federation.sampling import Sampler, always_in
from fedbilevel.federation.schedule import Schedule
from fedbilevel.problem.draws import SERVER, Stream
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.task import Built

WEIGHTS = [(1, 2, 3, 4), (1, 1, 1, 3), (3, 1, 7, 1), (2, 2, 2, 2), (1, 1, 1, 20), (5, 1, 1, 6)]


class Scripted(Stream):
    """A stream whose words a test chooses, by purpose."""

    def __init__(self) -> None:
        super().__init__(0)
        self.words: dict[str, list[int]] = {}

    def bits(self, purpose: str, ids: Tensor, *, width: int, **_address: Any) -> Tensor:  # type: ignore[override]
        return torch.tensor(self.words[purpose][:width]).view(1, 1, -1)


@dataclass(frozen=True, kw_only=True)
class Presence(ServerAlgorithm):
    class State(NamedTuple):
        x: Any
        y: Any

    @phase
    def present(self, clients):
        return {"who": one_hot(clients.ids, clients.num_clients).to(clients.dtype)}


def sized(weights: Sequence[int], **settings: Any) -> Built:
    """A quadratic whose client i has weights[i] equal samples, and counts by them."""
    task = Quadratic(num_clients=len(weights), num_samples=1, noise=0.0, client_weights="by_samples", **settings)
    problem, clients = task.build()
    repeated = [
        {
            role: {name: np.repeat(value[:1], number, 0) for name, value in fields.items()}
            for role, fields in one.items()
        }
        for one, number in zip(clients, weights, strict=True)
    ]
    return Built(problem, repeated)


def scripts_with_replacement(weights: Sequence[int], size: int) -> Iterator[tuple[float, dict[str, list[int]]]]:
    """Every sequence of draws, as the words that lead to it, with its probability."""
    total = sum(weights)
    ends = list(itertools.accumulate(weights))
    for numbers in itertools.product(range(len(weights)), repeat=size):
        first_words = [math.ceil((ends[i] - weights[i]) * 2**32 / total) for i in numbers]
        yield math.prod(weights[i] / total for i in numbers), {"cohort": first_words}


def scripts_without_replacement(weights: Sequence[int], size: int) -> Iterator[tuple[float, dict[str, list[int]]]]:
    """Yield every order of the drawn clients and every start of the marks, with its probability."""
    others = (~always_in(torch.tensor(weights), size)).nonzero()[:, 0].tolist()
    total = sum(weights[i] for i in others)
    orders = list(itertools.permutations(range(len(others))))
    for order, start in itertools.product(orders, range(total)):
        keys = [word for place in range(len(others)) for word in (2 * order.index(place), 0)]
        key = -(-start * 2**63 // total)
        yield 1 / len(orders) / total, {"cohort": keys, "cohort/start": [key >> 32 << 1, key & 0xFFFFFFFF]}


def scripts(weights: Sequence[int], cohort: Cohort) -> Iterator[tuple[float, dict[str, list[int]]]]:
    size = cohort.size(len(weights))
    if cohort.replacement:
        return scripts_with_replacement(weights, size)
    if len(set(weights)) > 1:
        return scripts_without_replacement(weights, size)
    orders = list(itertools.permutations(range(len(weights))))
    return ((1 / len(orders), {"cohort": [w for rank in order for w in (2 * rank, 0)]}) for order in orders)


@pytest.mark.parametrize("replacement", [False, True], ids=["without replacement", "with replacement"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_expectation_of_a_cohort_mean_is_the_weighted_mean(weights, size, replacement, monkeypatch):
    """All draws with their probabilities, through the engine's own draw and mean."""
    monkeypatch.setattr(sampling, "_AHEAD", 0)  # the words of the next outer iteration are not known yet
    built, algorithm, cohort = sized(weights), Presence(), Cohort(size / 4, replacement)
    fed = Simulation(algorithm, built.problem, built.clients, dtype=torch.float64, cohort=cohort)
    stream = fed.stream = Scripted()
    expectation, whole = torch.zeros(4, dtype=torch.float64), 0.0
    for iteration, (probability, stream.words) in enumerate(scripts(weights, cohort), start=1):
        fed.begin(iteration)
        counts = fed.mean(algorithm.present).who
        assert float(counts.sum()) == pytest.approx(1, abs=1e-15)  # the mean of equal rows is that row
        assert bool((counts >= 0).all())
        assert replacement or int((counts > 0).sum()) == size
        expectation, whole = expectation + probability * counts, whole + probability
    assert whole == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(
        expectation, torch.tensor(weights, dtype=torch.float64) / sum(weights), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("weights", [(1, 2, 3, 4), (5, 1, 1, 6)], ids=str)
def test_variance_of_a_cohort_mean_is_the_documented_one(weights):
    """With replacement the variance is sum p_i |v_i - v|^2 / m.

    Without replacement it is not larger, and zero for clients that are always in the cohort."""
    share = np.array(weights) / sum(weights)
    values = np.array([1.0, -2.0, 0.5, 3.0])
    mean = share @ values
    found = {}
    for replacement in (True, False):
        sampler, stream = Sampler(Cohort(0.5, replacement), torch.tensor(weights)), Scripted()
        squares = 0.0
        for probability, stream.words in scripts(weights, Cohort(0.5, replacement)):
            numbers, times = sampler.draw(stream, 1, 1)
            counts = (times * sampler.member_weights[numbers]).double().numpy()
            squares += probability * (counts @ values[numbers.numpy()] / counts.sum() - mean) ** 2
        found[replacement] = squares
    assert found[True] == pytest.approx(share @ (values - mean) ** 2 / 2, rel=1e-12)
    assert found[False] <= found[True]


def test_clients_with_a_whole_place_are_always_in():
    assert always_in(torch.tensor([1, 1, 1, 20]), 1).tolist() == [False] * 4
    assert always_in(torch.tensor([1, 1, 1, 20]), 2).tolist() == [False, False, False, True]
    # the third has a whole place only when the fourth has taken its own
    assert always_in(torch.tensor([1, 1, 5, 100]), 3).tolist() == [False, False, True, True]
    assert always_in(torch.tensor([2, 2, 2, 2]), 3).tolist() == [False] * 4


@pytest.mark.parametrize("weight", [1, 6])
@pytest.mark.parametrize("replacement", [False, True])
def test_equal_weights_draw_the_cohorts_of_the_uniform_draw(weight, replacement):
    """Recorded results used uniform integers with replacement, and a permutation without."""
    n, size, stream = 7, 3, Stream(5)
    sampler = Sampler(Cohort(size / n, replacement), torch.full((n,), weight))
    for iteration, call in itertools.product(range(20), (1, 2)):
        numbers, times = sampler.draw(stream, iteration, call)
        where = {"iteration": iteration, "call": call}
        if replacement:
            server, high = torch.tensor([SERVER]), torch.tensor([n])
            drawn = stream.integers("cohort", server, high, steps=range(1), width=size, **where)
            wanted, often = drawn.reshape(-1).unique(return_counts=True)
        else:
            wanted, _ = stream.order("cohort", SERVER, n, first=size, **where).sort()
            often = torch.ones(size, dtype=torch.int64)
        assert torch.equal(numbers, wanted)
        assert torch.equal(times, often)
        assert torch.equal(sampler.member_weights, torch.full((n,), weight))


@pytest.mark.slow
@pytest.mark.parametrize("replacement", [False, True])
def test_frequencies_of_addressed_draws_are_in_proportion_to_weight(replacement):
    weights, size, num = torch.tensor([1, 2, 3, 6, 2]), 2, 4000
    sampler, stream, seen = Sampler(Cohort(size / 5, replacement), weights), Stream(11), torch.zeros(5)
    for iteration in range(num):
        numbers, times = sampler.draw(stream, iteration, 1)
        seen[numbers] += times
    wanted = size * weights / weights.sum()
    assert bool(((seen / num - wanted).abs() < 5 * (wanted / num).sqrt()).all())  # five standard deviations


@pytest.mark.parametrize("replacement", [False, True])
def test_weights_near_the_largest_that_a_site_may_state_do_not_overflow(replacement):
    weights = torch.tensor([2**40 - 1, 1, 2**39, 2**40 - 5, 2**38, 3])
    sampler, stream = Sampler(Cohort(0.5, replacement), weights), Stream(0)
    for iteration in range(200):
        numbers, times = sampler.draw(stream, iteration, 1)
        assert int(times.sum()) == 3
        assert len(numbers.unique()) == len(numbers)
        assert 0 <= int(numbers.min()) <= int(numbers.max()) < 6


@pytest.mark.slow
@pytest.mark.parametrize("replacement", [False, True], ids=["without replacement", "with replacement"])
def test_simfbo_with_one_of_five_clients_reaches_the_weighted_stationary_point(replacement):
    """The steps decrease, and x is averaged over the second half.

    A mean divided by the weights of the cohort would give the unweighted point."""
    weights = (1, 1, 2, 4, 8)
    settings = {"dim_upper": 2, "dim_lower": 2, "data_seed": 0}
    built = sized(weights, **settings)
    unweighted = Quadratic(num_samples=1, noise=0.0, **settings).closed_form()
    weighted = unweighted._replace(share=np.array(weights) / sum(weights))
    algorithm, falling, num = SimFBO(lr_upper=0.1, lr_lower=0.2, lr_system=0.2), Schedule(power=0.7, offset=20), 500
    cohort = Cohort(0.2, replacement)
    fed = Simulation(algorithm, built.problem, built.clients, dtype=torch.float64, cohort=cohort)
    state, mean = algorithm.init(fed), np.zeros(2)
    for iteration in range(1, num + 1):
        scaled = algorithm.scaled(falling(iteration))
        fed.begin(iteration, scaled)
        state = scaled.round(fed, state)
        mean += state.x.numpy() * (iteration > num // 2) / (num - num // 2)

    def left(closed: Any, x: np.ndarray) -> float:
        """|grad Phi| at x against the start."""
        return float(np.linalg.norm(closed.hypergradient(x)) / np.linalg.norm(closed.hypergradient(np.zeros(2))))

    assert left(weighted, unweighted.solution()) > 0.4  # the two problems are told apart
    assert left(weighted, mean) < 0.1
    assert left(unweighted, mean) > 0.4


def test_cohorts_that_are_drawn_ahead_are_those_that_are_asked_for_alone():
    """Outer iterations in order, with gaps, with more calls than before, and of two streams."""
    ahead, asked = Sampler(Cohort(0.3), torch.full((20,), 4)), 0
    places = [(i, call) for i in range(1, 40) for call in range(1, 3 + (i > 9) + (i == 25))]
    places += [(100, 2), (101, 1), (3, 1), (4, 4)]
    for iteration, call in places:
        for stream in (Stream(1), Stream(2)) if iteration > 100 else (Stream(1),):
            found, times = ahead.draw(stream, iteration, call)
            alone = Sampler(Cohort(0.3), torch.full((20,), 4))
            assert torch.equal(found, alone.draw(stream, iteration, call)[0])
            assert torch.equal(found, found.sort()[0])
            assert times.tolist() == [1] * 6
            asked += 1
    assert asked > len(places)
