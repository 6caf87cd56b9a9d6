"""Outer iterations that are launched before the first one is finished: same states, costs and errors.

Without a GPU a replay is finished when it is launched. What a GPU would overwrite meanwhile, a
replay overwrites here, too: the tensors of a graph, and the numbers that it reads.
"""

import itertools
import math
import shutil
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from engines.test_cuda_graphs import DEVICE, SERVER, run_again
from engines.test_outer_graphs import FRESH, HOST, PEERS, clients, engine, half, travel
from fedbilevel.algorithms.adafbio import AdaFBiO
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.fednest import FedNest
from fedbilevel.engines import cuda_graphs, launches, outer_capture, outer_graphs
from fedbilevel.engines.peer_graphs import PeerIterations
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.engines.rounds import expect, reached, refusals, several_rounds
from fedbilevel.engines.server_graphs import ServerIterations
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import NonFiniteError
from fedbilevel.federation.algorithm import Cohort, Kept, PeerAlgorithm
from fedbilevel.federation.network import Network
from fedbilevel.federation.schedule import Schedule
from fedbilevel.federation.store import Store
from fedbilevel.oracle import evaluation
from fedbilevel.oracle.oracle import Oracle
from fedbilevel.runs.recovery import check_finite
from fedbilevel.runs.solve import solve
from support.numeric.yardstick import brief

pytestmark = pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning")


@pytest.fixture(autouse=True)
def _recorder(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_graphs, "recorded", run_on_the_same_rows)


def run_on_the_same_rows(function, device):
    """As `run_again`, but rows that clients keep must be where they were recorded: a graph would not find them."""
    results, replay = run_again(function, device)

    def fixed(store, name, like):
        assert store._shelves[name].rows is store._fixed[name], f"rows of {name!r} have moved"
        return store._fixed[name]

    def checked():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Store, "fixed", fixed)
            replay()

    return results, checked


def hurry(fed, algorithm, *, num_iterations, schedule=None, looks=5, between=lambda fed, iteration: None):
    """Return states by outer iteration, of those that somebody looks at."""
    fed.begin(0)
    state, seen, iteration = algorithm.init(fed), {}, 0
    at = lambda iteration: algorithm if schedule is None else algorithm.scaled(schedule(iteration))
    while iteration < num_iterations:
        between(fed, iteration + 1)
        fed.begin(iteration + 1, at(iteration + 1))
        more = lambda now, before, after: now % looks > 0 and now < num_iterations
        state = several_rounds(fed, at, state, iteration + 1, more)
        iteration = reached(fed, iteration + 1)
        fed.check()
        check_finite(fed, state, iteration)
        values = [value for value in state if isinstance(value, torch.Tensor | Kept)]
        seen[iteration] = [fed.collect(value).clone() for value in values]
    return seen


def assert_same_when_hurried(algorithm, built, *, num_iterations=26, schedule=None, looks=5, length=0, **options):
    plain = engine(algorithm, built, captured=False, **options)
    expected = travel(plain, algorithm, num_iterations=num_iterations, schedule=schedule)
    fed = engine(algorithm, built, captured=True, **options)
    expect(fed, length)
    seen = hurry(fed, algorithm, num_iterations=num_iterations, schedule=schedule, looks=looks)
    assert refusals(fed) == {}
    assert len(seen) < num_iterations - 4, "outer iterations were launched one by one"
    for iteration, values in seen.items():
        torch.testing.assert_close(values, expected[iteration - 1], rtol=1e-11, atol=1e-12)
    for name, column in plain.ledger.columns.items():
        assert torch.equal(fed.ledger.columns[name], column), name
    assert (fed.ledger.rounds, fed.ledger.phases) == (plain.ledger.rounds, plain.ledger.phases)
    if isinstance(algorithm, PeerAlgorithm):
        assert (fed.time, fed.upper_time) == (plain.time, plain.upper_time)
        assert fed.ledger.edges.keys() == plain.ledger.edges.keys()
        assert all(torch.equal(fed.ledger.edges[name], counts) for name, counts in plain.ledger.edges.items())
    else:
        assert all(torch.equal(when, plain._kept_in[name]) for name, when in fed._kept_in.items())
    return fed.graphs


@pytest.fixture
def in_pairs(monkeypatch):
    """Two outer iterations in a row soon become one graph."""
    for name, value in {"_PAYS": 2, "_SPAN": 2, "_WORK": 2**20, "_LAUNCH": 2**20}.items():
        monkeypatch.setattr(outer_graphs, name, value)


def pairs(graphs):
    return [longer for one in graphs._kept.values() if not one.is_alone for longer in one.longer.values()]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(SERVER) - {*HOST, *FRESH}))
