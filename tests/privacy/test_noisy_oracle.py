"""Derivatives with noise for one example: sensitivity, noise, coins, against dense sums in float64."""

import dataclasses
import math

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.errors import SettingError
from fedbilevel.federation.host import Host
from fedbilevel.oracle import derivatives
from fedbilevel.privacy import noisy_oracle
from fedbilevel.privacy.examples import per_example_clipped_sum
from fedbilevel.privacy.noise import addressed_words
from fedbilevel.privacy.noisy_oracle import KINDS, ExampleNoise, check_means, clipped_integers
from fedbilevel.problem.draws import Stream
from fedbilevel.problem.problem import Problem, Scopes
from fedbilevel.tasks.quadratic import Quadratic

TASK = Quadratic(num_clients=3, num_samples=6, noise=0.7, cross=0.3)
ROLE = {"gy": "train", "gx": "train", "hv": "train", "jv": "train", "fx": "val", "fy": "val"}


def host_of(clients=None, problem=None, **more):
    return Host(FedBiO(), problem or TASK.build().problem, clients or TASK.clients(), dtype=torch.float64, **more)


def noise_of(clip=1.0, noise=1.0, rate=1.0, seed=0):
    stream = Stream(seed)
    draws = lambda purpose, client, iteration, call: addressed_words(
        stream, purpose, client, iteration=iteration, call=call
    )
    return ExampleNoise(dict.fromkeys(KINDS, clip), noise, rate, draws)


@pytest.fixture
def silent(monkeypatch):
    """Noise of zero, so that the rest of a release is seen."""
    monkeypatch.setattr(noisy_oracle, "ring_noise", lambda shape, sigma, source: torch.zeros(*shape, dtype=torch.int64))


ONE = {"gy": "lower_grad", "gx": "lower_grad_x", "fx": "upper_grad_x", "fy": "upper_grad_y", "hv": "hessian_product",
       "jv": "jacobian_product"}  # fmt: skip


def asked_for(kind, host, how, call=1):
    """One derivative at one point."""
    everyone, rng = torch.arange(len(host)), np.random.default_rng(3)
    points = [torch.as_tensor(rng.standard_normal(len(p))) for p in (host.x0, host.y0, host.y0)]
    oracle = how.at(host, everyone, 1, call)
    return getattr(oracle, ONE[kind])(*points[: 3 if "v" in kind else 2], host.data.batch(everyone, ROLE[kind]))


def asked(host, how, call=1):
    """Every derivative at one point, by kind."""
    everyone, rng = torch.arange(len(host)), np.random.default_rng(3)
    x, y, v = (torch.as_tensor(rng.standard_normal(len(p))) for p in (host.x0, host.y0, host.y0))
    train, val = (host.data.batch(everyone, role) for role in ("train", "val"))
    oracle = host.oracle if how is None else how.at(host, everyone, 1, call)
    jv, hv = oracle.second_order(x, y, v, train)
    fx, fy = oracle.upper_grads(x, y, val)
    found = {"gy": oracle.lower_grad(x, y, train), "gx": oracle.lower_grad_x(x, y, train), "hv": hv, "jv": jv}
    return {**found, "fx": fx, "fy": fy}


