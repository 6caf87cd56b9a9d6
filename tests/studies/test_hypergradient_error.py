"""The error of HGP term by term against logistic regression in plain numpy, on clients that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedbilevel import discovery
from fedbilevel.algorithms.hgp import HGP
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.errors import ScopeError, UnknownNameError
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.network import Network
from fedbilevel.studies.influence.retrain import Training, train
from fedbilevel.studies.kinds.hypergradient_error import run, terms
from fedbilevel.studies.outcome import RowOutcome

TASKS: dict[str, dict[str, Any]] = {
    "regularisation": {"parametrisation": "linear", "l2": 0.05, "num_train": 40, "num_val": 30, "num_test": 1},
    "influence": {"l2": 0.05, "num_train": 40, "num_val": 30},
}
ETA, M = 2.0, 60
EXACT = {"kind": "exact"}
both = pytest.mark.parametrize("name", sorted(TASKS))


def row(name: str = "influence", **parts: Any) -> dict[str, Any]:
    start = {
        "task": {"name": name, **TASKS[name]},
        "hgp": {"lr_system": ETA, "num_terms": M},
        "network": {"kind": "random_directed", "seed": 3},
        "seed": 7,
    }
    return {**start, **parts}


def go(*args: Any, repetition: int = 0, **parts: Any) -> RowOutcome:
    return run(row(*args, **parts), repetition=repetition, folder=Path(), device="cpu", say=lambda text: None)


def errors(outcome: RowOutcome) -> dict[int, float]:
    return {int(point["terms"]): point["error"] for point in outcome.curve}


class Logistic:
    """y*, its mean Hessian, the mean validation gradient and every client's J, computed by hand.

    Both tasks store the weights first and the bias last."""

    def __init__(self, name: str) -> None:
        clients = discovery.task(name)(**TASKS[name]).build().clients
        wide = lambda part: np.column_stack([part["input"], np.ones(len(part["input"]))]).astype(float)
        inputs, labels = ([get(client["train"]) for client in clients] for get in (wide, lambda part: part["label"]))
        l2, y = TASKS[name]["l2"], np.zeros(inputs[0].shape[1])
        chance = lambda a: 1 / (1 + np.exp(-a @ y))
        for _ in range(30):
            slope = (
                np.mean([a.T @ (chance(a) - b) / len(b) for a, b in zip(inputs, labels, strict=True)], axis=0) + l2 * y
            )
            H = np.mean([(a.T * (chance(a) * (1 - chance(a)))) @ a / len(a) for a in inputs], axis=0) + l2 * np.eye(
                len(y)
            )
            y = y - np.linalg.solve(H, slope)
        assert np.linalg.norm(slope) < 1e-14
        f_y = np.mean(
            [wide(c["val"]).T @ (chance(wide(c["val"])) - c["val"]["label"]) / len(c["val"]["label"]) for c in clients],
            axis=0,
        )
        if name == "regularisation":  # d/dlambda of grad_y lambda y^2 / 2
            J = [np.diag(y) for _ in clients]
        else:  # one row per sample: the gradient of its loss over their number
            J = [(chance(a) - b)[:, None] * a / len(b) for a, b in zip(inputs, labels, strict=True)]
        self.y, self.H, self.f_y, self.J = y, H, f_y, J
        self.truth = np.stack([-j @ np.linalg.solve(H, f_y) for j in J])

    def truncated(self, m: int) -> float:
        """The mean error of eta sum_{k < m} (I - eta H)^k in the place of the inverse."""
        step = np.eye(len(self.y)) - ETA * self.H
        left = np.linalg.matrix_power(step, m) @ np.linalg.solve(self.H, self.f_y)
        return float(np.mean([np.linalg.norm(j @ left) for j in self.J]))


@pytest.mark.parametrize(
    ("name", "averaging"), [("regularisation", EXACT), ("influence", EXACT), ("influence", {"num_steps": 40})]
)
def test_with_good_averages_the_curve_is_that_of_the_truncated_series(name, averaging):
    by_hand, found = (
        Logistic(name),
        go(name, averaging=averaging, hgp={"lr_system": ETA, "num_terms": M if averaging == EXACT else 30}),
    )
    curve = errors(found)
    assert [*curve] == terms(max(curve))
    for m, error in curve.items():
        assert error == pytest.approx(by_hand.truncated(m), rel=1e-6, abs=1e-13)
    rate = 1 - ETA * float(np.linalg.eigvalsh(by_hand.H)[0])
    bound = np.mean([np.linalg.norm(j, 2) for j in by_hand.J]) * np.linalg.norm(np.linalg.solve(by_hand.H, by_hand.f_y))
    assert all(error <= bound * rate**m + 1e-13 for m, error in curve.items())
    size = float(np.linalg.norm(by_hand.truth, axis=1).mean())
    assert found.figures["truth"] == pytest.approx(size, rel=1e-9)
    assert all(point["relative_error"] == pytest.approx(point["error"] / size, rel=1e-9) for point in found.curve)
    last = found.curve[-1]
    assert (found.figures["error"], found.figures["relative_error"]) == (last["error"], last["relative_error"])


def test_blocks_are_equal_in_the_paper_s_figure_and_differ_for_influence():
    equal, own = (
        go(name, averaging=EXACT, hgp={"lr_system": ETA, "num_terms": 1}).figures["difference_between_clients"]
        for name in TASKS
    )
    assert equal < 1e-12
    truth = Logistic("influence").truth
    wanted = np.linalg.norm(truth - truth.mean(0), axis=1).mean() / np.linalg.norm(truth, axis=1).mean()
    assert own == pytest.approx(wanted, rel=1e-9)
    assert own > 0.5


def test_few_push_steps_leave_a_floor_that_falls_with_their_number():
    curves = {S: errors(go(averaging={"num_steps": S})) for S in (1, 4, 12)}
    exact = errors(go(averaging=EXACT))
    for few, more in ((1, 4), (4, 12)):
        assert curves[more][M] < 0.3 * curves[few][M]
    for S, curve in curves.items():
        assert curve[M] < 0.9 * curve[1]
        if S < 12:  # terms after the first few change nothing, where exact averages go on
            late = [curve[m] for m in curve if m >= 40]
            assert max(late) < 1.5 * min(late)
            assert curve[M] > 20 * exact[M]
    assert exact[M] < curves[12][M] < 5 * exact[M]


@both
def test_minibatches_leave_a_floor_that_all_samples_do_not(name):
    whole, few = (errors(go(name, averaging=EXACT, batch_size=size)) for size in (40, 8))
    exact = errors(go(name, averaging=EXACT))
    late = [few[m] for m in few if m >= 40]
    assert min(late) > 50 * exact[M]
    assert max(late) < 3 * min(late)
    assert whole[M] > 10 * exact[M]  # 40 draws with replacement are not the 40 samples
    if (
        name == "regularisation"
    ):  # J has no data in it and the validation gradient no minibatch, so chance begins with the second term
        assert few[1] == pytest.approx(exact[1], rel=1e-12)
        assert few[5] != pytest.approx(exact[5], rel=1e-6)


@pytest.mark.parametrize(
    "settings", [{}, {"minibatches": "shared"}, {"batch_size": None}], ids=["independent", "shared", "whole"]
)
def test_every_point_is_what_a_run_with_as_few_terms_gives(settings):
    settings = dict(settings)
    size = settings.pop("batch_size", 8)
    parts: dict[str, Any] = {"hgp": {"lr_system": ETA, "num_terms": 20, **settings}, "averaging": {"num_steps": 2}}
    curve = errors(go(**parts, **({"batch_size": size} if size else {}), repetition=2))
    built, by_hand = discovery.task("influence")(**TASKS["influence"]).build(), Logistic("influence")
    for m in (1, 2, 7, 17, 20):
        algorithm = HGP(lr_system=ETA, num_terms=m, lower_solver="mix", **settings)
        peers = PeerSimulation(
            algorithm,
            *built,
            network=Network(kind="random_directed", seed=3 + 2),
            averaging=Averaging(num_steps=2),
            seed=7 + 2,
            batch_size={"train": size},
            dtype=torch.float64,
        )
        v, _ = algorithm.estimate(peers, peers.host.x0, peers.place("y", torch.from_numpy(by_hand.y)))
        assert curve[m] == pytest.approx(float(np.linalg.norm(v.numpy() - by_hand.truth, axis=1).mean()), rel=1e-8)


def test_repetitions_draw_other_networks_and_minibatches_at_the_same_point():
    few: dict[str, Any] = {"hgp": {"lr_system": ETA, "num_terms": 8}}
    for parts in ({"averaging": {"num_steps": 1}}, {"averaging": EXACT, "batch_size": 8}):
        first, again, other = (go(**few, **parts, repetition=r) for r in (0, 0, 1))
        assert first == again
        assert other.figures["truth"] == first.figures["truth"]
        assert other.figures["error"] != pytest.approx(first.figures["error"], rel=1e-3)
    assert go(**few, averaging=EXACT).curve == go(**few, averaging=EXACT, repetition=1).curve


def test_training_by_gradient_push_is_shared_by_repetitions_and_rows_and_what_it_leaves_is_named():
    short = {"kind": "push", "lr": 2.0, "num_steps": 30, "batch_size": 10}
    few: dict[str, Any] = {"training": short, "hgp": {"lr_system": ETA, "num_terms": 8}}
    found = [
        go(**few, averaging={"num_steps": 3}, repetition=r, **extra)
        for r, extra in ((0, {}), (1, {}), (0, {"batch_size": 8}))
    ]
    by_hand, built = Logistic("influence"), discovery.task("influence")(**TASKS["influence"]).build()
    training = Training(kind="push", lr=2.0, num_steps=30)
    y = (
        train(
            built, training, network=Network(kind="random_directed", seed=3), seed=7, batch_size=10, dtype=torch.float64
        )
        .y[0]
        .numpy()
    )
    left = np.linalg.norm(y - by_hand.y, axis=1).max() / np.linalg.norm(by_hand.y)
    assert left > 1e-3
    for one in found:
        assert one.figures["training_error"] == pytest.approx(left, rel=1e-8)
        assert one.figures["truth"] == pytest.approx(
            np.linalg.norm(by_hand.truth, axis=1).mean(), rel=1e-8
        )  # at y*, not where training stopped
    exact = errors(go(averaging=EXACT))[M]
    assert errors(go(averaging=EXACT, training=short))[M] > 3 * exact
    assert go(averaging=EXACT).figures["training_error"] < 1e-10


def test_a_curve_has_about_forty_points_from_one_to_the_last():
    points = terms(1000)
    assert (points[0], points[-1]) == (1, 1000)
    assert 35 <= len(points) <= 45
    assert points == sorted(set(points))
    assert terms(3) == [1, 2, 3]
    assert terms(1) == [1]


def test_what_a_row_does_not_know_and_problems_without_own_blocks_are_refused():
    with pytest.raises(
        UnknownNameError, match=r"no setting of this study named 'avaraging'\. Did you mean 'averaging'"
    ):
        go(avaraging={})
    with pytest.raises(UnknownNameError, match="no setting of HGP's estimate named 'lr_upper'"):
        go(hgp={"lr_upper": 1.0})
    with pytest.raises(UnknownNameError, match="no setting of Network named 'size'"):
        go(network={"size": 1})
    with pytest.raises(
        ScopeError, match="regularisation has a shared x and a global y: use regularisation or influence"
    ):
        go("regularisation", task={"name": "regularisation", "upper": "shared"})
