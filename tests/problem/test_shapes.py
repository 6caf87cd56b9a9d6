"""A problem built from settings and shapes equals the problem built from all data, bit for bit.

A run on a site's own folder is equal too.
"""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from fedbilevel import discovery
from fedbilevel.algorithms.fbo_aggitd import FBOAggITD
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedbio_local import FedBiOLocal
from fedbilevel.data.folders import read_folder, write_folder
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import ProblemError
from fedbilevel.problem.validation import away
from fedbilevel.tasks.adapters import Adapters
from fedbilevel.tasks.classification import Classification
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.few_shot import FewShot
from fedbilevel.tasks.few_shot_episodes import FewShotEpisodes
from fedbilevel.tasks.hyper_representation import HyperRepresentation
from fedbilevel.tasks.imbalance import Imbalance
from fedbilevel.tasks.influence import Influence
from fedbilevel.tasks.mixing import Mixing
from fedbilevel.tasks.personalisation import Personalisation
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.regularisation import Regularisation
from fedbilevel.tasks.representation import Representation
from fedbilevel.tasks.task import Built, Sample, Shapes, Task
from support.numeric.yardstick import drive

FEW = {
    "num_tasks": 2,
    "num_ways": 3,
    "num_shots": 2,
    "num_queries": 4,
    "num_held_out": 3,
    "num_filters": 3,
    "num_clients": 2,
}
TASKS = {
    "adapters": (Adapters(num_clients=3, num_train=4, num_val=5, num_test=6, context=6, num_pretraining=5), None),
    "classification": (Classification(num_clients=3, share=0.2, weight_decay=0.1), 10),
    "cleaning": (DataCleaning(num_clients=3), 10),
    "cleaning mlp": (DataCleaning(num_clients=3, model="mlp", num_hidden=4, data_seed=2), 10),
    "representation": (HyperRepresentation(num_clients=3, share=0.1, num_hidden=5), 10),
    "representation cnn": (
        HyperRepresentation(num_clients=3, share=0.1, model="cnn", head_layers=2, split="iid", data_seed=3),
        10,
    ),
    "imbalance": (Imbalance(num_clients=3), 10),
    "imbalance mlp": (Imbalance(num_clients=3, model="mlp", num_hidden=4, data_seed=1), 10),
    "mixing": (Mixing(num_clients=3, num_train=5, num_val=6, num_test=7, num_hidden=4), 12),
    "regularisation": (Regularisation(num_test=20), 2),
    "regularisation shared": (Regularisation(num_test=20, upper="shared", parametrisation="linear", start=0.2), 2),
    "personalisation": (Personalisation(num_clients=4, share=0.2), 10),
    "personalisation cnn": (
        Personalisation(num_clients=4, share=0.2, personalise="mixture", model="cnn", width=0.1),
        10,
    ),
    "personalisation head": (Personalisation(num_clients=4, share=0.2, personalise="head", shift="labels"), 10),
    "own heads": (Representation(num_clients=4, share=0.3, num_hidden=5), 10),
    "few shot": (FewShot(**FEW), None),
    "few shot episodes": (FewShotEpisodes(num_queries=2, num_held_out=2, num_filters=3, num_clients=2), None),
    "quadratic": (Quadratic(cross=0.3, bend=0.2, num_clients=3), None),
    "quadratic private": (Quadratic(upper="private", lower="local", client_weights="by_samples", num_clients=3), None),
    "influence": (Influence(num_train=10, num_val=8), 2),
    "influence cnn": (Influence(data="digits", model="cnn", share=0.1), 10),
}
tasks = pytest.mark.parametrize("name", TASKS)


@pytest.fixture(scope="module")
def built() -> dict[str, Built]:
    return {name: task.build() for name, (task, _) in TASKS.items()}


def simulate(problem, clients, **options) -> Simulation:
    """Simulate with a fixed strategy: a busy machine could choose another, which rounds differently."""
    return Simulation(FedAvg(), problem, clients, strategy="loop", **options)


def shapes_of(name: str, built: dict[str, Built]) -> Shapes:
    return Shapes.of(built[name].clients[0], TASKS[name][1])


