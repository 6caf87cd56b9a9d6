"""The result of a search of settings: trials, the best of each algorithm, and their costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from fedbilevel.federation.algorithm import Algorithm
from fedbilevel.studies.ranges import Range, Scales


class SearchTrial(NamedTuple):
    """One trial of a search.

    value: mean of the metric over the last quarter of the rounds and over repetitions, because the
        last value of an unstable run may be good by chance; of a pruned trial, the value when it
        stopped; infinite for a diverged trial.
    outcome: "complete", "pruned" or "diverged".
    rounds: rounds of all its runs, from the ledger.
    """

    number: int
    settings: dict[str, Any]
    value: float
    outcome: str
    rounds: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Search:
    """All trials of one algorithm, and the algorithm with the best settings.

    algorithm: None if every trial diverged.
    """

    name: str
    algorithm: Algorithm | None
    best: SearchTrial | None
    trials: list[SearchTrial]
    ranges: dict[str, Range]

    @property
    def rounds(self) -> int:
        return sum(trial.rounds for trial in self.trials)

    def count(self, outcome: str) -> int:
        return sum(trial.outcome == outcome for trial in self.trials)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result of `tune`: one search per algorithm.

    scales: scales of the default ranges with the rounds that their measurement took, or None if no
        range needed them or the journal already had the ranges.
    """

    metric: str
    num_rounds: int
    searches: dict[str, Search]
    scales: Scales | None = None

    @property
    def algorithms(self) -> dict[str, Algorithm]:
        """Return the algorithms with their best settings, ready for `fb.compare`."""
        return {name: one.algorithm for name, one in self.searches.items() if one.algorithm is not None}

    @property
    def rounds(self) -> int:
        """Return the rounds of all trials."""
        return sum(one.rounds for one in self.searches.values())

    @property
    def table(self) -> Any:
        """Return all trials as a pandas DataFrame; without pandas, as a list of dicts."""
        rows = [
            {"algorithm": name, "trial": trial.number, **trial.settings, self.metric: trial.value}
            | {"outcome": trial.outcome, "rounds": trial.rounds, "seconds": trial.seconds}
            for name, one in self.searches.items()
            for trial in one.trials
        ]
        if find_spec("pandas") is None:
            return rows
        import pandas  # type: ignore[import-untyped]

        return pandas.DataFrame(rows)

    def __repr__(self) -> str:
        found = "; ".join(
            f"{name}: every trial diverged"
            if one.best is None
            else f"{name} {one.best.value:.4g} ({listed(one.best.settings)})"
            for name, one in self.searches.items()
        )
        trials = sum(len(one.trials) for one in self.searches.values())
        return f"<{self.metric} after {self.num_rounds} rounds: {found}; {trials} trials, {self.rounds} rounds in all>"


def listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in settings.items()
    )
