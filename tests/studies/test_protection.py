"""The study of protections: its runs are those of `solve`, and its figures are differences of them."""

from pathlib import Path

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.errors import ExperimentError
from fedbilevel.privacy.accountant import Accountant, Budget, joint
from fedbilevel.studies.kinds import protection
from support.stops import ctrl_c

TASK = {"name": "data_cleaning", "num_clients": 10, "num_train": 20, "noise": 0.2}
ROW = {"task": TASK, "algorithm": {"name": "fedbio", "lr_lower": 1.0, "num_local_steps": 1}, "num_rounds": 8}


def run(**settings):
    return protection.run({**ROW, **settings}, repetition=2, folder=Path(), device="cpu", say=lambda _: None)


def alone(**options):
    task = fb.tasks.DataCleaning(num_clients=10, num_train=20, noise=0.2).repeated(2)
    given = {"num_rounds": 8, "seed": 2, "lr_lower": 1.0, "num_local_steps": 1, "residuals": False}
    return fb.solve(*task.build(), "fedbio", **given, **options)


def test_compression_is_compared_with_the_plain_run_of_the_same_data():
    found = run(aggregation={"compress": "topk:0.1"}, goal={"figure": "gap", "least": -1.0, "bytes": 0.21}).figures
    plain, small = alone(), alone(aggregation=fb.Aggregation(compress="topk:0.1"))
    assert found["clean"] == plain.final["test_accuracy"]
    assert found["accuracy"] == small.final["test_accuracy"]
    assert found["gap"] == found["accuracy"] - found["clean"]
    assert found["bytes"] == small.ledger["bytes_up"] / plain.ledger["bytes_up"] == pytest.approx(0.2, rel=0.01)
    assert found["met"] == 1.0


def test_attacks_are_those_of_solve_and_the_worst_is_shown():
    kinds = ["sign_flip", "label_flip"]
    outcome = run(aggregation={"robust": "median"}, attacks=kinds, shares=[0.1, 0.3])
    layer = fb.Aggregation(robust="median")
    for share in (0.1, 0.3):
        own = [
            alone(aggregation=layer, attack=fb.Attack(kind=kind, share=share)).final["test_accuracy"] for kind in kinds
        ]
        label = f"{100 * share:g}"
        assert [outcome.figures[f"{kind}_{label}"] for kind in kinds] == own
        assert outcome.figures[f"mean_{label}"] == pytest.approx(sum(own) / 2)
        assert {"share": share, "accuracy": min(own)} in outcome.curve
        assert outcome.figures[f"gap_{label}"] == own[0] - outcome.figures["clean"]
    assert outcome.curve[0] == {"share": 0.0, "accuracy": outcome.figures["accuracy"]}


def test_without_attackers_their_samples_are_lost_but_all_test_samples_count():
    clients = fb.tasks.DataCleaning(num_clients=10, num_train=20, noise=0.2).repeated(2).build().clients
    left = protection._without(clients, [0, 4])
    assert len(left) == 8
    assert left[1:] == [clients[number] for number in (2, 3, 5, 6, 7, 8, 9)]
    assert np.array_equal(left[0]["train"]["image"], clients[1]["train"]["image"])
    sizes = [sum(len(client[role]["label"]) for client in some) for some in (left, clients) for role in ("test",)]
    assert sizes[0] == sizes[1]
    lost = fb.Attack(kind="sign_flip", share=0.2).attackers(10, 2)
    problem, _ = fb.tasks.DataCleaning(num_clients=10, num_train=20, noise=0.2).repeated(2).build()
    plain = fb.solve(
        problem, protection._without(clients, lost), "fedbio", num_rounds=8, seed=2, lr_lower=1.0, num_local_steps=1
    )
    assert run(attacks=["sign_flip"], shares=[0.2]).figures["without_20"] == plain.final["test_accuracy"]


@pytest.mark.parametrize("epsilon", [1.0, 20.0])
def test_noise_spends_the_budget_and_no_more(epsilon):
    pytest.importorskip("opacus")
    releases = [1, 2, 2, 2]
    noise = protection.noise_for(epsilon, 1e-5, releases)
    account = Accountant(Budget(epsilon, 1e-5))
    spent = account.forecast(1, [joint([noise] * num) for num in releases])
    assert 0.97 * epsilon < spent <= epsilon


def test_epsilon_of_a_run_is_the_asked_one():
    pytest.importorskip("opacus")
    found = run(aggregation={"clip": 0.1}, epsilons=[5.0, 1e4]).figures
    noise = protection.noise_for(5.0, 1e-5, [2] * 8)
    layer = fb.Aggregation(clip=0.1, noise=noise, epsilon=5.005)
    one = alone(aggregation=layer)
    assert one.iteration == 8
    assert one.final["epsilon"] == pytest.approx(5.0, rel=0.01)
    assert found["epsilon_5"] == one.final["test_accuracy"]
    assert found["accuracy"] == pytest.approx(found["epsilon_10000"], abs=0.05)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epsilons": [1.0]}, "epsilons need a norm to which rows are clipped"),
        ({"goal": {"figure": "nothing", "least": 0}}, "expected a figure among clean"),
        ({"shares": ["many"]}, "expected a list of numbers"),
    ],
)
def test_wrong_rows_are_refused(settings, words):
    with pytest.raises(ExperimentError, match=words):
        run(**settings)


def test_a_budget_below_what_any_noise_spends_is_refused():
    pytest.importorskip("opacus")
    with pytest.raises(ExperimentError, match="with any noise: raise it"):
        protection.noise_for(1e-4, 1e-5, [2] * 1000)


def test_a_goal_needs_its_bytes_and_its_figure():
    figures = {"gap": -0.002, "bytes": 0.2}
    assert protection.is_met({"figure": "gap", "least": -0.003}, figures)
    assert not protection.is_met({"figure": "gap", "least": -0.001}, figures)
    assert not protection.is_met({"figure": "gap", "least": -0.003, "bytes": 0.1}, figures)


def test_a_run_that_diverges_has_the_figures_of_its_best_state():
    lost = run(algorithm={**ROW["algorithm"], "lr_lower": 1e30}, attacks=["sign_flip"], shares=[0.2]).figures
    assert 0 <= lost["sign_flip_20"] < 0.3


def test_ctrl_c_leaves_no_figures(monkeypatch):
    protection._KNOWN_RUNS.clear()
    ctrl_c(monkeypatch, FedBiO)
    with pytest.raises(KeyboardInterrupt):
        run(aggregation={"compress": "topk:0.1"}, goal={"figure": "gap", "least": -1.0, "bytes": 0.21})