def without(client, role: str, *names: str):
    """A client that lacks a role, or some of its fields."""
    if not names:
        return {other: fields for other, fields in client.items() if other != role}
    return {
        other: {name: v for name, v in fields.items() if other != role or name not in names}
        for other, fields in client.items()
    }


# ---- the description -----------------------------------------------------------------------------------------------


def test_shapes_hold_shapes_and_types_but_no_values():
    client = {
        "train": {"x": np.zeros((5, 2, 3), np.float32), "label": torch.zeros(5, dtype=torch.int64)},
        "val": {"x": [[1.0], [2.0]]},
    }
    shapes = Shapes.of(client, 4)
    expected = {"train": {"x": ((2, 3), "float32"), "label": ((), "int64")}, "val": {"x": ((1,), "float64")}}
    assert {role: dict(own) for role, own in shapes.fields.items()} == expected
    assert shapes.fields["train"]["x"] == Sample((2, 3), "float32")
    assert shapes.num_classes == 4
    assert Shapes.of({"train": {"x": np.ones((77, 2, 3), np.float32)}}) == Shapes.of(
        {"train": {"x": np.zeros((5, 2, 3), np.float32)}}
    )


@tasks
def test_shapes_survive_json(name, built):
    shapes = shapes_of(name, built)
    assert Shapes.from_dict(json.loads(json.dumps(shapes.asdict()))) == shapes
    assert all(shapes == Shapes.of(client, TASKS[name][1]) for client in built[name].clients)


@pytest.mark.parametrize(
    "other",
    [
        {"num_classes": 4},
        {"fields": {}},
        {"fields": {"train": {"x": ((3,), "float32")}}},
        {"fields": {"train": {"x": ((2,), "float64")}}},
    ],
)
def test_shapes_that_differ_are_not_equal(other):
    shapes = Shapes({"train": {"x": Sample((2,), "float32")}}, 3)
    assert dataclasses.replace(shapes) == shapes
    assert dataclasses.replace(shapes, **other) != shapes


def test_shapes_cannot_be_changed():
    fields = {"train": {"x": Sample((2,), "float32")}}
    shapes = Shapes(fields)
    fields["train"]["x"] = Sample((9,), "int64")
    assert shapes.fields["train"]["x"].shape == (2,)
    with pytest.raises(TypeError):
        shapes.fields["train"]["y"] = Sample((), "int64")
    with pytest.raises(dataclasses.FrozenInstanceError):
        shapes.num_classes = 2


@pytest.mark.parametrize(
    "values",
    [
        {},
        3,
        {"fields": {}},
        {"fields": 3, "num_classes": None},
        {"fields": {"train": {"x": 3}}, "num_classes": None},
        {"fields": {}, "num_classes": "3"},
    ]
    + [
        {"fields": {"train": {"x": [shape, dtype]}}, "num_classes": None}
        for shape, dtype in (("12", "int64"), ([-1], "int64"), ([1.5], "int64"), ([1], 64))
    ]
    + [{"fields": {}, "num_classes": num} for num in (1, True, -3, 2.0)],
    ids=str,
)
def test_shapes_from_a_damaged_message_are_refused(values):
    with pytest.raises(ProblemError, match=r"the shapes are|the fields are|num_classes is") as caught:
        Shapes.from_dict(values)
    assert "\n" not in str(caught.value)


def test_a_single_number_has_no_samples():
    with pytest.raises(ProblemError, match="train/x is a single number"):
        Shapes.of({"train": {"x": 3.0}})


def test_what_misfits_is_said_in_words_and_more_than_is_asked_for_does_no_harm():
    asked = Shapes({"train": {"x": ((2,), "float32"), "label": ((), "int64")}}, 3)
    more = Shapes(
        {
            "train": {"x": ((2,), "float64"), "label": ((), "int64"), "wrong": ((), "bool")},
            "test": {"x": ((9,), "bool")},
        },
        3,
    )
    assert asked.misfit(asked) is None
    assert asked.misfit(more) is None
    assert more.misfit(asked) == "there is no train/wrong, expected true or false of shape ()"
    assert asked.misfit(dataclasses.replace(more, num_classes=2)) == "there are 2 classes, expected 3"
    for look, words in (
        (((3,), "float32"), "floating-point numbers of shape (3,)"),
        (((2,), "int64"), "whole numbers of shape (2,)"),
    ):
        other = Shapes({"train": {"x": look, "label": ((), "int64")}}, 3)
        assert asked.misfit(other) == f"samples of train/x are {words}, expected floating-point numbers of shape (2,)"


