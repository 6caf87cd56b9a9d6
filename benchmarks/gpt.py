"""A language model of bytes and clients with several sources of text, for benchmarks of large models.

x holds one logit per source and y all weights of a GPT (layer norms, learned positions, causal
attention). As in the task `mixing`, sources are weighted by softmax(x) below, and the model is
judged on target text above, with a divergence that keeps weights on several sources.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softmax

from fedbilevel.problem.problem import Problem
from fedbilevel.tasks.gpt import BYTES, entropy, weights
from fedbilevel.tasks.mixing import divergence
from fedbilevel.tasks.task import Built

SOURCES = 8
KL = 0.01  # weight of the divergence from uniform weights
_LIKELY = 0.7  # probability of the usual successor of a byte


class Size(NamedTuple):
    """Shape of a model and of its samples."""

    name: str
    width: int
    layers: int
    heads: int
    context: int = 128
    batch: int = 8
    samples: int = 64  # per source and client


SIZES = (Size("100M", 768, 14, 12), Size("10.9M", 384, 6, 6), Size("0.9M", 128, 4, 2))
BILLION = Size("1B", 2048, 20, 16)
TINY = Size("tiny", 8, 2, 2, context=6, batch=2, samples=3)


def shares(logit: Tensor, source: Tensor) -> Tensor:
    """The factor of every sample; its mean over equally long sources is 1."""
    return SOURCES * softmax(logit, 0)[source]


def built(size: Size, num_clients: int, seed: int = 0) -> Built:
    def upper(x: Any, y: Any, batch: Any) -> Tensor:
        return entropy(y, batch["text"], size) + KL * divergence(x["logit"])

    def lower(x: Any, y: Any, batch: Any) -> Tensor:
        return shares(x["logit"], batch["source"]) * entropy(y, batch["text"], size)

    problem = Problem(
        upper=upper, lower=lower, x0={"logit": torch.zeros(SOURCES)}, y0=weights(size, seed), name="large models"
    )
    return Built(problem, [_client(size, client, seed) for client in range(num_clients)])


def _client(size: Size, client: int, seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Samples of one client. The target text is like source 0."""
    train = [text(size, client, source, seed) for source in range(SOURCES)]
    source = np.repeat(np.arange(SOURCES), size.samples)
    target = text(size, client, 0, seed, part=1)
    return {"train": {"text": np.concatenate(train), "source": source}, "val": {"text": target}}


def text(size: Size, client: int, source: int, seed: int, part: int = 0) -> np.ndarray:
    """Random bytes (samples, context + 1) that depend on their address alone.

    In every source a byte has a usual successor, which follows it with probability 0.7.
    """
    usual = np.random.default_rng([seed, source]).permutation(BYTES)
    draw = np.random.default_rng([seed, source, client + 1, part])
    found = draw.integers(BYTES, size=(size.samples, size.context + 1))
    follows = draw.random(found.shape) < _LIKELY
    for place in range(1, found.shape[1]):
        found[:, place] = np.where(follows[:, place], usual[found[:, place - 1]], found[:, place])
    return found
