"""Cleaning: a detector of wrong labels on corrupted data, with the truth known.

Row: {"task": {"name": "data_cleaning", ...its settings}, "detector": {"name": ..., ...its settings},
"features": ..., "only_right": ..., "linear": ..., "pooled": {...}}. The task makes the data; the
classifiers and the guard are those of the detector.

Figures:

    f1, precision, recall     of wrong labels, flagged above one half
    average_precision         of the ranking by P(wrong); chance is the share of wrong labels
    flags                     share of all labels that are flagged, in per cent of them
    test_accuracy             of the classifier that the guard chose
    cleaned, plain            test accuracy of both classifiers
    linear                    test accuracy of a linear classifier of the inputs as the task gives
                              them, trained afterwards without the flagged samples (linear = "kept")
                              or with their suggested labels ("corrected")
    t, evidence, gain, gain_error, num_guard, most_false
                              of the guard: t of the likelihood, also calibrated, right answers, their
                              standard error, samples, and the bound of the share of false flags
    accepted                  1, or 0 if rejected or unchecked
    harmed                    1 if an accepted classifier loses more than 0.3 points of test accuracy
    rate_false, rate_recall   share of false flags, and recall, at the false-discovery rate; absent
                              without a cut
    rate_kept                 1 if that share is at most the rate; absent without a cut
    rounds, megabytes         of the whole run, and of the network if features are trained

With `only_right`, wrong labels are removed first, which needs the truth: the bound of any method
that drops samples. With `pooled` (studies/pooled.py) and the detector as_given, labels are flagged by
confident learning on pooled data first; such a row has no rounds and no megabytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbilevel import discovery
from fedbilevel.cleaning.clean import clean_labels
from fedbilevel.cleaning.outcome import Cleaning
from fedbilevel.cleaning.truth import compared
from fedbilevel.detectors._decisions import MOST_LOSS
from fedbilevel.detectors.as_given import AsGiven
from fedbilevel.detectors.detector import Detector
from fedbilevel.errors import ProblemError, SettingError
from fedbilevel.runs.options import torch_device
from fedbilevel.settings import Settings, made, setting
from fedbilevel.studies import given, pooled
from fedbilevel.studies.outcome import RowOutcome

GUARD = ("t", "evidence", "gain", "gain_error", "num_guard", "most_false")  # what its rule reads


@dataclass(frozen=True, kw_only=True)
class CleaningRow(Settings):
    features: Literal["given", "convolutional", "trained"] = setting(
        "convolutional", "rows of the detector and the classifier"
    )
    only_right: bool = setting(False, "remove wrong labels first, which needs the truth")
    linear: Literal["no", "kept", "corrected"] = setting(
        "no", "labels on which a linear classifier of the inputs is trained afterwards"
    )


def run(
    row: Mapping[str, Any], *, repetition: int, folder: Path, device: str, say: Callable[[str], None]
) -> RowOutcome:
    """Run one repetition; its number determines the data of the task and the held-out samples."""
    for name in ("task", "detector"):
        if not isinstance(row.get(name), Mapping) or "name" not in row[name]:
            raise SettingError(
                f"the {name} is {row.get(name)!r}, expected a table with its name and settings, e.g. {{name = '...'}}."
            )
    tables = ("task", "detector", "pooled")
    settings = made(CleaningRow, {name: value for name, value in row.items() if name not in tables})
    begun = time.perf_counter()
    clients: Any = given.task(row["task"]).repeated(repetition).build().clients
    if "wrong" not in clients[0]["train"] or "test" not in clients[0]:
        raise ProblemError(
            f"the task {row['task']['name']} does not mark wrong labels: this study needs one that does, "
            "such as data_cleaning."
        )
    if settings.only_right:
        clients = [{**one, "train": _without_wrong(one["train"])} for one in clients]
    detector = given.algorithm(row["detector"])
    if not isinstance(detector, Detector):
        raise SettingError(
            f"the detector is {row['detector']['name']!r}, expected one of {', '.join(discovery.detectors())}."
        )
    if "pooled" in row:
        if type(detector) is not AsGiven:
            raise SettingError(f"pooled data are flagged by cleanlab, not by {detector.name()}: use as_given.")
        detector = pooled.flagging(
            made(pooled.Pooled, row["pooled"]), detector, clients, settings.features, repetition, say
        )
    found = clean_labels(
        clients, detector=detector, features=settings.features, seed=repetition, device=torch_device(device)
    )
    figures = measured(found, clients, detector.rate)
    if settings.linear != "no":
        changed = found.kept(clients) if settings.linear == "kept" else found.corrected(clients)
        again = clean_labels(
            changed, detector="as_given", features="given", seed=repetition, device=torch_device(device)
        )
        assert again.tested is not None
        figures["linear"] = again.tested.plain
    if "pooled" in row:  # all samples travel, which no ledger counts
        figures = {name: value for name, value in figures.items() if name not in ("rounds", "megabytes")}
    say(f"{detector.name()}: {found.sentence} {time.perf_counter() - begun:.1f} s")
    return RowOutcome(figures, [])


def _without_wrong(train: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: values[~np.asarray(train["wrong"], bool)] for name, values in train.items()}


def harmed(accepted: bool, cleaned: float, plain: float) -> float:
    """Return 1 if an accepted cleaning loses more test accuracy than the guard allows."""
    return float(accepted and cleaned < plain - MOST_LOSS)


def measured(found: Cleaning, clients: Any, rate: float) -> dict[str, float]:
    """Return the figures of a cleaning whose truth is known; rate: target of the false-discovery rate."""
    assert found.tested is not None
    wrong = [np.asarray(client["train"]["wrong"], bool) for client in clients]
    right = {"cleaned": found.tested.cleaned, "plain": found.tested.plain}
    scores = lambda flags: compared(flags, wrong, found.names)
    at_half = scores(found.flags)
    accepted = found.verdict == "accepted"
    figures = {
        **{name: getattr(at_half, name) for name in ("f1", "precision", "recall")},
        "average_precision": average_precision(np.concatenate(found.wrong), np.concatenate(wrong)),
        "flags": float(np.concatenate(found.flags).mean()),
        "test_accuracy": right["cleaned" if accepted else "plain"],
        **right,
        **{name: float(found.found[name]) for name in GUARD if name in found.found},
        "accepted": float(accepted),
        "harmed": harmed(accepted, *right.values()),
    }
    cut = found.found.get("cut")
    if cut is not None:
        at_rate = scores([own >= 1 / (1 + np.exp(-cut["log_odds"])) for own in found.wrong])
        false = 1 - at_rate.precision
        figures |= {"rate_false": false, "rate_recall": at_rate.recall, "rate_kept": float(false <= rate)}
    row, network = found.result.rows[-1], found.found.get("network", {})
    return {**figures, **{name: float(row[name]) + network.get(name, 0.0) for name in ("rounds", "megabytes")}}


def average_precision(chance: np.ndarray, wrong: np.ndarray) -> float:
    """Return the mean precision over the ranks of the wrong labels; ties count in the given order."""
    order = np.argsort(-chance, kind="stable")
    hits = wrong[order]
    precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    return float(precision[hits].mean()) if hits.any() else 0.0
