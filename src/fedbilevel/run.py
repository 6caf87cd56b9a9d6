"""The only loop over outer iterations: measuring, recording, checkpoints, resume, stopping."""

from __future__ import annotations

import hashlib
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
from fedbilevel.data.clients import ClientData, Holdings
from fedbilevel.engines import simulate
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import CheckpointError, NonFiniteError, SettingError
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
    **options: Any,
) -> Result:
    """Run `num_iterations` outer iterations of `algorithm` on all clients in this process.

    measure_every: outer iterations between measurements (default: about twenty in the run); the last one is always measured.
    measure_growth: 0.05 lets that distance grow with the iterations done, to a twentieth of them: fine at the start, sparse later.
    cohort: who takes part, for algorithms with a server. network, averaging: who sends to whom and how averages are made, for algorithms between peers.
    schedule: how step sizes fall over the outer iterations (constant by default).
    record: a folder for configuration, metrics, checkpoints and the solution. resume: go on from the checkpoint in it.
    describe: more for the recorded configuration, e.g. how a task was built. options: device, strategy, chunk_size, drops.
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
    for label, value, least in (("num_iterations", num_iterations, 0), ("checkpoint_every", checkpoint_every, 1), ("measure_every", measure_every, 1)):
        if value is not None and value < least:
            raise SettingError(f"{label} is {value}, expected at least {least}.")
    if not 0 <= measure_growth <= 1:
        raise SettingError(f"measure_growth is {measure_growth}, expected a share between 0 and 1.")
    if resume and record is None:
        raise SettingError("resume was asked for without a record: give the folder of the run to go on with.")
    every = measure_every or max(1, num_iterations // 20)
    for warning in algorithm.check_scopes(problem.scopes):
        warnings.warn(warning, stacklevel=2)
    fed: Any = simulate(
        algorithm, problem, clients, seed=seed, cohort=cohort, network=network, averaging=averaging, batch_size=batch_size, dtype=dtype, **options
    )
    falling = schedule.checked()._asdict()
    book = Record(record) if record is not None else None
    identity = {**_identity(fed, batch_size, dtype), "schedule": falling} if book is not None else {}  # reads all data: only for a record
    plan = {"num_iterations": num_iterations, "measure_every": every, "measure_growth": measure_growth, "checkpoint_every": checkpoint_every}
    config = {"identity": identity, "run": plan,
              "versions": versions(), "engine": type(fed).__name__, **(describe or {})}  # fmt: skip
    rows: list[dict[str, Any]] = []
    start, spent = 0, 0.0
    if resume and book is not None:
        tensors, about = book.load()
        _same(identity, about["identity"], book)
        if num_iterations < about["iteration"]:
            raise SettingError(f"num_iterations is {num_iterations}, but the run in {book.path} has already done {about['iteration']}: ask for more.")
        rows = book.go_on_from(about["iteration"])
        state = fed.load_state_dict(tensors, about["state"], algorithm.State)
        fed.host.oracle.choices.update(about.get("ways", {}))  # measured again, another way might be chosen, which rounds otherwise
        start, spent = about["iteration"], about["seconds"]
        book.write_config(config)
    else:
        if book is not None:
            book.start(config)
        fed.begin(0)
        state = algorithm.init(fed)

    clock = time.perf_counter() - spent

    def save(iteration: int) -> None:
        if book is not None:
            tensors, plain = fed.state_dict(state)
            about = {"identity": identity, "iteration": iteration, "seconds": time.perf_counter() - clock, "state": plain, "ways": fed.host.oracle.choices}
            book.save(tensors, about)

    def measure(iteration: int) -> dict[str, Any]:
        row = {
            "iteration": iteration,
            "seconds": time.perf_counter() - clock,
            "megabytes": fed.ledger.megabytes,
            **fed.ledger.totals(),
            **fed.measure(state.x, state.y),
        }
        rows.append(row)
        if book is not None:
            book.add(row)
        return row

    due = _due(every, measure_growth, num_iterations)
    if start == 0:
        measure(0)
        save(0)
    saved = iteration = start
    stopped = "finished"
    with _interrupts() as interrupted:
        for iteration in range(start + 1, num_iterations + 1):
            now = algorithm.scaled(schedule(iteration))
            fed.begin(iteration, now)
            try:
                with torch.no_grad():  # a loss may hold a frozen model of its own
                    state = now.round(fed, state)
                    fed.host.check()
                _check_finite(state, iteration)
            except NonFiniteError as error:
                where = f" The last good checkpoint, of outer iteration {saved}, is in {book.path}." if book is not None else ""
                raise NonFiniteError(f"{error}{where}") from None
            last = iteration == num_iterations
            row = measure(iteration) if last or due(iteration) else None
            ask = [callback(Progress(iteration, num_iterations, fed.ledger.rounds, fed.ledger.megabytes, row)) for callback in callbacks]
            stopped = "interrupted" if interrupted() else "callback" if any(ask) else "finished"
            if stopped == "callback" and row is None:  # an interrupted run will be gone on with: what it measures must not depend on that
                measure(iteration)
            if stopped != "finished" or last or iteration % checkpoint_every == 0:
                save(iteration)
                saved = iteration
            if stopped != "finished":
                break
    x, y = fed.trees(state.x, upper=True), fed.trees(state.y, upper=False)
    if book is not None:
        book.save_solution({**_named("x", x), **_named("y", y)})
    return Result(x, y, rows, fed.ledger.totals(), iteration, stopped, book.path if book is not None else None, state)


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


def _identity(fed: Simulation | PeerSimulation, batch_size: BatchSize, dtype: torch.dtype) -> dict[str, Any]:
    """What a checkpoint must agree on with the run that reads it. The number of outer iterations may change."""
    problem, algorithm = fed.problem, fed.algorithm
    return {
        "algorithm": algorithm.name(),
        "settings": {name: list(value) if isinstance(value, tuple) else value for name, value in algorithm.asdict().items()},
        "problem": problem.name,
        "scopes": problem.scopes._asdict(),
        "weights": problem.weights,
        "x": fed.host.layout_x.describe(),
        "y": fed.host.layout_y.describe(),
        "num_clients": fed.num_clients,
        "dtype": str(dtype).removeprefix("torch."),
        "data": _fingerprint(fed.host.data),
        "losses": fed.host.losses_away(),
        "seed": fed.seed,
        **fed.identity(),
        "batch_size": dict(batch_size) if isinstance(batch_size, Mapping) else batch_size,
        "sampling": fed.host.sampling,
    }


def _fingerprint(data: ClientData) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for role in sorted(data.fields):
        digest.update(f"{role}:{data.sizes[role].tolist()}".encode())
        for name in sorted(data.fields[role]):
            tensor = data.fields[role][name].cpu().contiguous()
            digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


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


def _check_finite(state: Any, iteration: int) -> None:
    for name, value in state._asdict().items():
        if isinstance(value, Tensor) and not bool(torch.isfinite(value).all()):
            whose = "the server's" if value.ndim == 1 else f"client {int((~torch.isfinite(value)).any(1).nonzero()[0])}'s"
            raise NonFiniteError(f"{whose} {name!r} is not finite after outer iteration {iteration}: the steps are too long; lower the step sizes.")


def _named(prefix: str, value: Any) -> dict[str, Tensor]:
    if isinstance(value, Mapping):
        return {f"{prefix}.{name}": leaf for name, leaf in value.items()}
    return {f"{prefix}.client{i}.{name}": leaf for i, tree in enumerate(value) for name, leaf in tree.items()}


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C is remembered until the outer iteration ends; the second has its usual effect. Only the main thread may do this."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def remember(number: int, frame: FrameType | None) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)
        print("\nStopping after this outer iteration; Ctrl-C again stops at once and keeps the last checkpoint.", file=sys.stderr)

    signal.signal(signal.SIGINT, remember)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
