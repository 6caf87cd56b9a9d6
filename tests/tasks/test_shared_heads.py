"""Heads that clients share: losses in plain numpy, the hypergradient, and weights that find clusters."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy import stats

import fedbilevel as fb
from fedbilevel.studies.rivals import run_rival
from fedbilevel.tasks.personalisation import Personalisation
from fedbilevel.tasks.shared_heads import affinity, refits, shared_heads, weighted

TASK = Personalisation(
    personalise="head", shift="labels", num_clients=6, share=0.3, num_clusters=2, val_share=0.3, width=0.1
)


def begun(rng):
    """Return the shared problem, random hidden layers and heads, and the bilevel problem that begins there."""
    built, rivals = TASK.build(), TASK.rivals()
    shared = next(iter(rivals["fedavg"].ways.values())).problem
    drawn = lambda tree: {name: torch.as_tensor(rng.normal(size=leaf.shape)) for name, leaf in tree.items()}
    body, heads = drawn(built.problem.x0), [drawn(built.problem.y0) for _ in built.clients]
    fields = shared_heads(shared, built.clients, body, heads)
    clients, _ = fields.pop("clients"), fields.pop("refits")
    return shared, body, heads, dataclasses.replace(built.problem, **fields), clients


def _gelu(z):
    return z * stats.norm.cdf(z)


def entropies(body, head, images, labels):
    hidden = _gelu(images @ body["hidden.weight"].T + body["hidden.bias"])
    z = hidden @ head["out.weight"].T + head["out.bias"]
    return np.log(np.exp(z - z.max(1, keepdims=True)).sum(1)) + z.max(1) - z[np.arange(len(z)), labels]


def test_losses_are_those_of_the_weighted_head():
    rng = np.random.default_rng(0)
    _, body, heads, problem, clients = begun(rng)
    assert (problem.scopes.upper, problem.scopes.lower) == ("private", "global")
    plain = {name: leaf.numpy() for name, leaf in body.items()}
    for i, (client, raw) in enumerate(zip(clients, TASK.build().clients, strict=True)):
        images, labels = raw["train"]["image"].astype(float), raw["train"]["label"]
        losses = np.array(
            [entropies(plain, {n: v.numpy() for n, v in head.items()}, images, labels).mean() for head in heads]
        )
        losses = np.minimum(losses, 6.0)
        losses[i] = min(losses[k] for k in range(len(heads)) if k != i)  # fitted to these samples
        expected = 0.5 * (losses.min() - losses)
        np.testing.assert_allclose(
            client["train"]["affinity"], np.tile(expected, (len(labels), 1)), rtol=1e-4, atol=1e-5
        )
        x = {"weights": torch.as_tensor(rng.normal(size=len(heads)))}
        y = {name: torch.as_tensor(rng.normal(size=leaf.shape)) for name, leaf in problem.y0.items()}
        logs = x["weights"].numpy() + client["train"]["affinity"][0].astype(float)
        weights = np.exp(logs) / np.exp(logs).sum()
        head = {name: np.tensordot(weights, y[name].numpy(), 1) for name in heads[0]}
        own = {name: y[name].numpy() for name in body}
        batch = {name: torch.as_tensor(value) for name, value in client["train"].items()}
        batch |= {name: batch[name].double() for name in ("image", "affinity")}
        entropy = entropies(own, head, images, labels)
        used = sum(float((leaf**2).sum()) for leaf in (*head.values(), *own.values()))
        every = sum(float((leaf**2).sum()) for leaf in y.values())
        moved = 0.5 * 5e-4 * float((x["weights"] ** 2).sum())
        np.testing.assert_allclose(problem.upper(x, y, batch), entropy + moved, rtol=1e-8)
        np.testing.assert_allclose(
            problem.lower(x, y, batch), entropy + 0.5 * TASK.l2 * used + 0.5 * 1e-3 * every, rtol=1e-8
        )
        right = problem.statistics["test"](x, y, batch)["test_right"].double().mean()
        assert right == pytest.approx((_answers(own, head, images) == labels).mean())


def _answers(body, head, images):
    hidden = _gelu(images @ body["hidden.weight"].T + body["hidden.bias"])
    return (hidden @ head["out.weight"].T + head["out.bias"]).argmax(1)


def test_weights_start_at_heads_with_small_losses_and_favour_no_own_head():
    shared, body, heads, _, _ = begun(np.random.default_rng(1))
    client = TASK.build().clients[0]
    zero, wild = (
        {n: scale * v for n, v in heads[2].items()} for scale in (0.0, 1e3)
    )  # losses of log 10, and of far more than six
    assert affinity(shared, client, body, [wild, zero, wild], own=0).tolist() == pytest.approx(
        [0.0, 0.0, 0.5 * (np.log(10) - 6.0)], abs=1e-6
    )
    assert affinity(shared, client, body, [wild, zero, wild], own=1).tolist() == [0.0, 0.0, 0.0]
    assert affinity(shared, client, body, [zero], own=0).tolist() == [0.0]


def test_refits_keep_the_learned_weights_and_train_on_validation_samples_too():
    rng = np.random.default_rng(2)
    _, _, heads, problem, clients = begun(rng)
    x = [{"weights": torch.as_tensor(rng.normal(size=len(heads)), dtype=torch.float32)} for _ in clients]
    way = refits(problem, clients, x)["refitted"]
    for own, before, after in zip(x, clients, way.clients, strict=True):
        assert len(after["train"]["label"]) == len(before["train"]["label"]) + len(before["val"]["label"])
        logs = own["weights"].numpy() + before["train"]["affinity"][0]
        expected = np.exp(logs) / np.exp(logs).sum()
        for role in ("train", "val", "test"):
            np.testing.assert_allclose(np.exp(after[role]["affinity"][0]), expected, rtol=1e-5)
    assert problem.x0["weights"].tolist() == [0] * len(heads)


def test_weights_find_the_clients_with_the_same_labels():
    """From equal weights of all heads, the hypergradient moves weight to heads of the client's own cluster."""
    task = dataclasses.replace(TASK, share=1.0, width=0.5)
    rival, label = task.rivals()["own_head"], "lr_lower 1.0, l2 +0"
    found = run_rival(rival._replace(ways={label: rival.ways[label]}), always=True, num_rounds=40)
    assert found.unseen is not None
    fields = rival.start(label, found.unseen)
    clients, _ = fields.pop("clients"), fields.pop("refits")
    start = np.stack([client["train"]["affinity"][0] for client in clients])
    assert _same(start) > 0.65  # losses of training samples know the clusters
    clients = [weighted(client, np.zeros(len(clients))) for client in clients]
    problem = dataclasses.replace(task.build().problem, **fields)
    result = fb.solve(problem, clients, "self_tuned", num_rounds=60, residuals=False, measure_every=60)
    assert _same(np.zeros_like(start)) == pytest.approx(0.5)
    assert _same(np.stack([own["weights"].numpy() for own in result.x])) > 0.6


def _same(logs):
    """Return the weight of heads of a client's own cluster."""
    weights = np.exp(logs - logs.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    return np.mean([weights[i, i % 2 :: 2].sum() for i in range(len(weights))])
