"""Hyper-Gradient Push against dense algebra, exact hypergradients and a numpy transcription.

The clients differ in all their data. Upper variables are private and differ between peers wherever
an estimate is checked: with equal blocks, an estimator that returns their mean would pass too.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedbilevel.algorithms.hgp import HGP
from fedbilevel.engines import peer_verbs
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.errors import NonFiniteError, SettingError
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.mixing import Mixing
from fedbilevel.federation.network import Links, Network
from fedbilevel.oracle.hypergradient import hypergradient, lower_solution, start_vector
from fedbilevel.problem.client_data import Batch
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.task import Built
from support.numeric.by_hand import Samples, fx, fy, gy, hessian, jacobian
from support.numeric.yardstick import relative

DIRECTED = Network(kind="random_directed", seed=3)
EXACT = Averaging(kind="exact")


def bent(**settings: Any) -> Quadratic:
    """Curvature and J depend on y, f couples x and y: nothing may be taken at a wrong point."""
    return Quadratic(
        **{
            "num_clients": 4,
            "dim_upper": 2,
            "dim_lower": 3,
            "heterogeneity": 0.7,
            "bend": 0.5,
            "cross": 0.3,
            "upper": "private",
            **settings,
        }
    )


def engine(
    algorithm: Any, built: Built, network: Any = Network(), averaging: Averaging | None = EXACT, **options: Any
) -> PeerSimulation:
    return PeerSimulation(
        algorithm,
        built.problem,
        built.clients,
        network=network,
        averaging=averaging,
        **{"dtype": torch.float64, **options},
    )


def differing(peers: PeerSimulation, scale: float = 0.5) -> Tensor:
    """x, another one at every peer where it is private; zero on padding."""
    x = peers.host.x0
    draw = scale * torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if peers.host.x_sizes is not None:
        draw = draw * (torch.arange(x.shape[1]) < peers.host.x_sizes[:, None])
    return x + draw


class Dense:
    """Matrices of every client at (x, y), built column by column, and quantities derived from them."""

    def __init__(self, peers: PeerSimulation, x: Tensor, y: Tensor) -> None:
        host, n = peers.host, peers.num_clients
        everyone = torch.arange(n)
        train, val = host.data.batch(everyone, "train"), host.data.batch(everyone, "val")
        units = torch.eye(len(host.y0), dtype=torch.float64)
        both = [host.oracle.second_order(x, y, unit, train) for unit in units]
        self.J, self.H = torch.stack([j for j, _ in both], 2), torch.stack([h for _, h in both], 2)
        self.fx, self.fy = host.oracle.upper_grads(x, y, val)
        self.share = host.weights(everyone).double() / host.weights(everyone).sum()
        self.mean_H, self.mean_fy = torch.tensordot(self.share, self.H, 1), self.share @ self.fy
        self.largest = float(torch.linalg.eigvalsh(self.H).max())  # of any client
        self.smallest = float(torch.linalg.eigvalsh(self.mean_H).min())

    def truncated(self, eta: float, num_terms: int) -> Tensor:
        """f_x,i - J_i eta sum_{m < M} (I - eta H)^m f_y with the mean Hessian."""
        step = torch.eye(len(self.mean_fy), dtype=torch.float64) - eta * self.mean_H
        u = eta * sum(torch.linalg.matrix_power(step, m) for m in range(num_terms)) @ self.mean_fy
        return self.fx - self.J @ u


class Point:
    """A problem at y*(x), with x different per peer, its exact hypergradient and a valid step."""

    def __init__(self, built: Built) -> None:
        self.built = built
        peers = engine(HGP(), built)
        self.x = differing(peers)
        self.y = lower_solution(peers.host, self.x)
        self.target = hypergradient(peers.host, self.x, self.y, method="exact").value
        self.dense = Dense(peers, self.x, self.y)
        self.eta = 0.95 / self.dense.largest
        local = built.problem.scopes.lower == "local"
        slowest = float(torch.linalg.eigvalsh(self.dense.H).min()) if local else self.dense.smallest
        self.enough = int(np.log(1e-10) / np.log(1 - self.eta * slowest)) + 1

    def estimate(
        self,
        network: Any = Network(),
        averaging: Averaging = EXACT,
        num_terms: int | None = None,
        eta: float | None = None,
        **options: Any,
    ) -> Tensor:
        settings = {
            "lr_system": eta or self.eta,
            "num_terms": num_terms or self.enough,
            "lower_solver": "mix",
            "num_curvature_products": 0,
        }
        algorithm = HGP(**settings)
        peers = engine(algorithm, self.built, network, averaging, **options)
        value, u = algorithm.estimate(peers, peers.place("x", self.x), peers.place("y", self.y))
        assert u.shape == (peers.num_clients, len(peers.host.y0))
        return value

    def error(self, *args: Any, **options: Any) -> float:
        return relative(self.estimate(*args, **options), self.target)

    def network_error(self, network: Any, averaging: Averaging, num_terms: int) -> float:
        """Of averages that are not exact alone: against as many terms with exact ones."""
        return relative(self.estimate(network, averaging, num_terms), self.dense.truncated(self.eta, num_terms))


# ---- the exact hypergradient ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"client_weights": "by_samples"},
        {"upper": "shared"},
        {"upper": "shared", "client_weights": "by_samples"},
        {"lower": "local"},
        {"lower": "local", "upper": "shared"},
    ],
    ids=lambda settings: "-".join(settings.values()) or "private",
)
def test_at_the_lower_solution_exact_averages_give_the_exact_hypergradient_at_every_peer(settings):
    point = Point(bent(**settings).build())
    value = point.estimate()
    assert len(value) == 4
    assert (
        max(relative(row, point.target if point.target.ndim == 1 else point.target[i]) for i, row in enumerate(value))
        < 1e-8
    )


NETWORKS = {
    "directed": (DIRECTED, Averaging(num_steps=25)),
    "directed, weights kept": (DIRECTED, Averaging(num_steps=25, weights="kept")),
    "exponential, until agreed": (Network(kind="exponential"), Averaging(tolerance=1e-11)),
    "ring": (Network(kind="ring"), Averaging(kind="gossip", num_steps=24)),
    "undirected": (Network(kind="random_undirected"), Averaging(kind="gossip", tolerance=1e-10)),
    "lossy": (Network(kind="ring", loss=0.15, seed=2), Averaging(kind="robust", tolerance=1e-10)),
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"client_weights": "by_samples"}, {"upper": "shared"}], ids=["private", "shared"])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_averaging_operator_gives_the_exact_hypergradient(name, settings):
    if name == "lossy" and settings == {"upper": "shared"}:
        settings = {"upper": "shared", "num_clients": 3}
    network, averaging = NETWORKS[name]
    point = Point(bent(**settings, **({"num_clients": 5} if network.kind == "exponential" else {})).build())
    value = point.estimate(network, averaging)
    target = point.target.expand_as(value)
    assert max(relative(row, wanted) for row, wanted in zip(value, target, strict=True)) < 1e-8
    if point.target.ndim == 2:  # blocks are told apart: their mean is no answer for anybody
        assert relative(value.mean(0).expand_as(target), target) > 0.1


def test_where_all_blocks_are_equal_a_mean_of_blocks_cannot_be_told_from_the_answer():
    """Other tests avoid equal blocks for this reason; the published error figure has them."""
    point = Point(bent(heterogeneity=0, noise=0).build())
    point.x = point.x[:1].expand(4, -1)
    point.y = lower_solution(engine(HGP(), point.built).host, point.x)
    value = point.estimate()
    target = hypergradient(engine(HGP(), point.built).host, point.x, point.y, method="exact").value
    assert relative(value, target) < 1e-8
    assert relative(value.mean(0).expand_as(target), target) < 1e-8


def test_ragged_private_variables_get_their_own_blocks():
    """Data cleaning: as many logits as samples, padded in memory, and never sent."""
    built = DataCleaning(num_clients=3, num_clean=5, l2=0.3, test_share=0.83).build()
    peers = engine(HGP(), built)
    assert len(set(peers.host.x_sizes.tolist())) > 1
    x = differing(peers, 1.0)
    y = lower_solution(peers.host, x)
    target = hypergradient(peers.host, x, y, method="cg", tolerance=1e-13).value
    algorithm = HGP(lr_system=0.5, num_terms=120)  # refused if too long
    value, _ = algorithm.estimate(engine(algorithm, built, DIRECTED, Averaging(num_steps=20)), x, y.expand(3, -1))
    assert relative(value, target) < 1e-8
    padding = torch.arange(x.shape[1]) >= peers.host.x_sizes[:, None]
    assert not bool(value[padding].any())
    assert relative(value.mean(0).expand_as(target), target) > 0.1


# ---- rate of convergence -------------------------------------------------------------------------


def test_truncation_in_m_is_the_neumann_series_of_the_mean_hessian_to_the_last_digit():
    point = Point(bent(client_weights="by_samples").build())
    dense, eta = point.dense, point.eta
    rate, u = 1 - eta * dense.smallest, torch.linalg.solve(dense.mean_H, dense.mean_fy)
    J = dense.J.reshape(-1, dense.J.shape[2])
    slowest = torch.linalg.eigh(dense.mean_H).eigenvectors[:, 0]
    above = float(torch.linalg.matrix_norm(J, 2) * u.norm())
    below = float(
        torch.linalg.svdvals(J).min() * (slowest @ u).abs()
    )  # what lies along the slowest direction cannot be less
    assert 0 < below < above
    for M in (1, 2, 5, 12, 25):
        value = point.estimate(num_terms=M)
        assert relative(value, dense.truncated(eta, M)) < 1e-12
        assert (
            relative(
                value,
                hypergradient(
                    engine(HGP(), point.built).host, point.x, point.y, method="neumann", step=eta, num_terms=M
                ).value,
            )
            < 1e-12
        )
        assert below * rate**M <= float(torch.linalg.vector_norm(value - point.target)) <= above * rate**M


def test_on_a_fixed_network_the_error_falls_by_its_second_eigenvalue_with_every_step():
    point, network = Point(bent(num_clients=6).build()), Network(kind="ring")
    second = float(torch.linalg.eigvalsh(network.between(6).mixing(0).matrix).abs().sort().values[-2])
    errors = {S: point.network_error(network, Averaging(kind="gossip", num_steps=S), 15) for S in (2, 4, 8, 16)}
    for fewer, more in itertools.pairwise(errors):
        factor = errors[more] / errors[fewer] / second ** (more - fewer)
        assert 0.5 < factor < 2, (fewer, more, errors)


def debiased_products(network: Any, n: int, S: int, num: int) -> Iterator[Tensor]:
    """What S steps of Push-Sum from equal weights make of n rows, block after block."""
    for m in range(num):
        product = torch.eye(n, dtype=torch.float64)
        for step in range(m * S, (m + 1) * S):
            out = network.between(n).adjacency(step).double()
            product = (out / out.sum(1, keepdim=True)).T @ product
        yield product / product.sum(1, keepdim=True)


def test_on_a_directed_network_the_error_follows_the_measured_contraction():
    """The error is linear in the distance of the averages from the mean, so both fall together.

    The contribution of the m-th average has weight (1 - eta mu)^m."""
    point, M = Point(bent().build()), 15
    fades = 1 - point.eta * point.dense.smallest
    away, errors = {}, {}
    for S in (2, 4, 8, 16):
        errors[S] = point.network_error(DIRECTED, Averaging(num_steps=S), M)
        away[S] = sum(
            fades**m * float(torch.linalg.matrix_norm(one - 1 / 4, 2))
            for m, one in enumerate(debiased_products(DIRECTED, 4, S, M))
        )
    assert errors[16] < 1e-5 * errors[2]
    for S in (2, 4, 8, 16):
        assert 0.01 < errors[S] / away[S] < 0.3, (errors, away)


def test_without_division_by_the_weights_the_error_does_not_fall(monkeypatch):
    point = Point(bent().build())
    right = [point.network_error(DIRECTED, Averaging(num_steps=S), 15) for S in (4, 16)]
    monkeypatch.setattr(peer_verbs, "debiased", lambda rows, weights: rows)
    wrong = [point.network_error(DIRECTED, Averaging(num_steps=S), 15) for S in (4, 16)]
    assert right[1] < 1e-2 * right[0]
    assert min(wrong) > 0.02
    assert wrong[1] > 0.3 * wrong[0]


def test_rows_that_sum_to_one_instead_of_columns_give_another_mean(monkeypatch):
    point = Point(bent().build())

    def row_stochastic(self: Links, step: int) -> Mixing:
        arrives = self.adjacency(step).double().T
        return Mixing(
            self.adjacency(step), arrives / arrives.sum(1, keepdim=True), torch.ones(len(arrives), dtype=torch.float64)
        )

    monkeypatch.setattr(Links, "mixing", row_stochastic)
    assert min(point.network_error(DIRECTED, Averaging(num_steps=S), 15) for S in (8, 20)) > 0.03


# ---- the step of u -------------------------------------------------------------------------------


def refusal(eta: float, built: Built, x: Tensor, y: Tensor, **settings: Any) -> str:
    algorithm = HGP(lr_system=eta, num_terms=1, **settings)
    peers = engine(algorithm, built)
    with pytest.raises(SettingError, match=r"^lr_system = .* is above the stable range") as caught:
        algorithm.estimate(peers, x, peers.place("y", y))
    return str(caught.value)


@pytest.mark.parametrize("num_products", [3, 20])
def test_a_step_above_the_stable_range_is_refused_with_the_largest_that_is_allowed(num_products):
    point = Point(bent(num_clients=5).build())
    values, vectors = torch.linalg.eigh(point.dense.H)
    # k products from the start vector: |H v| lies between the largest eigenvalue and this
    c = torch.einsum("nij,i->nj", vectors, start_vector(point.y)) ** 2
    ratio = (values / values[:, -1:]) ** (2 * (num_products - 1))
    lowest = values[:, -1] * (c[:, -1] / (c * ratio).sum(1)).sqrt()
    text = refusal(1.0, point.built, point.x, point.y, num_curvature_products=num_products)
    client, allowed = re.search(r"client (\d+) has curvature .* largest allowed value is ([\d.]+) ", text).groups()
    rounding = 5e-4
    assert 1 / point.dense.largest * (1 - rounding) <= float(allowed) <= 1 / float(lowest.max()) * (1 + rounding)
    if num_products == 20:
        assert float(allowed) == pytest.approx(1 / point.dense.largest, rel=1e-3)
        assert int(client) == int(values[:, -1].argmax())
    # what is printed is accepted, a little more is not
    peers = engine(HGP(lr_system=float(allowed), num_terms=1, num_curvature_products=num_products), point.built)
    peers.algorithm.estimate(peers, point.x, peers.place("y", point.y))
    refusal(1.01 * float(allowed), point.built, point.x, point.y, num_curvature_products=num_products)


@pytest.mark.parametrize("curvature", [1.0, 1.5, 3.0, 6.0, 7.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_value_that_the_refusal_prints_is_accepted_even_if_printing_rounded_it_up(curvature, dtype):
    clients = SimpleNamespace(ids=torch.arange(2), hessian_product=lambda x, y, v, batch: curvature * v)
    peers = SimpleNamespace(
        clients=clients, steps=lambda num: [SimpleNamespace(batch=lambda *_: SimpleNamespace(whole=lambda: None))]
    )
    y = torch.zeros(2, 5, dtype=dtype)
    with pytest.raises(SettingError, match=r"above the stable range") as caught:
        HGP(lr_system=1.002 / curvature).check_step(peers, y, y)
    printed = float(re.search(r"largest allowed value is ([\d.]+) ", str(caught.value)).group(1))
    assert printed == pytest.approx(1 / curvature, rel=5e-4)
    HGP(lr_system=printed).check_step(peers, y, y)
    HGP(lr_system=1 / curvature).check_step(peers, y, y)


def test_the_check_names_the_client_by_its_number_and_happens_once_and_can_be_turned_off():
    point = Point(bent(num_clients=3).build())
    worst = int(torch.linalg.eigvalsh(point.dense.H)[:, -1].argmax())
    ids = [(worst + k) % 3 for k in (1, 2, 0)]
    algorithm = HGP(lr_system=1.0, num_terms=1)
    peers = PeerSimulation(
        algorithm,
        point.built.problem,
        [point.built.clients[i] for i in ids],
        ids=ids,
        averaging=EXACT,
        dtype=torch.float64,
    )
    with pytest.raises(SettingError, match=f"client {worst} has"):
        algorithm.estimate(peers, point.x[ids], peers.place("y", point.y))
    peers.begin(2)  # measured in the first outer iteration only
    algorithm.estimate(peers, point.x[ids], peers.place("y", point.y))
    off = dataclasses.replace(algorithm, num_curvature_products=0)
    peers = engine(off, point.built)
    off.estimate(peers, point.x, peers.place("y", point.y))
    assert peers.ledger.totals()["hvp"] == 0


def test_a_step_that_the_papers_condition_allows_diverges():
    """E14: eta mu < 1 is not enough; 2.2 / lambda_max diverges even with exact averages."""
    point = Point(bent(dim_lower=8, bend=0.1).build())
    eta = 2.2 / float(torch.linalg.eigvalsh(point.dense.mean_H)[-1])
    assert eta * float(torch.linalg.eigvalsh(point.dense.H).min()) < 1
    assert point.error(num_terms=100, eta=eta) / point.error(num_terms=50, eta=eta) == pytest.approx(1.2**50, rel=0.05)


# ---- the whole outer iteration, written again in numpy -------------------------------------------


def by_hand(
    task: Quadratic, a: HGP, network: Any, averaging: Averaging, num: int, batch_size: int | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield x and y of every peer after every outer iteration, one peer and one sample at a time.

    Only the draws and the edges come from the library."""
    samples = Samples(task, batch_size=batch_size)
    n, links = len(samples), network.between(len(samples))
    counts = np.array([len(client["train"]["c"]) for client in samples.clients], float)
    p = (counts / counts.mean() if task.client_weights == "by_samples" else np.ones(n))[:, None]
    time, carried = 0, p
    x, z, w = np.zeros((n, samples.dx)), np.zeros((n, samples.dy)), p
    first, second = np.zeros_like(x), np.zeros_like(x)

    def push(rows: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        nonlocal time
        out = links.adjacency(time).numpy()
        time += 1
        new = [
            sum(value[j] / out[j].sum() for j in range(n) if out[j, i]) for value in (rows, weights) for i in range(n)
        ]
        return np.array(new[:n]), np.array(new[n:])

    def mix(rows: np.ndarray) -> np.ndarray:
        nonlocal carried
        if averaging.kind == "exact":
            return np.repeat((p * rows).mean(0, keepdims=True), n, axis=0)
        top, bottom = p * rows, carried if averaging.weights == "kept" else p
        for _ in range(averaging.num_steps):
            top, bottom = push(top, bottom)
        carried = bottom
        return top / bottom

    J_from, H_from = ("B_g", "B_g") if a.minibatches == "shared" else ("B_j", "B_h")
    T, M, eta = a.num_lower_steps, a.num_terms, a.lr_system
    for k in range(1, num + 1):
        if not a.warm_start:
            z, w = np.zeros((n, samples.dy)), p
        y = z / w
        for s in range(T):
            lr = a.lr_lower
            if a.lower_schedule == "milestones":
                lr *= 0.01 if 12 * s >= 11 * T else 0.1 if 6 * s >= 5 * T else 1
            g = np.array([gy(samples.drawn(i, "train", "B", (k, 1, s)), x[i], y[i]) for i in range(n)])
            if a.lower_solver == "push":
                z, w = push(z - lr * p * g, w)
                y = z / w
            else:
                y = mix(y - lr * g)
        z = w * y
        uppers = [samples.drawn(i, "val", "B_f", (k, 2, 0)) for i in range(n)]
        u, v = (np.array([d(b, x[i], y[i]) for i, b in enumerate(uppers)]) for d in (fy, fx))
        for m in range(M):
            u = mix(u)
            v = v - eta * np.array([jacobian(samples.drawn(i, "train", J_from, (k, 2, m))) @ u[i] for i in range(n)])
            u = u - eta * np.array([hessian(samples.drawn(i, "train", H_from, (k, 2, m))) @ u[i] for i in range(n)])
        if task.upper == "shared":
            both = mix(np.hstack([v, x]))
            v, x = both[:, : samples.dx], both[:, samples.dx :]
        step = v
        if a.optimiser == "adam":
            first, second = 0.9 * first + 0.1 * v, 0.999 * second + 0.001 * v**2
            step = first / (1 - 0.9**k) / (np.sqrt(second / (1 - 0.999**k)) + 1e-8)
        x = x - a.lr_upper * step
        yield x, y


PUSH = Averaging(num_steps=3)
CASES = {
    "private": ({}, {}, DIRECTED, PUSH),
    "shared, by samples": ({"upper": "shared", "client_weights": "by_samples"}, {}, DIRECTED, PUSH),
    "shared minibatches, adam": ({}, {"minibatches": "shared", "optimiser": "adam"}, DIRECTED, PUSH),
    "weights kept": (
        {"upper": "shared", "client_weights": "by_samples"},
        {"optimiser": "adam"},
        DIRECTED,
        Averaging(num_steps=2, weights="kept"),
    ),
    "mix, from the start": (
        {"client_weights": "by_samples"},
        {"lower_solver": "mix", "warm_start": False},
        Network(kind="exponential"),
        PUSH,
    ),
    "push, from the start": ({}, {"warm_start": False}, DIRECTED, PUSH),
    "exact": ({"upper": "shared", "client_weights": "by_samples"}, {"lower_solver": "mix"}, Network(), EXACT),
    "milestones": ({}, {"lower_schedule": "milestones", "num_lower_steps": 12}, DIRECTED, PUSH),
    "one term": ({"upper": "shared"}, {"num_terms": 1}, DIRECTED, PUSH),
}


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("case", CASES)
def test_outer_iterations_are_those_written_by_hand(case, batch_size):
    about, settings, network, averaging = CASES[case]
    task = Quadratic(**{"num_clients": 3, "dim_upper": 2, "dim_lower": 3, "cross": 0.3, "upper": "private", **about})
    rates = {"lr_upper": 0.1, "lr_lower": 0.1, "lr_system": 0.1, "num_curvature_products": 0}
    algorithm = HGP(**{**rates, "num_terms": 3, "num_lower_steps": 4, **settings})
    peers = engine(algorithm, task.build(), network, averaging, batch_size=batch_size)
    state = algorithm.init(peers)
    for k, (x, y) in enumerate(by_hand(task, algorithm, network, averaging, 3, batch_size), start=1):
        peers.begin(k)
        state = algorithm.round(peers, state)
        assert relative(state.x, x) < 1e-12
        assert relative(state.y, y) < 1e-12
        if averaging.kind != "exact":  # far from agreed, so order and operator matter
            assert float(np.abs(y - y.mean(0)).max()) > 1e-3


def test_adams_steps_are_those_of_torch(monkeypatch):
    task, seen = bent(num_clients=3), []
    algorithm = HGP(optimiser="adam", lr_upper=0.05, lr_system=0.1, num_terms=3, num_lower_steps=2)
    blocks = HGP.blocks
    monkeypatch.setattr(HGP, "blocks", lambda self, *rest: (seen.append(blocks(self, *rest)), seen[-1])[1])
    peers = engine(algorithm, task.build(), DIRECTED, PUSH)
    state = algorithm.init(peers)
    x = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    theirs = torch.optim.Adam([x], lr=0.05)
    for k in range(1, 9):
        peers.begin(k)
        state = algorithm.round(peers, state)
        x.grad = seen[-1][0].clone()
        theirs.step()
        assert relative(state.x, x.detach()) < 1e-12
    assert len({round(float(v[0, 0]), 6) for v, _ in seen}) == 8


def test_peers_with_one_shared_x_stay_together():
    """Averages of v differ a little between peers at every outer iteration; x must not add that up."""
    task = Quadratic(num_clients=5, dim_upper=2, dim_lower=3)
    algorithm = HGP(lr_upper=0.05, lr_lower=0.1, lr_system=0.1, num_terms=4, num_lower_steps=2)
    peers = engine(algorithm, task.build(), Network(kind="ring"), Averaging(kind="gossip", num_steps=2))
    state, apart = algorithm.init(peers), {}
    for k in range(1, 46):
        peers.begin(k)
        state = algorithm.round(peers, state)
        apart[k] = float((state.x - state.x.mean(0)).norm(dim=1).max())
    assert apart[15] > 1e-3
    assert apart[45] < 1.3 * apart[15]


# ---- minibatches, cost, private values -----------------------------------------------------------


class Watched(PeerSimulation):
    """Notes which samples every derivative was taken on."""

    def watch(self, monkeypatch: Any) -> dict[str, list[list[list[int]]]]:
        seen: dict[str, list[list[list[int]]]] = {"jacobian_product": [], "hessian_product": [], "second_order": []}
        for name, calls in seen.items():
            original = getattr(self.host.oracle, name)

            def noted(
                x: Tensor, y: Tensor, v: Tensor, batch: Batch, original: Any = original, calls: Any = calls, **more: Any
            ) -> Any:
                calls.append(batch.fields["index"].tolist())
                return original(x, y, v, batch, **more)

            monkeypatch.setattr(self.host.oracle, name, noted)
        return seen


def test_two_minibatches_are_drawn_apart_and_one_is_shared(monkeypatch):
    M, built = 4, bent(num_samples=40).build()
    for minibatches in ("independent", "shared"):
        algorithm = HGP(minibatches=minibatches, num_terms=M, num_curvature_products=0, lr_system=0.1)
        peers = Watched(algorithm, built.problem, built.clients, averaging=EXACT, batch_size=3, dtype=torch.float64)
        seen = peers.watch(monkeypatch)
        algorithm.estimate(peers, peers.initial()[0], peers.initial()[1])
        drawn = lambda purpose, m, peers=peers: peers.host.stream.integers(
            f"train/{purpose}",
            torch.arange(4),
            torch.tensor([40, 41, 42, 43]),
            iteration=0,
            call=1,
            steps=range(m, m + 1),
            width=3,
        )[:, 0].tolist()
        if minibatches == "independent":
            assert seen["jacobian_product"] == [drawn("B_j", m) for m in range(M)]
            assert seen["hessian_product"] == [drawn("B_h", m) for m in range(M - 1)]
            assert all(a != b for a, b in zip(seen["jacobian_product"], seen["hessian_product"], strict=False))
        else:
            assert [*seen["second_order"], *seen["jacobian_product"]] == [drawn("B_g", m) for m in range(M)]
        flat = [str(one) for calls in seen.values() for one in calls]
        assert len(set(flat)) == len(flat)  # a fresh one every time


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_the_length_of_a_private_x_leaves_no_trace_in_the_bill(optimiser):
    bills = []
    for dim in (1, 5):
        algorithm = HGP(num_terms=2, num_lower_steps=2, lr_system=0.05, optimiser=optimiser)
        peers = engine(algorithm, bent(dim_upper=dim).build(), DIRECTED, Averaging(num_steps=2))
        peers.begin(1)
        algorithm.round(peers, algorithm.init(peers))
        bills.append((peers.ledger.totals(), {name: edges.tolist() for name, edges in peers.ledger.edges.items()}))
    assert bills[0] == bills[1]
    assert bills[0][0]["messages"] > 0


def test_with_a_local_lower_level_and_a_private_x_nothing_is_sent_and_every_peer_is_alone():
    algorithm = HGP(num_terms=60, num_lower_steps=60, lr_lower=0.25, lr_system=0.25, lr_upper=0.1)
    task = bent(lower="local", num_clients=3)
    peers = engine(algorithm, task.build(), DIRECTED, None)
    peers.begin(1)
    state = algorithm.round(peers, algorithm.init(peers))
    assert (peers.ledger.rounds, peers.ledger.totals()["messages"], peers.time) == (0, 0, 0)
    assert peers.ledger.totals()["bytes_up"] == 0
    x0 = peers.host.x0
    wanted = hypergradient(peers.host, x0, lower_solution(peers.host, x0), method="exact").value
    assert relative(-state.x / 0.1, wanted) < 1e-6
    alone = engine(algorithm, Built(task.build().problem, task.build().clients[1:2]))
    alone.begin(1)
    assert relative(algorithm.round(alone, algorithm.init(alone)).x[0], state.x[1]) < 1e-12


def test_a_network_with_faults_needs_averages_for_y_too():
    built, lossy = bent().build(), Network(kind="ring", loss=0.2)
    with pytest.raises(SettingError, match="hgp pushes without running sums"):
        engine(HGP(), built, lossy, None)
    assert engine(HGP(lower_solver="mix"), built, lossy, None).averaging.kind == "robust"


def test_values_that_are_not_finite_name_the_client_and_the_sequence():
    algorithm = HGP(num_curvature_products=0, num_lower_steps=1, num_terms=60, lr_system=1e8)
    peers = engine(algorithm, bent(num_clients=3).build(), DIRECTED, Averaging(num_steps=1))
    peers.begin(4)
    with pytest.raises(NonFiniteError, match=r"client \d has a value of 'u' that is not finite in outer iteration 4"):
        algorithm.round(peers, algorithm.init(peers))


@pytest.mark.parametrize(
    "settings", [{}, {"upper": "shared", "client_weights": "by_samples"}], ids=["private", "shared"]
)
def test_order_strategy_and_precision_change_nothing_that_matters(settings):
    built, algorithm = bent(num_clients=4, **settings).build(), HGP(num_terms=3, num_lower_steps=3, lr_system=0.1)
    ids = [2, 0, 3, 1]

    def rows(clients: Any, **options: Any) -> tuple[Tensor, Tensor]:
        peers = engine(
            algorithm,
            Built(built.problem, clients),
            DIRECTED,
            Averaging(num_steps=3, weights="kept"),
            batch_size=2,
            **options,
        )
        state = algorithm.init(peers)
        for k in (1, 2):
            peers.begin(k)
            state = algorithm.round(peers, state)
        return state.x, state.y

    x, y = rows(built.clients, strategy="vmap")
    one_by_one = rows(built.clients, strategy="loop")
    assert max(relative(one_by_one[0], x), relative(one_by_one[1], y)) < 1e-12
    moved = rows([built.clients[i] for i in ids], ids=ids)
    assert max(relative(moved[0], x[ids]), relative(moved[1], y[ids])) < 1e-12
    short = rows(built.clients, dtype=torch.float32)
    assert short[0].dtype == torch.float32
    assert max(relative(short[0], x), relative(short[1], y)) < 1e-5


def test_a_schedule_leaves_the_step_of_the_series_alone():
    """M terms with an eta that falls would no longer reach the solution of the system."""
    scaled = HGP(lr_upper=0.4, lr_lower=0.2, lr_system=0.1).scaled(0.5)
    assert (scaled.lr_upper, scaled.lr_lower, scaled.lr_system) == (0.2, 0.1, 0.1)
