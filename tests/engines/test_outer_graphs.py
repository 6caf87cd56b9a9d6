"""Captured outer iterations: whatever is replayed is what would have been computed, and charged.

Without a GPU the recorder of `test_cuda_graphs` runs the traced outer iteration again on the same
tensors. `Waits` finds operations that would wait for a device: they read a number from a tensor of
floats, or from a tensor that was computed from floats.
"""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engines.test_cuda_graphs import DEVICE, SERVER, images, run_again
from fedbilevel import discovery
from fedbilevel.aggregation.attacks import Attack
from fedbilevel.algorithms.adafbio import AdaFBiO
from fedbilevel.algorithms.commfedbio import CommFedBiO
from fedbilevel.algorithms.fbo_aggitd import FBOAggITD
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.fednest import FedNest
from fedbilevel.engines import cuda_graphs, outer_capture, outer_graphs, server_books
from fedbilevel.engines.outer_graphs import OUTER
from fedbilevel.engines.peer_graphs import PeerIterations
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.engines.rounds import one_round, refusals
from fedbilevel.engines.server_graphs import ServerIterations
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import NonFiniteError
from fedbilevel.federation.algorithm import Cohort, Kept, PeerAlgorithm
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.network import Network
from fedbilevel.federation.schedule import Schedule
from fedbilevel.federation.stragglers import Stragglers
from fedbilevel.runs.solve import solve
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.yardstick import brief

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")]

PEERS = {name: owner for name, owner in discovery.algorithms().items() if issubclass(owner, PeerAlgorithm)}
FRESH = ("newtonfbo",)  # its signs have a new seed in every outer iteration, so that no graph is used twice
HOST = ("clustered_fl", "self_tuned")  # they decide at the server, from values that a graph would have to compute


class Waits(TorchDispatchMode):
    """Raise where the processor reads a value that a GPU would have to compute first."""

    names = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::unique_dim", "aten::_unique2")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        there = any(one.is_floating_point() or getattr(one, "there", False) for one in given)
        if there and function._schema.name in self.names:
            raise RuntimeError(f"{function} waits for the device")
        found = function(*args, **(kwargs or {}))
        for one in tree_leaves(found) if there else ():
            if isinstance(one, torch.Tensor):
                one.there = True
        return found


def without_waits(function, device):
    def watched():
        with Waits():
            return function()

    return run_again(watched, device)


@pytest.fixture(autouse=True)
def _recorder(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_graphs, "recorded", run_again)


def engine(algorithm, built, *, captured, **options):
    peers = isinstance(algorithm, PeerAlgorithm)
    given = {"dtype": torch.float64, "device": DEVICE, **options}
    fed = (PeerSimulation if peers else Simulation)(algorithm, *built, **given)
    fed.host.captures = cuda_graphs.Captures(fed.host) if captured else None
    fed.graphs = (PeerIterations if peers else ServerIterations)(fed) if captured else None
    return fed


def follow(algorithm, built, *, captured, num_iterations=16, schedule=None, resume_at=None, **options):
    fed = engine(algorithm, built, captured=captured, **options)
    return fed, travel(fed, algorithm, num_iterations=num_iterations, schedule=schedule, resume_at=resume_at)


def travel(fed, algorithm, *, num_iterations, schedule=None, resume_at=None, between=lambda fed, iteration: None):
    fed.begin(0)
    state, path = algorithm.init(fed), []
    for iteration in range(1, num_iterations + 1):
        between(fed, iteration)
        now = algorithm if schedule is None else algorithm.scaled(schedule(iteration))
        fed.begin(iteration, now)
        state = one_round(fed, now, state)
        fed.check()
        values = [value for value in state if isinstance(value, torch.Tensor | Kept)]
        path.append([fed.collect(value).clone() for value in values])
        if iteration == resume_at:
            state = fed.load_state_dict(*fed.state_dict(state), algorithm.State)
    return path


