"""Verdicts of an experiment: chosen rows against each of the others, paired by repetition.

Repetition r of both rows has the same data, so that their difference is free of what the data do to
both. The 95 % interval is Student's, over repetitions. A row wins where the whole interval is on
its better side, loses where it is on the other, and ties otherwise.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedbilevel.columns import falls
from fedbilevel.studies.experiment import Experiment

_LEVEL = 0.95

Values = Mapping[int, float]  # figures by repetition


class Verdict(NamedTuple):
    """The difference of a figure, the chosen row minus the other, with its interval."""

    difference: float
    low: float
    high: float
    word: str

    def shown(self, scale: float = 1.0) -> str:
        if math.isinf(self.high):
            return f"{self.word} ({self.difference * scale:+.3g})"
        return f"{self.word} ({self.difference * scale:+.3g}, {self.low * scale:+.3g} to {self.high * scale:+.3g})"


def verdict(ours: Sequence[float], theirs: Sequence[float], *, lower_is_better: bool) -> Verdict:
    """Compare two rows by the differences of their repetitions; one repetition decides nothing."""
    gaps = [one - other for one, other in zip(ours, theirs, strict=True)]
    mean, num = statistics.fmean(gaps), len(gaps)
    half = half_width(statistics.stdev(gaps) if num > 1 else 0.0, num)
    low, high = mean - half, mean + half
    better, worse = (high < 0, low > 0) if lower_is_better else (low > 0, high < 0)
    return Verdict(mean, low, high, "wins" if better else "loses" if worse else "ties")


def half_width(deviation: float, num: int) -> float:
    """Return half the width of Student's 95 % interval of a mean; infinite for one value."""
    return math.inf if num < 2 else _quantile(num - 1) * deviation / math.sqrt(num)


def judges(experiment: Experiment) -> list[str]:
    """Return the rows whose verdicts the experiment asks for."""
    return list(experiment.content.get("verdict", {}).get("rows", ()))


def plain_ways(experiment: Experiment, rows: Iterable[str]) -> list[str]:
    """Return the rows that have no bilevel run in them, in the order given."""
    ours = {*judges(experiment), *experiment.content.get("verdict", {}).get("bilevel", ())}
    return [row for row in rows if row not in ours]


def verdicts(experiment: Experiment, values: Mapping[tuple[str, str], Values]) -> dict[tuple[str, str, str], Verdict]:
    """Return verdicts by panel, row, and the chosen row that is judged against this row.

    values: figures by panel and row.
    """
    found = {}
    for (panel, row), theirs in values.items():
        for chosen in judges(experiment):
            pairs = paired(values.get((panel, chosen), {}), theirs)
            if row != chosen and pairs:
                found[panel, row, chosen] = verdict(*zip(*pairs, strict=True), lower_is_better=lower(experiment, panel))
    return found


def paired(ours: Values, theirs: Values) -> list[tuple[float, float]]:
    """Return the figures of the repetitions that both rows have."""
    return [(ours[one], theirs[one]) for one in sorted(ours.keys() & theirs.keys())]


def lower(experiment: Experiment, panel: str) -> bool:
    """Return whether lower values of a panel's figure are better."""
    name = (
        experiment.content["panels"][panel].get("settings", {}).get("figure", experiment.content["verdict"]["figure"])
    )
    return falls(str(name))


def values_of(
    experiment: Experiment, found: Sequence[tuple[Any, Mapping[str, Any]]]
) -> dict[tuple[str, str], dict[int, float]]:
    """Return the figure of a verdict by panel and row, then by repetition; a run that failed has none."""
    name = experiment.content.get("verdict", {}).get("figure")
    values: dict[tuple[str, str], dict[int, float]] = {}
    for job, content in sorted(found, key=lambda one: one[0].repetition):
        if name in content["figures"]:
            values.setdefault((job.panel, job.row), {})[job.repetition] = float(content["figures"][name])
    return values


def recorded_values(experiment: Experiment) -> dict[tuple[str, str], dict[int, float]]:
    """Return what `values_of` returned when the experiment was recorded."""
    result = experiment.content.get("result", {})
    return {
        (panel, row): dict(zip(one.get("repeated", range(len(one["values"]))), one["values"], strict=True))
        for panel, rows in result.items()
        for row, one in rows.items()
        if "values" in one
    }


@functools.cache
def _quantile(freedom: int) -> float:
    """Return the two-sided quantile of Student's t by bisection of its integral."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    density = lambda t: scale * (1 + t * t / freedom) ** (-(freedom + 1) / 2)

    def covered(t: float, num: int = 2000) -> float:  # Simpson's rule on (-t, t)
        step = t / num
        inner = sum((4 if i % 2 else 2) * density(i * step) for i in range(1, num))
        return 2 * step / 3 * (density(0.0) + inner + density(t))

    low, high = 0.0, 20.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if covered(middle) < _LEVEL else (low, middle)
    return (low + high) / 2
