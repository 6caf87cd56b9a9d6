"""Seconds and memory of an outer iteration on language models of up to a billion parameters."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.by_hand import ByHand
from benchmarks.clock import Row, Setup, Timing, seconds_of
from benchmarks.gpt import BILLION, SIZES, TINY, Size, built
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.penalty import Penalty
from fedbilevel.engines.simulation import Simulation
from fedbilevel.tasks.task import Built

TITLE = "Large models"
ABOUT = """Weights of 8 sources of synthetic bytes (x) for a GPT with a context of 128 (y), batches of 8 texts and 5
local steps per outer iteration (2 with 1B parameters): `penalty` of order 2 and 1 with lam = 10, and FedBiO with shared
minibatches. The library with the strategies `loop` and `auto`, and `in turn`: `loop` with one client at work at a time
(`chunk_size=1`). Beside them a loop over clients written by hand for this problem (`benchmarks/by_hand.py`), which is
given the same minibatches, holds one client's rows at a time and steps in place; its attention is fused in gradients
and plain in products with second derivatives, and in bf16 it computes g_x of `penalty` in float32, as the library
does. TF32 is off in all rows. Every row is a process of its own, with a limit of 60 s (100 s with 1B parameters); the
most important rows come first, and rows that do not fit into 330 s are named at the end. `peak, GB` is the most that
torch had allocated from the start of the process on, and `rows of y` the same in float32 rows of y per client.
`differs` is the distance from x of the program by hand after two outer iterations, relative to its norm. Aims for 100M
parameters, 8 clients, bf16, `in turn`: at most 1.5 times the time by hand, and at most 6 rows (FedBiO) and 4 rows
(`penalty`) per client. Aim for 1B parameters, 8 clients, `penalty`: a run on one GPU."""
HEADINGS = {"floor_seconds": "by hand, s", "ratio": "x by hand", "memory_gb": "peak, GB", "y_rows": "rows of y"}

HAND = "by hand"
TURN = "in turn"
WAYS = (HAND, TURN, "auto", "loop")  # the most important first
ROW_SECONDS = {False: 60.0, True: 100.0}  # after this a row is given up, with less than a billion parameters and others
WHOLE_SECONDS = 330.0  # of all rows
TIMED_SECONDS = 5.0  # after this a row takes no more rounds
COMPARED = 2  # the outer iteration after which x is compared
WARM = {HAND: COMPARED, TURN: COMPARED, "loop": COMPARED, "auto": 4}  # phases are captured at their third occurrence
ROWS_AIM = {"fedbio": 6, "penalty": 4}


class Case(NamedTuple):
    """What is computed; a row is a case and a way to compute it."""

    size: Size
    clients: int
    method: str  # fedbio, or penalty with its order
    precision: str  # float32 or bf16

    @property
    def is_huge(self) -> bool:
        return self.size == BILLION

    @property
    def num_local_steps(self) -> int:
        return 2 if self.is_huge or self.size == TINY else 5

    @property
    def name(self) -> str:
        return f"{self.size.name}, {self.clients} clients, {self.method}, {self.precision}"

    def algorithm(self, num_local_steps: int = 5) -> Any:
        steps: dict[str, Any] = {"lr_upper": 0.1, "lr_lower": 0.05, "num_local_steps": num_local_steps}
        if self.method == "fedbio":
            return FedBiO(lr_system=0.01, minibatches="shared", **steps)
        return Penalty(order=int(self.method.split()[-1]), penalty=10.0, **steps)  # type: ignore[arg-type]


METHODS = ("penalty 2", "fedbio", "penalty 1")


def cases(setup: Setup) -> list[Case]:
    """All cases: the most important first, then by the number of ways in which they differ from it."""
    if setup.small:
        return [Case(TINY, 2, method, precision) for method in METHODS for precision in ("float32", "bf16")]
    grid = [Case(*one) for one in itertools.product(SIZES, (8, 4), METHODS, ("bf16", "float32"))]
    huge, first = [Case(BILLION, 8, method, "bf16") for method in ("penalty 2", "fedbio", "penalty 1")], grid[0]
    distance = lambda case: (
        (case.size != first.size)
        + (case.clients != first.clients)
        + (case.precision != first.precision)
        + (case.method == "penalty 1")
    )
    words = lambda case: set(case.name.replace(",", "").split())
    most, *others = sorted(grid, key=distance)
    order = [most, others[0], *huge, *others[1:]]
    return [case for case in order if words(case) >= set(setup.cases)]


def ways(case: Case) -> tuple[str, ...]:
    """The ways in which a case is computed; eight clients with a billion parameters do not fit into `loop`."""
    return WAYS[:3] if case.is_huge else WAYS


def skipped(setup: Setup) -> str | None:
    if not (setup.cuda or setup.small):
        return "Skipped: these sizes need a GPU (`--device cuda`), or `--small` to see that it runs."
    if not cases(setup):
        example = cases(replace(setup, cases=()))[0].name
        return f"Skipped: no case has all of the words {', '.join(setup.cases)}; an example of a case is {example}."
    return None


def rows(setup: Setup, attempt: Callable[..., Row] | None = None) -> Iterator[Row]:
    """Yield rows as they are measured.

    attempt: function that measures one way of a case within some seconds, by default in a process
        of its own.
    """
    attempt = attempt or (here if setup.small else in_a_process)
    end, left = time.monotonic() + WHOLE_SECONDS, _in_order(setup)
    by_hand: dict[Case, Row] = {}
    while left and (seconds := min(ROW_SECONDS[left[0][0].is_huge], end - time.monotonic())) > 0:
        case, way = left.pop(0)
        found = attempt(setup, case, way, seconds)
        if way == HAND:
            by_hand[case] = found
        yield row_of(case, way, found, by_hand.get(case, {}))
    if left:
        names = "; ".join(f"{case.name}, {way}" for case, way in left)
        yield {
            "name": f"{len(left)} other rows",
            "what": "not measured",
            "note": f"{WHOLE_SECONDS:.0f} s were over: {names}",
        }


def _in_order(setup: Setup) -> list[tuple[Case, str]]:
    """All rows; `loop` of the first two cases comes after the rows of a billion parameters."""
    pairs = [(case, way) for case in cases(setup) for way in ways(case)]
    later = [(case, way) for case, way in pairs[: 2 * len(WAYS)] if way == "loop" and not setup.small]
    first = [pair for pair in pairs if pair not in later]
    place = max((i + 1 for i, (case, _) in enumerate(first) if case.is_huge), default=2 * (len(WAYS) - 1))
    return [*first[:place], *later, *first[place:]]


def row_of(case: Case, way: str, found: Row, by_hand: Row) -> Row:
    """The row of a measurement beside the measurement of the program by hand."""
    row = {"name": case.name, "what": way if way == HAND else f"library, {way}", **found}
    x = row.pop("x", None)
    if "seconds" in found and "seconds" in by_hand:
        row |= {"floor_seconds": by_hand["seconds"], "ratio": found["seconds"] / by_hand["seconds"]}
        if way != HAND:
            theirs = torch.tensor(by_hand["x"])
            differs = float(torch.linalg.vector_norm(torch.tensor(x) - theirs) / torch.linalg.vector_norm(theirs))
            row["differs"] = differs if math.isfinite(differs) else "not finite"
    if case.size.name == "100M" and (case.clients, case.precision, way) == (8, "bf16", TURN):
        row["aim"] = f"1.5, {ROWS_AIM[case.method.split()[0]]} rows"
    if case.is_huge and way == TURN:
        row["aim"] = "runs"
    return row


class Contestant:
    """One way to compute a case; `advance` runs one outer iteration."""

    def __init__(
        self, case: Case, way: str, made: Built, *, dtype: torch.dtype = torch.float32, device: str = "cpu",
        num_local_steps: int = 5,
    ) -> None:  # fmt: skip
        self.algorithm, low = case.algorithm(num_local_steps), case.precision == "bf16"
        self.by_hand: ByHand | None = None
        if way == HAND:
            self.by_hand = ByHand(case.size, made, self.algorithm, dtype=dtype, device=device, low=low)
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the fused kernels of attention have no second derivative")
            self.fed = Simulation(
                self.algorithm,
                *made,
                batch_size=case.size.batch,
                strategy="loop" if way == TURN else way,
                chunk_size=1 if way == TURN else None,
                dtype=dtype,
                device=device,
                precision="bf16" if low else "full",
            )
        self.state, self.iteration = self.algorithm.init(self.fed), 0

    def advance(self) -> None:
        if self.by_hand is not None:
            self.by_hand.advance()
            return
        self.iteration += 1
        self.fed.begin(self.iteration)
        self.state = self.algorithm.round(self.fed, self.state)

    def x(self) -> Tensor:
        return self.state.x if self.by_hand is None else self.by_hand.x

    def y(self) -> Tensor:
        """The y of the run as one vector, which the program by hand does not need and makes here."""
        return self.state.y if self.by_hand is None else self.by_hand.y()

    def plain_kernels(self) -> str:
        """Layers for which the library takes plain kernels."""
        return ", ".join(sorted(self.fed.host.oracle.plain_kernels))


def measure(setup: Setup, case: Case, way: str) -> Row:
    """Time one way in this process; memory that does not suffice is a result too."""
    torch.set_num_threads(setup.threads)
    with without_tf32():
        if setup.cuda:
            torch.cuda.init()
            torch.cuda.reset_peak_memory_stats(setup.device)
        try:
            found = _timed(setup, case, way)
        except Exception as error:
            asked = asked_for(error)
            if asked is None:
                raise
            found = {"note": f"out of memory: {asked}"}
        return {**found, **memory(setup, case), "tf32": "off"}


def _timed(setup: Setup, case: Case, way: str) -> Row:
    contestant = Contestant(
        case, way, built(case.size, case.clients), device=setup.device, num_local_steps=case.num_local_steps
    )
    x: list[float] = []
    for iteration in range(1, (COMPARED if case.is_huge else WARM[way]) + 1):
        contestant.advance()
        if iteration == COMPARED:
            x = contestant.x().tolist()
    seconds: list[float] = []
    while len(seconds) < setup.rounds and sum(seconds) < TIMED_SECONDS:
        seconds.append(seconds_of(contestant.advance, setup))
    timing = Timing.of(seconds)
    found = {"seconds": timing.median, "spread": timing.spread, "rounds": len(seconds), "x": x}
    return found if way == HAND else {**found, "plain_kernels": contestant.plain_kernels()}


def memory(setup: Setup, case: Case) -> Row:
    """The peak of torch's allocations; a CPU does not count them."""
    if not setup.cuda:
        return {}
    peak = torch.cuda.max_memory_allocated(setup.device)
    return {"memory_gb": peak / 1e9, "y_rows": peak / (4 * num_weights(case.size)) / case.clients}


