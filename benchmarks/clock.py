"""Timing on noisy machines: contestants take turns, and medians over the rounds are compared."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

Row = dict[str, Any]  # name, what, seconds, spread, floor_seconds, ratio and columns of the section


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Device and thoroughness of a section."""

    device: str = "cpu"
    threads: int = 2
    small: bool = False
    rounds: int = 7
    steps: int | None = None  # hgp_paper: lower steps that are timed; the rest is extrapolated
    networks: tuple[str, ...] = ("random_directed",)  # hgp_paper
    cases: tuple[str, ...] = ()  # large_models: words that the names of its cases must have; growth: its panels
    gigabytes: float = 2.0  # streaming: size of the file

    @property
    def cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"


class Timing(NamedTuple):
    median: float
    spread: float  # distance of the quartiles as a share of the median

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Timing:
        values = sorted(seconds)
        median = statistics.median(values)
        low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (median,) * 3
        return cls(median, (high - low) / median)


def seconds_of(call: Callable[[], Any], setup: Setup, repeats: int = 1) -> float:
    """Seconds of one call. The clock is read when a GPU has finished its work."""
    if setup.cuda:
        torch.cuda.synchronize(setup.device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if setup.cuda:
        torch.cuda.synchronize(setup.device)
    return (time.perf_counter() - start) / repeats


def compare(
    contestants: Mapping[str, Callable[[], Any]],
    setup: Setup,
    *,
    rounds: int | None = None,
    repeats: int | None = None,
    warm: int | Mapping[str, int] = 1,
    least: float = 0.02,
) -> dict[str, Timing]:
    """Time the contestants in turns (A, B, C, A, B, C, ...), so that noise affects all equally.

    Each is first called twice, to warm up and to find how many calls take `least` seconds.
    `repeats` fixes that number, for contestants whose calls differ; each is then called `warm`
    times, all alike or by name.
    """
    turns: dict[str, int] = {}
    for name, call in contestants.items():
        took = seconds_of(call, setup)
        if repeats is None and took < 1:
            took = seconds_of(call, setup)
        for _ in range((warm if isinstance(warm, int) else warm[name]) - 1):
            call()
        turns[name] = repeats or math.ceil((0.001 if setup.small else least) / took)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(setup.rounds if rounds is None or setup.small else rounds):
        for name, call in contestants.items():
            seconds[name].append(seconds_of(call, setup, turns[name]))
    return {name: Timing.of(values) for name, values in seconds.items()}


def rows_of(
    name: str, timings: Mapping[str, Timing], *, floor: str = "floor", ours: str | None = None, **more: Any
) -> list[Row]:
    """One row per contestant except the floor: its time as a multiple of the floor's time.

    ours: a contestant; the rows also have multiples of its time.
    """
    least = timings[floor].median
    rows = []
    for what, timing in timings.items():
        if what == floor:
            continue
        row: Row = {
            "name": name,
            "what": what,
            "seconds": timing.median,
            "spread": timing.spread,
            "floor_seconds": least,
            "ratio": timing.median / least,
        }
        rows.append({**row, **({"times_ours": timing.median / timings[ours].median} if ours else {}), **more})
    return rows
