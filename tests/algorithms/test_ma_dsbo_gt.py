"""MA-DSBO-GT against its recursion in numpy, and its limits against the closed-form solution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel.algorithms.ma_dsbo_gt import MADSBOGT
from fedbilevel.checks import check_algorithm
from fedbilevel.federation.network import Network
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.by_hand import Samples, fx, fy, gy, hessian, jacobian
from support.numeric.yardstick import check_continues, drive, relative, settled_peers

FOUR = {"num_clients": 4, "dim_upper": 2, "dim_lower": 3}
STEPS = {"lr_upper": 0.1, "lr_lower": 0.15, "lr_system": 0.15}
SHORT = {**STEPS, "num_lower_steps": 2, "num_terms": 3}
RING, CHANGING = Network(kind="ring"), Network(kind="random_undirected", seed=2)
SCOPES = [(lower, upper) for lower in ("global", "local") for upper in ("shared", "private")]


def by_hand(task: Quadratic, settings: MADSBOGT, num: int) -> dict[str, np.ndarray]:
    """The rows after `num` outer iterations, with a matrix per exchange and one client at a time."""
    n, samples, time = task.num_clients, Samples(task, seed=5, batch_size=2), 0
    share = {name: n * task.closed_form().share[:, None] for name in "xyu"}
    stays = {"x": task.upper == "private", **dict.fromkeys("yu", task.lower == "local")}
    s = {name: np.zeros((n, task.dim_upper if name == "x" else task.dim_lower)) for name in "xyu"}
    t, before = ({name: np.zeros_like(rows) for name, rows in s.items()} for _ in range(2))
    rates = dict(zip("xyu", STEPS.values(), strict=True))

    def exchanged(name: str, *rows: np.ndarray) -> list[np.ndarray]:
        nonlocal time
        if stays[name]:
            return list(rows)
        W = CHANGING.between(n).mixing(time).matrix.numpy()
        time += 1
        return [W @ value for value in rows]

    def step(name: str, d: np.ndarray) -> None:
        tracker = t[name] + d - before[name]
        s[name], t[name] = exchanged(name, s[name] - rates[name] * tracker, tracker)
        before[name] = d

    def rows_of(name: str, one: Any) -> np.ndarray:
        return np.stack([one(i) for i in range(n)]) * (1 if stays[name] else share[name])

    for k in range(1, num + 1):
        for j in range(settings.num_lower_steps):
            batch = lambda i, j=j, k=k: samples.drawn(i, "train", "B_y", (k, 1, j))
            step("y", rows_of("y", lambda i, batch=batch: gy(batch(i), s["x"][i], s["y"][i])))
        if not settings.warm_start:
            s["u"], t["u"], before["u"] = (np.zeros_like(s["u"]) for _ in range(3))
        for j in range(settings.num_terms):
            batch = lambda i, role, purpose, j=j, k=k: samples.drawn(i, role, purpose, (k, 2, j))
            step(
                "u",
                rows_of(
                    "u",
                    lambda i, batch=batch: (
                        hessian(batch(i, "train", "B_h")) @ s["u"][i] - fy(batch(i, "val", "B_f"), s["x"][i], s["y"][i])
                    ),
                ),
            )
        batch = lambda i, role, purpose, k=k: samples.drawn(i, role, purpose, (k, 3, 0))
        h = rows_of(
            "x",
            lambda i, batch=batch: (
                fx(batch(i, "val", "B_x"), s["x"][i], s["y"][i]) - jacobian(batch(i, "train", "B_j")) @ s["u"][i]
            ),
        )
        r = (1 - settings.momentum) * before["x"] + settings.momentum * h
        if settings.tracking == "all":
            step("x", r)
        else:
            [s["x"]], before["x"] = exchanged("x", s["x"] - rates["x"] * r), r
    return s


@pytest.mark.parametrize("more", [{}, {"warm_start": False}, {"tracking": "lower", "momentum": 1.0}], ids=str)
@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_three_outer_iterations_follow_the_recursion(lower: Any, upper: Any, more: Any) -> None:
    task = Quadratic(**FOUR, lower=lower, upper=upper, cross=0.4, client_weights="by_samples")
    settings = MADSBOGT(**SHORT, **more)
    expected = by_hand(task, settings, 3)
    _, state = drive(settings, task.build(), 3, network=CHANGING, seed=5, batch_size=2)
    for name, rows in expected.items():
        assert np.ptp(rows, axis=0).min() > 1e-3  # the peers disagree
        np.testing.assert_allclose(getattr(state, name), rows, rtol=0, atol=1e-12, err_msg=name)


def distances(task: Quadratic, found: dict[str, torch.Tensor]) -> dict[str, float]:
    closed = task.closed_form()
    x = closed.solution()
    targets = {"x": x, "y": closed.lower_solution(x), "u": closed.system_solution(x)}
    return {name: float(np.linalg.norm(found[name].numpy() - target, axis=1).max()) for name, target in targets.items()}


@pytest.mark.parametrize("scope", [{}, {"upper": "private"}, {"lower": "local"}], ids=str)
def test_every_peer_reaches_the_solution(scope: Any) -> None:
    task = Quadratic(**FOUR, client_weights="by_samples", **scope)
    found, radius = settled_peers(MADSBOGT(**STEPS, num_lower_steps=1, num_terms=1), task.build(), RING)
    assert max(distances(task, found).values()) < 1e-8
    assert radius < 0.99
    _, state = drive(MADSBOGT(**SHORT), task.build(), 120, network=CHANGING)
    assert max(distances(task, state._asdict()).values()) < 1e-3


def test_a_cold_start_of_u_leaves_a_bias_that_falls_with_its_steps() -> None:
    task, far = Quadratic(num_clients=4, dim_upper=1, dim_lower=2), []
    for num_terms in (5, 10, 40):
        settings = MADSBOGT(**{**STEPS, "num_lower_steps": 1, "num_terms": num_terms}, warm_start=False)
        found, radius = settled_peers(settings, task.build(), RING)
        assert radius < 0.99
        far.append(max(relative(row, task.closed_form().solution()) for row in found["x"]))
    assert far[0] > 1.5 * far[1] > 1e-3
    assert far[2] < 1e-4


def test_without_tracking_of_x_the_distance_is_proportional_to_the_step() -> None:
    task, far = Quadratic(num_clients=4, dim_upper=1, dim_lower=2), []
    for scale in (0.02, 0.01):
        settings = MADSBOGT(**{**STEPS, "lr_upper": scale}, num_lower_steps=1, num_terms=1, tracking="lower")
        found, radius = settled_peers(settings, task.build(), RING)
        assert radius < 1
        far.append(distances(task, found)["x"])
    assert far[1] > 1e-4
    assert 1.8 < far[0] / far[1] < 2.2


@pytest.mark.parametrize("tracking", ["all", "lower"])
@pytest.mark.parametrize(("lower", "upper"), SCOPES)
def test_the_ledger_counts_what_the_module_says(lower: Any, upper: Any, tracking: Any) -> None:
    task, num, T, N = Quadratic(**FOUR, lower=lower, upper=upper), 2, 2, 3
    peers, _ = drive(MADSBOGT(**SHORT, tracking=tracking), task.build(), num, network=CHANGING)
    of_y, of_x = 2 * 3 * (lower == "global"), (4 if tracking == "all" else 2) * (upper == "shared")
    floats = [each for each in ([of_y] * (T + N) + [of_x]) * num if each]
    links = CHANGING.between(4)
    sent = sum((links.mixing(step).sent.long() * each for step, each in enumerate(floats)), torch.zeros(4, 4).long())
    assert peers.ledger.rounds == len(floats)
    assert torch.equal(peers.ledger.edges["floats"], sent)
    for column, each in {"gy": T, "hvp": N, "fy": N, "fx": 1, "jvp": 1}.items():
        assert peers.ledger.columns[column].tolist() == [num * each] * 4


def test_it_keeps_the_contract_of_algorithms_and_resumes() -> None:
    report = check_algorithm(MADSBOGT(**SHORT), show=False)
    assert report.ok, str(report)
    check_continues(MADSBOGT(**SHORT), Quadratic(**FOUR).build(), network=CHANGING)


def test_steps_of_auto_descend() -> None:
    auto = dict.fromkeys(("lr_upper", "lr_lower", "lr_system"), "auto")
    result = fb.solve(
        *Quadratic(**FOUR).build(), "ma_dsbo_gt", num_iterations=60, network=RING, dtype=torch.float64, **auto
    )
    assert result.rows[-1]["distance"] < 0.5 * result.rows[0]["distance"]
