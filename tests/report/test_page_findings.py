"""Findings of tasks, computed again by hand, and accuracies of single clients in the study of
personalisation.
"""

import base64
import json
import types

import numpy as np
import pytest
import torch

from fedbilevel import discovery
from fedbilevel.errors import RecoveryWarning
from fedbilevel.report.record_files import are_findings
from fedbilevel.runs.solve import solve
from fedbilevel.studies.influence.study import study as influence_study
from fedbilevel.studies.personalisation import PersonalisationPlan, personalise
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.few_shot import FewShot
from fedbilevel.tasks.findings import histogram, images, share
from fedbilevel.tasks.hyper_representation import HyperRepresentation
from fedbilevel.tasks.imbalance import Imbalance
from fedbilevel.tasks.influence import Influence
from fedbilevel.tasks.personalisation import Personalisation
from fedbilevel.tasks.quadratic import Quadratic


def by_kind(findings, kind):
    return [one for one in findings if one["kind"] == kind]


def drawn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_task_has_nothing_to_show_unless_it_says_so():
    built = Quadratic(num_clients=2).build()
    assert Quadratic(num_clients=2).findings(*built, types.SimpleNamespace(x={}, y={})) == []


def cleaned(marked=True):
    task = DataCleaning(num_clients=3, num_train=20, num_clean=2)
    problem, clients = task.build()
    if not marked:
        clients = [
            {**client, "train": {name: value for name, value in client["train"].items() if name != "wrong"}}
            for client in clients
        ]
    x = [{"logit": 2 * drawn(20, i)} for i in range(3)]
    y = {"weight": drawn((64, 10), 7), "bias": drawn(10, 8)}
    return clients, x, y, task.findings(problem, clients, types.SimpleNamespace(x=x, y=y))


