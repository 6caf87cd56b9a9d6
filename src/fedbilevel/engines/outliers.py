"""Answers whose norm is far above the others': a robust z-score on the logarithm of the norm, for every sequence that was sent.

The z-score is that of Iglewicz and Hoaglin, 0.6745 (l - median) / MAD, with their limit of 3.5. Three honest sites often agree within a per cent, so the MAD
has a floor of log(2) / 2: an answer is then flagged from 6 times the median on. Honest answers of the built-in tasks stay below 2.5 times the median, or 5.5
where clients are made to differ strongly. A small answer is never flagged: it moves a mean by less than its own share, and a site that is near its own
optimum sends one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

LIMIT = 3.5
FLOOR = math.log(2) / 2
_NEGLIGIBLE = math.log(1e-8)  # of the longest array that was sent out: differences between shorter answers are rounding


class Flag(NamedTuple):
    """An answer of a site that is far outside the others'."""

    phase: str
    iteration: int
    name: str
    norm: float  # logarithm
    others: float  # that of the longest of the others
    alone: bool  # False: there are two answers, and either may be the odd one

    def __str__(self) -> str:
        if not self.alone:
            return f"the two answers {self._where()} differ, in {self.name}: norms {shown(self.norm)} and {shown(self.others)}"
        return f"its answer {self._where()} has {self.name} of norm {shown(self.norm)}, the others at most {shown(self.others)}"

    def of(self, site: str) -> str:
        return str(self).replace("its answer", f"the answer of {site}", 1)

    def _where(self) -> str:
        return f"to {self.phase} in outer iteration {self.iteration}"


def log_norm(rows: Tensor) -> float:
    """Logarithm of the norm of the longest row, also where the norm itself overflows."""
    largest = float(rows.abs().max()) if rows.numel() else 0.0
    return math.log(largest) + math.log(float(torch.linalg.vector_norm(rows.double() / largest, dim=-1).max())) if largest else -math.inf


def outliers(logs: Mapping[int, float], least: float = -math.inf) -> set[int]:
    """Keys of log norms far above the median; of two that are far apart, both. least: log norm of the longest array that was sent out."""
    raised = {key: max(value, least + _NEGLIGIBLE) for key, value in logs.items()}
    centre = statistics.median(raised.values())
    if len(raised) < 2 or centre == -math.inf:
        return set()
    if len(raised) == 2:
        low, high = sorted(raised.values())
        return set(raised) if 0.6745 * (high - low) > LIMIT * FLOOR else set()
    spread = max(FLOOR, statistics.median(abs(value - centre) for value in raised.values()))
    return {key for key, value in raised.items() if 0.6745 * (value - centre) > LIMIT * spread}


def shown(log: float) -> str:
    if log > 700:  # exp would overflow
        return f"1e{log / math.log(10):.0f}"
    return f"{math.exp(log):.2g}"
