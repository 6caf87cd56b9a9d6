"""Peers in one process, each with its own row, disk and office: the simulator's numbers, and what happens when somebody goes or comes."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from types import SimpleNamespace
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
from fedbilevel.peers.engine import Peer, _Settling
from fedbilevel.peers.office import Office, Status
from fedbilevel.peers.plan import PeerPlan, plan_of
from fedbilevel.peers.transport import Faults, MemoryNetwork
from fedbilevel.peers.wire import SKETCH
from fedbilevel.runs.loop import run
from fedbilevel.runs.record import Record
from fedbilevel.runs.result import Result
from fedbilevel.tasks.influence import Influence
from fedbilevel.tasks.personalisation import Personalisation
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.task import Task
from support.numeric.yardstick import relative
from support.peers.threads import Threads

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
    return run(
        threads.plan.built_algorithm(),
        built.problem,
        built.clients,
        num_iterations=threads.plan.num_iterations,
        measure_every=1,
        **own,
    )


def check_same(threads: Threads, result: Result, *, rounding: float = 0.0) -> None:
    for number, mine in threads.results.items():
        for name, rows in result.state._asdict().items():
            own = rows[number][
                : mine.state._asdict()[name].shape[1]
            ]  # private rows are padded where clients live together
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
def test_synchronous_peers_are_the_simulator_bit_for_bit(tmp_path, algorithm, options):
    built = Quadratic(**SMALL).build()
    threads = Threads(tmp_path, content(algorithm, options=options), built.clients)
    results, reference = threads.run(), simulated(threads, built)
    check_same(threads, reference)
    for name, total in reference.ledger.items():
        assert (max if name == "rounds" else sum)(result.ledger[name] for result in results) == total, name


@pytest.mark.parametrize(
    ("task", "algorithm", "num_classes"),
    [
        (Influence(num_clients=3), {"name": "hgp", "optimiser": "none", "num_lower_steps": 5, "num_terms": 4}, 2),
        (Personalisation(num_clients=3, share=0.05, width=0.2), {"name": "hgp", "num_lower_steps": 3, "num_terms": 2, "lr_system": 0.05}, 10),
        (Quadratic(**SMALL, client_weights="by_samples"), HGP, None),
        (Quadratic(**SMALL, upper="private"), HGP, None),
        (Quadratic(**SMALL, lower="local"), HGP, None),
    ],
    ids=["influence", "personalisation", "weighted", "private", "local"],
)  # fmt: skip
def test_tasks_and_scopes_run_through_peers(tmp_path, task, algorithm, num_classes):
    built = task.build()
    threads = Threads(tmp_path, content(algorithm, task, num_iterations=2, num_classes=num_classes), built.clients)
    threads.run()
    # a simulation pads clients to the same number of samples, with which some products of matrices round otherwise
    check_same(threads, simulated(threads, built), rounding=1e-13 if isinstance(task, Personalisation) else 0.0)


def test_nobody_begins_an_outer_iteration_before_all_have_stored_the_one_before(tmp_path, monkeypatch):
    """Two stored states are enough to go back to only because of this."""
    waited, wait = [], Office.all_finished

    def noted(office: Office, iteration: int, stop: Callable[[], bool]) -> None:
        wait(office, iteration, stop)
        stored = [Record(tmp_path / f"p{number}").load()[1]["iteration"] for number in range(4)]
        waited.append((office.me, iteration, min(stored) >= iteration))

    monkeypatch.setattr(Office, "all_finished", noted)
    Threads(tmp_path, content({"name": "sgp"}), Quadratic(**SMALL).build().clients).run()
    assert sorted(waited) == sorted((me, iteration, True) for me in range(4) for iteration in range(4))


def test_lost_doubled_and_late_rows_change_nothing(tmp_path):
    built = Quadratic(**SMALL).build()
    threads = Threads(
        tmp_path, content({"name": "sgp"}), built.clients, Faults(loss=0.02, doubled=0.2, delay=0.02, seed=3)
    )
    threads.run()
    check_same(threads, simulated(threads, built))


def test_robust_averages_end_when_all_agree_whatever_is_lost(tmp_path):
    built = Quadratic(**SMALL).build()
    plan = content({**HGP, "lower_solver": "mix"}, num_iterations=1, options={"averaging": {"kind": "robust"}})
    threads = Threads(tmp_path, plan, built.clients, Faults(loss=0.3, doubled=0.2, delay=0.02))
    results = threads.run()
    exact = {**plan, "options": {**plan["options"], "averaging": {"kind": "exact"}}}
    own = {name: value for name, value in plan_of(exact, 4).keywords().items() if value is not None}
    reference = run(threads.plan.built_algorithm(), built.problem, built.clients, num_iterations=1, **own)
    for number, result in enumerate(results):
        assert relative(result.state.h[0], reference.state.h[number]) < 1e-10


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 1e-5), ("float64", 1e-10)])
@pytest.mark.parametrize(
    "averaging",
    [{}, {"averaging": {"kind": "robust"}}, {"averaging": {"kind": "robust", "tolerance": 1e-11}}],
    ids=["left out", "kind", "both"],
)
def test_a_plan_that_loses_messages_ends_in_the_simulator_where_it_does_between_peers(
    tmp_path, averaging, dtype, rounding
):
    built = Quadratic(**SMALL).build()
    plan = content(
        {**HGP, "lower_solver": "mix"},
        num_iterations=1,
        options={"network": {**DIRECTED, "loss": 0.3}, "dtype": dtype, **averaging},
    )
    threads = Threads(tmp_path, plan, built.clients)
    threads.run()
    check_same(threads, simulated(threads, built), rounding=rounding)


# ---- coming and going ------------------------------------------------------------------------------------------------------


def until(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def dies(threads: Threads, victim: int, *, after: int) -> None:
    """Nothing goes out of the victim or in after so many messages of data."""
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
def test_one_that_is_started_again_at_once_goes_on_and_the_run_is_the_simulators(tmp_path, after):
    built = Quadratic(**SMALL).build()
    threads = Threads(tmp_path, content({"name": "sgp", "num_lower_steps": 4}, num_iterations=8), built.clients)
    dies(threads, 2, after=after)
    for number in range(4):
        threads.start(number)
    until(lambda: 2 in threads.network.gone)
    threads.start(2)
    threads.join()
    check_same(threads, simulated(threads, built))
    for number in range(4):  # every outer iteration once, although some were begun twice
        assert [row["iteration"] for row in Record(tmp_path / f"p{number}").rows()] == list(range(9))


def test_all_that_are_stopped_go_on_together_where_they_were(tmp_path):
    built = Quadratic(**SMALL).build()
    threads = Threads(tmp_path, content(HGP, num_iterations=4), built.clients)
    for number in range(4):
        threads.start(number, content(HGP, num_iterations=2))  # another plan: refused when they go on with it below
    threads.join()
    threads.start(0)
    threads.start(1, content(HGP, num_iterations=5))
    with pytest.raises(PlanError, match="p1 has another plan"):
        threads.join([0])
    with pytest.raises(PlanError, match="p0 has another plan"):
        threads.join([1])
    threads.network = MemoryNetwork(4)  # what they said is not for those who come now
    for number in range(4):
        threads.start(number)
    threads.join()
    check_same(threads, simulated(threads, built))


def test_one_that_is_gone_for_longer_joins_those_who_went_on_without_it(tmp_path):
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
    assert abs(weights - 4) < 1e-9  # none is missing of those that the lost one held: both groups began with new ones
    late = Record(tmp_path / "p1").rows()
    assert late[-1]["iteration"] == 120
    assert len(late) < 121  # it was not there
    named = [json.loads(line)["members"] for line in (tmp_path / "p0" / "peers.jsonl").read_text().splitlines()]
    assert ["p0", "p2", "p3"] in named
    assert named[-1] == ["p0", "p1", "p2", "p3"]


@pytest.mark.parametrize("again", [True, False], ids=["regrouped", "as if nothing had been"])
def test_survivors_find_the_solution_of_their_own_problem_only_as_a_new_group(again):
    """Weights and tracked directions that the lost one took along leave a bias for good."""
    built = Quadratic(**SMALL).build()
    sparkle = Sparkle(exchange="push", lr_upper=0.05, lr_lower=0.1, lr_system=0.1)
    directed = Network(**DIRECTED)
    all_four = run(sparkle, built.problem, built.clients, num_iterations=30, network=directed, dtype=torch.float64)
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


def test_too_few_stop_and_keep_what_they_have(tmp_path):
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


def test_a_peer_that_fails_says_so_and_the_others_go_on_at_once(tmp_path):
    built = Quadratic(**SMALL).build()
    threads = Threads(tmp_path, content({"name": "sgp"}, num_iterations=30, suspect=60.0), built.clients)

    def fails(now: Any) -> None:
        if now.iteration == 5:
            raise NonFiniteError("its own trouble")

    for number in range(4):
        threads.start(number, callbacks=[fails] if number == 2 else [])
    began = time.monotonic()
    threads.join([0, 1, 3])
    assert time.monotonic() - began < 30  # not after a minute of silence
    with pytest.raises(NonFiniteError, match="its own trouble"):
        threads.join([2])
    assert threads.results[0].rows[-1]["members"] == 3


def test_a_stranger_to_the_run_is_told_what_differs(tmp_path):
    clients = Quadratic(**SMALL).build().clients
    wide = Quadratic(**{**SMALL, "dim_lower": 5})
    threads = Threads(tmp_path, content({"name": "sgp"}, join_deadline=5.0), [*clients[:3], wide.build().clients[3]])
    for number in range(3):
        threads.start(number)
    threads.start(3, content({"name": "sgp"}, wide, join_deadline=5.0))
    for thread in threads.threads.values():
        thread.join(60)
    # Whoever is the first to meet the other leaves; one that has not been woken by then only sees that it is alone.
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
        ({"on_change": "continue"}, "exchanges rows step by step, which does not survive a loss"),
        ({"options": {"averaging": {"kind": "robust", "num_steps": 5}}}, "ends when all agree, not after a number of steps"),
        ({"options": {"averaging": {"tolerance": 1e-3}}}, "nobody sees whether all agree"),
        ({"options": {"network": {"max_delay": 3}}}, "delays messages or lets peers sleep"),
        ({"options": {"network": {"kind": "file", "file": "a.json"}}}, "nothing in a plan may be a path"),
        ({"options": {"device": "cuda"}}, "the plan sets device, which is each participant's own affair"),
        ({"options": {"fraction": 0.5}}, "the plan sets fraction"),
        ({"option": {}}, "There is no entry of a plan named 'option'. Did you mean 'options'?"),
        ({"options": {"averaging": {"kind": "gossip"}}}, "gossip needs shares that sum to one at the receiver too"),
        ({"options": {"network": {"loss": 0.3}}}, "pushes without running sums"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_is_refused_in_a_sentence(change, text):
    plan = content(HGP)
    plan = {**plan, **change, "options": {**plan["options"], **change.get("options", {})}}
    with pytest.raises((PlanError, SettingError, LookupError), match=text.replace("(", r"\(").replace("?", r"\?")):
        plan_of(plan, 4)


def test_the_engine_of_one_peer_is_no_second_implementation():
    """Verbs, averages by steps and checkpoints are those of the simulator."""
    for name in ("push", "gossip", "mix", "steps", "initial", "zeros", "travels", "_averaged", "_travelling", "_apart"):
        assert getattr(Peer, name) is getattr(PeerSimulation, name), name


# ---- records that do not belong --------------------------------------------------------------------------------------------------


def finished(folder: Any, algorithm: dict[str, Any], **more: Any) -> Threads:
    threads = Threads(folder, content(algorithm, **more), Quadratic(**SMALL).build().clients)
    threads.run()
    return threads


def test_an_old_record_of_one_peer_is_not_taken_for_the_state_of_all(tmp_path):
    threads = finished(tmp_path, {"name": "sgp"}, num_iterations=2)
    for number in (0, 1, 2):
        shutil.rmtree(tmp_path / f"p{number}")
        threads.start(number)
    threads.start(3)
    for number in range(4):
        with pytest.raises(PlanError, match=r"p3 goes on with a run of which .* have no record"):
            threads.join([number])


def test_records_of_two_runs_of_the_same_plan_are_not_mixed(tmp_path):
    finished(tmp_path / "old", {"name": "sgp"}, num_iterations=2)
    threads = finished(tmp_path / "new", {"name": "sgp"}, num_iterations=2)
    shutil.rmtree(tmp_path / "new" / "p3")
    shutil.copytree(tmp_path / "old" / "p3", tmp_path / "new" / "p3")
    for number in range(4):
        threads.start(number)
    with pytest.raises(PlanError, match="the records of p0, p1, p2, p3 are of different runs of the same plan"):
        threads.join()


def test_the_record_of_somebody_else_is_refused_before_anybody_counts_on_it(tmp_path):
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
    run(threads.plan.built_algorithm(), built.problem, built.clients, num_iterations=1, record=tmp_path / "p0")
    threads.start(0)
    with pytest.raises(CheckpointError, match="holds a run that was not between peers"):
        threads.join([0])
    shutil.rmtree(tmp_path / "p0")
    (tmp_path / "aside").rename(tmp_path / "p0")
    threads.clients = [threads.clients[1], *threads.clients[1:]]
    threads.start(0)
    with pytest.raises(CheckpointError, match="is the record of a run with other data"):
        threads.join([0])


def test_one_that_has_done_everything_says_so_when_it_is_alone(tmp_path):
    threads = finished(tmp_path, {"name": "sgp"}, num_iterations=1, join_deadline=1.0)
    threads.start(0)
    with pytest.raises(
        QuorumError,
        match=r"missing: p1, p2, p3: .*; this one has done all 1 outer iterations, so perhaps all have: peer collect",
    ):
        threads.join([0])


def test_a_folder_that_somebody_else_writes_into_is_noticed(tmp_path):
    """p3 would have to go back to a state that was there when it said so."""
    threads = finished(tmp_path, {"name": "sgp"}, num_iterations=3, join_deadline=2.0)
    Record(tmp_path / "p0", keeps_before=True).go_back()

    class Lines(list):
        def append(self, line):
            if line.startswith("p3: "):  # the first thing it says is who begins
                shutil.copy(
                    tmp_path / "p3" / "checkpoint.safetensors", tmp_path / "p3" / "checkpoint-before.safetensors"
                )

    threads.lines = Lines()
    for number in range(4):
        threads.start(number)
    with pytest.raises(
        CheckpointError,
        match=r"the others go on from outer iteration 2, and .*p3 holds 3 and -1: start this peer with another folder",
    ):
        threads.join([3])
    threads.join([0, 1, 2])


def test_peers_that_never_agree_say_so(tmp_path):
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
    # Whoever is the first to see it leaves; one that has not been woken by then only sees that too few are left.
    kinds = {
        NetworkError: r"after 1 wakes the peers do not agree up to .*: raise the tolerance or max_steps",
        QuorumError: r"there after 4 s, 3 of 4 are needed",
    }
    assert sorted(threads.errors) == [0, 1, 2, 3]
    for error in threads.errors.values():
        assert re.search(kinds[type(error)], str(error))
    assert NetworkError in map(type, threads.errors.values())


# ---- what a robust average can be trusted with ----------------------------------------------------------------------------------


def averaged(tmp_path: Any, rows: torch.Tensor, *, seed: int = 0, **faults: Any) -> torch.Tensor:
    """What every peer has after one robust average of these rows."""

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
def test_rows_of_very_different_size_are_averaged_as_quickly(tmp_path, kind):
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = rows * {"one large": 1e-6, "one row alone": 0.0, "all zero": 0.0}[kind]
    rows[0] = 0.0 if kind == "all zero" else torch.arange(1.0, 5.0)
    found = averaged(tmp_path, rows, loss=0.2)
    assert float((found - rows.mean(0)).abs().max()) < 1e-11


@pytest.mark.parametrize("width", [2, 90])
def test_differences_that_would_cancel_in_a_sum_are_seen(tmp_path, width):
    """Two entries that fall into the same bucket with opposite signs: seed 48 hid (1, -1) in a sketch with one table."""
    rows = torch.zeros(4, width, dtype=torch.float64)
    rows[:, 0], rows[:, -1] = torch.arange(1.0, 5.0), -torch.arange(1.0, 5.0)
    assert float((averaged(tmp_path, rows, seed=48) - rows.mean(0)).abs().max()) < 1e-11


def test_an_average_has_not_ended_while_something_pushed_before_is_under_way():
    group = SimpleNamespace(members=torch.tensor([0, 2]))
    sketch = np.append(np.ones(SKETCH - 1), 10.0)
    status = lambda got, settled, values=sketch: Status(np.array(got), np.array(settled), values)
    ended = lambda one, other, limit=1e-6: Peer._agreed(
        group, {0: one, 2: other, 1: status([0, 0, 0], [9, 9, 9])}, limit
    )
    assert ended(status([0, 0, 5], [0, 7, 3]), status([3, 0, 0], [5, 7, 0]))  # 1 is not of the group
    assert not ended(
        status([0, 0, 5], [0, 7, 3]), status([2, 0, 0], [5, 7, 0])
    )  # the third message of 0 to 2 has not arrived
    assert not ended(status([0, 0, 4], [0, 7, 3]), status([3, 0, 0], [5, 7, 0]))
    off = sketch.copy()
    off[0] += 1e-4
    assert not ended(status([0, 0, 5], [0, 7, 3]), status([3, 0, 0], [5, 7, 0], off))
    assert ended(
        status([0, 0, 5], [0, 7, 3]), status([3, 0, 0], [5, 7, 0], off), 1e-5
    )  # of the largest row, which is 10
    assert not Peer._agreed(group, {0: status([0, 0, 5], [0, 7, 3])}, 1.0)  # nothing was heard of 2


def test_a_value_stands_still_from_the_wake_on_at_which_it_last_moved():
    sums, watch = RunningSums(0, torch.tensor([1.0])), _Settling(3)
    at = lambda value: watch.look(sums, np.append(np.full(SKETCH - 1, value), 1.0), 1e-3)
    sums.wake([1])
    assert at(1.0).settled.tolist() == [0, 1, 0]
    sums.wake([1, 2])
    assert at(1.0 + 1e-5).settled.tolist() == [0, 1, 0]
    assert at(1.1).settled.tolist() == [0, 2, 1]
    sums.wake([2])
    assert at(1.1).settled.tolist() == [0, 2, 1]
    assert at(1.1 + 1e-3).settled.tolist() == [0, 2, 2]  # far from where it stood, although not from where it was last
    sums.mass[-1] = -0.5  # after a reclaim: no value to speak of
    assert (at(1.1).settled > 2**30).all()
    sums.receive(Message(1, 0, 4, torch.tensor([1.0, 2.0], dtype=torch.float64)))
    assert at(1.1).got.tolist() == [0, 4, 0]


def test_what_is_reclaimed_is_as_if_the_lost_one_had_never_been_there():
    """Whatever was lost on the way: the masses of the survivors, and what is parked between them, are what they began with."""
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
