"""Predictions beside actual changes, with scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fedbilevel.errors import SettingError
from fedbilevel.studies.influence.plain import rank_correlation

PAPER = {  # R2 and F1 of Table 4, full batch
    ("logistic", "mixture"): (0.99, 1.00),
    ("cnn", "digits"): (0.53, 1.00),
    ("cnn", "mnist"): (0.53, 1.00),
}


class Scores(NamedTuple):
    """Agreement of predicted with actual changes; a score that is not defined is None.

    f1: score of finding the instances whose removal lowers the loss; None if there are no such
        instances, neither predicted nor actual.
    """

    r2: float | None
    f1: float | None
    pearson: float | None


def scores(predicted: Sequence[float], actual: Sequence[float]) -> Scores:
    """Return the scores of a prediction.

    r2 = 1 - SS_res / SS_tot is not the squared correlation: a prediction that is twice too large
    has a lower r2.
    """
    if len(predicted) != len(actual) or not len(actual):
        raise SettingError(
            f"{len(predicted)} predicted and {len(actual)} actual changes cannot be compared: "
            "give as many of both, at least one."
        )
    p, a = torch.tensor(predicted, dtype=torch.float64), torch.tensor(actual, dtype=torch.float64)
    total = float(((a - a.mean()) ** 2).sum())
    hits, either = int(((p < 0) & (a < 0)).sum()), int((p < 0).sum()) + int((a < 0).sum())
    both = math.sqrt(total * float(((p - p.mean()) ** 2).sum()))
    return Scores(
        1 - float(((a - p) ** 2).sum()) / total if total > 0 else None,
        2 * hits / either if either else None,
        float(((a - a.mean()) * (p - p.mean())).sum()) / both if both > 0 else None,
    )


class Instance(NamedTuple):
    """A training instance, with the predicted and the actual change of sum_k f_k by its removal."""

    client: int
    sample: int
    label: int
    wrong: bool  # whether the task made its label wrong
    prediction: float
    actual: float | None  # None where it was not removed
    gradient_product: float  # this and the next two: plain scores, see plain.py
    trajectory: float
    own_loss: float


@dataclass(frozen=True)
class Study:
    """The result of a study of influence.

    ranked: all instances, with the largest |prediction| first; the first `num_removed` were
        removed.
    """

    task: dict[str, Any]
    method: str
    settings: dict[str, Any]
    scores: Scores | None
    ranked: list[Instance]
    num_removed: int
    loss: float  # sum_k f_k of the trained model
    lower_gradient: float  # |mean g_y| of the trained model, which is zero at y*
    val_accuracy: float
    residual: float | None
    disagreement: float | None
    noise: float | None
    cost: dict[str, int]
    seconds: dict[str, float]

    def harmful(self, num: int) -> list[Instance]:
        """Return instances whose removal lowers the loss, the most negative predictions first."""
        return sorted((one for one in self.ranked if one.prediction < 0), key=lambda one: one.prediction)[:num]

    def helpful(self, num: int) -> list[Instance]:
        """Return instances whose removal raises the loss, with the largest predictions first."""
        return sorted((one for one in self.ranked if one.prediction > 0), key=lambda one: -one.prediction)[:num]

    def rank_correlations(self) -> dict[str, float | None]:
        """Return how each score orders the removed instances, against the actual changes."""
        pairs = [(one, one.actual) for one in self.removed if one.actual is not None]
        columns = {
            "prediction": [one.prediction for one, _ in pairs],
            "gradient_product": [one.gradient_product for one, _ in pairs],
            "trajectory": [one.trajectory for one, _ in pairs],
            "own_loss": [-one.own_loss for one, _ in pairs],
        }
        return {name: rank_correlation(values, [actual for _, actual in pairs]) for name, values in columns.items()}

    @property
    def removed(self) -> list[Instance]:
        return self.ranked[: self.num_removed]
