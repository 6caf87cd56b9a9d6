"""Clients that work in turn: the same bits as all clients at once, and less memory."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import pytest
import torch

import fedbilevel as fb
from benchmarks import rows_of_y
from benchmarks.gpt import Size, built
from benchmarks.large_models import TURN, Case, Contestant, num_weights
from fedbilevel import discovery
from fedbilevel.aggregation.settings import Aggregation
from fedbilevel.algorithms.fbo_aggitd import FBOAggITD
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.penalty import Penalty
from fedbilevel.engines import in_turn
from fedbilevel.engines.rounds import one_round
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import NonFiniteError, SettingError
from fedbilevel.federation.algorithm import Cohort, ServerAlgorithm
from fedbilevel.federation.store import Store
from fedbilevel.oracle import portions
from fedbilevel.oracle.alive import Alive
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.yardstick import brief, drive

SCOPES = [(lower, upper) for lower in ("global", "local") for upper in ("shared", "private")]
ALGORITHMS = sorted(name for name, kind in discovery.algorithms().items() if issubclass(kind, ServerAlgorithm))


def same(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    (fed, state), (fed_2, state_2) = one, other
    for name in state._fields:
        value = getattr(state, name)
        if value is not None and not isinstance(value, int | float | str):
            assert torch.equal(fed.collect(value), fed_2.collect(getattr(state_2, name))), name
    assert fed.ledger.totals() == fed_2.ledger.totals()


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("lower", "upper"), SCOPES)
@pytest.mark.parametrize("kind", [Penalty, FedBiO])
def test_the_bits_are_those_of_all_clients_at_once(kind, lower, upper, dtype, num):
    made = Quadratic(num_clients=5, lower=lower, upper=upper, client_weights="by_samples").build()
    algorithm = kind(num_local_steps=(2, 1, 3, 1, 2), lower_optimiser="adam")
    options = {"batch_size": 2, "dtype": dtype, "strategy": "loop", "cohort": Cohort(0.8)}
    same(drive(algorithm, made, 3, **options), drive(algorithm, made, 3, chunk_size=num, **options))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_the_same_numbers(name):
    """Equal in every bit, except for methods that read several clients in one phase."""
    kind = discovery.algorithm(name)
    scopes = next(pair for pair in SCOPES if not {*pair} & {*kind.refuses})
    made = Quadratic(num_clients=4, lower=scopes[0], upper=scopes[1]).build()
    options = {"batch_size": 2, "strategy": "loop"}
    (fed, state), (fed_2, state_2) = (
        drive(brief(kind), made, 3, **options, **more) for more in ({}, {"chunk_size": 1})
    )
    for value, other in ((state.x, state_2.x), (state.y, state_2.y)):
        assert torch.equal(fed.collect(value), fed_2.collect(other))
    assert fed.ledger.totals() == fed_2.ledger.totals()


class Watched(FedBiO):
    """FedBiO that counts the clients of every phase."""

    seen: list[int] = []

    def local_steps(self, clients: Any, **values: Any) -> Any:
        self.seen.append(len(clients))
        return super().local_steps(clients, **values)

    local_steps.__is_phase__ = True  # type: ignore[attr-defined]


def test_no_more_clients_are_at_work_than_asked_for():
    made = Quadratic(num_clients=5).build()
    Watched.seen.clear()
    drive(Watched(num_local_steps=1), made, 1, strategy="loop", chunk_size=2)
    assert Watched.seen == [2, 2, 1]
    Watched.seen.clear()
    drive(Watched(num_local_steps=1), made, 1, strategy="loop")
    assert Watched.seen == [5]


def test_a_run_in_turn_is_resumed(tmp_path):
    made = Quadratic(num_clients=3, lower="local", upper="private").build()
    run = lambda num, **more: fb.solve(
        *made, "penalty", num_iterations=num, batch_size=2, strategy="loop", chunk_size=1, **more
    )
    whole = run(4)
    run(2, record=tmp_path / "r")
    resumed = run(4, record=tmp_path / "r", resume=True)
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(whole.x, resumed.x, strict=True))


def test_a_client_with_a_value_that_is_not_finite_is_named():
    made = Quadratic(num_clients=3).build()
    made.clients[2]["train"]["c"] = torch.as_tensor(made.clients[2]["train"]["c"]) * 1e305
    with pytest.raises(NonFiniteError, match="client 2 returned"):
        drive(FedBiO(lr_lower=1e4, num_local_steps=3), made, 3, strategy="loop", chunk_size=1)


def test_rows_with_aggregation_are_there_for_the_layer():
    made = Quadratic(num_clients=4).build()
    ends = [
        drive(FedBiO(), made, 2, strategy="loop", aggregation=Aggregation(robust="median"), **more)[1]
        for more in ({}, {"chunk_size": 1})
    ]
    assert torch.equal(ends[0].x, ends[1].x)


@pytest.mark.filterwarnings("ignore:the fused kernels of attention")
@pytest.mark.parametrize(("method", "most"), [("penalty 1", 4), ("penalty 2", 4), ("fedbio", 6)])
def test_memory_does_not_grow_with_the_clients(method, most):
    """A language model whose weights outweigh its activations; memory is in rows of y."""
    size = Size("narrow", 64, 2, 2, context=4, batch=1, samples=3)

    def rows(num: int, way: str) -> float:
        contestant = Contestant(Case(size, num, method, "float32"), way, built(size, num), num_local_steps=1)
        with Alive() as alive:
            for _ in range(2):
                contestant.advance()
        return alive.peak / (4 * num_weights(size))

    few, many = rows(2, TURN), rows(8, TURN)
    assert many < 1.05 * few
    assert many < 8 * most
    assert rows(8, "loop") > 2 * many  # rows of all clients


# ---- long rows on a CPU ----------------------------------------------------------------------------------------------


WIDTH = 96  # of a network with 10,176 weights, which outweigh the activations of a batch


@pytest.fixture
def long_rows(monkeypatch):
    """Let rows of this network count as long."""
    monkeypatch.setattr(portions, "LARGE", WIDTH**2)


@pytest.mark.parametrize("name", rows_of_y.ALGORITHMS)
@pytest.mark.parametrize("way", rows_of_y.WAYS)
def test_rows_of_y_at_the_peak(name, way, long_rows, monkeypatch):
    """Counted, so that the bound holds on every machine; FedBiO alone has a goal."""
    options = rows_of_y.WAYS[way]
    start, peak = rows_of_y.peaks(name, WIDTH, **options)
    print(f"{name}, {way}: {peak:.2f} rows of y per client, {start:.2f} of them at the start")
    if name == "fedbio":
        assert peak < rows_of_y.AIM / 2
    monkeypatch.setattr(portions, "LARGE", math.inf)
    together = rows_of_y.peaks(name, WIDTH, **options)[1]
    assert together == peak if way == "in turn" else together > peak + 0.5


@pytest.mark.parametrize("name", rows_of_y.ALGORITHMS)
@pytest.mark.parametrize("strategy", ["loop", "auto"])
def test_long_rows_change_no_numbers(name, strategy, long_rows, monkeypatch):
    made, algorithm = rows_of_y.network(WIDTH, 5), brief(discovery.algorithm(name))
    options = {"batch_size": 2, "strategy": strategy, "dtype": torch.float32, "cohort": Cohort(0.8)}
    divided = drive(algorithm, made, 3, **options)
    assert divided[0].host.at_once == 1
    monkeypatch.setattr(portions, "LARGE", math.inf)
    whole = drive(algorithm, made, 3, **options)
    assert whole[0].host.at_once is None
    if strategy == "loop":
        same(divided, whole)
    else:
        for one, other in zip(divided[1][:2], whole[1][:2], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert divided[0].ledger.totals() == whole[0].ledger.totals()


@pytest.mark.parametrize("share", [1, 3])
def test_a_run_resumes_with_as_many_clients_at_a_time(share, tmp_path, monkeypatch):
    """The first message of FedBiOAcc has two rows of y, and that of a resumed run four."""
    made = rows_of_y.network(16, 4)
    monkeypatch.setattr(portions, "LARGE", share * sum(leaf.numel() for leaf in made.problem.y0.values()))
    run = lambda num, **more: fb.solve(*made, "fedbioacc", num_iterations=num, batch_size=2, **more)
    whole = run(4)
    run(2, record=tmp_path / "r")
    resumed = run(4, record=tmp_path / "r", resume=True)
    assert all(torch.equal(whole.y[name], resumed.y[name]) for name in whole.y)


class Seen(FBOAggITD):
    """FBO-AggITD that notes the clients of its phases."""

    seen: dict[str, set[int]] = {}

    def aggregate(self, clients: Any, **values: Any) -> Any:
        self.seen.setdefault("aggregate", set()).add(len(clients))
        return super().aggregate(clients, **values)

    def lower_steps(self, clients: Any, **values: Any) -> Any:
        self.seen.setdefault("lower_steps", set()).add(len(clients))
        return FBOAggITD.lower_steps(self, clients, **values)

    aggregate.__is_phase__ = aggregate.__is_linear__ = lower_steps.__is_phase__ = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("strategy", "lower", "linear"), [("auto", "global", 4), ("loop", "global", 1), ("auto", "local", 1)]
)
def test_pooled_phases_stay_together(strategy, lower, linear, long_rows):
    """One derivative of a mean is cheaper than those of all clients; a loop and a local level have none."""
    Seen.seen.clear()
    built = rows_of_y.network(WIDTH, 4)
    built = built._replace(problem=dataclasses.replace(built.problem, scopes=fb.Scopes(lower=lower)))
    fed, _ = drive(Seen(), built, 1, batch_size=2, strategy=strategy)
    assert Seen.seen == {"aggregate": {linear}, "lower_steps": {1}}
    assert fed.host.at_once == 1


def test_rows_that_stay_at_their_clients_are_the_only_ones_of_all(long_rows):
    built = rows_of_y.network(WIDTH, 4)
    problem = dataclasses.replace(built.problem, scopes=fb.Scopes(lower="local"))
    fed = Simulation(FedBiO(num_local_steps=1), problem, built.clients, batch_size=2)
    state = fed.algorithm.init(fed)
    fed.begin(1)
    with Alive() as alive:
        fed.algorithm.round(fed, state)
    assert fed.host.at_once == 1
    row = 4 * fed.host.y0.shape[0]
    assert alive.peak < row * 4 * 5  # y and u of all clients stay, the rest is one client's


@pytest.mark.parametrize("options", [{"strategy": "vmap"}, {"strategy": "auto", "chunk_size": 2}])
def test_what_the_user_chooses_stays(options, long_rows):
    fed, _ = drive(FedBiO(num_local_steps=1), rows_of_y.network(WIDTH, 3), 1, batch_size=2, **options)
    assert fed.host.at_once is None


def test_a_process_without_clients_of_the_first_cohort_divides_later(long_rows):
    fed = Simulation(FedBiO(num_local_steps=1), *rows_of_y.network(WIDTH, 3), batch_size=2)
    values = fed.algorithm.init(fed)._asdict()
    sent = {name: values[name] for name in ("x", "y", "u")}
    fed.begin(1)
    fed._ask("local_steps", sent, torch.arange(0), torch.ones(0, dtype=torch.int64), True)
    assert fed.host.at_once is None
    fed._ask("local_steps", sent, torch.arange(3), torch.ones(3, dtype=torch.int64), True)
    assert fed.host.at_once == 1


def test_whole_outer_iterations_are_not_recorded(long_rows):
    """A plan would hold the rows of all clients."""
    algorithm = FedBiO(num_local_steps=1)
    fed = Simulation(algorithm, *rows_of_y.network(WIDTH, 2), batch_size=2)
    state = algorithm.init(fed)
    assert fed.graphs is not None
    with torch.no_grad():
        for iteration in range(1, fed.graphs.times + 5):
            fed.begin(iteration)
            state = one_round(fed, algorithm, state)
    assert fed.graphs.captures.refused == {"outer iteration": "only some clients work at a time"}
    assert fed.graphs.replayed == 0


# ---- what fits -------------------------------------------------------------------------------------------------------


def wide(num: int, strategy: str = "auto", scope: Any = "global") -> tuple[Simulation, dict[str, Any]]:
    """Clients with 2**20 weights, and the first message of FedBiO: 2 x 4 MB."""
    lower = lambda x, y, batch: (batch["a"] * (y["w"].sum() - x["c"].sum()) ** 2).mean()
    start = {"x0": {"c": torch.zeros(2)}, "y0": {"w": torch.zeros(2**20)}}
    problem = fb.Problem(upper=lower, lower=lower, **start, scopes=fb.Scopes(lower=scope))
    one = {"a": torch.ones(2)}
    algorithm = FedBiO()
    fed = Simulation(algorithm, problem, [{"train": one, "val": one}] * num, strategy=strategy)
    state = algorithm.init(fed)
    return fed, {"x": state.x, "y": state.y, "u": state.u}


ROW = 4 * (2 * 2**20 + 2)


@pytest.fixture
def said(capsys):
    """What was said since the last call."""
    in_turn._say.cache_clear()
    return lambda: capsys.readouterr().err


@pytest.mark.parametrize(("strategy", "each"), [("auto", 14), ("loop", 6)])
@pytest.mark.parametrize(("lower", "num"), [("global", 8), ("local", 4)])
def test_as_many_clients_work_as_fit(strategy, each, lower, num, said, monkeypatch):
    fed, values = wide(num, strategy, lower)
    monkeypatch.setattr(fed.host, "device", torch.device("meta"))  # a device other than the CPU, without copies to it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_turn.room(fed.host, values, num, (3 + num * each) * ROW)
    assert fed.host.at_once is None
    gigabytes = (3 + num * each) * ROW / 1e9
    assert said() == (
        f"memory: {num} clients at once need about {gigabytes:.3g} GB beside activations, and the device has "
        f"{gigabytes:.3g} GB, so all fit\n"
    )
    fit = f"so 3 at a time will work in about {(3 + 3 * each) * ROW / 1e9:.3g} GB"
    with pytest.warns(UserWarning, match=f"{num} clients at once need about .* GB .* the device has .* {fit}"):
        in_turn.room(fed.host, values, num, (3 + 3 * each) * ROW + 1)
    assert fed.host.at_once == 3
    with pytest.warns(UserWarning, match="so 1 at a time"):
        in_turn.room(fed.host, values, num, 6 * ROW)
    assert fed.host.at_once == 1
    with pytest.raises(SettingError, match=r"one client at a time needs at least .* GB, and the device has"):
        in_turn.room(fed.host, values, num, 5 * ROW - 1)


@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_on_a_cpu_clients_work_one_at_a_time(strategy, said):
    fed, values = wide(4, strategy)
    in_turn.room(fed.host, values, 4, 9 * ROW)
    assert fed.host.at_once == 1
    needed = f"1 client at once needs about {9 * ROW / 1e9:.3g} GB beside activations"
    assert said() == f"memory: {needed}, and the device has {9 * ROW / 1e9:.3g} GB, so all fit\n"
    in_turn.room(fed.host, values, 4, 9 * ROW - 1)
    assert said() == f"memory: {needed}, and the device has {(9 * ROW - 1) / 1e9:.3g} GB\n"


def test_on_a_cpu_a_chosen_strategy_is_kept_and_a_better_one_is_named(said):
    fed, values = wide(4, "vmap")
    in_turn.room(fed.host, values, 4, 9 * ROW)
    assert fed.host.at_once is None
    assert f"with strategy='loop', chunk_size=1 about {9 * ROW / 1e9:.3g} GB are needed" in said()


def test_clients_are_divided_also_where_the_memory_is_not_known(said):
    fed, values = wide(4)
    in_turn.room(fed.host, values, 4, 0)
    assert fed.host.at_once == 1
    assert said() == ""


def test_a_run_says_what_it_needs_before_it_computes_and_once(said):
    fed, values = wide(2)
    seen = []
    fed.host.run_phase = lambda *given: seen.append(said()) or {}
    for _ in range(2):
        fed._ask("local_steps", values, torch.arange(2), torch.ones(2), False)
    assert seen[0].startswith("memory: 1 client at once needs about")
    assert seen[1] == ""
    assert in_turn.memory_of(torch.device("cpu")) > 2**28


def test_small_problems_are_never_divided(said):
    fed = Simulation(FedBiO(), *Quadratic().build())
    state = FedBiO().init(fed)
    in_turn.room(fed.host, state._asdict(), 5, 10)
    assert fed.host.at_once is None
    assert said() == ""


# ---- rows in the memory of the CPU -----------------------------------------------------------------------------------


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_a_store_on_the_cpu_reads_what_was_written(moved):
    """It is moved before, between or after two writes, and rows that were read do not change later."""
    plain, other = Store(3), Store(3)
    default = torch.full((1, 2), -1.0)
    for number in range(3):
        if number == moved:
            other.move_to_cpu()
        if number < 2:
            for store in (plain, other):
                store.write("v", torch.tensor([number]), torch.full((1, 2), float(number)))
    assert plain.read("new", torch.tensor([0]), default) is default
    for places in ([0], [1], [2], [0, 1], [1, 2], [0, 1, 2]):
        at, fill = torch.tensor(places), default.expand(len(places), -1)
        assert torch.equal(plain.read("v", at, fill), other.read("v", at, fill))
    before = other.read("v", torch.tensor([1]), default)
    other.write("v", torch.tensor([1]), torch.full((1, 2), 9.0))
    assert before.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(("lower", "upper"), SCOPES[1:])
def test_a_run_with_rows_on_the_cpu_has_the_same_bits(lower, upper, monkeypatch):
    made = Quadratic(num_clients=4, lower=lower, upper=upper).build()
    options = {"batch_size": 2, "strategy": "loop", "cohort": Cohort(0.5)}
    reference = drive(Penalty(num_local_steps=2), made, 4, **options)
    start = Store.__init__

    def on_cpu(self: Store, num_rows: int) -> None:
        start(self, num_rows)
        self.move_to_cpu()

    monkeypatch.setattr(Store, "__init__", on_cpu)
    same(reference, drive(Penalty(num_local_steps=2), made, 4, chunk_size=1, **options))
