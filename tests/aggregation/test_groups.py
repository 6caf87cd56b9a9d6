"""Robust means of groups: group means by hand, drop-outs, refusals, and what attackers can do."""

import itertools

import pytest
import torch

import fedbilevel as fb
from fedbilevel.aggregation.groups import NONE, drawn
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import QuorumError, SettingError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.problem.draws import Stream
from fedbilevel.tasks.quadratic import Quadratic

BUILT = Quadratic(num_clients=11, client_weights="by_samples", num_samples=7).build()
EXACT = {"dtype": torch.float64, "strategy": "loop"}


def go(aggregation, num, built=BUILT, **more):
    fed = Simulation(FedBiO(), *built, **{**EXACT, **more}, aggregation=aggregation)
    fed.begin(0)
    state = FedBiO().init(fed)
    for iteration in range(1, num + 1):
        fed.begin(iteration)
        state = FedBiO().round(fed, state)
    return fed, state


def vector(state):
    return torch.cat([state.x, state.y, state.u])


@pytest.mark.parametrize(("num", "size"), [(9, 3), (11, 3), (14, 4), (20, 6)])
def test_groups_are_a_partition_into_groups_of_nearly_equal_sizes(num, size):
    groups = [drawn(Stream(3), torch.arange(num), num, size, iteration) for iteration in range(4)]
    for one in groups:
        sizes = one.bincount()
        assert len(sizes) == num // size
        assert size <= int(sizes.min()) <= int(sizes.max()) <= int(sizes.min()) + 1
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(groups, 2))


def test_clients_outside_a_cohort_have_no_group():
    groups = drawn(Stream(3), torch.tensor([8, 1, 5, 0, 7, 3, 2, 4, 6]), 12, 3, 1)
    assert (groups == NONE).tolist() == [False] * 9 + [True] * 3
    assert groups[:9].bincount().tolist() == [3, 3, 3]


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.parametrize("one_drops", [False, True])
def test_a_robust_mean_of_groups_is_the_rule_over_weighted_group_means(secure, one_drops):
    """Three groups of 11 clients: the weighted median of their means, by hand. If a client of a group
    of four does not answer, the mean is that of the other three."""
    groups = drawn(Stream(0), torch.arange(11), 11, 3, 3)
    gone = (groups == groups.bincount().argmax()).nonzero()[:1, 0].tolist() if one_drops else []
    layer = fb.Aggregation(secure=secure, robust="median", groups=3, sequences={"u": {"robust": "none"}})
    drops = lambda iteration, call: gone if iteration == 3 else ()
    fed, state = go(layer, 2, drops=drops)
    fed.begin(3)
    here = torch.tensor([client not in gone for client in range(11)])
    sent = {"x": state.x, "y": state.y, "u": state.u}
    rows = fed.host.run_phase("local_steps", sent, fed.host.data.positions, fed.iteration, fed.call + 1)
    weights = fed.weights_by_place.double()
    assert len(weights.unique()) > 1
    new = FedBiO().round(fed, state)
    for name, base in sent.items():
        away, members = rows[name] - base, [(groups == group) & here for group in range(3)]
        assert min(int(some.sum()) for some in members) >= 3
        if name == "u":
            expected = (weights[here, None] * away[here]).sum(0) / weights[here].sum()
        else:
            means = torch.stack([(weights[some, None] * away[some]).sum(0) / weights[some].sum() for some in members])
            shares = torch.stack([weights[some].sum() for some in members])
            values, order = means.sort(dim=0)
            place = (shares[order].cumsum(0) < shares.sum() / 2).sum(0)
            expected = values.gather(0, place[None])[0]
        assert float((getattr(new, name) - base - expected).abs().max()) < 1e-12
    assert torch.equal(fed.bill().columns["floats_up"] == fed.bill().columns["floats_up"].max(), here)


def test_secure_and_open_groups_agree_bit_for_bit():
    layers = [fb.Aggregation(secure=one, robust="trimmed:0.2", groups=3) for one in (True, False)]
    one, other = (vector(go(layer, 4)[1]) for layer in layers)
    assert torch.equal(one, other)


