"""Confident learning on pooled data (cleanlab), beside detectors that pool nothing.

This is a reference, not a federated method: rows of features and given labels of all clients come to
one place. The features and both classifiers are those of the detectors.

    1. standardise the pooled features, as detectors do
    2. k-fold cross validation: every sample gets class probabilities from a logistic regression, the
       minimiser of mean CE + l2/2 |weights|^2, that was not trained on it
    3. cleanlab flags labels (`find_label_issues`)
    4. x has q[label] = p[label] / 2 for flagged samples and (1 + p[label]) / 2 for others, as in the
       detector `confident`

Clean samples take no part in the cross validation. The detector `as_given` then trains and checks both
classifiers.

Reference: Northcutt, Jiang, Chuang, "Confident Learning: Estimating Uncertainty in Dataset Labels",
JAIR 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedbilevel.cleaning.prepared import Features, prepared
from fedbilevel.detectors._state import State
from fedbilevel.detectors.as_given import AsGiven
from fedbilevel.detectors.confident import marked
from fedbilevel.detectors.detector import Detector
from fedbilevel.federation.algorithm import Federation, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.settings import Settings, setting


@dataclass(frozen=True, kw_only=True)
class Pooled(Settings):
    num_folds: int = setting(5, "parts of the cross validation", symbol="k", least=2)
    l2: float = setting(0.001, "weight of the squared norm in the cross validation", above=0)
    filter_by: Literal["prune_by_noise_rate", "prune_by_class", "both", "confident_learning"] = setting(
        "prune_by_noise_rate", "cleanlab's rule that flags labels"
    )
    max_iterations: int = setting(300, "limit of iterations of the solver", least=1)


def flagging(
    settings: Pooled,
    detector: AsGiven,
    clients: Sequence[Mapping[str, Any]],
    features: Features,
    seed: int,
    say: Callable[[str], None],
) -> Detector:
    """Return a detector whose x is that of cleanlab on the pooled training samples of the clients."""
    from fedbilevel.studies.kinds import confident_learning  # needs an optional package

    confident_learning.check_cleanlab()
    ready = prepared(clients, features, None)
    sizes = [len(client["train"]["label"]) for client in ready.clients]
    image, label = (np.concatenate([client["train"][name] for client in ready.clients]) for name in ("image", "label"))
    variance = image.astype(np.float64).var(0)
    rows = (image - image.mean(0)) / np.sqrt(variance + 0.01 * variance.mean())
    fitted = lambda some, names: confident_learning.logistic(some, names, settings.l2, settings.max_iterations, say)
    found = confident_learning.out_of_sample(rows, label, settings.num_folds, seed, fitted)
    flags = confident_learning.label_issues(label, found, settings.filter_by)
    p = np.zeros((len(label), ready.num_classes))
    p[:, np.unique(label)] = found
    parts = [np.split(part, np.cumsum(sizes)[:-1]) for part in (p, label, flags[:, None])]
    return with_labels(detector, [marked(*map(torch.as_tensor, own)) for own in zip(*parts, strict=True)])


def with_labels(detector: AsGiven, rows: Sequence[Tensor]) -> Detector:
    """Return the detector with a given x for every client."""

    class Known(AsGiven):
        num_passes: ClassVar[int] = 1

        def detect(self, fed: Federation, state: State) -> State:
            return state._replace(x=fed.mean(self.known, x=state.x).x)

        @phase
        def known(self, clients: Clients, x: Tensor) -> dict[str, Tensor]:
            return {"x": clients.padded([rows[number].to(x) for number in clients.ids.tolist()])}

    return Known(**detector.asdict())
