"""SPARKLE against its recursions in numpy, the closed-form solution and FedBiO.

The recursions use dense matrices W; the comparison with FedBiO is on a complete network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.sparkle import Sparkle
from fedbilevel.checks import check_algorithm
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.errors import SettingError
from fedbilevel.federation.network import Network
from fedbilevel.federation.schedule import Schedule
from fedbilevel.runs.solve import solve
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric import by_hand
from support.numeric.yardstick import check_continues, drive, relative, settled_peers, start_at

STEPS = {"lr_upper": 0.05, "lr_lower": 0.15, "lr_system": 0.12}
SMALL = {"dim_upper": 2, "dim_lower": 3}
DRAWS = {"seed": 5, "batch_size": 2}
CHANGING = {"gossip": Network(kind="random_undirected", seed=2), "push": Network(kind="random_directed", seed=2)}
STRATEGIES = [  # exchange, correction of y and u, correction of x
    ("gossip", "none", "same"),
    ("gossip", "gradient_tracking", "same"),
    ("gossip", "exact_diffusion", "same"),
    ("gossip", "extra", "same"),
    ("gossip", "gradient_tracking", "extra"),
    ("gossip", "exact_diffusion", "gradient_tracking"),
    ("gossip", "extra", "exact_diffusion"),
    ("gossip", "extra", "none"),
    ("push", "none", "same"),
    ("push", "gradient_tracking", "same"),
    ("push", "none", "gradient_tracking"),
]
CORRECTED = [strategy for strategy in STRATEGIES if strategy[0] == "gossip" and "none" not in strategy]
each_strategy = pytest.mark.parametrize(("exchange", "correction", "upper"), STRATEGIES)


def algorithm(exchange: Any, correction: Any, upper: Any, **more: Any) -> Sparkle:
    return Sparkle(**{**STEPS, **more}, exchange=exchange, correction=correction, correction_upper=upper)


def kinds(correction: str, upper: str) -> dict[str, str]:
    return {"x": correction if upper == "same" else upper, "y": correction, "u": correction}


def matrices(network: Network, num: int, num_clients: int = 5) -> list[np.ndarray]:
    links = network.between(num_clients)
    return [links.mixing(step).matrix.numpy() for step in range(num)]


# ---- the recursions, written with whole histories instead of memories ----------------------------


def transcribed(
    task: Quadratic,
    start: Any,
    kinds: dict[str, str],
    Ws: list[np.ndarray],
    *,
    push: bool,
    stays: str = "",
    radius: float = np.inf,
    purposes: str = "B_y B_f1 B_f2 B_g1 B_g2",
) -> dict[str, np.ndarray]:
    """Compute x, y, u after one outer iteration per matrix of `Ws`.

    Values in `stays` do not leave their peer and take plain gradient steps."""
    samples, n, I = by_hand.Samples(task, **DRAWS), task.num_clients, np.eye(task.num_clients)
    share = n * task.closed_form().share[:, None]
    rates = dict(zip("xyu", STEPS.values(), strict=True))
    S = {name: [np.tile(value, (n, 1))] for name, value in zip("xyu", (*start, np.zeros(task.dim_lower)), strict=True)}
    D, T, P = ({name: [] for name in "xyu"} for _ in range(3))
    w = np.ones((n, 1))
    for k, W in enumerate(Ws):
        norms = np.linalg.norm(S["u"][k], axis=1, keepdims=True)
        S["u"][k] = np.where(norms > radius, radius / np.maximum(norms, 1e-300), 1.0) * S["u"][k]
        found = [
            by_hand.global_directions(samples, i, {name: S[name][k][i] for name in "xyu"}, (k + 1, 1, 0), purposes)
            for i in range(n)
        ]
        new_w = W @ w if push else w
        for name, a in rates.items():
            s, d = S[name], D[name]
            d.append(np.stack([point[name] for point in found]) * (1.0 if name in stays else share))
            if name in stays:
                s.append(s[k] - a * d[k])
            elif kinds[name] == "none":
                s.append(W @ (w * s[k] - a * d[k]) / new_w)
            elif kinds[name] == "gradient_tracking":
                T[name].append(Ws[k - 1] @ T[name][k - 1] + d[k] - d[k - 1] if k else d[0])
                s.append(W @ (w * s[k] - a * T[name][k]) / new_w)
            elif kinds[name] == "exact_diffusion":
                P[name].append(s[k] - a * d[k])
                s.append((I + W) / 2 @ (P[name][k] + s[k] - (P[name][k - 1] if k else s[0])))
            else:
                s.append(
                    s[k] + W @ s[k] - (I + Ws[k - 1]) / 2 @ s[k - 1] - a * (d[k] - d[k - 1])
                    if k
                    else W @ s[0] - a * d[0]
                )
        w = new_w
    return {name: rows[-1] for name, rows in S.items()}


def check_transcription(
    task: Quadratic,
    strategy: tuple[str, str, str],
    *,
    purposes: str = "B_y B_f1 B_f2 B_g1 B_g2",
    num: int = 3,
    **more: Any,
) -> dict[str, np.ndarray]:
    exchange, correction, upper = strategy
    rng = np.random.default_rng(1)
    start = rng.standard_normal(task.dim_upper), rng.standard_normal(task.dim_lower)
    network = CHANGING[exchange]
    Ws = matrices(network, num)
    assert not any(np.allclose(Ws[0], W) for W in Ws[1:])
    stays = ("x" if task.upper == "private" else "") + ("yu" if task.lower == "local" else "")
    radius = {} if more.get("radius") is None else {"radius": more["radius"]}
    expected = transcribed(
        task, start, kinds(correction, upper), Ws, push=exchange == "push", stays=stays, purposes=purposes, **radius
    )
    _, state = drive(algorithm(*strategy, **more), start_at(task, *start), num, network=network, **DRAWS)
    for name, rows in expected.items():
        assert np.ptp(rows, axis=0).min() > 1e-3  # the peers disagree
        np.testing.assert_allclose(getattr(state, name), rows, rtol=0, atol=1e-12, err_msg=name)
    return expected


@pytest.mark.parametrize("scope", [{}, {"upper": "private"}], ids=["shared", "private"])
@each_strategy
def test_three_outer_iterations_follow_the_recursion(exchange: str, correction: str, upper: str, scope: Any) -> None:
    check_transcription(
        Quadratic(**SMALL, cross=0.4, client_weights="by_samples", **scope), (exchange, correction, upper)
    )


@pytest.mark.parametrize("strategy", [STRATEGIES[5], STRATEGIES[3], STRATEGIES[-1]], ids=str)
def test_with_a_local_lower_level_only_x_is_exchanged(strategy: Any) -> None:
    check_transcription(Quadratic(**SMALL, cross=0.4, client_weights="by_samples", lower="local"), strategy)


def test_two_minibatches_instead_of_five() -> None:
    check_transcription(
        Quadratic(**SMALL, cross=0.4), STRATEGIES[1], purposes="B_g B_f B_f B_g B_g", minibatches="shared"
    )


@pytest.mark.parametrize("strategy", [STRATEGIES[0], STRATEGIES[2], STRATEGIES[3], STRATEGIES[-2]], ids=str)
def test_u_is_projected_before_its_direction_is_taken(strategy: Any) -> None:
    """Messages also start from the projected u; a mixed u may lie outside for one iteration."""
    task, radius = Quadratic(**SMALL, cross=0.4), 0.25
    cut, free = (check_transcription(task, strategy, radius=r, num=4) for r in (radius, None))
    assert np.linalg.norm(cut["u"], axis=1).max() > radius
    assert np.abs(cut["x"] - free["x"]).max() > 1e-3


# ---- convergence ---------------------------------------------------------------------------------


def distances(task: Quadratic, found: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest over peers of |x_i - x*|, |y_i - y*|, |u_i - u*|."""
    closed = task.closed_form()
    x = closed.solution()
    targets = {"x": x, "y": closed.lower_solution(x), "u": closed.system_solution(x)}
    return {name: float(np.linalg.norm(found[name].numpy() - target, axis=1).max()) for name, target in targets.items()}