def num_weights(size: Size) -> int:
    d = size.width
    return size.layers * (12 * d * d + 13 * d) + (2 * 256 + size.context + 2) * d


def asked_for(error: BaseException | None) -> str | None:
    """The allocation that failed, in torch's words, or None if the error has another cause."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__
    if error is None:
        return None
    found = re.search(r"Tried to allocate [\d.]+ \w+", str(error))
    return found[0] if found else str(error).split("\n", 1)[0]


@contextmanager
def without_tf32() -> Iterator[None]:
    """Products of float32 numbers in float32, as the library's other figures."""
    flags: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [flag.allow_tf32 for flag in flags]
    for flag in flags:
        flag.allow_tf32 = False
    try:
        yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.allow_tf32 = value


# ---- a process for every row -----------------------------------------------------------------------------------------


def here(setup: Setup, case: Case, way: str, _seconds: float) -> Row:
    return measure(setup, case, way)


def in_a_process(setup: Setup, case: Case, way: str, seconds: float) -> Row:
    """Measure in a process of its own: its memory is its own, and it can be ended."""
    return within(seconds, measure, (setup, case, way))


def within(seconds: float, function: Callable[..., Row], given: Sequence[Any]) -> Row:
    """The result of a function in a new process, or a note why there is none.

    Processes are copies of one that has imported torch but not used the GPU, so they start fast.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, tuple(given)))
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            return {"note": f"no result within {seconds:g} s"}
        return dict(ours.recv())
    except EOFError:
        process.join()
        return {"note": f"the process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()
        ours.close()


def _answer(pipe: Any, function: Callable[..., Row], given: Sequence[Any]) -> None:
    try:
        found = function(*given)
    except Exception as error:  # noqa: BLE001 - a row that fails must not end the others
        found = {"note": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"}
    pipe.send(found)
    pipe.close()
