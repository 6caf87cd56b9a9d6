"""Paired differences of losses, and what counts as evidence."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

ERRORS = 2.0  # standard errors that count as evidence


class Gap(NamedTuple):
    """Mean of paired differences of losses, and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, ours: np.ndarray, theirs: np.ndarray) -> Gap:
        gaps = ours - theirs
        error = gaps.std(ddof=1) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.inf
        return cls(float(gaps.mean()), float(error))

    @property
    def better(self) -> bool:
        return self.mean < -ERRORS * self.error

    @property
    def worse(self) -> bool:
        return self.mean > ERRORS * self.error