def one_way(folder: Path) -> tuple[Network, torch.Tensor]:
    """Return a directed cycle of four peers with two chords, and its unequal Push-Sum weights."""
    edges = [[0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [0, 3]]
    (folder / "network.json").write_text(json.dumps({"num_peers": 4, "directed": True, "steps": [edges]}))
    network = Network(kind="file", file=str(folder / "network.json"))
    values, vectors = np.linalg.eig(matrices(network, 1, 4)[0])
    first = vectors[:, np.abs(values - 1).argmin()].real
    weights = torch.tensor(4 * first / first.sum())[:, None]
    assert float(weights.max() / weights.min()) > 1.5
    return network, weights


FOUR = {"num_clients": 4, "dim_upper": 2, "dim_lower": 2, "client_weights": "by_samples"}
ONES = torch.ones(4, 1, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "kind"), [*((strategy, "ring") for strategy in CORRECTED), (CORRECTED[2], "complete")], ids=str
)
def test_with_a_correction_every_peer_reaches_the_solution(strategy: Any, kind: Any) -> None:
    task = Quadratic(**FOUR)
    found, radius = settled_peers(algorithm(*strategy), task.build(), Network(kind=kind), w=ONES)
    assert max(distances(task, found).values()) < 1e-8
    assert radius < 0.99