# ---- the problem ---------------------------------------------------------------------------------------------------


def test_every_task_makes_its_problem_of_shapes_and_says_what_a_folder_needs(built):
    assert {task.name() for task, _ in TASKS.values()} == set(discovery.tasks())
    for name, (task, _) in TASKS.items():
        client = built[name].clients[0]
        assert all(
            set(fields) <= set(client[role]) for needs in (task.needs, task.measures) for role, fields in needs.items()
        )
        assert {"train", "val"} <= set(task.needs)
        assert all(
            meaning for needs in (task.needs, task.measures) for fields in needs.values() for meaning in fields.values()
        )


@tasks
def test_the_problem_of_shapes_is_the_problem_of_all_data(name, built):
    """Losses and figures agree bit for bit at two points; layouts and initial points are equal."""
    whole, made = (
        built[name].problem,
        TASKS[name][0].problem(Shapes.from_dict(json.loads(json.dumps(shapes_of(name, built).asdict())))),
    )
    assert (made.scopes, made.client_weights, made.name, list(made.statistics)) == (
        whole.scopes,
        whole.client_weights,
        whole.name,
        list(whole.statistics),
    )
    assert list(made.y0) == list(whole.y0)
    assert all(torch.equal(made.y0[leaf], whole.y0[leaf]) for leaf in whole.y0)
    for dtype in (torch.float32, torch.float64):
        one, other = (
            simulate(problem, built[name].clients, dtype=dtype)
            for problem in (made, dataclasses.replace(whole, diagnostics=None))
        )
        assert one.host.layout_x.describe() == other.host.layout_x.describe()
        assert one.host.layout_y.describe() == other.host.layout_y.describe()
        assert torch.equal(one.host.x0, other.host.x0)
        assert torch.equal(one.host.y0, other.host.y0)
        for move in (lambda v: v, away):
            point = move(other.host.x0), move(other.host.y0)
            assert one.measure(*point) == other.measure(*point)


def test_closed_forms_need_all_data_and_come_with_build_only():
    task = Quadratic()
    built = task.build()
    assert built.problem.diagnostics is not None
    assert task.problem(Shapes.of(built.clients[0])).diagnostics is None
    for settings in ({"bend": 0.1}, {"lower": "local"}, {"upper": "private"}):
        assert Quadratic(**settings).build().problem.diagnostics is None


@pytest.mark.slow
@tasks
def test_a_run_on_folders_is_the_run_on_all_data(name, built, tmp_path):
    task, num_classes = TASKS[name]
    for i, client in enumerate(built[name].clients):
        write_folder(tmp_path / f"site{i}", client)
    read = [read_folder(tmp_path / f"site{i}", num_classes=num_classes) for i in range(len(built[name].clients))]
    for client, own in zip(built[name].clients, read, strict=True):
        assert set(own) == set(client)
        for role, fields in client.items():
            assert set(own[role]) == set(fields)
            assert all(
                own[role][field].dtype == value.dtype and own[role][field].tobytes() == value.tobytes()
                for field, value in fields.items()
            )
    method = (
        FedBiOLocal()
        if built[name].problem.scopes.lower == "local"
        else FBOAggITD(lr_upper=0.1, lr_lower=0.1, num_lower_rounds=2)
    )
    apart = Built(task.problem(Shapes.of(read[0], num_classes)), read)
    (one, first), (other, second) = (
        drive(method, each, 2, dtype=torch.float32, batch_size=4, strategy="loop") for each in (apart, built[name])
    )
    assert not torch.equal(other.collect(second.x), other.host.x0)
    assert torch.equal(one.collect(first.x), other.collect(second.x))
    assert torch.equal(one.collect(first.y), other.collect(second.y))
    assert one.ledger.totals() == other.ledger.totals()