def test_a_group_that_shrinks_below_three_is_left_out():
    """Ten of 13 clients remain in three of four groups, and the result is that of these groups."""
    built = Quadratic(num_clients=13).build()
    layer = fb.Aggregation(secure=True, robust="median", groups=3)
    groups = drawn(Stream(0), torch.arange(13), 13, 3, 1)
    small = int(groups.bincount().argmin())
    members = (groups == small).nonzero()[:, 0].tolist()
    one = go(layer, 1, built, drops=lambda iteration, call: members[:1] if iteration == 1 else ())
    all_of_it = go(layer, 1, built, drops=lambda iteration, call: members if iteration == 1 else ())
    assert len(members) == 3
    assert torch.equal(vector(one[1]), vector(all_of_it[1]))
    assert one[0].num_answers == 10
    assert one[0].bill().columns["floats_up"][members].tolist() == [0, 0, 0]  # their rows are not received
    assert int(one[0].bill().columns["samples"][members[1]]) > 0  # they computed them


def test_the_round_fails_with_fewer_than_three_whole_groups():
    built = Quadratic(num_clients=9).build()
    layer = fb.Aggregation(secure=True, robust="median", groups=3)
    with pytest.raises(QuorumError, match="2 groups of outer iteration 1 have 3 clients that answered, and a robust"):
        go(layer, 1, built, drops=lambda iteration, call: (2,) if iteration else ())


@pytest.mark.parametrize(
    ("layer", "cohort", "text"),
    [
        ({"robust": "median", "groups": 4}, Cohort(), "groups is 4, and 11 clients in every round make 2 groups"),
        ({"robust": "median", "groups": 3}, Cohort(0.5), "and 6 clients in every round make 2 groups, expected at"),
        ({"groups": 3}, Cohort(), "groups is 3 without a robust mean: set robust, or leave it out"),
        ({"robust": "krum:1", "groups": 3}, Cohort(), "needs 5 groups in every round, and there are 3"),
        ({"robust": "median", "secure": True}, Cohort(), "the server sees only their sum; set groups"),
        ({"robust": "median", "groups": 3}, Cohort(replacement=True), "the number of different clients"),
        ({"robust": "median", "groups": 2}, Cohort(), "groups is 2, expected a value at least 3"),
    ],
)
def test_refusals_before_a_run(layer, cohort, text):
    with pytest.raises(SettingError, match=text):
        fb.solve(*BUILT, "fedbio", num_rounds=1, cohort=cohort, aggregation=fb.Aggregation(**layer))


def test_groups_of_a_cohort_run():
    fed, state = go(fb.Aggregation(secure=True, robust="median", groups=3), 2, cohort=Cohort(0.85))
    assert fed.num_answers == 9
    assert bool(torch.isfinite(vector(state)).all())


def norm(layer, share):
    built = Quadratic(num_clients=15, heterogeneity=0.05).build()
    attack = fb.Attack(kind="sign_flip", share=share) if share else None
    result = fb.solve(*built, "fedbio", num_rounds=60, aggregation=layer, attack=attack, recover=False)
    return result.final["hypergradient_norm"]


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.RecoveryWarning")
def test_what_groups_of_three_survive_and_what_they_do_not():
    """15 clients are 5 groups: 2 attackers spoil at most 2 of them, which the median survives. 5
    attackers are a third of the clients, spoil 3 groups or more in most draws, and the median of
    groups fails where the median of rows does not."""
    grouped = fb.Aggregation(secure=True, robust="median", groups=3)
    clean, plain = norm(grouped, 0), norm(fb.Aggregation(secure=True), 2 / 15)
    assert norm(grouped, 2 / 15) < 5 * clean
    assert plain > 1e3 * clean
    assert norm(fb.Aggregation(robust="median"), 5 / 15) < 10 * clean
    assert norm(grouped, 5 / 15) > 1e3 * clean