@pytest.mark.parametrize("correction", ["gradient_tracking", "exact_diffusion", "extra"])
def test_with_a_correction_and_a_private_x_too(correction: str) -> None:
    task = Quadratic(**FOUR, upper="private")
    found, radius = settled_peers(algorithm("gossip", correction, "same"), task.build(), Network(kind="ring"), w=ONES)
    assert np.ptp(found["x"].numpy(), axis=0).min() > 0.1
    assert max(distances(task, found).values()) < 1e-8
    assert radius < 0.99


def test_on_a_directed_network_push_with_gradient_tracking_reaches_the_solution(tmp_path: Path) -> None:
    task = Quadratic(**FOUR)
    network, weights = one_way(tmp_path)
    found, radius = settled_peers(algorithm("push", "gradient_tracking", "same"), task.build(), network, w=weights)
    assert max(distances(task, found).values()) < 1e-8
    assert radius < 0.99


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [STRATEGIES[0], ("gossip", "gradient_tracking", "none"), ("gossip", "none", "extra"), STRATEGIES[8]],
    ids=str,
)
def test_without_a_correction_the_distance_is_proportional_to_the_step(strategy: Any, tmp_path: Path) -> None:
    """One sequence that is not corrected is enough."""
    task = Quadratic(**FOUR)
    network, weights = (Network(kind="ring"), ONES) if strategy[0] == "gossip" else one_way(tmp_path)
    far = []
    for scale in (0.1, 0.05):
        steps = {name: scale * step for name, step in STEPS.items()}
        found, radius = settled_peers(algorithm(*strategy, **steps), task.build(), network, w=weights)
        assert radius < 1
        far.append(distances(task, found)["x"])
    assert far[1] > 1e-4
    assert 1.9 < far[0] / far[1] < 2.1


