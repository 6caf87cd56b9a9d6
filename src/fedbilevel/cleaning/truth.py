"""A cleaning against the truth, where it is known: labels corrupted on purpose, and test samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Classifier = Mapping[str, np.ndarray]  # weight (d, C) and bias (C,)
Clients = Sequence[Mapping[str, Mapping[str, np.ndarray]]]


class Truth(NamedTuple):
    """Flags against the labels that are really wrong.

    noise: true share of wrong labels of every client.
    """

    noise: dict[str, float]
    num_wrong: int
    num_flagged: int
    num_found: int

    @property
    def precision(self) -> float:
        return self.num_found / max(1, self.num_flagged)

    @property
    def recall(self) -> float:
        return self.num_found / max(1, self.num_wrong)

    @property
    def f1(self) -> float:
        return 2 * self.num_found / max(1, self.num_flagged + self.num_wrong)

    @property
    def sentence(self) -> str:
        return (
            f"The truth is known here: {self.num_found:,} of {self.num_flagged:,} flags are right (precision "
            f"{self.precision:.1%}), and they find {self.num_found:,} of {self.num_wrong:,} wrong labels (recall "
            f"{self.recall:.1%})."
        )


class Tested(NamedTuple):
    """Accuracies of both classifiers on test samples that no step of a cleaning reads."""

    num: int
    cleaned: float
    plain: float

    @property
    def sentence(self) -> str:
        return (
            f"On {self.num:,} test samples, the model trained on cleaned labels is right in {self.cleaned:.1%}, the "
            f"model trained on the given labels in {self.plain:.1%}."
        )


def compared(flags: Sequence[np.ndarray], wrong: Sequence[np.ndarray], names: Sequence[str]) -> Truth:
    """Return the truth about flags; `wrong` marks the labels that are really wrong, by client."""
    sums = lambda arrays: sum(int(own.sum()) for own in arrays)
    noise = {name: float(own.mean()) for name, own in zip(names, wrong, strict=True)}
    hits = [own & marked for own, marked in zip(flags, wrong, strict=True)]
    return Truth(noise, sums(wrong), sums(flags), sums(hits))


def of_clients(clients: Clients, flags: Sequence[np.ndarray], names: Sequence[str]) -> Truth | None:
    """Return the truth, or None for clients that do not know it."""
    if any("wrong" not in client["train"] for client in clients):
        return None
    return compared(flags, [np.asarray(client["train"]["wrong"], bool) for client in clients], names)


def tested(clients: Clients, classifiers: Mapping[str, Classifier]) -> Tested | None:
    """Return accuracies on the test samples of all clients, or None without test samples."""
    parts = [client["test"] for client in clients if "test" in client]
    num = sum(len(part["label"]) for part in parts)
    if not num:
        return None
    right = {
        name: sum(int((classes(model, part["image"]) == part["label"]).sum()) for part in parts)
        for name, model in classifiers.items()
    }
    return Tested(num, right["cleaned"] / num, right["plain"] / num)


def classes(model: Classifier, rows: Any) -> np.ndarray:
    """Return the class of every row of features."""
    return np.asarray((rows @ model["weight"] + model["bias"]).argmax(1))
