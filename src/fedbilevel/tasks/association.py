"""How strongly every feature alone is associated with a label of two classes.

    t_j = (mean of feature j with label 1 - mean with label 0) / standard error

It needs one sum over clients, of 3 d + 2 numbers, which the costs of a run do not include.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedbilevel.problem.client_data import Holdings


def associations(clients: Sequence[Holdings]) -> Tensor:
    """Return t of every feature over all training samples; 0 if the feature or the label never changes."""
    sums = []
    for client in clients:
        rows, label = (np.asarray(client["train"][name], dtype=np.float64) for name in ("input", "label"))
        one = label == 1
        sums.append((rows[one].sum(0), rows.sum(0), (rows**2).sum(0), one.sum(), len(label)))
    with_one, every, squares, ones, num = (sum(parts) for parts in zip(*sums, strict=True))
    if not 0 < ones < num:
        return torch.zeros(len(every))
    variance = np.maximum(squares / num - (every / num) ** 2, 0)
    gap = with_one / ones - (every - with_one) / (num - ones)
    error = np.sqrt(variance * (1 / ones + 1 / (num - ones)))
    return torch.as_tensor(np.divide(gap, error, out=np.zeros_like(gap), where=error > 1e-12), dtype=torch.float32)