def test_every_algorithm(name):
    algorithm = brief(SERVER[name])
    assert_same_when_hurried(algorithm, clients(), cohort=half(algorithm), batch_size=3, num_iterations=40)


@pytest.mark.parametrize("name", ["fedbio", "adafbio"])
@pytest.mark.parametrize(("upper", "lower"), [("private", "global"), ("shared", "local")])
def test_private_x_memory_a_schedule_and_epochs(name, upper, lower):
    built, schedule = clients(upper=upper, lower=lower), Schedule(power=0.5, offset=1.0)
    given = {"cohort": Cohort(0.5), "batch_size": 3, "sampling": "epochs"}
    assert_same_when_hurried(brief(SERVER[name]), built, schedule=schedule, **given)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ring", "complete", "random_undirected"])
@pytest.mark.parametrize("name", sorted(set(PEERS) - {"rasgp"}))
def test_every_algorithm_of_peers(name, kind):
    assert_same_when_hurried(brief(PEERS[name]), clients(), network=Network(kind=kind), batch_size=3)


@pytest.mark.parametrize("schedule", [None, Schedule(power=0.5, offset=1.0)])
@pytest.mark.parametrize(("kind", "upper"), [("base", "shared"), ("random_directed", "private")])
def test_peers_whose_networks_change(kind, upper, schedule):
    given = {"network": Network(kind=kind), "batch_size": 3, "schedule": schedule}
    assert_same_when_hurried(brief(PEERS["hgp"]), clients(upper=upper), **given)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(SERVER) - {*HOST, *FRESH}))
def test_every_algorithm_in_pairs(name, in_pairs):
    algorithm = brief(SERVER[name])
    graphs = assert_same_when_hurried(algorithm, clients(), cohort=half(algorithm), batch_size=3, num_iterations=40)
    assert bool(pairs(graphs)) == (not any(walk_draws(graphs))), name


def walk_draws(graphs):
    """Draws of the server, of which an outer iteration depends."""
    return [draws for _, draws in graphs._redraws]


@pytest.mark.parametrize("name", ["fedbio", "adafbio", "fedbioacc"])
@pytest.mark.parametrize(("upper", "lower"), [("private", "global"), ("shared", "local")])
def test_pairs_with_private_x_memory_a_schedule_and_epochs(name, upper, lower, in_pairs):
    built, schedule = clients(upper=upper, lower=lower), Schedule(power=0.5, offset=1.0)
    given = {"cohort": Cohort(0.5), "batch_size": 3, "sampling": "epochs"}
    graphs = assert_same_when_hurried(brief(SERVER[name]), built, schedule=schedule, num_iterations=34, **given)
    assert [one.span for one in pairs(graphs)] == [2]


@pytest.mark.parametrize(
    ("length", "num_local_steps", "spans"),
    [(10_000, 1, {2, 4, 8, 16, 32}), (0, 1, {2, 4, 8}), (400, 1, {2, 4, 8}), (10_000, 40, {2, 4, 8}), (400, 40, {2})],
)
def test_a_graph_of_several_is_recorded_where_the_run_is_long_enough(length, num_local_steps, spans):
    """Twice as many cost four times as many calls of phases and derivatives, and save half as many launches."""
    algorithm = FedAvg(num_local_steps=num_local_steps)
    graphs = assert_same_when_hurried(
        algorithm, clients(), batch_size=3, num_iterations=400, looks=80, length=length
    )  # fmt: skip
    assert {one.span for one in pairs(graphs)} == spans


@pytest.mark.parametrize("name", ["adafbio", "fedbioacc"])
def test_a_longer_graph_that_cannot_be_recorded_leaves_rows_where_the_short_one_reads_them(name, in_pairs, monkeypatch):
    capture = ServerIterations._capture

    def fails(self, state, walk, moving):
        found = capture(self, state, walk, moving)
        if len(walk.algorithms) > 1:
            raise RuntimeError("out of memory")
        return found

    monkeypatch.setattr(ServerIterations, "_capture", fails)
    built = clients(upper="private")
    graphs = assert_same_when_hurried(brief(SERVER[name]), built, cohort=Cohort(0.5), batch_size=3, num_iterations=34)
    assert graphs.replayed > 20
    assert pairs(graphs) == []


