"""Few-shot classification: splits of characters, the network and losses in plain numpy.

Also hypergradients task by task, and new heads by Newton's method.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import fedbilevel as fb
from fedbilevel import discovery
from fedbilevel.data.locations import find
from fedbilevel.data.sets.digits import digits
from fedbilevel.data.sets.omniglot import FILE, omniglot
from fedbilevel.errors import DataError, ProblemError
from fedbilevel.oracle.hypergradient import hypergradient, lower_solution
from fedbilevel.oracle.population import Population
from fedbilevel.tasks.few_shot import FewShot
from fedbilevel.tasks.task import Built
from support.numeric.yardstick import drive, relative

SMALL = {"num_tasks": 2, "num_ways": 3, "num_shots": 2, "num_queries": 4, "num_held_out": 3, "num_filters": 3}
LOCAL = ["fedbio_local", "fedbioacc_local", "distbio", "distbioacc"]
norms = pytest.mark.parametrize("norm", ["sample", "image"])


def fake(folder, num_alphabets: int = 50, num_drawers: int = 6) -> None:
    """Alphabets of two or three characters as an Omniglot file.

    Every image differs from all others and from its own rotations.
    """
    rng = np.random.default_rng(0)
    alphabet_of = np.repeat(np.arange(num_alphabets), 2 + np.arange(num_alphabets) % 2)
    label = np.repeat(np.arange(len(alphabet_of)), num_drawers)
    place = folder / FILE
    place.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        place,
        images=rng.integers(0, 2, (len(label), 28, 28)).astype(np.uint8) * 255,
        label=label,
        alphabet=alphabet_of[label],
        drawer=np.tile(np.arange(num_drawers), len(alphabet_of)),
        background=np.ones(len(label), bool),
        label_names=np.array([f"character {c}" for c in range(len(alphabet_of))]),
        alphabet_names=np.array([f"alphabet {a}" for a in range(num_alphabets)]),
    )


def characters(client, roles=("train", "val")) -> set[int]:
    return {int(c) for role in roles for c in client[role]["character"].ravel()}


def episodes(client, task: FewShot):
    """Images (shots and queries, ways, pixels) and characters (ways,) of a client's episodes."""
    for t in range(task.num_tasks):
        assert all(
            (client[role]["character"][:, t] == client["train"]["character"][0, t]).all() for role in ("train", "val")
        )
        yield (
            np.concatenate([client[role]["image"][:, t] for role in ("train", "val")]),
            client["train"]["character"][0, t],
        )
    for role in ("held_out", "test"):
        yield from zip(client[role]["image"], client[role]["character"], strict=True)


def check_images(task: FewShot, clients, source: np.ndarray, label: np.ndarray) -> None:
    """Every image is a whole quarter turn of one of its character, and none is twice in an episode."""
    side = source.shape[-1]
    turned = {}
    for place, (image, c) in enumerate(zip(source, label, strict=True)):
        rows = [
            [*image],
            [*image.T[::-1]],
            [*image[::-1, ::-1]],
            [*image.T[:, ::-1]],
        ]  # anticlockwise by 0, 90, 180 and 270 degrees
        for k, rotated in enumerate(rows):
            turned.setdefault((4 * int(c) + k, np.ascontiguousarray(rotated).tobytes()), place)
    for client in clients:
        for images, which in episodes(client, task):
            assert images.shape == (task.num_shots + task.num_queries, task.num_ways, side * side)
            assert len({*which.tolist()}) == task.num_ways
            for n, c in enumerate(which.tolist()):
                places = [turned[c, image.tobytes()] for image in images[:, n]]
                assert len({*places}) == len(places)


