"""Captured phases: whatever is replayed is what would have been computed.

Without a GPU no CUDA graph can be recorded, so `recorded` is replaced here by a recorder that runs
the phase again on the same tensors. Like a graph, it sees only the values that a new call writes
into those tensors. On a GPU the same tests record real graphs.
"""

import dataclasses

import pytest
import torch

from fedbilevel import discovery
from fedbilevel.algorithms.adafbio import AdaFBiO
from fedbilevel.algorithms.commfedbio import CommFedBiO
from fedbilevel.algorithms.fbo_aggitd import FBOAggITD
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.fednest import FedNest
from fedbilevel.engines import addressed, cuda_graphs
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import NonFiniteError
from fedbilevel.federation.algorithm import Cohort, ServerAlgorithm, phase
from fedbilevel.federation.schedule import Schedule
from fedbilevel.problem.layout import one_row
from fedbilevel.tasks.hyper_representation import HyperRepresentation
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.yardstick import brief, drive

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SERVER = {name: owner for name, owner in discovery.algorithms().items() if issubclass(owner, ServerAlgorithm)}
ALONE = (
    "adafbio",
    "fedbio_cv",
    "fedbioacc",
    "fedbioacc_local",
    "distbioacc",
    "fedmsa",
    "local_bsgvrm",
    "newtonfbo",
    "self_tuned",
)  # scratch is used, or steps, memory or seeds depend on the outer iteration


def run_again(function, _device):
    results = function()
    first = dict(results)

    def replay():
        for name, value in function().items():
            old, new = (getattr(one, "rows", one) for one in (first[name], value))
            if new is not None:
                one_row(old).copy_(one_row(new))

    return results, replay


@pytest.fixture(autouse=True)
def _recorder(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_graphs, "recorded", run_again)


def follow(algorithm, built, *, captured, num_iterations=7, **options):
    fed = Simulation(algorithm, *built, **{"dtype": torch.float64, "device": DEVICE, **options})
    fed.host.captures = cuda_graphs.Captures(fed.host) if captured else None
    fed.begin(0)
    state, path = algorithm.init(fed), []
    for iteration in range(1, num_iterations + 1):
        fed.begin(iteration)
        state = algorithm.round(fed, state)
        path.append([fed.collect(value).clone() for value in (state.x, state.y)])
    fed.host.check()
    return fed, path


def assert_same_run(algorithm, built, **options):
    plain, expected = follow(algorithm, built, captured=False, **options)
    fed, got = follow(algorithm, built, captured=True, **options)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)
    for name, column in plain.ledger.columns.items():
        assert torch.equal(fed.ledger.columns[name], column), name
    assert fed.ledger.rounds == plain.ledger.rounds
    return fed.host.captures


def images(**settings):
    return HyperRepresentation(
        **{"num_clients": 6, "share": 0.2, "num_hidden": 5, "activation": "gelu", **settings}
    ).build()


@pytest.mark.parametrize("name", sorted(SERVER))
@pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")
def test_every_algorithm_goes_the_same_way_captured_or_not(name):
    algorithm = brief(SERVER[name])
    cohort = Cohort() if algorithm.needs_everyone else Cohort(0.5)
    kept = assert_same_run(algorithm, Quadratic(num_clients=6, num_samples=8).build(), cohort=cohort, batch_size=3)
    assert bool(kept._kept) == (name not in ALONE), kept.refused


@pytest.mark.parametrize(
    "algorithm",
    [
        FedNest(num_local_steps=3, num_terms=2),
        FBOAggITD(num_local_steps=4, num_upper_steps=2, num_lower_rounds=2),
        FedBiO(num_local_steps=3),
    ],
)
@pytest.mark.parametrize("split", ["iid", "shards"])
def test_features_minibatches_and_whole_batches_of_other_cohorts(algorithm, split):
    """Cohorts of half the clients, with equal or unequal sizes, on minibatches and whole batches."""
    built = images(split=split)
    for batch_size in ({"train": 8, "val": 8, "outside": None}, None):
        assert assert_same_run(algorithm, built, cohort=Cohort(0.5), batch_size=batch_size, num_iterations=10)._kept


