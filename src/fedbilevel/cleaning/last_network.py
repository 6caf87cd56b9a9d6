"""The last network of a cleaning: candidates, and the guard's choice among them.

Every candidate is a network that is trained from its start. In their order:

    as_given    on the labels as given
    pruned      on the labels that are not flagged
    corrected   on all samples; a flagged label is replaced by its posterior
    soft        on the posteriors of all samples

An answer is the mean of the class probabilities of a candidate and of the networks of folds, which exist
anyway: of the first pass for as_given, and of the last pass for the others.

The first one is the choice until the guard accepts another over it, by the rule of detectors. Then only
a candidate that is right more often by two standard errors replaces the choice: soft targets raise the
likelihood more than the accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.cleaning.fold_networks import FoldNetworks, Network, Training, kept, train_network
from fedbilevel.cleaning.parts import ALONE, Parts
from fedbilevel.detectors._decisions import TEMPERATURES, basis, judged, temperature
from fedbilevel.detectors.detector import Detector
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.draws import Stream

CANDIDATES = ("pruned", "corrected", "soft")
USUAL = CANDIDATES[:2]  # soft was less accurate than pruned with the labels that were used for choices
_TINY = 1e-12  # the smallest probability with a logarithm

Train = Callable[..., Network]


class Choice(NamedTuple):
    """The network that the guard chose among candidates.

    name: "as_given", or the name of a candidate.
    network: one network, or several whose mean is the answer.
    figures: the guard's figures of every candidate against the network of the labels as given.
    """

    name: str
    network: Network | FoldNetworks
    figures: Mapping[str, Mapping[str, Any]]

    @property
    def sentence(self) -> str:
        first = f"Networks were trained again on the labels as given and as {', '.join(self.figures)}"
        if self.name == "as_given":
            return (
                f"{first}: none is surely better on held-out clean samples, so the network of the given labels is kept."
            )
        own = self.figures[self.name]
        return (
            f"{first}; the guard chose {self.name}: on {own['num_guard']} held-out clean samples, it is right "
            f"{100 * own['gain']:+.1f} points more often than the network of the given labels (t of the calibrated "
            f"log-likelihood {own['evidence']:.1f})."
        )


def retrained(
    clients: Sequence[Holdings], flags: Sequence[np.ndarray], posteriors: Sequence[np.ndarray], training: Training,
    detector: Detector, folds: FoldNetworks, *, seed: int, parts: Parts = ALONE, **where: Any,
) -> Choice:  # fmt: skip
    """Train the network of the given labels and the usual candidates, and let the guard choose.

    detector: its settings are those of the guard.
    folds: networks of folds, of one or two passes.
    parts: shows and keeps the training of every network.
    where: device, dtype and engine, as in `solve`.
    """
    own: list[Any] = [client["train"] for client in clients]
    some = [{name: np.asarray(part[name]) for name in ("image", "label")} for part in own]
    num_classes = posteriors[0].shape[1]
    named = lambda name: (
        lambda these, targets: train_network(
            these, num_classes, training, targets=targets, seed=seed, parts=parts, name=f"last network, {name}", **where
        )
    )
    candidates = ((name, folds.together(trained(name, some, flags, posteriors, named(name)), -1)) for name in USUAL)
    clean = unread(clients, detector.held_share(), seed)
    return chosen(folds.together(named("as_given")(some, None), 0), candidates, clean, detector)


def unread(clients: Sequence[Holdings], share: float, seed: int) -> dict[str, np.ndarray]:
    """Return the clean samples that only the guard of a detector reads in a run with this seed."""
    found: dict[str, list[np.ndarray]] = {"image": [], "label": []}
    for i, client in enumerate(clients):
        val: Any = client.get("val", {"label": ()})
        num = len(val["label"])
        if num > 1:  # a client with one clean sample has none for the guard
            held = Stream(seed).divided("held", i, num, share)[1].numpy()
            for name, parts in found.items():
                parts.append(np.asarray(val[name])[held])
    if not found["label"]:
        return {"image": np.zeros((0, *np.shape(clients[0]["train"]["image"])[1:])), "label": np.zeros(0, np.int64)}
    return {name: np.concatenate(parts) for name, parts in found.items()}


def trained(
    name: str, clients: Sequence[Mapping[str, np.ndarray]], flags: Sequence[np.ndarray],
    posteriors: Sequence[np.ndarray], train: Train,
) -> Network:  # fmt: skip
    """Train one candidate.

    clients: `image` and `label` of the training samples of every client.
    train: maps such clients, and class probabilities to train on or None, to a network.
    """
    if name == "pruned":
        return train(without(clients, flags), None)
    if name == "corrected":
        num_classes = posteriors[0].shape[1]
        targets = [
            np.where(flagged[:, None], posterior, np.eye(num_classes)[own["label"]])
            for own, flagged, posterior in zip(clients, flags, posteriors, strict=True)
        ]
        return train(clients, targets)
    return train(clients, posteriors if name == "soft" else None)


def without(clients: Sequence[Mapping[str, np.ndarray]], flags: Sequence[np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Return the training samples that are not flagged; a client whose labels are all flagged keeps one."""
    found = []
    for own, flagged in zip(clients, flags, strict=True):
        keep = kept(~flagged)
        found.append({name: own[name][keep] for name in ("image", "label")})
    return found


