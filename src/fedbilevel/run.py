"""The only loop over outer iterations: measuring, recording, checkpoints, resume, stopping."""

from __future__ import annotations

import math
import platform
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

import fedbilevel
from fedbilevel import discovery
from fedbilevel.averaging import Averaging
from fedbilevel.clients import BatchSize
from fedbilevel.data.clients import Holdings
from fedbilevel.engines import group_of, simulate
from fedbilevel.engines.distributed import TIMEOUT
from fedbilevel.engines.group import Engine, Group
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.engines.peers import Peer
from fedbilevel.engines.simulation import Simulation
from fedbilevel.engines.sites import Sites
from fedbilevel.errors import CheckpointError, NonFiniteError, RankLostError, SettingError
from fedbilevel.federation import Algorithm, Cohort, PeerAlgorithm, ServerAlgorithm
from fedbilevel.network import AnyNetwork
from fedbilevel.problem import Problem
from fedbilevel.record import Record
from fedbilevel.steps import Schedule


class Progress(NamedTuple):
    """What a callback sees after every outer iteration. `row` is the measurement, if one was taken."""

    iteration: int
    num_iterations: int
    rounds: int
    megabytes: float
    row: Mapping[str, Any] | None


Callback = Callable[[Progress], bool | None]  # True stops the run
STOPPED = ("finished", "callback", "interrupted")  # why a run ended; of what several ranks say, the last counts


class EarlyStopping:
    """A callback: stops after `patience` measurements without a higher `metric`. `best` is the measurement to report (the first of equals)."""

    def __init__(self, metric: str, *, patience: int) -> None:
        self.metric, self.patience, self.waited = metric, patience, 0
        self.best: Mapping[str, Any] = {}

    def __call__(self, now: Progress) -> bool:
        if now.row is not None:
            if self.metric not in now.row:
                raise SettingError(f"early stopping watches {self.metric!r}, which this problem does not measure: use one of {', '.join(now.row)}.")
            better = not self.best or now.row[self.metric] > self.best[self.metric]
            self.best, self.waited = (now.row, 0) if better else (self.best, self.waited + 1)
        return self.waited >= self.patience


@dataclass(frozen=True)
class Result:
    """x and y in the user's structure (one dict per client where they are private or local, and between peers)."""

    x: Any
    y: Any
    rows: list[dict[str, Any]]
    ledger: dict[str, int]
    iteration: int
    stopped: str  # "finished", "callback" or "interrupted"
    path: Path | None = None
    state: Any = field(default=None, repr=False)


