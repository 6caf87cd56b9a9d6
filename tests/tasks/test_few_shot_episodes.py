"""Resampled episodes: what is drawn, heads against dense algebra, and exact hypergradients through them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel.data import catalogue
from fedbilevel.data.sets.letters import FILE, NAMES
from fedbilevel.errors import DataError, ProblemError
from fedbilevel.oracle.hypergradient import hypergradient, lower_solution
from fedbilevel.oracle.population import Population
from fedbilevel.tasks import episodes
from fedbilevel.tasks.alphabets import digit_alphabets
from fedbilevel.tasks.episodes import Draw, Features, Network
from fedbilevel.tasks.few_shot_episodes import FewShotEpisodes
from fedbilevel.tasks.task import Sample, Shapes
from support.numeric.yardstick import relative

SMALL = {"num_episodes": 2, "num_queries": 2, "num_held_out": 3, "num_filters": 3}
F64 = {"dtype": torch.float64}


def features(num_episodes: int, num_shots: int, num_queries: int, num_ways: int, d: int, seed: int = 0) -> Features:
    draw = torch.Generator().manual_seed(seed)
    part = lambda num: torch.randn(num_episodes, num, num_ways, d, generator=draw, **F64)
    return Features(part(num_shots), part(num_queries))


# ---- what is drawn ---------------------------------------------------------------------------------------------------


def pool(num_characters: int, num_images: int) -> torch.Tensor:
    """Images of two pixels: the character, and the number of the image."""
    who, which = torch.meshgrid(torch.arange(num_characters), torch.arange(num_images), indexing="ij")
    return torch.stack([who, which], -1)


def drawn(draw: Draw, num_characters: int, seed: int, num_padding: int = 0) -> np.ndarray:
    numbers = torch.rand(num_characters, draw.numbers, generator=torch.Generator().manual_seed(seed))
    rows = num_characters + num_padding
    weight = (torch.arange(rows) < num_characters) / num_characters
    numbers = torch.cat([numbers, torch.zeros(num_padding, draw.numbers)])  # zero: the first in order if it counted
    return draw.images({"image": pool(rows, draw.num_images), "weight": weight, "draw": numbers}).numpy()


def test_an_episode_has_distinct_characters_and_distinct_images_of_each():
    draw = Draw(num_episodes=3, num_ways=4, num_each=5, num_images=6)
    seen = []
    for seed in range(200):
        images = drawn(draw, 7, seed)
        assert images.shape == (3, 5, 4, 2)
        assert np.array_equal(images, drawn(draw, 7, seed, num_padding=3))  # padding is never drawn
        for episode in images:
            who, which = episode[..., 0], episode[..., 1]
            assert (who == who[0]).all()  # column n shows one character
            assert len({*who[0]}) == 4
            assert all(len({*column}) == 5 for column in which.T)
        seen.append(images)
    every = np.stack(seen)
    share = np.bincount(every[..., 0].ravel(), minlength=7) / every[..., 0].size
    assert share == pytest.approx(np.full(7, 1 / 7), abs=0.03)
    first = np.bincount(every[:, :, 0, :, 1].ravel(), minlength=6) / every[:, :, 0, :, 1].size  # who is the support
    assert first == pytest.approx(np.full(6, 1 / 6), abs=0.03)
    together = len({tuple(sorted(one)) for one in every[:, :, 0, :, 0].reshape(-1, 4).tolist()})
    assert together == 35  # all subsets of four of seven


def test_measurements_use_the_same_episodes_every_time_and_few_characters_are_repeated():
    draw = Draw(num_episodes=2, num_ways=5, num_each=3, num_images=6)
    fields = lambda num: {"image": pool(num, 6), "weight": torch.full((num,), 1 / num)}
    assert torch.equal(draw.images(fields(9)), draw.images(fields(9)))
    assert len(draw.images(fields(9))[0, 0, :, 0].unique()) == 5
    assert draw.images(fields(3))[0, 0, :, 0].unique().tolist() == [0, 1, 2]  # as in the check before a run


def test_split_by_characters_holds_out_characters_of_all_alphabets():
    rng = np.random.default_rng(3)
    alphabets = digit_alphabets(rng)
    own, validation, test = alphabets.deal_characters(3, 3, rng)
    base = lambda members: {*(np.asarray(members) // 4).tolist()}
    assert (len(base(validation)), len(base(test))) == (1, 3)
    assert sorted(c for part in (*own, validation, test) for c in part.tolist()) == list(range(40))
    mine = set.union(*map(base, own))
    assert not mine & base(validation) | mine & base(test) | base(validation) & base(test)
    homes = [{a for a, pair in enumerate(alphabets.members) if {*pair.tolist()} & {*part.tolist()}} for part in own]
    assert not homes[0] & homes[1] | homes[0] & homes[2] | homes[1] & homes[2]  # an alphabet has one client
    with pytest.raises(ProblemError, match=r"^21 clients need an alphabet each, digits has 20: use fewer clients\.$"):
        alphabets.deal_characters(21, 3, rng)


def capitals(folder) -> str:
    """Six images of every letter; an image shows the number of its letter, and its own in one pixel."""
    place = folder / FILE
    place.parent.mkdir(parents=True)
    label = np.repeat(np.arange(26), 6)
    images = np.broadcast_to((8 * label)[:, None, None], (156, 28, 28)).astype(np.uint8)
    images[np.arange(156), 0, np.arange(156) % 6] = 255
    np.savez(place, images=images, label=label.astype(np.uint8))
    return str(folder)


def test_held_out_letters_are_those_of_no_client(tmp_path):
    task = FewShotEpisodes(**SMALL, data="letters", data_dir=capitals(tmp_path), num_ways=5)
    clients = task.build().clients
    members = lambda role: {int(c) for client in clients for c in np.ravel(client[role]["character"])}
    letters = lambda role: {c // 4 for c in members(role)}
    own = [{int(c) // 4 for c in client["val"]["character"]} for client in clients]
    assert [len(some) for some in own] == [3] * 5
    assert len(set.union(*own)) == 15
    assert letters("train") <= letters("val")
    assert not letters("val") & letters("held_out") | letters("val") & letters("test")
    assert not letters("held_out") & letters("test")
    assert len(letters("held_out")) <= 5
    assert len(letters("test")) <= 6
    every = set.union(*map(members, ("val", "held_out", "test")))
    assert {c % 4 for c in every} == {0, 1, 2, 3}
    assert {c % 4 for c in every if NAMES[c // 4] in "HINOSXZ"} == {0, 1}  # other turns look the same
    for client in clients:
        for role in ("val", "held_out", "test"):
            shown = client[role]["image"][..., 14 * 29]  # the centre, where turning changes nothing
            character = client[role]["character"][:, None]
            assert (shown == character // 4 * 8).all()
            assert client[role]["image"].shape[-1] == 784
    assert {*task.rivals()} == {"prototypes", "anil", "classifier"}


def test_missing_letters_are_named(alone):
    with pytest.raises(DataError, match="az_letters_2990"):
        FewShotEpisodes(data="letters").build()


def test_letters_as_published_make_five_clients():
    try:
        catalogue.where("letters")
    except DataError as missing:
        pytest.skip(str(missing))
    built = FewShotEpisodes(data="letters", num_ways=5, num_filters=4, num_episodes=1, num_held_out=2).build()
    assert len(built.clients) == 5
    assert fb.check_problem(*built, show=False).ok
    assert min(len(client["val"]["image"]) for client in built.clients) >= 6
    assert built.clients[0]["val"]["image"].shape[1:] == (40, 784)


# ---- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_shots", [1, 3])
def test_the_ridge_head_solves_the_normal_equations(num_shots):
    z = features(2, num_shots, 3, num_ways=4, d=7)
    scores = episodes.ridge(z, torch.tensor(0.3, **F64)).numpy()
    for e in range(2):
        rows = z.support[e].reshape(-1, 7).numpy()
        truth = np.tile(np.eye(4), (num_shots, 1))
        head = np.linalg.solve(rows.T @ rows + 0.3 * np.eye(7), rows.T @ truth)
        np.testing.assert_allclose(scores[e], z.query[e].numpy() @ head, atol=1e-12)


def test_prototypes_are_squared_distances_from_means():
    z = features(2, 3, 2, num_ways=4, d=5)
    scores = episodes.prototypes(z)
    for e, q, n, c in np.ndindex(2, 2, 4, 4):
        mean = z.support[e, :, c].mean(0)
        assert float(scores[e, q, n, c]) == pytest.approx(-float(((z.query[e, q, n] - mean) ** 2).sum()), abs=1e-12)


def test_an_adapted_head_takes_plain_gradient_steps_and_is_differentiated_through_them():
    z, step = features(2, 2, 3, num_ways=3, d=4), torch.tensor(0.7, **F64)
    start = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), **F64)
    bias = torch.tensor([0.1, -0.2, 0.3], **F64)
    scores = episodes.adapted(z, start, bias, step, 2)
    for e in range(2):
        w, b = start.clone().requires_grad_(), bias.clone().requires_grad_()
        rows, label = z.support[e].reshape(-1, 4), torch.arange(3).repeat(2)
        for _ in range(2):
            loss = torch.nn.functional.cross_entropy(rows @ w.T + b, label)
            by_w, by_b = torch.autograd.grad(loss, (w, b))
            w, b = (w - step * by_w).detach().requires_grad_(), (b - step * by_b).detach().requires_grad_()
        torch.testing.assert_close(scores[e], (z.query[e] @ w.T + b).detach(), atol=1e-12, rtol=0)
    value = lambda start: episodes.loss(episodes.adapted(z, start, bias, step, 2)).mean()
    assert torch.autograd.gradcheck(value, start.clone().requires_grad_())


def test_the_gradient_through_the_head_is_the_hypergradient_of_heads_as_lower_level():
    """The same episodes twice: heads in closed form inside the loss, and as y of a bilevel problem."""
    network, num_shots, factor = Network(8, 2, 3), 2, 5.0
    draw = torch.Generator().manual_seed(2)
    image = torch.randint(0, 256, (2, 5, 3, 64), generator=draw, dtype=torch.uint8)  # two episodes of three characters
    x0 = {name: leaf.double() for name, leaf in network.initial(0).items()} | {"penalty": torch.tensor(-1.0, **F64)}
    x0["conv2.shift"] = torch.randn(3, generator=draw, **F64)

    def inside(x):
        z = Features.of(network, x, image, num_shots)
        return episodes.loss(factor * episodes.ridge(z, x["penalty"].exp())).mean()

    def lower(x, y, batch):
        z = network.features(x, batch["image"]).flatten(1, 2)  # (e, shots * ways, d)
        head = y["head"][batch["index"]]
        wrong = (z @ head.mT - torch.eye(3, **F64).repeat(num_shots, 1)).square().sum((1, 2))
        return len(image) * (wrong + x["penalty"].exp() * head.square().sum((1, 2)))

    def upper(x, y, batch):
        z = network.features(x, batch["image"])
        return episodes.loss(factor * z @ y["head"][batch["index"]].mT[:, None])

    d = network.width
    problem = fb.Problem(upper=upper, lower=lower, x0=x0, y0={"head": torch.zeros(2, 3, d, **F64)})
    client = {"train": {"image": image[:, :num_shots]}, "val": {"image": image[:, num_shots:]}}
    population = Population(problem, [client], **F64)
    x = population.x0
    implicit = hypergradient(population, x, lower_solution(population, x))
    flat = lambda x: inside(population.layout_x.unravel(x))
    exact = torch.func.grad(flat)(x)
    assert relative(exact, getattr(implicit, "value", implicit)) < 1e-6
    along = torch.randn(len(x), generator=draw, **F64)
    differences = (flat(x + 1e-6 * along) - flat(x - 1e-6 * along)) / 2e-6
    assert float(exact @ along) == pytest.approx(float(differences), rel=1e-5)


def test_losses_of_the_task_match_a_transcription_in_numpy():
    task = FewShotEpisodes(**SMALL, num_shots=2)
    built = task.build()
    population = Population(*built, **F64)
    x = {name: leaf.numpy() for name, leaf in population.layout_x.unravel(population.x0).items()}
    draw = Draw(2, 3, 4, 40)
    losses, right = [], 0
    for client in built.clients:
        fields = {"image": torch.tensor(client["val"]["image"]), "weight": torch.full((6,), 1 / 6, **F64)}
        for episode in draw.images(fields).numpy():
            scores = transcribed(x, episode, num_shots=2)
            logits = 8 * scores
            entropy = np.log(np.exp(logits).sum(-1)) - np.einsum("qnn->qn", logits)
            losses.append(entropy.mean())
        for episode in client["test"]["image"]:
            right += int((transcribed(x, episode, num_shots=2).argmax(-1) == np.arange(3)).sum())
    figures = population.measure(population.x0, population.y0)
    assert figures["upper_loss"] == pytest.approx(np.mean(losses), rel=1e-9)
    assert figures["test_accuracy"] == right / (4 * 3 * 2 * 3)


def transcribed(x: dict[str, np.ndarray], episode: np.ndarray, num_shots: int) -> np.ndarray:
    """Scores (queries, ways, ways) of one episode (images, ways, 64)."""
    z = episode.reshape(-1, 1, 8, 8) / 255
    for i in (1, 2):
        padded = np.pad(z, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
        z = np.einsum("nchwij,kcij->nkhw", windows, x[f"conv{i}.weight"])
        z = (z - z.mean((2, 3), keepdims=True)) / np.sqrt(z.var((2, 3), keepdims=True) + 1e-5)  # 3 filters: 3 groups
        z = np.maximum(z * x[f"conv{i}.scale"][:, None, None] + x[f"conv{i}.shift"][:, None, None], 0)
        z = z.reshape(*z.shape[:2], z.shape[2] // 2, 2, z.shape[3] // 2, 2).max((3, 5))
    z = z.reshape(*episode.shape[:2], -1) / np.sqrt(12)
    rows, truth = z[:num_shots].reshape(-1, 12), np.tile(np.eye(3), (num_shots, 1))
    return z[num_shots:] @ np.linalg.solve(rows.T @ rows + np.exp(x["penalty"]) * np.eye(12), rows.T @ truth)


# ---- runs ------------------------------------------------------------------------------------------------------------


def run(built, num_iterations: int, **more):
    steps = FewShotEpisodes.suggestions("adasimfbo")
    return fb.solve(*built, "adasimfbo", num_iterations=num_iterations, **F64, **steps, **more)


def test_a_run_is_the_same_for_every_strategy_and_resumes_bit_for_bit(tmp_path):
    built = FewShotEpisodes(**SMALL).build()
    whole, other = (run(built, 4, strategy=strategy) for strategy in ("vmap", "loop"))
    for name in whole.x:
        assert torch.allclose(whole.x[name], other.x[name], rtol=1e-7, atol=1e-9)
    run(built, 2, strategy="vmap", record=tmp_path / "r")
    resumed = run(built, 4, strategy="vmap", record=tmp_path / "r", resume=True)
    assert all(torch.equal(whole.x[name], resumed.x[name]) for name in whole.x)


def test_features_learned_on_some_characters_answer_for_others():
    result = run(FewShotEpisodes(num_held_out=40, num_filters=8).build(), 60, measure_every=60)
    first, last = result.rows[0]["test_accuracy"], result.rows[-1]["test_accuracy"]
    assert last > first + 0.02  # 0.86 and 0.90 with the default network


def test_rivals_measure_the_same_figures_on_the_same_test_episodes():
    task = FewShotEpisodes(**SMALL)
    clients = task.build().clients
    rivals = task.rivals()
    assert {*rivals} == {"prototypes", "anil", "classifier"}
    for rival in rivals.values():
        for way in rival.ways.values():
            assert all(
                np.array_equal(one["test"]["image"], own["test"]["image"])
                for one, own in zip(way.clients, clients, strict=True)
            )
            assert np.array_equal(way.clients[0]["val"]["image"], clients[0]["held_out"]["image"])
            result = fb.solve(
                way.problem, way.clients, way.algorithm, num_iterations=2, measure_every=2, **F64, **way.settings
            )
            assert {*task.headline} <= {*result.rows[-1]}
            start, end = result.rows[0], result.rows[-1]
            assert start["lower_loss"] != end["lower_loss"]
            assert all(torch.equal(result.x[name], leaf.double()) for name, leaf in way.problem.x0.items())


def test_a_bilevel_run_begins_at_protonet_with_episodes_of_as_many_characters():
    task = FewShotEpisodes(**SMALL)
    (own, clients), rival = task.build(), task.rivals()["prototypes"]
    assert len(rival.ways) == 2

    def losses(problem) -> list[float]:
        population = Population(problem, clients, dtype=torch.float64)
        found = population.measure(population.x0, population.y0)
        return [found["upper_loss"], found["lower_loss"]]

    for label, way in rival.ways.items():
        start = rival.start(label, SimpleNamespace(y={name: leaf + 0.1 for name, leaf in way.problem.y0.items()}))
        assert set(start["x0"]) == set(own.x0)
        for name in way.problem.y0:
            torch.testing.assert_close(start["x0"][name], own.x0[name] + 0.1)
        like = dataclasses.replace(task, training_ways=int(label.split()[0])).problem(Shapes.of(clients[0]))
        found = losses(dataclasses.replace(own, **start))
        assert found == pytest.approx(losses(dataclasses.replace(like, x0=start["x0"])))
        same = found == pytest.approx(losses(dataclasses.replace(own, x0=start["x0"])))
        assert same == (label == "3 characters")


def test_the_classifier_reads_one_image_of_each_real_character():
    task = FewShotEpisodes(**SMALL)
    way = task.rivals()["classifier"].ways["FedAdam"]
    label = np.concatenate([client["train"]["label"] for client in way.clients])
    assert sorted(label.tolist()) == list(range(24))  # all characters of all clients
    fields = {name: torch.tensor(value) for name, value in way.clients[1]["train"].items()}
    num = len(fields["label"])
    draw = torch.rand(num, 2, generator=torch.Generator().manual_seed(0), **F64)
    y = {name: leaf.double() for name, leaf in way.problem.y0.items()}
    value = way.problem.lower(way.problem.x0, y, {**fields, "weight": torch.full((num,), 1 / num, **F64), "draw": draw})
    network = Network(8, 2, 3)
    total = 0.0
    for c in range(num):
        image = fields["image"][c, int(draw[c, 1] * 40)]
        z = network.features(y, image[None])[0] * network.width**0.5
        total += float(
            torch.nn.functional.cross_entropy((y["head.weight"] @ z + y["head.bias"])[None], fields["label"][c : c + 1])
        )
    assert float(value) == pytest.approx(total / num, rel=1e-12)


# ---- errors ----------------------------------------------------------------------------------------------------------


def shapes(images: int = 10, pixels: int = 64, held: tuple[int, ...] = (6, 3, 64)) -> Shapes:
    pool = {"image": Sample((images, pixels), "uint8")}
    return Shapes({"train": pool, "val": pool, "test": {"image": Sample(held, "uint8")}})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"images": 4}, r"^an episode needs 1 \+ 5 images of a character, train/image has only 4: use fewer shots or"),
        ({"pixels": 100}, r"^images have 100 pixels, expected 64 or 784 \(8 x 8 or 28 x 28\)\.$"),
        (
            {"held": (6, 4, 64)},
            r"^samples of test/image have the shape \(6, 4, 64\), expected more than num_shots ",
        ),
        (
            {"held": (1, 3, 64)},
            r"^samples of test/image have the shape \(1, 3, 64\), expected more than num_shots ",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(given, sentence):
    with pytest.raises(ProblemError, match=sentence):
        FewShotEpisodes().problem(shapes(**given))


def test_training_with_more_characters_than_a_client_has_is_refused():
    with pytest.raises(ProblemError, match=r"^a task has 7 characters, client 0 has only 6"):
        FewShotEpisodes(training_ways=7).build()
