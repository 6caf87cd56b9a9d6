"""Labels that a private x corrects: q = softmax(x + 8 e_label) for every sample.

So x = 0 stands for the given labels, with a probability of 0.9967 or more for up to ten classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TRUST = 8.0  # logit of the given label at x = 0
FLOOR = -30.0  # least logarithm of a probability, so that x stays finite


def given(label: Tensor, num_classes: int) -> Tensor:
    """Return the given labels as rows of truth values, which also works under vmap."""
    return label[:, None] == torch.arange(num_classes, device=label.device)


def posterior(own: Tensor, label: Tensor) -> Tensor:
    """Return q (n, C) from rows of x (n, C), or from a client's whole x, which is flat."""
    rows = own.view(len(label), -1)
    return (rows + TRUST * given(label, rows.shape[1])).softmax(1)


def as_x(log_q: Tensor, label: Tensor) -> Tensor:
    """Return a client's x, flat, from log posteriors."""
    return (log_q.clamp(min=FLOOR) - TRUST * given(label, log_q.shape[1])).flatten()


def in_batch(x: Any, batch: Any, num_classes: int) -> Tensor:
    """Return q of the samples of a batch."""
    return posterior(x["logit"].view(-1, num_classes)[batch["index"]], batch["label"])


def of_given(q: Tensor, label: Tensor) -> Tensor:
    """Return the probability (n,) that the given label is right."""
    return q.gather(1, label.long()[:, None])[:, 0]
