"""The state of a detector."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fedbilevel.federation.algorithm import Variable


class State(NamedTuple):
    x: Variable  # posteriors in the form of tasks/soft_labels.py, (n_i C) at each client
    y: Tensor  # the classifier, in the units of the input
    score: Variable
    leverage: Variable
    centre: Tensor  # (d,)
    scale: Tensor  # (d,)
    gram: Tensor  # mean over clients of sum z z' over training and clean samples, packed
    clean: Tensor  # B_c = mean over clients of sum z e_y' over clean samples, flat
    given: Tensor  # B = mean over clients of sum z e_label' over training samples, flat
    counts: Tensor  # (3,) mean n_i, mean m_i, and share of the clients that have clean samples
    inverse: Tensor  # A, packed, of detectors with scores
    weights: Tensor  # W, flat; zeros before the first scores
    transition: Tensor  # T, flat
    heat: float  # b
    learned: Tensor  # what else a detector goes on from, flat
    models: Tensor  # both classifiers, cleaned and plain, in units of z, flat; for every l2 while it is chosen
    ahead: Tensor  # their extrapolations
    age: list[int]  # rounds of extrapolation since its last restart, of every pair of classifiers
    found: dict[str, Any]  # figures of the guard and of the cut, and the chosen l2

    @property
    def units(self) -> dict[str, Tensor]:
        """Return what a phase needs to standardise features."""
        return {"centre": self.centre, "scale": self.scale}
