"""Representation: labels and people of the clients, losses in plain numpy, and rivals."""

from __future__ import annotations

import warnings
from collections import Counter

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel.data.sets.digits import digits
from fedbilevel.data.sets.hapt import hapt, summaries
from fedbilevel.errors import DataError, ProblemError
from fedbilevel.oracle.population import Population
from fedbilevel.studies.rivals import run_rival
from fedbilevel.tasks.hyper_representation import HyperRepresentation
from fedbilevel.tasks.representation import Representation, _in_time
from fedbilevel.tasks.task import Shapes

SMALL = {"num_clients": 5, "share": 0.3, "num_hidden": 6}


@pytest.mark.parametrize(("num_clients", "num_labels"), [(5, 2), (10, 2), (4, 5), (7, 3)])
def test_clients_have_their_labels_in_every_role_and_every_image_is_used_once(num_clients, num_labels):
    task = Representation(num_clients=num_clients, num_labels=num_labels, share=0.5)
    clients = task.build().clients
    holders = Counter()
    for client in clients:
        labels = set(client["train"]["label"].tolist()) | set(client["val"]["label"].tolist())
        assert len(labels) <= num_labels
        assert set(client["test"]["label"].tolist()) <= labels
        holders.update(labels)
    assert max(holders.values()) - min(holders.values()) <= 1
    if num_clients * num_labels >= 10:
        assert len(holders) == 10
        used = [row.tobytes() for client in clients for role in client.values() for row in role["image"]]
        assert len(used) == len(set(used)) == pytest.approx(0.5 * len(digits()[1]), abs=2)


def test_the_share_for_validation_is_kept_at_every_client():
    for client in Representation(**SMALL, val_share=0.4).build().clients:
        num = len(client["train"]["label"]) + len(client["val"]["label"])
        assert len(client["val"]["label"]) == round(0.4 * num)


def test_losses_are_those_of_hyper_representation_with_own_heads():
    task = Representation(**SMALL, l2=0.3)
    built = task.build()
    assert built.problem.scopes == fb.Scopes(lower="local", upper="shared")
    population = Population(*built, dtype=torch.float64)
    x, y = population.x0, population.y0 + torch.arange(5, dtype=torch.float64)[:, None] / 10
    found = population.oracle.evaluate(
        built.problem.lower, x, y, population.data.batch(population.data.positions, "train")
    )
    body = {name: leaf.numpy() for name, leaf in population.layout_x.unravel(x).items()}
    for i, client in enumerate(built.clients):
        head = {name: leaf.numpy() for name, leaf in population.layout_y.unravel(y[i]).items()}
        z = np.maximum(client["train"]["image"] @ body["hidden.weight"].T + body["hidden.bias"], 0)
        z = z @ head["head.weight"].T + head["head.bias"]
        picked = z[np.arange(len(z)), client["train"]["label"]]
        fit = (np.log(np.exp(z).sum(1)) - picked).mean()
        assert float(found[i]) == pytest.approx(fit + 0.15 * sum((leaf**2).sum() for leaf in head.values()), rel=1e-6)


def test_figures_are_by_samples_and_by_clients():
    built = Representation(**SMALL).build()
    problem = built.problem
    right, samples = torch.tensor([1.0, 4.0, 0.0]), torch.tensor([2.0, 4.0, 3.0])
    across = problem.across({"test_right": right, "test_samples": samples})
    assert across["test_accuracy_mean_client"] == pytest.approx(0.5)
    assert across["test_accuracy_bottom_decile"] == pytest.approx(0.1)
    bare = [{role: fields for role, fields in client.items() if role != "test"} for client in built.clients]
    assert Representation(**SMALL).problem(Shapes.of(bare[0], 10)).across is None


def people(**settings):
    try:
        return Representation(data="hapt", num_clients=4, **settings).build().clients
    except DataError:
        pytest.skip("HAPT is not on this machine")