def chosen(
    plain: Network | FoldNetworks, candidates: Iterable[tuple[str, Network | FoldNetworks]],
    clean: Mapping[str, np.ndarray], detector: Detector,
) -> Choice:  # fmt: skip
    """Choose a network by clean samples that no training has read.

    A cut at a false-discovery rate has read them, so flags at such a cut favour the networks without them.
    """
    before = plain.probabilities(clean["image"])
    name, network, best, figures = "as_given", plain, before, {}
    for own, candidate in candidates:
        p = candidate.probabilities(clean["image"])
        figures[own] = guarded(p, before, clean["label"], detector)
        if name == "as_given":
            better = figures[own]["verdict"] == "accepted"
        else:
            against = guarded(p, best, clean["label"], detector)
            better = against["verdict"] == "accepted" and against["gain"] >= 2 * against["gain_error"]
        if better:
            name, network, best = own, candidate, p
    return Choice(name, network, figures)


def guarded(cleaned: np.ndarray, plain: np.ndarray, label: np.ndarray, detector: Detector) -> dict[str, Any]:
    """Compare class probabilities (n, C) of two networks by the rule of detectors.

    Returns the figures of `judged`, with `verdict` ("accepted", "rejected", "unchecked") and `basis`.
    """
    logs = [np.log(np.maximum(p, _TINY)) for p in (cleaned, plain)]
    own = lambda log: log[np.arange(len(label)), label]
    heated = [_calibrated(log, label) for log in logs]
    right = [(log.argmax(1) == label).astype(float) for log in logs]
    better, gain, fair = own(logs[0]) - own(logs[1]), right[0] - right[1], own(heated[0]) - own(heated[1])
    sums = (len(label), *_moments(better), *_moments(gain), right[1].sum(), *_moments(fair))
    figures: dict[str, Any] = judged(*map(float, sums))
    unchecked = len(label) < detector.least_clean or len(np.unique(label)) < cleaned.shape[1]
    by = "" if unchecked else basis(figures, detector.reject_below, detector.accept_above)
    return {**figures, "basis": by, "verdict": "unchecked" if unchecked else "accepted" if by else "rejected"}


def _moments(values: np.ndarray) -> tuple[float, float]:
    return float(values.sum()), float((values**2).sum())


def _calibrated(logs: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Return logarithms of probabilities at the temperature with the largest likelihood."""
    normed = lambda scores: scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
    every = [normed(b * logs) for b in TEMPERATURES]
    fits = [float(one[np.arange(len(label)), label].sum()) for one in every]
    return every[TEMPERATURES.index(temperature(fits))]