def test_unequal_clients_with_weights_drawn_twice():
    built = images(split="shards")
    some = built._replace(problem=dataclasses.replace(built.problem, client_weights="by_samples"))
    assert assert_same_run(
        FedNest(num_local_steps=2), some, cohort=Cohort(0.5, replacement=True), batch_size=5, num_iterations=12
    )._kept


@pytest.mark.parametrize(("upper", "lower"), [("private", "global"), ("shared", "local")])
def test_what_clients_keep_is_filled_in(upper, lower):
    built = Quadratic(num_clients=6, upper=upper, lower=lower, num_samples=8).build()
    assert assert_same_run(FBOAggITD(num_local_steps=2), built, cohort=Cohort(0.5), batch_size=3)._kept


def test_passes_over_the_data_are_drawn_as_ever():
    built = images(split="iid")
    fewest = {role: min(len(client[role]["label"]) for client in built.clients) for role in built.clients[0]}
    equal = [
        {role: {name: value[: fewest[role]] for name, value in fields.items()} for role, fields in client.items()}
        for client in built.clients
    ]
    for cohort in (Cohort(), Cohort(0.5)):
        kept = assert_same_run(
            FedBiO(num_local_steps=3), built._replace(clients=equal), batch_size=15, sampling="epochs", cohort=cohort
        )
        assert kept._kept


@pytest.mark.parametrize("most", [addressed.MOST_KEYS, 0])
def test_passes_over_unequal_data(most, monkeypatch):
    """How many passes there are depends on the cohort: a replay draws as many as the smallest client needs."""
    monkeypatch.setattr(addressed, "MOST_KEYS", most)
    kept = assert_same_run(
        FedBiO(num_local_steps=3),
        images(split="shards"),
        batch_size=9,
        sampling="epochs",
        cohort=Cohort(0.5),
        num_iterations=12,
    )
    reason = "its clients take passes over very unequal numbers of samples"
    assert kept.refused == ({} if most else {"local_steps": reason})
    assert bool(kept._kept) == bool(most)


@pytest.mark.parametrize(
    ("algorithm", "phase", "reason"),
    [
        (FedBiOAcc(), "local_steps", "scratch"),
        (AdaFBiO(), "local_steps", "memory"),
        (FedBiO(num_local_steps=(1, 2, 3, 1)), "local_steps", "unequal"),
        (CommFedBiO(error_feedback=True), "system_direction", "memory"),
    ],
)
def test_what_cannot_be_replayed_is_run_as_ever_and_says_why(algorithm, phase, reason):
    kept = assert_same_run(algorithm, Quadratic(num_clients=4, num_samples=8).build(), batch_size=3)
    assert reason in kept.refused[phase]


def test_plain_values_that_change_are_not_captured():
    """CommFedBiO's sketch has a new seed in every outer iteration, so no call occurs three times."""
    fed, _ = follow(
        CommFedBiO(compression="sketch"),
        Quadratic(num_clients=4, num_samples=8).build(),
        captured=True,
        num_iterations=6,
    )
    assert "sketched_system" not in {key[0] for key in fed.host.captures._kept}