def assert_same_run(algorithm, built, **options):
    plain, expected = follow(algorithm, built, captured=False, **options)
    fed, got = follow(algorithm, built, captured=True, **options)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)
    for name, column in plain.ledger.columns.items():
        assert torch.equal(fed.ledger.columns[name], column), name
    for name, counts in plain.ledger.edges.items():
        assert torch.equal(fed.ledger.edges[name], counts), name
    assert fed.ledger.rounds == plain.ledger.rounds
    assert fed.ledger.phases == plain.ledger.phases
    return fed.graphs


def assert_captured(algorithm, built, **options):
    graphs = assert_same_run(algorithm, built, **options)
    assert refusals(graphs.fed) == {}
    assert graphs.replayed
    return graphs


def clients(**settings):
    return Quadratic(**{"num_clients": 6, "num_samples": 8, **settings}).build()


def half(algorithm):
    return Cohort() if algorithm.needs_everyone or algorithm.gathers else Cohort(0.5)


@pytest.mark.parametrize("name", sorted(SERVER))
def test_nothing_is_refused_but_decisions_of_the_server(name, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_graphs, "recorded", without_waits)
    algorithm = brief(SERVER[name])
    graphs = assert_same_run(algorithm, clients(), cohort=half(algorithm), batch_size=3)
    assert (OUTER in graphs.captures.refused) == (name in HOST), graphs.captures.refused
    assert bool(graphs.replayed) == (name not in HOST + FRESH)


@pytest.mark.parametrize("name", sorted(set(SERVER) - {*HOST, *FRESH}))
def test_a_falling_schedule_stays_captured(name):
    algorithm = brief(SERVER[name])
    schedule = Schedule(power=0.5, offset=1.0)
    assert_captured(algorithm, clients(), cohort=half(algorithm), batch_size=3, schedule=schedule, num_iterations=18)


@pytest.mark.parametrize("name", ["adafbio", "fbo_aggitd", "fedbio", "fedbioacc", "simfbo", "adasimfbo"])
@pytest.mark.parametrize(("upper", "lower"), [("private", "global"), ("shared", "local"), ("private", "local")])
def test_what_clients_keep_stays_in_place(name, upper, lower):
    assert_captured(brief(SERVER[name]), clients(upper=upper, lower=lower), cohort=Cohort(0.5), batch_size=3)


@pytest.mark.parametrize(
    "algorithm",
    [
        FedBiO(num_local_steps=(1, 2, 3, 1, 2, 2)),
        CommFedBiO(error_feedback=True),
        AdaFBiO(num_local_steps=2, hypergradient="shared-u"),
        FedAvg(num_local_epochs=2),
    ],
)
def test_masks_and_memory(algorithm):
    assert_captured(algorithm, clients(), cohort=Cohort(0.5), batch_size=3)


@pytest.mark.parametrize("algorithm", [FedBiOAcc(num_local_steps=2), FedNest(num_local_steps=2, num_terms=2)])
@pytest.mark.parametrize("split", ["iid", "shards"])
@pytest.mark.parametrize("batch_size", [8, None])
def test_images(algorithm, split, batch_size):
    assert_captured(algorithm, images(split=split), cohort=Cohort(0.5), batch_size=batch_size, num_iterations=24)


def test_weights_and_clients_that_are_drawn_twice():
    cohort = Cohort(0.5, replacement=True)
    assert_captured(FedBiOAcc(), clients(client_weights="by_samples"), cohort=cohort, batch_size=3, num_iterations=30)
    assert_captured(FedNest(num_terms=1), clients(client_weights="by_samples"), cohort=Cohort(0.5), batch_size=3)


def test_stragglers_and_other_orders_of_clients():
    built = clients()
    assert_captured(FedBiOAcc(), built, stragglers=Stragglers(dropout=0.2), batch_size=3, num_iterations=30)
    assert_captured(AdaFBiO(), built, ids=[3, 1, 0, 5, 4, 2], cohort=Cohort(0.5), batch_size=3)


