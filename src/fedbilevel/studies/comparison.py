"""Results of a comparison of algorithms: costs of reaching a target, and final figures."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedbilevel.columns import falls, figures_of, metric_and_value
from fedbilevel.errors import SettingError

COSTS = ("rounds", "megabytes", "gradients", "products", "seconds")


class Target(NamedTuple):
    """A figure and the value that it must reach.

    A figure that decreases (`columns.falls`) must fall to the value or below. Every other figure
    must reach the value from the side of its first finite measurement.
    """

    metric: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Target:
        try:
            return cls(*metric_and_value(text))
        except ValueError:
            raise SettingError(f"the target is {text!r}, expected METRIC=VALUE, e.g. test_accuracy=0.94.") from None

    def check(self, row: Mapping[str, Any]) -> None:
        if self.metric not in row:
            asked = {"hypergradient": "stationarity", "residual": "residuals", "lower_gradient": "residuals"}.get(
                self.metric
            )
            hint = f"ask for {asked} (--{asked}), or " if asked is not None else ""
            raise SettingError(
                f"there is no metric named {self.metric!r} in this run: {hint}use one of {', '.join(figures_of(row))}."
            )

    def reached(self, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Return the first measurement at or beyond the target, or None."""
        # a value that is not finite is None in rows read from a file
        finite = [row for row in rows if row[self.metric] is not None and math.isfinite(row[self.metric])]
        rises = bool(finite) and finite[0][self.metric] < self.value and not falls(self.metric)
        return next(
            (row for row in finite if (row[self.metric] >= self.value if rises else row[self.metric] <= self.value)),
            None,
        )


def costs(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        "rounds": row["rounds"],
        "megabytes": row["megabytes"],
        "gradients": row["gy"] + row["gx"] + row["fx"] + row["fy"],
        "products": row["hvp"] + row["jvp"],
        "seconds": row["seconds"],
    }


class Spread(NamedTuple):
    mean: float
    deviation: float  # sample standard deviation; 0 for one value

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not all(map(math.isfinite, values)):  # statistics.stdev would raise an error
            return cls(sum(values) / len(values), math.nan)
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)


@dataclasses.dataclass(frozen=True)
class AlgorithmOutcome:
    """Results of one algorithm, as means over its repetitions.

    to_target: costs of reaching the target, over the repetitions that reached it.
    final: final figures, over the repetitions that did not diverge.
    total: total costs, over the repetitions that did not diverge.
    """

    name: str
    num_runs: int
    num_reached: int
    num_diverged: int
    to_target: dict[str, Spread]
    final: dict[str, Spread]
    total: dict[str, Spread]


@dataclasses.dataclass(frozen=True)
class Comparison:
    task: str
    target: Target | None
    outcomes: list[AlgorithmOutcome]
    runs: list[dict[str, Any]]


def outcome(name: str, runs: Sequence[Mapping[str, Any]], target: Target | None) -> AlgorithmOutcome:
    mine = [one for one in runs if one["algorithm"] == name]
    whole = [one["rows"] for one in mine if one["diverged"] is None]
    firsts = (
        [costs(row) for row in (target.reached(rows) for rows in whole) if row is not None]
        if target is not None
        else []
    )
    ends = [rows[-1] for rows in whole]
    return AlgorithmOutcome(
        name,
        len(mine),
        len(firsts),
        len(mine) - len(whole),
        {cost: Spread.of([first[cost] for first in firsts]) for cost in COSTS} if firsts else {},
        {key: Spread.of([end[key] for end in ends]) for key in figures_of(ends[0])} if ends else {},
        {cost: Spread.of([costs(end)[cost] for end in ends]) for cost in COSTS} if ends else {},
    )
