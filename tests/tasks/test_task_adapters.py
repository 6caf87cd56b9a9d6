"""Adapters: products against dense matrices, the hypergradient against dense algebra, one frozen model."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fedbilevel as fb
from fedbilevel.errors import ProblemError
from fedbilevel.oracle.hypergradient import hypergradient, lower_solution
from fedbilevel.oracle.population import Population
from fedbilevel.problem.modules import Frozen
from fedbilevel.studies import contest
from fedbilevel.studies.rivals import run_rival
from fedbilevel.tasks import gpt
from fedbilevel.tasks.adapters import Adapters, crossed, public_chain, texts
from fedbilevel.tasks.task import Shapes

TINY = {
    "num_clients": 3,
    "num_symbols": 4,
    "num_common": 2,
    "num_own": 2,
    "rank": 2,
    "own_rank": 1,
    "width": 4,
    "context": 4,
    "num_train": 3,
    "num_val": 4,
    "num_test": 5,
    "num_pretraining": 5,
}
LAYERS = ("0.qkv", "0.mixed", "0.wide", "0.back")


def merged(task: Adapters, *adapters) -> dict[str, Tensor]:
    """All weights of the model in float64, with the products of adapters as dense matrices."""
    weights = {name: leaf.double() for name, leaf in task.frozen().items()}
    for name in LAYERS:
        for own in adapters:
            weights[f"{name}.weight"] = weights[f"{name}.weight"] + own[f"{name}.up"] @ own[f"{name}.down"]
    return weights


def moved(population: Population, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A point where no factor is zero and every client has another adapter."""
    draw = torch.Generator().manual_seed(seed)
    some = lambda like: like + 0.3 * torch.randn(like.shape, generator=draw, dtype=like.dtype)
    return some(population.x0), some(population.y0.expand(len(population), -1))


def shape_of(task: Adapters) -> gpt.Shape:
    return gpt.Shape(task.width, task.layers, task.heads, task.context)


def dense_loss(task: Adapters, x, y, text: np.ndarray) -> Tensor:
    return gpt.entropy(merged(task, x, y), torch.as_tensor(text), shape_of(task), gpt.plain_causal).mean()


def dense_lower(task: Adapters, x, y, start, text: np.ndarray) -> Tensor:
    return dense_loss(task, x, y, text) + 0.5 * task.l2 * sum(((y[name] - start[name]) ** 2).sum() for name in y)


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
def test_losses_and_gradients_are_those_of_dense_matrices(strategy):
    task = Adapters(**TINY, l2=0.4)
    built = task.build()
    population = Population(*built, dtype=torch.float64, strategy=strategy)
    x, y = moved(population)
    everyone = population.data.positions
    found = population.oracle.lower_grad(x, y, population.data.batch(everyone, "train"))
    upper = population.oracle.upper_grads(x, y, population.data.batch(everyone, "val"))
    start = {name: leaf.double() for name, leaf in built.problem.y0.items()}
    for i, client in enumerate(built.clients):
        flat = x.clone().requires_grad_(), y[i].clone().requires_grad_()
        trees = population.layout_x.unravel(flat[0]), population.layout_y.unravel(flat[1])
        lower = dense_lower(task, *trees, start, client["train"]["text"])
        torch.testing.assert_close(found[i], torch.autograd.grad(lower, flat[1])[0], rtol=1e-9, atol=1e-12)
        above = torch.autograd.grad(dense_loss(task, *trees, client["val"]["text"]), flat)
        for ours, theirs in zip(upper, above, strict=True):
            torch.testing.assert_close(ours[i], theirs, rtol=1e-9, atol=1e-12)


def test_the_hypergradient_is_that_of_dense_algebra():
    """Every client has a Hessian of its own, and other texts."""
    task = Adapters(**TINY, l2=1.0)
    built = task.build()
    population = Population(*built, dtype=torch.float64)
    x = moved(population)[0]
    y = lower_solution(population, x)
    start = {name: leaf.double() for name, leaf in built.problem.y0.items()}
    trees = lambda a, b: (population.layout_x.unravel(a), population.layout_y.unravel(b))

    def block(y: Tensor, client) -> Tensor:
        lower = lambda a, b: dense_lower(task, *trees(a, b), start, client["train"]["text"])
        upper = lambda a, b: dense_loss(task, *trees(a, b), client["val"]["text"])
        (_, cross), (_, hessian) = torch.autograd.functional.hessian(lower, (x, y))
        fx, fy = torch.autograd.functional.jacobian(upper, (x, y))
        assert float(torch.linalg.eigvalsh(hessian).min()) > 0
        assert float(torch.autograd.functional.jacobian(lambda b: lower(x, b), y).norm()) < 1e-9
        return fx - cross @ torch.linalg.solve(hessian, fy)

    blocks = [block(own, client) for own, client in zip(y, built.clients, strict=True)]
    expected = torch.stack(blocks).mean(0)
    assert float((torch.stack(blocks) - expected).norm()) > 0.1 * float(expected.norm())
    torch.testing.assert_close(hypergradient(population, x, y).value, expected, rtol=1e-7, atol=1e-10)


