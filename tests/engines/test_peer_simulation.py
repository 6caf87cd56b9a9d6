"""Peers in one process: the effect of the verbs on rows, private values, and peers with one row."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.hgp import HGP
from fedbilevel.algorithms.sgp import SGP
from fedbilevel.engines import simulate
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import CheckpointError, NetworkError, NonFiniteError, SettingError
from fedbilevel.federation.algorithm import Cohort, PeerAlgorithm, Peers
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.clients import Clients
from fedbilevel.federation.host import Host
from fedbilevel.federation.network import Network, given
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.yardstick import relative

DIRECTED = Network(kind="random_directed", seed=1)


@dataclass(frozen=True, kw_only=True)
class Anything(PeerAlgorithm):
    """Declares a few names and uses every verb."""

    uses = ("mix",)
    upper_space = ("x", "v")
    lower_space = ("y", "u")

    class State(NamedTuple):
        x: Tensor
        y: Tensor
        note: int

    def init(self, peers: Peers) -> State:
        return self.State(*peers.initial(), 7)


@dataclass(frozen=True, kw_only=True)
class Gossips(Anything):
    uses = ("gossip",)


def engine(
    algorithm: Any = Anything(),
    network: Any = DIRECTED,
    averaging: Averaging | None = None,
    built: Any = None,
    **options: Any,
) -> PeerSimulation:
    task = {"num_clients": 4, "dim_upper": 2, "dim_lower": 3, **options.pop("task", {})}
    built = built or Quadratic(**task).build()
    return PeerSimulation(
        algorithm,
        built.problem,
        built.clients,
        network=network,
        averaging=averaging,
        **{"dtype": torch.float64, **options},
    )


def rows(n: int = 4, d: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SHARES = torch.tensor([4.0, 5.0, 6.0, 7.0], dtype=torch.float64)[:, None] / 5.5


# ---- verbs ---------------------------------------------------------------------------------------


def test_one_push_divides_rows_and_weights_by_the_senders_out_degree():
    peers, z, w = engine(), rows(), SHARES
    for step in range(3):
        out = DIRECTED.between(4).adjacency(step).double()
        matrix = (out / out.sum(1, keepdim=True)).T
        new, both = peers.push(w, u=z)
        assert relative(both, matrix @ z) < 1e-15
        assert relative(new, matrix @ w) < 1e-15
        z, w = both, new
    assert peers.time == 3
    assert relative(z.sum(0), rows().sum(0)) < 1e-14


def test_several_names_travel_in_one_message_and_come_back_apart():
    together, alone = engine(), engine()
    _, u, y = together.push(SHARES, u=rows(), y=rows(seed=1))
    assert torch.equal(u, alone.push(SHARES, u=rows())[1])
    assert together.ledger.rounds == 1
    assert int(together.ledger.edges["floats"].sum()) == 7 * int(together.ledger.edges["messages"].sum())
    alone = engine()
    assert torch.equal(y, alone.push(SHARES, y=rows(seed=1))[1])


@pytest.mark.parametrize("weights", ["equal", "by_samples"])
@pytest.mark.parametrize(
    ("network", "averaging"),
    [
        (Network(kind="ring"), Averaging(kind="exact")),
        (Network(kind="ring"), Averaging(kind="gossip", num_steps=80)),
        (DIRECTED, Averaging(num_steps=50)),
        (DIRECTED, Averaging(tolerance=1e-13)),
        (Network(kind="ring", loss=0.2), Averaging(kind="robust", tolerance=1e-13)),
    ],
    ids=["exact", "gossip", "push_sum", "tolerance", "robust"],
)
def test_every_operator_makes_the_mean_that_the_clients_weights_ask_for(network, averaging, weights):
    peers = engine(Anything(), network, averaging, task={"client_weights": weights})
    share = SHARES if weights == "by_samples" else torch.ones(4, 1, dtype=torch.float64)
    assert torch.equal(peers.weights, share)
    values = (rows(), rows(d=2, seed=2))
    u, v = peers.mix(u=values[0], v=values[1])
    for result, value in ((u, values[0]), (v, values[1])):
        assert result.shape == value.shape
        assert relative(result, (share * value).mean(0).expand_as(value)) < 1e-11


def test_kept_weights_go_on_where_the_last_average_left_them_and_rows_start_afresh():
    kept, reset = (
        engine(averaging=Averaging(num_steps=2, weights=weights), task={"client_weights": "by_samples"})
        for weights in ("kept", "reset")
    )
    assert torch.equal(kept.mix(u=rows()), reset.mix(u=rows()))
    carried, z = kept.push_weights, SHARES * rows(seed=3)
    assert torch.equal(reset.push_weights, SHARES)
    assert relative(carried, SHARES) > 0.05
    assert float(carried.sum()) == pytest.approx(4, rel=1e-14)
    w = carried
    for step in (2, 3):
        out = DIRECTED.between(4).adjacency(step).double()
        z, w = ((out / out.sum(1, keepdim=True)).T @ value for value in (z, w))
    assert relative(kept.mix(u=rows(seed=3)), z / w) < 1e-14
    assert relative(kept.push_weights, w) < 1e-14


def test_gossip_is_one_doubly_stochastic_step_without_weights():
    peers = engine(Gossips(), Network(kind="ring"))
    matrix = Network(kind="ring").between(4).mixing(0).matrix
    u, y = peers.gossip(u=rows(), y=rows(seed=1))
    assert relative(u, matrix @ rows()) < 1e-15
    assert relative(y, matrix @ rows(seed=1)) < 1e-15
    assert (
        peers.ledger.rounds,
        int(peers.ledger.edges["messages"].sum()),
        int(peers.ledger.edges["floats"].sum()),
    ) == (1, 8, 48)
    assert torch.equal(peers.gossip(u=u), engine(Gossips(), Network(kind="ring")).gossip(u=u))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("network", "kind"), [(DIRECTED, "push_sum"), (Network(kind="ring", loss=0.2), "robust")])
def test_a_tolerance_stops_as_soon_as_all_agree_and_zeros_agree_at_once(network, kind, dtype):
    loose, tight = (
        engine(Anything(), network, Averaging(kind=kind, tolerance=tolerance), dtype=dtype)
        for tolerance in (1e-1, 1e-5)
    )
    values = rows().to(dtype)
    mean = values.double().mean(0)
    scale = float(values.norm(dim=1).max())
    for peers, tolerance in ((loose, 1e-1), (tight, 1e-5)):
        found = peers.mix(u=values)
        assert float((found - found.mean(0)).norm(dim=1).max()) <= 1.01 * tolerance * scale
        assert relative(found, mean.expand(4, -1)) < 20 * tolerance
    assert 1 <= loose.time < tight.time
    now = tight.time
    assert not bool(tight.mix(u=torch.zeros_like(values)).any())
    assert tight.time == now + 1


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-7), (torch.float64, 1e-12)])
@pytest.mark.parametrize(
    "faults",
    [{"loss": 0.3}, {"loss": 0.6}, {"loss": 0.3, "max_delay": 5, "activity": 0.5}],
    ids=["some", "most", "late"],
)
def test_a_robust_average_that_nobody_ended_otherwise_ends_as_between_real_peers(faults, dtype, limit):
    peers = engine(Anything(), Network(kind="random_directed", seed=1, **faults), None, dtype=dtype)
    values = rows().to(dtype)
    found = peers.mix(u=values).double()
    apart = (found - values.double().mean(0)).norm(dim=1).max()
    assert float(apart / values.double().norm(dim=1).max()) < 2 * max(limit, torch.finfo(dtype).eps)


def test_a_robust_average_of_a_number_of_steps_takes_so_many():
    for averaging, steps in (
        (Averaging(kind="robust", num_steps=3), 3),
        (Averaging(), 10),
        (Averaging(kind="gossip"), 10),
    ):
        network = Network(kind="ring", loss=0.2 if averaging.kind == "robust" else 0.0)
        peers = engine(Anything(), network, averaging)
        peers.mix(u=rows())
        assert peers.time == steps


def test_a_tolerance_that_is_never_reached_is_an_error_that_says_how_far_it_came():
    peers = engine(averaging=Averaging(tolerance=1e-30, max_steps=30))
    with pytest.raises(
        NetworkError,
        match=r"after 30 steps the peers agree up to \d.\de-\d+ only, asked for 1.0e-30: raise the tolerance",
    ):
        peers.mix(u=rows())


# ---- private values ------------------------------------------------------------------------------


def test_what_is_private_or_local_comes_back_as_it_was_and_is_not_charged():
    private, local = engine(task={"upper": "private"}), engine(task={"lower": "local"})
    assert [private.travels(name) for name in "xvyu"] == [False, False, True, True]
    assert [local.travels(name) for name in "xvyu"] == [True, True, False, False]
    v, u = rows(d=2), rows(seed=4)
    for peers, stays, name in ((private, v, "v"), (local, u, "u")):
        assert peers.mix(**{name: stays}) is stays
        weights, same = peers.push(peers.weights, **{name: stays})
        assert same is stays
        assert weights is peers.weights
        assert (peers.ledger.rounds, peers.time, peers.ledger.totals()["messages"]) == (0, 0, 0)
    mixed, same = private.mix(u=u, v=v)
    assert same is v
    assert relative(mixed, u.mean(0).expand_as(u)) < relative(u, u.mean(0).expand_as(u))
    assert int(private.ledger.edges["floats"].sum()) == 4 * int(private.ledger.edges["messages"].sum())


def test_a_row_that_is_not_finite_names_its_client_even_if_it_would_not_travel():
    ids, built = [2, 3, 0, 1], Quadratic(num_clients=4, dim_upper=2, dim_lower=3, upper="private").build()
    peers = engine(built=type(built)(built.problem, [built.clients[i] for i in ids]), ids=ids)
    peers.begin(6)
    for name, width in (("u", 3), ("v", 2)):
        bad = rows(d=width)
        bad[1, 1] = float("nan") if name == "u" else float("inf")
        with pytest.raises(
            NonFiniteError, match=f"client 3 has a value of '{name}' that is not finite in outer iteration 6"
        ):
            peers.mix(**{name: bad})
        with pytest.raises(NonFiniteError, match="client 3"):
            peers.push(peers.weights, **{name: bad})
    assert peers.ledger.rounds == 0


# ---- one row is enough ---------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize(
    "task", [Quadratic(num_clients=3, bend=0.5, cross=0.3), DataCleaning(num_clients=3, num_clean=4, test_share=0.83)]
)
def test_a_peer_that_hosts_only_itself_computes_its_row_bit_for_bit(task, batch_size):
    built, options = task.build(), {"strategy": "loop", "batch_size": batch_size, "seed": 4}
    peers = PeerSimulation(HGP(), built.problem, built.clients, **options)
    peers.begin(3)
    x, y = (
        torch.randn(3, peers.host.width(name), generator=torch.Generator().manual_seed(k))
        for k, name in enumerate("xy")
    )
    if peers.host.x_sizes is not None:
        x = x * (torch.arange(x.shape[1]) < peers.host.x_sizes[:, None])

    def asked(clients: Clients, steps: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        step = steps[2]
        train, val = step.batch("train", "B"), step.batch("val", "B_f")
        found = {
            "gy": clients.lower_grad(x, y, train),
            "hu": clients.hessian_product(x, y, y, train),
            "ju": clients.jacobian_product(x, y, y, train),
        }
        found["ju2"], found["hu2"] = clients.second_order(x, y, y, step.batch("train", "B_h"))
        found["fx"], found["fy"] = clients.upper_grads(x, y, val)
        return found

    peers.steps(1)
    together = asked(peers.clients, peers.steps(3), x, y)  # the second call of this outer iteration
    for i in range(3):
        host = Host(HGP(), built.problem, built.clients[i : i + 1], ids=[i], num_clients=3, **options)
        width = host.x0.shape[-1]
        alone = Clients(host, host.data.positions, 3, 2)
        for name, found in asked(alone, alone.steps(3), x[i : i + 1, :width], y[i : i + 1]).items():
            assert torch.equal(found[0], together[name][i, : found.shape[1]]), (i, name)
    if batch_size:
        assert not torch.equal(together["hu"], together["hu2"])


@pytest.mark.parametrize(
    "averaging",
    [Averaging(num_steps=3), Averaging(num_steps=2, weights="kept"), Averaging(kind="exact")],
    ids=["push_sum", "kept", "exact"],
)
def test_the_order_of_peers_in_memory_leaves_rows_and_bills_alone(averaging):
    ids, built = [2, 0, 3, 1], Quadratic(num_clients=4, dim_upper=2, dim_lower=3, client_weights="by_samples").build()
    straight = engine(averaging=averaging, built=built)
    moved = engine(averaging=averaging, built=type(built)(built.problem, [built.clients[i] for i in ids]), ids=ids)
    assert torch.equal(moved.weights, straight.weights[ids])
    u, w = rows(), straight.weights
    for _ in range(2):
        a, b = straight.mix(u=u), moved.mix(u=u[ids])
        assert relative(b, a[ids]) < 1e-15
        (p, z), (q, t) = straight.push(w, u=u), moved.push(w[ids], u=u[ids])
        assert torch.equal(t, z[ids])
        assert torch.equal(q, p[ids])
    assert all(torch.equal(moved.ledger.edges[name], edges) for name, edges in straight.ledger.edges.items())
    assert torch.equal(moved.push_weights, straight.push_weights[ids])


@pytest.mark.parametrize(
    "network", [Network(kind="ring"), Network(kind="exponential"), Network(kind="ring", shares="out_degree")], ids=str
)
def test_the_order_of_many_peers_in_memory_leaves_no_bit(network):
    """As many as are exchanged by sparse sums, in float32."""
    n, built = 66, Quadratic(num_clients=66, dim_upper=1, dim_lower=2, num_samples=1).build()
    ids = torch.randperm(n, generator=torch.Generator().manual_seed(0)).tolist()
    straight = engine(network=network, built=built, dtype=torch.float32)
    moved = engine(
        network=network, built=type(built)(built.problem, [built.clients[i] for i in ids]), ids=ids, dtype=torch.float32
    )
    u, w = rows(n).float(), straight.weights
    for _ in range(3):
        (p, z), (q, t) = straight.push(w, u=u), moved.push(w[ids], u=u[ids])
        assert torch.equal(t, z[ids])
        assert torch.equal(q, p[ids])
        assert torch.equal(moved.mix(u=u[ids]), straight.mix(u=u)[ids])
    assert all(torch.equal(moved.ledger.edges[name], edges) for name, edges in straight.ledger.edges.items())


@pytest.mark.parametrize(
    "averaging", [Averaging(num_steps=3), Averaging(num_steps=4), Averaging(kind="gossip", num_steps=3)], ids=str
)
def test_an_average_leaves_alone_what_it_was_given_and_what_it_gave_before(averaging):
    peers, matrix = (
        engine(network=Network(kind="ring"), averaging=averaging),
        Network(kind="ring").between(4).mixing(0).matrix,
    )
    given_rows = [rows(seed=k) for k in range(3)]
    copies = [one.clone() for one in given_rows]
    found = [peers.mix(u=one) for one in given_rows]
    for one, copy, result in zip(given_rows, copies, found, strict=True):
        assert torch.equal(one, copy)
        assert relative(result, torch.linalg.matrix_power(matrix, averaging.num_steps) @ copy) < 1e-14


def test_finite_rows_whose_sum_is_not_pass():
    peers = engine(dtype=torch.float32)
    large = torch.full((4, 3), 3e38)
    assert not bool(torch.isfinite(large.sum()))
    _, u = peers.push(peers.weights, u=large / 4)
    assert bool(torch.isfinite(u).all())
    weights, _ = peers.push(peers.weights, u=large)
    assert weights.shape == (4, 1)


def test_numbers_that_are_not_a_numbering_are_refused():
    for ids in ([0, 1, 1, 3], [1, 2, 3, 4]):
        with pytest.raises(SettingError, match=r"ids must number the 4 clients from 0, each once, got \["):
            engine(ids=ids)


# ---- checkpoint ----------------------------------------------------------------------------------


@pytest.mark.parametrize("upper", ["shared", "private"])
def test_a_checkpoint_holds_rows_by_number_time_weights_and_edges(upper):
    algorithm, averaging = (
        HGP(num_terms=2, num_lower_steps=2, lr_system=0.05, optimiser="adam"),
        Averaging(num_steps=2, weights="kept"),
    )
    built, ids = (
        Quadratic(num_clients=4, dim_upper=2, dim_lower=3, upper=upper, client_weights="by_samples").build(),
        [3, 1, 0, 2],
    )
    moved = type(built)(built.problem, [built.clients[i] for i in ids])

    def go(peers: PeerSimulation, state: Any, iterations: Any) -> Any:
        for k in iterations:
            peers.begin(k)
            state = algorithm.round(peers, state)
        return state

    whole = engine(algorithm, DIRECTED, averaging, built=built, batch_size=2)
    end = go(whole, algorithm.init(whole), range(1, 5))
    half = engine(algorithm, DIRECTED, averaging, built=built, batch_size=2)
    tensors, plain = half.state_dict(go(half, algorithm.init(half), (1, 2)))
    assert plain == {"time": {"value": half.time}}
    assert half.time == 2 * (2 + 2 * 2 + (2 if upper == "shared" else 0))
    for order, build in ((None, built), (ids, moved)):
        again = engine(algorithm, DIRECTED, averaging, built=build, batch_size=2, ids=order)
        state = go(again, again.load_state_dict(tensors, plain, algorithm.State), (3, 4))
        place = order or list(range(4))
        for name, value in end._asdict().items():
            same = torch.equal if order is None else lambda a, b: relative(a, b) < 1e-12
            assert same(getattr(state, name), value[place]), name
        assert again.time == whole.time
        assert relative(again.push_weights, whole.push_weights[place]) < 1e-14
        assert all(torch.equal(a, whole.ledger.edges[name]) for name, a in again.ledger.edges.items())
        assert again.ledger.totals() == whole.ledger.totals()


def test_ragged_rows_are_stored_without_their_padding():
    built = DataCleaning(num_clients=3, num_clean=4, test_share=0.83).build()
    peers = PeerSimulation(Anything(), built.problem, built.clients)
    state = Anything().init(peers)
    x = torch.arange(1.0, state.x.numel() + 1).view_as(state.x) * (
        torch.arange(state.x.shape[1]) < peers.host.x_sizes[:, None]
    )
    tensors, plain = peers.state_dict(state._replace(x=x))
    assert len(tensors["state.x"]) == int(peers.host.x_sizes.sum()) < x.numel()
    assert plain["state.note"] == {"value": 7}
    back = peers.load_state_dict(tensors, plain, Anything.State)
    assert torch.equal(back.x, x)
    assert back.note == 7
    with pytest.raises(
        CheckpointError,
        match=r"the checkpoint holds .*, the algorithm needs x, z, w: resume with the version that wrote it",
    ):
        peers.load_state_dict(tensors, plain, SGP.State)


# ---- measuring -----------------------------------------------------------------------------------


def test_disagreement_is_the_largest_distance_from_the_mean_and_figures_are_taken_at_every_peers_own_point():
    task = Quadratic(num_clients=4, dim_upper=2, dim_lower=3)
    peers = engine(built=task.build())
    x, y = rows(d=2), rows(seed=5)
    figures, middle = peers.measure(x, y), y.mean(0)
    assert figures["disagreement"] == pytest.approx(float((y - middle).norm(dim=1).max() / middle.norm()), rel=1e-12)
    losses = peers.host.oracle.evaluate(
        task.build().problem.lower, x, y, peers.host.data.batch(torch.arange(4), "train")
    )
    assert figures["lower_loss"] == pytest.approx(float(losses.mean()), rel=1e-12)
    point = x.mean(0).numpy()
    assert figures["distance"] == pytest.approx(float(np.linalg.norm(point - task.closed_form().solution())), rel=1e-12)
    assert "disagreement" not in engine(task={"lower": "local"}).measure(x, y)


# ---- valid combinations --------------------------------------------------------------------------


def test_simulate_takes_the_engine_that_the_algorithm_asks_for():
    built = Quadratic(num_clients=3).build()
    empty = {"cohort": Cohort(), "network": None, "averaging": None, "drops": None}
    assert isinstance(simulate(FedAvg(), *built, **empty), Simulation)
    peers = simulate(SGP(), *built, **empty)
    assert isinstance(peers, PeerSimulation)
    assert (peers.network.kind, peers.averaging.kind) == ("complete", "push_sum")
    assert simulate(SGP(), *built, network=DIRECTED).network is DIRECTED


@pytest.mark.parametrize(
    ("algorithm", "options", "named"),
    [
        (FedAvg(), {"network": DIRECTED}, "fedavg has a server and does not use network"),
        (FedAvg(), {"averaging": Averaging()}, "fedavg has a server and does not use averaging"),
        (SGP(), {"cohort": Cohort(0.5)}, "sgp runs between peers without a server and does not use cohort"),
        (
            SGP(),
            {"drops": lambda iteration, call: ()},
            "sgp runs between peers without a server and does not use drops",
        ),
    ],
)
def test_options_of_the_other_kind_of_engine_are_refused(algorithm, options, named):
    with pytest.raises(SettingError, match=named):
        simulate(algorithm, *Quadratic(num_clients=3).build(), **options)


@pytest.mark.parametrize(
    ("algorithm", "network", "averaging", "named"),
    [
        (Anything(), DIRECTED, Averaging(kind="gossip"), "gossip needs shares that sum to one at the receiver too"),
        (Anything(), Network(kind="ring", shares="out_degree"), Averaging(kind="gossip"), "gossip needs shares"),
        (
            Anything(),
            Network(kind="ring", loss=0.1),
            Averaging(),
            "push_sum averaging never recovers what a lost message carried: use averaging 'robust'",
        ),
        (Anything(), Network(kind="ring", loss=0.1), Averaging(kind="exact"), "exact averaging never recovers"),
        (SGP(), Network(kind="ring", activity=0.5), None, "sgp pushes without running sums"),
        (Gossips(), DIRECTED, None, "needs an undirected network without faults"),
        (Gossips(), Network(kind="ring", max_delay=1), None, "needs an undirected network without faults"),
    ],
)
def test_what_a_network_cannot_do_is_said_before_anything_runs(algorithm, network, averaging, named):
    with pytest.raises(SettingError, match=named):
        engine(algorithm, network, averaging)


def test_a_network_that_never_connects_is_refused_unless_asked_for():
    split = given(4, lambda step: [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]], directed=False)
    with pytest.raises(NetworkError, match=r"the network never connects: .* clients 2, 3 cannot"):
        engine(network=split)
    apart = engine(network=split, averaging=Averaging(num_steps=60), check_connected=False).mix(u=rows())
    assert relative(apart[:2], rows()[:2].mean(0).expand(2, -1)) < 1e-12
    assert relative(apart[2:], rows()[2:].mean(0).expand(2, -1)) < 1e-12
    with pytest.raises(NetworkError, match="made for 4 peers, there are 3 clients"):
        engine(network=split, task={"num_clients": 3})


@pytest.mark.parametrize(
    ("lower", "upper", "called"), [("global", "shared", True), ("global", "private", False), ("local", "shared", False)]
)
def test_diagnostics_are_those_of_a_shared_x_and_a_global_y_as_with_a_server(
    lower: Any, upper: Any, called: bool
) -> None:
    built = Quadratic(num_clients=3, lower=lower, upper=upper).build()
    problem = dataclasses.replace(built.problem, diagnostics=lambda x, y: {"called": 1.0})
    for algorithm in (SGP(), FedAvg()):
        fed: Any = simulate(algorithm, problem, built.clients)
        fed.begin(0)
        state = algorithm.init(fed)
        assert ("called" in fed.measure(state.x, state.y)) == called
