"""Clients that work in turn: the same bits as all clients at once, and less memory."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import fedbilevel as fb
from fedbilevel import discovery
from fedbilevel.aggregation.settings import Aggregation
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.penalty import Penalty
from fedbilevel.engines import in_turn
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import NonFiniteError, SettingError
from fedbilevel.federation.algorithm import Cohort, ServerAlgorithm
from fedbilevel.federation.store import Store
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
    built = Quadratic(num_clients=5, lower=lower, upper=upper, client_weights="by_samples").build()
    algorithm = kind(num_local_steps=(2, 1, 3, 1, 2), lower_optimiser="adam")
    options = {"batch_size": 2, "dtype": dtype, "strategy": "loop", "cohort": Cohort(0.8)}
    same(drive(algorithm, built, 3, **options), drive(algorithm, built, 3, chunk_size=num, **options))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_the_same_numbers(name):
    """Equal in every bit, except for methods that read several clients in one phase."""
    kind = discovery.algorithm(name)
    scopes = next(pair for pair in SCOPES if not {*pair} & {*kind.refuses})
    built = Quadratic(num_clients=4, lower=scopes[0], upper=scopes[1]).build()
    options = {"batch_size": 2, "strategy": "loop"}
    (fed, state), (fed_2, state_2) = (
        drive(brief(kind), built, 3, **options, **more) for more in ({}, {"chunk_size": 1})
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
    built = Quadratic(num_clients=5).build()
    Watched.seen.clear()
    drive(Watched(num_local_steps=1), built, 1, strategy="loop", chunk_size=2)
    assert Watched.seen == [2, 2, 1]
    Watched.seen.clear()
    drive(Watched(num_local_steps=1), built, 1, strategy="loop")
    assert Watched.seen == [5]


def test_a_run_in_turn_is_resumed(tmp_path):
    built = Quadratic(num_clients=3, lower="local", upper="private").build()
    run = lambda num, **more: fb.solve(
        *built, "penalty", num_iterations=num, batch_size=2, strategy="loop", chunk_size=1, **more
    )
    whole = run(4)
    run(2, record=tmp_path / "r")
    resumed = run(4, record=tmp_path / "r", resume=True)
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(whole.x, resumed.x, strict=True))


def test_a_client_with_a_value_that_is_not_finite_is_named():
    built = Quadratic(num_clients=3).build()
    built.clients[2]["train"]["c"] = torch.as_tensor(built.clients[2]["train"]["c"]) * 1e305
    with pytest.raises(NonFiniteError, match="client 2 returned"):
        drive(FedBiO(lr_lower=1e4, num_local_steps=3), built, 3, strategy="loop", chunk_size=1)


def test_rows_with_aggregation_are_there_for_the_layer():
    built = Quadratic(num_clients=4).build()
    ends = [
        drive(FedBiO(), built, 2, strategy="loop", aggregation=Aggregation(robust="median"), **more)[1]
        for more in ({}, {"chunk_size": 1})
    ]
    assert torch.equal(ends[0].x, ends[1].x)


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


@pytest.mark.parametrize(("strategy", "each"), [("auto", 14), ("loop", 6)])
@pytest.mark.parametrize(("lower", "num"), [("global", 8), ("local", 4)])
def test_as_many_clients_work_as_fit(strategy, each, lower, num):
    fed, values = wide(num, strategy, lower)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_turn.room(fed.host, values, num, (3 + num * each) * ROW)
    assert fed.host.at_once is None
    with pytest.warns(UserWarning, match=f"{num} clients at once need about .* GB, and the device has .* so 3 at"):
        in_turn.room(fed.host, values, num, (3 + 3 * each) * ROW + 1)
    assert fed.host.at_once == 3
    with pytest.warns(UserWarning, match="so 1 at a time"):
        in_turn.room(fed.host, values, num, 6 * ROW)
    assert fed.host.at_once == 1
    with pytest.raises(SettingError, match=r"one client at a time needs at least .* GB, and the device has"):
        in_turn.room(fed.host, values, num, 5 * ROW - 1)


def test_small_problems_are_never_divided():
    fed = Simulation(FedBiO(), *Quadratic().build())
    state = FedBiO().init(fed)
    in_turn.room(fed.host, state._asdict(), 5, 10)
    assert fed.host.at_once is None


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
    built = Quadratic(num_clients=4, lower=lower, upper=upper).build()
    options = {"batch_size": 2, "strategy": "loop", "cohort": Cohort(0.5)}
    reference = drive(Penalty(num_local_steps=2), built, 4, **options)
    start = Store.__init__

    def on_cpu(self: Store, num_rows: int) -> None:
        start(self, num_rows)
        self.move_to_cpu()

    monkeypatch.setattr(Store, "__init__", on_cpu)
    same(reference, drive(Penalty(num_local_steps=2), built, 4, chunk_size=1, **options))