# ---- who has what ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shots", [1, 2])
def test_digits_make_four_clients_with_six_turned_digits_each_and_others_are_held_out(shots):
    task = FewShot(num_shots=shots, num_tasks=12, num_held_out=10, num_queries=3)
    clients = task.build().clients
    images, labels = digits()
    check_images(task, clients, images.reshape(-1, 8, 8), labels)
    own = [characters(client) for client in clients]
    held = [set.union(*(characters(client, [role]) for client in clients)) for role in ("held_out", "test")]
    assert [len(some) for some in (*own, *held)] == [6, 6, 6, 6, 6, 10]
    assert Counter(c for some in (*own, *held) for c in some) == Counter(range(40))
    for client in clients:
        assert {role: fields["image"].shape[:2] for role, fields in client.items()} == {
            "train": (shots, 12), "val": (3, 12), "held_out": (10, shots + 3), "test": (10, shots + 3),
        }  # fmt: skip


def test_a_file_of_fifty_alphabets_makes_eleven_clients_with_three_each(tmp_path):
    fake(tmp_path)
    task = FewShot(data="omniglot", data_dir=str(tmp_path), num_queries=4, num_tasks=30, num_held_out=12, num_filters=2)
    clients = task.build().clients
    found = omniglot(tmp_path)
    assert {*np.unique(found.images)} == {0.0, 1.0}
    check_images(task, clients[:2], found.images, found.label)
    home = dict(zip(found.label.tolist(), found.alphabet.tolist(), strict=True))
    alphabets = lambda some: {home[c // 4] for c in some}
    own = [alphabets(characters(client)) for client in clients]
    held = [set.union(*(alphabets(characters(client, [role])) for client in clients)) for role in ("held_out", "test")]
    assert [len(some) for some in (*own, *held)] == [3] * 11 + [5, 12]
    assert Counter(a for some in (*own, *held) for a in some) == Counter(range(50))
    assert {c % 4 for c in characters(clients[0])} == {0, 1, 2, 3}
    assert clients[0]["train"]["image"].dtype == np.float32


def test_omniglot_is_split_as_in_the_paper():
    try:
        find(FILE)
    except DataError:
        pytest.skip("the file of Omniglot is not here: name its folder with FEDBILEVEL_DATA")
    task = FewShot(data="omniglot", num_ways=20, num_shots=5, num_tasks=2, num_held_out=1)
    built = task.build()
    assert len(built.clients) == 11
    assert {name: tuple(leaf.shape) for name, leaf in built.problem.x0.items()} == {
        "conv1.weight": (64, 1, 3, 3), "conv1.bias": (64,), "conv2.weight": (64, 64, 3, 3), "conv2.bias": (64,),
        "conv3.weight": (64, 64, 3, 3), "conv3.bias": (64,), "conv4.weight": (64, 64, 3, 3),
    }  # fmt: skip
    assert {name: tuple(leaf.shape) for name, leaf in built.problem.y0.items()} == {
        "head.weight": (2, 20, 64),
        "head.bias": (2, 20),
    }
    assert built.clients[0]["val"]["image"].shape == (15, 2, 20, 784)
    assert max(len(characters(client)) for client in built.clients) == 40  # two tasks of twenty, hardly ever the same
    assert 0.02 < built.clients[0]["train"]["image"].mean() < 0.3  # ink is 1


def test_data_and_initial_weights_follow_the_seed_alone():
    one, same, other = (FewShot(**SMALL, data_seed=seed).build() for seed in (3, 3, 4))
    assert all(
        np.array_equal(a["val"]["image"], b["val"]["image"]) for a, b in zip(one.clients, same.clients, strict=True)
    )
    assert torch.equal(one.problem.x0["conv2.weight"], same.problem.x0["conv2.weight"])
    assert not torch.equal(one.problem.x0["conv2.weight"], other.problem.x0["conv2.weight"])
    assert not np.array_equal(one.clients[0]["val"]["image"], other.clients[0]["val"]["image"])


def test_what_cannot_be_dealt_is_a_clear_error(tmp_path):
    with pytest.raises(
        ProblemError,
        match=(
            r"^a task has 7 characters, client 0 has only 6, turned ones counted: use fewer ways or "
            r"more alphabets per client\.$"
        ),
    ):
        FewShot(num_ways=7).build()
    with pytest.raises(ProblemError, match=r"^a task has 7 characters, validation has only 6, "):
        FewShot(num_ways=7, alphabets_per_client=4).build()
    with pytest.raises(
        ProblemError,
        match=(
            r"^5 clients with 3 alphabets each need 15 alphabets, of which digits has 12 for clients: "
            r"use fewer clients or"
        ),
    ):
        FewShot(num_clients=5).build()
    with pytest.raises(
        ProblemError, match=r"^1 clients with 13 alphabets each need 13 alphabets, of which digits has 12"
    ):
        FewShot(alphabets_per_client=13).build()
    fake(tmp_path)
    with pytest.raises(
        ProblemError,
        match=r"^a task needs 3 \+ 4 images of a character, omniglot has only 6 of one: use fewer shots or queries\.$",
    ):
        FewShot(data="omniglot", data_dir=str(tmp_path), num_shots=3, num_queries=4).build()
    fake(tmp_path, num_alphabets=49)
    with pytest.raises(
        ProblemError,
        match=(
            r"^omniglot has 49 alphabets, expected 33 \+ 5 \+ 12 for clients, validation and testing: "
            r"get the file anew\.$"
        ),
    ):
        FewShot(data="omniglot", data_dir=str(tmp_path)).build()


# ---- the same in plain numpy -----------------------------------------------------------------------------------------


def represented(x: dict[str, np.ndarray], images: np.ndarray, norm: str, kind: str = "relu") -> np.ndarray:
    """(..., ways, pixels) -> (..., ways, filters), image by image and window by window."""
    side, (*lead, ways, _) = round(images.shape[-1] ** 0.5), images.shape
    z = images.astype(float).reshape(-1, 1, side, side)
    num_layers = sum(name.endswith("weight") for name in x)
    for i in range(1, num_layers + 1):
        weight = x[f"conv{i}.weight"]
        windows = np.lib.stride_tricks.sliding_window_view(
            np.pad(z, ((0, 0), (0, 0), (1, 1), (1, 1))), (3, 3), axis=(2, 3)
        )[:, :, ::2, ::2]
        z = np.einsum("nchwij,kcij->nkhw", windows, weight)
        if norm == "image":
            z = np.stack([(one - one.mean()) / np.sqrt(one.var() + 1e-5) for one in z])
        else:
            groups = z.reshape(-1, ways, *z.shape[1:])
            for group, channel in itertools.product(groups, range(z.shape[1])):
                group[:, channel] = (group[:, channel] - group[:, channel].mean()) / np.sqrt(
                    group[:, channel].var() + 1e-5
                )
            z = groups.reshape(z.shape)
        z = np.maximum(z + (x[f"conv{i}.bias"][:, None, None] if i < num_layers else 0), 0)
    return 4 / np.sqrt(z.shape[1]) * z.mean((2, 3)).reshape(*lead, ways, -1)


def uneven(task: FewShot) -> Built:
    """Clients with 1, 2 or 3 training samples, 2, 3 or 4 for validation, 3, 2 or 1 held out."""
    built = task.build()
    keep = {"train": (1, 2, 3), "val": (2, 3, 4), "held_out": (3, 2, 1), "test": (1, 3, 2)}
    cut = lambda client, i: {
        role: {name: value[: keep[role][i]] for name, value in fields.items()} for role, fields in client.items()
    }
    return Built(built.problem, [cut(client, i) for i, client in enumerate(built.clients[:3])])


def near(population: Population, seed: int = 0, size: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    """A shared x, and a y for every client."""
    draw = torch.Generator().manual_seed(seed)
    noise = lambda shape: size * torch.randn(shape, generator=draw, dtype=torch.float64)
    return population.x0 + noise(population.x0.shape), population.y0 + noise((len(population), len(population.y0)))


def minimiser(features: np.ndarray, num_ways: int, l2: float) -> tuple[np.ndarray, np.ndarray]:
    """Newton's method on one head for features (samples, ways, d): the weights (ways, d) and the bias."""
    rows = np.concatenate([features, np.ones((*features.shape[:-1], 1))], -1).reshape(-1, features.shape[-1] + 1)
    label, head = np.tile(np.arange(num_ways), len(rows) // num_ways), np.zeros((num_ways, rows.shape[1]))
    for _ in range(50):
        scores = rows @ head.T
        p = np.exp(scores - scores.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        gradient = ((p - np.eye(num_ways)[label]).T @ rows) / len(rows) + l2 * head
        softmax = np.einsum("nc,ce->nce", p, np.eye(num_ways)) - np.einsum("nc,ne->nce", p, p)
        hessian = np.einsum("nce,ni,nj->ciej", softmax, rows, rows).reshape(head.size, head.size) / len(
            rows
        ) + l2 * np.eye(head.size)
        head = head - np.linalg.solve(hessian, gradient.ravel()).reshape(head.shape)
    assert np.abs(gradient).max() < 1e-12
    return head[:, :-1], head[:, -1]


@norms
def test_losses_and_figures_are_those_of_plain_numpy_on_uneven_clients(norm):
    task = FewShot(**{**SMALL, "num_shots": 3, "num_adaptation_steps": 400}, norm=norm, l2=0.05)
    built = uneven(task)
    population = Population(*built, dtype=torch.float64)
    x, y = near(population)
    backbone = {name: leaf.numpy() for name, leaf in population.layout_x.unravel(x).items()}
    losses, right, answers = {"train": [], "val": []}, Counter(), Counter()
    for row, client in zip(y, built.clients, strict=True):
        head = {name: leaf.numpy() for name, leaf in population.layout_y.unravel(row).items()}
        for role, collected in losses.items():
            features = represented(backbone, client[role]["image"], norm)
            entropy = np.zeros((len(features), 2, 3))
            for s, t, n in itertools.product(range(len(features)), range(2), range(3)):
                scores = head["head.weight"][t] @ features[s, t, n] + head["head.bias"][t]
                entropy[s, t, n] = np.log(np.exp(scores).sum()) - scores[n]
                if role == "val":
                    right["query"] += int(scores.argmax() == n)
                    answers["query"] += 1
            collected.append(
                entropy.mean((0, 2)).sum() + 0.025 * sum((leaf**2).sum() for leaf in head.values())
                if role == "train"
                else entropy.mean()
            )
        for role, name in (("held_out", "validation"), ("test", "test")):
            for features in represented(backbone, client[role]["image"], norm):
                weight, bias = minimiser(features[:3], 3, 0.05)
                scores = features[3:] @ weight.T + bias
                right[name] += int((scores.argmax(-1) == np.arange(3)).sum())
                answers[name] += scores[..., 0].size
    figures = population.measure(x, y)
    assert figures["upper_loss"] == pytest.approx(np.mean(losses["val"]), rel=1e-9)
    assert figures["lower_loss"] == pytest.approx(np.mean(losses["train"]), rel=1e-9)
    assert answers == {"query": 9 * 6, "validation": 6 * 12, "test": 6 * 12}
    for name in answers:
        assert figures[f"{name}_accuracy"] == right[name] / answers[name]
        assert 0 < right[name] < answers[name]


@pytest.mark.parametrize("l2", [0.01, 0.3])
def test_the_head_of_a_new_episode_minimises_the_lower_level(l2):
    rng = np.random.default_rng(1)
    task = FewShot(num_ways=4, num_shots=3, l2=l2, num_adaptation_steps=1500)
    support = 2 * rng.standard_normal((2, 3, 4, 5))
    ones = np.ones((*support.shape[:-1], 1))
    heads = task._head(torch.tensor(np.concatenate([support, ones], -1)).flatten(1, 2)).numpy()
    for features, head in zip(support, heads, strict=True):
        weight, bias = minimiser(features, 4, l2)
        np.testing.assert_allclose(head[:, :-1], weight, atol=1e-7)
        np.testing.assert_allclose(head[:, -1], bias, atol=1e-7)
    one = (
        dataclasses.replace(task, num_adaptation_steps=1)._head(torch.tensor(support).flatten(1, 2)).numpy()
    )  # from zero: a plain gradient step
    step = 1 / (l2 + 0.5 * (support[0] ** 2).sum() / 12)
    np.testing.assert_allclose(
        one[0], step / 12 * np.einsum("knc,knd->cd", np.eye(4) - np.full((3, 4, 4), 0.25), support[0]), atol=1e-12
    )


@pytest.mark.slow
def test_the_default_number_of_steps_finds_a_head_that_answers_as_the_minimiser():
    task = FewShot(num_filters=8, num_shots=3, num_queries=5, num_tasks=1, num_held_out=10)
    built = task.build()
    longer = dataclasses.replace(task, num_adaptation_steps=1000).build().problem
    figures = [Population(problem, built.clients).measure for problem in (built.problem, longer)]
    population = Population(*built)
    short, long = (measure(population.x0, population.y0) for measure in figures)
    for name in ("validation_accuracy", "test_accuracy"):
        assert short[name] == pytest.approx(long[name], abs=0.01)


@norms
def test_features_are_bounded_whatever_the_backbone(norm):
    built = FewShot(**SMALL, norm=norm).build()
    population = Population(*built, dtype=torch.float64)
    fields = population.data.batch(population.data.positions, "val").row(0)
    largest = 0.0
    for seed in range(20):
        x, _ = near(population, seed, size=100.0)
        features = built.problem.features(population.layout_x.unravel(x), fields)
        largest = max(largest, float(features.square().sum(-1).mean(-1).max()))  # a mean over the images of a sample
    assert 1 < largest <= 16


def test_an_image_by_itself_and_samples_by_themselves():
    """Normalisation sees the image alone with norm=image.

    With norm=sample it sees the other images of the same task in the same sample.
    """
    for norm, together in (("image", 1), ("sample", 3)):
        built = FewShot(**SMALL, norm=norm).build()
        population = Population(*built, dtype=torch.float64)
        x = population.layout_x.unravel(near(population)[0])
        image = population.data.batch(population.data.positions, "val").row(0)["image"]
        changed = image.clone()
        changed[1, 0, 2] = changed[1, 0, 2].flip(-1)
        moved = (built.problem.features(x, {"image": image}) != built.problem.features(x, {"image": changed})).any(-1)
        assert int(moved.sum()) == together
        assert int(moved[1, 0].sum()) == together


# ---- derivatives -----------------------------------------------------------------------------------------------------


@norms
def test_derivatives_agree_with_finite_differences_where_activations_are_smooth(norm):
    built = uneven(FewShot(**{**SMALL, "num_shots": 3}, norm=norm, activation="gelu"))
    assert built.problem.scopes == ("local", "shared")
    assert fb.check_problem(*built, show=False).ok
    report = fb.check_hypergradient(*built, estimators=["cg"], num_directions=2, step=1e-5, show=False)
    assert report.ok, str(report)


def test_the_hypergradient_is_the_mean_over_clients_and_tasks_of_what_each_task_gives_alone():
    built = uneven(FewShot(**{**SMALL, "num_shots": 3}, l2=0.05))
    population = Population(*built, dtype=torch.float64)
    x, _ = near(population)
    y = lower_solution(population, x)
    alone = []
    for row, client in zip(y, built.clients, strict=True):
        tree = population.layout_y.unravel(row)
        for t in range(2):
            support, queries = (
                torch.tensor(client[role]["image"][:, t], dtype=torch.float64) for role in ("train", "val")
            )
            theta = torch.cat([tree["head.weight"][t].reshape(-1), tree["head.bias"][t]])

            def loss(x, theta, images):
                features = built.problem.features(population.layout_x.unravel(x), {"image": images})
                scores = features.reshape(-1, 3) @ theta[:9].view(3, 3).T + theta[9:]
                return cross_entropy(scores, torch.arange(3).repeat(len(images)))

            lower = lambda x, theta, images=support, loss=loss: loss(x, theta, images) + 0.025 * theta.square().sum()
            assert float(torch.func.grad(lower, 1)(x, theta).abs().max()) < 1e-9
            fx, fy = torch.func.grad(loss, (0, 1))(x, theta, queries)
            mixed, hessian = torch.func.jacrev(torch.func.grad(lower, 1), (0, 1))(x, theta)  # (d_y, d_x), (d_y, d_y)
            alone.append(fx - mixed.T @ torch.linalg.solve(hessian, fy))
    found = hypergradient(population, x, y, method="exact")
    assert relative(found.value, torch.stack(alone).mean(0)) < 1e-8
    assert all(relative(one, found.value) > 0.1 for one in alone)  # tasks differ


@norms
def test_minibatches_are_unbiased(norm):
    """The mean of a derivative over all minibatches of one or two samples is that of all samples."""
    population = Population(*uneven(FewShot(**{**SMALL, "num_shots": 3}, norm=norm)), dtype=torch.float64)
    x, y = near(population)
    v = torch.randn(y.shape[1], generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    oracle, data = population.oracle, population.data
    for i, size in itertools.product(range(3), (1, 2)):
        one, own = data.positions[i : i + 1], y[i : i + 1]
        for role, derivative in (
            ("train", lambda batch, own=own: oracle.lower_grad(x, own, batch)),
            ("train", lambda batch, own=own: torch.cat(oracle.second_order(x, own, v[None], batch), 1)),
            ("val", lambda batch, own=own: torch.cat(oracle.upper_grads(x, own, batch), 1)),
        ):
            draws = itertools.product(range(int(data.sizes[role][i])), repeat=size)
            values = [derivative(data.batch(one, role, torch.tensor([draw]))) for draw in draws]
            assert relative(torch.stack(values).mean(0), derivative(data.batch(one, role))) < 1e-12
            if len(values) > 1:
                assert relative(values[0], values[-1]) > 1e-3


# ---- algorithms ------------------------------------------------------------------------------------------------------


def without_features(built: Built) -> Built:
    problem, features = built.problem, built.problem.features
    inside = lambda function: lambda x, y, batch: function(x, y, {**batch, "features": features(x, batch)})
    statistics = {role: inside(function) for role, function in problem.statistics.items()}
    return Built(
        dataclasses.replace(
            problem, upper=inside(problem.upper), lower=inside(problem.lower), statistics=statistics, features=None
        ),
        built.clients,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "own"), [("fedbio_local", {"num_local_steps": 2}), ("distbioacc", {})])
@pytest.mark.parametrize("batch_size", [None, 1])
def test_kept_features_and_the_way_clients_are_evaluated_change_no_result(name, own, batch_size):
    built, ends = uneven(FewShot(**{**SMALL, "num_shots": 3})), []
    algorithm = discovery.algorithm(name)(**FewShot.suggestions(name), **own)
    for one, strategy in ((built, "auto"), (without_features(built), "auto"), (built, "loop")):
        fed, state = drive(algorithm, one, 2, batch_size=batch_size, strategy=strategy)
        y = fed.collect(state.y)
        ends.append((state.x, y, fed.measure(state.x, y)))
    x, y, figures = ends[0]
    assert relative(x, fed.host.x0) > 1e-4
    assert relative(y[0], y[1]) > 0.1  # heads are local
    for other_x, other_y, other_figures in ends[1:]:
        assert relative(other_x, x) < 1e-11
        assert relative(other_y, y) < 1e-11
        assert other_figures == pytest.approx(figures, rel=1e-11)


@pytest.fixture(scope="module")
def digits_at_the_start():
    """A small problem, and its figures with the best heads for the initial backbone."""
    built = FewShot(num_tasks=4, num_filters=8, num_held_out=6).build()
    population = Population(*built)
    return built, population.measure(population.x0, lower_solution(population, population.x0, max_iterations=3))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOCAL)
def test_suggested_settings_learn_a_backbone_and_heads(name, digits_at_the_start):
    built, start = digits_at_the_start
    algorithm = discovery.algorithm(name)(**FewShot.suggestions(name))
    fed, state = drive(algorithm, built, FewShot.iterations(name) // 10, dtype=torch.float32, batch_size=1)
    end = fed.measure(state.x, fed.collect(state.y))
    assert start["query_accuracy"] < 0.6
    assert end["query_accuracy"] > 0.75
