"""The only loop over outer iterations: measurements, records, checkpoints, resuming, stopping."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedbilevel.engines.engine import Engine
from fedbilevel.errors import NonFiniteError, SettingError
from fedbilevel.federation.algorithm import Algorithm
from fedbilevel.federation.schedule import Schedule
from fedbilevel.runs.callbacks import Callback
from fedbilevel.runs.endings import STOPPED, followed, interrupts, with_remains
from fedbilevel.runs.pace import Pace, checked_pace
from fedbilevel.runs.record import Record
from fedbilevel.runs.result import Progress, Result
from fedbilevel.runs.resume import check_same, identity_of, versions


@dataclass
class Loop:
    """The loop of one run; with several ranks, only the first writes files and calls callbacks.

    overview: function that returns the clients' data by size and class, or None if they are
        unknown.
    more_figures: functions of the state whose results are added to every measurement.
    run_file: the run as TOML text, stored in the record.
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

    state: Any = field(init=False)
    rows: list[dict[str, Any]] = field(init=False, default_factory=list)
    iteration: int = field(init=False, default=0)
    saved: int = field(init=False, default=0)  # the outer iteration of the last checkpoint
    stopped: str = field(init=False, default="finished")
    _clock: float = field(init=False, default=0.0)  # the start of the run, without pauses and measurements

    def go(self, *, resume: bool = False, begin_at: int = 0) -> Result:
        """Run to the end.

        begin_at: outer iterations that count as done, for a peer that joins a running group.
        """
        group, fed = self.fed.group, self.fed
        seconds = self._restore() if resume and self.record is not None else self._start(begin_at)
        self.saved = self.iteration
        self._clock = time.perf_counter() - seconds
        if self.iteration == begin_at and not self.rows:
            self._measure()
            self._save()
        following = followed(
            self.callbacks, self.record, self.config, self.rows, lambda: (self.stopped, self.iteration)
        )
        with (
            interrupts(group) as interrupted,
            with_remains(lambda: (self.iteration, self.saved), self.record, self.config),
            following if group.rank == 0 else nullcontext(),
        ):
            due = self.pace.due()
            while self.iteration < self.pace.num_iterations and not self.pace.over(fed.ledger.rounds):
                self._step(due, interrupted)
                if self.stopped != "finished":
                    break
            fed.finish(self.state)
            x, y = fed.trees(self.state.x, upper=True), fed.trees(self.state.y, upper=False)
            if self.record is not None and group.rank == 0:
                self.record.save_solution({**_named("x", x), **_named("y", y)})
            totals = fed.bill().totals()
        path = self.record.path if self.record is not None else None
        return Result(x, y, self.rows, totals, self.iteration, self.stopped, path, self.state, self.algorithm.name())

    def _step(self, due: Callable[[int, int, int], bool], interrupted: Callable[[], bool]) -> None:
        """Do one outer iteration; then measure, call the callbacks and save, each if due."""
        fed, group, pace = self.fed, self.fed.group, self.pace
        before = fed.ledger.rounds
        self.iteration += 1
        now = self.algorithm.scaled(self.schedule(self.iteration))
        fed.begin(self.iteration, now)
        with group.together():
            with torch.no_grad():  # a loss may contain a frozen model of its own
                self.state = now.round(fed, self.state)
                fed.check()
            _check_finite(fed, self.state, self.iteration)
        last = self.iteration == pace.num_iterations or pace.over(fed.ledger.rounds)
        row = self._measure() if last or due(self.iteration, before, fed.ledger.rounds) else None
        progress = Progress(
            self.iteration, pace.num_iterations, fed.ledger.rounds, fed.ledger.megabytes, row, pace.num_rounds
        )
        wishes = [callback(progress) for callback in self.callbacks] if group.rank == 0 else []
        reason = 2 if interrupted() or fed.stop_asked() else 1 if any(wishes) else 0
        self.stopped = STOPPED[group.largest(reason)]
        if self.stopped == "callback" and row is None:  # not after Ctrl-C: a resumed run must have the same rows
            self._measure()
        if self.stopped != "finished" or last or self.iteration % pace.checkpoint_every == 0:
            self._save()

    def _start(self, begin_at: int) -> float:
        record = self.record
        clients = self.overview() if self.overview is not None and record is not None else None
        if record is not None and self.fed.group.rank == 0:
            record.start(self.config)
            if clients is not None:
                record.write_clients(clients)
            if self.run_file is not None:
                record.write_run_file(self.run_file)
        self.fed.begin(0)
        self.state = self.algorithm.init(self.fed)
        self.iteration = begin_at
        return 0.0

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
        self.state = fed.load_state_dict(group.told_tensors(lambda: tensors), about["state"], self.algorithm.State)
        fed.ways.update(about.get("ways", {}))
        if group.rank == 0:
            record.write_config(self.config)
            if self.run_file is not None:
                record.write_run_file(self.run_file)
        self.rows, self.iteration = about["rows"], about["iteration"]
        return float(about["seconds"])

    def _save(self) -> None:
        now = time.perf_counter()
        if self.record is not None:
            self.fed.commit()
            tensors, plain = self.fed.state_dict(self.state)
            about = {
                "identity": self.config["identity"],
                "iteration": self.iteration,
                "seconds": now - self._clock,
                "state": plain,
                "ways": self.fed.ways,
            }
            bill = self.fed.bill()
            if self.fed.group.rank == 0:
                self.record.save(tensors, about)
                self.saved = self.iteration
                self.record.write_ledger(bill.asdict())
            self.fed.group.meet()  # now all ranks know that the checkpoint exists
        self.saved = self.iteration
        self._clock += time.perf_counter() - now

    def _measure(self) -> dict[str, Any]:
        now = time.perf_counter()
        row = {
            "iteration": self.iteration,
            "seconds": now - self._clock,
            "megabytes": self.fed.ledger.megabytes,
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
) -> Result:
    """Run at a server without data, or at one peer, with a checkpoint per outer iteration."""
    pace = checked_pace(num_iterations, num_rounds, measure_every)
    config = configuration(fed, pace, schedule, engine=engine, describe=describe)
    return Loop(algorithm, fed, record, config, pace, schedule, callbacks).go(resume=resume, begin_at=begin_at)


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


def _check_finite(fed: Engine, state: Any, iteration: int) -> None:
    for name, value in state._asdict().items():
        if isinstance(value, Tensor) and not bool(torch.isfinite(value).all()):
            whose = "the server's"
            if value.ndim > 1:
                whose = f"client {fed.client_of(int((~torch.isfinite(value)).any(1).nonzero()[0]))}'s"
            raise NonFiniteError(
                f"{whose} {name!r} is not finite after outer iteration {iteration}: the steps are too long; "
                "lower the step sizes."
            )


def _named(prefix: str, value: Any) -> dict[str, Tensor]:
    if value is None:  # it never left the sites
        return {}
    if isinstance(value, Mapping):
        return {f"{prefix}.{name}": leaf for name, leaf in value.items()}
    return {f"{prefix}.client{i}.{name}": leaf for i, tree in enumerate(value) for name, leaf in tree.items()}