def test_passes_over_equal_data():
    built = clients()
    few = {role: min(len(next(iter(client[role].values()))) for client in built.clients) for role in built.clients[0]}
    equal = [
        {role: {name: value[: few[role]] for name, value in fields.items()} for role, fields in client.items()}
        for client in built.clients
    ]
    assert_captured(AdaFBiO(), built._replace(clients=equal), batch_size=3, sampling="epochs", cohort=Cohort(0.5))


def test_passes_over_unequal_data_and_single_samples():
    built = clients()
    one = {role: {name: value[:1] for name, value in fields.items()} for role, fields in built.clients[0].items()}
    some = built._replace(clients=[one, *built.clients[1:]])
    assert_captured(FedBiO(num_local_steps=4), some, batch_size=5, sampling="epochs", cohort=Cohort(0.5))


@pytest.mark.parametrize("algorithm", [AdaFBiO(), FedBiO(), FBOAggITD(num_local_steps=2)])
def test_a_resumed_run_goes_on(algorithm):
    built = clients(lower="local")
    assert_captured(algorithm, built, cohort=Cohort(0.5), batch_size=3, resume_at=9, num_iterations=20)


@pytest.mark.parametrize(
    "algorithm",
    [
        FedBiO(num_local_steps=2, lr_upper=1e30, lr_lower=1e30),
        FedNest(num_local_steps=2, num_terms=1, lr_lower=1e25, lr_system=1e25),
    ],
)
def test_a_replay_that_is_not_finite_names_the_client(algorithm):
    messages = []
    for captured in (False, True):
        with pytest.raises(NonFiniteError, match=r"client \d returned a value of") as caught:
            follow(algorithm, clients(), captured=captured, batch_size=3, num_iterations=60)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_values_that_go_wrong_late_name_the_client():
    """Replays are finite at first; then the data of one client are not."""
    algorithm, messages, memory = AdaFBiO(), [], []

    def spoilt(fed, iteration):
        if iteration == 12:
            fed.host.data.fields["train"]["c"][-3:] = float("inf")

    for captured in (False, True):
        fed = engine(algorithm, clients(), captured=captured, batch_size=3, cohort=Cohort(0.5))
        with pytest.raises(NonFiniteError, match=r"client \d returned a value of") as caught:
            travel(fed, algorithm, num_iterations=40, between=spoilt)
        messages.append(str(caught.value))
        memory.append(fed.host.memory.rows)
    assert messages[0] == messages[1]
    assert fed.graphs.replayed
    torch.testing.assert_close(memory[1], memory[0], rtol=1e-11, atol=1e-12, equal_nan=True)


def test_a_replay_that_differs_is_refused_and_changes_nothing(monkeypatch):
    def wrong(function, device):
        results, replay = run_again(function, device)

        def off():
            replay()
            if "state.x" in results:  # not a phase, which is captured afterwards
                results["state.x"].add_(1e-4)

        return results, off

    monkeypatch.setattr(cuda_graphs, "recorded", wrong)
    graphs = assert_same_run(FedBiO(), clients(), cohort=Cohort(0.5), batch_size=3)
    assert "differed" in graphs.captures.refused[OUTER]
    assert not graphs.replayed


@pytest.mark.parametrize(
    "algorithm", [CommFedBiO(compression="sketch"), brief(SERVER["newtonfbo"])], ids=["sketch", "signs"]
)
def test_outer_iterations_that_never_repeat_are_refused(algorithm, monkeypatch):
    """A sketch, and signs of a measurement, have a new seed in every outer iteration."""
    monkeypatch.setattr(outer_graphs, "_PATIENCE", 6)
    graphs = assert_same_run(algorithm, clients(), batch_size=3)
    assert "unlike" in graphs.captures.refused[OUTER]


def test_large_rows_are_refused(monkeypatch):
    monkeypatch.setattr(outer_capture, "_LARGE", 8)
    graphs = assert_same_run(FedBiO(), clients(), batch_size=3)
    assert "so large" in graphs.captures.refused[OUTER]


