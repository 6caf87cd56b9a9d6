"""Line charts: a few lines in colour, others faint behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from website.svg import Picture, Point

COLOURS = ("blue", "orange", "green", "red")


class Line(NamedTuple):
    label: str
    points: Sequence[Point]
    dashed: bool = False


class Scale:
    """From values to places on a picture, linear or by powers of ten."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool) -> None:
        self.log, self.start, self.end = log, start, end
        self.low, self.high = (math.log10(low), math.log10(high)) if log else (low, high)
        if self.high <= self.low:
            self.high = self.low + 1

    def __call__(self, value: float) -> float:
        place = math.log10(value) if self.log else value
        return self.start + (place - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9)
            stride = max(1, math.ceil((last - first) / 6))
            return [10.0**power for power in range(first, last + 1, stride)]
        rough = (self.high - self.low) / 5
        unit = 10 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough - 1e-12)
        first = math.ceil(self.low / step - 1e-9)
        return [step * place for place in range(first, math.floor(self.high / step + 1e-9) + 1)]


def worded(value: float) -> str:
    if value and (abs(value) >= 100_000 or abs(value) < 0.001):
        power = round(math.log10(abs(value)))
        return f"1e{power}" if math.isclose(abs(value), 10.0**power) else f"{value:.0e}"
    return f"{value:.6g}"


def chart(
    lines: Sequence[Line],
    *,
    title: str,
    x: str,
    y: str,
    log: str = "",
    others: Sequence[Sequence[Point]] = (),
    size: Point = (640, 340),
    low: float | None = None,
) -> Picture:
    """Draw lines. `log` names the logarithmic axes: "", "x", "y" or "xy".

    Points that a logarithmic axis cannot show are omitted.
    """
    shown = [line._replace(points=_fit(line.points, log, low)) for line in lines]
    behind = [_fit(points, log, low) for points in others]
    every = [point for line in shown for point in line.points] + [point for points in behind for point in points]
    picture = Picture(*size, title)
    left, right, top, bottom = 66.0, size[0] - 14, 14.0 + 20 * math.ceil(len(shown) / 2), size[1] - 46
    across = Scale(min(point[0] for point in every), max(point[0] for point in every), left, right, "x" in log)
    heights = [point[1] for point in every]
    margin = 0 if "y" in log else 0.05 * (max(heights) - min(heights) or 1)
    along = Scale(min(heights) - margin, max(heights) + margin, bottom, top, "y" in log)
    for tick in along.ticks():
        picture.line([(left, along(tick)), (right, along(tick))], "faint", width=0.7)
        picture.text(left - 7, along(tick) + 4, worded(tick), "grey", size=12, anchor="end")
    for tick in across.ticks():
        picture.line([(across(tick), bottom), (across(tick), bottom + 5)], "grey", width=1)
        picture.text(across(tick), bottom + 18, worded(tick), "grey", size=12, anchor="middle")
    picture.line([(left, bottom), (right, bottom)], "grey", width=1)
    picture.text((left + right) / 2, size[1] - 8, x, size=13, anchor="middle")
    picture.text(15, (top + bottom) / 2, y, size=13, anchor="middle", turn=-90)
    for points in behind:
        picture.line([(across(a), along(b)) for a, b in points], "grey", width=1, opacity=0.35)
    for place, line in enumerate(shown):
        colour = COLOURS[place % len(COLOURS)]
        picture.line([(across(a), along(b)) for a, b in line.points], colour, width=2.4, dashed=line.dashed)
        column, row = place % 2, place // 2
        at = left + column * (right - left) / 2, 18 + 20 * row
        picture.line([(at[0], at[1] - 4), (at[0] + 24, at[1] - 4)], colour, width=2.4, dashed=line.dashed)
        picture.text(at[0] + 31, at[1], line.label, size=13)
    return picture


def _fit(points: Sequence[Point], log: str, low: float | None) -> list[Point]:
    kept = [(a, b) for a, b in points if math.isfinite(b) and (a > 0 or "x" not in log) and (b > 0 or "y" not in log)]
    return [(a, max(b, low)) for a, b in kept] if low is not None else kept