def test_cleaning_counts_weights_and_shows_the_smallest():
    clients, x, y, found = cleaned()
    weights = 1 / (1 + np.exp(-np.concatenate([tree["logit"].double().numpy() for tree in x])))
    wrong = np.concatenate([client["train"]["wrong"] for client in clients]).astype(bool)
    [counted] = by_kind(found, "histogram")
    for group, own in zip(counted["groups"], (weights[~wrong], weights[wrong]), strict=True):
        assert group["counts"] == [
            int(((own >= low) & (own < high)).sum())
            for low, high in zip(counted["edges"], counted["edges"][1:], strict=False)
        ]
    assert [group["name"] for group in counted["groups"]] == ["clean", "corrupted"]
    [shown] = by_kind(found, "images")
    order = np.argsort(weights)[:24]
    assert [(one["facts"]["client"], one["facts"]["sample"]) for one in shown["items"]] == [
        (int(i) // 20, int(i) % 20) for i in order
    ]
    first, facts = order[0], shown["items"][0]["facts"]
    assert facts["weight"] == pytest.approx(weights[first], rel=1e-12)
    assert (facts["label"], facts["wrong"]) == (
        int(clients[first // 20]["train"]["label"][first % 20]),
        bool(wrong[first]),
    )
    pixels = np.frombuffer(base64.b64decode(shown["items"][0]["pixels"]), np.uint8)
    assert (
        pixels.tolist()
        == np.rint(255 * clients[first // 20]["train"]["image"][first % 20].astype(np.float64))
        .astype(np.uint8)
        .tolist()
    )
    assert shown["shape"] == [8, 8]
    assert f"{int(wrong[order].sum())} of these 24 labels are really wrong" in shown["about"]
    [served] = by_kind(found, "by_client")
    for own, client in zip(served["values"]["test_accuracy"], clients, strict=True):
        answers = (client["test"]["image"] @ y["weight"].numpy() + y["bias"].numpy()).argmax(1)
        assert own == pytest.approx((answers == client["test"]["label"]).mean())


def test_cleaning_without_marks_says_nothing_about_truth():
    _, _, _, found = cleaned(marked=False)
    assert [group["name"] for group in by_kind(found, "histogram")[0]["groups"]] == ["all samples"]
    assert "wrong" not in by_kind(found, "images")[0]["items"][0]["facts"]
    assert "really wrong" not in by_kind(found, "images")[0]["about"]


def test_weights_that_nobody_learned_are_not_shown():
    task = DataCleaning(num_clients=3, num_train=20, num_clean=2)
    problem, clients = task.build()
    start = types.SimpleNamespace(
        x=[{"logit": torch.zeros(20)}] * 3, y={"weight": torch.zeros(64, 10), "bias": torch.zeros(10)}
    )
    assert [one["kind"] for one in task.findings(problem, clients, start)] == ["by_client"]
    assert task.findings(problem, clients, types.SimpleNamespace(x=None, y=start.y)) == []  # it never left the sites


@pytest.mark.parametrize("data", ["mixture", "digits"])
def test_influence_ranks_instances_by_their_masks(data):
    task = Influence(
        data=data, wrong=0.2, **({"num_train": 12, "num_val": 6} if data == "mixture" else {"share": 0.05})
    )
    problem, clients = task.build()
    x = [{"mask": 1 + 0.1 * drawn(len(client["train"]["label"]), i)} for i, client in enumerate(clients)]
    y = {name: drawn(leaf.shape, 5) for name, leaf in problem.y0.items()}
    found = task.findings(problem, clients, types.SimpleNamespace(x=x, y=y))
    harmful, helpful = by_kind(found, "ranking")
    assert harmful["columns"] == ["client", "sample", "label", "mask", "wrong"]
    every = sorted((float(mask), i, j) for i, tree in enumerate(x) for j, mask in enumerate(tree["mask"].double()))
    assert [(row[3], row[0], row[1]) for row in harmful["rows"]] == [one for one in every if one[0] < 1][:30]
    assert [(row[3], row[0], row[1]) for row in helpful["rows"]] == [one for one in every[::-1] if one[0] > 1][:30]
    row = harmful["rows"][0]
    assert (row[2], row[4]) == (
        int(clients[row[0]]["train"]["label"][row[1]]),
        bool(clients[row[0]]["train"]["wrong"][row[1]]),
    )
    assert len(by_kind(found, "images")) == (0 if data == "mixture" else 2)


def test_imbalance_shows_every_class_with_what_was_learned_for_it():
    task = Imbalance(num_clients=3)
    problem, clients = task.build()
    x = {"delta": drawn(10, 0), "ell": drawn(10, 1)}
    y = {"out.weight": drawn((10, 64), 2), "out.bias": drawn(10, 3)}
    ranking, served = task.findings(problem, clients, types.SimpleNamespace(x=x, y=y))
    labels = np.concatenate([client["train"]["label"] for client in clients])
    right, truth = [], []
    for client in clients:
        right.append(
            (client["test"]["image"] @ y["out.weight"].numpy().T + y["out.bias"].numpy()).argmax(1)
            == client["test"]["label"]
        )
        truth.append(client["test"]["label"])
    for c, row in enumerate(ranking["rows"]):
        assert row[:2] == [c, int((labels == c).sum())]
        assert row[2:] == pytest.approx(
            [
                2 / (1 + np.exp(-float(x["delta"][c]))),
                float(x["ell"][c]),
                np.concatenate(right)[np.concatenate(truth) == c].mean(),
            ],
            rel=1e-6,
        )
    assert served["values"]["test_accuracy"] == pytest.approx([own.mean() for own in right])
    between_peers = types.SimpleNamespace(x=[x] * 3, y=[y] * 3)
    assert task.findings(problem, clients, between_peers) == [served]


@pytest.mark.parametrize(
    ("task", "algorithm", "name", "metric"),
    [
        (HyperRepresentation(num_clients=4, num_hidden=8), "fedbio", "test_accuracy", "test_accuracy"),
        (FewShot(num_tasks=2, num_queries=3, num_held_out=1), "fedbio_local", "query_accuracy", "query_accuracy"),
        (
            Personalisation(num_clients=6, share=0.1, model="linear"),
            "fedavg",
            "test_accuracy",
            "test_accuracy_mean_client",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_accuracies_of_clients_add_up_to_the_figure_of_all(task, algorithm, name, metric):
    problem, clients = task.build()
    settings = {
        key: value
        for key, value in task.suggestions(algorithm).items()
        if key in discovery.algorithm(algorithm).__dataclass_fields__
    }
    result = solve(problem, clients, discovery.algorithm(algorithm)(**settings), residuals=False, num_iterations=2)
    [found] = task.findings(problem, clients, result)
    assert found["kind"] == "by_client"
    sizes = (
        np.ones(len(clients))
        if metric.endswith("mean_client")
        else [len(next(iter(client["val" if "query" in name else "test"].values()))) for client in clients]
    )
    assert np.average(found["values"][name], weights=sizes) == pytest.approx(result.rows[-1][metric], abs=1e-6)
    assert len(set(found["values"][name])) > 1
    assert are_findings(json.loads(json.dumps([found], allow_nan=False)))


def test_pictures_are_on_one_scale_and_colours_come_last():
    shown = images("t", "", np.array([[-1.0, 0.0, 1.0, 3.0]]), [{}])
    assert base64.b64decode(shown["items"][0]["pixels"]) == bytes([0, 64, 128, 255])
    coloured = images("t", "", np.arange(12)[None] / 11, [{}])
    assert coloured["shape"] == [2, 2, 3]
    assert list(base64.b64decode(coloured["items"][0]["pixels"])) == [
        round(255 * (4 * channel + pixel) / 11) for pixel in range(4) for channel in range(3)
    ]
    assert images("t", "", np.zeros((1, 7)), [{}]) is None
    assert histogram("t", "", "x", {"a": [-9.0, 0.25, 0.5, 9.0]}, [0.0, 0.5, 1.0])["groups"] == [
        {"name": "a", "counts": [2, 2]}
    ]
    assert share(1, 0) is None


def test_the_study_of_personalisation_keeps_the_accuracies_of_the_best_measurement(tmp_path):
    task, plan = (
        Personalisation(num_clients=6, share=0.1, model="linear"),
        PersonalisationPlan(num_outer=4, num_lower_steps=3, lr_lower=2.0, repetitions=1),
    )
    methods = {"methods": ["sgp"], "networks": ["complete", "random_directed"]}
    with pytest.warns(RecoveryWarning, match="sgp: the run failed: upper_loss rose"):
        outcomes = personalise(task, plan, record=tmp_path, **methods)
    sizes = [len(client["test"]["label"]) for client in task.build().clients]
    assert outcomes[1].iteration < plan.num_outer  # the steps are so long that the last measurement is not the best
    for one in outcomes:
        assert len(one.accuracies) == 6
        assert np.average(one.accuracies, weights=sizes) == pytest.approx(one.test_accuracy)
        assert np.quantile(one.accuracies, 0.1) == pytest.approx(one.bottom_decile)
    written = json.loads((tmp_path / "personalisation.json").read_text())["outcomes"]
    assert [tuple(one["accuracies"]) for one in written] == [one.accuracies for one in outcomes]
    for one in written:
        del one["accuracies"]  # a record of an older version
    (tmp_path / "personalisation.json").write_text(
        json.dumps({**json.loads((tmp_path / "personalisation.json").read_text()), "outcomes": written})
    )
    assert [one.accuracies for one in personalise(task, plan, record=tmp_path, **methods)] == [(), ()]


def test_a_study_of_influence_on_images_keeps_how_they_look(tmp_path):
    task = Influence(data="digits", share=0.05, wrong=0.2)
    study = influence_study(task, method="cg", num_removed=0, record=tmp_path)
    harmful, helpful = json.loads((tmp_path / "findings.json").read_text())
    clients = task.build().clients
    for found, some in ((harmful, study.harmful(12)), (helpful, study.helpful(12))):
        assert [
            (one["facts"]["client"], one["facts"]["sample"], one["facts"]["predicted"]) for one in found["items"]
        ] == [(one.client, one.sample, one.prediction) for one in some]
        look = np.frombuffer(base64.b64decode(found["items"][3]["pixels"]), np.uint8).reshape(8, 8)
        assert (
            look.tolist()
            == np.rint(255 * np.asarray(clients[some[3].client]["train"]["input"][some[3].sample], np.float64))
            .astype(int)
            .tolist()
        )
