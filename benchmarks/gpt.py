"""A language model of bytes and clients with several sources of text, for benchmarks of large models.

x holds one logit per source and y all weights of a GPT (layer norms, learned positions, causal
attention). As in the task `mixing`, sources are weighted by softmax(x) below, and the model is
judged on target text above, with a divergence that keeps weights on several sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, gelu, layer_norm, linear, log_softmax, softmax
from torch.nn.functional import scaled_dot_product_attention as fused_attention

from fedbilevel.problem.problem import Problem
from fedbilevel.tasks.task import Built

BYTES = 256
SOURCES = 8
KL = 0.01  # weight of the divergence from uniform weights
_LIKELY = 0.7  # probability of the usual successor of a byte

Weights = Mapping[str, Tensor]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Size(NamedTuple):
    """Shape of a model and of its samples."""

    name: str
    width: int
    layers: int
    heads: int
    context: int = 128
    batch: int = 8
    samples: int = 64  # per source and client


SIZES = (Size("100M", 768, 14, 12), Size("10.9M", 384, 6, 6), Size("0.9M", 128, 4, 2))
BILLION = Size("1B", 2048, 20, 16)
TINY = Size("tiny", 8, 2, 2, context=6, batch=2, samples=3)


def weights(size: Size, seed: int = 0) -> dict[str, Tensor]:
    """Initial weights: normal with deviation 0.02, and less where a layer adds to the residual stream."""
    draw, d = torch.Generator().manual_seed(seed), size.width
    normal = lambda *shape, scale=0.02: scale * torch.randn(shape, generator=draw)
    small = 0.02 / math.sqrt(2 * size.layers)
    y = {"bytes": normal(BYTES, d), "places": normal(size.context, d)}
    for i in range(size.layers):
        y |= {f"{i}.norm1.weight": torch.ones(d), f"{i}.norm1.bias": torch.zeros(d)}
        y |= {f"{i}.qkv.weight": normal(3 * d, d), f"{i}.qkv.bias": torch.zeros(3 * d)}
        y |= {f"{i}.mixed.weight": normal(d, d, scale=small), f"{i}.mixed.bias": torch.zeros(d)}
        y |= {f"{i}.norm2.weight": torch.ones(d), f"{i}.norm2.bias": torch.zeros(d)}
        y |= {f"{i}.wide.weight": normal(4 * d, d), f"{i}.wide.bias": torch.zeros(4 * d)}
        y |= {f"{i}.back.weight": normal(d, 4 * d, scale=small), f"{i}.back.bias": torch.zeros(d)}
    return y | {"norm.weight": torch.ones(d), "norm.bias": torch.zeros(d), "head": normal(BYTES, d)}


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fused_attention(q, k, v, is_causal=True)


def plain_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same attention in operations with derivatives of every order, in every precision."""
    later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(later, -math.inf)
    return scores.softmax(-1) @ v


def entropy(y: Weights, text: Tensor, size: Size, attention: Attention = causal) -> Tensor:
    """Cross-entropy of every sample (n,): the mean over the bytes after the first one."""
    tokens, following = text[:, :-1], text[:, 1:]
    n, t = tokens.shape
    norm = lambda h, name: layer_norm(h, (size.width,), y[f"{name}.weight"], y[f"{name}.bias"])
    layer = lambda h, name: linear(h, y[f"{name}.weight"], y[f"{name}.bias"])
    h = embedding(tokens, y["bytes"]) + y["places"]
    for i in range(size.layers):
        split = layer(norm(h, f"{i}.norm1"), f"{i}.qkv").view(n, t, 3, size.heads, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        h = h + layer(attention(q, k, v).transpose(1, 2).reshape(n, t, size.width), f"{i}.mixed")
        h = h + layer(gelu(layer(norm(h, f"{i}.norm2"), f"{i}.wide")), f"{i}.back")
    scores = linear(norm(h, "norm"), y["head"])
    return cross_entropy(scores.flatten(0, 1), following.flatten(), reduction="none").view(n, t).mean(1)


def divergence(logit: Tensor) -> Tensor:
    """KL(softmax(logit) || uniform)."""
    logs = log_softmax(logit, 0)
    return (logs.exp() * (logs + math.log(len(logit)))).sum()


def shares(logit: Tensor, source: Tensor) -> Tensor:
    """The factor of every sample; its mean over equally long sources is 1."""
    return SOURCES * softmax(logit, 0)[source]


def built(size: Size, num_clients: int, seed: int = 0) -> Built:
    def upper(x: Any, y: Any, batch: Any) -> Tensor:
        return entropy(y, batch["text"], size) + KL * divergence(x["logit"])

    def lower(x: Any, y: Any, batch: Any) -> Tensor:
        return shares(x["logit"], batch["source"]) * entropy(y, batch["text"], size)

    problem = Problem(
        upper=upper, lower=lower, x0={"logit": torch.zeros(SOURCES)}, y0=weights(size, seed), name="large models"
    )
    return Built(problem, [_client(size, client, seed) for client in range(num_clients)])


def _client(size: Size, client: int, seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Samples of one client. The target text is like source 0."""
    train = [text(size, client, source, seed) for source in range(SOURCES)]
    source = np.repeat(np.arange(SOURCES), size.samples)
    target = text(size, client, 0, seed, part=1)
    return {"train": {"text": np.concatenate(train), "source": source}, "val": {"text": target}}


def text(size: Size, client: int, source: int, seed: int, part: int = 0) -> np.ndarray:
    """Random bytes (samples, context + 1) that depend on their address alone.

    In every source a byte has a usual successor, which follows it with probability 0.7.
    """
    usual = np.random.default_rng([seed, source]).permutation(BYTES)
    draw = np.random.default_rng([seed, source, client + 1, part])
    found = draw.integers(BYTES, size=(size.samples, size.context + 1))
    follows = draw.random(found.shape) < _LIKELY
    for place in range(1, found.shape[1]):
        found[:, place] = np.where(follows[:, place], usual[found[:, place - 1]], found[:, place])
    return found
