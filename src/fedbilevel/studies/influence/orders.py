"""How scores order training samples: rank correlations with the actual changes of retraining.

The samples that are removed are drawn at random, so that they favour no score.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from fedbilevel.oracle.population import Population
from fedbilevel.studies.influence.plain import NAMES, plain_scores, rank_correlation
from fedbilevel.studies.influence.predict import influences, resolved
from fedbilevel.studies.influence.retrain import Training, retrain, train
from fedbilevel.tasks.task import Task

_ROUNDS = {"gradient_product": 1, "trajectory": 41, "own_loss": 0}  # the mean of f_y, and 40 steps before it


class Order(NamedTuple):
    """rank_correlation: Spearman's, with the changes after training again. rounds: of the score alone."""

    rank_correlation: float
    rounds: int


def order(task: Task, score: str, *, num_removed: int, seed: int, **options: Any) -> Order:
    """Return how a score orders random samples of a task with private weights of samples.

    score: "cg" or another estimator of `influences`, or a plain score.
    options: dtype (float64 unless given), device, strategy and chunk_size.
    """
    built, computing = task.build(), {"dtype": torch.float64, **options}
    base = train(built, Training(), **computing)
    population = Population(built.problem, built.clients, **computing)
    if score in NAMES:
        found, rounds = plain_scores(population, base.y[0, 0])[score], _ROUNDS[score]
        sign = -1.0 if score == "own_loss" else 1.0  # a high loss marks a harmful sample
    else:
        estimate = influences(built.problem, built.clients, base.y[0], method=resolved(score), seed=seed, **computing)
        found, rounds, sign = list(estimate.changes), int(estimate.cost["rounds"]), 1.0
    places = [(i, j) for i, row in enumerate(found) for j in range(len(row))]
    rng = np.random.default_rng([seed, 7])
    chosen = [places[k] for k in np.sort(rng.choice(len(places), min(num_removed, len(places)), replace=False))]
    actual = retrain(built, Training(), base, chosen, **computing).changes.tolist()
    correlation = rank_correlation([sign * float(found[i][j]) for i, j in chosen], actual)
    return Order(float("nan") if correlation is None else correlation, rounds)
