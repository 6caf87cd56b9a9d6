"""Outer iterations on a processor as flat plans: a replay has the bits of the usual computation."""

import dataclasses

import pytest
import torch

from engines.test_cuda_graphs import SERVER, images
from engines.test_outer_graphs import FRESH, HOST, clients, travel
from fedbilevel.algorithms.commfedbio import CommFedBiO
from fedbilevel.algorithms.fbo_aggitd import FBOAggITD
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.fednest import FedNest
from fedbilevel.engines import flat_plans, outer_graphs, planned
from fedbilevel.engines.outer_graphs import OUTER
from fedbilevel.engines.rounds import refusals
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import NonFiniteError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.federation.schedule import Schedule
from fedbilevel.runs.solve import solve
from support.numeric.yardstick import brief

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning"),
]


MASKS = ("adafbio",)  # a replay takes terms of a series that are not needed, whose order of sums has other bits
NOT = {*HOST, *FRESH, *MASKS}


def engine(algorithm, built, *, captured, **options):
    fed = Simulation(algorithm, *built, **{"dtype": torch.float32, **options})
    fed.graphs.times = 3 if captured else 10**9
    return fed


def follow(algorithm, built, *, captured, num_iterations=16, schedule=None, resume_at=None, **options):
    fed = engine(algorithm, built, captured=captured, **options)
    return fed, travel(fed, algorithm, num_iterations=num_iterations, schedule=schedule, resume_at=resume_at)


def assert_same_bits(algorithm, built, **options):
    plain, expected = follow(algorithm, built, captured=False, **options)
    fed, got = follow(algorithm, built, captured=True, **options)
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert all(map(torch.equal, one, other)), f"outer iteration {number + 1}"
    for name, column in plain.ledger.columns.items():
        assert torch.equal(fed.ledger.columns[name], column), name
    assert fed.ledger.rounds == plain.ledger.rounds
    assert fed.ledger.phases == plain.ledger.phases
    return fed.graphs


def assert_replayed(algorithm, built, **options):
    graphs = assert_same_bits(algorithm, built, **options)
    assert refusals(graphs.fed) == {}
    assert graphs.replayed
    return graphs


def alike(built=None, **settings):
    """Return clients with the same number of samples each."""
    built = built or clients(**settings)
    few = {role: min(len(next(iter(client[role].values()))) for client in built.clients) for role in built.clients[0]}
    return built._replace(
        clients=[
            {role: {name: value[: few[role]] for name, value in fields.items()} for role, fields in client.items()}
            for client in built.clients
        ]
    )


def half(algorithm):
    return Cohort() if algorithm.needs_everyone or algorithm.gathers else Cohort(0.5)


@pytest.mark.parametrize("name", sorted(SERVER))
def test_everybody_with_all_samples(name):
    graphs = assert_same_bits(brief(SERVER[name]), clients())
    assert (OUTER in graphs.captures.refused) == (name in HOST + MASKS), graphs.captures.refused
    assert bool(graphs.replayed) == (name not in NOT)


@pytest.mark.parametrize("name", sorted(set(SERVER) - NOT))
def test_cohorts_with_minibatches(name):
    algorithm = brief(SERVER[name])
    assert_replayed(algorithm, clients(), cohort=half(algorithm), batch_size=3)


@pytest.mark.parametrize("name", sorted(set(SERVER) - NOT))
def test_a_falling_schedule(name):
    schedule = Schedule(power=0.5, offset=1.0)
    assert_replayed(brief(SERVER[name]), clients(), batch_size=3, schedule=schedule, num_iterations=18)


def test_a_falling_schedule_is_replayed_in_a_run_and_its_steps_are_forgotten(monkeypatch):
    monkeypatch.setattr(outer_graphs, "_KNOWN", 8)
    algorithm, built, schedule = FedBiO(), clients(), Schedule(power=0.5, offset=1.0)
    fed = Simulation(algorithm, *built, dtype=torch.float32)  # recorded as late as in every run
    got = travel(fed, algorithm, num_iterations=120, schedule=schedule)
    _, expected = follow(algorithm, built, captured=False, num_iterations=120, schedule=schedule)
    assert all(map(torch.equal, got[-1], expected[-1]))
    assert refusals(fed) == {}
    assert fed.graphs.replayed > 30
    assert len(fed.graphs._settings) <= 9


@pytest.mark.parametrize("name", ["fbo_aggitd", "fedbio", "fedbioacc", "simfbo", "adasimfbo"])
@pytest.mark.parametrize(("upper", "lower"), [("private", "global"), ("shared", "local"), ("private", "local")])
def test_what_clients_keep(name, upper, lower):
    assert_replayed(brief(SERVER[name]), alike(upper=upper, lower=lower), cohort=Cohort(0.5), batch_size=3)


@pytest.mark.parametrize("algorithm", [FedBiO(num_local_steps=(1, 2, 3, 1, 2, 2)), FedAvg(num_local_epochs=2)])
def test_clients_that_take_unequal_numbers_of_steps(algorithm):
    assert_replayed(algorithm, clients(), batch_size=3, sampling="epochs")


