"""Captured outer iterations on a GPU: real graphs give the numbers of uncaptured runs.

Under `loop` in float32 every derivative is the same list of kernels captured or not, so runs agree
bit for bit where no step size depends on the outer iteration. Elsewhere powers of the outer
iteration are computed on the device, and a division by them is no multiplication by an inverse;
there, and where captured batches have other padding, runs agree up to `NEAR` per outer iteration.
"""

import gc

import pytest
import torch

from engines.test_cuda_graphs import SERVER, images
from engines.test_launches import hurry, pairs
from engines.test_outer_graphs import FRESH, HOST, PEERS, engine, follow, travel
from fedbilevel.engines import cuda_graphs, outer_graphs
from fedbilevel.engines.outer_graphs import OUTER
from fedbilevel.engines.rounds import expect
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.federation.mixing import Mixing
from fedbilevel.federation.network import Network
from fedbilevel.federation.schedule import Schedule
from fedbilevel.problem import fused_draws
from fedbilevel.problem.draws import Stream
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.yardstick import brief

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="real graphs need a GPU"),
    pytest.mark.filterwarnings("ignore::fedbilevel.errors.ScopeWarning"),
]
NEAR = 1e-5  # float32
BITS = ("fbo_aggitd", "fedavg", "fedbio", "fedmbo", "fednest", "lfednest", "simfbo")


def options(algorithm):
    everyone = algorithm.needs_everyone or algorithm.gathers
    return {"cohort": Cohort() if everyone else Cohort(0.5), "batch_size": 3, "dtype": torch.float32}


def distance(got, expected):
    return max(
        float((one - other).double().norm() / other.double().norm().clamp(min=1e-30))
        for now, then in zip(got, expected, strict=True)
        for one, other in zip(now, then, strict=True)
    )


@pytest.mark.parametrize("strategy", ["loop", "auto"])
@pytest.mark.parametrize("name", sorted(SERVER))
def test_every_algorithm(name, strategy):
    algorithm, built = brief(SERVER[name]), Quadratic(num_clients=6, num_samples=8).build()
    given = {**options(algorithm), "strategy": strategy}
    plain, expected = follow(algorithm, built, captured=False, **given)
    fed, got = follow(algorithm, built, captured=True, **given)
    assert distance(got, expected) <= (0 if name in BITS and strategy == "loop" else NEAR)
    for column, paid in plain.ledger.columns.items():
        assert torch.equal(fed.ledger.columns[column], paid), column
    refused = fed.host.captures.refused
    alone = HOST + (("fedem",) if strategy == "loop" else ())  # its clients draw parts of unequal sizes
    assert (OUTER in refused) == (name in alone), refused
    assert bool(fed.graphs.replayed) == (name not in alone + FRESH)


@pytest.mark.parametrize("kind", ["ring", "complete", "random_undirected"])
@pytest.mark.parametrize("name", sorted(set(PEERS) - {"rasgp"}))
def test_every_algorithm_of_peers(name, kind):
    algorithm, built = brief(PEERS[name]), Quadratic(num_clients=6, num_samples=8).build()
    given = {"network": Network(kind=kind), "batch_size": 3, "dtype": torch.float32}
    _, expected = follow(algorithm, built, captured=False, **given)
    fed, got = follow(algorithm, built, captured=True, **given)
    assert distance(got, expected) <= NEAR
    assert not fed.host.captures.refused
    assert fed.graphs.replayed


@pytest.mark.parametrize("name", ["fedbioacc", "adafbio", "fedbio", "fbo_aggitd", "fedbio_cv"])
def test_a_schedule_and_images(name):
    algorithm, built = brief(SERVER[name]), images(split="shards")
    given = {**options(algorithm), "batch_size": 8, "schedule": Schedule(power=0.5, offset=1.0)}
    _, expected = follow(algorithm, built, captured=False, **given)
    fed, got = follow(algorithm, built, captured=True, **given)
    assert distance(got, expected) <= 10 * NEAR
    assert not fed.host.captures.refused
    assert fed.graphs.replayed