# ---- what only figures need ----------------------------------------------------------------------------------------

FIGURES = {
    "adapters": {
        ("test",): {"test_accuracy", "test_loss", "test_accuracy_bottom_decile", "test_accuracy_mean_client"},
    },
    "cleaning": {
        ("train", "wrong"): {"precision", "recall", "f1"},
        ("test",): {"test_accuracy"},
        ("test", "label"): {"test_accuracy"},
    },
    "representation": {("test",): {"test_accuracy"}},
    "imbalance": {("test",): {"balanced_test_accuracy", "rarest_test_accuracy", "test_accuracy"}},
    "regularisation": {("test",): {"test_accuracy", "test_loss"}},
    "personalisation": {
        ("test",): {"test_accuracy", "test_accuracy_bottom_decile", "test_accuracy_mean_client"},
        ("stop",): {"stop_accuracy"},
    },
    "few shot": {("test",): {"test_accuracy"}, ("held_out",): {"validation_accuracy"}, ("train", "character"): set()},
}


@pytest.mark.parametrize(
    ("name", "lost"), [(name, lost) for name, all_lost in FIGURES.items() for lost in all_lost], ids=str
)
def test_without_a_field_that_only_measures_its_figures_are_absent_and_all_others_are_as_before(name, lost, built):
    clients = [without(client, *lost) for client in built[name].clients]
    problem = TASKS[name][0].problem(Shapes.of(clients[0], TASKS[name][1]))
    host = simulate(*built[name]).host
    x, y = away(host.x0), away(host.y0)
    before, after = simulate(*built[name]).measure(x, y), simulate(problem, clients).measure(x, y)
    assert before.keys() - after.keys() == FIGURES[name][lost]
    assert after == {figure: value for figure, value in before.items() if figure in after}


def test_without_anything_to_measure_losses_are_left(built):
    clients = [without(without(client, "test"), "train", "wrong") for client in built["cleaning"].clients]
    problem = TASKS["cleaning"][0].problem(Shapes.of(clients[0], 10))
    fed = simulate(problem, clients)
    assert set(fed.measure(fed.host.x0, fed.host.y0)) == {"upper_loss", "lower_loss", "validation_error"}


def test_marks_may_be_noughts_and_ones(built):
    clients = [
        {**client, "train": {**client["train"], "wrong": client["train"]["wrong"].astype(np.int64)}}
        for client in built["cleaning"].clients
    ]
    problem = TASKS["cleaning"][0].problem(Shapes.of(clients[0], 10))
    fed, other = simulate(problem, clients), simulate(*built["cleaning"])
    x, y = away(fed.host.x0), away(fed.host.y0)
    assert 0 < fed.measure(x, y)["precision"] < 1
    assert fed.measure(x, y) == other.measure(x, y)


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, (_, num) in TASKS.items() if num is not None])
def test_the_number_of_classes_has_to_be_given(name, built):
    with pytest.raises(
        ProblemError,
        match="num_classes is not given, but labels are classes: say how many there are at all sites together",
    ):
        TASKS[name][0].problem(dataclasses.replace(shapes_of(name, built), num_classes=None))


def test_classes_that_a_site_lacks_have_their_place():
    problem = DataCleaning().problem(
        Shapes.of({role: {"image": np.zeros((3, 7)), "label": np.array([0, 1, 0])} for role in ("train", "val")}, 25)
    )
    assert problem.y0["weight"].shape == (7, 25)


@tasks
def test_every_field_that_is_needed_is_missed(name, built):
    task, num_classes = TASKS[name]
    for role, fields in task.needs.items():
        for field, meaning in fields.items():
            with pytest.raises(ProblemError) as caught:
                task.problem(Shapes.of(without(built[name].clients[0], role, field), num_classes))
            assert f"{task.name()} needs {role}/{field} ({meaning}), but there is " in str(caught.value)