# ---- equivalent algorithms -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "scope",
    [{}, {"client_weights": "by_samples"}, {"upper": "private", "client_weights": "by_samples"}, {"lower": "local"}],
    ids=str,
)
def test_on_a_complete_network_without_correction_it_is_fedbio_with_one_local_step(scope: Any) -> None:
    task = Quadratic(cross=0.4, **scope)
    fed, expected = drive(FedBiO(num_local_steps=1, **STEPS), task.build(), 5, **DRAWS)
    for exchange in ("gossip", "push"):
        _, state = drive(algorithm(exchange, "none", "same"), task.build(), 5, **DRAWS)
        for name in "xyu":
            value = fed.collect(getattr(expected, name)).expand_as(getattr(state, name))
            assert float(value.abs().max()) > 0.05
            np.testing.assert_allclose(getattr(state, name), value, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("correction", ["gradient_tracking", "exact_diffusion", "extra"])
def test_identical_clients_need_no_correction_on_a_complete_network(correction: str) -> None:
    """Then W d = d, and every correction is D-SOBA."""
    built = Quadratic(**SMALL, heterogeneity=0.0, noise=0.0).build()
    _, plain = drive(algorithm("gossip", "none", "same"), built, 5)
    _, state = drive(algorithm("gossip", correction, "same"), built, 5)
    for name in "xyu":
        np.testing.assert_allclose(getattr(state, name), getattr(plain, name), rtol=0, atol=1e-12)


# ---- directed networks ---------------------------------------------------------------------------


class WithoutWeights(PeerSimulation):
    """Pushes rows and forgets what that does to the weights."""

    def push(self, weights: torch.Tensor, /, **rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (weights, *super().push(weights, **rows)[1:])


def test_a_directed_network_that_changes_is_no_obstacle() -> None:
    task = Quadratic(**SMALL, client_weights="by_samples")
    _, state = drive(algorithm("push", "gradient_tracking", "same"), task.build(), 200, network=CHANGING["push"])
    assert max(distances(task, state._asdict()).values()) < 1e-8


def test_push_without_its_weights_is_wrong(tmp_path: Path) -> None:
    task = Quadratic(**FOUR)
    network, weights = one_way(tmp_path)
    right, wrong = (
        drive(algorithm("push", "gradient_tracking", "same"), task.build(), 100, network=network, engine=engine)[1]
        for engine in (PeerSimulation, WithoutWeights)
    )
    assert relative(right.w, weights) < 1e-8
    assert distances(task, right._asdict())["x"] < 0.02
    assert distances(task, wrong._asdict())["x"] > 0.1


def test_gossip_on_a_directed_network_is_refused() -> None:
    with pytest.raises(
        SettingError, match=r"sparkle needs an undirected network without faults.*: use exchange='push' elsewhere\."
    ):
        drive(
            algorithm("gossip", "gradient_tracking", "same"),
            Quadratic().build(),
            1,
            network=Network(kind="random_directed"),
        )


@pytest.mark.parametrize(
    "both",
    [("exact_diffusion", "same"), ("extra", "none"), ("none", "extra"), ("gradient_tracking", "exact_diffusion")],
    ids=str,
)
def test_exact_diffusion_and_extra_are_refused_with_push(both: Any) -> None:
    with pytest.raises(
        SettingError,
        match="exact_diffusion and extra need a doubly stochastic exchange: use gossip, or gradient_tracking with push",
    ):
        algorithm("push", *both)


# ---- cost and resuming ---------------------------------------------------------------------------


OTHERS = [{"upper": "private"}, {"lower": "local"}, {"lower": "local", "upper": "private"}]


@pytest.mark.parametrize(
    ("exchange", "correction", "upper", "scope"),
    [
        (*strategy, scope)
        for strategy in STRATEGIES
        for scope in ({}, *(OTHERS if strategy in (STRATEGIES[4], STRATEGIES[-1]) else ()))
    ],
)
def test_the_ledger_counts_what_the_module_says(exchange: str, correction: str, upper: str, scope: Any) -> None:
    task, num = Quadratic(**SMALL, **scope), 3
    network = CHANGING[exchange]
    peers, _ = drive(algorithm(exchange, correction, upper), task.build(), num, network=network, batch_size=2)
    sizes = {
        "x": 0 if task.upper == "private" else 2,
        "y": 0 if task.lower == "local" else 3,
        "u": 0 if task.lower == "local" else 3,
    }
    floats = sum(
        size * (2 if kinds(correction, upper)[name] == "gradient_tracking" else 1) for name, size in sizes.items()
    )
    rounds = num if floats else 0
    floats += bool(floats) and exchange == "push"
    links = network.between(5)
    sent = sum(links.adjacency(step).long().fill_diagonal_(0) for step in range(rounds)) + torch.zeros(
        5, 5, dtype=torch.int64
    )
    assert peers.ledger.rounds == rounds
    assert torch.equal(peers.ledger.columns["floats_up"], floats * sent.sum(1))
    assert torch.equal(peers.ledger.columns["bytes_up"], 8 * floats * sent.sum(1))
    assert torch.equal(peers.ledger.edges["floats"], floats * sent)
    for column in ("gy", "fx", "fy", "hvp", "jvp"):
        assert peers.ledger.columns[column].tolist() == [num] * 5
    assert peers.ledger.columns["samples"].tolist() == [5 * 2 * num] * 5  # five minibatches of two
    assert peers.ledger.totals()["gx"] == peers.ledger.totals()["floats_down"] == 0


@pytest.mark.parametrize(("exchange", "correction", "upper"), [*STRATEGIES[:4], STRATEGIES[-2], STRATEGIES[-1]])
def test_continues_from_a_checkpoint_bit_by_bit(exchange: str, correction: str, upper: str) -> None:
    check_continues(
        algorithm(exchange, correction, upper, radius=0.5),
        Quadratic(**SMALL, upper="private").build(),
        network=CHANGING[exchange],
    )


@pytest.mark.parametrize("strategy", [STRATEGIES[6], STRATEGIES[-1]], ids=str)
def test_it_keeps_the_contract_of_algorithms(strategy: Any) -> None:
    report = check_algorithm(algorithm(*strategy), show=False)
    assert report.ok, str(report)


@pytest.mark.slow
def test_every_correction_still_reaches_the_solution_when_steps_fall():
    """EXTRA that remembers directions instead of steps stays 5e-2 away."""
    built = Quadratic(num_clients=4).build()  # the fewest on a ring where some are no neighbours
    for correction in ("gradient_tracking", "exact_diffusion", "extra"):
        settings = Sparkle(correction=correction, lr_upper=0.06, lr_lower=0.2, lr_system=0.2, minibatches="shared")
        options = {"network": Network(kind="ring"), "schedule": Schedule(0.3, 50.0), "dtype": torch.float64}
        assert (
            solve(*built, settings, residuals=False, num_iterations=240, measure_every=240, **options).rows[-1][
                "distance"
            ]
            < 1e-3
        ), correction


def test_a_private_x_gathers_no_rounding_errors_from_a_correction():
    built = Quadratic(upper="private").build()
    ends = {}
    for correction in ("none", "extra", "exact_diffusion"):
        settings = Sparkle(
            correction="gradient_tracking",
            correction_upper=correction,
            lr_upper=0.03,
            lr_lower=0.12,
            lr_system=0.12,
            minibatches="shared",
        )
        _, state = drive(settings, built, 40, network=Network(kind="ring"), dtype=torch.float32)
        ends[correction] = state.x
    assert torch.equal(ends["none"], ends["extra"])
    assert torch.equal(ends["none"], ends["exact_diffusion"])
