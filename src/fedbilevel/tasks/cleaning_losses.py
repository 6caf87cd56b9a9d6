"""Losses, counts and figures of data cleaning, by the weight or the corrected label of every sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from fedbilevel.tasks import soft_labels
from fedbilevel.tasks.robust_losses import Robust


def scores(y: Any, image: Tensor) -> Tensor:
    """Return the score of every class; the names of the tensors in y determine the model."""
    if "weight" in y:
        return image @ y["weight"] + y["bias"]
    for layer in ("hidden1", "hidden2"):
        image = linear(image, y[f"{layer}.weight"], y[f"{layer}.bias"]).relu()
    return linear(image, y["head.weight"], y["head.bias"])


def inputs(batch: Any) -> Tensor:
    return batch["features"] if "features" in batch else batch["image"]


def losses(y: Any, batch: Any) -> Tensor:
    return cross_entropy(scores(y, inputs(batch)), batch["label"], reduction="none")


def trusted(robust: Robust, x: Any, y: Any, batch: Any) -> Tensor:
    weight = torch.sigmoid(x["logit"][batch["index"]])
    if robust.name == "cross_entropy":
        return weight * losses(y, batch)
    found = scores(y, inputs(batch))
    return weight * robust.losses(found, soft_labels.given(batch["label"], found.shape[-1]))


def corrected(robust: Robust, x: Any, y: Any, batch: Any) -> Tensor:
    """Return the loss of every sample with its corrected label."""
    found = scores(y, inputs(batch))
    return robust.losses(found, soft_labels.in_batch(x, batch, found.shape[-1]))


def trust(logit: Tensor, label: Tensor) -> Tensor:
    """Return the weight of every given label: sigmoid(x) of weights, q of labels."""
    if len(logit) == len(label):
        return torch.sigmoid(logit)
    return soft_labels.of_given(soft_labels.posterior(logit, label), label)


def flagged(num_classes: int | None, x: Any, y: Any, batch: Any) -> dict[str, Tensor]:
    """Count flags; num_classes is None if x holds weights."""
    wrong = batch["wrong"].bool()
    if num_classes is None:
        flagged = x["logit"][batch["index"]] < 0
    else:
        flagged = soft_labels.of_given(soft_labels.in_batch(x, batch, num_classes), batch["label"]) < 0.5
    return {"tp": flagged & wrong, "fp": flagged & ~wrong, "fn": ~flagged & wrong}


def tested(x: Any, y: Any, batch: Any) -> dict[str, Tensor]:
    right = scores(y, inputs(batch)).argmax(-1) == batch["label"]
    return {"right": right, "tested": torch.ones_like(right)}


def validated(x: Any, y: Any, batch: Any) -> dict[str, Tensor]:
    wrong = scores(y, inputs(batch)).argmax(-1) != batch["label"]
    return {"missed": wrong, "validated": torch.ones_like(wrong)}


def metrics(sums: Any) -> dict[str, float]:
    """Divide sums over all clients, because a mean of the clients' ratios is a different figure."""
    accuracy = {"test_accuracy": sums["right"] / sums["tested"]} if sums.get("tested") else {}
    if sums.get("validated"):
        accuracy["validation_error"] = sums["missed"] / sums["validated"]
    if "tp" not in sums:
        return accuracy
    flagged, wrong = sums["tp"] + sums["fp"], sums["tp"] + sums["fn"]
    precision = sums["tp"] / flagged if flagged else 0.0
    recall = sums["tp"] / wrong if wrong else 0.0
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return {**accuracy, "precision": precision, "recall": recall, "f1": f1}
