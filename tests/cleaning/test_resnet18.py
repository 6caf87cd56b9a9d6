"""ResNet-18: scores against torch modules, and its training by clients, also in bfloat16."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from fedbilevel.cleaning.fold_networks import Training, train_network
from fedbilevel.cleaning.resnet18 import ResNet18

BRIEF = Training(network="resnet18", width=4, num_rounds=6, num_local_steps=1, batch_size=16, lr_lower=0.5)


class Block(nn.Module):
    def __init__(self, into, out, stride):
        super().__init__()
        norm = lambda: nn.GroupNorm(max(1, out // 16), out)
        self.a, self.norm_a = nn.Conv2d(into, out, 3, stride, 1, bias=False), norm()
        self.b, self.norm_b = nn.Conv2d(out, out, 3, 1, 1, bias=False), norm()
        self.past = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), norm()) if into != out else None

    def forward(self, images):
        found = self.norm_b(self.b(self.norm_a(self.a(images)).relu()))
        return (found + (images if self.past is None else self.past(images))).relu()


def copied(module, y, name):
    """Copy a layer and its norm into torch modules."""
    conv, norm = module
    for place, part in ((conv.weight, "weight"), (norm.weight, "scale"), (norm.bias, "shift")):
        place.data = y[f"{name}.{part}"]


def test_the_scores_are_those_of_torch_modules():
    shape, rng = ResNet18(16, 3, 16, 5), torch.Generator().manual_seed(3)
    y = {name: leaf + 0.2 * torch.randn(leaf.shape, generator=rng) for name, leaf in shape.initial(0).items()}
    images = 5 + 2 * torch.randn(3, 3, 16, 16, generator=rng)
    first = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.GroupNorm(1, 16)
    copied(first, y, "first")
    found = first[1](first[0](nn.LayerNorm((3, 16, 16), 1e-6, False)(images))).relu()
    into = 16
    for stage in range(4):
        for block in range(2):
            out, name = 16 * 2**stage, f"stage{stage}.{block}"
            one = Block(into, out, 2 if stage and not block else 1)
            copied((one.a, one.norm_a), y, f"{name}.a")
            copied((one.b, one.norm_b), y, f"{name}.b")
            if one.past is not None:
                copied(one.past, y, f"{name}.past")
            found, into = one(found), out
    assert found.shape == (3, 128, 2, 2)
    wanted = found.mean((2, 3)) @ y["head.weight"].T + y["head.bias"]
    assert wanted.std() > 0
    assert torch.allclose(shape.scores(y, images.flatten(1)), wanted, rtol=1e-3, atol=1e-5)


def test_standardised_filters_have_mean_zero_and_unit_norm():
    shape, rng = ResNet18(16, 3, 16, 5), torch.Generator().manual_seed(3)
    y = {name: leaf + 0.2 * torch.randn(leaf.shape, generator=rng) for name, leaf in shape.initial(0).items()}
    other = shape._replace(standardise=True)
    for name, leaf in other.used(y).items():
        if leaf.ndim < 4:
            assert torch.equal(leaf, y[name])
            continue
        rows, plain = leaf.flatten(1), y[name].flatten(1)
        assert torch.allclose(rows.mean(1), torch.zeros(len(rows)), atol=1e-6)
        assert torch.allclose(rows.norm(dim=1), torch.ones(len(rows)), atol=1e-4)
        assert torch.allclose(rows * plain.std(1, correction=0)[:, None] * plain.shape[1] ** 0.5,
                              plain - plain.mean(1, keepdim=True), rtol=1e-3, atol=1e-5)  # fmt: skip
    images = torch.randn(3, 3, 16, 16, generator=rng).flatten(1)
    assert torch.equal(other.scores(y, images), shape.scores(other.used(y), images))
    assert not torch.allclose(other.scores(y, images), shape.scores(y, images), atol=1e-3)


def test_width_64_has_the_weights_of_the_published_network():
    """11.17 million for CIFAR-10: norms of groups have as many weights as those of batches."""
    sizes = [leaf.numel() for leaf in ResNet18.of(3 * 32 * 32, 64, 10).initial(0).values()]
    assert sum(sizes) == 11_173_962


def halves(rng, num):
    """Images that are brighter above or below."""
    label = rng.integers(0, 2, num)
    image = rng.normal(size=(num, 8, 8))
    image[:, :4] += np.where(label == 0, 1.5, -1.5)[:, None, None]
    return {"image": image, "label": label}


@pytest.mark.parametrize("precision", ["full", "bf16"])
def test_clients_train_it(precision):
    rng = np.random.default_rng(0)
    clients = [halves(rng, 40) for _ in range(3)]
    training = dataclasses.replace(BRIEF, precision=precision, num_rounds=30, shift=0.125)
    found = train_network(clients, 2, training, seed=0)
    fresh = halves(np.random.default_rng(1), 100)
    assert (found.probabilities(fresh["image"]).argmax(1) == fresh["label"]).mean() > 0.9


def test_bfloat16_changes_the_derivatives_a_little_and_no_more_than_in_a_loop():
    rng = np.random.default_rng(0)
    clients = [halves(rng, 40) for _ in range(3)]
    shares = {}
    for strategy in ("auto", "loop"):
        full, low = (
            train_network(
                clients, 2, dataclasses.replace(BRIEF, precision=one, num_rounds=2), seed=0, strategy=strategy
            )
            for one in ("full", "bf16")
        )
        start = full.shape.initial(0)
        moved = torch.cat([(full.y[name] - leaf).flatten() for name, leaf in start.items()]).norm()
        shares[strategy] = float(torch.cat([(full.y[name] - low.y[name]).flatten() for name in full.y]).norm() / moved)
    assert 0 < shares["auto"] < min(1.3 * shares["loop"], 0.2)