def run(
    algorithm: Algorithm | str,
    problem: Problem,
    clients: Sequence[Holdings],
    *,
    num_iterations: int,
    seed: int = 0,
    cohort: Cohort = Cohort(),
    network: AnyNetwork | None = None,
    averaging: Averaging | None = None,
    batch_size: BatchSize = None,
    dtype: torch.dtype = torch.float32,
    measure_every: int | None = None,
    measure_growth: float = 0.0,
    checkpoint_every: int = 10,
    schedule: Schedule = Schedule(),
    record: Path | str | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    describe: Mapping[str, Any] | None = None,
    engine: Engine = "simulation",
    timeout: float = TIMEOUT,
    **options: Any,
) -> Result:
    """Run `num_iterations` outer iterations of `algorithm` on all clients: in this process, or divided among those that torchrun started.

    measure_every: outer iterations between measurements (default: about twenty in the run); the last one is always measured.
    measure_growth: 0.05 lets that distance grow with the iterations done, to a twentieth of them: fine at the start, sparse later.
    cohort: who takes part, for algorithms with a server. network, averaging: who sends to whom and how averages are made, for algorithms between peers.
    schedule: how step sizes fall over the outer iterations (constant by default).
    record: a folder for configuration, metrics, checkpoints and the solution. resume: go on from the checkpoint in it.
    describe: more for the recorded configuration, e.g. how a task was built. options: device, strategy, chunk_size, drops.
    engine: "simulation", or "distributed" under torchrun, where every rank calls this with the same arguments: all get the result, rank 0 alone writes the
    record and calls callbacks. timeout: seconds after which a rank that does not answer is given up.
    Ctrl-C finishes the outer iteration, writes a checkpoint and returns; a second one stops at once and leaves the last checkpoint.
    """
    if isinstance(algorithm, str):
        algorithm = discovery.algorithm(algorithm)()
    if not isinstance(algorithm, ServerAlgorithm | PeerAlgorithm):
        raise SettingError(f"algorithm is {algorithm!r}, expected an algorithm with its settings, e.g. FedBiO(lr_upper=0.01), or a name.")
    for label, given, kind in (("cohort", cohort, Cohort), ("schedule", schedule, Schedule), ("num_iterations", num_iterations, int)):
        if not isinstance(given, kind):
            raise SettingError(f"{label} is {given!r}, expected {'a whole number' if kind is int else f'a {kind.__name__}, e.g. {kind()!r}'}.")
    if not isinstance(network, AnyNetwork | None) or not isinstance(averaging, Averaging | None):
        raise SettingError(f"network is {network!r} and averaging {averaging!r}, expected e.g. Network(kind='ring') and Averaging(num_steps=20), or None.")
    plan = _plan(num_iterations, measure_every, measure_growth, checkpoint_every)
    if resume and record is None:
        raise SettingError("resume was asked for without a record: give the folder of the run to go on with.")
    for warning in algorithm.check_scopes(problem.scopes):
        warnings.warn(warning, stacklevel=2)
    group = group_of(engine, options.get("device", "cpu"), timeout)
    with group.together():
        fed: Any = simulate(
            algorithm, problem, clients, seed=seed, cohort=cohort, network=network, averaging=averaging, batch_size=batch_size, dtype=dtype, group=group,
            **{**options, "device": group.device(options.get("device", "cpu"))},
        )  # fmt: skip
        falling = schedule.checked()._asdict()
        identity = {**_identity(fed, batch_size, dtype), "schedule": falling} if record is not None else {}  # reads all data: only for a record
        config = {"identity": identity, "run": plan._asdict(),
                  "versions": versions(), "engine": group.engine, "ranks": group.size, **(describe or {})}  # fmt: skip
        return _go_through(algorithm, fed, Record(record) if record is not None else None, config, resume, plan, schedule, callbacks)


def run_between(
    algorithm: Algorithm,
    fed: Sites | Peer,
    *,
    engine: str,
    num_iterations: int,
    measure_every: int | None,
    schedule: Schedule,
    record: Record,
    resume: bool,
    begin_at: int = 0,
    callbacks: Sequence[Callback],
    describe: Mapping[str, Any],
) -> Result:
    """The same outer iterations at a server that has no data, or at one peer of many, with a checkpoint after each of them. begin_at: the number of outer
    iterations that count as done for one that comes new to others who have done them."""
    plan = _plan(num_iterations, measure_every, 0.0, 1)
    identity = {**_identity(fed, fed.batch_size, fed.dtype), "schedule": schedule.checked()._asdict()}
    config = {"identity": identity, "run": plan._asdict(), "versions": versions(), "engine": engine, "ranks": 1, **describe}
    return _go_through(algorithm, fed, record, config, resume, plan, schedule, callbacks, begin_at)


class _Plan(NamedTuple):
    num_iterations: int
    measure_every: int
    measure_growth: float
    checkpoint_every: int


