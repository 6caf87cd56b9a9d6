"""Runs of a task's rivals: plain ways to the same end, chosen by validation samples."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Any

from fedbilevel.columns import COLUMNS, figures_of
from fedbilevel.errors import NonFiniteError, ProblemError, ProblemWarning
from fedbilevel.runs.callbacks import Callback
from fedbilevel.runs.endings import whole
from fedbilevel.runs.result import Result
from fedbilevel.runs.solve import solve
from fedbilevel.tasks.rival import Rival, Way

_PAID = ("seconds", "megabytes", "rounds", "messages", *COLUMNS)  # columns that add up over runs


@dataclasses.dataclass(frozen=True)
class RivalOutcome:
    """The answer of a rival.

    chosen: label of the way that validation samples chose.
    way, result: the last run, whose x, y and figures are the answer.
    rows: measurements of the last run; their costs include all runs before it.
    tried: upper loss of every way at its end, by label.
    unseen: the chosen run on training samples alone; None if the only way was refitted at once.
    failed: why no way has an answer, or None.
    """

    title: str
    chosen: str
    way: Way
    result: Result | None
    rows: list[dict[str, Any]]
    tried: Mapping[str, float]
    unseen: Result | None = None
    failed: str | None = None

    @property
    def figures(self) -> dict[str, float]:
        last = self.rows[-1] if self.rows else {}
        return {name: float(last[name]) for name in figures_of(last)}

    @property
    def costs(self) -> dict[str, float]:
        """Return rounds, megabytes and seconds of all runs together."""
        last = self.rows[-1] if self.rows else {}
        return {name: float(last.get(name, 0)) for name in ("rounds", "megabytes", "seconds")}


def run_rival(
    rival: Rival, *, num_rounds: int, callbacks: tuple[Callback, ...] = (), always: bool = False, **options: Any
) -> RivalOutcome:
    """Run every way for `num_rounds`, choose the lowest upper loss, and refit if the rival does.

    always: run a single way too, although there is no choice, so that `unseen` is there.
    options: further keywords of `solve`, such as seed, batch_size and cohort.
    """
    if not rival.ways:
        raise ProblemError(f"the rival {rival.title!r} has no way: give at least one run.")
    ways = rival.ways if rival.refit is None or len(rival.ways) > 1 or always else {}  # a single way needs no choice
    found: dict[str, list[tuple[Way, Result | str]]] = {}
    for label, way in ways.items():
        found[label] = _runs(way, callbacks, num_rounds, options, short=rival.refit is not None)
    tried = {label: _loss(runs[-1][1]) for label, runs in found.items()}
    chosen = min(tried, key=tried.__getitem__) if tried else next(iter(rival.ways))
    unseen = found[chosen][-1][1] if chosen in found else None
    if rival.refit is not None:
        runs = _runs(rival.refit(chosen), callbacks, num_rounds, options, short=False)
    else:
        runs = found.pop(chosen)
    *first, (last, answer) = runs
    before = [one for own in (first, *found.values()) for _, one in own if isinstance(one, Result)]
    apart = unseen if isinstance(unseen, Result) and rival.refit is not None else None
    if isinstance(answer, str):
        return RivalOutcome(rival.title, chosen, last, None, [], tried, apart, answer)
    failed = answer.ending.why if answer.stopped == "failed" else None
    rows = [*answer.rows[:-1], answer.final]
    return RivalOutcome(rival.title, chosen, last, answer, [_paid(row, before) for row in rows], tried, apart, failed)


def _runs(
    way: Way, callbacks: tuple[Callback, ...], num_rounds: int, options: Mapping[str, Any], *, short: bool
) -> list[tuple[Way, Result | str]]:
    """Return the runs of a way, which ends at the first that diverges."""
    result = _run(way, callbacks, num_rounds, options, short=short or way.then is not None)
    if way.then is None or isinstance(result, str) or result.stopped == "failed":
        return [(way, result)]
    return [(way, result), *_runs(way.then(result), callbacks, num_rounds, options, short=short)]


def _run(
    way: Way, callbacks: tuple[Callback, ...], num_rounds: int, options: Mapping[str, Any], *, short: bool
) -> Result | str:
    """Return the result of one run, or why it diverged.

    short: measure at the end alone.
    """
    own = {"num_rounds": num_rounds, "residuals": False, **options, "callbacks": callbacks, **way.settings}
    if short:
        own["measure_every"] = num_rounds
    with warnings.catch_warnings():  # validation samples are among the training samples on purpose
        warnings.simplefilter("ignore", ProblemWarning)
        try:
            return whole(solve(way.problem, way.clients, way.algorithm, **own))
        except NonFiniteError as error:
            return str(error)


def _loss(result: Result | str) -> float:
    """Return the upper loss of a run, and infinity if it failed."""
    if isinstance(result, str) or result.stopped == "failed":
        return math.inf
    loss = float(result.final["upper_loss"])
    return loss if math.isfinite(loss) else math.inf


def _paid(row: Mapping[str, Any], before: list[Result]) -> dict[str, Any]:
    more = {name: sum(one.final[name] for one in before) for name in _PAID if name in row}
    return {name: value + more.get(name, 0) for name, value in row.items()}