@pytest.mark.parametrize("kind", ["ring", "base", "random_undirected"])
@pytest.mark.parametrize("name", sorted(PEERS))
def test_peers_go_the_same_way(name, kind, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_graphs, "recorded", without_waits)
    algorithm = brief(PEERS[name])
    many = 40 if kind == "base" else 16  # one graph per step of the cycle at which an outer iteration begins
    graphs = assert_same_run(algorithm, clients(), network=Network(kind=kind), batch_size=3, num_iterations=many)
    assert (OUTER in graphs.captures.refused) == (name == "rasgp"), graphs.captures.refused
    assert bool(graphs.replayed) == (name != "rasgp")


def test_peers_with_kept_weights_two_networks_and_a_schedule():
    hgp = dataclasses.replace(brief(PEERS["hgp"]), optimiser="adam")
    schedule = Schedule(power=0.5, offset=1.0)
    kept, network = Averaging(weights="kept"), Network(kind="random_directed")
    assert_captured(hgp, clients(), network=network, averaging=kept, batch_size=3, schedule=schedule)
    both = Network(kind="ring", upper_kind="complete")
    assert_captured(dataclasses.replace(hgp, lower_solver="mix"), clients(), network=both, batch_size=3)


def test_peers_whose_values_are_not_finite_are_named():
    messages = []
    for captured in (False, True):
        algorithm = dataclasses.replace(brief(PEERS["sgp"]), lr_lower=1e20)
        with pytest.raises(NonFiniteError, match=r"client \d has a value of") as caught:
            follow(
                algorithm, clients(), captured=captured, network=Network(kind="ring"), batch_size=3, num_iterations=60
            )
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_a_run_and_its_resumption_replay_outer_iterations(monkeypatch, tmp_path):
    """The loop over outer iterations uses graphs, and a result names refusals."""
    built, made = clients(lower="local"), []

    def with_graphs(self, *given, **options):
        usual(self, *given, **options)
        self.host.captures = cuda_graphs.Captures(self.host)
        self.graphs = ServerIterations(self)
        made.append(self)

    given = {"batch_size": 3, "cohort": Cohort(0.5), "measure_every": 4, "dtype": torch.float64}
    expected = solve(*built, AdaFBiO(), num_iterations=24, **given)
    usual = Simulation.__init__
    monkeypatch.setattr(Simulation, "__init__", with_graphs)
    solve(*built, AdaFBiO(), num_iterations=12, record=tmp_path / "run", **given)
    got = solve(*built, AdaFBiO(), num_iterations=24, record=tmp_path / "run", resume=True, **given)
    assert all(fed.graphs.replayed for fed in made)
    assert got.uncaptured == {}
    torch.testing.assert_close(got.x, expected.x, rtol=1e-11, atol=1e-12)
    assert got.ledger == expected.ledger
    refused = solve(
        *built,
        AdaFBiO(),
        num_iterations=2,
        stragglers=Stragglers(dropout=0.1),
        attack=Attack(kind="sign_flip"),
        **given,
    )
    assert refused.uncaptured == {OUTER: "some clients send wrong rows"}


@pytest.mark.parametrize("cells", [0, 2**20])
@pytest.mark.parametrize("algorithm", [FBOAggITD(num_local_steps=2), FedNest(num_local_steps=2, num_terms=2)])
def test_arrays_are_paid_for_by_clients_that_lack_them(algorithm, cells, monkeypatch):
    """Cohorts of one outer iteration overlap; with few cells only clients of the cohorts are looked at."""
    monkeypatch.setattr(server_books, "_CELLS", cells)
    built, ids = clients(), [4, 0, 5, 2, 1, 3]
    graphs = assert_same_run(algorithm, built, cohort=Cohort(0.5), ids=ids, num_iterations=30)
    assert graphs.replayed
