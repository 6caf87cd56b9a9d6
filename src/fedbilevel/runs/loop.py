"""The only loop over outer iterations: measurements, records, checkpoints, resuming, stopping."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedbilevel.engines.engine import Engine
from fedbilevel.engines.rounds import expect, reached, refusals, several_rounds
from fedbilevel.errors import BudgetError, NonFiniteError, SettingError
from fedbilevel.federation.algorithm import Algorithm
from fedbilevel.federation.auto_steps import resolved
from fedbilevel.federation.schedule import Schedule
from fedbilevel.runs.callbacks import Callback
from fedbilevel.runs.endings import STOPPED, followed, interrupts, with_remains
from fedbilevel.runs.pace import Due, Pace, checked_pace
from fedbilevel.runs.record import Record, named
from fedbilevel.runs.recovery import UNCHANGED, Recovery, check_finite, out_of_range
from fedbilevel.runs.result import Ending, Progress, Result
from fedbilevel.runs.resume import check_same, identity_of, versions


@dataclass
class Loop:
    """The loop of one run; with several ranks, only the first writes files and calls callbacks.

    overview: function that returns the clients' data by size and class, or None if they are
        unknown.
    more_figures: functions of the state whose results are added to every measurement.
    run_file: the run as TOML text, stored in the record.
    measure_steps: function that returns step sizes of "auto"; None: measure through the engine.
    recover: return to the best state with halved steps when the run goes wrong, and end it if that
        does not help; otherwise only the end of the run is judged.
    raises: raise an error for a value that is not finite, instead of going back; between sites such
        a value may be an attack, and the error names its site.
    explained: function that returns a context that explains errors of losses; callbacks run outside.
    """

    algorithm: Algorithm
    fed: Engine
    record: Record | None
    config: dict[str, Any]
    pace: Pace
    schedule: Schedule
    callbacks: Sequence[Callback]
    overview: Callable[[], dict[str, Any]] | None = None
    more_figures: Sequence[Callable[[Any], dict[str, float]]] = ()
    run_file: str | None = None
    measure_steps: Callable[[], dict[str, float]] | None = None
    recover: bool = True
    raises: bool = False
    explained: Callable[[], AbstractContextManager[None]] = nullcontext

    steps: dict[str, float] = field(init=False, default_factory=dict)  # the values of "auto"
    state: Any = field(init=False)
    rows: list[dict[str, Any]] = field(init=False, default_factory=list)
    iteration: int = field(init=False, default=0)
    saved: int = field(init=False, default=0)  # the outer iteration of the last checkpoint
    ending: Ending | None = field(init=False, default=None)  # None while the run continues
    complete: bool = field(init=False, default=True)  # whether clients hold the values of `state`
    returned: int | None = field(init=False, default=None)  # the outer iteration of the best state, if it is the result
    recovery: Recovery = field(init=False)
    _clock: float = field(init=False, default=0.0)  # the start of the run, without pauses and measurements

    def go(self, *, resume: bool = False, begin_at: int = 0) -> Result:
        """Run to the end.

        begin_at: outer iterations that count as done, for a peer that joins a running group.
        """
        group, fed = self.fed.group, self.fed
        self.recovery = Recovery(fed, acts=self.recover)
        seconds = self._restore() if resume and self.record is not None else self._start(begin_at)
        self.saved = self.iteration
        expect(fed, self.pace.num_iterations, self.pace.num_rounds)
        self._clock = time.perf_counter() - seconds
        if self.iteration == begin_at and not self.rows:
            if first := self.fed.judged(self._measure()):
                self.recovery.add(first, self.state)
            self._save()
        end = lambda: (self.ending or Ending(why=self.recovery.note()), self.iteration)
        following = followed(self.callbacks, self.record, self.config, self.rows, end)
        with (
            interrupts(group, saves=self.record is not None) as interrupted,
            with_remains(lambda: (self.iteration, self.saved), self.record, self.config),
            following if group.rank == 0 else nullcontext(),
        ):
            due = self.pace.due()
            while self.iteration < self.pace.num_iterations and not self.pace.over(fed.ledger.rounds):
                self._step(due, interrupted)
                if self.ending is not None:
                    break
            fed.finish(self.state)
            x, y = fed.trees(self.state.x, upper=True), fed.trees(self.state.y, upper=False)
            if self.record is not None and group.rank == 0:
                self.record.save_solution({**named("x", x), **named("y", y)})
            totals = fed.bill().totals()
            if end()[0].state in ("finished", "converged"):
                self.recovery.check_moved(x, self.iteration)
        path = self.record.path if self.record is not None else None
        return Result(
            x, y, self.rows, totals, self.iteration, end()[0], path, self.state, self.algorithm.name(), self.steps,
            returned=self.returned, uncaptured=refusals(fed),
        )  # fmt: skip

    def _step(self, due: Due, interrupted: Callable[[], bool]) -> None:
        """Do an outer iteration, or several that need no look; then measure, call the callbacks and save, if due."""
        fed, group, pace = self.fed, self.fed.group, self.pace
        before = fed.ledger.rounds
        self.iteration += 1
        self._iterate(self._unseen(due))
        last = self.iteration == pace.num_iterations or pace.over(fed.ledger.rounds)
        is_due = due(self.iteration, before, fed.ledger.rounds)
        row = self._measure() if self.ending is None and (last or is_due) else None
        progress = Progress(
            self.iteration, pace.num_iterations, fed.ledger.rounds, fed.ledger.megabytes, row, pace.num_rounds
        )
        if row is not None:
            self._judge(row, is_due, last)
        wishes = [callback(progress) for callback in self.callbacks] if group.rank == 0 else []
        stopped = STOPPED[group.largest(2 if interrupted() or fed.stop_asked() else 1 if any(wishes) else 0)]
        if stopped and self.ending is None:
            self.ending = Ending(stopped, self.recovery.note())
            if stopped == "callback" and row is None:  # not after Ctrl-C: a resumed run must have the same rows
                self._measure()
        if self.complete and (self.ending is not None or last or self.iteration % pace.checkpoint_every == 0):
            self._save()

    def _unseen(self, due: Due) -> Due:
        """Return the function that decides whether nobody needs the state after an outer iteration."""
        watched = not all(getattr(callback, "skips", False) for callback in self.callbacks)
        if watched or self.fed.group.size > 1 or self.fed.account is not None:
            return lambda *_: False
        return self.pace.unseen(due, saves=self.record is not None)

    def _iterate(self, unseen: Due) -> None:
        """Change the state by an outer iteration, or by several, or go back if a value is not finite.

        unseen: whether the next outer iteration may begin before the state after this one is known.
        """
        fed, recovery = self.fed, self.recovery
        at = lambda iteration: self.algorithm.scaled(recovery.factor * self.schedule(iteration))
        recovery.begin()
        before = None if fed.account is None else fed.state_dict(self.state)
        try:
            with fed.group.together(), self.explained():
                fed.begin(self.iteration, at(self.iteration))
                with torch.no_grad():  # a loss may contain a frozen model of its own
                    self.state = several_rounds(fed, at, self.state, self.iteration, unseen)
                    fed.check()
                self.iteration = reached(fed, self.iteration)
                check_finite(fed, self.state, self.iteration)
        except (NonFiniteError, OverflowError) as error:
            self.iteration = reached(fed, self.iteration)
            found = error if isinstance(error, NonFiniteError) else out_of_range(self.iteration)
            if self.raises or not self.recover:
                raise found from error
            self._go_back(str(found).split(":", 1)[0])
        except BudgetError as error:
            assert before is not None
            self.iteration -= 1
            self.ending = Ending("budget", str(error))
            state = fed.go_back(*before, self.algorithm.State)  # without the releases of the incomplete iteration
            self.state, self.complete = (self.state, False) if state is None else (state, True)
            if self.rows[-1]["iteration"] == self.iteration:  # its epsilon has grown since
                self.rows.pop()
                if self.record is not None and fed.group.rank == 0:
                    self.record.cut_after(self.iteration - 1)
            self._measure()

    def _judge(self, row: Mapping[str, Any], is_due: bool, last: bool) -> None:
        """Go back or end the run, as the measurement demands.

        A measurement that is taken only because the run ends must not change a resumed run.
        """
        recovery, row = self.recovery, self.fed.judged(row)
        if not row or not self.algorithm.minimises:
            return
        wrong = recovery.add(row, self.state) if is_due else ""
        if last and (wrong := wrong or recovery.health.wrong_at_end(row)):
            self._fail(wrong)
        elif wrong and self.recover:
            self._go_back(wrong)
        elif self.pace.until_converged and is_due and recovery.health.is_still():
            if recovery.health.is_stalled():
                self._fail(UNCHANGED, recovery.longer)
            else:
                self.ending = Ending("converged", recovery.note())

    def _go_back(self, why: str) -> None:
        state = self.recovery.attempt(why, self.algorithm.State)
        if state is not None:
            self.state = state
        else:
            self._fail(why)

    def _fail(self, why: str, advice: str = "") -> None:
        best = self.recovery.best(self.algorithm.State)
        if best is not None:
            self.state, self.returned = best, self.recovery.iteration
        self.ending = Ending("failed", self.recovery.failed(why, advice or self.recovery.shorter))

    def _start(self, begin_at: int) -> float:
        record = self.record
        clients = self.overview() if self.overview is not None and record is not None else None
        if record is not None and self.fed.group.rank == 0:
            record.start(self.config)
            if clients is not None:
                record.write_clients(clients)
            if self.run_file is not None:
                record.write_run_file(self.run_file)
        with self.explained():
            self.fed.begin(0)
            if self.algorithm.auto_names():
                with torch.no_grad():
                    measure = self.measure_steps or (lambda: resolved(self.algorithm, self.fed))
                    self._adopt(measure())
            self.state = self.algorithm.init(self.fed)
        self.iteration = begin_at
        return 0.0

    def _adopt(self, steps: Mapping[str, float]) -> None:
        """Replace step sizes of "auto" by measured values, which the record then shows as well."""
        self.steps = dict(steps)
        self.algorithm = dataclasses.replace(self.algorithm, **steps)
        self.fed.adopt(self.algorithm)
        if steps:
            self.config = {**self.config, "steps": self.steps}
            if self.record is not None and self.fed.group.rank == 0:
                self.record.write_config(self.config)

    def _restore(self) -> float:
        """Load the last checkpoint at the first rank and send it to the others.

        Returns the seconds that the run has taken so far.
        """
        group, fed, record = self.fed.group, self.fed, self.record
        assert record is not None
        tensors: Mapping[str, Tensor] = {}

        def read() -> dict[str, Any]:
            nonlocal tensors
            tensors, about = record.load()
            check_same(self.config["identity"], about["identity"], record)
            done, asked = about["iteration"], self.pace.num_iterations
            if asked < done:
                what = "num_rounds" if self.pace.num_rounds == asked else "num_iterations"
                raise SettingError(
                    f"{what} is {asked}, but the run in {record.path} has already done {done}: ask for more."
                )
            return {**about, "rows": record.cut_after(done)}

        about = group.told(read)
        told = group.told_tensors(lambda: tensors)
        self.state = fed.load_state_dict(told, about["state"], self.algorithm.State)
        fed.ways.update(about.get("ways", {}))
        if group.rank == 0:
            record.write_config(self.config)
        self._adopt(about.get("steps", {}))
        if group.rank == 0 and self.run_file is not None:
            record.write_run_file(self.run_file)
        self.rows, self.iteration = about["rows"], about["iteration"]
        if "recovery" in about:
            self.recovery.load_state_dict(told, about["recovery"], self.state)
        return float(about["seconds"])

    def _save(self) -> None:
        now = time.perf_counter()
        if self.record is not None:
            self.fed.commit()
            tensors, plain = self.fed.state_dict(self.state)
            best, recovery = self.recovery.state_dict()
            about = {
                "identity": self.config["identity"],
                "iteration": self.iteration,
                "seconds": now - self._clock,
                "state": plain,
                "ways": self.fed.ways,
                "steps": self.steps,
                "recovery": recovery,
            }
            bill = self.fed.bill()
            if self.fed.group.rank == 0:
                self.record.save({**tensors, **best}, about)
                self.saved = self.iteration
                self.record.write_ledger(bill.asdict())
            self.fed.group.meet()  # now all ranks know that the checkpoint exists
        self.saved = self.iteration
        self._clock += time.perf_counter() - now

    def _measure(self) -> dict[str, Any]:
        now = time.perf_counter()
        with self.explained():
            row = {
                "iteration": self.iteration,
                "seconds": now - self._clock,
                "megabytes": self.fed.ledger.megabytes,
                **({} if self.fed.account is None else {"epsilon": self.fed.account.epsilon()}),
                **self.fed.bill().totals(),
                **self.fed.measure(self.state.x, self.state.y),
                **{name: value for figures in self.more_figures for name, value in figures(self.state).items()},
            }
        self.rows.append(row)
        if self.record is not None and self.fed.group.rank == 0:
            self.record.add(row)
        self._clock += time.perf_counter() - now  # measuring time is excluded
        return row


def run_between(
    algorithm: Algorithm,
    fed: Engine,
    *,
    engine: str,
    num_iterations: int,
    num_rounds: int | None = None,
    measure_every: int | None,
    schedule: Schedule,
    record: Record,
    resume: bool,
    begin_at: int = 0,
    callbacks: Sequence[Callback],
    describe: Mapping[str, Any],
    recover: bool,
) -> Result:
    """Run at a server without data, or at one peer, with a checkpoint per outer iteration.

    recover: go back when the run goes wrong; a peer alone cannot.
    """
    pace = checked_pace(num_iterations, num_rounds, measure_every)
    config = configuration(fed, pace, schedule, engine=engine, describe=describe)
    loop = Loop(algorithm, fed, record, config, pace, schedule, callbacks, recover=recover, raises=True)
    return loop.go(resume=resume, begin_at=begin_at)


def configuration(
    fed: Engine,
    pace: Pace,
    schedule: Schedule,
    *,
    engine: str,
    describe: Mapping[str, Any] | None,
    identified: bool = True,
) -> dict[str, Any]:
    """Return the configuration of a run for its record.

    identified: include the identity, which needs a pass over all data.
    """
    falling = schedule.checked()._asdict()
    identity = {**identity_of(fed, fed.batch_size, fed.dtype), "schedule": falling} if identified else {}
    return {
        "identity": identity,
        "run": pace._asdict(),
        "versions": versions(),
        "engine": engine,
        "ranks": fed.group.size,
        **(describe or {}),
    }
