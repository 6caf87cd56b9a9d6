"""Data cleaning: find wrong labels without sharing data.

Every client holds images with noisy labels and a few clean ones of a single class, so that none can clean its data alone. x_i holds one
logit per training sample and never leaves its client; y is a linear classifier that all share:

    g_i(x_i, y) = 1/n_i sum_j sigmoid(x_ij) CE(y; noisy_ij) + l2/2 |y|^2          f_i(y) = CE(y; clean_i)

A sample whose weight falls below one half is flagged as wrong.

Setting of Li, Huang, Huang (NeurIPS 2023), appendix B.1, on embedded digits. Differences from it: a linear model, so that the lower level
is strongly convex; the weighted loss is a mean over samples and weights pass through a sigmoid (the paper's are neither normalised nor
bounded); a corrupted label is always a wrong one; x is private, so the factor 1/m of a stacked x is absent (divide the paper's step of x by m).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedbilevel.data.corruption import flip_labels
from fedbilevel.data.digits import digits
from fedbilevel.data.partition import iid, take_per_class
from fedbilevel.problem import Problem, Scopes
from fedbilevel.settings import setting
from fedbilevel.tasks.task import Built, Task


@dataclass(frozen=True, kw_only=True)
class DataCleaning(Task):
    num_clients: int = setting(10, "clients; client i has clean samples of class i mod 10 only", symbol="M", least=1)
    noise: float = setting(0.4, "share of wrong training labels", symbol="rho", least=0, most=1)
    num_clean: int = setting(20, "clean validation samples per client", least=1)
    test_share: float = setting(0.25, "share of all images kept for testing", above=0, most=0.9)
    l2: float = setting(0.01, "weight of the squared norm of y in the lower level", above=0)
    data_seed: int = setting(0, "seed of the split and of the noise", least=0)

    # Single-class validation data make the clients' own systems H_i u = f_y,i very different: methods that step u locally drift, so one
    # local step is suggested for them.
    suggested = {
        "*": {"lr_lower": 1.0, "lr_system": 1.0, "lr_upper": 30.0, "num_local_steps": 1},
        "fedavg": {"num_local_steps": 5},
        "fednest": {"lr_upper": 2000.0, "num_lower_rounds": 3, "num_terms": 10, "num_local_steps": 5},
        "fbo_aggitd": {"lr_upper": 1000.0, "num_lower_rounds": 5, "num_local_steps": 5},
    }
    suggested_iterations = {"*": 400, "fedavg": 100, "fednest": 60, "fbo_aggitd": 60}
    headline = ("test_accuracy", "f1", "precision", "recall")

    def build(self) -> Built:
        images, labels = digits()
        rng = np.random.default_rng(self.data_seed)
        num_classes, dim = int(labels.max()) + 1, images.shape[1]
        order = rng.permutation(len(labels))
        num_test = round(self.test_share * len(labels))
        test, rest = order[:num_test], order[num_test:]
        holders = [sum(1 for i in range(self.num_clients) if i % num_classes == label) for label in range(num_classes)]
        clean = {label: rest[places] for label, places in take_per_class(labels[rest], self.num_clean * max(holders), rng).items()}
        train = np.setdiff1d(rest, np.concatenate([clean[label][: self.num_clean * holders[label]] for label in clean]))
        noisy, wrong = flip_labels(labels[train], self.noise, num_classes, rng)
        clients = []
        for i, (mine, testing) in enumerate(zip(iid(len(train), self.num_clients, rng), iid(len(test), self.num_clients, rng), strict=True)):
            start = i // num_classes * self.num_clean
            own = clean[i % num_classes][start : start + self.num_clean]
            clients.append(
                {
                    "train": {"image": images[train[mine]], "label": noisy[mine], "wrong": wrong[mine]},
                    "val": {"image": images[own], "label": labels[own]},
                    "test": {"image": images[test[testing]], "label": labels[test[testing]]},
                }
            )
        problem = Problem(
            upper=_upper,
            lower=lambda x, y, batch: _weighted(x, y, batch) + 0.5 * self.l2 * sum((leaf**2).sum() for leaf in y.values()),
            x0=lambda sizes: {"logit": torch.zeros(sizes["train"])},
            y0={"weight": torch.zeros(dim, num_classes), "bias": torch.zeros(num_classes)},
            scopes=Scopes(upper="private"),
            statistics={"train": _flagged, "test": _tested},
            metrics=_metrics,
            name="data_cleaning",
        )
        return Built(problem, clients)


def _losses(y: Any, batch: Any) -> Tensor:
    return cross_entropy(batch["image"] @ y["weight"] + y["bias"], batch["label"], reduction="none")


def _weighted(x: Any, y: Any, batch: Any) -> Tensor:
    return (batch["weight"] * torch.sigmoid(x["logit"][batch["index"]]) * _losses(y, batch)).sum()


def _upper(x: Any, y: Any, batch: Any) -> Tensor:
    return (batch["weight"] * _losses(y, batch)).sum()


def _flagged(x: Any, y: Any, batch: Any) -> dict[str, Tensor]:
    real, flagged = batch["weight"] > 0, x["logit"][batch["index"]] < 0
    return {
        "tp": (real & flagged & batch["wrong"]).sum(),
        "fp": (real & flagged & ~batch["wrong"]).sum(),
        "fn": (real & ~flagged & batch["wrong"]).sum(),
    }


def _tested(x: Any, y: Any, batch: Any) -> dict[str, Tensor]:
    right = (batch["image"] @ y["weight"] + y["bias"]).argmax(-1) == batch["label"]
    real = batch["weight"] > 0
    return {"right": (real & right).sum(), "tested": real.sum()}


def _metrics(sums: Any) -> dict[str, float]:
    """Ratios of sums over all clients; a mean of per-client ratios would be another number."""
    flagged, wrong = sums["tp"] + sums["fp"], sums["tp"] + sums["fn"]
    precision = sums["tp"] / flagged if flagged else 0.0
    recall = sums["tp"] / wrong if wrong else 0.0
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return {"test_accuracy": sums["right"] / sums["tested"], "precision": precision, "recall": recall, "f1": f1}
