"""Replays of traces: the same bits, whatever stays the same between calls, and no replay where it is unsafe."""

import pytest
import torch

from fedbilevel.algorithms.fbo_aggitd import FBOAggITD
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.engines.simulation import Simulation
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.oracle import replay
from fedbilevel.oracle.replay import Replay, Replayed, Unfit
from fedbilevel.oracle.tracing import traced
from fedbilevel.tasks.quadratic import Quadratic

STEPS = {"lr_lower": 0.05, "lr_system": 0.05, "lr_upper": 0.01, "num_local_steps": 2}


def _loss_like(point, matrix, weight):
    """Views, products with a vector, ones, constants and a mean of samples that does not depend on the point."""
    curved = (weight @ matrix.flatten(1)).view(matrix.shape[1:])
    ones = torch.ones_like(point)
    return ((curved @ point) * 0.5 * ones + point.exp(), (curved.T @ point).sum().expand(3))


def _example(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((4,), (5, 4, 4), (5,))]


@pytest.fixture
def module():
    with torch.no_grad():
        run, _ = traced(_loss_like, _example())
    return run.__self__


@pytest.mark.parametrize("fixed", [[False, False, False], [False, True, True], [False, True, False]])
def test_a_replay_has_the_bits_of_its_trace(module, fixed):
    first = _example()
    with torch.no_grad():
        played = Replay(module, first, fixed)
        for seed in range(4):
            inputs = [old if stays else new for old, new, stays in zip(first, _example(seed), fixed, strict=True)]
            found = played(inputs)
            for one, other in zip(found, module.forward(*inputs), strict=True):
                assert torch.equal(one, other)
                assert one.stride() == other.stride()
            kept = found[0].clone()
            played([torch.randn_like(inputs[0]), *inputs[1:]])
            assert torch.equal(found[0], kept), "a result must not change in the next call"


def test_samples_that_stay_are_averaged_once(module):
    with torch.no_grad():
        moving, staying = (Replay(module, _example(), [False, stays, stays]) for stays in (False, True))
    assert len(staying._calls) < len(moving._calls)


def test_other_samples_are_noticed_and_copied_from_then_on(module):
    same, played = _example(), Replayed(module.forward, 1)
    with torch.no_grad():
        assert played(same) is None  # the first call shows nothing
        for matrix in (same[1], same[1], _example(3)[1], _example(4)[1]):
            inputs = [torch.randn(4, dtype=torch.float64), matrix, same[2]]
            for one, other in zip(played(inputs), module.forward(*inputs), strict=True):
                assert torch.equal(one, other)
    assert played(same) is None  # with gradients, the trace itself is needed


def test_large_random_and_changing_traces_are_not_replayed(module, monkeypatch):
    def changes(point):
        held = point * 2
        held.add_(1)
        return (held * held,)

    with torch.no_grad():
        for function in (changes, lambda point: (point + torch.rand_like(point),)):
            run, _ = traced(function, [torch.ones(3)])
            with pytest.raises(Unfit):
                Replay(run.__self__, [torch.ones(3)], [False])
        monkeypatch.setattr(replay, "_MOST", 100)
        with pytest.raises(Unfit):
            Replay(module, _example(), [False] * 3)


@pytest.mark.parametrize("algorithm", [FedBiO(**STEPS), FBOAggITD(num_lower_rounds=2, **STEPS)])
@pytest.mark.parametrize(
    "options", [{}, {"batch_size": 2}, {"cohort": Cohort(0.6)}], ids=["all samples", "minibatches", "cohorts"]
)
def test_a_run_with_replays_has_the_bits_of_a_run_without(algorithm, options, monkeypatch):
    def run():
        fed = Simulation(algorithm, *Quadratic(bend=0.3, cross=0.2).build(), dtype=torch.float64, **options)
        fed.host.oracle.often = {"cpu": 2}
        state = algorithm.init(fed)
        for iteration in range(1, 9):
            fed.begin(iteration)
            state = algorithm.round(fed, state)
        plans = fed.host.oracle._plans.values()
        return state, [one.trace.replayed._replay for one in plans if one.trace is not None], fed.ledger.totals()

    state, replays, costs = run()
    assert any(one is not None for one in replays)
    monkeypatch.setattr(replay, "_MOST", -1)
    other, none, same_costs = run()
    assert all(one is None for one in none)
    assert all(one is two is None or torch.equal(one, two) for one, two in zip(state, other, strict=True))
    assert costs == same_costs
