"""Losses that wrong labels disturb less than cross-entropy.

With p_k the probability of class k and t the target, a label or a posterior (n, C):

    gce   sum_k t_k (1 - p_k^q) / q                     q = 0: cross-entropy; q = 1: 1 - p_label
    sce   alpha CE + beta (- sum_k p_k max(log t_k, A))   for a label, the second sum is |A| (1 - p_label)

For a label, the gradient in the scores is s (p - t), where cross-entropy has s = 1:

    gce   s = p_label^q                sce   s = alpha + beta |A| p_label

so a sample that the model finds unlikely counts less.

References: Zhang, Sabuncu, "Generalized Cross Entropy Loss for Training Deep Neural Networks with
Noisy Labels", NeurIPS 2018. Wang, Ma, Chen, Luo, Yi, Bailey, "Symmetric Cross Entropy for Robust
Learning with Noisy Labels", ICCV 2019.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Name = Literal["cross_entropy", "gce", "sce"]


class Robust(NamedTuple):
    """A loss by name; `gce` uses q only, `sce` uses alpha, beta and A (`floor`)."""

    name: Name
    q: float = 0.7
    alpha: float = 0.1
    beta: float = 1.0
    floor: float = -4.0

    def losses(self, scores: Tensor, target: Tensor) -> Tensor:
        """Return the loss of every sample from scores (n, C) and targets (n, C)."""
        logs = scores.log_softmax(-1)
        target = target.to(logs.dtype)
        if self.name == "gce" and self.q > 0:
            return (target * -torch.expm1(self.q * logs)).sum(-1) / self.q
        entropy = -(target * logs).sum(-1)
        if self.name != "sce":
            return entropy
        reverse = -(logs.exp() * target.log().clamp(min=self.floor)).sum(-1)
        return self.alpha * entropy + self.beta * reverse

    def share(self, likely: Tensor) -> Tensor:
        """Return s from p_label."""
        if self.name == "gce":
            return likely**self.q
        return self.alpha - self.beta * self.floor * likely if self.name == "sce" else torch.ones_like(likely)

    @property
    def steepest(self) -> float:
        """The largest s."""
        return self.alpha - self.beta * self.floor if self.name == "sce" else 1.0
