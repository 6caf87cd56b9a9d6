"""What a run of a detector leaves: suspects and estimates at each site, and at the server a verdict
from sums.

At the end, the server sends the sites T of all clients and the guard's verdict. Each site writes the
files of its own clients into the folder of the run; nothing of them is in its answer to that message.
From the sums of earlier answers, the server can compute the noise rate, the number of flags and T of a
site, unless the sums are secure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedbilevel.cleaning import judgement
from fedbilevel.cleaning.client_labels import HALF, ClientLabels, estimates_of, posterior, transition_finding, wrong
from fedbilevel.detectors.detector import Detector
from fedbilevel.errors import WireError
from fedbilevel.federation.algorithm import Algorithm, Value
from fedbilevel.runs.record import Record
from fedbilevel.runs.result import Result

SUSPECTS, ESTIMATES = "suspects", "cleaning"  # names of a site's files, .csv and .json
_ROUNDING = 1e-3  # of the sum of probabilities
_SAID = {
    "accepted": "The guard accepted the cleaning of all sites",
    "rejected": "The guard rejected the cleaning of all sites, so the model is the one of the given labels",
    "unchecked": "Nothing checked the cleaning of all sites",
}


def handed(algorithm: Algorithm, state: Any) -> dict[str, Value]:
    """Return what the sites get at the end, by name: nothing unless the run of a detector is whole."""
    if not isinstance(algorithm, Detector) or "verdict" not in state.found:
        return {}
    return {"transition": state.transition, "verdict": state.found["verdict"]}


def labels_of(
    algorithm: Algorithm,
    given: Mapping[str, Any],
    clients: Sequence[str],
    logits: Sequence[Tensor],
    labels: Sequence[Tensor],
    *,
    reached: Callable[[int], bool],
) -> list[ClientLabels]:
    """Return the labels of the clients of a site after a cleaning.

    given: what the server handed, which is checked here.
    logits: private x of every client.
    reached: whether the site has begun an outer iteration.
    """
    transition, verdict = given.get("transition"), given.get("verdict")
    num_classes = len(logits[0]) // len(labels[0])
    known = isinstance(algorithm, Detector) and given.keys() == {"transition", "verdict"} and verdict in [*_SAID]
    if not known or not _is_transition(transition, num_classes):
        raise WireError(
            f"the last message brings {', '.join(given)[:100]}, expected the transition matrix of {num_classes} "
            "classes and the verdict of a detector."
        )
    assert isinstance(algorithm, Detector)
    assert isinstance(transition, Tensor)
    if not reached(algorithm.num_iterations()):
        raise WireError(
            f"the last message brings a verdict, expected none before outer iteration {algorithm.num_iterations()}, "
            "in which the guard decides."
        )
    shared, names = transition.double().cpu().view(num_classes, -1).numpy(), [str(i) for i in range(num_classes)]
    found = []
    for name, logit, label in zip(clients, logits, labels, strict=True):
        given_label = label.cpu().numpy()
        q = posterior(logit, given_label)
        found.append(ClientLabels(name, names, given_label, q, wrong(q, given_label) >= HALF, shared))
    return found


def _is_transition(value: Any, num_classes: int) -> bool:
    """Return whether a value has one row of probabilities for every class."""
    if not isinstance(value, Tensor) or value.shape != (num_classes**2,):
        return False
    rows = value.double().view(num_classes, -1)
    return bool((rows >= 0).all()) and bool(((rows.sum(1) - 1).abs() < _ROUNDING).all())


def write_labels(folder: Path, owned: Sequence[ClientLabels], numbers: Sequence[int], verdict: str) -> str:
    """Write the files of a site's clients, and return a sentence for its operator."""
    files = []
    for own, number in zip(owned, numbers, strict=True):
        part = "" if len(owned) == 1 else f".client{number}"
        files.append(folder / f"{SUSPECTS}{part}.csv")
        own.write(files[-1], folder / f"{ESTIMATES}{part}.json", verdict)
    said = [own.sentence if len(owned) == 1 else f"{own.name}: {own.sentence}" for own in owned]
    return f"{' '.join(said)} {_SAID[verdict]}. See {', '.join(file.name for file in files)} in runs/{folder.name}."


def write_verdict(algorithm: Algorithm, result: Result, num_clients: int, record: Record) -> str:
    """Write the verdict, the noise rate and T of all sites into the server's record, and return the
    sentence; an empty text if the run has no detector."""
    if not isinstance(algorithm, Detector):
        return ""
    if not handed(algorithm, result.state):
        return (
            f"{algorithm.name()} needs {algorithm.num_iterations()} outer iterations and the run has "
            f"{result.iteration}, so no site has suspects: leave num_iterations out of the plan."
        )
    state, found = result.state, result.state.found
    side = math.isqrt(len(state.transition))
    names = [str(i) for i in range(side)]
    sizes = {name: found[name] for name in ("num_labels", "num_flagged")}
    sentence = judgement.sentence(found, **sizes, num_classes=side, flag="half")
    notes = judgement.caveats_of(
        algorithm, state, found, num_clients=num_clients, class_names=names, by_rate=False, wrong=found["noise"]
    )
    transition = state.transition.double().cpu().view(side, -1).numpy()
    estimates = {**sizes, **estimates_of(found["noise"], transition, names)}
    record.write_cleaning({"verdict": found["verdict"], "sentences": [sentence, *notes], **estimates})
    record.write_findings([transition_finding(transition, names)])
    return sentence