def test_people_are_split_in_time_within_every_activity_and_neighbours_are_not_parted():
    clients, found = people(share=1.0), hapt()
    rows = summaries(found.x)
    for client in clients:
        lengths = [len(client[role]["label"]) for role in ("train", "val", "test")]
        candidates = [person for person in np.unique(found.subject) if _same(rows, found, person, client)]
        assert len(candidates) == 1
        own = np.flatnonzero(found.subject == candidates[0])
        assert len(own) - 2 * 12 <= sum(lengths) <= len(own)
    stacked = np.concatenate([client["train"]["image"] for client in clients])
    np.testing.assert_allclose(stacked.mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(stacked.std(0), 1, atol=1e-3)


def _same(rows, found, person, client) -> bool:
    """Whether the last windows of every activity of a person are the test windows, up to an affine map."""
    theirs = []
    for label in np.unique(found.label[found.subject == person]):
        own = np.flatnonzero((found.subject == person) & (found.label == label))
        theirs.append(own[len(own) - round(0.25 * len(own)) :])
    places = np.concatenate(theirs)
    if found.label[places].tolist() != client["test"]["label"].tolist():
        return False
    mine, raw = client["test"]["image"].astype(float), rows[places].astype(float)
    centred = [one - one.mean(0) for one in (mine, raw)]
    cosine = (centred[0] * centred[1]).sum(0) / np.sqrt((centred[0] ** 2).sum(0) * (centred[1] ** 2).sum(0))
    return bool((cosine > 0.999).all())


def test_windows_before_a_border_are_left_out():
    train, val, test = _in_time(np.arange(100, 120), 1.0, 0.25, 0.2)
    assert train.tolist() == list(range(100, 111))  # 111 would overlap with 112
    assert val.tolist() == [112, 113, 114]
    assert test.tolist() == [116, 117, 118, 119]
    train, val, test = _in_time(np.arange(100, 120), 0.5, 0.25, 0.2)
    assert [*train, *val, *test] == list(range(100, 120, 2))  # every second window: no two overlap
    few = [[part.tolist() for part in _in_time(np.arange(2), 1.0, 0.3, share)] for share in (0.5, 0.25)]
    assert few == [[[], [], [1]], [[], [1], []]]  # 0 would overlap with 1, also across an empty part


def test_too_few_samples_people_or_labels_are_clear_errors():
    with pytest.raises(ProblemError, match=r"class \d has \d+ samples for \d+ clients, expected two for each"):
        Representation(num_clients=300).build()
    with pytest.raises(ProblemError, match="num_labels is 11, but there are 10 classes"):
        Representation(num_labels=11).build()
    people()
    with pytest.raises(ProblemError, match="num_clients is 31, but HAPT has 30 people"):
        Representation(data="hapt", num_clients=31).build()


def test_derivatives_agree_with_finite_differences():
    report = fb.check_problem(*Representation(num_clients=3, share=0.2, num_hidden=3).build(), show=False)
    assert report.ok, str(report)


def test_the_network_of_the_rivals_is_that_of_the_task():
    task = Representation(**SMALL, model="cnn")
    own, way = task.build(), next(iter(task.rivals()["fedavg"].ways.values()))
    mine, theirs = (Population(*built, dtype=torch.float64) for built in (own, (way.problem, way.clients)))
    batch = lambda one: one.data.batch(one.data.positions, "val")
    for name in ("upper", "lower"):
        one, two = (
            population.oracle.evaluate(
                getattr(population.problem, name), population.x0, population.y0, batch(population)
            )
            for population in (mine, theirs)
        )
        np.testing.assert_allclose(one, two, rtol=1e-10)  # l2 weighs the head alone in both
    assert set(way.problem.y0) == {*own.problem.x0, *own.problem.y0}


def test_every_rival_runs_and_measures_the_figures_of_the_task_on_its_test_samples():
    task = Representation(**SMALL)
    mine, found = task.build(), task.rivals()
    assert {"fedrep", "fedbabu", "fine_tuned", "ditto", "local", "prior", "fedavg"} <= set(found)
    tested = [client["test"]["label"].tolist() for client in mine.clients]
    for name, rival in found.items():
        label, way = next(iter(rival.ways.items()))
        again = rival.refit(label)
        assert [len(client["train"]["label"]) for client in again.clients] == [
            len(client["train"]["label"]) + len(client["val"]["label"]) for client in mine.clients
        ]
        for one in (way, again):
            assert [client["test"]["label"].tolist() for client in one.clients] == tested, name
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a few samples of two labels
                result = fb.solve(
                    one.problem, one.clients, one.algorithm, num_iterations=1, residuals=False, **one.settings
                )
            assert set(task.headline) <= set(result.final), name


def test_the_exact_own_head_is_at_its_minimum_on_the_body_of_fedavg():
    """At the answer, the gradient of every client's loss by its head is zero, in plain numpy."""
    task = Representation(**SMALL, l2=0.02)
    rival = task.rivals()["own_head"]
    label = next(name for name in rival.ways if name.endswith("l2 +0.03"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a few samples of two labels
        found = run_rival(rival._replace(ways={label: rival.ways[label]}), num_rounds=60, dtype=torch.float64)
        first = fb.solve(
            *(plain := rival.refit(label))[:2], plain.algorithm, num_rounds=60, residuals=False, dtype=torch.float64,
            **plain.settings,
        )  # fmt: skip
    assert found.costs["rounds"] == 120  # both runs of the refit
    body = {name: first.y[name].numpy() for name in task.build().problem.x0}
    for own, client, before in zip(found.result.y, found.way.clients, task.build().clients, strict=True):
        assert len(client["train"]["label"]) == sum(len(before[role]["label"]) for role in ("train", "val"))
        z = np.maximum(client["train"]["image"] @ body["hidden.weight"].T + body["hidden.bias"], 0)
        weight, bias = own["head.weight"].numpy(), own["head.bias"].numpy()
        scores = z @ weight.T + bias
        chance = np.exp(scores - scores.max(1, keepdims=True))
        residual = (chance / chance.sum(1, keepdims=True) - np.eye(10)[client["train"]["label"]]) / len(z)
        assert np.abs(residual.T @ z + 0.05 * weight).max() < 1e-4  # l2 of the task and 0.03
        assert np.abs(residual.sum(0) + 0.05 * bias).max() < 1e-4
    start = rival.start(label, found.result)
    assert all(np.allclose(start["y0"][name], leaf) for name, leaf in body.items())
    np.testing.assert_array_equal(start["y0"]["head.bias"], np.stack([own["head.bias"] for own in found.result.y]))


def test_every_rival_has_as_many_trials_as_the_others():
    assert {len(rival.ways) for rival in Representation(**SMALL).rivals().values()} == {8}


def test_the_settings_of_the_papers_are_those_of_the_other_task():
    shapes = Shapes.of(Representation(**SMALL).build().clients[0], 10)
    mine, theirs = Representation(**SMALL).problem(shapes), HyperRepresentation(num_hidden=6).problem(shapes)
    assert all(torch.equal(mine.x0[name], theirs.x0[name]) for name in theirs.x0)
