"""The guard's judgement of a cleaning in words and as a table, from sums only.

The server of a federation has nothing else, so that sites and the simulator say the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedbilevel.detectors.detector import Detector

FEW_CLIENTS = 0.5  # share of clients with clean samples below which a sentence warns
PER_FEATURE = 1.5  # training samples per feature; with fewer, label_em flags many right labels of the digits
_UNCHECKED = {
    "verdict": "unchecked", "num_guard": 0.0, "gain": 0.0, "gain_error": math.inf, "t": 0.0, "evidence": 0.0,
}  # fmt: skip


def whole(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of the guard; a run that was stopped before its end has no classifiers to test."""
    return {**({} if "verdict" in found else _UNCHECKED), **found}


def sentence(
    found: Mapping[str, Any], *, num_labels: int, num_flagged: int, num_classes: int, flag: str, stopped: bool = False
) -> str:
    """Return what was found and what it is worth, in two sentences at most.

    found: figures of the guard.
    flag: "half" or "rate", as in `clean_labels`.
    """
    first = f"{num_flagged:,} of {num_labels:,} labels are flagged as wrong"
    if found["verdict"] == "unchecked":
        return (
            f"{first}. {_why_unchecked(found, num_classes, stopped)}, so nothing is promised and the model is the one "
            "of the given labels: look at the suspects before you act on them."
        )
    low, high = (100 * value for value in interval(found))
    measured = (
        f"on {found['num_guard']:.0f} held-out clean samples, the model trained on cleaned labels is right "
        f"{100 * found['gain']:+.1f} points more often (95 % interval {low:+.1f} to {high:+.1f}, t of the calibrated "
        f"log-likelihood {found['evidence']:.1f})"
    )
    if found["verdict"] == "rejected":
        return (
            f"{first}, but the cleaning is rejected: {measured}, which is no sure gain, so the model is the one of "
            "the given labels."
        )
    most = f"{found.get('most_false', 1.0):.0%}"
    bound = f"At most {most} of the flags are false"
    if flag == "rate":  # the guard counts other labels than those at the rate
        bound = f"Of the labels that are more likely wrong than right, at most {most} are right"
    why = {
        "likelihood": " So few samples cannot exclude a loss of 0.3 points, so the log-likelihood decided.",
        "flags": f" {bound}, with a probability of 95 %, which decided.",
    }
    return f"{first}, and the cleaning is accepted: {measured}.{why.get(found.get('basis', ''), '')}"


def interval(found: Mapping[str, Any]) -> tuple[float, float]:
    """Return the 95 % interval of the gain in right answers."""
    half = 1.96 * found["gain_error"]
    return float(found["gain"] - half), float(found["gain"] + half)


def _why_unchecked(found: Mapping[str, Any], num_classes: int, stopped: bool) -> str:
    """Return why nothing checks the result."""
    num = round(found["num_guard"])
    samples = f"{num} held-out clean sample{'' if num == 1 else 's'}"
    if stopped:
        return "The run was stopped before the result was checked"
    if not num:
        return "No held-out clean sample can check the result"
    unseen = found.get("unseen")
    shown = f", with {num_classes - unseen} of the {num_classes} classes," if unseen else ""
    return f"Only {samples}{shown} can check the result"


def caveats_of(
    detector: Detector, state: Any, found: Mapping[str, Any], *, num_clients: int, class_names: Sequence[str],
    by_rate: bool, wrong: float,
) -> list[str]:  # fmt: skip
    """Return what the state of a detector, which holds sums only, cannot guarantee.

    wrong: estimated share of wrong labels.
    """
    num_clean = state.clean.double().view(-1, len(class_names))[-1] * num_clients
    return caveats(
        num_clean=num_clean.tolist(), num_clients=num_clients, share=float(state.counts[2]), cut=found.get("cut"),
        by_rate=by_rate, rate=detector.rate, class_names=class_names, verdict=found["verdict"], wrong=wrong,
        num_train=round(float(state.counts[0]) * num_clients), num_features=len(state.centre),
        detector=detector.name(),
    )  # fmt: skip


def caveats(
    *, num_clean: Sequence[float], num_clients: int, share: float, cut: Mapping[str, float] | None, by_rate: bool,
    rate: float, class_names: Sequence[str], verdict: str, wrong: float, num_train: int, num_features: int,
    detector: str,
) -> list[str]:  # fmt: skip
    """Return what cannot be guaranteed with these samples.

    num_clean: clean samples per class that detection uses. share: of clients with clean samples.
    wrong: estimated share of wrong labels. num_train: training samples of all clients.
    detector: the name of the detector; label_em alone is known to fail with few samples.
    """
    found = []
    if verdict == "unchecked" and wrong > 0.5:
        found.append(
            f"{wrong:.0%} of the labels are estimated to be wrong, and nothing checks this: if most labels are right, "
            "the estimate has failed and the suspects mean nothing."
        )
    if detector == "label_em" and verdict != "accepted" and num_train < PER_FEATURE * num_features:
        found.append(
            f"There are only {num_train:,} training samples for {num_features:,} features, fewer than {PER_FEATURE} "
            "per feature, so most flags can be false: give more samples or fewer features, or compare with the "
            "detector confident."
        )
    lacking = [name for name, num in zip(class_names, num_clean, strict=True) if num < 0.5]
    if len(lacking) == len(class_names):
        found.append(
            "There are no clean samples: where most labels are wrong, the posteriors can be wrong as well without any "
            "sign of it."
        )
    elif lacking:
        whose = "this class" if len(lacking) == 1 else "these classes"
        found.append(
            f"No clean sample shows {', '.join(lacking[:10])}: labels of {whose} are judged by the given labels alone, "
            "and the check does not see them."
        )
    if not lacking and share < FEW_CLIENTS:
        found.append(
            f"Only {math.floor(share * num_clients + 0.5)} of {num_clients} clients have clean samples: the check "
            "speaks for data like theirs."
        )
    if by_rate and cut is None:
        found.append(
            f"No cut can promise a false-discovery rate of {rate:.0%} with so few held-out clean samples, so nothing "
            "is flagged: give more clean samples, or flag above one half."
        )
    return found
