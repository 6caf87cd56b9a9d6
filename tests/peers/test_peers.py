"""Peers as threads of one process: equality with the simulator, losses, restarts and records."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fedbilevel.algorithms.sparkle import Sparkle
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.errors import CheckpointError, NetworkError, NonFiniteError, PlanError, QuorumError, SettingError
from fedbilevel.federation.algorithm import PeerAlgorithm
from fedbilevel.federation.averaging import Message, RunningSums, parked
from fedbilevel.federation.network import Network
from fedbilevel.oracle.hypergradient import lower_solution
from fedbilevel.oracle.population import Population
from fedbilevel.peers.engine import Peer
from fedbilevel.peers.exchange import AveragingStatus, Exchange
from fedbilevel.peers.plan import PeerPlan, plan_of
from fedbilevel.peers.settling import Settling, all_settled
from fedbilevel.peers.transport import Faults, MemoryNetwork
from fedbilevel.peers.wire import SKETCH
from fedbilevel.runs.record import Record
from fedbilevel.runs.result import Result
from fedbilevel.runs.solve import solve
from fedbilevel.tasks.few_shot_episodes import FewShotEpisodes
from fedbilevel.tasks.influence import Influence
from fedbilevel.tasks.personalisation import Personalisation
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.task import Task
from support.numeric.yardstick import relative
from support.peers.threads import Threads

pytestmark = [pytest.mark.wait, pytest.mark.slow]

DIRECTED = {"kind": "random_directed", "seed": 1}
SMALL = {"num_clients": 4, "dim_upper": 2, "dim_lower": 3}
HGP = {"name": "hgp", "num_terms": 3, "num_lower_steps": 2}


def content(algorithm: dict[str, Any], task: Task | None = None, **more: Any) -> dict[str, Any]:
    task = task or Quadratic(**SMALL)
    options = {"strategy": "loop", "dtype": "float64", "network": DIRECTED, **more.pop("options", {})}
    settings = {name: value for name, value in task.asdict().items() if value not in (None, "")}
    return {
        "name": "t",
        "task": {"name": task.name(), **settings},
        "algorithm": algorithm,
        "num_iterations": 3,
        "measure_every": 1,
        "options": options,
        "suspect": 3.0,
        "join_deadline": 10.0,
        **more,
    }


def simulated(threads: Threads, built: Any) -> Result:
    own = {name: value for name, value in threads.plan.keywords().items() if value is not None}
    return solve(
        built.problem,
        built.clients,
        threads.plan.built_algorithm(),
        residuals=False,
        num_iterations=threads.plan.num_iterations,
        measure_every=1,
        **own,
    )


def check_same(threads: Threads, result: Result, *, rounding: float = 0.0) -> None:
    for number, mine in threads.results.items():
        for name, rows in result.state._asdict().items():
            own = rows[number][: mine.state._asdict()[name].shape[1]]
            assert torch.allclose(mine.state._asdict()[name][0], own, rtol=0, atol=rounding * float(own.abs().max())), (
                number,
                name,
            )


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ({"name": "sgp"}, {}),
        (HGP, {"averaging": {"num_steps": 3}}),
        ({**HGP, "optimiser": "adam", "lower_solver": "mix"}, {"averaging": {"num_steps": 3, "weights": "kept"}}),
        ({**HGP, "minibatches": "shared"}, {"batch_size": 2, "averaging": {"kind": "exact"}}),
        (
            {**HGP, "lower_solver": "mix"},
            {"network": {"kind": "torus"}, "averaging": {"kind": "gossip", "num_steps": 3}, "dtype": "float32"},
        ),
        ({"name": "sparkle"}, {"network": {"kind": "ring"}}),
        (
            {"name": "sparkle", "correction": "extra"},
            {"network": {"kind": "erdos_renyi", "probability": 0.9}, "batch_size": 3},
        ),
        (
            {"name": "sparkle", "exchange": "push", "correction": "none"},
            {"network": {"kind": "exponential"}, "dtype": "float32"},
        ),
    ],
    ids=["sgp", "push_sum", "kept", "exact", "gossip", "ring", "extra", "exponential"],
)
def test_synchronous_peers_equal_the_simulator_bit_for_bit(tmp_path, algorithm, options):
    built = Quadratic(**SMALL).build()
    threads = Threads(tmp_path, content(algorithm, options=options), built.clients)
    results, reference = threads.run(), simulated(threads, built)
    check_same(threads, reference)
    for name, total in reference.ledger.items():
        assert (max if name == "rounds" else sum)(result.ledger[name] for result in results) == total, name


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ({**HGP, "minibatches": "shared"}, {"averaging": {"num_steps": 2}}),
        ({"name": "sparkle"}, {"network": {"kind": "ring"}}),
    ],
    ids=["hgp", "sparkle"],
)
def test_random_numbers_of_samples_are_those_of_the_simulator_at_every_peer(tmp_path, algorithm, options):
    """Batches are whole, so that the episodes that the losses draw are all that the seed decides."""
    task = FewShotEpisodes(num_clients=3, num_episodes=1, num_queries=2, num_held_out=2, num_filters=2)
    built = task.build()
    assert built.problem.draws
    threads = Threads(tmp_path, content(algorithm, task, options={**options, "seed": 5}), built.clients)
    threads.run()
    reference = simulated(threads, built)
    check_same(threads, reference)
    threads.plan = plan_of(content(algorithm, task, options={**options, "seed": 6}), 3)
    assert not torch.equal(simulated(threads, built).state.x, reference.state.x)


@pytest.mark.parametrize(
    ("task", "algorithm", "num_classes"),
    [
        (Influence(num_clients=3), {"name": "hgp", "optimiser": "none", "num_lower_steps": 5, "num_terms": 4}, 2),
        (
            Personalisation(num_clients=3, share=0.05, width=0.2),
            {"name": "hgp", "num_lower_steps": 3, "num_terms": 2, "lr_system": 0.05},
            10,
        ),
        (Quadratic(**SMALL, client_weights="by_samples"), HGP, None),
        (Quadratic(**SMALL, upper="private"), HGP, None),
        (Quadratic(**SMALL, lower="local"), HGP, None),
    ],
    ids=["influence", "personalisation", "weighted", "private", "local"],
)  # fmt: skip
def test_tasks_and_scopes_between_peers_equal_the_simulator(tmp_path, task, algorithm, num_classes):
    built = task.build()
    threads = Threads(tmp_path, content(algorithm, task, num_iterations=2, num_classes=num_classes), built.clients)
    threads.run()
    # a simulation pads clients to the same number of samples, so some matrix products round differently
    check_same(threads, simulated(threads, built), rounding=1e-13 if isinstance(task, Personalisation) else 0.0)


def test_outer_iteration_starts_after_all_have_stored_the_previous_one(tmp_path, monkeypatch):
    """Two stored states per peer are enough only because of this."""
    waited, wait = [], Exchange.wait_until_finished

    def noted(exchange: Exchange, iteration: int, stop: Callable[[], bool]) -> None:
        wait(exchange, iteration, stop)
        if iteration == 0:  # a peer computes its start again, so others need not wait until it is stored
            return
        stored = [Record(tmp_path / f"p{number}").load()[1]["iteration"] for number in range(4)]
        waited.append((exchange._outbox.me, iteration, min(stored) >= iteration))

    monkeypatch.setattr(Exchange, "wait_until_finished", noted)
    Threads(tmp_path, content({"name": "sgp"}), Quadratic(**SMALL).build().clients).run()
    assert sorted(waited) == sorted((me, iteration, True) for me in range(4) for iteration in range(1, 4))


def test_lost_doubled_and_late_rows_do_not_change_the_result(tmp_path):
    built = Quadratic(**SMALL).build()
    threads = Threads(
        tmp_path, content({"name": "sgp"}), built.clients, Faults(loss=0.02, doubled=0.2, delay=0.02, seed=3)
    )
    threads.run()
    check_same(threads, simulated(threads, built))


def test_robust_average_with_lost_messages_equals_the_exact_one(tmp_path):
    built = Quadratic(**SMALL).build()
    plan = content({**HGP, "lower_solver": "mix"}, num_iterations=1, options={"averaging": {"kind": "robust"}})
    threads = Threads(tmp_path, plan, built.clients, Faults(loss=0.3, doubled=0.2, delay=0.02))
    results = threads.run()
    exact = {**plan, "options": {**plan["options"], "averaging": {"kind": "exact"}}}
    own = {name: value for name, value in plan_of(exact, 4).keywords().items() if value is not None}
    reference = solve(
        built.problem, built.clients, threads.plan.built_algorithm(), residuals=False, num_iterations=1, **own
    )
    for number, result in enumerate(results):
        assert relative(result.state.h[0], reference.state.h[number]) < 1e-10


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 1e-5), ("float64", 1e-10)])
@pytest.mark.parametrize(
    "averaging",
    [{}, {"averaging": {"kind": "robust"}}, {"averaging": {"kind": "robust", "tolerance": 1e-11}}],
    ids=["left out", "kind", "both"],
)
def test_plan_with_loss_gives_the_same_result_in_the_simulator(tmp_path, averaging, dtype, rounding):
    built = Quadratic(**SMALL).build()
    plan = content(
        {**HGP, "lower_solver": "mix"},
        num_iterations=1,
        options={"network": {**DIRECTED, "loss": 0.3}, "dtype": dtype, **averaging},
    )
    threads = Threads(tmp_path, plan, built.clients)
    threads.run()
    check_same(threads, simulated(threads, built), rounding=rounding)


# ---- losses and restarts -------------------------------------------------------------------------


def until(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def dies(threads: Threads, victim: int, *, after: int) -> None:
    """Cut the victim off after this number of its data messages."""
    make, left = threads.network.transport, [after]

    def transport(peer: int) -> Any:
        made = make(peer)
        send = made.send

        def counted(to: int, head: bytes, body: Any = b"", **marks: Any) -> None:
            left[0] -= head[4] == 2 and peer == victim
            if left[0] == 0 and peer == victim:
                threads.network.gone.add(victim)
                left[0] = -1
            send(to, head, body, **marks)

        made.send = counted
        return made

    threads.network.transport = transport  # type: ignore[method-assign]


@pytest.mark.parametrize("after", [3, 17, 40])
def test_peer_restarted_at_once_does_not_change_the_result(tmp_path, after):
    built = Quadratic(**SMALL).build()
    threads = Threads(tmp_path, content({"name": "sgp", "num_lower_steps": 4}, num_iterations=8), built.clients)
    dies(threads, 2, after=after)
    for number in range(4):
        threads.start(number)
    until(lambda: 2 in threads.network.gone)
    threads.start(2)
    threads.join()
    check_same(threads, simulated(threads, built))
    for number in range(4):  # every outer iteration once, although some were restarted
        assert [row["iteration"] for row in Record(tmp_path / f"p{number}").rows()] == list(range(9))


def test_stopped_run_resumes_with_all_peers(tmp_path):
    built = Quadratic(**SMALL).build()
    threads = Threads(tmp_path, content(HGP, num_iterations=4), built.clients)
    for number in range(4):
        threads.start(number, content(HGP, num_iterations=2))  # another plan
    threads.join()
    threads.start(0)
    threads.start(1, content(HGP, num_iterations=5))
    with pytest.raises(PlanError, match="p1 has another plan"):
        threads.join([0])
    with pytest.raises(PlanError, match="p0 has another plan"):
        threads.join([1])
    threads.network = MemoryNetwork(4)  # without the messages of the ended peers
    for number in range(4):
        threads.start(number)
    threads.join()
    check_same(threads, simulated(threads, built))


def test_peer_that_was_gone_joins_the_continued_run(tmp_path):
    built = Quadratic(**SMALL).build()
    threads = Threads(
        tmp_path, content({"name": "sgp", "num_lower_steps": 2}, num_iterations=120, suspect=0.8), built.clients
    )
    dies(threads, 1, after=20)
    for number in range(4):
        threads.start(number)
    until(lambda: any("3 of 4 peers begin" in line for line in threads.lines))
    done = lambda: len(Record(tmp_path / "p0").rows())
    before = done()
    until(lambda: done() > before + 3)
    threads.start(1)
    threads.join(timeout=90)
    rows = Record(tmp_path / "p0").rows()
    members = [row["members"] for row in rows]
    assert set(members) == {3, 4}
    assert members[0] == members[-1] == 4
    assert [row["iteration"] for row in rows] == list(range(121))
    weights = sum(float(threads.results[number].state.w) for number in range(4))
    assert abs(weights - 4) < 1e-9  # each new group starts with new weights
    late = Record(tmp_path / "p1").rows()
    assert late[-1]["iteration"] == 120
    assert len(late) < 121  # it was absent
    named = [json.loads(line)["members"] for line in (tmp_path / "p0" / "peers.jsonl").read_text().splitlines()]
    assert ["p0", "p2", "p3"] in named
    assert named[-1] == ["p0", "p1", "p2", "p3"]


@pytest.mark.parametrize("again", [True, False], ids=["regrouped", "not regrouped"])
def test_survivors_solve_their_own_problem_only_after_regrouping(again):
    """Weights and tracked directions that a lost peer held would leave a permanent bias."""
    built = Quadratic(**SMALL).build()
    sparkle = Sparkle(exchange="push", lr_upper=0.05, lr_lower=0.1, lr_system=0.1)
    directed = Network(**DIRECTED)
    all_four = solve(
        built.problem, built.clients, sparkle, residuals=False, num_iterations=30, network=directed, dtype=torch.float64
    )
    left = built.clients[:3]
    peers = PeerSimulation(sparkle, built.problem, left, network=directed, dtype=torch.float64)
    state = sparkle.State(*(rows[:3] for rows in all_four.state))
    with torch.no_grad():
        state = sparkle.regrouped(peers, state) if again else state
        for iteration in range(2000):
            peers.begin(iteration)
            state = sparkle.round(peers, state)
    population = Population(built.problem, left, dtype=torch.float64)
    off = relative(state.y[0], lower_solution(population, state.x[0]))
    assert off < 1e-10 if again else off > 1e-3


def test_run_below_the_quorum_stops_and_keeps_its_record(tmp_path):
    built = Quadratic(**SMALL).build()
    threads = Threads(
        tmp_path, content({"name": "sgp"}, num_iterations=200, quorum=4, suspect=0.8, join_deadline=1.5), built.clients
    )
    dies(threads, 1, after=60)
    for number in range(4):
        threads.start(number)
    with pytest.raises(QuorumError, match=r"4 of 4 are needed; missing: .*p1.*: start them"):
        threads.join([0], timeout=30)
    assert 0 < Record(tmp_path / "p0").load()[1]["iteration"] < 200


def test_others_continue_at_once_after_a_peer_fails(tmp_path):
    built = Quadratic(**SMALL).build()
    threads = Threads(tmp_path, content({"name": "sgp"}, num_iterations=30, suspect=600.0), built.clients)

    def fails(now: Any) -> None:
        if now.iteration == 5:
            raise NonFiniteError("its own trouble")

    for number in range(4):
        threads.start(number, callbacks=[fails] if number == 2 else [])
    threads.join([0, 1, 3])  # long before the silence limit
    with pytest.raises(NonFiniteError, match="its own trouble"):
        threads.join([2])
    assert threads.results[0].rows[-1]["members"] == 3


def test_peer_with_another_problem_is_refused(tmp_path):
    clients = Quadratic(**SMALL).build().clients
    wide = Quadratic(**{**SMALL, "dim_lower": 5})
    threads = Threads(tmp_path, content({"name": "sgp"}, join_deadline=5.0), [*clients[:3], wide.build().clients[3]])
    for number in range(3):
        threads.start(number)
    threads.start(3, content({"name": "sgp"}, wide, join_deadline=5.0))
    for thread in threads.threads.values():
        thread.join(60)
    # The first peer that detects the difference leaves; the others may only see that it is missing.
    kinds = {PlanError: "has another plan", QuorumError: "all 4 are needed; missing"}
    assert sorted(threads.errors) == [0, 1, 2, 3]
    for error in threads.errors.values():
        assert re.search(kinds[type(error)], str(error))
    assert PlanError in map(type, threads.errors.values())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"algorithm": {"name": "fedbio"}}, "fedbio has a server, and peers have none: choose one of hgp"),
        ({"quorum": 5}, "the quorum is 5, but there are 4 peers"),
        ({"suspect": 0.0}, "suspect is 0.0, expected seconds above 0"),
        ({"on_change": "stop"}, "on_change of the plan is 'stop', expected 'restart' or 'continue'"),
        ({"on_crash": "pray"}, "on_crash of the plan is 'pray'"),
        ({"on_change": "continue"}, "exchanges rows step by step, and a peer that leaves breaks the exchange"),
        (
            {"options": {"averaging": {"kind": "robust", "num_steps": 5}}},
            "ends when all agree, not after a number of steps",
        ),
        ({"options": {"averaging": {"tolerance": 1e-3}}}, "no peer detects whether all agree"),
        ({"options": {"network": {"max_delay": 3}}}, "delays messages or lets peers sleep"),
        ({"algorithm": {"name": "rasgp"}}, "rasgp keeps running sums of every edge, which only a simulation does"),
        ({"options": {"network": {"upper_kind": "ring"}}}, "gives x a network of its own"),
        ({"options": {"network": {"kind": "file", "file": "a.json"}}}, "nothing in a plan may be a path"),
        ({"options": {"device": "cuda"}}, "the plan sets device, which is each participant's own choice"),
        ({"options": {"fraction": 0.5}}, "the plan sets fraction"),
        ({"option": {}}, "There is no key in the plan named 'option'. Did you mean 'options'?"),
        ({"options": {"averaging": {"kind": "gossip"}}}, "gossip needs shares that sum to one at the receiver too"),
        ({"options": {"network": {"loss": 0.3}}}, "pushes without running sums"),
    ],
)  # fmt: skip
def test_invalid_plan_is_refused(change, text):
    plan = content(HGP)
    plan = {**plan, **change, "options": {**plan["options"], **change.get("options", {})}}
    with pytest.raises((PlanError, SettingError, LookupError), match=text.replace("(", r"\(").replace("?", r"\?")):
        plan_of(plan, 4)


def test_peer_engine_shares_its_verbs_with_the_simulator():
    """Verbs, averages and checkpoints are the same functions."""
    for name in ("push", "gossip", "mix", "steps", "initial", "zeros", "travels", "_averaged", "_travelling", "_apart"):
        assert getattr(Peer, name) is getattr(PeerSimulation, name), name


# ---- foreign records -----------------------------------------------------------------------------


def finished(folder: Any, algorithm: dict[str, Any], **more: Any) -> Threads:
    threads = Threads(folder, content(algorithm, **more), Quadratic(**SMALL).build().clients)
    threads.run()
    return threads


def test_old_record_of_one_peer_is_refused(tmp_path):
    threads = finished(tmp_path, {"name": "sgp"}, num_iterations=2)
    for number in (0, 1, 2):
        shutil.rmtree(tmp_path / f"p{number}")
        threads.start(number)
    threads.start(3)
    for number in range(4):
        with pytest.raises(PlanError, match=r"p3 would resume a run of which .* have no record"):
            threads.join([number])


def test_records_of_two_runs_of_the_same_plan_are_refused(tmp_path):
    finished(tmp_path / "old", {"name": "sgp"}, num_iterations=2)
    threads = finished(tmp_path / "new", {"name": "sgp"}, num_iterations=2)
    shutil.rmtree(tmp_path / "new" / "p3")
    shutil.copytree(tmp_path / "old" / "p3", tmp_path / "new" / "p3")
    for number in range(4):
        threads.start(number)
    with pytest.raises(PlanError, match="the records of p0, p1, p2, p3 are of different runs of the same plan"):
        threads.join()


def test_record_of_another_peer_or_run_is_refused(tmp_path):
    threads = finished(tmp_path, {"name": "sgp"}, num_iterations=1)
    (tmp_path / "p0").rename(tmp_path / "aside")
    shutil.copytree(tmp_path / "p1", tmp_path / "p0")
    before = {path: path.read_bytes() for path in (tmp_path / "p0").iterdir()}
    threads.start(0)
    with pytest.raises(CheckpointError, match="is the record of p1, not of p0: name this peer's own folder"):
        threads.join([0])
    assert {path: path.read_bytes() for path in (tmp_path / "p0").iterdir()} == before
    shutil.rmtree(tmp_path / "p0")
    built = Quadratic(**SMALL).build()
    solve(
        built.problem,
        built.clients,
        threads.plan.built_algorithm(),
        residuals=False,
        num_iterations=1,
        record=tmp_path / "p0",
    )
    threads.start(0)
    with pytest.raises(CheckpointError, match="holds a run that was not between peers"):
        threads.join([0])
    shutil.rmtree(tmp_path / "p0")
    (tmp_path / "aside").rename(tmp_path / "p0")
    threads.clients = [threads.clients[1], *threads.clients[1:]]
    threads.start(0)
    with pytest.raises(CheckpointError, match="is the record of a run with other data"):
        threads.join([0])


def test_lone_peer_with_a_finished_run_names_peer_collect(tmp_path):
    threads = finished(tmp_path, {"name": "sgp"}, num_iterations=1, join_deadline=1.0)
    threads.start(0)
    says = "this peer has finished all 1 outer iterations, so perhaps all peers have: peer collect"
    with pytest.raises(QuorumError, match=f"missing: p1, p2, p3: .*; {says}"):
        threads.join([0])


def test_record_changed_by_another_process_is_refused(tmp_path):
    """p3 has to go back to a state that existed when it introduced itself."""
    threads = finished(tmp_path, {"name": "sgp"}, num_iterations=3, join_deadline=2.0)
    Record(tmp_path / "p0", keeps_before=True).go_back()

    class Lines(list):
        def append(self, line):
            if line.startswith("p3: "):  # its first line names the members
                copied = shutil.copy(tmp_path / "p3" / "checkpoint.safetensors", tmp_path / "copied")
                copied.replace(tmp_path / "p3" / "checkpoint-before.safetensors")  # p3 may read at any time

    threads.lines = Lines()
    for number in range(4):
        threads.start(number)
    with pytest.raises(
        CheckpointError,
        match=r"the others resume from outer iteration 2, and .*p3 holds 3 and -1: start this peer with another folder",
    ):
        threads.join([3])
    threads.join([0, 1, 2])


def test_peers_that_never_agree_raise(tmp_path):
    plan = content(
        {**HGP, "lower_solver": "mix"},
        num_iterations=1,
        join_deadline=4.0,
        options={"averaging": {"kind": "robust", "max_steps": 1}},
    )
    threads = Threads(tmp_path, plan, Quadratic(**SMALL).build().clients)
    for number in range(4):
        threads.start(number)
    for thread in threads.threads.values():
        thread.join(60)
    # The first peer that gives up leaves; the others may only see that too few remain.
    kinds = {
        NetworkError: r"after 1 wakes the peers do not agree up to .*: raise the tolerance or max_steps",
        QuorumError: r"present after 4 s, 3 of 4 are needed",
    }
    assert sorted(threads.errors) == [0, 1, 2, 3]
    for error in threads.errors.values():
        assert re.search(kinds[type(error)], str(error))
    assert NetworkError in map(type, threads.errors.values())


# ---- robust averages -----------------------------------------------------------------------------


def averaged(tmp_path: Any, rows: torch.Tensor, *, seed: int = 0, **faults: Any) -> torch.Tensor:
    """Values of all peers after one robust average of these rows."""

    class Given(PeerAlgorithm):
        uses = ("mix",)
        lower_space = ("y",)

        class State(NamedTuple):
            x: torch.Tensor
            y: torch.Tensor

        def init(self, peers: Any) -> State:
            return self.State(*peers.initial())

        def round(self, peers: Any, state: State) -> State:
            return self.State(state.x, peers.mix(y=rows[peers.clients.ids]))

    task = Quadratic(num_clients=len(rows), dim_upper=1, dim_lower=rows.shape[1])
    plan = content(
        {**HGP, "lower_solver": "mix"}, task, num_iterations=1, options={"seed": seed, "averaging": {"kind": "robust"}}
    )
    threads = Threads(tmp_path, plan, task.build().clients, Faults(**faults))

    class GivenPlan(PeerPlan):
        def built_algorithm(self) -> PeerAlgorithm:
            return Given()

    threads.plan = GivenPlan(**vars(threads.plan))
    return torch.cat([result.state.y for result in threads.run()])


@pytest.mark.parametrize("kind", ["one large", "one row alone", "all zero"])
def test_rows_of_very_different_norms_are_averaged_exactly(tmp_path, kind):
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = rows * {"one large": 1e-6, "one row alone": 0.0, "all zero": 0.0}[kind]
    rows[0] = 0.0 if kind == "all zero" else torch.arange(1.0, 5.0)
    found = averaged(tmp_path, rows, loss=0.2)
    assert float((found - rows.mean(0)).abs().max()) < 1e-11


@pytest.mark.parametrize("width", [2, 90])
def test_sketch_detects_differences_that_cancel_in_a_sum(tmp_path, width):
    """With seed 48 the entries (1, -1) cancel in a sketch with one table."""
    rows = torch.zeros(4, width, dtype=torch.float64)
    rows[:, 0], rows[:, -1] = torch.arange(1.0, 5.0), -torch.arange(1.0, 5.0)
    assert float((averaged(tmp_path, rows, seed=48) - rows.mean(0)).abs().max()) < 1e-11


def test_average_continues_while_an_earlier_message_is_in_transit():
    sketch = np.append(np.ones(SKETCH - 1), 10.0)
    status = lambda got, settled, values=sketch: AveragingStatus(np.array(got), np.array(settled), values)
    ended = lambda one, other, limit=1e-6: all_settled(
        {0: one, 2: other, 1: status([0, 0, 0], [9, 9, 9])}, [0, 2], limit
    )
    assert ended(status([0, 0, 5], [0, 7, 3]), status([3, 0, 0], [5, 7, 0]))  # p1 is not a member
    # The third message of p0 to p2 has not arrived.
    assert not ended(status([0, 0, 5], [0, 7, 3]), status([2, 0, 0], [5, 7, 0]))
    assert not ended(status([0, 0, 4], [0, 7, 3]), status([3, 0, 0], [5, 7, 0]))
    off = sketch.copy()
    off[0] += 1e-4
    assert not ended(status([0, 0, 5], [0, 7, 3]), status([3, 0, 0], [5, 7, 0], off))
    # The limit is relative to the largest row, which is 10.
    assert ended(status([0, 0, 5], [0, 7, 3]), status([3, 0, 0], [5, 7, 0], off), 1e-5)
    assert not all_settled({0: status([0, 0, 5], [0, 7, 3])}, [0, 2], 1.0)  # no status of p2


def test_value_is_settled_since_the_wake_of_its_last_move():
    sums, watch = RunningSums(0, torch.tensor([1.0])), Settling(3)
    at = lambda value: watch.look(sums, np.append(np.full(SKETCH - 1, value), 1.0), 1e-3)
    sums.wake([1])
    assert at(1.0).settled.tolist() == [0, 1, 0]
    sums.wake([1, 2])
    assert at(1.0 + 1e-5).settled.tolist() == [0, 1, 0]
    assert at(1.1).settled.tolist() == [0, 2, 1]
    sums.wake([2])
    assert at(1.1).settled.tolist() == [0, 2, 1]
    assert at(1.1 + 1e-3).settled.tolist() == [0, 2, 2]  # far from the anchor, although near the last value
    sums.mass[-1] = -0.5  # after a reclaim: no usable value
    assert (at(1.1).settled > 2**30).all()
    sums.receive(Message(1, 0, 4, torch.tensor([1.0, 2.0], dtype=torch.float64)))
    assert at(1.1).got.tolist() == [0, 4, 0]


def test_reclaimed_mass_leaves_the_average_of_the_survivors():
    """The masses of the survivors and those in transit between them equal the initial ones."""
    rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    peers, draw = [RunningSums(number, row) for number, row in enumerate(rows)], np.random.default_rng(0)
    for _ in range(30):
        for peer in peers:
            for message in peer.wake([other for other in range(4) if other != peer.number and draw.random() < 0.6]):
                if draw.random() < 0.7:
                    peers[message.receiver].receive(message)
    for peer in peers[:3]:
        peer.reclaim(3)
    left = peers[:3]
    total = sum(peer.mass for peer in left) + parked(left)
    assert relative(total[:-1], rows[:3].sum(0)) < 1e-12
    assert abs(float(total[-1]) - 3) < 1e-12
    for peer in left:
        assert 3 not in peer.sent
        assert 3 not in peer.got