def test_a_longer_graph_does_not_make_a_run_long_enough_for_the_compiler(in_pairs, monkeypatch):
    """What counts is the work of the whole run, which the number of outer iterations in a graph does not change."""
    asked = []
    monkeypatch.setattr(Oracle, "compile_from_now", lambda self, device: asked.append(device))

    def run(most):
        monkeypatch.setattr(outer_capture, "_COMPILED", most)
        fed = engine(FedAvg(num_local_steps=2), clients(), captured=True, batch_size=3)
        expect(fed, 60)
        hurry(fed, FedAvg(num_local_steps=2), num_iterations=60, looks=30)
        assert pairs(fed.graphs)
        [graph] = fed.graphs._kept.values()
        return 60 * fed.graphs._cost(graph.traced.script)[1]

    work = run(math.inf)
    run(work + 1)
    assert asked == []
    run(work)
    assert len(asked) == 2  # for one outer iteration, and for two


@pytest.mark.parametrize("num_rounds", [None, 100])
def test_graphs_of_several_are_used_to_the_end(num_rounds, monkeypatch):
    """Rounds that end the run earlier count as its length: then fewer are worth a graph."""
    spans, launch = [], ServerIterations._launch
    monkeypatch.setattr(
        ServerIterations, "_launch", lambda self, graph, *rest: spans.append(graph.span) or launch(self, graph, *rest)
    )
    algorithm = FedAvg(num_local_steps=10)
    fed = engine(algorithm, clients(), captured=True, batch_size=3)
    expect(fed, 400, num_rounds)
    hurry(fed, algorithm, num_iterations=400, looks=400)
    most = max(spans)
    assert most == (4 if num_rounds is None else 2)
    assert set(spans[spans.index(most) + 1 : -2]) == {most}


def test_as_many_as_rows_can_be_saved_for(monkeypatch):
    algorithm = AdaFBiO()
    for most, saved in ((3, 2**28), (16, 1)):  # bytes of clients' rows, and of new states below
        monkeypatch.setattr(launches, "IN_FLIGHT", most)
        monkeypatch.setattr(launches, "SAVED", saved)
        fed = engine(algorithm, clients(), captured=True, batch_size=3, cohort=Cohort(0.5))
        seen = sorted(hurry(fed, algorithm, num_iterations=30, looks=30))
        ahead = max(later - one for one, later in itertools.pairwise(seen))
        assert ahead == (most if saved > 1 else 1)


@pytest.mark.parametrize("span", [1, 2])
@pytest.mark.parametrize("algorithm", [AdaFBiO(), FedBiO(num_local_steps=2), FedNest(num_local_steps=2, num_terms=2)])
def test_values_that_go_wrong_among_launched_ones_name_client_iteration_and_costs(
    algorithm, span, in_pairs, monkeypatch
):
    """Later replays are undone: memory, costs and the error are those of a run that looks at every state."""
    monkeypatch.setattr(outer_graphs, "_SPAN", span)
    found = []

    def spoilt(fed, iteration):
        if iteration in range(26, 31):
            fed.host.data.fields["train"]["c"][-3:] = float("inf")

    for captured in (False, True):
        fed = engine(algorithm, clients(), captured=captured, batch_size=3, cohort=Cohort(0.34))
        with pytest.raises(NonFiniteError, match=r"client \d returned a value of") as caught:
            (hurry if captured else travel)(fed, algorithm, num_iterations=90, between=spoilt)
        memory = fed.host.memory
        found.append((str(caught.value), fed.iteration, fed.ledger.totals(), memory.rows, memory.written))
    assert fed.graphs.replayed
    assert bool(pairs(fed.graphs)) == (span == 2 and not isinstance(algorithm, FedNest))
    assert found[0][:3] == found[1][:3]
    torch.testing.assert_close(found[1][3:], found[0][3:], rtol=1e-11, atol=1e-12, equal_nan=True)


def test_as_many_as_new_states_have_room(monkeypatch):
    algorithm, built = brief(PEERS["hgp"]), clients()
    for saved, ahead in ((2**28, 16), (1, 1)):
        monkeypatch.setattr(launches, "SAVED", saved)
        fed = engine(algorithm, built, captured=True, batch_size=3, network=Network(kind="ring"))
        seen = sorted(hurry(fed, algorithm, num_iterations=40, looks=40))
        assert max(later - one for one, later in itertools.pairwise(seen)) == ahead


def test_rounds_of_peers_end_a_run_and_decide_its_measurements():
    algorithm, built, runs = brief(PEERS["hgp"]), clients(), []
    for captured in (False, True):

        def captures(self, *given, captured=captured, make=PeerSimulation.__init__, **options):
            make(self, *given, **options)
            self.host.captures = cuda_graphs.Captures(self.host) if captured else None
            self.graphs = PeerIterations(self) if captured else None

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PeerSimulation, "__init__", captures)
            found = solve(*built, algorithm, num_rounds=400, batch_size=3, network=Network(kind="ring"))
        runs.append((found.iteration, [(row["iteration"], row["rounds"]) for row in found.rows]))
    assert runs[0] == runs[1]
    assert len(runs[0][1]) > 10