def tabular(shape=(6,), dtype=np.float32, label=np.int64, field="image", **others) -> Shapes:
    own = {field: np.zeros((2, *shape), dtype), "label": np.zeros(2, label)}
    return Shapes.of({"train": own, "val": own, **others}, 3)


@pytest.mark.parametrize(
    ("task", "shapes", "words"),
    [
        (
            DataCleaning(),
            tabular((8, 8)),
            r"samples of train/image have the shape \(8, 8\), expected one row of numbers each: reshape them",
        ),
        (
            DataCleaning(),
            tabular(dtype=np.uint8),
            r"train/image holds whole numbers \(uint8\), expected floating-point numbers",
        ),
        (
            Imbalance(),
            tabular(label=np.float64),
            r"train/label holds floating-point numbers \(float64\), expected whole numbers",
        ),
        (
            Imbalance(),
            tabular(test={"image": np.zeros((1, 5)), "label": np.zeros(1, int)}),
            r"train/image have the shape \(6,\) and those of test/image \(5,\)",
        ),
        (
            HyperRepresentation(model="cnn"),
            tabular(),
            r"images have 6 numbers, expected one of 64 \(1 x 8 x 8\), .*3072 \(3 x 32 x 32\)",
        ),
        (Personalisation(model="cnn"), tabular((63,)), "images have 63 pixels, expected 64 or 784"),
        (Personalisation(model="cnn"), tabular((100,)), "images have 100 pixels, expected 64 or 784"),
        (Regularisation(), tabular(field="input"), "regularisation tells two classes apart, but num_classes is 3"),
        (Influence(), tabular(field="input"), "influence on mixture has 2 classes, but num_classes is 3"),
        (FewShot(), tabular((20, 4, 64)), "20 tasks of 4 characters, the settings say 20 of 5"),
        (FewShot(), tabular((20, 5, 65)), "images have 65 pixels"),
        (
            FewShot(),
            tabular((20, 5, 64), test={"image": np.zeros((2, 1, 5, 64))}),
            r"test/image have the shape \(1, 5, 64\), expected more than num_shots \(1\)",
        ),
    ],
)
def test_samples_of_a_wrong_shape_or_type_are_refused(task, shapes, words):
    with pytest.raises(ProblemError, match=words) as caught:
        task.problem(shapes)
    assert "\n" not in str(caught.value)


def test_images_of_another_size_than_the_data_of_influence_are_refused():
    own = {"input": np.zeros((2, 9, 9)), "label": np.zeros(2, int)}
    with pytest.raises(
        ProblemError,
        match=r"influence on digits has images of shape \(8, 8\), but samples of train/input are of shape \(9, 9\)",
    ):
        Influence(data="digits").problem(Shapes.of({"train": own, "val": own}, 10))


def test_matrices_of_the_wrong_size_are_refused(built):
    shapes = Shapes.of(Quadratic().clients()[0])
    with pytest.raises(ProblemError, match=r"samples of B have the shape \(6, 4\), expected \(6, 5\) with dim_upper 5"):
        Quadratic(dim_upper=5).problem(shapes)
    with pytest.raises(ProblemError, match="quadratic with cross above 0 needs val/E"):
        Quadratic(cross=0.1).problem(shapes)


@pytest.mark.parametrize(
    "task",
    [DataCleaning(), HyperRepresentation(), Imbalance(), Personalisation(model="linear"), Personalisation()],
    ids=lambda t: t.name(),
)
def test_rows_that_are_no_images_are_welcome_where_no_convolution_needs_one(task):
    own = {"image": np.random.default_rng(0).standard_normal((4, 7)), "label": np.array([0, 1, 2, 1])}
    client = {"train": own, "val": own}
    fed = simulate(task.problem(Shapes.of(client, 3)), [client, client])
    assert np.isfinite(fed.measure(fed.host.x0, fed.host.y0)["upper_loss"])


def test_a_task_that_cannot_do_without_data_says_so():
    class Bound(Task):
        @classmethod
        def name(cls) -> str:
            return "bound"

    with pytest.raises(
        ProblemError, match="the task bound makes its problem out of data, which a server does not have"
    ):
        Bound().problem(Shapes({}))