def test_weights_clients_that_are_drawn_twice_and_another_order():
    cohort = Cohort(0.5, replacement=True)
    built = alike(client_weights="by_samples")
    assert_replayed(FedBiOAcc(), built, cohort=cohort, batch_size=3, num_iterations=30)
    assert_replayed(CommFedBiO(error_feedback=True), clients(), ids=[3, 1, 0, 5, 4, 2], batch_size=3)


@pytest.mark.parametrize("algorithm", [FBOAggITD(num_local_steps=3), FedNest(num_local_steps=2, num_terms=2)])
@pytest.mark.parametrize("batch_size", [8, {"train": 8, "val": 8, "outside": None}])
def test_features_of_images(algorithm, batch_size):
    cohort = Cohort(0.5, redraw="per_iteration")
    options = {"cohort": cohort, "batch_size": batch_size, "sampling": "epochs", "num_iterations": 24}
    assert_replayed(algorithm, alike(images(split="shards")), **options)


@pytest.mark.parametrize("algorithm", [FedBiO(), FBOAggITD(num_local_steps=2)])
def test_a_resumed_run(algorithm):
    assert_replayed(algorithm, clients(lower="local"), batch_size=3, resume_at=9, num_iterations=20)


def test_all_samples_of_unequal_clients_in_cohorts_are_refused():
    for built in (clients(), images(split="shards")):
        graphs = assert_same_bits(FedBiO(), built, cohort=Cohort(0.5))
        assert "unequal" in graphs.captures.refused[OUTER]
    assert_replayed(FedBiO(), clients(), cohort=Cohort(0.5), batch_size=3)


def test_a_plan_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(flat_plans, "_MOST", 1000)
    graphs = assert_same_bits(FedBiO(), clients())
    assert "MiB" in graphs.captures.refused[OUTER]


def test_a_replay_with_other_bits_is_refused(monkeypatch):
    class Wrong(flat_plans.FlatPlan):
        def __call__(self):
            super().__call__()
            self.results["state.x"].mul_(1 + 2**-22)

    monkeypatch.setattr(flat_plans, "FlatPlan", Wrong)
    graphs = assert_same_bits(FedBiO(), clients())
    assert "differed" in graphs.captures.refused[OUTER]
    assert not graphs.replayed


def test_a_replay_that_fails_is_refused_and_changes_nothing(monkeypatch):
    class Failing(flat_plans.FlatPlan):
        def __call__(self):
            super().__call__()
            raise RuntimeError("no kernel")

    monkeypatch.setattr(flat_plans, "FlatPlan", Failing)
    graphs = assert_same_bits(FedBiOAcc(), alike(upper="private"), cohort=Cohort(0.5), batch_size=3)
    assert graphs.captures.refused[OUTER] == "no kernel"


def test_a_run_whose_clients_do_not_fit_stays_without_captures():
    fed = engine(FedBiO(), clients(), captured=True)
    with fed.graphs._without_captures():
        pass
    assert fed.host.captures is fed.graphs.captures
    with fed.graphs._without_captures():
        fed.host.limit_clients(2)
    assert fed.host.captures is None


def test_a_loss_that_changes_is_noticed():
    """A plan has the numbers of the recording; comparisons at replays 1, 2, 4, ... see that they are old."""
    built, offset = clients(), [0.0]
    problem = dataclasses.replace(
        built.problem, lower=lambda x, y, batch: built.problem.lower(x, y, batch) + offset[0] * y["y"].sum()
    )
    fed = engine(FedBiO(), built._replace(problem=problem), captured=True)

    def drift(_, iteration):
        offset[0] = 0.0 if iteration < 12 else 1.0

    travel(fed, FedBiO(), num_iterations=30, between=drift)
    assert "differed" in fed.graphs.captures.refused[OUTER]


@pytest.mark.parametrize("algorithm", [FedBiO(num_local_steps=2, lr_upper=1e30, lr_lower=1e30)])
def test_a_replay_that_is_not_finite_names_the_client(algorithm):
    messages = []
    for captured in (False, True):
        with pytest.raises(NonFiniteError, match=r"client \d returned a value of") as caught:
            follow(algorithm, clients(), captured=captured, batch_size=3, num_iterations=60, dtype=torch.float64)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_a_run_uses_plans_and_its_result_names_refusals(monkeypatch, tmp_path):
    built, given = clients(), {"batch_size": 3, "measure_every": 20}
    monkeypatch.setattr(planned.PlannedIterations, "times", 10**9)
    expected = solve(*built, FedBiO(), num_iterations=60, **given)
    monkeypatch.setattr(planned.PlannedIterations, "times", 3)
    solve(*built, FedBiO(), num_iterations=30, record=tmp_path / "run", **given)
    got = solve(*built, FedBiO(), num_iterations=60, record=tmp_path / "run", resume=True, **given)
    assert got.uncaptured == {}
    assert torch.equal(got.x["x"], expected.x["x"])
    assert got.ledger == expected.ledger
    refused = solve(*built, FedBiO(), num_iterations=9, cohort=Cohort(0.5))
    assert "unequal" in refused.uncaptured[OUTER]
