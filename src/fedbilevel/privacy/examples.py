"""Sums of derivatives that are clipped sample by sample, so that one sample changes them little."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from fedbilevel.errors import NonFiniteError, SettingError
from fedbilevel.oracle.derivatives import Build
from fedbilevel.oracle.evaluation import Evaluation
from fedbilevel.problem.client_data import Batch


def per_example_clipped_sum(
    oracle: Evaluation, build: Build, vectors: Sequence[Tensor], batch: Batch, clip: float, *, chunk: int = 64
) -> Any:
    """Return the sum over each client's samples of a derivative, clipped per sample to a norm.

    Each sample is evaluated alone, with the weight 1. The result is a sum and not a mean: divide it
    by a number that does not depend on the data. A regulariser that is part of the loss is part of
    each sample's derivative. If the derivative has
    several parts (such as J v and H v), each part is clipped by itself.

    build: a derivative of `oracle.derivatives`, such as `lower_grad` or `pull_both`.
    vectors: the points x, y and perhaps v, of shape (d,) or (k, d).
    chunk: samples of each client that are evaluated at once.
    """
    if not clip > 0:
        raise SettingError(f"the norm of clipping is {clip}, expected a positive number.")
    problem = oracle.problem
    each = build(*(oracle.flat(loss, padded=False) for loss in (problem.upper, problem.lower)))
    width, fields = batch.fields["index"].shape[1], dict(batch.fields)
    in_dims = (*(None if v.ndim == 1 else 0 for v in vectors), 0)

    def of_one(*given: Any) -> Any:
        *points, sample = given
        alone = {name: value.unsqueeze(0) for name, value in sample.items()}
        return each(*points, {**alone, "weight": torch.ones_like(alone["weight"])})

    samples = vmap(of_one, in_dims=(*(None for _ in vectors), 0))  # within a client
    total: Any = None
    for start in range(0, width, chunk):
        places = torch.arange(start, min(start + chunk, width))
        some = {name: value[:, start : start + chunk] for name, value in fields.items()}
        rows = vmap(samples, in_dims=in_dims)(*vectors, some)
        real = (places < batch.counts.reshape(-1, 1)).to(some["weight"].device)
        part = tree_map(lambda leaf, real=real: _clipped(leaf, real, clip), rows)
        total = part if total is None else tree_map(torch.add, total, part)
    return total


def _clipped(rows: Tensor, real: Tensor, clip: float) -> Tensor:
    """Sum rows (k, b, d) over b, each scaled down to the norm `clip` if it is longer, without
    padding."""
    norms = torch.linalg.vector_norm(rows, dim=-1)
    if not bool(torch.isfinite(norms[real]).all()):
        raise NonFiniteError("the derivative of a sample is not finite, so it cannot be clipped: check the data.")
    scale = torch.where(real, (clip / norms.clamp(min=clip)), 0.0)
    return (torch.where(real.unsqueeze(-1), rows, 0.0) * scale.unsqueeze(-1)).sum(1)