def test_without_clipping_and_noise_a_release_is_the_derivative(silent):
    host = host_of()
    noisy, exact = asked(host, noise_of(clip=1e3)), asked(host, None)
    for kind in KINDS:
        torch.testing.assert_close(noisy[kind], exact[kind], rtol=0, atol=1e-5)  # units of 1e3 / 2^30
    everyone = torch.arange(3)
    train, val = (host.data.batch(everyone, role) for role in ("train", "val"))
    x, y, v = torch.ones(len(host.x0)).double(), torch.ones(len(host.y0)).double(), torch.ones(len(host.y0)).double()
    for shared in (True, False):
        again = (val, train) if shared else (dataclasses.replace(val), dataclasses.replace(train))
        given = dict(zip(("gy", "fx", "ju", "fy", "hu"), (train, val, train, *again), strict=True))
        assert (given["fx"] is given["fy"]) == shared
        noisy = noise_of(clip=1e3).at(host, everyone, 1, 1).directions(x, y, v, **given)
        for one, other in zip(noisy, host.oracle.directions(x, y, v, **given), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("clip", [0.4, 3.0])
def test_clipped_sums_are_those_of_the_plain_sum(clip, monkeypatch):
    """In integers and in chunks, and as `per_example_clipped_sum` adds them in floats."""
    host = host_of()
    x, y, v = torch.ones(len(host.x0)).double(), torch.ones(len(host.y0)).double(), torch.ones(len(host.y0)).double()
    monkeypatch.setattr(noisy_oracle, "_AT_ONCE", 4 * (len(x) + 2 * len(y)))
    for build, points, role in (
        (derivatives.pull_both, (x, y, v), "train"),
        (derivatives.upper_grads, (x, y), "val"),
    ):
        batch = host.data.batch(torch.arange(3), role)
        wanted = per_example_clipped_sum(host.oracle, build, points, batch, clip)
        for i in range(3):
            num = int(batch.counts[i])
            found = clipped_integers(host.oracle, build, points, batch.row(i), torch.arange(num), [clip, clip])
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one.double() * clip / 2**30, other[i], rtol=0, atol=num * clip * 2e-9)


@pytest.mark.parametrize("rate", [1.0, 0.4])
@pytest.mark.parametrize("kind", KINDS)
def test_one_example_moves_a_release_by_clip_over_the_batch_at_most_and_in_the_worst_case(silent, kind, rate):
    """Its neighbour has zeros in its place, and so no derivative; clients differ in their numbers."""
    moves = []
    for factor in (1.0, 1e4):  # an example that is clipped a little, and far beyond the norm
        clients = TASK.clients()
        role, sizes = ROLE[kind], [len(next(iter(client[ROLE[kind]].values()))) for client in clients]
        for fields in clients[1][role].values():
            fields[2] *= factor
        gone = [{r: {name: rows.copy() for name, rows in fields.items()} for r, fields in c.items()} for c in clients]
        for fields in gone[1][role].values():
            fields[2] = 0.0
        hosts = [host_of(some) for some in (clients, gone)]
        for call in range(1, 9):
            with_it, without = (asked_for(kind, host, noise_of(0.5, rate=rate), call) for host in hosts)
            moved = torch.linalg.vector_norm(with_it - without, dim=1)
            most = 0.5 / (rate * sizes[1])
            rounding = math.sqrt(with_it.shape[1]) * most / 2**30
            assert float(moved[0]) == float(moved[2]) == 0.0
            assert float(moved[1]) <= most + rounding
            moves.append(float(moved[1]) / most)
            if rate == 1:
                break
    assert max(moves) == pytest.approx(1.0, abs=1e-8)
    assert (min(moves) == 0.0) == (rate < 1)  # its coin


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_the_noise_has_the_stated_variance(rate):
    """noise * clip / (rate * n), for clients with different numbers of examples."""
    host = host_of()
    noisy, quiet = noise_of(0.5, 2.0, rate), noise_of(0.5, 1e-6, rate)
    apart = [
        asked_for("gy", host, noisy, call) - asked_for("gy", host, quiet, call) for call in range(100)
    ]  # the same coins
    found = torch.stack(apart)
    for client in range(3):
        stated = 2.0 * 0.5 / (rate * int(host.data.sizes["train"][client]))
        assert float(found[:, client].std()) == pytest.approx(stated, rel=0.1)
        assert abs(float(found[:, client].mean())) < 4 * stated / math.sqrt(found[:, client].numel())
    pairs = torch.corrcoef(found.permute(2, 1, 0).reshape(-1, 100))
    assert float((pairs - torch.eye(len(pairs))).abs().max()) < 0.5  # entries and clients are independent