def test_other_step_sizes_are_another_phase():
    built = Quadratic(num_clients=4, num_samples=8).build()
    paths = []
    for captured in (False, True):
        algorithm = FedBiO(num_local_steps=2)
        fed = Simulation(algorithm, *built, dtype=torch.float64, device=DEVICE, batch_size=3)
        fed.host.captures = cuda_graphs.Captures(fed.host) if captured else None
        fed.begin(0)
        state = algorithm.init(fed)
        for iteration in range(1, 9):
            now = algorithm.scaled(1.0 if iteration < 6 else 0.5)
            fed.begin(iteration, now)
            state = now.round(fed, state)
        paths.append([state.x, state.y])
    torch.testing.assert_close(paths[1], paths[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "algorithm",
    [
        FedBiO(num_local_steps=2, lr_upper=1e30, lr_lower=1e30),
        FedNest(num_local_steps=2, lr_lower=1e40, lr_system=1e40),
    ],
)
def test_a_replay_that_is_not_finite_names_the_client_before_the_next_outer_iteration(algorithm):
    built, messages = Quadratic(num_clients=4, num_samples=8).build(), []
    for captured in (False, True):
        with pytest.raises(NonFiniteError, match=r"client \d returned a value of") as caught:
            follow(algorithm, built, captured=captured, num_iterations=40)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_only_so_many_phases_are_kept(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_MOST", 2)
    monkeypatch.setattr(cuda_graphs, "_REMEMBERED", 3)
    kept = assert_same_run(
        FedNest(num_local_steps=2), Quadratic(num_clients=4, num_samples=8).build(), batch_size=3, num_iterations=12
    )
    assert len(kept._kept) <= 2
    assert len(kept._times) <= 4


@pytest.mark.skipif(DEVICE == "cpu", reason="compiling derivatives into few kernels needs a GPU")
def test_compiled_derivatives_give_the_same_run():
    kept = assert_same_run(
        FedNest(num_local_steps=3),
        images(split="iid"),
        cohort=Cohort(0.5),
        batch_size=8,
        num_iterations=12,
        strategy="compiled",
    )
    assert kept._kept
    assert not kept.refused


def test_unequal_clients_evaluated_one_by_one_are_not_captured():
    built, algorithm = images(split="shards"), FedNest(num_local_steps=2)
    ends = []

    def one_by_one(*given, captured, **options):
        fed = Simulation(*given, **options)
        fed.host.oracle._usual = lambda k: "loop"
        fed.host.oracle._pools = lambda *_: False
        fed.host.captures = cuda_graphs.Captures(fed.host) if captured else None
        return fed

    for captured in (False, True):
        fed, state = drive(
            algorithm, built, 12, engine=one_by_one, captured=captured, device=DEVICE, cohort=Cohort(0.5)
        )
        ends.append((state.x, state.y))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-11, atol=1e-12)
    assert any("one by one" in reason for reason in fed.host.captures.refused.values())


def test_a_phase_that_reads_numbers_of_clients_is_captured():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class ByNumber(ServerAlgorithm):
        State = FedBiO.State

        def init(self, fed):
            return self.State(*fed.initial(), fed.initial()[1])

        def round(self, fed, state):
            new = fed.mean(self.step, x=state.x, y=state.y)
            return self.State(state.x, new.y, new.y)

        @phase
        def step(self, clients, x, y):
            rates = 0.01 * (1 + clients.ids.to(y.device, y.dtype))[:, None]
            return {"y": clients.rows(y) - rates * clients.lower_grad(x, y, clients.batch("train", "B"))}

    kept = assert_same_run(
        ByNumber(), Quadratic(num_clients=6, num_samples=8).build(), cohort=Cohort(0.5), batch_size=3
    )
    assert kept._kept
    assert not kept.refused


def test_what_is_run_again_to_find_a_culprit_is_not_paid_for():
    """Rows that are finite and whose sum is not: a false alarm."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Large(ServerAlgorithm):
        State = FedBiO.State

        def init(self, fed):
            return self.State(*fed.initial(), fed.initial()[1])

        def round(self, fed, state):
            fed.mean(self.step, x=state.x, y=state.y)
            return state

        @phase
        def step(self, clients, x, y):
            gradient = clients.lower_grad(x, y, clients.batch("train", "B"))
            return {"h": torch.full_like(gradient, 3e38)}

    assert assert_same_run(Large(), Quadratic(num_clients=4, num_samples=8).build(), dtype=torch.float32)._kept


@pytest.mark.parametrize("name", sorted(SERVER))
@pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")
def test_a_falling_schedule_stays_captured(name):
    """Step sizes that change from call to call are tensors of a captured phase."""
    algorithm, built = brief(SERVER[name]), Quadratic(num_clients=6, num_samples=8).build()
    schedule, paths = Schedule(power=0.5, offset=1.0), []
    for captured in (False, True):
        fed = Simulation(algorithm, *built, batch_size=3, dtype=torch.float64, device=DEVICE)
        fed.host.captures = cuda_graphs.Captures(fed.host) if captured else None
        fed.begin(0)
        state = algorithm.init(fed)
        for iteration in range(1, 13):
            now = algorithm.scaled(schedule(iteration))
            fed.begin(iteration, now)
            state = now.round(fed, state)
        fed.host.check()
        paths.append([fed.collect(value).clone() for value in (state.x, state.y)])
    torch.testing.assert_close(paths[1], paths[0], rtol=1e-11, atol=1e-12)
    assert bool(fed.host.captures._kept) == (name not in ALONE), fed.host.captures.refused
