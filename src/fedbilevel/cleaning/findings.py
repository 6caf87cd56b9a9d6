"""Findings of a cleaning for the report page: pictures of suspects, and noise of every client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedbilevel.cleaning.client_labels import transition_finding
from fedbilevel.cleaning.outcome import Cleaning
from fedbilevel.problem.client_data import Holdings
from fedbilevel.tasks.findings import Finding, by_client, histogram, images

_SHOWN = 21  # full rows on wide and on narrow screens


def findings(found: Cleaning, clients: Sequence[Holdings]) -> list[Finding]:
    """Return what the page shows; clients have images as they were given, and marks of wrong labels."""
    transition = transition_finding(found.transition, found.class_names)
    shown = (_pictures(found, clients), _noise(found), transition, _probabilities(found, clients))
    return [one for one in shown if one is not None]


def _pictures(found: Cleaning, clients: Sequence[Holdings]) -> Finding | None:
    suspects = found.suspects(_SHOWN)
    if not suspects:
        return None
    looks, facts = [], []
    for one in suspects:
        train: Any = clients[found.names.index(one.client)]["train"]
        looks.append(np.asarray(train["image"])[one.sample].reshape(-1))
        own: dict[str, Any] = {"label": one.label, "suggested": one.suggested, "held by": one.client}
        own |= {"file": one.file} if one.file else {"sample": one.sample}
        own |= {"really wrong": bool(train["wrong"][one.sample])} if found.truth is not None else {}
        facts.append(own)
    about = f"The {len(facts)} most suspicious of {len(found.suspects()):,} flagged labels, with suggested labels" + (
        f"; {sum(own['really wrong'] for own in facts)} of these {len(facts)} labels are really wrong."
        if found.truth is not None
        else "."
    )
    return images("Most suspicious labels", about, np.stack(looks), facts)


def _noise(found: Cleaning) -> Finding:
    true = {} if found.truth is None else {"true share": [*found.truth.noise.values()]}
    about = "Share of wrong labels of every client, as estimated" + (
        ", beside the true share, which is known because labels were corrupted on purpose." if true else "."
    )
    return by_client("Wrong labels of every client", about, {"estimated share": [*found.noise.values()], **true})


def _probabilities(found: Cleaning, clients: Sequence[Holdings]) -> Finding:
    every = np.concatenate(found.wrong)
    groups = {"all labels": every}
    if found.truth is not None:
        wrong = np.concatenate([np.asarray(client["train"]["wrong"], bool) for client in clients])
        groups = {"right labels": every[~wrong], "wrong labels": every[wrong]}
    about = "The probability of every training label that it is wrong. It is computed at the client and stays there."
    return histogram("Probabilities of wrong labels", about, "probability", groups, np.linspace(0, 1, 41))
