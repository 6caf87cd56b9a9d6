"""One table of what goes together: every refusal has a reason, and the page is made from the table."""

import inspect
import itertools
import re
from dataclasses import dataclass

import pytest

import fedbilevel as fb
from fedbilevel import discovery
from fedbilevel.aggregation.settings import COMPRESSORS, ROBUST, Aggregation
from fedbilevel.aggregation.validity import CLASHES, FEATURES, NEEDS, TRIED, check_features, clash, features, table
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.tasks.quadratic import Quadratic

BUILT = Quadratic(num_clients=4).build()


def test_every_entry_names_features_and_a_reason():
    assert all({one.one, one.other} <= {*FEATURES} and one.why for one in CLASHES)
    assert len({frozenset(one[:2]) for one in CLASHES}) == len(CLASHES)
    assert {*COMPRESSORS} <= {*FEATURES}


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(FEATURES, 2)])
def test_a_pair_is_refused_with_its_reason_or_accepted(one, other):
    asked = {one, other} | ({"clip"} if "noise" in (one, other) else set())
    if why := clash(one, other):
        with pytest.raises(SettingError, match=re.escape(why)):
            check_features(asked)
    else:
        check_features(asked)


@pytest.mark.parametrize("one", NEEDS)
def test_what_a_feature_needs_is_asked_for(one):
    with pytest.raises(SettingError, match=f"without {NEEDS[one][0]}: {NEEDS[one][1]}"):
        check_features({one})


def test_the_contract_tries_every_compressor_and_every_rule():
    compressed = {one.compressor.kind for one in TRIED if one.compressor}
    assert compressed == {*COMPRESSORS}
    assert {one.rule.kind for one in TRIED if one.rule} == {*ROBUST}


def test_features_of_settings():
    assert features(Aggregation()) == set()
    assert features(Aggregation(clip=1.0, compress="topk:0.1", robust="median")) == {"clip", "topk", "robust"}


@pytest.mark.parametrize("where", [{"robust": "median"}, {"sequences": {"y": {"robust": "median"}}}])
def test_a_robust_mean_of_an_algorithm_that_gathers_is_refused_before_it_runs(where):
    with pytest.raises(SettingError, match="the algorithm reads every row itself"):
        fb.solve(*BUILT, "clustered_fl", num_rounds=1, aggregation=fb.Aggregation(**where))


@dataclass(frozen=True, kw_only=True)
class Sly(FedAvg):
    """An algorithm that reads single rows without saying so."""

    def round(self, fed, state):
        return self.State(state.x, fed.gather(self.local_steps, x=state.x, y=state.y).y.mean(0))


def test_gather_under_a_robust_mean_is_refused_when_it_happens():
    fb.solve(*BUILT, Sly(), num_rounds=1, aggregation=fb.Aggregation(clip=1.0))
    with pytest.raises(SettingError, match="the algorithm reads every row itself"):
        fb.solve(*BUILT, Sly(), num_rounds=1, aggregation=fb.Aggregation(robust="median"))


def test_algorithms_that_gather_say_so():
    for name, kind in discovery.algorithms().items():
        assert kind.gathers == ("fed.gather(" in inspect.getsource(kind)), name


@pytest.mark.parametrize("cohort", [Cohort(), Cohort(0.5)])
def test_krum_with_too_few_clients_is_refused_before_it_runs(cohort):
    with pytest.raises(SettingError, match="which needs 5 clients in every round, and there are"):
        fb.solve(*BUILT, "fedbio", num_rounds=1, cohort=cohort, aggregation=fb.Aggregation(robust="krum:1"))


def test_bits_that_could_overflow_are_refused_before_a_run():
    problem, clients = Quadratic(num_clients=4, num_samples=1000, client_weights="by_samples").build()
    with pytest.raises(SettingError, match=r"aggregation\.fixed_point is 54 bits"):
        fb.solve(problem, clients, "fedbio", num_rounds=1, aggregation=fb.Aggregation(fixed_point=54))


def test_peers_have_no_server_that_attackers_would_send_to():
    with pytest.raises(SettingError, match="runs between peers without a server and does not use attack"):
        fb.solve(*BUILT, "sgp", num_rounds=None, num_iterations=1, attack=fb.Attack())


def test_the_page_shows_every_pair_and_every_reason():
    text = table()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len(FEATURES)
    assert text.count("no (") == 2 * len(CLASHES)
    assert all(one.why[1:] in text for one in CLASHES)