@pytest.mark.parametrize("span", [1, 4])
@pytest.mark.parametrize("name", ["adafbio", "fbo_aggitd", "fedbio", "fedbioacc", "fednest", "fedavg", "fedbio_local"])
def test_outer_iterations_launched_before_the_first_is_finished(name, span, monkeypatch):
    """With a schedule and without one, one outer iteration or four in a graph; nothing is refused."""
    for label, value in {"_PAYS": 1, "_SPAN": span, "_WORK": 2**20, "_LAUNCH": 2**20}.items():
        monkeypatch.setattr(outer_graphs, label, value)
    algorithm = brief(SERVER[name])
    built = Quadratic(num_clients=6, num_samples=8, lower="local" if name == "fedbio_local" else "global").build()
    for schedule in (None, Schedule(power=0.5, offset=1.0)):
        plain = engine(algorithm, built, captured=False, **options(algorithm))
        expected = travel(plain, algorithm, num_iterations=60, schedule=schedule)
        fed = engine(algorithm, built, captured=True, **options(algorithm))
        seen = hurry(fed, algorithm, num_iterations=60, schedule=schedule, looks=20)
        assert distance(seen.values(), [expected[iteration - 1] for iteration in seen]) <= 10 * NEAR
        for column, paid in plain.ledger.columns.items():
            assert torch.equal(fed.ledger.columns[column], paid), column
        assert not fed.host.captures.refused
        spans = [one.span for one in pairs(fed.graphs)]
        assert max(spans, default=1) == (1 if name == "fednest" else span)


def test_a_long_run_compiles_its_derivatives():
    algorithm, built = brief(SERVER["fbo_aggitd"]), images(split="iid")
    given = {**options(algorithm), "batch_size": 8}
    _, expected = follow(algorithm, built, captured=False, **given)
    fed = engine(algorithm, built, captured=True, **given)
    expect(fed, 10**6)
    got = travel(fed, algorithm, num_iterations=len(expected))
    assert fed.host.oracle.compiles
    assert not fed.host.captures.refused
    assert distance(got, expected) <= 10 * NEAR


def test_a_refusal_leaves_the_device_as_it_was():
    """A capture that waits for the device fails; the run goes on with phases."""
    algorithm, built = brief(SERVER["clustered_fl"]), Quadratic(num_clients=6, num_samples=8).build()
    _, expected = follow(algorithm, built, captured=False, **options(algorithm))
    fed, got = follow(algorithm, built, captured=True, **options(algorithm))
    assert distance(got, expected) <= NEAR
    assert OUTER in fed.host.captures.refused


def test_a_message_is_the_wide_product_rounded_once():
    generator = torch.Generator().manual_seed(1)
    links = (torch.rand(7, 7, generator=generator) < 0.5) | torch.eye(7, dtype=torch.bool)
    send = 1 / links.sum(1).double()
    rows = torch.randn(7, 1000, generator=generator)
    mixing = Mixing(links, torch.eye(7, dtype=torch.float64), send)  # every peer receives its own message only
    expected = (rows.double() * send[:, None]).float()
    assert torch.equal(mixing(rows.cuda()).cpu(), expected)
    assert torch.equal(mixing(rows), expected)


def test_draws_of_one_kernel_have_the_bits_of_tensors():
    stream, ids, high = Stream(2**31 + 7), torch.tensor([0, 5, 2**32 - 2]), torch.tensor([1, 60, 2**31 - 1])
    for call, steps, width in ((1, range(3), 1), (65_000, range(7, 130), 33)):
        address = {"iteration": 2**31 + 1, "call": call, "steps": steps, "width": width}
        assert torch.equal(stream.integers("B", ids.cuda(), high.cuda(), **address).cpu(),
                           stream.integers("B", ids, high, **address))  # fmt: skip
        assert torch.equal(stream.bits("B", ids.cuda(), **address).cpu(), stream.bits("B", ids, **address))
    assert all(fused_draws._TRUSTED.values())


def test_a_draw_is_one_kernel_under_a_capture():
    """The kernel reads the outer iteration when it is replayed."""
    stream, ids, when = Stream(3), torch.arange(4).cuda(), torch.tensor([5]).cuda()
    draw = lambda: stream.bits("B", ids, iteration=when.view(1, 1, 1), call=2, steps=range(3), width=9)
    draw()
    results, replay = cuda_graphs.recorded(lambda: {"words": draw()}, torch.device("cuda"))
    for iteration in (5, 6, 1_000_000):
        when.fill_(iteration)
        replay()
        expected = stream.bits("B", ids.cpu(), iteration=iteration, call=2, steps=range(3), width=9)
        assert torch.equal(results["words"].cpu(), expected)


def test_a_pool_outlives_its_graphs():
    """A result keeps memory of the pool alive after its graph; the next graph shares that pool."""
    device = torch.device("cuda", torch.cuda.current_device())
    one = torch.ones(1000, device=device)
    first, replay = cuda_graphs.recorded(lambda: {"value": one * 2}, device)
    handle = cuda_graphs._POOLS[device].handle
    del replay
    gc.collect()
    second, replay = cuda_graphs.recorded(lambda: {"value": one * 3}, device)
    replay()
    assert cuda_graphs._POOLS[device].handle == handle
    assert float(second["value"].sum()) == 3000
    assert first["value"].data_ptr() != second["value"].data_ptr()
