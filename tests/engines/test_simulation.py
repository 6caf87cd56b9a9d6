"""The simulator: cohorts, kept values, checkpoints, and trajectories that do not depend on layout.

The order of the clients and the way they are evaluated do not change a trajectory."""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.nn.functional import one_hot

from fedbilevel.algorithms.fbo_aggitd import FBOAggITD
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.fednest import FedNest
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import CheckpointError, FedBilevelError, NonFiniteError, ProblemError, SettingError
from fedbilevel.federation.algorithm import Cohort, Kept, ServerAlgorithm, phase
from fedbilevel.federation.host import Host
from fedbilevel.oracle import population
from fedbilevel.problem.problem import Problem, Scopes
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.task import Built
from support.numeric.yardstick import drive, relative

STEPS = {"lr_upper": 0.05, "lr_lower": 0.15, "lr_system": 0.2}
ALGORITHMS = {
    "fedbio": FedBiO(num_local_steps=3, **STEPS),
    "aggitd": FBOAggITD(num_local_steps=2, num_lower_rounds=3, estimator="sampled", **STEPS),
    "aggitd-sum": FBOAggITD(num_local_steps=2, num_lower_rounds=2, **STEPS),
    "fednest": FedNest(num_local_steps=2, num_lower_rounds=2, num_terms=4, **STEPS),
    "fedavg": FedAvg(num_local_steps=3, lr_lower=0.15),
}
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=list(ALGORITHMS))


def federate(algorithm: Any, built: Built, **options: Any) -> Simulation:
    return Simulation(algorithm, built.problem, built.clients, **{"dtype": torch.float64, **options})


def advance(fed: Simulation, state: Any, first: int, last: int) -> Any:
    for iteration in range(first, last + 1):
        fed.begin(iteration)
        state = fed.algorithm.round(fed, state)
    return state


def values(fed: Simulation, state: Any) -> list[torch.Tensor]:
    return [fed.collect(value).clone() for value in state if value is not None]


