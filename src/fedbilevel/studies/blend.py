"""Blends: one classifier out of several, by the likelihood of samples that none of them saw.

The upper loss of a classification task is the cross-entropy of the field `label`. So its values with
each class in place of the label are minus the logarithms of probabilities, up to a constant that
`normalised` removes, such as a penalty of x.

Classifiers differ in how sure they are: weight decay makes small logits, training to the minimum
without it makes large logits. The loss then ranks classifiers by their scale instead of by their
answers. So each classifier first gets one temperature, the factor of its log-probabilities with the
largest likelihood of held-out samples. Then the blend averages probabilities. The weights w maximise

    sum_j log sum_k w_k p_k(label_j)   + sum_k log w_k       (held-out samples j, classifiers k)

The last term is a Dirichlet prior, so that few samples leave all weights near each other. Steps of
expectation and maximisation find the maximum, which is unique, because the sum is concave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem, with_features

_FACTORS = np.geomspace(0.1, 10, 81)  # temperatures to choose from; one is among them
_NUM_STEPS = 300  # of expectation and maximisation


class Scores(NamedTuple):
    """Log-probabilities (samples, classes) and labels, and the client of every sample."""

    scores: np.ndarray
    labels: np.ndarray
    owners: np.ndarray

    @property
    def losses(self) -> np.ndarray:
        """Return the cross-entropy of every sample."""
        return -self.scores[np.arange(len(self.labels)), self.labels]

    def tempered(self, factor: float) -> Scores:
        return self._replace(scores=normalised(factor * self.scores))

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        return cls(*(np.concatenate(some) for some in zip(*parts, strict=True)))


def normalised(scores: np.ndarray) -> np.ndarray:
    """Return logarithms of probabilities that sum to one in every row."""
    found: np.ndarray = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
    return found


def num_classes(clients: Sequence[Holdings]) -> int:
    """Return how many classes there are, by the labels for training and validation."""
    return 1 + max(int(np.max(one[role]["label"], initial=0)) for one in clients for role in ("train", "val"))


@torch.no_grad()
def scored(problem: Problem, result: Any, clients: Sequence[Holdings], role: str, num_classes: int) -> Scores:
    """Return the log-probabilities of all classes for all samples of a role."""
    parts = [Scores(np.empty((0, num_classes)), np.empty(0, int), np.empty(0, int))]
    for i, client in enumerate(clients):
        labels = np.asarray(client[role]["label"]).astype(int)
        if not len(labels):
            continue
        x, y, batch = placed(result, i, client[role])
        batch = with_features(problem, x, batch)
        given = [torch.full_like(batch["label"], c) for c in range(num_classes)]
        each = torch.stack([problem.upper(x, y, {**batch, "label": label}) for label in given], 1)
        parts.append(Scores(normalised(-each.double().numpy()), labels, np.full(len(labels), i)))
    return Scores.joined(parts)


def placed(result: Any, i: int, fields: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """Return x and y of client i, and the batch of all its samples in `fields`."""
    x, y = (value if isinstance(value, Mapping) else value[i] for value in (result.x, result.y))
    x, y = ({name: leaf.detach().cpu() for name, leaf in tree.items()} for tree in (x, y))
    dtype = next(iter(y.values())).dtype
    batch = {name: torch.as_tensor(value) for name, value in fields.items()}
    batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
    size = len(next(iter(batch.values())))
    return x, y, batch | {"weight": torch.full((size,), 1 / size, dtype=dtype), "index": torch.arange(size)}


def factor_of(held: Scores) -> float:
    """Return the factor of the log-probabilities with the largest likelihood."""
    return float(min(_FACTORS, key=lambda factor: held.tempered(factor).losses.mean()))


def weights_of(losses: np.ndarray) -> np.ndarray:
    """Return the weights of classifiers from their losses (classifiers, samples)."""
    num, size = losses.shape
    weights = np.full(num, 1 / num)
    for _ in range(_NUM_STEPS):
        shares = np.log(weights)[:, None] - losses
        parts = np.exp(shares - np.logaddexp.reduce(shares, axis=0))
        weights = (parts.sum(1) + 1) / (size + num)
    return weights


def held_loss(losses: np.ndarray, num_parts: int = 4) -> float:
    """Return the mean loss of the blend on samples (classifiers, samples) that its weights have not seen."""
    parts, found = np.arange(losses.shape[1]) % num_parts, []
    for k in range(num_parts):
        apart = losses[:, parts == k]
        weights = weights_of(losses[:, parts != k])
        found.append(-np.logaddexp.reduce(np.log(weights)[:, None] - apart, axis=0))
    return float(np.concatenate(found).mean())


def blended(members: Sequence[Scores], weights: Sequence[float]) -> Scores:
    """Return the weighted mean of probabilities."""
    terms = [np.log(weight) + one.scores for weight, one in zip(weights, members, strict=True)]
    return members[0]._replace(scores=np.logaddexp.reduce(terms, axis=0))
