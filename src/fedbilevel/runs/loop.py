"""The only loop over outer iterations: measuring, recording, checkpoints, resume, stopping."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel import discovery
from fedbilevel.engines import group_of, simulate
from fedbilevel.engines.distributed import TIMEOUT
from fedbilevel.engines.engine import Engine, Regrouped
from fedbilevel.engines.ranks import EngineName, Group
from fedbilevel.errors import (
    CheckpointError,
    FedBilevelError,
    NonFiniteError,
    RankLostError,
    SettingError,
    UnknownNameError,
)
from fedbilevel.federation.algorithm import Algorithm, Cohort, PeerAlgorithm, ServerAlgorithm
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.clients import BatchSize
from fedbilevel.federation.network import AnyNetwork
from fedbilevel.federation.schedule import Schedule
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.problem.validation import check_kind
from fedbilevel.runs.callbacks import Callback, Follower
from fedbilevel.runs.options import torch_device
from fedbilevel.runs.record import Record
from fedbilevel.runs.result import Progress, Result
from fedbilevel.runs.resume import check_same, identity_of, versions
from fedbilevel.settings import whole_number

_MEASUREMENTS = 20  # in a run, about, where nothing else is said


OPTIONS = ("device", "strategy", "chunk_size", "drops", "sampling", "ids")  # of the engines
STOPPED = ("finished", "callback", "interrupted")  # why a run ended; of what several ranks say, the last counts


def run(
    algorithm: Algorithm | str,
    problem: Problem,
    clients: Sequence[Holdings],
    *,
    num_iterations: int | None = None,
    num_rounds: int | None = None,
    seed: int = 0,
    cohort: Cohort = Cohort(),
    network: AnyNetwork | None = None,
    averaging: Averaging | None = None,
    batch_size: BatchSize = None,
    dtype: torch.dtype = torch.float32,
    measure_every: int | None = None,
    measure_growth: float = 0.0,
    residuals: bool = False,
    stationarity: bool = False,
    checkpoint_every: int = 10,
    schedule: Schedule = Schedule(),
    record: Path | str | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    describe: Mapping[str, Any] | None = None,
    recipe: str | None = None,
    engine: EngineName = "simulation",
    timeout: float = TIMEOUT,
    **options: Any,
) -> Result:
    """Run `num_iterations` outer iterations of `algorithm` on all clients: in this process, or divided among those that torchrun started.

    num_rounds: ends the run at the first outer iteration that reaches so many communication rounds, with num_iterations or instead of it.
    measure_every: outer iterations between measurements (default: about twenty in the run); the last one is always measured.
    residuals: measure also how far y is from y*(x), and u from solving its system (`lower_gradient`, `residual`); about as long as the losses take, twice.
    stationarity: measure also how long the hypergradient is (`hypergradient`), finding y*(x) and solving the system over all data; hundreds of products each.
    measure_growth: 0.05 lets that distance grow with the iterations done, to a twentieth of them: fine at the start, sparse later.
    cohort: who takes part, for algorithms with a server. network, averaging: who sends to whom and how averages are made, for algorithms between peers.
    schedule: how step sizes fall over the outer iterations (constant by default).
    record: a folder for configuration, metrics, checkpoints and the solution. resume: go on from the checkpoint in it.
    callbacks: called after every outer iteration; one that returns True stops the run. A `Follower` hears of its beginning and end, too (fedbilevel.runs.logs).
    describe: more for the recorded configuration, e.g. how a task was built. recipe: the run as a file, kept with the record.
    options: device, strategy, chunk_size, drops.
    engine: "simulation", or "distributed" under torchrun, where every rank calls this with the same arguments: all get the result, rank 0 alone writes the
    record and calls callbacks. timeout: seconds after which a rank that does not answer is given up.
    Ctrl-C finishes the outer iteration, writes a checkpoint and returns; a second one stops at once and leaves the last checkpoint.

    >>> import fedbilevel as fb
    >>> from fedbilevel.algorithms.fedbio import FedBiO
    >>> from fedbilevel.tasks.quadratic import Quadratic
    >>> result = fb.run(FedBiO(lr_upper=0.05, lr_lower=0.2, lr_system=0.2, num_local_steps=1), *Quadratic().build(), num_iterations=80)
    >>> [row["iteration"] for row in result.rows]
    [0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 68, 72, 76, 80]
    >>> result.ledger
    <80 rounds, 0.0512 MB (6400 floats up, 6400 down); gy 400, fx 400, fy 400, hvp 400, jvp 400, samples 4800>
    """
    if isinstance(algorithm, str):
        algorithm = discovery.algorithm(algorithm)()
    if not isinstance(algorithm, ServerAlgorithm | PeerAlgorithm):
        raise SettingError(
            f"algorithm is {algorithm!r}, expected an algorithm with its settings, e.g. FedBiO(lr_upper=0.01), or a name."
        )
    for label, given, kind in (("cohort", cohort, Cohort), ("schedule", schedule, Schedule)):
        if not isinstance(given, kind):
            raise SettingError(f"{label} is {given!r}, expected a {kind.__name__}, e.g. {kind()!r}.")
    if not isinstance(network, AnyNetwork | None) or not isinstance(averaging, Averaging | None):
        raise SettingError(
            f"network is {network!r} and averaging {averaging!r}, expected e.g. Network(kind='ring') and Averaging(num_steps=20), or None."
        )
    check_kind(problem)
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise SettingError(f"callbacks is {callbacks!r:.80}, expected a list of functions that take a Progress.")
    if not isinstance(describe, Mapping | None):
        raise SettingError(
            f"describe is {describe!r:.80}, expected a dict of what to add to the recorded configuration."
        )
    try:
        json.dumps(describe)
    except (TypeError, ValueError) as error:
        raise SettingError(
            f"describe cannot be written as JSON ({error}): use plain numbers, words, lists and dicts."
        ) from error
    if record is not None and (not isinstance(record, str | Path) or not str(record)):
        raise SettingError(f"record is {record!r}, expected the name of a folder, or None.")
    for name in options:
        if name not in OPTIONS:
            raise UnknownNameError("option of run()", name, OPTIONS)
    if options.get("drops") is not None and not callable(options["drops"]):
        raise SettingError(
            f"drops is {options['drops']!r}, expected a function (outer iteration, call) that gives the clients that do not answer."
        )
    if "device" in options:
        options["device"] = torch_device(options["device"])
    plan = _plan(num_iterations, measure_every, measure_growth, checkpoint_every, num_rounds, residuals, stationarity)
    if resume and record is None:
        raise SettingError("resume was asked for without a record: give the folder of the run to go on with.")
    for warning in algorithm.check_scopes(problem.scopes):
        warnings.warn(warning, stacklevel=2)
    group = group_of(engine, options.get("device", "cpu"), timeout)
    with group.together():
        fed = simulate(
            algorithm,
            problem,
            clients,
            seed=seed,
            cohort=cohort,
            network=network,
            averaging=averaging,
            batch_size=batch_size,
            dtype=dtype,
            group=group,
            **{**options, "device": group.device(options.get("device", "cpu"))},
        )
        looks = [look for look, asked in ((fed.residuals, residuals), (fed.stationarity, stationarity)) if asked]
        falling = schedule.checked()._asdict()
        kept = record is not None or any(isinstance(callback, Follower) for callback in callbacks)
        identity = (
            {**identity_of(fed, batch_size, dtype), "schedule": falling} if kept else {}
        )  # reads all data: only for a record or a log
        config = {
            "identity": identity,
            "run": plan._asdict(),
            "versions": versions(),
            "engine": group.engine,
            "ranks": group.size,
            **(describe or {}),
        }
        return _go_through(
            algorithm,
            fed,
            Record(record) if record is not None else None,
            config,
            resume,
            plan,
            schedule,
            callbacks,
            overview=fed.overview,
            recipe=recipe,
            looks=looks,
        )


def solve(
    problem: Problem, clients: Sequence[Holdings], algorithm: Algorithm | str, *, residuals: bool = True, **more: Any
) -> Result:
    """Solve a problem: `run` with the problem first, and with settings of the algorithm among the keywords.

    >>> import torch
    >>> import fedbilevel as fb
    >>> ridge = lambda y, batch: (batch["weight"] * (batch["a"] @ y["w"] - batch["b"]) ** 2).sum()
    >>> problem = fb.Problem(
    ...     upper=lambda x, y, batch: ridge(y, batch),
    ...     lower=lambda x, y, batch: ridge(y, batch) + (x["log_penalty"].exp() * y["w"] ** 2).sum(),
    ...     x0={"log_penalty": torch.zeros(2)}, y0={"w": torch.zeros(2)},
    ... )
    >>> a = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> clients = [{role: {"a": a, "b": a @ torch.tensor([1.0 + i, -1.0])} for role in ("train", "val")} for i in range(3)]
    >>> result = fb.solve(problem, clients, "fedbio", num_rounds=50, lr_upper=0.5, lr_lower=0.2, lr_system=0.2)
    >>> result
    <fedbio: 50 outer iterations, 50 rounds, 0.0072 MB; upper_loss 0..., lower_loss 0..., lower_gradient ...>
    >>> result.x["log_penalty"].shape
    torch.Size([2])
    """
    kind = discovery.algorithm(algorithm) if isinstance(algorithm, str) else type(algorithm)
    fields = {spec.name for spec in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    known = {*inspect.signature(run).parameters, *OPTIONS} - {"algorithm", "problem", "clients", "options"}
    settings = {name: value for name, value in more.items() if name in fields and name not in known}
    for name in more:
        if name not in fields and name not in known:
            raise UnknownNameError(
                f"option of a run or setting of {kind.name() if fields else 'an algorithm'}", name, [*known, *fields]
            )
    if isinstance(algorithm, str):
        chosen: Any = kind(**settings)
    elif settings:
        raise SettingError(
            f"{', '.join(sorted(settings))} would change an algorithm that has its settings already: give its name, or put them into it."
        )
    else:
        chosen = algorithm
    return run(
        chosen,
        problem,
        clients,
        residuals=residuals,
        **{name: value for name, value in more.items() if name not in settings},
    )


def run_between(
    algorithm: Algorithm,
    fed: Engine,
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
    identity = {**identity_of(fed, fed.batch_size, fed.dtype), "schedule": schedule.checked()._asdict()}
    config = {
        "identity": identity,
        "run": plan._asdict(),
        "versions": versions(),
        "engine": engine,
        "ranks": 1,
        **describe,
    }
    return _go_through(algorithm, fed, record, config, resume, plan, schedule, callbacks, begin_at)


class _Plan(NamedTuple):
    num_iterations: int
    measure_every: int | None  # None: by rounds
    measure_growth: float
    checkpoint_every: int
    num_rounds: int | None = None
    residuals: bool = False
    stationarity: bool = False


def _plan(
    num_iterations: int | None,
    measure_every: int | None,
    measure_growth: float,
    checkpoint_every: int,
    num_rounds: int | None = None,
    residuals: bool = False,
    stationarity: bool = False,
) -> _Plan:
    if num_iterations is None and num_rounds is None:
        raise SettingError(
            "how long to run is not said: give num_iterations (outer iterations) or num_rounds (communication rounds)."
        )
    num_iterations, num_rounds, measure_every = (
        None if value is None else whole_number(label, value, least)
        for label, value, least in (
            ("num_iterations", num_iterations, 0),
            ("num_rounds", num_rounds, 1),
            ("measure_every", measure_every, 1),
        )
    )
    checkpoint_every = whole_number("checkpoint_every", checkpoint_every, 1)
    if not isinstance(measure_growth, int | float) or not 0 <= measure_growth <= 1:
        raise SettingError(f"measure_growth is {measure_growth!r}, expected a share between 0 and 1.")
    for label, asked in (("residuals", residuals), ("stationarity", stationarity)):
        if not isinstance(asked, bool):
            raise SettingError(f"{label} is {asked!r}, expected True or False.")
    if measure_growth and measure_every is None and num_rounds is not None:
        raise SettingError(
            "measure_growth needs to know from where to grow in a run that ends by rounds: give measure_every, too."
        )
    if num_iterations is None:
        assert num_rounds is not None
        num_iterations = num_rounds  # one that needs no round counts like one that needs one
    elif measure_every is None and num_rounds is None:
        measure_every = max(1, num_iterations // _MEASUREMENTS)
    return _Plan(num_iterations, measure_every, measure_growth, checkpoint_every, num_rounds, residuals, stationarity)


def _go_through(
    algorithm: Algorithm,
    fed: Engine,
    book: Record | None,
    config: dict[str, Any],
    resume: bool,
    plan: _Plan,
    schedule: Schedule,
    callbacks: Sequence[Callback],
    begin_at: int = 0,
    overview: Callable[[], dict[str, Any]] | None = None,
    recipe: str | None = None,
    looks: Sequence[Callable[[Any], dict[str, float]]] = (),
) -> Result:
    """The outer iterations. overview: the clients' data by size and class, where that is known. looks: further figures of the state for each measurement.
    Of several ranks, only the first writes files and calls callbacks."""
    group, identity, num_iterations = fed.group, config["identity"], plan.num_iterations
    due = _due(plan)
    rows: list[dict[str, Any]] = []
    start, spent = begin_at, 0.0
    if resume and book is not None:
        tensors: Mapping[str, Tensor] = {}

        def read() -> dict[str, Any]:
            nonlocal tensors
            tensors, about = book.load()
            check_same(identity, about["identity"], book)
            if num_iterations < about["iteration"]:
                what = "num_rounds" if plan.num_rounds == num_iterations else "num_iterations"
                raise SettingError(
                    f"{what} is {num_iterations}, but the run in {book.path} has already done {about['iteration']}: ask for more."
                )
            return {**about, "rows": book.go_on_from(about["iteration"])}

        about = group.told(read)
        rows, start, spent = about["rows"], about["iteration"], about["seconds"]
        state = fed.load_state_dict(group.told_tensors(lambda: tensors), about["state"], algorithm.State)
        fed.ways.update(about.get("ways", {}))
        if group.rank == 0:
            book.write_config(config)
            if recipe is not None:
                book.write_recipe(recipe)
    else:
        who = overview() if overview is not None and book is not None else None
        if book is not None and group.rank == 0:
            book.start(config)
            if who is not None:
                book.write_clients(who)
            if recipe is not None:
                book.write_recipe(recipe)
        fed.begin(0)
        state = algorithm.init(fed)

    clock, saved = time.perf_counter() - spent, start

    def save(iteration: int) -> None:
        nonlocal saved, clock
        now = time.perf_counter()
        if book is not None:
            fed.commit()
            tensors, plain = fed.state_dict(state)
            about = {
                "identity": identity,
                "iteration": iteration,
                "seconds": now - clock,
                "state": plain,
                "ways": fed.ways,
            }
            bill = fed.bill()
            if group.rank == 0:
                book.save(tensors, about)
                saved = iteration
                book.write_ledger(bill.asdict())
            group.meet()  # now all know that it is there
        saved = iteration
        clock += time.perf_counter() - now

    def measure(iteration: int) -> dict[str, Any]:
        nonlocal clock
        now = time.perf_counter()
        row = {
            "iteration": iteration,
            "seconds": now - clock,
            "megabytes": fed.ledger.megabytes,
            **fed.bill().totals(),
            **fed.measure(state.x, state.y),
            **{name: value for look in looks for name, value in look(state).items()},
        }
        rows.append(row)
        if book is not None and group.rank == 0:
            book.add(row)
        clock += time.perf_counter() - now  # measuring time is excluded
        return row

    if start == begin_at and not rows:
        measure(start)
        save(start)
    iteration = start
    stopped = "finished"
    over = lambda rounds: plan.num_rounds is not None and rounds >= plan.num_rounds
    told = _told(callbacks, book, config, rows, lambda: (stopped, iteration)) if group.rank == 0 else nullcontext()
    with _interrupts(group) as interrupted, _left(lambda: (iteration, saved), book, config), told:
        for iteration in range(start + 1, num_iterations + 1):
            before = fed.ledger.rounds
            if over(before):
                iteration -= 1  # a resumed run that was over
                break
            now = algorithm.scaled(schedule(iteration))
            fed.begin(iteration, now)
            with group.together():
                with torch.no_grad():  # a loss may hold a frozen model of its own
                    state = now.round(fed, state)
                    fed.check()
                _check_finite(fed, state, iteration)
            last = iteration == num_iterations or over(fed.ledger.rounds)
            row = measure(iteration) if last or due(iteration, before, fed.ledger.rounds) else None
            here = Progress(iteration, num_iterations, fed.ledger.rounds, fed.ledger.megabytes, row, plan.num_rounds)
            ask = [callback(here) for callback in callbacks] if group.rank == 0 else []
            stopped = STOPPED[group.largest(2 if interrupted() or fed.stop_asked() else 1 if any(ask) else 0)]
            if (
                stopped == "callback" and row is None
            ):  # an interrupted run is resumed: its measurements must not depend on where it was interrupted
                measure(iteration)
            if stopped != "finished" or last or iteration % plan.checkpoint_every == 0:
                save(iteration)
            if stopped != "finished" or last:
                break
        fed.finish(state)
        x, y = fed.trees(state.x, upper=True), fed.trees(state.y, upper=False)
        if book is not None and group.rank == 0:
            book.save_solution({**_named("x", x), **_named("y", y)})
        totals = fed.bill().totals()
    return Result(
        x, y, rows, totals, iteration, stopped, book.path if book is not None else None, state, algorithm.name()
    )


@contextmanager
def _told(
    callbacks: Sequence[Callback],
    book: Record | None,
    config: Mapping[str, Any],
    rows: list[dict[str, Any]],
    when: Callable[[], tuple[str, int]],
) -> Iterator[None]:
    """Tells those who follow, and the record, that the run begins and how it ended, also if it is an error that ends it."""
    how = "failed"

    def leave(follower: Follower) -> None:
        follower.end(rows, how)

    def write(why: str = "") -> None:
        if book is not None:
            book.write_end(how, when()[1], why)

    with ExitStack() as stack:
        for callback in callbacks:
            if isinstance(callback, Follower):
                callback.begin(config, rows)
                stack.callback(leave, callback)
        try:
            yield
        except KeyboardInterrupt:
            how = "interrupted"
            write()
            raise
        except Regrouped:  # between peers: the same outer iteration begins again
            raise
        except Exception as error:
            with suppress(CheckpointError):  # a full disk has been named already
                write(str(error) if isinstance(error, FedBilevelError) else f"{type(error).__name__}: {error}")
            raise
        else:
            how = when()[0]
            write()


@contextmanager
def _left(when: Callable[[], tuple[int, int]], book: Record | None, config: Mapping[str, Any]) -> Iterator[None]:
    """Errors that end a run for good also say what is left of it. when: the outer iteration, and that of the last checkpoint."""
    try:
        yield
    except NonFiniteError as error:
        where = (
            f"; the last good checkpoint, of outer iteration {when()[1]}, is in {book.path}" if book is not None else ""
        )
        raise NonFiniteError(f"{str(error).removesuffix('.')}{where}.") from None
    except RankLostError as error:
        command = (
            f"torchrun --nproc-per-node {config['ranks']} -m fedbilevel resume {book.path}"
            if book is not None and "task" in config
            else ""
        )
        what = (
            f"the last checkpoint, of outer iteration {when()[1]}, is in {book.path}"
            if book is not None
            else "nothing was recorded"
        )
        mend = (
            f"go on with {command}"
            if command
            else "go on with the same call and resume=True"
            if book is not None
            else "give a record to be able to go on"
        )
        lost = RankLostError(f"{str(error).removesuffix('.')} in outer iteration {when()[0]}; {what}: {mend}.")
        lost.speaks = error.speaks
        raise lost from None


def _due(plan: _Plan) -> Callable[[int, int, int], bool]:
    """Which outer iterations are measured: a function of their number and of the rounds before and after them, so that a resumed run measures the same."""
    every, growth, num_iterations, most = plan.measure_every, plan.measure_growth, plan.num_iterations, plan.num_rounds
    if every is None:  # whichever end comes first, it is a twentieth nearer
        assert most is not None
        steps = max(1, num_iterations // _MEASUREMENTS)
        return lambda iteration, before, after: (
            before * _MEASUREMENTS // most < after * _MEASUREMENTS // most
            or (num_iterations < most and iteration % steps == 0)
        )
    if not growth:
        return lambda iteration, before, after: iteration % every == 0
    chosen, iteration = set(), every
    while iteration <= num_iterations:
        chosen.add(iteration)
        iteration = max(iteration + every, -(-math.ceil(iteration * (1 + growth)) // every) * every)
    return lambda iteration, before, after: iteration in chosen


def _check_finite(fed: Engine, state: Any, iteration: int) -> None:
    for name, value in state._asdict().items():
        if isinstance(value, Tensor) and not bool(torch.isfinite(value).all()):
            whose = (
                "the server's"
                if value.ndim == 1
                else f"client {fed.client_of(int((~torch.isfinite(value)).any(1).nonzero()[0]))}'s"
            )
            raise NonFiniteError(
                f"{whose} {name!r} is not finite after outer iteration {iteration}: the steps are too long; lower the step sizes."
            )


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
    before: dict[int, Any] = {
        number: signal.getsignal(number) for number in (signal.SIGINT, *([signal.SIGTERM] if group.size > 1 else []))
    }

    def remember(number: int, frame: FrameType | None) -> None:
        asked.set()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, before[number])
            if group.rank == 0:
                print(
                    "\nStopping after this outer iteration; Ctrl-C again stops at once and keeps the last checkpoint.",
                    file=sys.stderr,
                )

    for number in before:
        signal.signal(number, remember)
    try:
        yield asked.is_set
    except RankLostError:
        before.pop(signal.SIGTERM, None)  # the request may come late, and what was lost is still to be said
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
