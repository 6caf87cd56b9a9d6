"""Captured outer iterations: whatever is replayed is what would have been computed, and charged."""

import pytest
import torch

from engines.test_cuda_graphs import DEVICE, SERVER, run_again
from fedbilevel import discovery
from fedbilevel.engines import cuda_graphs
from fedbilevel.engines.outer_graphs import OUTER
from fedbilevel.engines.peer_graphs import PeerIterations
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.engines.rounds import one_round
from fedbilevel.engines.server_graphs import ServerIterations
from fedbilevel.engines.simulation import Simulation
from fedbilevel.federation.algorithm import Cohort, Kept, PeerAlgorithm
from fedbilevel.federation.network import Network
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.yardstick import brief

PEERS = {name: owner for name, owner in discovery.algorithms().items() if issubclass(owner, PeerAlgorithm)}
HOST = ("clustered_fl", "self_tuned")


@pytest.fixture(autouse=True)
def _recorder(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_graphs, "recorded", run_again)


def follow(algorithm, built, *, captured, num_iterations=16, schedule=None, **options):
    engine, graphs = (
        (PeerSimulation, PeerIterations) if isinstance(algorithm, PeerAlgorithm) else (Simulation, ServerIterations)
    )
    fed = engine(algorithm, *built, **{"dtype": torch.float64, "device": DEVICE, **options})
    fed.host.captures = cuda_graphs.Captures(fed.host) if captured else None
    fed.graphs = graphs(fed) if captured else None
    fed.begin(0)
    state, path = algorithm.init(fed), []
    for iteration in range(1, num_iterations + 1):
        now = algorithm if schedule is None else algorithm.scaled(schedule(iteration))
        fed.begin(iteration, now)
        state = one_round(fed, now, state)
        fed.check()
        values = [value for value in state if isinstance(value, torch.Tensor | Kept)]
        path.append([fed.collect(value).clone() for value in values])
    return fed, path


def assert_same_run(algorithm, built, **options):
    plain, expected = follow(algorithm, built, captured=False, **options)
    fed, got = follow(algorithm, built, captured=True, **options)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)
    for name, column in plain.ledger.columns.items():
        assert torch.equal(fed.ledger.columns[name], column), name
    assert fed.ledger.rounds == plain.ledger.rounds
    assert fed.ledger.phases == plain.ledger.phases
    return fed.graphs


@pytest.mark.parametrize("name", sorted(SERVER))
@pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")
def test_every_algorithm_goes_the_same_way(name):
    algorithm = brief(SERVER[name])
    cohort = Cohort() if algorithm.needs_everyone else Cohort(0.5)
    graphs = assert_same_run(algorithm, Quadratic(num_clients=6, num_samples=8).build(), cohort=cohort, batch_size=3)
    assert (OUTER in graphs.captures.refused) == (name in HOST), graphs.captures.refused
    assert bool(graphs.replayed) == (name not in HOST)


@pytest.mark.parametrize("kind", ["ring", "random_undirected"])
@pytest.mark.parametrize("name", sorted(PEERS))
@pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")
def test_peers_go_the_same_way(name, kind):
    algorithm, network = brief(PEERS[name]), Network(kind=kind)
    graphs = assert_same_run(algorithm, Quadratic(num_clients=6, num_samples=8).build(), network=network, batch_size=3)
    assert (OUTER in graphs.captures.refused) == (name == "rasgp"), graphs.captures.refused
    assert bool(graphs.replayed) == (name != "rasgp")
