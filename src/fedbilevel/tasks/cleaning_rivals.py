"""Plain ways to a classifier from labels of which some are wrong, without a weight per sample.

    as_given     cross-entropy of the labels as they are given
    with_clean   the same, on the clean samples as well
    gce          generalised cross-entropy (tasks/robust_losses.py), on the clean samples as well

Clean samples choose the weight of the squared norm of y, from the task's own value downwards; then
they join the training samples of their client. A training sample is flagged as wrong if the trained
classifier finds another class likelier than the given one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem, Scopes
from fedbilevel.tasks import cleaning_losses, soft_labels
from fedbilevel.tasks.rival import Rival, Way, with_validation
from fedbilevel.tasks.robust_losses import Robust

_FACTORS = (1.0, 0.3, 0.1)  # of l2
_NOTED = "noted"  # the role of all training samples with their given labels, by which flags are counted


def cleaning_rivals(problem: Problem, clients: Sequence[Holdings], l2: float, gce_power: float) -> dict[str, Rival]:
    """Return the rivals of a cleaning task whose y is a classifier."""
    noted = [{**client, _NOTED: client["train"]} for client in clients]
    more = with_validation([_marked(client) for client in noted])

    def way(loss: Robust, weight: float, some: Sequence[Holdings]) -> Way:
        def lower(x: Any, y: Any, batch: Any) -> Tensor:
            found = cleaning_losses.scores(y, cleaning_losses.inputs(batch))
            norm = sum((leaf**2).sum() for leaf in y.values())
            return loss.losses(found, soft_labels.given(batch["label"], found.shape[-1])) + 0.5 * weight * norm

        statistics = {role: count for role, count in problem.statistics.items() if role != "train"}
        if "train" in problem.statistics:
            statistics[_NOTED] = doubted
        unused = {"unused": torch.zeros(1)}
        plain = dataclasses.replace(problem, lower=lower, x0=unused, scopes=Scopes(), statistics=statistics)
        return Way(plain, some)

    def rival(title: str, loss: Robust, *, joined: bool) -> Rival:
        weights = {f"l2 {factor * l2:g}": factor * l2 for factor in _FACTORS}
        ways = MappingProxyType({label: way(loss, weight, noted) for label, weight in weights.items()})
        return Rival(title, ways, (lambda label: way(loss, weights[label], more)) if joined else None)

    plain, robust = Robust("cross_entropy"), Robust("gce", gce_power)
    return {
        "as_given": rival("cross-entropy, labels as given", plain, joined=False),
        "with_clean": rival("cross-entropy, labels as given and clean samples", plain, joined=True),
        "gce": rival("generalised cross-entropy, labels as given and clean samples", robust, joined=True),
    }


def doubted(x: Any, y: Any, batch: Any) -> dict[str, Tensor]:
    """Count flags on labels that are not the likeliest class."""
    found = cleaning_losses.scores(y, cleaning_losses.inputs(batch)).argmax(-1) != batch["label"]
    wrong = batch["wrong"].bool()
    return {"tp": found & wrong, "fp": found & ~wrong, "fn": ~found & wrong}


def _marked(client: Holdings) -> dict[str, Any]:
    """Return the client with every field of training samples in its clean samples, none of which is wrong."""
    if "wrong" not in client["train"]:
        return dict(client)
    return {**client, "val": {**client["val"], "wrong": np.zeros(len(client["val"]["label"]), bool)}}
