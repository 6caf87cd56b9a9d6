"""One process against two, each with one thread, measured by `benchmarks/ranks.py`."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from benchmarks.clock import Row, Setup, Timing

TITLE = "Ranks"
ABOUT = """Seconds per outer iteration of the engine `distributed` on this host, one thread per rank, taking turns.
The reference is one rank's time divided by the number of ranks: 1 would be a perfect division of the work."""
HEADINGS = {"floor_seconds": "one rank / ranks, s", "ratio": "x reference"}
RANKS = (1, 2)


def skipped(setup: Setup) -> str | None:
    if find_spec("fedbilevel.engines.distributed") is None:
        return "Skipped: the engine `distributed` is not part of this version."
    if find_spec("benchmarks.ranks") is None:
        return "Skipped: there is no benchmarks/ranks.py."
    return "Skipped: the small version starts no ranks." if setup.small else None


def rows(setup: Setup) -> list[Row]:
    measure = importlib.import_module("benchmarks.ranks").measure  # (ranks) -> seconds per outer iteration
    seconds: dict[int, list[float]] = {ranks: [] for ranks in RANKS}
    for _ in range(setup.rounds):
        for ranks in RANKS:
            seconds[ranks].append(measure(ranks))
    timings = {ranks: Timing.of(values) for ranks, values in seconds.items()}
    found: list[Row] = []
    for ranks, timing in timings.items():
        least = timings[1].median / ranks
        row = {
            "name": "distributed",
            "what": f"{ranks} rank{'s' if ranks > 1 else ''}",
            "seconds": timing.median,
            "spread": timing.spread,
        }
        found.append({**row, "floor_seconds": least, "ratio": timing.median / least})
    return found
