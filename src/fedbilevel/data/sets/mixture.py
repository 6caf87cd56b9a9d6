"""A synthetic binary classification: every client mixes the same linear rules in its own
proportions.

    theta_k, bias_k  uniform in [-1, 1]            K rules that all clients share
    pi_i             Dirichlet(concentration)      client i's proportions
    counts           multinomial(num, pi_i)        number of its samples of each rule
    x                uniform in [-1, 1]^d
    label            1 if sigmoid(<x, theta_k> + bias_k + noise * normal) > 1/2, else 0

After Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated Multi-Task Learning under a Mixture of
Distributions", NeurIPS 2021, appendix I.1.5, with d = 5, K = 3 and concentration 0.4 as in
Terashita, Hara, "Decentralized Hyper-Gradient Computation over Time-Varying Directed Networks",
appendix A.1. That appendix states d, K and the concentration. The boxes, the normal noise inside
the sigmoid and its size, and the bias of a rule are not stated there and are taken from memory of
the literature; the bias may belong to the fitted model only. Training, validation and test samples
of a client are drawn one after the other with the same proportions.

The published generator never advances its running index: every rule labels from the first sample
on, the later rule overwrites the earlier, and samples beyond the largest count keep the label 0.
`bug_compatible=True` does the same, for comparisons with published numbers; it draws the same
rules, proportions, counts and inputs as the right one, so that only labels differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class Samples(NamedTuple):
    x: np.ndarray  # (num, d) float32
    label: np.ndarray  # (num,) int64, 0 or 1
    component: np.ndarray  # (num,) which rule gave the label; -1: none did, and the label is 0
    counts: np.ndarray  # (K,) how many samples were drawn for each rule


class Mixture(NamedTuple):
    theta: np.ndarray  # (K, d)
    bias: np.ndarray  # (K,)
    proportions: np.ndarray  # (num_clients, K)
    clients: list[dict[str, Samples]]


def mixture(
    num_clients: int,
    sizes: Mapping[str, int],
    rng: np.random.Generator,
    *,
    dim: int = 5,
    num_components: int = 3,
    concentration: float = 0.4,
    noise: float = 0.1,
    bug_compatible: bool = False,
) -> Mixture:
    """Draw the data of all clients.

    sizes: number of samples of a client by role, e.g. {"train": 100, "val": 100}.
    """
    theta = rng.uniform(-1, 1, (num_components, dim))
    bias = rng.uniform(-1, 1, num_components)
    proportions = rng.dirichlet(np.full(num_components, concentration), num_clients)

    def draw(own: np.ndarray, num: int) -> Samples:
        counts = rng.multinomial(num, own)
        x = rng.uniform(-1, 1, (num, dim)).astype(np.float32)
        component = _overwritten(counts) if bug_compatible else np.repeat(np.arange(num_components), counts)
        score = (x * theta[component]).sum(1) + bias[component] + noise * rng.standard_normal(num)
        return Samples(x, ((score > 0) & (component >= 0)).astype(np.int64), component, counts)

    return Mixture(
        theta, bias, proportions, [{role: draw(own, num) for role, num in sizes.items()} for own in proportions]
    )


def _overwritten(counts: np.ndarray) -> np.ndarray:
    """Return the last rule that labels each sample, if every rule starts at the first sample."""
    component = np.full(counts.sum(), -1)
    for k, count in enumerate(counts):
        component[:count] = k
    return component
