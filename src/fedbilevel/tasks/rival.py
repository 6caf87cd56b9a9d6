"""Plain ways to the end that a task serves: the runs that a bilevel method must beat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem

PLAIN: Mapping[str, Any] = MappingProxyType(
    {"learn_x": False, "holdout": 0.0}
)  # of self_tuned: y alone, to its minimum
STOPPED: Mapping[str, Any] = MappingProxyType({"learn_x": False})  # y alone; validation samples choose the state


class Way(NamedTuple):
    """One run of a plain algorithm on a problem of its own.

    The problem measures the figures of the task under the same names, on the same test samples.

    then: returns a second run from the result of the first, such as heads on a trained network; its
        answer is the answer of the way.
    """

    problem: Problem
    clients: Sequence[Holdings]
    algorithm: str = "self_tuned"
    settings: Mapping[str, Any] = PLAIN
    then: Callable[[Any], Way] | None = None


class Rival(NamedTuple):
    """A plain way, tuned as a competent practitioner would tune it.

    title: what is done, in words.
    ways: runs by label; with several, the run with the lowest upper loss, which validation samples
        measure, is chosen.
    refit: returns, for the label of the chosen run, a last run on training and validation samples
        together; None: the chosen run is the answer.
    start: returns, for the chosen label and the result on training samples (of the answer, where there
        is no other), fields of the task's problem that make a bilevel run begin at this rival, such as
        x0 and y0, `clients` where they change, `settings` where the suggested ones do not suit, and
        `refits` where those of the task do not suit; None: the x0 and y0 of the task.
    """

    title: str
    ways: Mapping[str, Way]
    refit: Callable[[str], Way] | None = None
    start: Callable[[str, Any], dict[str, Any]] | None = None


def with_validation(clients: Sequence[Holdings]) -> list[Holdings]:
    """Return clients whose training samples include their validation samples."""
    joined = lambda client, name: np.concatenate([np.asarray(client[role][name]) for role in ("train", "val")])
    return [{**client, "train": {name: joined(client, name) for name in client["train"]}} for client in clients]