def assert_same(one: tuple[Simulation, Any], other: tuple[Simulation, Any], tolerance: float = 1e-12) -> None:
    for a, b in zip(values(*one), values(*other), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def pooled(clients: Any) -> list[dict[str, dict[str, np.ndarray]]]:
    """One client with everybody's samples."""
    return [
        {
            role: {name: np.concatenate([client[role][name] for client in clients]) for name in clients[0][role]}
            for role in clients[0]
        }
    ]


# ---- invariance of a trajectory ------------------------------------------------------------------


@pytest.mark.slow
@every_algorithm
@pytest.mark.parametrize("weights", ["equal", "by_samples"])
def test_the_order_of_clients_does_not_matter(algorithm, weights):
    built = Quadratic(bend=0.5, client_weights=weights).build()
    assert_same(
        drive(algorithm, built, 3),
        drive(algorithm, Built(built.problem, [built.clients[i] for i in (3, 0, 4, 1, 2)]), 3),
    )


@every_algorithm
def test_private_rows_follow_their_clients_when_the_order_changes(algorithm):
    built, order = Quadratic(bend=0.5, upper="private").build(), [3, 0, 4, 1, 2]
    (fed, state), (other, moved) = (
        drive(algorithm, built, 3),
        drive(algorithm, Built(built.problem, [built.clients[i] for i in order]), 3),
    )
    torch.testing.assert_close(other.collect(moved.x), fed.collect(state.x)[order], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(moved.y, state.y, rtol=1e-12, atol=1e-12)


@every_algorithm
@pytest.mark.parametrize("weights", ["equal", "by_samples"])
def test_listing_every_client_twice_does_not_matter(algorithm, weights):
    built = Quadratic(bend=0.5, client_weights=weights).build()
    assert_same(drive(algorithm, built, 3), drive(algorithm, Built(built.problem, [*built.clients, *built.clients]), 3))


@pytest.mark.parametrize(
    "algorithm",
    [dataclasses.replace(algorithm, num_local_steps=1) for algorithm in ALGORITHMS.values()],
    ids=list(ALGORITHMS),
)
def test_with_one_local_step_clients_weighted_by_samples_are_one_client_with_all_samples(algorithm):
    built = Quadratic(bend=0.5, client_weights="by_samples").build()
    assert_same(drive(algorithm, built, 4), drive(algorithm, Built(built.problem, pooled(built.clients)), 4))


def test_with_more_local_steps_they_are_not():
    """Guards the test above: the clients differ."""
    built = Quadratic(client_weights="by_samples").build()
    many, one = (
        drive(ALGORITHMS["fedbio"], built, 2)[1],
        drive(ALGORITHMS["fedbio"], Built(built.problem, pooled(built.clients)), 2)[1],
    )
    assert relative(many.x, one.x) > 1e-4


@every_algorithm
def test_the_strategy_of_evaluation_does_not_matter(algorithm):
    built, options = Quadratic(bend=0.5).build(), {"batch_size": 3, "cohort": Cohort(0.6)}
    algorithm = dataclasses.replace(algorithm, num_local_steps=(3, 1, 2, 4, 1))
    reference = drive(algorithm, built, 3, strategy="vmap", **options)
    assert_same(reference, drive(algorithm, built, 3, strategy="loop", **options))
    assert_same(reference, drive(algorithm, built, 3, strategy="vmap", chunk_size=2, **options))


@every_algorithm
@pytest.mark.parametrize("strategy", ["vmap", "loop"])
def test_full_ragged_batches_are_evaluated_alike(algorithm, strategy):
    built = Quadratic(bend=0.5).build()
    assert_same(drive(algorithm, built, 2), drive(algorithm, built, 2, strategy=strategy, chunk_size=3))


@pytest.mark.slow
@every_algorithm
@pytest.mark.parametrize(
    "scopes", [{"client_weights": "by_samples"}, {"upper": "private"}, {"lower": "local"}], ids=str
)
def test_numbered_clients_may_lie_in_any_order_in_memory(algorithm, scopes):
    """Client numbers address draws, cohorts, local work and the ledger.

    So this holds with minibatches and partial participation too."""
    built, order = Quadratic(bend=0.5, **scopes).build(), [3, 0, 4, 1, 2]
    algorithm, options = (
        dataclasses.replace(algorithm, num_local_steps=(3, 1, 2, 4, 1)),
        {"batch_size": 3, "cohort": Cohort(0.6, replacement=True)},
    )
    fed, state = drive(algorithm, built, 3, **options)
    other, moved = drive(algorithm, Built(built.problem, [built.clients[i] for i in order]), 3, ids=order, **options)
    for a, b in zip(values(fed, state), values(other, moved), strict=True):
        torch.testing.assert_close(b, a[order] if a.ndim == 2 else a, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(column, other.ledger.columns[name]) for name, column in fed.ledger.columns.items())


def test_numbers_that_do_not_number_the_clients_are_refused():
    for ids in ([0, 1, 2, 3, 3], [1, 2, 3, 4, 5]):
        with pytest.raises(SettingError, match="ids must number the 5 clients from 0"):
            asking(ids=ids)


def test_draws_belong_to_the_client_and_not_to_its_row():
    """Minibatches: hosted in another order, or alone, a client computes the same row."""
    algorithm, built = ALGORITHMS["fedbio"], Quadratic(bend=0.5).build()
    options = {"num_clients": 5, "batch_size": 2, "seed": 3, "dtype": torch.float64, "strategy": "loop"}
    vectors = {
        "x": torch.ones(4, dtype=torch.float64),
        "y": torch.full((6,), 0.3, dtype=torch.float64),
        "u": torch.full((6,), -0.2, dtype=torch.float64),
    }
    together = Host(algorithm, built.problem, built.clients, **options).run_phase(
        "local_steps", vectors, torch.arange(5), 2, 1
    )
    order = [3, 0, 4, 1, 2]
    reordered = Host(algorithm, built.problem, [built.clients[i] for i in order], ids=order, **options)
    alone = Host(algorithm, built.problem, [built.clients[4]], ids=[4], **options)
    for name, rows in reordered.run_phase("local_steps", vectors, torch.arange(5), 2, 1).items():
        assert torch.equal(rows, together[name][order])
    for name, rows in alone.run_phase("local_steps", vectors, torch.arange(1), 2, 1).items():
        assert torch.equal(rows[0], together[name][4])


@pytest.mark.slow
@every_algorithm
def test_the_seed_decides_everything_and_does_decide(algorithm):
    built, options = Quadratic().build(), {"batch_size": 2, "cohort": Cohort(0.6)}
    one, again, other = (drive(algorithm, built, 3, seed=seed, **options) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(values(*one), values(*again), strict=True))
    assert not torch.equal(one[1].y, other[1].y)


def test_every_call_draws_fresh_samples():
    algorithm = ALGORITHMS["fednest"]
    fed = federate(algorithm, Quadratic().build(), batch_size=1)
    x, y, p = (
        torch.ones(4, dtype=torch.float64),
        torch.ones(6, dtype=torch.float64),
        torch.zeros(6, dtype=torch.float64),
    )
    fed.begin(1)
    factors = [fed.mean(algorithm.system_factor, x=x, y=y, p=y).p for _ in range(2)]
    assert not torch.equal(*factors)  # products of independent factors: the Neumann series is unbiased only then
    first = fed.mean(algorithm.hypergradient, x=x, y=y, p=p).h  # p = 0: f_x alone
    fed.begin(2)
    assert not torch.equal(fed.mean(algorithm.hypergradient, x=x, y=y, p=p).h, first)


@pytest.mark.parametrize("algorithm", [ALGORITHMS["aggitd-sum"], ALGORITHMS["fednest"]], ids=["aggitd-sum", "fednest"])
def test_scaling_the_upper_loss_scales_the_hypergradient(algorithm):
    built = Quadratic(bend=0.5).build()
    scaled = dataclasses.replace(built.problem, upper=lambda x, y, batch: 7.0 * built.problem.upper(x, y, batch))
    x, y = torch.ones(4, dtype=torch.float64), torch.full((6,), 0.4, dtype=torch.float64)
    (h, end), (scaled_h, scaled_end) = (
        algorithm.estimate(federate(algorithm, Built(problem, built.clients)), x, y)
        for problem in (built.problem, scaled)
    )
    torch.testing.assert_close(scaled_h, 7.0 * h, rtol=1e-13, atol=1e-13)
    assert torch.equal(scaled_end, end)


def test_scaling_the_upper_loss_scales_u_of_fedbio_and_nothing_else_if_the_step_of_x_is_divided():
    built = Quadratic(bend=0.5).build()
    scaled = dataclasses.replace(built.problem, upper=lambda x, y, batch: 7.0 * built.problem.upper(x, y, batch))
    _, one = drive(ALGORITHMS["fedbio"], built, 4)
    _, other = drive(dataclasses.replace(ALGORITHMS["fedbio"], lr_upper=0.05 / 7), Built(scaled, built.clients), 4)
    for a, b in zip(one[:3], (other.x, other.y, other.u / 7), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@every_algorithm
def test_scaling_the_lower_loss_is_undone_by_dividing_its_steps(algorithm):
    built = Quadratic(bend=0.5).build()
    scaled = dataclasses.replace(built.problem, lower=lambda x, y, batch: 4.0 * built.problem.lower(x, y, batch))
    smaller = {name: getattr(algorithm, name) / 4 for name in ("lr_lower", "lr_system") if hasattr(algorithm, name)}
    (_, one), (_, other) = (
        drive(algorithm, built, 3),
        drive(dataclasses.replace(algorithm, **smaller), Built(scaled, built.clients), 3),
    )
    torch.testing.assert_close(one.x, other.x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(one.y, other.y, rtol=1e-12, atol=1e-12)


def test_measuring_changes_nothing_and_costs_nothing():
    built, options = Quadratic().build(), {"batch_size": 2, "cohort": Cohort(0.6)}
    algorithm = ALGORITHMS["aggitd"]
    quiet, state = drive(algorithm, built, 3, **options)
    fed = federate(algorithm, built, **options)
    watched = algorithm.init(fed)
    for iteration in (1, 2, 3):
        fed.begin(iteration)
        fed.measure(*watched)
        watched = algorithm.round(fed, watched)
    assert fed.measure(*watched)["upper_loss"] == quiet.measure(*state)["upper_loss"]
    assert torch.equal(watched.x, state.x)
    assert fed.ledger.totals() == quiet.ledger.totals()


# ---- averages ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Questions(ServerAlgorithm):
    """Phases that answer questions about the federation itself."""

    class State(NamedTuple):
        x: Any
        y: Any

    @phase
    def present(self, clients):
        return {"who": one_hot(clients.ids, clients.num_clients).to(clients.dtype)}

    @phase
    def listen(self, clients, **_values):
        return {"nothing": None}

    @phase
    def echo(self, clients, v):
        return {"v": clients.rows(v)}

    @phase
    def replace_y(self, clients, y):
        return {"y": y + clients.ids[:, None] + 1}

    @phase
    def sign(self, clients, v):
        """What every client was sent, with its number added."""
        return {"v": clients.rows(v) + clients.ids[:, None]}

    @phase
    def one_row_too_many(self, clients):
        return {"v": torch.zeros(len(clients) + 1, 2)}

    @phase
    def a_vector(self, clients):
        return {"v": torch.zeros(len(clients))}

    def not_a_phase(self, clients):
        return {"v": torch.zeros(len(clients), 2)}


ASK = Questions()


def asking(task: Quadratic | None = None, **options: Any) -> Simulation:
    return federate(ASK, (task or Quadratic()).build(), **options)


def who(fed: Simulation) -> list[int]:
    """How often each client is in the cohort."""
    share = fed.mean(ASK.present).who
    return (share / share[share > 0].min()).round().int().tolist()


def test_every_client_counts_the_same_or_by_its_training_samples():
    assert asking().mean(ASK.present).who.tolist() == pytest.approx([0.2] * 5, abs=1e-15)
    sizes = np.array([4, 5, 6, 7, 8])
    assert asking(Quadratic(client_weights="by_samples")).mean(ASK.present).who.tolist() == pytest.approx(
        sizes / sizes.sum(), abs=1e-15
    )


@pytest.mark.parametrize("replacement", [False, True])
def test_cohort_by_samples_is_drawn_by_weight_and_averaged_plainly(replacement):
    """No client has a whole place here, so that each draw counts the same."""
    fed = asking(Quadratic(client_weights="by_samples"), cohort=Cohort(0.6, replacement))
    share = fed.mean(ASK.present).who.numpy()
    np.testing.assert_allclose(3 * share, (3 * share).round(), atol=1e-14)
    assert share.sum() == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("replacement", [False, True])
def test_cohorts_by_samples_depend_on_client_numbers_and_not_on_their_order(replacement):
    built, order = Quadratic(client_weights="by_samples").build(), [3, 0, 4, 1, 2]
    cohort = Cohort(0.4, replacement)
    one = federate(ASK, built, cohort=cohort)
    other = federate(ASK, Built(built.problem, [built.clients[i] for i in order]), ids=order, cohort=cohort)
    for iteration in range(1, 20):
        one.begin(iteration)
        other.begin(iteration)
        assert torch.equal(one.mean(ASK.present).who, other.mean(ASK.present).who)


# ---- rows of every client ------------------------------------------------------------------------


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [3, 0, 4, 1, 2]], ids=["in order", "permuted"])
def test_gathered_rows_and_rows_that_are_sent_go_by_client_number(order):
    built = Quadratic().build()
    fed = federate(ASK, Built(built.problem, [built.clients[i] for i in order]), ids=order)
    v = torch.tensor([0.5, -1.0], dtype=torch.float64)
    numbers = torch.arange(5, dtype=torch.float64)[:, None]
    assert torch.equal(fed.gather(ASK.sign, v=v).v, v + numbers)
    rows = 10 * numbers + v
    assert torch.equal(fed.gather(ASK.sign, v=rows).v, rows + numbers)
    assert torch.equal(fed.mean(ASK.sign, v=rows).v, (rows + numbers).mean(0))
    assert torch.equal(fed.collect(rows), rows[order])  # one row per client as they lie in memory, for measuring


def test_gathering_is_charged_row_by_row():
    fed, rows = asking(), torch.ones(5, 7, dtype=torch.float64)
    for times in (1, 2):
        fed.gather(ASK.sign, v=rows)
        assert fed.ledger.rounds == times
        assert fed.ledger.columns["floats_up"].tolist() == [7 * times] * 5
        assert down(fed) == [7] * 5  # each client its own row, once
    fed.gather(ASK.sign, v=torch.ones(3, dtype=torch.float64))
    assert down(fed) == [10] * 5
    assert torch.equal(fed.ledger.columns["bytes_up"], 8 * fed.ledger.columns["floats_up"])


def test_rows_sent_to_a_cohort_are_those_of_its_clients():
    fed, rows = asking(cohort=Cohort(0.4)), 10.0 * torch.arange(5, dtype=torch.float64)[:, None].expand(5, 2).clone()
    present = torch.tensor(who(fed)).bool()
    assert torch.equal(fed.mean(ASK.sign, v=rows).v, (1.1 * rows[present]).mean(0).round())
    assert torch.equal(torch.tensor(down(fed)), 2 * present)


@pytest.mark.parametrize(
    "options", [{"cohort": Cohort(0.8)}, {"drops": lambda iteration, call: [2]}], ids=["cohort", "absent"]
)
def test_gathering_without_a_client_names_it(options):
    fed = asking(**options)
    missing = 2 if "drops" in options else who(fed).index(0)
    with pytest.raises(
        FedBilevelError, match=f"client {missing} did not answer, but .* needs one row from every client"
    ):
        fed.gather(ASK.present)


def test_what_is_kept_stays_where_it_is_when_gathered():
    fed = asking(Quadratic(lower="local"))
    kept = fed.gather(ASK.replace_y, y=fed.initial()[1]).y
    assert isinstance(kept, Kept)
    assert fed.ledger.totals()["floats_up"] == fed.ledger.rounds == 0


def test_the_server_knows_what_each_client_counts_by_number():
    built, order = Quadratic(client_weights="by_samples").build(), [3, 0, 4, 1, 2]
    assert federate(ASK, Built(built.problem, [built.clients[i] for i in order]), ids=order).weights.tolist() == [
        4,
        5,
        6,
        7,
        8,
    ]
    assert asking().weights.tolist() == [1] * 5


# ---- cohorts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fraction", "size"), [(0.01, 1), (0.2, 1), (0.4, 2), (0.6, 3), (1.0, 5)])
def test_a_cohort_without_replacement_has_its_size_and_nobody_twice(fraction, size):
    fed = asking(cohort=Cohort(fraction))
    for iteration in range(1, 6):
        fed.begin(iteration)
        counts = who(fed)
        assert sorted(counts, reverse=True) == [1] * size + [0] * (5 - size)


def test_a_cohort_with_replacement_weighs_a_client_as_often_as_it_was_drawn():
    fed = asking(cohort=Cohort(1.0, replacement=True))
    seen = []
    for iteration in range(1, 30):
        fed.begin(iteration)
        share = 5 * fed.mean(ASK.present).who
        torch.testing.assert_close(share, share.round(), rtol=0, atol=1e-14)
        assert round(float(share.sum())) == 5
        seen.append(int(share.max().round()))
    assert max(seen) >= 2


@pytest.mark.parametrize("replacement", [False, True])
def test_every_client_is_drawn_equally_often(replacement):
    fed, total = asking(cohort=Cohort(0.4, replacement)), torch.zeros(5, dtype=torch.float64)
    for iteration in range(1, 401):
        fed.begin(iteration)
        total += 2 * fed.mean(ASK.present).who
    assert float((total - 160).abs().max()) < 50  # five standard deviations


def test_resampling_draws_anew_per_factor_and_not_per_iteration():
    for redraw, differ in (("per_factor", True), ("per_iteration", False)):
        fed, changed = asking(cohort=Cohort(0.4, redraw=redraw)), False
        for iteration in range(1, 6):
            fed.begin(iteration)
            before = who(fed)
            assert who(fed) == before  # calls alone do not redraw
            fed.resample()
            changed |= who(fed) != before
        assert changed == differ


def test_cohorts_depend_on_seed_and_iteration_alone():
    long, short, other = asking(cohort=Cohort(0.4)), asking(cohort=Cohort(0.4)), asking(cohort=Cohort(0.4), seed=1)
    differ = False
    for iteration in range(1, 9):
        long.begin(iteration)
        other.begin(iteration)
        first = who(long)
        differ |= first != who(other)
        long.resample()
        second = who(long)
    short.begin(8)
    assert who(short) == first
    short.resample()
    assert who(short) == second
    assert differ


@pytest.mark.parametrize("cohort", [Cohort(0.0), Cohort(1.2), Cohort(redraw="sometimes")])
def test_a_cohort_out_of_range_is_refused(cohort):
    with pytest.raises(SettingError, match="cohort"):
        asking(cohort=cohort)


def test_clients_outside_the_cohort_keep_what_they_have():
    fed = asking(Quadratic(lower="local"), cohort=Cohort(0.4))
    y = fed.initial()[1]
    present = torch.tensor(who(fed))
    kept = fed.mean(ASK.replace_y, y=y).y
    expected = present[:, None] * (torch.arange(5)[:, None] + 1.0)
    assert torch.equal(fed.collect(kept), expected.expand(5, 6).double())


def test_one_number_of_local_steps_per_client_is_needed():
    with pytest.raises(SettingError, match="3 numbers of local steps for 5 clients"):
        drive(FedAvg(num_local_steps=(1, 2, 3)), Quadratic().build(), 1)


# ---- clients that do not answer ------------------------------------------------------------------


@pytest.mark.slow
@every_algorithm
def test_without_an_absent_client_the_others_go_on_as_if_it_did_not_exist(algorithm):
    built = Quadratic(bend=0.5).build()
    fed, state = drive(algorithm, built, 3, drops=lambda iteration, call: [2])
    rest = Built(built.problem, [client for i, client in enumerate(built.clients) if i != 2])
    assert_same((fed, state), drive(algorithm, rest, 3))
    assert all(int(column[2]) == 0 for column in fed.ledger.columns.values())


def test_a_client_that_was_absent_returns():
    fed = asking(drops=lambda iteration, call: [0, 1] if (iteration, call) == (2, 1) else [])
    fed.begin(2)
    assert who(fed) == [0, 0, 1, 1, 1]
    fed.begin(3)
    assert who(fed) == [1] * 5


def test_a_cohort_of_nobody_is_a_clear_error():
    fed = asking(drops=lambda iteration, call: range(5))
    fed.begin(4)
    with pytest.raises(FedBilevelError, match="no client of the cohort answered call 1 of outer iteration 4"):
        fed.mean(ASK.present)


@pytest.mark.parametrize(
    "algorithm",
    [ALGORITHMS["aggitd-sum"], dataclasses.replace(ALGORITHMS["fednest"], num_terms=1)],
    ids=["aggitd-sum", "fednest"],
)
def test_a_client_that_missed_the_hypergradient_does_not_step_along_an_old_one(algorithm):
    """With a private x, h stays at its client, so an absent client has no h of this iteration."""
    hypergradient_call = 6  # with two lower rounds, in both algorithms; the steps on x are the call after it
    fed = federate(
        algorithm,
        Quadratic(upper="private").build(),
        drops=lambda iteration, call: [2] if (iteration, call) == (2, hypergradient_call) else [],
    )
    state = advance(fed, algorithm.init(fed), 1, 1)
    before = fed.collect(state.x).clone()
    after = fed.collect(advance(fed, state, 2, 2).x)
    assert (after - before).abs().amax(1).gt(0).tolist() == [True, True, False, True, True]


# ---- kept values ---------------------------------------------------------------------------------

OPERATORS = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.matmul,
    operator.pow,
    operator.floordiv,
    operator.mod,
]
OTHERS = [
    operator.neg,
    operator.pos,
    abs,
    len,
    list,
    bool,
    float,
    int,
    torch.sum,
    lambda kept: kept[0],
    lambda kept: kept < 1,
    lambda kept: kept >= 1,
]


@pytest.mark.parametrize("operation", OPERATORS, ids=lambda operation: operation.__name__)
@pytest.mark.parametrize("other", [2.0, torch.ones(4, dtype=torch.float64)], ids=["number", "tensor"])
def test_the_server_cannot_compute_with_a_kept_value(operation, other):
    x = asking(Quadratic(upper="private")).initial()[0]
    assert isinstance(x, Kept)
    for pair in ((x, other), (other, x), (x, x)):
        with pytest.raises(TypeError):
            operation(*pair)


@pytest.mark.parametrize("operation", OTHERS)
def test_the_server_cannot_look_into_a_kept_value(operation):
    with pytest.raises(TypeError):
        operation(asking(Quadratic(upper="private")).initial()[0])


def test_the_refusal_names_the_value_and_the_remedy():
    x = asking(Quadratic(upper="private")).initial()[0]
    with pytest.raises(TypeError, match=r"'x' is kept at the clients .* do that inside a phase"):
        x - 0.1 * x


def test_an_old_kept_value_is_refused():
    fed = asking(Quadratic(lower="local"))
    old = fed.initial()[1]
    new = fed.mean(ASK.replace_y, y=old).y
    with pytest.raises(ValueError, match="no longer hold that version of 'y'"):
        fed.mean(ASK.replace_y, y=old)
    fed.mean(ASK.replace_y, y=new)


def test_zeros_live_where_the_algorithm_says():
    local = federate(FedBiO(), Quadratic(lower="local").build())
    assert isinstance(local.zeros("u"), Kept)
    assert torch.equal(local.collect(local.zeros("u")), torch.zeros(5, 6, dtype=torch.float64))
    assert torch.equal(federate(FedBiO(), Quadratic().build()).zeros("u"), torch.zeros(6, dtype=torch.float64))
    with pytest.raises(KeyError, match="'w' neither in upper_space nor in lower_space"):
        local.zeros("w")


def test_a_sequence_may_start_at_the_initial_point_wherever_it_lives():
    built = Quadratic(lower="local").build()
    moved = Built(
        dataclasses.replace(built.problem, x0={"x": torch.arange(4.0)}, y0={"y": torch.arange(6.0)}), built.clients
    )
    fed = federate(FedBiO(), moved)
    assert isinstance(fed.start("u"), Kept)
    assert torch.equal(fed.collect(fed.start("u")), torch.arange(6.0, dtype=torch.float64).expand(5, -1))
    assert torch.equal(fed.start("x"), torch.arange(4.0, dtype=torch.float64))
    assert sum(fed.ledger.totals().values()) == 0
    with pytest.raises(KeyError, match="'w' neither in upper_space nor in lower_space"):
        fed.start("w")


# ---- messages ------------------------------------------------------------------------------------


def down(fed: Simulation) -> list[int]:
    return fed.ledger.columns["floats_down"].tolist()


def test_an_array_is_sent_to_a_client_once():
    fed, v = asking(), torch.ones(7, dtype=torch.float64)
    fed.mean(ASK.listen, v=v)
    fed.mean(ASK.listen, w=v)
    fed.begin(1)
    fed.mean(ASK.listen, v=v)
    assert down(fed) == [7] * 5
    fed.mean(ASK.listen, v=v.clone())
    assert down(fed) == [14] * 5
    v += 1  # changed in place: no longer what the clients hold
    fed.mean(ASK.listen, v=v)
    assert down(fed) == [21] * 5


def test_a_client_that_comes_later_gets_what_it_lacks():
    fed, v = asking(drops=lambda iteration, call: [1, 3] if iteration == 0 else []), torch.ones(7, dtype=torch.float64)
    fed.mean(ASK.listen, v=v)
    assert down(fed) == [7, 0, 7, 0, 7]
    fed.begin(1)
    fed.mean(ASK.listen, v=v)
    assert down(fed) == [7] * 5


def test_a_new_array_is_sent_even_where_an_old_one_lay_in_memory():
    fed = asking()
    for _ in range(50):
        fed.mean(ASK.listen, v=torch.zeros(3, dtype=torch.float64))
    assert down(fed) == [150] * 5


def test_numbers_words_nothing_and_kept_values_are_not_arrays():
    fed = asking(Quadratic(upper="private"))
    fed.mean(ASK.listen, a=1, b=2.5, c="word", d=None, x=fed.initial()[0])
    assert sum(fed.ledger.totals().values()) == 0


def test_a_phase_that_returns_nothing_is_no_round():
    fed = asking()
    assert fed.mean(ASK.listen).nothing is None
    assert fed.ledger.rounds == 0
    fed.mean(ASK.present)
    assert fed.ledger.rounds == 1


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one_row_too_many", "a_vector"])
def test_a_phase_that_returns_something_else_than_one_row_per_client_is_refused(name):
    with pytest.raises(ValueError, match=f"phase '{name}' returned 'v' of shape .* for 5 clients: one row per client"):
        asking().mean(getattr(ASK, name))


def test_what_is_not_marked_as_a_phase_cannot_be_run():
    fed = asking()
    with pytest.raises(ValueError, match="has no phase named 'not_a_phase'"):
        fed.mean(ASK.not_a_phase)
    with pytest.raises(ValueError, match="has no phase named 'asdict'"):
        fed.host.run_phase("asdict", {}, torch.arange(5), 0, 1)
    with pytest.raises(ValueError, match="has no phase named 'no_such_phase'"):
        fed.host.run_phase("no_such_phase", {}, torch.arange(5), 0, 1)


@pytest.mark.parametrize("cohort", [Cohort(), Cohort(0.8)], ids=["everybody", "some"])
def test_a_value_that_is_not_finite_names_client_phase_and_iteration(cohort):
    built = Quadratic().build()
    clients = list(built.clients)
    clients[3] = {**clients[3], "train": {**clients[3]["train"], "A": clients[3]["train"]["A"] * 1e200}}
    fed, algorithm = (
        federate(FedAvg(num_local_steps=4), Built(built.problem, clients), cohort=cohort),
        FedAvg(num_local_steps=4),
    )
    state = algorithm.init(fed)
    with pytest.raises(
        NonFiniteError,
        match=r"client 3 returned a value of 'y' that is not finite in phase 'local_steps' of outer iteration [1-9]:",
    ):
        advance(fed, state, 1, 9)


def test_the_iteration_named_is_the_one_that_failed():
    fed = asking()
    fed.begin(6)
    v = torch.zeros(3, dtype=torch.float64)
    v[1] = float("nan")
    with pytest.raises(NonFiniteError, match=r"client 0 returned a value of 'v' .* phase 'echo' of outer iteration 6"):
        fed.mean(ASK.echo, v=v)


def test_rows_whose_sum_overflows_but_which_are_finite_pass():
    v = torch.full((3,), 1e38, dtype=torch.float32)
    assert torch.equal(asking(dtype=torch.float32).mean(ASK.echo, v=v).v, v)


def test_no_clients_are_refused():
    with pytest.raises(ProblemError, match="there are no clients"):
        Simulation(ASK, Quadratic().build().problem, [])


# ---- checkpoints ---------------------------------------------------------------------------------


def ragged_cleaning() -> Built:
    """Private weights whose number differs much between clients."""
    built = DataCleaning(num_clients=4, num_clean=5).build()
    cut = [
        {**client, "train": {name: value[: 12 + 9 * i] for name, value in client["train"].items()}}
        for i, client in enumerate(built.clients)
    ]
    return Built(built.problem, cut)


PROBLEMS = {
    "shared": Quadratic(bend=0.5).build(),
    "private": Quadratic(upper="private").build(),
    "local": Quadratic(lower="local").build(),
    "private and local": Quadratic(lower="local", upper="private", client_weights="by_samples").build(),
    "private and ragged": ragged_cleaning(),
}


def same_width() -> Built:
    """A private x whose widest row is as long as the local y."""
    rng = np.random.default_rng(0)
    draw = lambda n: {"a": rng.standard_normal((n, 6)), "t": rng.standard_normal(n)}
    error = lambda y, batch: (batch["a"] @ y["y"] - batch["t"]) ** 2
    problem = Problem(
        upper=lambda x, y, batch: (batch["weight"] * error(y, batch)).sum(),
        lower=lambda x, y, batch: (
            (batch["weight"] * torch.sigmoid(x["w"][batch["index"]]) * error(y, batch)).sum()
            + 0.1 * (y["y"] ** 2).sum()
        ),
        x0=lambda sizes: {"w": torch.zeros(sizes["train"])},
        y0={"y": torch.zeros(6)},
        scopes=Scopes("local", "private"),
    )
    return Built(problem, [{"train": draw(n), "val": draw(n)} for n in (3, 4, 6)])


def resumed(fed: Simulation, state: Any, built: Built, **options: Any) -> tuple[Simulation, Any]:
    """A new simulator that continues from what was written down."""
    tensors, plain = fed.state_dict(state)
    fresh = federate(fed.algorithm, built, **options)
    fresh.ways.update(fed.ways)  # as the loop does: a choice that is measured again may be another one
    return fresh, fresh.load_state_dict(
        safetensors.torch.load(safetensors.torch.save(tensors)), plain, fed.algorithm.State
    )


@pytest.mark.slow
@every_algorithm
@pytest.mark.parametrize("built", PROBLEMS.values(), ids=list(PROBLEMS))
def test_a_run_resumed_in_the_middle_continues_bit_by_bit(algorithm, built):
    options = {"batch_size": 2, "cohort": Cohort(0.6), "seed": 5}
    fed = federate(algorithm, built, **options)
    state = advance(fed, algorithm.init(fed), 1, 2)
    fresh, again = resumed(fed, state, built, **options)
    state, again = advance(fed, state, 3, 4), advance(fresh, again, 3, 4)
    assert all(torch.equal(a, b) for a, b in zip(values(fed, state), values(fresh, again), strict=True))
    assert fed.ledger.totals() == fresh.ledger.totals()
    assert all(torch.equal(column, fresh.ledger.columns[name]) for name, column in fed.ledger.columns.items())


@pytest.mark.slow
@pytest.mark.parametrize("built", PROBLEMS.values(), ids=list(PROBLEMS))
def test_a_checkpoint_does_not_change_when_the_run_goes_on(built):
    algorithm, options = ALGORITHMS["fedbio"], {"batch_size": 2, "cohort": Cohort(0.6)}
    fed = federate(algorithm, built, **options)
    state = advance(fed, algorithm.init(fed), 1, 2)
    tensors, _ = fed.state_dict(state)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    advance(fed, state, 3, 5)
    assert [name for name, tensor in tensors.items() if not torch.equal(tensor, copies[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("built", PROBLEMS.values(), ids=list(PROBLEMS))
def test_two_runs_can_be_resumed_from_one_checkpoint(built):
    algorithm, options = ALGORITHMS["fedbio"], {"batch_size": 2, "cohort": Cohort(0.6)}
    fed = federate(algorithm, built, **options)
    state = advance(fed, algorithm.init(fed), 1, 2)
    tensors, plain = fed.state_dict(state)
    stored = safetensors.torch.load(safetensors.torch.save(tensors))
    ends = []
    for _ in range(2):
        fresh = federate(algorithm, built, **options)
        ends.append(values(fresh, advance(fresh, fresh.load_state_dict(stored, plain, algorithm.State), 3, 5)))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


class Remembers(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True, kw_only=True)
class Memory(ServerAlgorithm):
    """Clients remember their x and y and go on from there; whoever is new starts at the average."""

    State = Remembers

    def init(self, fed: Any) -> Remembers:
        return Remembers(*fed.initial())

    def round(self, fed: Any, state: Remembers) -> Remembers:
        new = fed.mean(self.step, x=state.x, y=state.y)
        return Remembers(new.x, new.y)

    @phase
    def step(self, clients: Any, x: Any, y: Any) -> dict[str, Any]:
        x, y = (
            0.5 * (clients.memory.read(name, default=rows) + rows)
            for name, rows in zip("xy", clients.rows(x, y), strict=True)
        )
        batch = clients.batch("train", "B")
        x, y = x - 0.1 * clients.lower_grad_x(x, y, batch), y - 0.1 * clients.lower_grad(x, y, batch)
        clients.memory.write(x=x, y=y)
        return {"x": x, "y": y}


def as_before(tensors: dict[str, Any], fed: Simulation) -> dict[str, Any]:
    """A checkpoint in which everybody has a row of zeros who had written nothing."""
    old = dict(tensors)
    for name in ("memory.x", "memory.y"):
        written = tensors[name.replace("memory.", "memory-written.")]
        rows = fed.host.memory.rows[name.removeprefix("memory.")][fed.host.ids.argsort()]
        assert not bool(rows[~written].any())
        old[name] = fed.host.unpad(rows, fed.host.ids.argsort()) if name == "memory.x" else rows
    return old


@pytest.mark.parametrize("built", [PROBLEMS["shared"], PROBLEMS["private and ragged"]], ids=["shared", "ragged"])
def test_a_checkpoint_holds_the_rows_of_those_who_have_written_and_older_ones_are_read_too(built):
    n = len(built.clients)
    ids = [*range(1, n), 0]
    moved = Built(built.problem, [built.clients[i] for i in ids])
    options = {"batch_size": 2, "cohort": Cohort(0.5, redraw="per_iteration"), "seed": 2, "ids": ids}
    fed = federate(Memory(), moved, **options)
    state = advance(fed, Memory().init(fed), 1, 1)
    tensors, plain = fed.state_dict(state)
    written = tensors["memory-written.y"]
    assert 0 < int(written.sum()) < n
    assert torch.equal(written, fed.ledger.columns["gy"] > 0)
    assert len(tensors["memory.y"]) == int(written.sum())
    assert not torch.equal(tensors["memory.y"][0], tensors["memory.y"][-1])
    older = as_before(tensors, fed)
    assert len(older["memory.x"]) > len(tensors["memory.x"])
    end = advance(fed, state, 2, 4)
    for stored in (tensors, older):
        fresh = federate(Memory(), moved, **options)
        fresh.host.memory.write(
            "x", torch.tensor([0]), torch.zeros(1, fresh.host.width("x"), dtype=torch.float64)
        )  # is forgotten
        again = fresh.load_state_dict(safetensors.torch.load(safetensors.torch.save(stored)), plain, Remembers)
        assert torch.equal(fresh.host.memory.written["x"], written[ids])
        again = advance(fresh, again, 2, 4)
        assert all(torch.equal(a, b) for a, b in zip(values(fed, end), values(fresh, again), strict=True))
        assert all(torch.equal(rows, fresh.host.memory.rows[name]) for name, rows in fed.host.memory.rows.items())


def test_what_starts_the_same_at_all_clients_is_kept_once_until_a_client_has_its_own():
    algorithm, built = ALGORITHMS["fedbio"], Quadratic(num_clients=20, lower="local").build()
    fed = federate(algorithm, built, cohort=Cohort(0.1))
    state = algorithm.init(fed)
    assert torch.equal(fed.collect(state.y), fed.host.y0.expand(20, -1))
    assert [len(shelf.rows) for shelf in fed.host.kept._shelves.values()] == [0, 0]
    state = advance(fed, state, 1, 1)
    assert [len(shelf.rows) for shelf in fed.host.kept._shelves.values()] == [2, 2]
    moved = (fed.collect(state.y) != fed.host.y0).any(1)
    assert torch.equal(moved, fed.ledger.columns["gy"][fed.host.ids] > 0)


def test_kept_rows_are_measured_a_few_at_a_time(monkeypatch):
    fed, state = drive(ALGORITHMS["fedbio"], PROBLEMS["private and local"], 2, cohort=Cohort(0.6))
    asked, real = [], fed._resolve
    monkeypatch.setattr(
        fed, "_resolve", lambda kept, positions: asked.append((kept.name, len(positions))) or real(kept, positions)
    )
    whole = fed.measure(state.x, state.y)
    assert {size for _, size in asked} == {len(fed.host)}
    monkeypatch.setattr(population, "_LOOK", 1)
    asked.clear()
    assert fed.measure(state.x, state.y) == pytest.approx(whole, rel=1e-12)
    assert {size for _, size in asked} == {1}
    assert {name for name, _ in asked} == {"x", "y"}


def test_private_rows_are_stored_without_padding_and_other_rows_whole():
    fed = federate(ALGORITHMS["fedbio"], PROBLEMS["private and ragged"])
    tensors, _ = fed.state_dict(ALGORITHMS["fedbio"].init(fed))
    assert tensors["kept.x"].shape == (12 + 21 + 30 + 39,)


def test_a_local_y_as_wide_as_the_widest_private_x_is_stored_whole():
    algorithm, built = ALGORITHMS["fedbio"], same_width()
    fed = federate(algorithm, built)
    state = advance(fed, algorithm.init(fed), 1, 2)
    fresh, again = resumed(fed, state, built)
    for a, b in zip(values(fed, state), values(fresh, again), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_of_another_algorithm_is_refused():
    fed = federate(ALGORITHMS["fedavg"], PROBLEMS["shared"])
    tensors, plain = fed.state_dict(ALGORITHMS["fedavg"].init(fed))
    with pytest.raises(CheckpointError, match="the algorithm needs x, y, u"):
        federate(ALGORITHMS["fedbio"], PROBLEMS["shared"]).load_state_dict(tensors, plain, FedBiO.State)


def test_the_users_structure_comes_back_without_padding():
    fed, state = drive(ALGORITHMS["fedbio"], PROBLEMS["private and ragged"], 1)
    assert [len(tree["logit"]) for tree in fed.trees(state.x, upper=True)] == [12, 21, 30, 39]
    assert {name: tuple(leaf.shape) for name, leaf in fed.trees(state.y, upper=False).items()} == {
        "weight": (64, 10),
        "bias": (10,),
    }


def test_who_gathers_a_linear_phase_gets_every_clients_own_row():
    built, algorithm = Quadratic(num_clients=4).build(), FedNest()
    rows = {}
    for strategy in ("auto", "loop"):
        fed = Simulation(algorithm, *built, dtype=torch.float64, strategy=strategy)
        x, y = fed.initial()
        rows[strategy] = fed.gather(algorithm.lower_gradient, x=x, y=y).q
    torch.testing.assert_close(rows["auto"], rows["loop"], rtol=1e-12, atol=1e-12)
    assert bool((rows["auto"][0] - rows["auto"][1]).abs().max() > 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "vmap"])
@pytest.mark.parametrize(
    "algorithm", [FedNest(num_local_steps=2), FBOAggITD(num_local_steps=2)], ids=lambda one: one.name()
)
def test_a_long_run_whose_derivatives_are_traced_goes_the_way_of_a_loop(algorithm, strategy):
    def soon_traced(*given, **options):
        fed = Simulation(*given, **options)
        fed.host.oracle.often = {"cpu": 3}
        return fed

    built, ends = Quadratic(num_clients=4, num_samples=8).build(), []
    for how in (strategy, "loop"):
        _, state = drive(algorithm, built, 24, engine=soon_traced, strategy=how, batch_size=3, cohort=Cohort(0.5))
        ends.append((state.x, state.y))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("strategy", ["loop", "vmap", "auto"])
def test_in_float32_the_order_of_clients_leaves_no_trace_without_pooled_derivatives(strategy):
    """A pooled derivative adds samples in the order of the clients, so `auto` agrees up to rounding only."""
    built, ends = Quadratic().build(), []
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0]):
        options = {"ids": order, "strategy": strategy, "batch_size": 2, "dtype": torch.float32}
        _, state = drive(FBOAggITD(), Built(built.problem, [built.clients[i] for i in order]), 3, **options)
        ends.append(torch.cat([state.x, state.y]))
    assert float((ends[0] - ends[1]).abs().max()) <= (1e-6 if strategy == "auto" else 0.0)
