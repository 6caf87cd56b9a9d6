"""What is known of figures by their names, for runs, comparisons and pages alike."""

from __future__ import annotations

import math

DIAGNOSTICS = ("hypergradient", "residual", "lower_gradient")  # of the method, not of the model


def falls(figure: str) -> bool:
    """Whether less of it is better, so that a target is reached from above wherever a run starts. Of other figures the side from which they begin tells."""
    return figure in DIAGNOSTICS or figure.endswith(("loss", "error", "norm", "distance"))


def metric_and_value(text: str) -> tuple[str, float]:
    """Of a target as it is written, METRIC=VALUE; a ValueError where it is none."""
    name, _, value = text.partition("=")
    if not name or not math.isfinite(number := float(value)):
        raise ValueError(text)
    return name, number
