"""Extreme eigenvalues of symmetric matrices, from products with vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedbilevel.oracle.hypergradient import start_vector


def lanczos(product: Any, like: Tensor, num_products: int = 12) -> tuple[Tensor, Tensor]:
    """Return estimates (k,) of the smallest and the largest eigenvalue of each row's matrix.

    The recursion stores three vectors per row; without reorthogonalisation, copies of converged
    eigenvalues appear, which do not change the extremes.
    """
    v = start_vector(like).expand_as(like)
    v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True)
    before, beta = torch.zeros_like(v), v.new_zeros(len(v), 1)
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    tiny = 100 * torch.finfo(v.dtype).eps
    for _ in range(num_products):
        w = product(v)
        alpha = (w * v).sum(1, keepdim=True)
        size = torch.linalg.vector_norm(w, dim=1, keepdim=True)
        w = w - alpha * v - beta * before
        beta = torch.linalg.vector_norm(w, dim=1, keepdim=True)
        ended = (beta <= tiny * size) | (beta == 0)  # the Krylov space is complete: repeat the first entry
        diagonal.append(alpha if not diagonal else torch.where((v == 0).all(1, keepdim=True), diagonal[0], alpha))
        beta = torch.where(ended, torch.zeros_like(beta), beta)
        before, v = v, torch.where(ended, torch.zeros_like(w), w / torch.where(ended, torch.ones_like(beta), beta))
        beside.append(beta)
    matrix = torch.diag_embed(torch.cat(diagonal, dim=1))
    off = torch.cat(beside, dim=1)[:, :-1]
    matrix = matrix + torch.diag_embed(off, offset=1) + torch.diag_embed(off, offset=-1)
    values = torch.linalg.eigvalsh(matrix)
    return values[:, 0], values[:, -1]
