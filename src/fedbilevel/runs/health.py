"""Health of a run, judged by the measurements that the run takes anyway.

All limits are relative to the run's own first measurement and to its best one, so that scaling a
loss changes no decision:

    diverged   the lower loss exceeds its best by 10 times its scale (the size of its first and best
               value) in 3 measurements in a row, or any loss by 10,000 times in one measurement
    worse      the upper loss exceeds its best by its scale in 3 measurements in a row, and the
               lower loss exceeds its first value, so that y is not on its way to y*(x)
    residuals  lower_gradient or residual exceeds 10 times its first value in 3 measurements in a
               row, while the upper loss exceeds its first value
    collapse   the norm of y is below 1 % of its maximum in 3 measurements in a row, while the upper
               loss has lost half of its progress
    converged  over 5 measurements, the upper loss changes by less than 0.1 % of its scale, and the
               residuals have stopped falling or are below 1 % of their first values
    stalled    the same, but the upper loss is within 1 % of its first value and the lower gradient
               above 90 % of its first value

Measurements use all data of all clients, so that only the noise of the iterates counts, and three
measurements in a row are rarely noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

LOSSES = ("upper_loss", "lower_loss")
RESIDUALS = ("lower_gradient", "residual")
PATIENCE = 3  # measurements in a row that are beyond a limit
WINDOW = 5  # measurements without a change before a run counts as converged
SHORT = 20  # outer iterations of a run that are too few to judge it by
_FAR, _LOST = 10.0, 1e4  # multiples of a loss's scale: in several measurements, and in one
_GROWN = 10.0  # multiple of a residual's first value
_COLLAPSED = 0.01  # share of the largest norm of y
_STILL, _SOLVED, _UNSOLVED = 1e-3, 0.01, 0.9


@dataclass
class Health:
    """Summary of the measurements so far, as plain numbers for the checkpoint.

    first, best: first and best value of each figure; the best state is that of the best upper loss.
    size: first absolute value of each figure that is not zero.
    ill: measurements in a row that are beyond a limit, by the name of the limit.
    last: the last few values of each figure.
    improved: whether the last measurement has the best upper loss and is within all limits.
    """

    first: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    size: dict[str, float] = field(default_factory=dict)
    ill: dict[str, int] = field(default_factory=dict)
    last: dict[str, list[float]] = field(default_factory=dict)
    largest_y: float = 0.0
    improved: bool = False

    def add(self, row: Mapping[str, Any], norm_y: float | None = None) -> str:
        """Include a measurement; return the reason why the run goes wrong, or ""."""
        found = self._beyond(row, norm_y)
        self.ill = {name: self.ill.get(name, 0) + 1 for name in found}
        self.improved = not found and row["upper_loss"] < self.best.get("upper_loss", math.inf)
        for name in (*LOSSES, *RESIDUALS):
            value = row.get(name)
            if value is not None and math.isfinite(value):
                self.first.setdefault(name, value)
                self.size[name] = self.size.get(name) or abs(value)
                self.best[name] = min(value, self.best.get(name, value))
                self.last[name] = [*self.last.get(name, []), value][-WINDOW:]
        self.largest_y = max(self.largest_y, norm_y or 0.0)
        return self.wrong(row) or next((why for name, why in found.items() if self.ill[name] >= PATIENCE), "")

    def wrong(self, row: Mapping[str, Any], far: float = _LOST) -> str:
        """Return the reason why this measurement alone shows a failure, or "".

        far: multiple of a loss's scale from which a single measurement counts.
        """
        for name in LOSSES:
            value = row.get(name)
            if value is not None and not math.isfinite(value):
                return f"{name} is not finite"
            counts = name == "lower_loss" or far == _LOST or self._is_above("lower_loss", row)
            if counts and value is not None and name in self.best and value - self.best[name] > far * self._scale(name):
                return self._rose(name, value)
        return ""

    def wrong_at_end(self, row: Mapping[str, Any]) -> str:
        """Return the reason why a run that ends with this measurement has failed, or "".

        The first outer iterations of a method may raise a loss, so a short run is judged mildly.
        """
        if row.get("iteration", SHORT) < SHORT:
            return self.wrong(row)
        both = self._beyond(row, None).get("both", "") if self.ill.get("both") else ""
        return self.wrong(row, _FAR) or both

    def is_still(self) -> bool:
        """Return whether the measurements no longer change."""
        losses = self.last.get("upper_loss", [])
        if len(losses) < WINDOW or max(losses) - min(losses) > _STILL * self._scale("upper_loss"):
            return False
        return all(self._is_flat(name) for name in RESIDUALS if name in self.last)

    def is_stalled(self) -> bool:
        """Return whether the measurements are almost those of the start."""
        losses, gradients = self.last["upper_loss"], self.last.get("lower_gradient", [0.0])
        moved = abs(losses[-1] - self.first["upper_loss"])
        begun = self.first.get("lower_gradient", math.inf)
        return moved <= _SOLVED * self._scale("upper_loss") and gradients[-1] > _UNSOLVED * begun

    def again(self) -> None:
        """Forget the last measurements, because the run has gone back."""
        self.ill, self.last = {}, {}

    def asdict(self) -> dict[str, Any]:
        return asdict(self)

    def _is_flat(self, name: str) -> bool:
        values = self.last[name]
        return values[-1] <= _SOLVED * self.size[name] or min(values) > 0.8 * values[0]

    def _scale(self, name: str) -> float:
        first, best = self.first.get(name, 0.0), self.best.get(name, 0.0)
        return max(abs(first - best), abs(best), self.size.get(name, 0.0))

    def _is_above(self, name: str, row: Mapping[str, Any]) -> bool:
        first = self.first.get(name, math.inf)
        return bool(row.get(name, 0.0) > first + _STILL * abs(first))

    def _rose(self, name: str, value: float) -> str:
        return f"{name} rose to {value:.3g}, and its best value was {self.best[name]:.3g}"

    def _beyond(self, row: Mapping[str, Any], norm_y: float | None) -> dict[str, str]:
        """Return the limits that a measurement exceeds, each with its sentence."""
        if not self.best:
            return {}
        found, upper = {}, row["upper_loss"]
        start = self.first.get("upper_loss", math.inf)
        lower = row.get("lower_loss", -math.inf)
        if lower - self.best.get("lower_loss", math.inf) > _FAR * self._scale("lower_loss"):
            found["lower_loss"] = self._rose("lower_loss", lower)
        if upper - self.best.get("upper_loss", upper) > self._scale("upper_loss") and self._is_above("lower_loss", row):
            found["both"] = f"{self._rose('upper_loss', upper)}, and lower_loss exceeds its first value"
        for name in RESIDUALS:
            if upper > start and 0 < _GROWN * self.size.get(name, 0.0) < row.get(name, 0.0):
                found[name] = f"{name} grew from {self.size[name]:.3g} to {row[name]:.3g}, and the upper loss rose"
        middle = (start + self.best.get("upper_loss", start)) / 2
        if norm_y is not None and norm_y < _COLLAPSED * self.largest_y and upper > middle:
            found["y"] = f"the norm of y fell from {self.largest_y:.3g} to {norm_y:.3g}, and the upper loss rose"
        return found
