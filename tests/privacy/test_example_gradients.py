"""Clipping per sample against a plain loop over clients and samples, in float64."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from fedbilevel.errors import NonFiniteError, SettingError
from fedbilevel.oracle import derivatives
from fedbilevel.oracle.population import Population
from fedbilevel.privacy import per_example_clipped_sum
from fedbilevel.problem.problem import Problem

BUILDS = {
    "lower_grad": (derivatives.lower_grad, 2),
    "upper_grads": (derivatives.upper_grads, 2),
    "pull_both": (derivatives.pull_both, 3),
}


def loss(x, y, batch, kind):
    """Weights of samples by an index-free x, and a regulariser; a vector, or a weighted sum."""
    fit = cross_entropy(torch.tanh(batch["a"] @ x["w"]) @ y["v"], batch["label"], reduction="none")
    decay = 0.05 * (y["v"] ** 2).sum() + 0.01 * (x["w"] ** 2).sum()
    return fit + decay if kind == "vector" else (batch["weight"] * fit).sum() + decay


def population(kind):
    rng = np.random.default_rng(0)
    clients = [
        {
            role: {"a": (1 + 2 * i) * rng.standard_normal((n, 4)), "label": rng.integers(0, 3, n)}
            for role, n in (("train", 5 + 3 * i), ("val", 3 + i))
        }
        for i in range(3)
    ]
    x0 = {"w": torch.as_tensor(rng.standard_normal((4, 5)))}
    y0 = {"v": torch.as_tensor(rng.standard_normal((5, 3)))}
    one = lambda x, y, batch: loss(x, y, batch, kind)
    return Population(Problem(upper=one, lower=one, x0=x0, y0=y0), clients, dtype=torch.float64), clients


def looped(clients, vectors, role, name, clip):
    """Derivatives of one sample after the other, by torch.autograd."""
    totals = []
    for i, client in enumerate(clients):
        x, y, *v = (one if one.ndim == 1 else one[i] for one in vectors)
        total = None
        for a, label in zip(client[role]["a"], client[role]["label"], strict=True):
            x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
            sample = {"a": torch.as_tensor(a)[None], "label": torch.as_tensor(label)[None], "weight": torch.ones(1)}
            value = loss({"w": x.view(4, 5)}, {"v": y.view(5, 3)}, sample, "sum")
            if name == "pull_both":
                (gradient,) = torch.autograd.grad(value, y, create_graph=True)
                parts = torch.autograd.grad(gradient @ v[0], (x, y))
            else:
                parts = torch.autograd.grad(value, (x, y) if name == "upper_grads" else (y,))
            cut = [part * min(1.0, clip / float(torch.linalg.vector_norm(part))) for part in parts]
            total = cut if total is None else [old + new for old, new in zip(total, cut, strict=True)]
        totals.append(total)
    return [torch.stack(some) for some in zip(*totals, strict=True)]


@pytest.mark.parametrize("kind", ["vector", "sum"])
@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize("shared", [True, False])
def test_the_sum_is_that_of_a_plain_loop(kind, name, chunk, shared):
    hosts, clients = population(kind)
    build, num = BUILDS[name]
    generator = torch.Generator().manual_seed(1)
    shape = lambda size: (size,) if shared else (3, size)
    vectors = [torch.randn(shape(size), dtype=torch.float64, generator=generator) for size in (20, 15, 15)[:num]]
    role = "val" if name == "upper_grads" else "train"
    batch = hosts.data.batch(torch.arange(3), role)
    norms = []
    for clip in (0.7, 1e9):
        found = per_example_clipped_sum(hosts.oracle, build, vectors, batch, clip, chunk=chunk)
        found = found if isinstance(found, tuple) else (found,)
        for one, other in zip(found, looped(clients, vectors, role, name, clip), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        norms.append(float(torch.linalg.vector_norm(found[0])))
    assert norms[0] < 0.9 * norms[1]  # clipping did something


@pytest.mark.parametrize("kind", ["vector", "sum"])
def test_without_clipping_the_mean_is_the_derivative_of_the_loss(kind):
    hosts, _ = population(kind)
    batch = hosts.data.batch(torch.arange(3), "train")
    total = per_example_clipped_sum(hosts.oracle, derivatives.lower_grad, (hosts.x0, hosts.y0), batch, 1e9)
    expected = hosts.oracle.lower_grad(hosts.x0, hosts.y0, batch)
    torch.testing.assert_close(total / batch.counts[:, None], expected, rtol=1e-12, atol=1e-12)


def test_one_sample_changes_the_sum_by_the_norm_of_clipping_at_most():
    hosts, clients = population("vector")
    for client in clients[1:]:
        client["train"]["a"][2] *= -1000
    others = Population(hosts.problem, clients, dtype=torch.float64)
    sums = [
        per_example_clipped_sum(
            each.oracle, derivatives.lower_grad, (hosts.x0, hosts.y0), each.data.batch(torch.arange(3), "train"), 0.3
        )
        for each in (hosts, others)
    ]
    moved = torch.linalg.vector_norm(sums[0] - sums[1], dim=1)
    assert moved[0] == 0
    assert bool(((moved[1:] > 1e-3) & (moved[1:] <= 2 * 0.3)).all())  # one row leaves, another one comes


def test_what_cannot_be_clipped_is_refused():
    hosts, _ = population("vector")
    batch = hosts.data.batch(torch.arange(3), "train")
    for clip in (0.0, -1.0, float("nan")):
        with pytest.raises(SettingError, match="norm of clipping is"):
            per_example_clipped_sum(hosts.oracle, derivatives.lower_grad, (hosts.x0, hosts.y0), batch, clip)
    with pytest.raises(NonFiniteError, match="derivative of a sample is not finite"):
        per_example_clipped_sum(hosts.oracle, derivatives.lower_grad, (hosts.x0, hosts.y0 * float("inf")), batch, 1.0)
