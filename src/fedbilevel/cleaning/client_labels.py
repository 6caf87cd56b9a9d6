"""The labels of one client after a cleaning: suspects, noise rate, transition matrix, and their files.

Between organisations each site makes this for itself, from what it holds; nothing here leaves it.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbilevel.runs.record import write_whole
from fedbilevel.tasks import soft_labels
from fedbilevel.tasks.findings import Finding, matrix, ranking

COLUMNS = ("file", "sample", "label", "suggested", "probability", "flagged")
MOST_CLASSES = 16  # of a matrix that is shown; of more classes, the most frequent mistakes are
SHOWN = 12  # of these mistakes
HALF = 0.5  # labels that are wrong with at least this probability are flagged


class Suspect(NamedTuple):
    """A training sample whose label may be wrong.

    probability: that the given label is wrong.
    """

    client: str
    sample: int
    label: str
    suggested: str
    probability: float
    file: str = ""


@dataclass(frozen=True)
class ClientLabels:
    """The labels of one client after a cleaning.

    label: the given labels (n,).
    posterior: probabilities (n, C) of the true classes.
    flags: marks of the labels that are flagged as wrong.
    shared: T (C, C) of all clients together.
    files: names of the samples' files, if they have any.
    """

    name: str
    class_names: Sequence[str]
    label: np.ndarray
    posterior: np.ndarray
    flags: np.ndarray
    shared: np.ndarray
    files: Sequence[str] | None = None

    @property
    def wrong(self) -> np.ndarray:
        """Probabilities that each given label is wrong."""
        return wrong(self.posterior, self.label)

    @property
    def noise(self) -> float:
        return float(self.wrong.mean())

    @property
    def transition(self) -> np.ndarray:
        """The client's own T (C, C): counts from its posteriors, and those of all clients as one sample per class."""
        return transition_of(self.posterior, self.label, self.shared)

    def suspect(self, sample: int) -> Suspect:
        q, label = self.posterior[sample], int(self.label[sample])
        return Suspect(
            self.name, sample, self.class_names[label], self.class_names[int(q.argmax())], float(1 - q[label]),
            self.files[sample] if self.files is not None else "",
        )  # fmt: skip

    def suspects(self) -> list[Suspect]:
        """Return the flagged samples in their own order."""
        return [self.suspect(int(j)) for j in np.flatnonzero(self.flags)]

    @property
    def sentence(self) -> str:
        """Return what was found, in one sentence."""
        true, given, share = mistakes(self.transition, self.class_names)[0]
        return (
            f"{int(self.flags.sum()):,} of {len(self.label):,} labels are flagged as wrong, {self.noise:.1%} are "
            f"estimated to be wrong, and the most frequent mistake is {true} labelled {given} ({share:.0%})."
        )

    def write(self, suspects: Path, estimates: Path, verdict: str) -> None:
        """Write the file of all training samples, the most suspicious first, and the file of estimates.

        verdict: of the guard, on all clients together.
        """
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(COLUMNS)
        for j in np.argsort(-self.wrong, kind="stable").tolist():
            one = self.suspect(j)
            writer.writerow([one.file, j, one.label, one.suggested, f"{one.probability:.6f}", int(self.flags[j])])
        write_whole(suspects, text.getvalue().encode())
        content = {"verdict": verdict, "num_labels": len(self.label), "num_flagged": int(self.flags.sum())}
        content |= estimates_of(self.noise, self.transition, self.class_names)
        write_whole(estimates, (json.dumps(content) + "\n").encode())


def posterior(logit: Tensor, label: Any) -> np.ndarray:
    """Return the posteriors (n, C) of a client from its private x."""
    return soft_labels.posterior(logit.detach().cpu(), torch.as_tensor(label)).double().numpy()


def wrong(q: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Return the probability (n,) that each given label is wrong."""
    return np.asarray(1 - q[np.arange(len(q)), label])


def transition_of(q: np.ndarray, label: np.ndarray, prior: float | np.ndarray) -> np.ndarray:
    """Return T (C, C): expected samples by true class and given label, plus a prior, with rows of sum one."""
    counts = q.T @ np.eye(q.shape[1])[label] + prior
    return np.asarray(counts / counts.sum(1, keepdims=True))


def estimates_of(noise: float, transition: np.ndarray, class_names: Sequence[str]) -> dict[str, Any]:
    """Return a noise rate and a transition matrix for a file."""
    return {"noise": noise, "transition": transition.tolist(), "class_names": [*class_names]}


def mistakes(transition: np.ndarray, class_names: Sequence[str]) -> list[tuple[str, str, float]]:
    """Return a true class, another given class and T of both, the most frequent mistake first."""
    places = [(k, c) for k in range(len(transition)) for c in range(len(transition)) if k != c]
    ordered = sorted(places, key=lambda place: -transition[place])
    return [(class_names[k], class_names[c], float(transition[k, c])) for k, c in ordered]


def transition_finding(transition: np.ndarray, class_names: Sequence[str]) -> Finding:
    """Return T of all clients for the report page: whole, or the most frequent mistakes of many classes."""
    title = "Which class is labelled as which"
    if len(class_names) <= MOST_CLASSES:
        about = "Estimated share of the samples of a true class, by their given label, over all clients."
        return matrix(title, about, class_names, transition.tolist(), rows="true class", columns="given label")
    about = f"The {SHOWN} most frequent mistakes of all clients, as a share of the samples of the true class."
    rows = [list(one) for one in mistakes(transition, class_names)[:SHOWN]]
    return ranking(title, about, ["true class", "given label", "share"], rows)