def test_peers_whose_values_go_wrong_return_to_the_steps_of_their_networks():
    """Error, costs and steps of the networks are those of a run that looks at every state."""
    algorithm, found = brief(PEERS["hgp"]), []
    for captured in (False, True):
        fed = engine(algorithm, clients(), captured=captured, batch_size=3, network=Network(kind="random_directed"))

        def spoilt(fed, iteration):
            if iteration in range(16, 21):
                fed.host.data.fields["train"]["c"][-3:] = float("inf")

        with pytest.raises(NonFiniteError) as caught:
            (hurry if captured else travel)(fed, algorithm, num_iterations=40, between=spoilt)
        found.append((str(caught.value), fed.iteration, fed.ledger.totals(), fed.time))
    assert fed.graphs.replayed
    assert found[0] == found[1]


@dataclass(frozen=True, kw_only=True)
class Growing(FedAvg):
    """Rows of clients stay finite; a value that the server computes does not."""

    class State(NamedTuple):
        x: Any
        y: Any
        scale: Any

    def init(self, fed):
        x, y = fed.initial()
        return self.State(x, y, y.new_ones(3))

    def round(self, fed, state):
        new = fed.mean(self.local_steps, x=state.x, y=state.y)
        return self.State(state.x, new.y, state.scale * 1e10)


def test_a_value_of_the_server_that_is_not_finite_ends_the_run_at_its_outer_iteration():
    found = []
    for captured in (False, True):
        fed = engine(Growing(), clients(), captured=captured, batch_size=3)
        with pytest.raises(
            NonFiniteError, match="the server's 'scale' is not finite after outer iteration 31"
        ) as caught:
            hurry(fed, Growing(), num_iterations=60, looks=8)
        found.append((str(caught.value), fed.iteration, fed.ledger.totals()))
    assert fed.graphs.replayed
    assert found[0] == found[1]


def test_a_run_measures_saves_and_ends_where_it_did(monkeypatch, tmp_path):
    def with_graphs(self, *given, **options):
        usual(self, *given, **options)
        self.host.captures = cuda_graphs.Captures(self.host)
        self.graphs = ServerIterations(self)
        made.append(self)

    made, usual = [], Simulation.__init__
    given = {"batch_size": 3, "cohort": Cohort(0.5), "dtype": torch.float64}
    lengths = [{"num_iterations": 47, "measure_every": 9}, {"num_rounds": 61, "measure_every": 10}, {"num_rounds": 83}]
    for number, length in enumerate(lengths):
        for algorithm in (FedBiO(), FedNest(num_local_steps=2, num_terms=2)):
            monkeypatch.setattr(Simulation, "__init__", usual)
            expected = solve(*clients(), algorithm, **length, **given)
            monkeypatch.setattr(Simulation, "__init__", with_graphs)
            folder = tmp_path / f"{algorithm.name()}{number}"
            got = solve(*clients(), algorithm, **length, **given, record=folder, checkpoint_every=7)
            keys = ("iteration", "rounds", "floats_up", "floats_down", "samples")
            assert [[row[key] for key in keys] for row in got.rows] == [
                [row[key] for key in keys] for row in expected.rows
            ]
            torch.testing.assert_close(got.x, expected.x, rtol=1e-11, atol=1e-12)
            assert got.ledger == expected.ledger
    assert all(fed.graphs.replayed for fed in made)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling derivatives needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself
def test_a_long_run_compiles_its_derivatives_and_a_short_one_does_not():
    algorithm, built, found = FedBiO(), clients(), {}
    for left in (0, 10, 10**6):
        fed = engine(algorithm, built, captured=True, batch_size=3)
        expect(fed, left)
        found[left] = hurry(fed, algorithm, num_iterations=20)
        assert fed.host.oracle.compiles == (left == 10**6)
        assert refusals(fed) == {}
        assert fed.graphs.replayed
    torch.testing.assert_close(found[10**6][20], found[0][20], rtol=1e-10, atol=1e-11)


def test_without_a_compiler_a_long_run_goes_on(monkeypatch):
    def fails(run):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(evaluation, "compiled", fails)
    fed = engine(FedBiO(), clients(), captured=True, batch_size=3)
    expect(fed, 10**6)
    hurry(fed, FedBiO(), num_iterations=12)
    assert not fed.host.oracle.compiles
    assert fed.graphs.replayed