class Largest(TorchDispatchMode):
    """Records the number of entries of the largest tensor that an operation makes."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, Tensor):
                self.size = max(self.size, one.numel())
        return made


def test_the_frozen_model_exists_once_and_rows_hold_adapters_only():
    """The matrices of this model are larger than everything that one client adds to them."""
    task = Adapters(**{**TINY, "width": 64, "context": 2, "num_pretraining": 0})
    built = task.build()
    population = Population(*built, strategy="vmap")
    sides = {"qkv": 64 + 192, "mixed": 64 + 64, "wide": 64 + 256, "back": 256 + 64}
    assert population.y0.shape[-1] == sum(sides.values()) * task.own_rank
    assert population.x0.shape[-1] == sum(sides.values()) * task.rank
    assert all(leaf is task.frozen()[name] for name, leaf in dataclasses.replace(task, l2=7.0).frozen().items())
    held = Frozen(task.frozen()).like(population.y0, ())
    assert all(held[name].data_ptr() == leaf.data_ptr() for name, leaf in task.frozen().items())
    x, y = moved(population)
    batch = population.data.batch(population.data.positions, "train")
    with Largest() as largest:
        population.oracle.lower_grad(x, y, batch)
    assert largest.size == 256 * 64  # views of one matrix of the model, and never a matrix per client
    before = {name: leaf.clone() for name, leaf in task.frozen().items()}
    run = fb.solve(*built, "fedbio_local", num_iterations=2, residuals=False)
    assert run.ledger["floats_up"] == 2 * task.num_clients * population.x0.shape[-1]
    assert all(torch.equal(leaf, before[name]) for name, leaf in task.frozen().items())


def test_the_model_knows_the_public_text_and_its_loss_is_near_the_entropy_of_the_chain():
    task = Adapters(num_symbols=6, num_common=6, num_own=0, num_clients=2, width=16, context=8, num_test=200)
    chain, rng = public_chain(6, 0), np.random.default_rng(9)
    text = texts(chain, 400, 9, rng)
    floor = -np.log(chain[text[:, :-1], text[:, 1:]]).mean()
    loss = float(gpt.entropy(task.frozen(), torch.as_tensor(text), shape_of(task)).mean())
    assert floor < loss < floor + 0.05
    population = Population(*task.build())
    assert population.measure(population.x0, population.y0)["test_loss"] > loss + 0.2  # text of clients is another


def test_clients_share_some_successors_and_differ_in_others():
    task = Adapters(num_symbols=5, num_common=2, num_own=1, num_clients=3, num_test=3000, context=8, num_pretraining=0)
    counts = []
    for client in task.build().clients:
        text, found = client["test"]["text"], np.zeros((5, 5))
        np.add.at(found, (text[:, :-1].ravel(), text[:, 1:].ravel()), 1)
        counts.append(found / found.sum(1, keepdims=True))
    public = public_chain(5, 0)
    apart = lambda one, other: int((np.abs(one - other).max(1) > 0.1).sum())
    assert all(2 <= apart(one, public) <= 3 for one in counts)
    assert all(apart(counts[i], counts[j]) <= 2 for i in range(3) for j in range(i))
    assert any(apart(counts[0], other) for other in counts[1:])
    alike = dataclasses.replace(task, num_own=0).build().clients
    assert not np.array_equal(alike[0]["train"]["text"], alike[1]["train"]["text"])
    more = dataclasses.replace(task, num_clients=4).build().clients
    assert np.array_equal(more[2]["val"]["text"], task.build().clients[2]["val"]["text"])


def test_figures_are_those_of_plain_numpy():
    task = Adapters(**TINY)
    built = task.build()
    population = Population(*built, dtype=torch.float64)
    x, y = moved(population, 1)
    row = population.measure(x, y)
    losses, rights = [], []
    for i, client in enumerate(built.clients):
        weights = merged(task, population.layout_x.unravel(x), population.layout_y.unravel(y[i]))
        text = client["test"]["text"]
        z = gpt.scores(weights, torch.as_tensor(text[:, :-1]), shape_of(task), gpt.plain_causal).numpy()
        picked = np.take_along_axis(z, text[:, 1:, None], 2)[..., 0]
        losses.append((np.log(np.exp(z).sum(2)) - picked).mean())
        rights.append((z.argmax(2) == text[:, 1:]).mean())
    assert row["test_loss"] == pytest.approx(np.mean(losses), rel=1e-9)
    assert row["test_accuracy"] == pytest.approx(np.mean(rights), rel=1e-9)
    assert row["test_accuracy_bottom_decile"] == pytest.approx(np.quantile(rights, 0.1), rel=1e-6)


def test_rivals_have_the_same_model_and_both_ranks_together():
    task = Adapters(**TINY)
    rivals, built = task.rivals(), task.build()
    assert list(rivals) == ["shared", "own", "fine_tuned", "joint"]
    num = {name: sum(leaf.numel() for leaf in next(iter(one.ways.values())).problem.y0.values())
           for name, one in rivals.items()}  # fmt: skip
    of_x, of_y = (sum(leaf.numel() for leaf in tree.values()) for tree in (built.problem.x0, built.problem.y0))
    assert num == {"shared": of_x + of_y, "own": of_x + of_y, "fine_tuned": of_x, "joint": of_y}
    scopes = {name: next(iter(one.ways.values())).problem.scopes.lower for name, one in rivals.items()}
    assert scopes == {"shared": "global", "own": "local", "fine_tuned": "global", "joint": "local"}
    refit = rivals["own"].refit(next(iter(rivals["own"].ways)))
    assert [len(client["train"]["text"]) for client in refit.clients] == [7] * 3


def test_fine_tuning_keeps_the_shared_adapter_and_a_bilevel_run_may_start_there():
    task = Adapters(**TINY)
    rival = task.rivals()["fine_tuned"]
    found = run_rival(rival, num_rounds=2, dtype=torch.float64)
    assert found.failed is None
    assert len(found.result.y) == 3  # an adapter of every client
    first = fb.solve(*rival.refit(found.chosen)[:2], "fedavg", num_rounds=2, lr_lower=1.0, num_local_steps=5,
                     dtype=torch.float64)  # fmt: skip
    begun = rival.start(found.chosen, found.result)
    start = begun["x0"]
    for name, leaf in start.items():
        torch.testing.assert_close(leaf, found.result.x[name])
        torch.testing.assert_close(leaf.double(), first.y[name], rtol=1e-6, atol=1e-6)
    assert any(bool(leaf.any()) for name, leaf in start.items() if name.endswith("up"))
    chosen = dataclasses.replace(task, l2=float(found.chosen.split()[1])).build().problem
    at, batch = {name: leaf + 0.1 for name, leaf in chosen.y0.items()}, task.build().clients[0]["train"]
    text = {"text": torch.as_tensor(batch["text"])}
    single = {name: leaf.float() for name, leaf in start.items()}  # the type of y0
    assert torch.equal(begun["lower"](single, at, text), chosen.lower(single, at, text))
    assert len(begun["clients"]) == 6


def test_texts_of_both_halves_judge_adapters_that_have_not_seen_them():
    task = Adapters(**TINY)
    held = {"apart": {"text": np.ones((2, 5), np.int64)}}
    clients = [{**client, **held} for client in task.build().clients]
    both = crossed(clients)
    assert both[:3] == clients
    for one, other in zip(clients, both[3:], strict=True):
        assert other["train"] is one["val"]
        assert other["val"] is one["train"]
        assert other["test"] is one["test"]
        assert other["apart"]["text"].shape == (0, 5)
    x = {name: leaf + 0.1 for name, leaf in task.build().problem.x0.items()}
    ways = [task.refits(task.build().problem, given, x)["refitted"] for given in (clients, both)]
    assert [len(way.clients) for way in ways] == [3, 3]
    for one, other in zip(*(way.clients for way in ways), strict=True):
        assert np.array_equal(one["train"]["text"], other["train"]["text"])


def test_the_guarded_answer_has_both_figures_and_is_never_behind_the_plain_way_on_held_out_texts(monkeypatch):
    taken, solve = [], contest.solve

    def watched(problem, clients, algorithm, **given):
        taken.append((algorithm, len(clients), given.get("lr_upper")))
        return solve(problem, clients, algorithm, **given)

    monkeypatch.setattr(contest, "solve", watched)
    found = fb.guarded(Adapters(**TINY), num_rounds=4, num_folds=2, rivals=["fine_tuned"])
    assert set(found.contenders) == {"fine_tuned", "bilevel"}
    assert all(math.isfinite(one.figures["test_loss"]) for one in found.contenders.values())
    assert [len(one.losses) for one in found.contenders.values()] == [3 * 4] * 2  # every validation text once
    assert found.contenders[found.answer].held_loss <= found.contenders["fine_tuned"].held_loss
    assert taken == [("fedbio_local", 6, 0.1), ("fedavg", 3, None)] * 3  # shorter steps from a trained start


def test_findings_have_the_accuracy_of_every_client():
    built = Adapters(**TINY).build()
    run = fb.solve(*built, "fedbio_local", num_iterations=1)
    [found] = Adapters(**TINY).findings(*built, run)
    assert len(found["values"]["test_accuracy"]) == 3
    assert math.isfinite(sum(found["values"]["test_accuracy"]))


def test_settings_and_texts_that_do_not_fit_are_refused():
    with pytest.raises(ProblemError, match=r"width is 5, expected a multiple of heads \(2\)"):
        Adapters(width=5).build()
    with pytest.raises(ProblemError, match="9 symbols cannot have other successors, as there are 4"):
        Adapters(**{**TINY, "num_own": 9}).build()
    shapes = Shapes({role: {"text": ((7,), "int64")} for role in ("train", "val")})
    with pytest.raises(ProblemError, match="texts have 7 symbols, expected 2 to 5"):
        Adapters(**TINY).problem(shapes)
    shorter = Shapes({role: {"text": ((3,), "int64")} for role in ("train", "val")})
    assert not Adapters(**TINY).problem(shorter).statistics
