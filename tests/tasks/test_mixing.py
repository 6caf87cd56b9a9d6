"""Mixing: losses and figures against plain numpy, sources and targets, and the gain from learning weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel.data import catalogue
from fedbilevel.data.sets import python_texts
from fedbilevel.errors import DataError, ProblemError
from fedbilevel.oracle.population import Population
from fedbilevel.tasks.mixing import Mixing

SMALL = {"num_clients": 3, "num_good": 2, "num_bad": 2, "num_train": 6, "num_val": 5, "num_test": 7, "num_hidden": 4}
PLAY = "\n\n".join(
    f"{role}:\n" + "\n".join(f"{role} says {word} again and again" for word in words)
    for role, words in {
        "ANNA": ("alpha", "beta", "gamma", "delta", "epsilon", "zeta"),
        "BERT": ("one", "two", "three", "four", "five"),
        "CLEO": ("red", "green", "blue", "black"),
        "DORA": ("north", "south", "east"),
        "EMIL": ("on monday", "on tuesday"),
        "FAYE": ("upward", "downward"),
        "GUS": ("left", "right"),
    }.items()
)


def near(population: Population) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return tuple(
        start + 0.5 * torch.randn(start.shape, generator=draw, dtype=torch.float64)
        for start in (population.x0, population.y0)
    )


def entropies(y: dict[str, np.ndarray], fields) -> np.ndarray:
    z = y["embedding"][fields["context"]].reshape(len(fields["label"]), -1) @ y["hidden.weight"].T + y["hidden.bias"]
    z = 0.5 * z * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))
    z = z @ y["out.weight"].T + y["out.bias"]
    return np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), fields["label"]]


def test_losses_and_figures_are_those_of_plain_numpy():
    built = Mixing(**SMALL, l2=0.3, kl=0.2).build()
    population = Population(*built, dtype=torch.float64)
    x, y = near(population)
    logits = population.layout_x.unravel(x)["logit"].numpy()
    weights = np.exp(logits) / np.exp(logits).sum()
    network = {name: leaf.numpy() for name, leaf in population.layout_y.unravel(y).items()}
    losses = {role: [entropies(network, client[role]) for client in built.clients] for role in ("train", "val", "test")}
    lower = [
        sum(weight * own[client["train"]["source"] == source].mean() for source, weight in enumerate(weights))
        for own, client in zip(losses["train"], built.clients, strict=True)
    ]
    figures = population.measure(x, y)
    norm = sum((leaf**2).sum() for leaf in network.values())
    assert figures["lower_loss"] == pytest.approx(np.mean(lower) + 0.15 * norm, rel=1e-9)
    divergence = (weights * np.log(4 * weights)).sum()
    assert figures["upper_loss"] == pytest.approx(np.mean(losses["val"]) + 0.2 * divergence, rel=1e-9)
    assert figures["test_loss"] == pytest.approx(np.mean(losses["test"]), rel=1e-9)
    assert figures["good_weight"] == pytest.approx(weights[:2].sum(), rel=1e-9)


def test_at_the_start_all_sources_count_the_same_and_nothing_diverges_from_uniform():
    built = Mixing(**SMALL, kl=5.0).build()
    population = Population(*built, dtype=torch.float64)
    assert built.problem.scopes == ("global", "shared")
    assert torch.equal(population.x0, torch.zeros(4, dtype=torch.float64))
    figures = population.measure(population.x0, population.y0)
    assert figures["good_weight"] == pytest.approx(0.5)
    network = {name: leaf.numpy() for name, leaf in population.layout_y.unravel(population.y0).items()}
    assert figures["upper_loss"] == pytest.approx(
        np.mean([entropies(network, client["val"]) for client in built.clients]), rel=1e-9
    )


def test_every_client_has_equally_many_samples_of_each_source():
    built = Mixing(**SMALL).build()
    for client in built.clients:
        assert np.bincount(client["train"]["source"]).tolist() == [6] * 4
        assert [len(client[role]["label"]) for role in ("train", "val", "test")] == [24, 5, 7]
        assert client["train"]["context"].shape == (24, 3)


def test_only_good_chains_follow_the_target():
    """Count transitions of each source, and compare with those of the target."""
    task = Mixing(num_clients=1, num_train=3000, num_val=3000, num_test=1)
    client = task.build().clients[0]

    def transitions(fields, mine) -> np.ndarray:
        counts = np.full((12, 12), 1e-9)
        np.add.at(counts, (fields["context"][mine, -1], fields["label"][mine]), 1)
        return counts / counts.sum()

    target = transitions(client["val"], slice(None))
    far = [
        np.abs(transitions(client["train"], client["train"]["source"] == source) - target).sum() for source in range(8)
    ]
    assert max(far[:3]) < 0.3 < 0.7 < min(far[3:])


def test_data_depend_on_the_seed_alone():
    one, same, other = (Mixing(**SMALL, data_seed=seed).build().clients[1]["train"]["context"] for seed in (3, 3, 4))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_learning_weights_finds_the_good_sources_and_beats_uniform_weights():
    task = Mixing(num_train=20, num_hidden=16)
    built = task.build()
    learned = fb.solve(*built, "fedbio", num_rounds=150, residuals=False, **task.suggestions("fedbio")).rows[-1]
    plain = fb.solve(*built, "fedavg", num_rounds=150, residuals=False, lr_lower=0.5, num_local_steps=1).rows[-1]
    assert plain["good_weight"] == pytest.approx(3 / 8)
    assert learned["good_weight"] > 0.6
    assert learned["test_loss"] < plain["test_loss"]


def test_findings_rank_sources_by_weight():
    task = Mixing(**SMALL)
    built = task.build()
    result = fb.solve(*built, "fedbio", num_iterations=3, residuals=False, **task.suggestions("fedbio"))
    table, served = task.findings(*built, result)
    assert table["columns"] == ["source", "kind", "weight"]
    weights = [row[2] for row in table["rows"]]
    assert weights == sorted(weights, reverse=True)
    assert sum(weights) == pytest.approx(1)
    assert {row[0]: row[1] for row in table["rows"]} == {0: "good", 1: "good", 2: "bad", 3: "bad"}
    assert len(served["values"]["test_loss"]) == 3


# ---- plays -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def plays(tmp_path):
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "tinyshakespeare.txt").write_text(PLAY)
    return str(tmp_path)


def test_sources_are_the_longest_roles_and_the_target_is_the_text_of_all_others(plays):
    task = Mixing(**{**SMALL, "num_bad": 4, "num_clients": 1, "context": 5}, data="shakespeare", data_dir=plays)
    texts = task._plays(np.random.default_rng(0))
    spoken = {role.split(":")[0]: role.split(":\n")[1] + "\n" for role in PLAY.split("\n\n")}
    assert list(texts.sources[:2]) == [spoken["ANNA"], spoken["BERT"]]
    assert texts.target == spoken["GUS"]
    shuffled, backwards, noisy, repeated = texts.sources[2:]
    assert sorted(shuffled) == sorted(spoken["CLEO"])
    assert shuffled != spoken["CLEO"]
    assert backwards == spoken["DORA"][::-1]
    changed = np.mean([a != b for a, b in zip(noisy, spoken["EMIL"], strict=True)])
    assert 0.2 < changed < 0.7
    line = spoken["FAYE"].split("\n")[0] + "\n"
    assert repeated == (3 * line)[: len(spoken["FAYE"])]
    client = task.build().clients[0]
    assert client["train"]["context"].max() < len(texts.characters)


def test_a_text_with_too_few_samples_is_refused(plays):
    with pytest.raises(ProblemError, match=r"a text has \d+ samples, but 1500 are needed for 3 clients: use fewer"):
        Mixing(**{**SMALL, "num_train": 500}, data="shakespeare", data_dir=plays).build()


def test_missing_plays_are_named(alone):
    with pytest.raises(DataError, match="tinyshakespeare"):
        Mixing(data="shakespeare").build()


def test_shakespeare_as_published():
    try:
        catalogue.where("shakespeare")
    except DataError as missing:
        pytest.skip(str(missing))
    built = Mixing(data="shakespeare").build()
    assert fb.check_problem(*built, show=False).ok
    assert built.problem.y0["out.bias"].shape == (65,)


# ---- texts of Python -------------------------------------------------------------------------------------------------


def test_good_sources_and_target_share_the_topics_and_bad_sources_are_modules():
    task = Mixing(**SMALL, data="python")
    texts = task._manual(np.random.default_rng(0))
    topics = python_texts.topics().values()
    parts = [*texts.sources[:2], texts.target]
    assert all(sum(topic in part for part in parts) >= 1 for topic in topics)
    assert sum(map(len, parts)) == sum(map(len, topics))  # so every topic is in one part alone
    code = {python_texts.module(name) for name in python_texts.MODULES}
    assert set(texts.sources[2:]) <= code
    assert len(set(texts.sources[2:])) == 2
    assert texts.sources[0] != task._manual(np.random.default_rng(1)).sources[0]
    built = task.build()
    assert fb.check_problem(*built, show=False).ok
    assert built.problem.y0["out.bias"].shape == (len(python_texts.CHARACTERS),)


def test_more_bad_sources_than_modules_are_refused():
    num = len(python_texts.MODULES) + 1
    with pytest.raises(ProblemError, match=f"there are {num - 1} modules for {num} bad sources: use fewer"):
        Mixing(**{**SMALL, "num_bad": num}, data="python").build()
