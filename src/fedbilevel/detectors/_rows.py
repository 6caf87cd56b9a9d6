"""Computations of one client: standardised rows, posteriors of labels, scores without one sample.

All functions take and return tensors of one client; z has one row per sample, the last entry is 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedbilevel.tasks import soft_labels

WIDEST = 16.0  # log-odds of the outermost bins; float32 cannot tell larger ones from certainty


def inputs(fields: Mapping[str, Tensor]) -> Tensor:
    """Return the rows that a detector reads: the problem's features, or else the images."""
    return fields["features"] if "features" in fields else fields["image"]


def trusted(fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the samples whose labels were checked; a field `trusted` may mark them."""
    if "trusted" not in fields:
        return dict(fields)
    marked = fields["trusted"].bool()
    return {name: values[marked] for name, values in fields.items()}


def standardised(fields: Mapping[str, Tensor], centre: Tensor, scale: Tensor) -> Tensor:
    """Return z = (input - centre) / scale with a one at the end, for every sample."""
    rows = (inputs(fields) - centre) / scale
    return torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)


def given(label: Tensor, num_classes: int, like: Tensor) -> Tensor:
    """Return the given labels as rows e_label."""
    return one_hot(label.long(), num_classes).to(like.dtype)


def leave_one_out(z: Tensor, weights: Tensor, leverage: Tensor, target: Tensor) -> Tensor:
    """Return the scores of a ridge regression that was fitted without the scored sample.

    With W = A (sum of z target' over all samples) and h = z' A z, the fit without sample j gives
    (z_j' W - h_j target_j) / (1 - h_j), which is exact.
    """
    return (z @ weights - leverage * target) / (1 - leverage).clamp(min=1e-6)


def log_posterior(score: Tensor, heat: float, transition: Tensor, label: Tensor) -> Tensor:
    """Return log q, with q_k proportional to softmax(heat * score)_k T[k, label]."""
    joint = log_joint(score, heat, transition, label)
    return joint - joint.logsumexp(1, keepdim=True)


def log_joint(score: Tensor, heat: float, transition: Tensor, label: Tensor) -> Tensor:
    """Return log(softmax(heat * score)_k T[k, label]) for every sample and class k."""
    return (heat * score).log_softmax(1) + transition.log()[:, label.long()].T


def x_with_right(p: Tensor, label: Tensor, right: Tensor) -> Tensor:
    """Return x of q (n, C) with q[label] = right (n, 1); the other classes share the rest as in p."""
    own = p.gather(1, label.long()[:, None])
    rest = (p / (1 - own).clamp(min=1e-12)).clamp(min=1e-9) * (1 - right)
    return soft_labels.as_x(torch.where(given(label, p.shape[1], p).bool(), right, rest).log(), label)


def likelihoods(score: Tensor, heats: Tensor, transition: Tensor, label: Tensor) -> Tensor:
    """Return the log-likelihood of the given labels at every heat."""
    return torch.stack([log_joint(score, float(heat), transition, label).logsumexp(1).sum() for heat in heats])


def counted(log_q: Tensor, label: Tensor) -> Tensor:
    """Return N (C, C): the expected number of samples of class k with the given label l."""
    return log_q.exp().T @ given(label, log_q.shape[1], log_q)


def rows_normed(counts: Tensor) -> Tensor:
    return counts / counts.sum(1, keepdim=True)


def packed(matrix: Tensor) -> Tensor:
    """Return the upper triangle of a symmetric matrix, which is all that travels."""
    i, j = torch.triu_indices(len(matrix), len(matrix), device=matrix.device)
    return matrix[i, j]


def unpacked(triangle: Tensor) -> Tensor:
    size = int((2 * len(triangle)) ** 0.5)
    matrix = triangle.new_zeros(size, size)
    i, j = torch.triu_indices(size, size, device=triangle.device)
    matrix[i, j] = triangle
    return matrix + matrix.triu(1).T


def binned(right: Tensor, num_bins: int) -> Tensor:
    """Return numbers of samples by log-odds of a wrong label, from P(right)."""
    odds = torch.logit(1 - right.flatten().double(), eps=1e-12).clamp(-WIDEST, WIDEST)
    place = ((odds + WIDEST) / (2 * WIDEST) * num_bins).long().clamp(max=num_bins - 1)
    return place.bincount(minlength=num_bins).to(right.dtype)


def edge(place: int, num_bins: int) -> float:
    """Return the lower edge of a bin."""
    return -WIDEST + 2 * WIDEST * place / num_bins
