"""A language model of tokens: a GPT with layer norms, learned positions and causal attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, gelu, layer_norm, linear
from torch.nn.functional import scaled_dot_product_attention as fused_attention

BYTES = 256

Weights = Mapping[str, Tensor]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Layer = Callable[[Tensor, str], Tensor]  # (inputs, name of a linear layer) -> outputs


class Sized(Protocol):
    """What the model needs to know of its shape."""

    @property
    def width(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def context(self) -> int: ...


class Shape(NamedTuple):
    """Numbers per position, layers, heads of attention, and positions."""

    width: int = 64
    layers: int = 2
    heads: int = 2
    context: int = 64


def weights(size: Sized, seed: int = 0, num_tokens: int = BYTES) -> dict[str, Tensor]:
    """Initial weights: normal with deviation 0.02, and less where a layer adds to the residual stream."""
    draw, d = torch.Generator().manual_seed(seed), size.width
    normal = lambda *shape, scale=0.02: scale * torch.randn(shape, generator=draw)
    small = 0.02 / math.sqrt(2 * size.layers)
    y = {"bytes": normal(num_tokens, d), "places": normal(size.context, d)}
    for i in range(size.layers):
        y |= {f"{i}.norm1.weight": torch.ones(d), f"{i}.norm1.bias": torch.zeros(d)}
        y |= {f"{i}.qkv.weight": normal(3 * d, d), f"{i}.qkv.bias": torch.zeros(3 * d)}
        y |= {f"{i}.mixed.weight": normal(d, d, scale=small), f"{i}.mixed.bias": torch.zeros(d)}
        y |= {f"{i}.norm2.weight": torch.ones(d), f"{i}.norm2.bias": torch.zeros(d)}
        y |= {f"{i}.wide.weight": normal(4 * d, d), f"{i}.wide.bias": torch.zeros(4 * d)}
        y |= {f"{i}.back.weight": normal(d, 4 * d, scale=small), f"{i}.back.bias": torch.zeros(d)}
    return y | {"norm.weight": torch.ones(d), "norm.bias": torch.zeros(d), "head": normal(num_tokens, d)}


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fused_attention(q, k, v, is_causal=True)


def plain_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same attention in operations with derivatives of every order, in every precision."""
    later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(later, -math.inf)
    return scores.softmax(-1) @ v


def dense(y: Weights) -> Layer:
    """Linear layers with the weights and biases of y."""
    return lambda h, name: linear(h, y[f"{name}.weight"], y[f"{name}.bias"])


def scores(
    y: Weights, tokens: Tensor, size: Sized, attention: Attention = causal, layer: Layer | None = None
) -> Tensor:
    """Scores of every next token (n, positions, tokens).

    layer: applies the linear layer with this name; None: as `dense`.
    """
    n, t = tokens.shape
    layer = layer or dense(y)
    norm = lambda h, name: layer_norm(h, (size.width,), y[f"{name}.weight"], y[f"{name}.bias"])
    h = embedding(tokens, y["bytes"]) + y["places"][:t]
    for i in range(size.layers):
        split = layer(norm(h, f"{i}.norm1"), f"{i}.qkv").view(n, t, 3, size.heads, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        h = h + layer(attention(q, k, v).transpose(1, 2).reshape(n, t, size.width), f"{i}.mixed")
        h = h + layer(gelu(layer(norm(h, f"{i}.norm2"), f"{i}.wide")), f"{i}.back")
    return linear(norm(h, "norm"), y["head"])


def entropy(y: Weights, text: Tensor, size: Sized, attention: Attention = causal) -> Tensor:
    """Cross-entropy of every sample (n,): the mean over the bytes after the first one."""
    return following(scores(y, text[:, :-1], size, attention), text)


def sampled(y: Weights, tokens: Tensor, num: int, size: Sized, draw: torch.Generator) -> Tensor:
    """Return tokens (n,) with `num` more, each drawn by its probability after the tokens before it."""
    with torch.no_grad():
        for _ in range(num):
            z = scores(y, tokens[None, -size.context :], size)[0, -1]
            tokens = torch.cat([tokens, torch.multinomial(z.double().softmax(0).cpu(), 1, generator=draw).to(tokens)])
    return tokens


def following(scores: Tensor, text: Tensor) -> Tensor:
    """Cross-entropy of every sample (n,) from the scores of its tokens after the first one."""
    n, t = text[:, 1:].shape
    return cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten(), reduction="none").view(n, t).mean(1)
