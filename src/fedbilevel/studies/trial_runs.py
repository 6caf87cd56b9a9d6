"""One trial of a search: the runs of an algorithm with one choice of settings."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedbilevel.columns import falls, figures_of
from fedbilevel.errors import NonFiniteError, RecoveryWarning, SettingError, UnstableStepError
from fedbilevel.federation.algorithm import Algorithm, PeerAlgorithm
from fedbilevel.runs.endings import whole
from fedbilevel.runs.result import Progress
from fedbilevel.runs.solve import solve
from fedbilevel.tasks.task import Built

if TYPE_CHECKING:
    from optuna.trial import Trial

FIRST_REPETITION = 100  # a comparison reports repetitions from 0 on, so trials use other data and draws
_CURVE = 20  # points of a learning curve that trials are compared at


@dataclasses.dataclass(frozen=True)
class SearchPlan:
    """Everything that all trials have in common."""

    built: list[Built]  # by repetition
    metric: str
    num_rounds: int
    num_trials: int
    prune: bool
    seed: int
    say: Callable[[str], None]
    with_server: dict[str, Any]
    between_peers: dict[str, Any]
    options: dict[str, Any]

    def about(self) -> dict[str, Any]:
        """Return what must be the same in a resumed search."""
        given = {**self.with_server, **self.between_peers, **self.options}
        options = {name: str(value) for name, value in given.items()}
        return {"metric": self.metric, "num_rounds": self.num_rounds, "seed": self.seed, "options": options}


class TrialRuns:
    """The runs of one trial."""

    def __init__(self, plan: SearchPlan, trial: Trial) -> None:
        self.plan, self.trial = plan, trial
        self.outcome, self.value, self.rounds = "complete", math.nan, 0
        self._now, self._step = 0, 0  # rounds of the current run, and the last reported round of its curve

    def go(self, algorithm: Algorithm) -> None:
        plan, clock, values = self.plan, time.perf_counter(), []
        where = plan.between_peers if isinstance(algorithm, PeerAlgorithm) else plan.with_server
        for r, (problem, clients) in enumerate(plan.built):
            self._now = 0
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RecoveryWarning)  # the outcome of the trial says it
                    result = solve(
                        problem, clients, algorithm, num_rounds=plan.num_rounds, seed=plan.seed + FIRST_REPETITION + r,
                        callbacks=[self._watch(first=r == 0)], **where, **plan.options,
                    )  # fmt: skip
            except (NonFiniteError, UnstableStepError):
                self.outcome = "diverged"
            else:
                if whole(result).stopped == "failed":
                    self.outcome = "diverged"
            self.rounds += self._now
            if self.outcome != "complete":
                break
            values.append(self._settled(result.rows))
        if self.outcome == "diverged":
            self.value = math.inf if falls(plan.metric) else -math.inf
        elif self.outcome == "complete":
            self.value = statistics.fmean(values)
        for key, value in (
            ("outcome", self.outcome),
            ("rounds", self.rounds),
            ("seconds", time.perf_counter() - clock),
        ):
            self.trial.set_user_attr(key, value)

    def _settled(self, rows: Sequence[Mapping[str, Any]]) -> float:
        late = [row for row in rows if row["rounds"] > 0.75 * self.plan.num_rounds]
        return statistics.fmean(row[self.plan.metric] for row in late or rows[-1:])

    def _watch(self, *, first: bool) -> Callable[[Progress], bool]:
        """Return a callback that stops a run which diverges or, in the first repetition, is behind."""
        recent: deque[float] = deque(maxlen=3)  # the mean of a few points, as single points of a noisy curve mislead

        def watch(now: Progress) -> bool:
            self._now = now.rounds
            if now.row is None:
                return False
            if self.plan.metric not in now.row:
                raise SettingError(
                    f"there is no metric named {self.plan.metric!r} in this run: "
                    f"use one of {', '.join(figures_of(now.row))}."
                )
            value = float(now.row[self.plan.metric])
            if not math.isfinite(value):
                self.outcome = "diverged"
            recent.append(value)
            if self.outcome == "complete" and first and self._behind(now.rounds, statistics.fmean(recent)):
                self.outcome, self.value = "pruned", statistics.fmean(recent)
            return self.outcome != "complete"

        return watch

    def _behind(self, rounds: int, value: float) -> bool:
        """Report a point of the learning curve, at a round that all trials report."""
        step = rounds * _CURVE // self.plan.num_rounds * self.plan.num_rounds // _CURVE
        if not self._step < step < self.plan.num_rounds:
            return False
        self._step = step
        self.trial.report(value, step)
        return self.trial.should_prune()
