"""How scores order training samples: rank correlations with the actual changes of retraining.

The samples that are removed are drawn at random, so that they favour no score.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
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
    """rank_correlation: Spearman's, with the changes after training again. rounds: of the score alone.

    cpu_seconds: of the score and of training again.
    """

    rank_correlation: float
    rounds: int
    cpu_seconds: float


def orders(task: Task, scores: Sequence[str], *, num_removed: int, seed: int, **options: Any) -> dict[str, Order]:
    """Return how scores order the same random samples of a task with private weights of samples.

    scores: "cg" or other estimators of `influences`, or plain scores.
    options: dtype (float64 unless given), device, strategy and chunk_size.
    """
    built, computing, begun = task.build(), {"dtype": torch.float64, **options}, time.process_time()
    base = train(built, Training(), **computing)
    population = Population(built.problem, built.clients, **computing)
    places = [(i, j) for i, sizes in enumerate(population.data.sizes["train"].tolist()) for j in range(sizes)]
    rng = np.random.default_rng([seed, 7])
    chosen = [places[k] for k in np.sort(rng.choice(len(places), min(num_removed, len(places)), replace=False))]
    actual = retrain(built, Training(), base, chosen, **computing).changes.tolist()
    found, again = {}, time.process_time() - begun
    for score in scores:
        begun = time.process_time()
        if score in NAMES:
            own, rounds = plain_scores(population, base.y[0, 0])[score], _ROUNDS[score]
            sign = -1.0 if score == "own_loss" else 1.0  # a high loss marks a harmful sample
        else:
            method = resolved(score)
            estimate = influences(built.problem, built.clients, base.y[0], method=method, seed=seed, **computing)
            own, rounds, sign = list(estimate.changes), int(estimate.cost["rounds"]), 1.0
        correlation = rank_correlation([sign * float(own[i][j]) for i, j in chosen], actual)
        seconds = again + time.process_time() - begun
        found[score] = Order(float("nan") if correlation is None else correlation, rounds, seconds)
    return found
