"""Inversion of gradients: what a curious server reads from the derivatives that clients send.

    one sample, affine layer     input = gradient of the weights / gradient of the biases, of any unit
    softmax, mean of B samples   gradient of the bias of class c = mean p_c - n_c / B, so n_c is known
    otherwise                    images whose gradient matches what was sent, by L-BFGS

References: Phong, Aono, Hayashi, Wang, Moriai, "Privacy-preserving deep learning via additively
homomorphic encryption", IEEE TIFS 2018 (the ratio); Zhu, Liu, Han, "Deep leakage from gradients",
NeurIPS 2019 (matching); Geiping, Bauermeister, Droege, Moeller, "Inverting gradients", NeurIPS 2020
(the cosine). A failed inversion proves nothing: a better attack may succeed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Gradient = Callable[[Tensor, Tensor], Sequence[Tensor]]  # images (n, d), labels (n) -> arrays like the ones sent
BEST = 100.0  # decibels of a reconstruction that is exact up to rounding
_HISTORY = 20


class Inverted(NamedTuple):
    """Reconstructed samples.

    residual: how far their gradient is from what was sent, relative to it.
    """

    images: Tensor
    labels: Tensor
    residual: float


def affine_input(weights: Tensor, biases: Tensor) -> Tensor:
    """Return the input of an affine layer from its gradient by one sample.

    weights: gradient of the weights, (units, inputs).
    biases: gradient of the biases, (units,).
    """
    unit = biases.abs().argmax()
    return weights[unit] / biases[unit]


def labels_from(biases: Tensor, expected: Tensor, num: int, *, scale: float | None = 1.0) -> Tensor:
    """Return the sorted labels of `num` samples from the gradient of the biases of a softmax layer.

    expected: mean probabilities of the classes under the model that the server sent.
    scale: factor of the loss; None if it is unknown, e.g. after clipping: then one class must be absent.
    """
    factor = float((biases / expected).max()) if scale is None else scale
    shares = (expected - biases / (factor or 1.0)).clamp(min=0)
    wanted = num * shares / shares.sum().clamp(min=1e-300)
    counts = wanted.floor()
    rest = num - int(counts.sum())
    counts[(wanted - counts).argsort(descending=True, stable=True)[:rest]] += 1
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts.long())


def invert(
    gradient: Gradient,
    sent: Sequence[Tensor],
    starts: Sequence[Tensor],
    labels: Tensor,
    *,
    num_steps: int = 100,
    scaled: bool = False,
) -> Inverted:
    """Return images whose gradient is nearest to what was sent, over several starts.

    scaled: the length of what was sent is meaningless, as after clipping: compare directions.
    """
    found = [_matched(gradient, sent, start, labels, num_steps, scaled) for start in starts]
    return min(found, key=lambda one: one.residual)


def _matched(
    gradient: Gradient, sent: Sequence[Tensor], start: Tensor, labels: Tensor, num_steps: int, scaled: bool
) -> Inverted:
    images = start.detach().clone().requires_grad_()
    solver = torch.optim.LBFGS(
        [images],
        max_iter=num_steps,
        history_size=_HISTORY,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-14,
        tolerance_change=1e-18,
    )

    def residual() -> Tensor:
        parts = [_distance(one, other, scaled) for one, other in zip(gradient(images, labels), sent, strict=True)]
        return torch.stack(parts).sum()

    def closure() -> Tensor:
        solver.zero_grad()
        loss = residual()
        loss.backward()
        return loss

    solver.step(closure)
    left = float(residual().detach())
    kept = images.detach() if left == left else start  # a search that left the floating-point numbers
    return Inverted(kept.clamp(0, 1), labels, left if left == left else float("inf"))


def _distance(one: Tensor, other: Tensor, scaled: bool) -> Tensor:
    if scaled:
        return 1 - torch.nn.functional.cosine_similarity(one, other, dim=0, eps=1e-30)
    return ((one - other) ** 2).sum() / (other**2).sum().clamp(min=1e-300)


def psnr(found: Tensor, truth: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of every true image in decibels, at most 100.

    Pixels are from 0 to 1. Each true image has its own reconstruction; the best pairs are taken first.
    """
    errors = ((truth[:, None] - found[None]) ** 2).mean(-1)
    values = torch.zeros(len(truth), dtype=torch.float64)
    left = errors.clone()
    for _ in range(min(len(truth), len(found))):
        place = int(left.argmin())
        one, other = divmod(place, len(found))
        values[one] = -10 * torch.log10(errors[one, other].double().clamp(min=10 ** (-BEST / 10)))
        left[one], left[:, other] = torch.inf, torch.inf
    return values


def labels_found(found: Tensor, truth: Tensor) -> float:
    """Return the share of the true labels that were found, whatever their order."""
    num = int(max(found.max(), truth.max())) + 1
    both = torch.minimum(found.bincount(minlength=num), truth.bincount(minlength=num))
    return float(both.sum()) / len(truth)