def test_coins_are_fair_and_drawn_anew_for_every_release():
    host, how = host_of(), noise_of(rate=0.3)
    oracle = how.at(host, torch.arange(3), 1, 1)
    draws = []
    for number in range(60):
        oracle._number = number
        draws.append(torch.bincount(oracle._coins(0, 500), minlength=500))
    table = torch.stack(draws).double()
    assert float(table.max()) == 1.0  # nobody twice
    assert float(table.mean()) == pytest.approx(0.3, abs=4 * math.sqrt(0.21 / table.numel()))
    assert float(table.sum(1).std()) == pytest.approx(math.sqrt(500 * 0.21), rel=0.35)  # a batch of no fixed size
    together = (table[:-1] * table[1:]).mean()
    assert float(together) == pytest.approx(0.09, abs=0.01)


def test_a_batch_without_examples_is_noise_and_an_example_that_is_not_finite_is_zero(silent):
    host = host_of()
    none = asked(host, noise_of(rate=1e-9))
    assert all(float(value.abs().max()) == 0.0 for value in none.values())
    y = host.y0 + 1.0
    fields = host.data.batch(torch.arange(3), "train").row(1)
    fields = {**fields, "c": fields["c"].clone()}
    fields["c"][2] = math.inf
    rest = torch.tensor([i for i in range(len(fields["c"])) if i != 2])
    sums = [
        clipped_integers(host.oracle, derivatives.lower_grad, (host.x0, y), fields, numbers, [1.0])[0]
        for numbers in (rest, torch.arange(len(fields["c"])))
    ]
    assert torch.equal(*sums)


def ragged():
    """A private x with a weight for every training example, and clients of different sizes."""
    rng = np.random.default_rng(0)
    clients = [
        {role: {"a": rng.standard_normal((n, 3))} for role, n in (("train", 4 + 3 * i), ("val", 5))} for i in range(3)
    ]
    upper = lambda x, y, batch: ((batch["a"] - y["y"]) ** 2).sum(1)
    lower = lambda x, y, batch: torch.sigmoid(x["w"][batch["index"]]) * ((batch["a"] - y["y"]) ** 2).sum(1)
    x0 = lambda sizes: {"w": torch.zeros(sizes["train"])}
    return Problem(upper=upper, lower=lower, x0=x0, y0={"y": torch.ones(3)}, scopes=Scopes(upper="private")), clients


def test_padding_of_a_private_x_has_no_noise():
    problem, clients = ragged()
    host = host_of(clients, problem)
    everyone = torch.arange(3)
    oracle = noise_of().at(host, everyone, 1, 1)
    y = host.y0 + torch.zeros(3, 3)
    jv = oracle.jacobian_product(host.x0, y, torch.ones(3, 3).double(), host.data.batch(everyone, "train"))
    for row, num in zip(jv, (4, 7, 10), strict=True):
        assert bool((row[:num] != 0).all())
        assert float(row[num:].abs().sum()) == 0.0
    alone = host_of(clients[1:2], problem, ids=[1])  # a site, whose x is no longer than its own
    oracle = noise_of().at(alone, torch.arange(1), 1, 1)
    mine = oracle.jacobian_product(
        alone.x0, y[:1], torch.ones(1, 3).double(), alone.data.batch(torch.arange(1), "train")
    )
    assert torch.equal(mine[0], jv[1, :7])


def test_losses_that_are_no_means_over_examples_are_refused():
    check_means(host_of())
    check_means(host_of(*reversed(ragged())))
    problem, clients = ragged()
    spread = lambda x, y, batch: ((batch["a"] - batch["weight"] @ batch["a"]) ** 2 * y["y"]).sum(1)
    for label in ("upper", "lower"):
        odd = Problem(**{"upper": problem.upper, "lower": problem.lower, label: spread}, x0=problem.x0, y0=problem.y0,
                      scopes=problem.scopes)  # fmt: skip
        with pytest.raises(SettingError, match=f"the {label} loss is no mean over examples, so the part of one"):
            fb.solve(odd, clients, "fedbio", num_iterations=1,
                     aggregation=fb.Aggregation(level="example", clip=1.0, noise=1.0, epsilon=9.0))  # fmt: skip


def test_nothing_but_derivatives_can_be_asked_for():
    host = host_of()
    with pytest.raises(SettingError, match="asks for 'evaluate', which noise of the level 'example' does not cover"):
        _ = noise_of().at(host, torch.arange(3), 1, 1).evaluate