def _plan(num_iterations: int, measure_every: int | None, measure_growth: float, checkpoint_every: int) -> _Plan:
    for label, value, least in (("num_iterations", num_iterations, 0), ("checkpoint_every", checkpoint_every, 1), ("measure_every", measure_every, 1)):
        if value is not None and value < least:
            raise SettingError(f"{label} is {value}, expected at least {least}.")
    if not 0 <= measure_growth <= 1:
        raise SettingError(f"measure_growth is {measure_growth}, expected a share between 0 and 1.")
    return _Plan(num_iterations, measure_every or max(1, num_iterations // 20), measure_growth, checkpoint_every)


def _go_through(
    algorithm: Algorithm,
    fed: Any,
    book: Record | None,
    config: dict[str, Any],
    resume: bool,
    plan: _Plan,
    schedule: Schedule,
    callbacks: Sequence[Callback],
    begin_at: int = 0,
) -> Result:
    """The outer iterations. Of several ranks, the first alone has to do with files and callbacks."""
    group, identity, num_iterations = fed.group, config["identity"], plan.num_iterations
    due = _due(plan.measure_every, plan.measure_growth, num_iterations)
    rows: list[dict[str, Any]] = []
    start, spent = begin_at, 0.0
    if resume and book is not None:
        tensors: Mapping[str, Tensor] = {}

        def read() -> dict[str, Any]:
            nonlocal tensors
            tensors, about = book.load()
            _same(identity, about["identity"], book)
            if num_iterations < about["iteration"]:
                raise SettingError(f"num_iterations is {num_iterations}, but the run in {book.path} has already done {about['iteration']}: ask for more.")
            return {**about, "rows": book.go_on_from(about["iteration"])}

        about = group.told(read)
        rows, start, spent = about["rows"], about["iteration"], about["seconds"]
        state = fed.load_state_dict(group.told_tensors(lambda: tensors), about["state"], algorithm.State)
        fed.ways.update(about.get("ways", {}))
        if group.rank == 0:
            book.write_config(config)
    else:
        if book is not None and group.rank == 0:
            book.start(config)
        fed.begin(0)
        state = algorithm.init(fed)

    clock = time.perf_counter() - spent

    def save(iteration: int) -> None:
        if book is not None:
            fed.commit()
            tensors, plain = fed.state_dict(state)
            about = {"identity": identity, "iteration": iteration, "seconds": time.perf_counter() - clock, "state": plain, "ways": fed.ways}
            if group.rank == 0:
                book.save(tensors, about)
            group.meet()  # now all know that it is there

    def measure(iteration: int) -> dict[str, Any]:
        row = {
            "iteration": iteration,
            "seconds": time.perf_counter() - clock,
            "megabytes": fed.ledger.megabytes,
            **fed.bill().totals(),
            **fed.measure(state.x, state.y),
        }
        rows.append(row)
        if book is not None and group.rank == 0:
            book.add(row)
        return row

    if start == begin_at and not rows:
        measure(start)
        save(start)
    saved = iteration = start
    stopped = "finished"
    with _interrupts(group) as interrupted, _left(lambda: (iteration, saved), book, config):
        for iteration in range(start + 1, num_iterations + 1):
            now = algorithm.scaled(schedule(iteration))
            fed.begin(iteration, now)
            with group.together():
                with torch.no_grad():  # a loss may hold a frozen model of its own
                    state = now.round(fed, state)
                    fed.check()
                _check_finite(fed, state, iteration)
            last = iteration == num_iterations
            row = measure(iteration) if last or due(iteration) else None
            here = Progress(iteration, num_iterations, fed.ledger.rounds, fed.ledger.megabytes, row)
            ask = [callback(here) for callback in callbacks] if group.rank == 0 else []
            stopped = STOPPED[group.largest(2 if interrupted() or fed.stop_asked() else 1 if any(ask) else 0)]
            if stopped == "callback" and row is None:  # an interrupted run will be gone on with: what it measures must not depend on that
                measure(iteration)
            if stopped != "finished" or last or iteration % plan.checkpoint_every == 0:
                save(iteration)
                saved = iteration
            if stopped != "finished":
                break
        fed.finish(state)
        x, y = fed.trees(state.x, upper=True), fed.trees(state.y, upper=False)
        if book is not None and group.rank == 0:
            book.save_solution({**_named("x", x), **_named("y", y)})
        totals = fed.bill().totals()
    return Result(x, y, rows, totals, iteration, stopped, book.path if book is not None else None, state)


@contextmanager
def _left(when: Callable[[], tuple[int, int]], book: Record | None, config: Mapping[str, Any]) -> Iterator[None]:
    """Errors that end a run for good also say what is left of it. when: the outer iteration, and that of the last checkpoint."""
    try:
        yield
    except NonFiniteError as error:
        where = f" The last good checkpoint, of outer iteration {when()[1]}, is in {book.path}." if book is not None else ""
        raise NonFiniteError(f"{error}{where}") from None
    except RankLostError as error:
        command = f"torchrun --nproc-per-node {config['ranks']} -m fedbilevel resume {book.path}" if book is not None and "task" in config else ""
        what = f"the last checkpoint, of outer iteration {when()[1]}, is in {book.path}" if book is not None else "nothing was recorded"
        mend = f"go on with {command}" if command else "go on with the same call and resume=True" if book is not None else "give a record to be able to go on"
        lost = RankLostError(f"{error} in outer iteration {when()[0]}; {what}: {mend}")
        lost.speaks = error.speaks
        raise lost from None


def _due(every: int, growth: float, num_iterations: int) -> Callable[[int], bool]:
    """Which outer iterations are measured: a function of their number alone, so that a resumed run measures the same."""
    if not growth:
        return lambda iteration: iteration % every == 0
    chosen, iteration = set(), every
    while iteration <= num_iterations:
        chosen.add(iteration)
        iteration = max(iteration + every, -(-math.ceil(iteration * (1 + growth)) // every) * every)
    return chosen.__contains__


def versions() -> dict[str, str]:
    return {"fedbilevel": fedbilevel.__version__, "torch": torch.__version__, "numpy": numpy.__version__, "python": platform.python_version(),
            "platform": platform.system(), "machine": platform.machine()}  # fmt: skip


def _identity(fed: Simulation | PeerSimulation | Sites | Peer, batch_size: BatchSize, dtype: torch.dtype) -> dict[str, Any]:
    """What a checkpoint must agree on with the run that reads it. The number of outer iterations may change."""
    problem, algorithm = fed.problem, fed.algorithm
    return {
        "algorithm": algorithm.name(),
        "settings": {name: list(value) if isinstance(value, tuple) else value for name, value in algorithm.asdict().items()},
        "problem": problem.name,
        "scopes": problem.scopes._asdict(),
        "weights": problem.weights,
        "num_clients": fed.num_clients,
        "dtype": str(dtype).removeprefix("torch."),
        "seed": fed.seed,
        **fed.identity(),
        "batch_size": dict(batch_size) if isinstance(batch_size, Mapping) else batch_size,
        "sampling": fed.sampling,
    }


def _same(mine: Mapping[str, Any], theirs: Mapping[str, Any], book: Record) -> None:
    mend = "use the same, or start a new run"
    for name in mine:
        if name == "settings" and mine["algorithm"] == theirs.get("algorithm"):
            given, stored = mine[name], theirs.get(name, {})
            for key in sorted({*given, *stored}):
                if given.get(key) != stored.get(key):
                    raise CheckpointError(f"the checkpoint in {book.path} has {key} = {stored.get(key)!r}, here it is {given.get(key)!r}: {mend}.")
        elif name == "losses" and len(theirs.get(name, ())) == 2:  # another device or strategy may round differently
            if not all(str(a) == str(b) or math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6) for a, b in zip(mine[name], theirs[name], strict=True)):
                raise CheckpointError(
                    f"the checkpoint in {book.path} belongs to another problem: its losses at a fixed point are {theirs[name]}, here {mine[name]}; {mend}."
                )
        elif mine[name] != theirs.get(name, "replacement" if name == "sampling" else None):  # older checkpoints do not say how they sampled
            raise CheckpointError(
                f"the checkpoint in {book.path} belongs to another run: its {name} is {theirs.get(name)!r}, here it is {mine[name]!r}; {mend}."
            )


def _check_finite(fed: Any, state: Any, iteration: int) -> None:
    for name, value in state._asdict().items():
        if isinstance(value, Tensor) and not bool(torch.isfinite(value).all()):
            whose = "the server's" if value.ndim == 1 else f"client {fed.client_of(int((~torch.isfinite(value)).any(1).nonzero()[0]))}'s"
            raise NonFiniteError(f"{whose} {name!r} is not finite after outer iteration {iteration}: the steps are too long; lower the step sizes.")


def _named(prefix: str, value: Any) -> dict[str, Tensor]:
    if value is None:  # it never left the sites
        return {}
    if isinstance(value, Mapping):
        return {f"{prefix}.{name}": leaf for name, leaf in value.items()}
    return {f"{prefix}.client{i}.{name}": leaf for i, tree in enumerate(value) for name, leaf in tree.items()}


@contextmanager
def _interrupts(group: Group) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C is remembered until the outer iteration ends; the second has its usual effect. Only the main thread may do this.

    Any of several ranks may be asked. When one of them dies, torchrun asks the others by SIGTERM to end, which must not cut off what they have to say.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked = threading.Event()
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, *([signal.SIGTERM] if group.size > 1 else []))}

    def remember(number: int, frame: FrameType | None) -> None:
        asked.set()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, before[number])
            if group.rank == 0:
                print("\nStopping after this outer iteration; Ctrl-C again stops at once and keeps the last checkpoint.", file=sys.stderr)

    for number in before:
        signal.signal(number, remember)
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
