"""The charges of a run equal the formulas of the papers for any settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import one_hot

from fedbilevel.algorithms.fbo_aggitd import FBOAggITD
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.fednest import FedNest
from fedbilevel.algorithms.hgp import HGP
from fedbilevel.algorithms.sgp import SGP
from fedbilevel.columns import COLUMNS
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.engines.simulation import Simulation
from fedbilevel.federation import ledger as module
from fedbilevel.federation.algorithm import Cohort, ServerAlgorithm, phase
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.ledger import EDGES, Ledger
from fedbilevel.federation.network import Network
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.yardstick import Drawing, drive

DX, DY, ITERATIONS = 3, 4, 2
BATCH = {"train": 3, "val": 2}
ORACLES = ("gy", "gx", "fx", "fy", "hvp", "jvp")


class Bill(NamedTuple):
    """Cost per outer iteration and client.

    Floats are in units of d_x and d_y; only the first outer iteration sends `more_down`."""

    rounds: int
    up: tuple[int, int]
    down: tuple[int, int]
    oracles: dict[str, int]
    samples: int
    more_down: tuple[int, int] = (0, 0)


def bill(algorithm: Any, tau: int, drawn: int = 0) -> Bill:
    """Section by section from the algorithms' descriptions: tau local steps, `drawn` is Q or N'."""
    train, val = BATCH["train"], BATCH["val"]
    if isinstance(algorithm, FedBiO):
        oracles = dict.fromkeys(("gy", "fx", "fy", "hvp", "jvp"), tau)
        samples = tau * (3 * train + 2 * val) if algorithm.minibatches == "independent" else tau * (train + val)
        return Bill(1, (1, 2), (1, 2), oracles, samples)
    if isinstance(algorithm, FedAvg):
        return Bill(1, (0, 1), (0, 1), {"gy": tau}, tau * train, (1, 0))
    if isinstance(algorithm, FBOAggITD):
        N = algorithm.num_lower_rounds
        Q = drawn if algorithm.estimator == "sampled" else 0
        oracles = {"gy": N + 2 * N * tau, "fy": 1, "hvp": N - Q, "jvp": 1, "fx": 1 + 2 * tau}
        if algorithm.estimator == "sum":
            oracles |= {"fy": N + 1, "hvp": N}
        rounds, floats = 2 * N + 3, 3 * N - Q + 1
    else:
        T = algorithm.num_lower_rounds
        oracles = {"gy": T * (1 + 2 * tau), "fy": 1, "hvp": drawn, "jvp": 1, "fx": 1 + 2 * tau}
        rounds, floats = 2 * T + drawn + 3, 2 * T + drawn + 1
        if algorithm.lower_solver == "sgd":
            oracles, rounds, floats = oracles | {"gy": T * tau}, T + drawn + 3, T + drawn + 1
    samples = train * (oracles["gy"] + oracles["hvp"] + oracles["jvp"]) + val * (oracles["fy"] + oracles["fx"])
    return Bill(rounds, (2, floats), (2, floats), oracles, samples, (0, 1))


def floats(pair: tuple[int, int]) -> int:
    return pair[0] * DX + pair[1] * DY


@dataclass(frozen=True, kw_only=True)
class RollCall(ServerAlgorithm):
    @phase
    def present(self, clients):
        return {"who": one_hot(clients.ids, clients.num_clients).to(clients.dtype)}


def charged(algorithm: Any, drawn: int = 0, task: Quadratic | None = None, **options: Any) -> Simulation:
    built = (task or Quadratic(dim_upper=DX, dim_lower=DY)).build()
    fed = Drawing(algorithm, built.problem, built.clients, **{"dtype": torch.float64, "batch_size": BATCH, **options})
    fed.drawn = drawn
    state = algorithm.init(fed)
    for iteration in range(1, ITERATIONS + 1):
        fed.begin(iteration)
        state = algorithm.round(fed, state)
    return fed


def attendance(num_clients: int, **options: Any) -> torch.Tensor:
    """How many outer iterations each client takes part in when one cohort stays for each."""
    built = Quadratic(dim_upper=DX, dim_lower=DY, num_clients=num_clients).build()
    fed, algorithm, count = (
        Simulation(RollCall(), built.problem, built.clients, **options),
        RollCall(),
        torch.zeros(num_clients, dtype=torch.int64),
    )
    for iteration in range(1, ITERATIONS + 1):
        fed.begin(iteration)
        count += fed.mean(algorithm.present).who > 0
    return count


# ---- any settings --------------------------------------------------------------------------------

steps = {"lr_lower": 0.01, "lr_system": 0.01, "lr_upper": 0.01}


@st.composite
def cases(draw: Any, family: str) -> dict[str, Any]:
    n = draw(st.integers(2, 4))
    taus = draw(st.one_of(st.integers(1, 3), st.tuples(*[st.integers(1, 3)] * n)))
    depth, drawn = draw(st.integers(0, 3)), 0
    if family == "fedbio":
        algorithm = FedBiO(num_local_steps=taus, minibatches=draw(st.sampled_from(["independent", "shared"])), **steps)
    elif family == "fedavg":
        algorithm = FedAvg(num_local_steps=taus, lr_lower=0.01)
    elif family == "fednest":
        terms = draw(st.integers(1, 4))
        drawn = draw(st.integers(0, terms - 1))
        solver = draw(st.sampled_from(["svrg", "sgd"]))
        algorithm = FedNest(num_local_steps=taus, num_lower_rounds=depth, num_terms=terms, lower_solver=solver, **steps)
    else:
        drawn = draw(st.integers(0, depth))
        algorithm = FBOAggITD(
            num_local_steps=taus, num_lower_rounds=depth, estimator=draw(st.sampled_from(["sum", "sampled"])), **steps
        )
    fraction, replacement = draw(st.sampled_from([0.3, 0.5, 0.75, 1.0])), draw(st.booleans())
    return {
        "algorithm": algorithm,
        "drawn": drawn,
        "n": n,
        "fraction": fraction,
        "replacement": replacement,
        "seed": draw(st.integers(0, 9)),
    }


def check_one_cohort_per_iteration(case: dict[str, Any]) -> None:
    """Per client, exactly; with unequal local work each client pays for its own steps only."""
    n, algorithm = case["n"], case["algorithm"]
    options = {"cohort": Cohort(case["fraction"], case["replacement"], "per_iteration"), "seed": case["seed"]}
    fed = charged(algorithm, case["drawn"], Quadratic(dim_upper=DX, dim_lower=DY, num_clients=n), **options)
    present, columns = attendance(n, **options).tolist(), fed.ledger.columns
    full = case["fraction"] == 1 and not case["replacement"]
    for i in range(n):
        tau = (
            algorithm.num_local_steps[i] if isinstance(algorithm.num_local_steps, tuple) else algorithm.num_local_steps
        )
        due = bill(algorithm, tau, case["drawn"])
        assert fed.ledger.rounds == ITERATIONS * due.rounds
        assert int(columns["floats_up"][i]) == present[i] * floats(due.up)
        assert {name: int(columns[name][i]) for name in ORACLES} == {
            name: present[i] * due.oracles.get(name, 0) for name in ORACLES
        }
        assert int(columns["samples"][i]) == present[i] * due.samples
        if full:
            assert int(columns["floats_down"][i]) == ITERATIONS * floats(due.down) + floats(due.more_down)


def check_a_cohort_per_factor(case: dict[str, Any]) -> None:
    """Every phase reaches a full cohort, so the totals are known although the clients are not."""
    algorithm, n = case["algorithm"], case["n"]
    if isinstance(algorithm.num_local_steps, tuple):
        return
    cohort = Cohort(case["fraction"], False, "per_factor")
    fed = charged(
        algorithm, case["drawn"], Quadratic(dim_upper=DX, dim_lower=DY, num_clients=n), cohort=cohort, seed=case["seed"]
    )
    due, totals, paid = (
        bill(algorithm, algorithm.num_local_steps, case["drawn"]),
        fed.ledger.totals(),
        ITERATIONS * cohort.size(n),
    )
    assert totals["rounds"] == ITERATIONS * due.rounds
    assert totals["floats_up"] == paid * floats(due.up)
    assert {name: totals[name] for name in ORACLES} == {name: paid * due.oracles.get(name, 0) for name in ORACLES}
    assert totals["samples"] == paid * due.samples


@given(cases("fedbio"))
def test_fedbio_pays_its_formula(case):
    check_one_cohort_per_iteration(case)
    check_a_cohort_per_factor(case)


@given(cases("fbo_aggitd"))
def test_fbo_aggitd_pays_its_formula(case):
    check_one_cohort_per_iteration(case)
    check_a_cohort_per_factor(case)


@given(cases("fednest"))
def test_fednest_pays_its_formula(case):
    check_one_cohort_per_iteration(case)
    check_a_cohort_per_factor(case)


@given(cases("fedavg"))
def test_fedavg_pays_its_formula(case):
    check_one_cohort_per_iteration(case)
    check_a_cohort_per_factor(case)


# ---- charges when every factor has its own cohort ------------------------------------------------


def cohorts(num: int, **options: Any) -> list[torch.Tensor]:
    """Who is in the cohort that `begin` draws and in those that follow."""
    built = Quadratic(dim_upper=DX, dim_lower=DY).build()
    fed, algorithm = Simulation(RollCall(), built.problem, built.clients, **options), RollCall()
    fed.begin(1)
    drawn = [fed.mean(algorithm.present).who > 0]
    for _ in range(num):
        fed.resample()
        drawn.append(fed.mean(algorithm.present).who > 0)
    return drawn


def one_iteration(algorithm: Any, drawn: int, **options: Any) -> dict[str, torch.Tensor]:
    built = Quadratic(dim_upper=DX, dim_lower=DY).build()
    fed = Drawing(algorithm, built.problem, built.clients, batch_size=BATCH, **options)
    fed.drawn = drawn
    state = algorithm.init(fed)
    fed.begin(1)
    algorithm.round(fed, state)
    return fed.ledger.columns


@pytest.mark.parametrize("replacement", [False, True])
def test_aggitd_draws_a_cohort_per_factor_and_keeps_it_for_the_local_steps(replacement):
    options, N, tau = {"cohort": Cohort(0.4, replacement), "seed": 2}, 4, 2
    _, *at, last = cohorts(N + 2, **options)  # S_0 .. S_N, and that of the hypergradient and the steps on x
    paid = one_iteration(FBOAggITD(num_local_steps=tau, num_lower_rounds=N, **steps), 0, **options)
    assert torch.equal(paid["gy"], (1 + 2 * tau) * sum(at[:N]))
    assert torch.equal(paid["fy"], sum(at))
    assert torch.equal(paid["hvp"], sum(at[1:]))
    assert torch.equal(paid["jvp"], last.long())
    assert torch.equal(paid["fx"], (1 + 2 * tau) * last)
    assert torch.equal(paid["floats_up"], DY * (2 * sum(at[:N]) + sum(at)) + 2 * DX * last)


@pytest.mark.parametrize("replacement", [False, True])
def test_fednest_draws_a_cohort_per_factor_and_keeps_it_for_the_local_steps(replacement):
    options, T, factors, tau = {"cohort": Cohort(0.4, replacement), "seed": 2}, 2, 3, 2
    _, *at, last = cohorts(T + factors + 2, **options)
    paid = one_iteration(FedNest(num_local_steps=tau, num_lower_rounds=T, num_terms=5, **steps), factors, **options)
    assert torch.equal(paid["gy"], (1 + 2 * tau) * sum(at[:T]))
    assert torch.equal(paid["fy"], at[T].long())
    assert torch.equal(paid["hvp"], sum(at[T + 1 :]))
    assert torch.equal(paid["jvp"], last.long())
    assert torch.equal(paid["fx"], (1 + 2 * tau) * last)
    assert torch.equal(paid["floats_up"], DY * (2 * sum(at[:T]) + sum(at[T:])) + 2 * DX * last)


# ---- scopes --------------------------------------------------------------------------------------

N, Q = 3, 1
ALGORITHMS = {
    "fedbio": FedBiO(num_local_steps=2, **steps),
    "aggitd": FBOAggITD(num_local_steps=2, num_lower_rounds=N, estimator="sampled", **steps),
    "aggitd-sum": FBOAggITD(num_local_steps=2, num_lower_rounds=N, **steps),
    "fednest": FedNest(num_local_steps=2, num_lower_rounds=N, num_terms=Q + 1, **steps),
    "fedavg": FedAvg(num_local_steps=2, lr_lower=0.01),
}


@pytest.mark.parametrize(
    ("name", "rounds", "num_y"),
    [
        ("fedbio", 1, 2),
        ("aggitd", 2 * N + 1, 3 * N - Q + 1),
        ("aggitd-sum", 2 * N + 1, 3 * N + 1),
        ("fednest", 2 * N + Q + 1, 2 * N + Q + 1),
        ("fedavg", 1, 1),
    ],
)
def test_a_private_x_and_its_hypergradient_are_never_charged(name, rounds, num_y):
    shared = charged(ALGORITHMS[name], Q)
    fed = charged(ALGORITHMS[name], Q, Quadratic(dim_upper=DX, dim_lower=DY, upper="private"))
    once_more = DY if name not in ("fedbio", "fedavg") else 0  # the first y
    assert fed.ledger.rounds == ITERATIONS * rounds
    assert fed.ledger.columns["floats_up"].tolist() == [ITERATIONS * num_y * DY] * 5
    assert fed.ledger.columns["floats_down"].tolist() == [ITERATIONS * num_y * DY + once_more] * 5
    for column in (*ORACLES, "samples"):
        assert torch.equal(fed.ledger.columns[column], shared.ledger.columns[column])


@pytest.mark.parametrize(
    ("name", "rounds", "num_x"),
    [("fedbio", 1, 1), ("aggitd", 2, 2), ("aggitd-sum", 2, 2), ("fednest", 2, 2), ("fedavg", 0, 0)],
)
def test_a_local_lower_level_sends_x_and_its_hypergradient_only(name, rounds, num_x):
    fed = charged(ALGORITHMS[name], Q, Quadratic(dim_upper=DX, dim_lower=DY, lower="local"))
    assert fed.ledger.rounds == ITERATIONS * rounds
    assert fed.ledger.columns["floats_up"].tolist() == [ITERATIONS * num_x * DX] * 5
    assert fed.ledger.columns["floats_down"].tolist() == [ITERATIONS * num_x * DX + (DX if name == "fedavg" else 0)] * 5


@pytest.mark.parametrize("name", ALGORITHMS)
def test_when_everything_stays_at_its_client_nothing_is_charged_but_work(name):
    fed = charged(ALGORITHMS[name], Q, Quadratic(dim_upper=DX, dim_lower=DY, lower="local", upper="private"))
    totals = fed.ledger.totals()
    assert [totals[column] for column in ("rounds", "floats_up", "floats_down", "bytes_up", "bytes_down")] == [0] * 5
    assert totals["gy"] == 5 * ITERATIONS * bill(ALGORITHMS[name], 2, Q).oracles["gy"]


@pytest.mark.parametrize(
    ("estimator", "rounds", "num_y"), [("sum", 2 * N + 3, 2 * N + 1), ("sampled", 2 * N - Q + 3, 2 * N - Q + 1)]
)
def test_plain_sgd_at_the_lower_level_sends_no_q_and_saves_the_rounds_that_carried_only_q(estimator, rounds, num_y):
    algorithm = FBOAggITD(num_local_steps=2, num_lower_rounds=N, estimator=estimator, lower_solver="sgd", **steps)
    fed = charged(algorithm, Q)
    assert fed.ledger.rounds == ITERATIONS * rounds
    assert fed.ledger.columns["floats_up"].tolist() == [ITERATIONS * (num_y * DY + 2 * DX)] * 5
    assert fed.ledger.columns["gy"].tolist() == [ITERATIONS * N * 2] * 5


# ---- units ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.float64, 8)])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_bytes_are_floats_times_the_size_of_one(name, dtype, itemsize):
    columns = charged(ALGORITHMS[name], Q, dtype=dtype).ledger.columns
    for direction in ("up", "down"):
        assert int(columns[f"floats_{direction}"].sum()) > 0
        assert torch.equal(columns[f"bytes_{direction}"], itemsize * columns[f"floats_{direction}"])


def test_a_full_batch_counts_the_samples_that_are_not_padding():
    fed = charged(FedAvg(num_local_steps=(1, 3, 2, 1, 1), lr_lower=0.01), batch_size=None)
    assert fed.ledger.columns["samples"].tolist() == [
        ITERATIONS * tau * size for tau, size in zip((1, 3, 2, 1, 1), (4, 5, 6, 7, 8), strict=True)
    ]


def test_the_ledger_survives_a_round_trip_and_the_copy_is_its_own():
    fed = charged(ALGORITHMS["aggitd"], Q)
    copy = Ledger(5)
    copy.load_state_dict(fed.ledger.state_dict())
    before = fed.ledger.totals()
    assert copy.totals() == before
    assert copy.megabytes == (before["bytes_up"] + before["bytes_down"]) / 1e6
    copy.charge("gy", torch.tensor([0, 2, 2]), 7)
    assert copy.totals()["gy"] == before["gy"] + 21
    assert copy.columns["gy"][2] == fed.ledger.columns["gy"][2] + 14
    assert fed.ledger.totals() == before


# ---- between peers -------------------------------------------------------------------------------


def between_peers(
    algorithm: Any, network: Network, averaging: Averaging | None = None, task: Quadratic | None = None, **options: Any
) -> PeerSimulation:
    built = (task or Quadratic(dim_upper=DX, dim_lower=DY)).build()
    peers = PeerSimulation(
        algorithm,
        built.problem,
        built.clients,
        network=network,
        averaging=averaging,
        **{"batch_size": BATCH, **options},
    )
    state = algorithm.init(peers)
    for iteration in range(1, ITERATIONS + 1):
        peers.begin(iteration)
        state = algorithm.round(peers, state)
    return peers


def edges_used(network: Network, steps: range) -> torch.Tensor:
    """How often every edge was open in these steps, without those to oneself."""
    return sum(
        (network.between(5).adjacency(step).long() for step in steps), torch.zeros(5, 5, dtype=torch.int64)
    ).fill_diagonal_(0)


def check_edges(peers: PeerSimulation, charged: list[tuple[torch.Tensor, int, int]]) -> None:
    """Check (messages per edge, floats, bytes of one), and columns as sums of edges over receivers."""
    ledger = peers.ledger
    wanted = {
        "messages": sum(sent for sent, _, _ in charged),
        "floats": sum(sent * f for sent, f, _ in charged),
        "bytes": sum(sent * b for sent, _, b in charged),
    }
    assert set(ledger.edges) == set(EDGES)
    for name in EDGES:
        assert torch.equal(ledger.edges[name], wanted[name]), name
    assert torch.equal(ledger.columns["floats_up"], wanted["floats"].sum(1))
    assert torch.equal(ledger.columns["bytes_up"], wanted["bytes"].sum(1))
    assert not bool(ledger.columns["floats_down"].any() or ledger.columns["bytes_down"].any())
    assert ledger.totals()["messages"] == int(wanted["messages"].sum())
    assert ledger.megabytes == int(wanted["bytes"].sum()) / 1e6


M, T, S, CURVATURE = 3, 4, 2, 5
RANDOM = Network(kind="random_directed", seed=2)


def hgp(**settings: Any) -> HGP:
    return HGP(**{"num_terms": M, "num_lower_steps": T, "num_curvature_products": CURVATURE, **steps, **settings})


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.float64, 8)])
@pytest.mark.parametrize("upper", ["shared", "private"])
@pytest.mark.parametrize("minibatches", ["independent", "shared"])
def test_hgp_pays_its_formula(minibatches, upper, dtype, itemsize):
    """A Push-Sum message is the row in its own dtype and a weight of eight bytes.

    A shared x and its v travel in one message."""
    peers = between_peers(
        hgp(minibatches=minibatches),
        RANDOM,
        Averaging(num_steps=S),
        Quadratic(dim_upper=DX, dim_lower=DY, upper=upper),
        dtype=dtype,
    )
    widths = [*[DY] * (T + M * S), *([2 * DX] * S if upper == "shared" else [])] * ITERATIONS
    check_edges(
        peers,
        [(edges_used(RANDOM, range(t, t + 1)), width + 1, itemsize * width + 8) for t, width in enumerate(widths)],
    )
    assert peers.ledger.rounds == peers.time == len(widths)
    columns = {name: peers.ledger.columns[name].tolist() for name in (*ORACLES, "samples")}
    second = M * BATCH["train"] + ((M - 1) * BATCH["train"] if minibatches == "independent" else 0)
    samples = ITERATIONS * (T * BATCH["train"] + BATCH["val"] + second)
    due = {
        "gy": ITERATIONS * T,
        "gx": 0,
        "fx": ITERATIONS,
        "fy": ITERATIONS,
        "hvp": ITERATIONS * (M - 1) + CURVATURE,
        "jvp": ITERATIONS * M,
    }
    all_samples = [4, 5, 6, 7, 8]  # curvature is measured on all of a client's samples
    assert columns == {
        **{name: [value] * 5 for name, value in due.items()},
        "samples": [samples + CURVATURE * size for size in all_samples],
    }


def test_without_minibatches_both_products_of_a_repetition_come_from_one_evaluation():
    peers = between_peers(hgp(num_curvature_products=0), RANDOM, Averaging(num_steps=1), batch_size=None)
    sizes = torch.arange(4, 9)  # of training and of validation data
    assert torch.equal(peers.ledger.columns["samples"], ITERATIONS * (T + 1 + M) * sizes)
    assert peers.ledger.columns["hvp"].tolist() == [ITERATIONS * (M - 1)] * 5


def test_sgp_pays_its_formula():
    peers = between_peers(SGP(num_lower_steps=T, lr_lower=0.01), RANDOM, dtype=torch.float32)
    check_edges(peers, [(edges_used(RANDOM, range(ITERATIONS * T)), DY + 1, 4 * DY + 8)])
    assert peers.ledger.rounds == ITERATIONS * T
    assert {name: peers.ledger.totals()[name] for name in (*ORACLES, "samples")} == {
        **dict.fromkeys(ORACLES, 0), "gy": 5 * ITERATIONS * T, "samples": 5 * ITERATIONS * T * BATCH["train"]
    }  # fmt: skip


def test_an_exact_average_is_charged_as_if_everybody_sent_to_everybody():
    ring = Network(kind="ring")
    peers = between_peers(hgp(), ring, Averaging(kind="exact"), dtype=torch.float32)
    everybody = 1 - torch.eye(5, dtype=torch.int64)
    check_edges(
        peers,
        [
            (edges_used(ring, range(ITERATIONS * T)), DY + 1, 4 * DY + 8),
            (ITERATIONS * M * everybody, DY, 4 * DY),
            (ITERATIONS * everybody, 2 * DX, 8 * DX),
        ],
    )
    assert peers.ledger.rounds == ITERATIONS * (T + M + 1)
    assert peers.time == ITERATIONS * T  # the network stands still meanwhile


@pytest.mark.parametrize("weights", ["equal", "by_samples"])
def test_gossip_sends_weights_only_where_clients_count_differently(weights):
    ring, extra = Network(kind="ring"), int(weights == "by_samples")
    task = Quadratic(dim_upper=DX, dim_lower=DY, client_weights=weights, upper="private")
    peers = between_peers(
        hgp(lower_solver="mix"), ring, Averaging(kind="gossip", num_steps=S), task, dtype=torch.float32
    )
    check_edges(peers, [(edges_used(ring, range(ITERATIONS * (T + M) * S)), DY + extra, 4 * DY + 8 * extra)])


def test_robust_averages_pay_for_messages_that_are_lost_and_not_for_peers_that_sleep():
    task = Quadratic(dim_upper=DX, dim_lower=DY, upper="private")
    num = ITERATIONS * (T + M) * S
    for faults in ({"loss": 0.4}, {"loss": 0.01, "max_delay": 3}):
        network = Network(kind="random_directed", seed=2, **faults)
        peers = between_peers(
            hgp(lower_solver="mix"), network, Averaging(kind="robust", num_steps=S), task, dtype=torch.float32
        )
        check_edges(
            peers, [(edges_used(network, range(num)), DY + 1, 8 * (DY + 1) + 8)]
        )  # running sums are float64, and numbered
        assert peers.ledger.rounds == peers.time == num
    sleepy = between_peers(
        hgp(lower_solver="mix"), Network(kind="complete", activity=0.5), Averaging(kind="robust", num_steps=S), task
    )
    sent = sleepy.ledger.edges["messages"].sum(1)
    assert bool((sent % 4 == 0).all())  # who is awake sends to all four others
    assert 0.3 * 4 * num * 5 < int(sent.sum()) < 0.7 * 4 * num * 5


def test_edges_survive_a_round_trip_and_the_copy_is_its_own():
    ledger = between_peers(SGP(num_lower_steps=T, lr_lower=0.01), RANDOM).ledger
    copy = Ledger(5)
    copy.load_state_dict(ledger.state_dict())
    assert copy.totals() == ledger.totals()
    before = {name: edges.clone() for name, edges in ledger.edges.items()}
    copy.charge_edges(torch.ones(5, 5, dtype=torch.bool), 3, 16)
    for name, each in zip(EDGES, (1, 3, 16), strict=True):
        assert torch.equal(ledger.edges[name], before[name])
        assert torch.equal(copy.edges[name], before[name] + each)
    assert "messages" not in Ledger(5).totals()


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from([(3, 12), (4, 20), (0, 0)]),
            st.sampled_from(["", "", "look", "change", "resume"]),
        ),
        max_size=25,
    )
)
def test_messages_counted_until_somebody_looks_are_those_added_one_by_one(charges):
    """Repeated links, links changed between two charges, and reads and a resume in between."""
    ledger, matrices = (
        Ledger(3),
        [torch.randint(0, 2 + k, (3, 3), generator=torch.Generator().manual_seed(k)) for k in range(3)],
    )
    matrices.append(torch.eye(3, dtype=torch.bool))
    wanted = {name: torch.zeros(3, 3, dtype=torch.int64) for name in EDGES}
    for which, (floats, num_bytes), then in charges:
        ledger.charge_edges(matrices[which], floats, num_bytes)
        for name, each in zip(EDGES, (1, floats, num_bytes), strict=True):
            wanted[name] = wanted[name] + matrices[which].long() * each
        if then == "look":
            assert torch.equal(ledger.edges["floats"], wanted["floats"])
        elif then == "change":
            matrices[which][0, 1] = 1
        elif then == "resume":
            state, ledger = ledger.state_dict(), Ledger(3)
            ledger.load_state_dict(state)
        assert torch.equal(ledger.columns["floats_up"], wanted["floats"].sum(1))
        assert torch.equal(ledger.columns["bytes_up"], wanted["bytes"].sum(1))
    assert ledger.totals().get("messages", 0) == int(wanted["messages"].sum())
    assert set(ledger.edges) == (set(EDGES) if charges else set())
    assert all(torch.equal(edges, wanted[name]) for name, edges in ledger.edges.items())


def test_what_is_not_added_up_yet_stays_within_bounds(monkeypatch):
    """A fixed network is one open entry; entries of a changing network are summed at intervals.

    No cost is lost, and loading a state discards the open entries."""
    ledger, fixed = Ledger(4), torch.ones(4, 4, dtype=torch.bool)
    for _ in range(500):
        ledger.charge_edges(fixed, 2, 8)
    assert len(ledger._open) == 1
    monkeypatch.setattr(module, "_MOST_OPEN", 5)
    for _ in range(23):
        ledger.charge_edges(torch.eye(4), 3, 12)
        assert len(ledger._open) <= 5
    monkeypatch.setattr(module, "_OPEN_CELLS", 2 * 16)
    for _ in range(7):
        ledger.charge_edges(torch.eye(4), 3, 12)
    assert len(ledger._open) <= 2
    assert torch.equal(
        ledger.edges["messages"], 500 * torch.ones(4, 4, dtype=torch.int64) + 30 * torch.eye(4, dtype=torch.int64)
    )
    assert torch.equal(
        ledger.edges["bytes"], 4000 * torch.ones(4, 4, dtype=torch.int64) + 360 * torch.eye(4, dtype=torch.int64)
    )
    state = ledger.state_dict()
    ledger.charge_edges(fixed, 2, 8)
    ledger.load_state_dict(state)
    assert torch.equal(ledger.edges["messages"], state["edges-messages"])


def test_phases_add_up_to_the_totals_and_each_pays_for_its_own():
    """FBO-AggITD with N lower rounds: what each phase costs follows from what it asks for."""
    task, N, tau = Quadratic(num_clients=4, dim_upper=DX, dim_lower=DY), 3, 2
    algorithm = FBOAggITD(num_lower_rounds=N, num_local_steps=tau, estimator="sum")
    fed, _ = drive(algorithm, task.build(), 2)
    phases, totals = fed.ledger.totals().phases, fed.ledger.totals()
    for column in ("rounds", *COLUMNS):
        assert sum(paid[column] for paid in phases.values()) == totals[column]
    assert phases["hypergradient"]["jvp"] == totals["jvp"] == 4 * 2
    assert phases["lower_steps"]["gy"] == 4 * 2 * 2 * N * tau
    assert phases["lower_steps"]["floats_up"] == 4 * 2 * N * DY
    assert phases["upper_steps"]["floats_up"] == 4 * 2 * DX
    assert phases["upper_steps"]["rounds"] == 2
    assert set(phases) == {"aggregate", "lower_steps", "hypergradient", "upper_steps"}


def test_what_peers_pay_is_kept_under_what_travels():
    fed = between_peers(HGP(num_terms=3, num_lower_steps=2, lr_system=0.01, lr_lower=0.01), RANDOM)
    totals = fed.ledger.totals()
    assert set(totals.phases) == {"local", "push y", "mix u", "mix v, x"}
    assert totals.phases["local"]["hvp"] == totals["hvp"] > 0
    assert totals.phases["local"]["rounds"] == totals.phases["local"]["floats_up"] == 0
    assert all(
        sum(paid[column] for paid in totals.phases.values()) == totals[column] for column in ("rounds", *COLUMNS)
    )
    content = fed.ledger.asdict()
    assert content["phases"] == totals.phases
    assert [sum(row) for row in content["edges"]["bytes"]] == content["clients"]["bytes_up"]


def test_phases_survive_a_round_trip_and_what_an_older_checkpoint_did_not_divide_has_a_name():
    fed, _ = drive(FedBiO(lr_lower=0.1), Quadratic(num_clients=3).build(), 2)
    state = fed.ledger.state_dict()
    copy, older = Ledger(3), Ledger(3)
    copy.load_state_dict(state)
    assert copy.totals().phases == fed.ledger.totals().phases
    with copy.during("another"):
        copy.count_round()
    assert copy.totals().phases["another"]["rounds"] == 1
    assert copy.totals().phases["local_steps"] == fed.ledger.totals().phases["local_steps"]
    older.load_state_dict({name: value for name, value in state.items() if not name.startswith("phase-")})
    assert older.totals().phases == {"earlier": {name: older.totals()[name] for name in ("rounds", *COLUMNS)}}


def test_totals_say_what_they_are():
    fed, _ = drive(FedBiO(num_local_steps=2), Quadratic(num_clients=3, dim_upper=2, dim_lower=3).build(), 1)
    assert repr(fed.ledger.totals()).startswith(
        "<1 rounds, 0.000384 MB (24 floats up, 24 down); gy 6, fx 6, fy 6, hvp 6, jvp 6, samples "
    )
