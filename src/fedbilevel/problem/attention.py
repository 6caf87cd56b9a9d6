"""Attention in plain operations, which have all derivatives in every precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    drop: Callable[[Tensor, float], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Return what `torch.nn.functional.scaled_dot_product_attention` returns.

    drop: function of weights and a probability that drops weights; without it nothing is dropped.
    """
    if enable_gqa:
        key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1)
    return (weights if drop is None else drop(weights, dropout_p)) @ value
