"""What is known of the columns of a measurement by their names, for runs, comparisons and pages alike."""

from __future__ import annotations

import math
from collections.abc import Iterable

CALLS = ("gy", "gx", "fx", "fy", "hvp", "jvp", "samples")
COLUMNS = ("floats_up", "floats_down", "bytes_up", "bytes_down", *CALLS)  # of the ledger, one count per client
BESIDE = (
    "iteration",
    "seconds",
    "megabytes",
    "rounds",
    "messages",
    "members",
    "num_peers",
    "seen",
)  # when, how far, and between peers by whom
DIAGNOSTICS = ("hypergradient", "residual", "lower_gradient")  # of the method, not of the model


def figures_of(columns: Iterable[str]) -> list[str]:
    """What was measured, without what was paid."""
    return [name for name in columns if name not in (*BESIDE, *COLUMNS)]


def falls(figure: str) -> bool:
    """Whether less of it is better, so that a target is reached from above wherever a run starts. Of other figures the side from which they begin tells."""
    return figure in DIAGNOSTICS or figure.endswith(("loss", "error", "norm", "distance"))


def metric_and_value(text: str) -> tuple[str, float]:
    """Of a target as it is written, METRIC=VALUE; a ValueError where it is none."""
    name, _, value = text.partition("=")
    if not name or not math.isfinite(number := float(value)):
        raise ValueError(text)
    return name, number
