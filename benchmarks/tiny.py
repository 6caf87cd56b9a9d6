"""One outer iteration of a tiny problem, against complete programs written for it by hand."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.clock import Row, Setup, Timing, rows_of
from fedbilevel.algorithms.fbo_aggitd import FBOAggITD
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.engines.rounds import one_round
from fedbilevel.engines.simulation import Simulation
from fedbilevel.federation.algorithm import ServerAlgorithm
from fedbilevel.runs.result import Progress
from fedbilevel.runs.solve import solve
from fedbilevel.tasks.quadratic import Quadratic

TITLE = "One outer iteration of a tiny problem"
ABOUT = """The task quadratic with 20 numbers each in x and y, 5 clients that differ, all samples, all clients in
every round. Both programs by hand know that the losses are quadratic: they use the matrices of each client, averaged
over its samples before the run, and where only a mean is needed, the mean over clients; the library is given losses of
samples. The library runs the engine alone (`Simulation`), `solve` without a record, with a record (a checkpoint every
10 iterations), and `solve` that measures losses, residuals and the closed form after every iteration. All reach the
same x. Seconds are those of the processor, with one thread, so that other load of the machine does not count; they
leave out the wait for a disk. Goal: the engine takes at most 4 times as long as torch by hand."""
HEADINGS = {"floor_seconds": "torch by hand, s", "ratio": "x torch by hand"}

FLOOR = "torch by hand"
STEPS: dict[str, Any] = {"lr_upper": 0.01, "lr_lower": 0.05, "lr_system": 0.05}
WARM = 150  # iterations before timing: derivatives are traced after 64 calls


class Point(NamedTuple):
    x: Any
    y: Any
    u: Any


class ByHand:
    """FedBiO and FBO-AggITD for this one problem, with numpy arrays or torch tensors.

    Matrices and vectors have one entry per client, averaged over its samples; `mean` has their means.
    """

    def __init__(self, task: Quadratic, algorithm: Any, make: Callable[[np.ndarray], Any]) -> None:
        stacked = {name: make(value) for name, value in task.closed_form().stacked.items() if name != "tDt"}
        self.algorithm = algorithm
        self.A, self.B, self.c, self.D, self.Dt, self.R, self.r = (
            stacked[name] for name in ("A", "B", "c", "D", "Dt", "R", "r")
        )
        self.BT = make(task.closed_form().stacked["B"].transpose(0, 2, 1).copy())
        self.mean = {name: value.mean(0) for name, value in stacked.items()}
        self.mean["BT"] = self.BT.mean(0)
        self.start = Point(*(make(np.zeros(size)) for size in (task.dim_upper, task.dim_lower, task.dim_lower)))

    def fedbio(self, at: Point) -> Point:
        settings = self.algorithm
        x, y, u = at
        for _ in range(settings.num_local_steps):
            dx = _product(self.R, x) - self.r + _product(self.BT, u)
            dy = _product(self.A, y) - _product(self.B, x) - self.c
            du = _product(self.A, u) - _product(self.D, y) + self.Dt
            x, y, u = x - settings.lr_upper * dx, y - settings.lr_lower * dy, u - settings.lr_system * du
        return Point(x.mean(0), y.mean(0), u.mean(0))

    def fbo_aggitd(self, at: Point) -> Point:
        settings, mean = self.algorithm, self.mean
        lam, tau, z = settings.lr_system, settings.num_local_steps, None
        x, y = at.x, at.y
        fixed = mean["B"] @ x + mean["c"]
        for t in range(settings.num_lower_rounds + 1):
            r = lam * (mean["D"] @ y - mean["Dt"])
            z = r if z is None else z - lam * (mean["A"] @ z) + r
            if t < settings.num_lower_rounds:
                y = self._local(self.A, y, settings.lr_lower / tau, mean["A"] @ y - fixed, tau)
        h = mean["R"] @ x - mean["r"] + mean["BT"] @ z
        return Point(self._local(self.R, x, settings.lr_upper / tau, h, tau), y, at.u)

    @staticmethod
    def _local(matrix: Any, start: Any, lr: float, q: Any, tau: int) -> Any:
        """Local SVRG steps: two gradients of a quadratic differ by its matrix times the distance."""
        now = start - lr * q  # in the first step the two gradients are at one point
        for _ in range(tau - 1):
            now = now - lr * (_product(matrix, now - start) + q)
        return now.mean(0) if now.ndim == 2 else now


def _product(matrix: Any, rows: Any) -> Any:
    """Product of each client's matrix with one vector, or with its own row."""
    if rows.ndim == 1:
        return matrix @ rows
    if isinstance(rows, torch.Tensor):
        return torch.bmm(matrix, rows.unsqueeze(2)).squeeze(2)
    return (matrix @ rows[:, :, None])[:, :, 0]


class Case:
    """One algorithm on the tiny problem."""

    def __init__(self, setup: Setup, name: str, dtype: torch.dtype = torch.float32) -> None:
        self.name, self.dtype = name, dtype
        self.task = Quadratic(dim_upper=20, dim_lower=20)
        self.algorithm: ServerAlgorithm = (
            FedBiO(num_local_steps=1, **STEPS) if name == "fedbio" else FBOAggITD(num_local_steps=2, **STEPS)
        )
        self.built = self.task.build()
        self.warm, self.num = (3, 2) if setup.small else (WARM, 100 if name == "fedbio" else 30)

    def torch_by_hand(self) -> tuple[Callable[[], None], list[Any]]:
        return self._by_hand(lambda value: torch.from_numpy(value).to(self.dtype))

    def numpy_by_hand(self) -> tuple[Callable[[], None], list[Any]]:
        kind = np.float32 if self.dtype == torch.float32 else np.float64
        return self._by_hand(lambda value: value.astype(kind))

    def _by_hand(self, make: Callable[[np.ndarray], Any]) -> tuple[Callable[[], None], list[Any]]:
        program = ByHand(self.task, self.algorithm, make)
        step, state = getattr(program, self.name), [program.start]

        def advance() -> None:
            with torch.no_grad():
                state[0] = step(state[0])

        return advance, state

    def engine(self) -> tuple[Callable[[], None], list[Any]]:
        fed = Simulation(self.algorithm, *self.built, dtype=self.dtype)
        state, number = [self.algorithm.init(fed)], [0]

        def advance() -> None:
            number[0] += 1
            fed.begin(number[0], self.algorithm)
            state[0] = one_round(fed, self.algorithm, state[0])
            fed.check()

        return advance, state

    def seconds_of(self, advance: Callable[[], None]) -> float:
        start = time.process_time()
        for _ in range(self.num):
            advance()
        return (time.process_time() - start) / self.num

    def solved(self, **options: Any) -> tuple[float, Any]:
        """Seconds per outer iteration of a run without its start and its end, and the run."""
        times: list[float] = []

        def note(now: Progress) -> None:
            if now.iteration in (self.warm, self.warm + self.num):
                times.append(time.process_time())

        ends = {"num_iterations": self.warm + self.num + 1, "measure_every": self.warm + self.num + 1, **options}
        run = solve(*self.built, self.algorithm, dtype=self.dtype, callbacks=[note], **ends)
        return (times[1] - times[0]) / self.num, run

    def recorded(self, **options: Any) -> tuple[float, Any]:
        with tempfile.TemporaryDirectory() as folder:
            return self.solved(record=Path(folder) / "run", **options)


def rows(setup: Setup) -> list[Row]:
    found: list[Row] = []
    for name in ("fedbio", "fbo_aggitd"):
        found += _rows(setup, Case(setup, name))
    return found


def _rows(setup: Setup, case: Case) -> list[Row]:
    programs = {FLOOR: case.torch_by_hand()[0], "numpy by hand": case.numpy_by_hand()[0], "engine": case.engine()[0]}
    for advance in programs.values():
        for _ in range(case.warm):
            advance()
    turns: dict[str, Callable[[], float]] = {
        **{what: partial(case.seconds_of, advance) for what, advance in programs.items()},
        "solve": lambda: case.solved()[0],
        "solve with a record": lambda: case.recorded()[0],
        "solve, measuring every iteration": lambda: case.solved(measure_every=1)[0],
    }
    seconds: dict[str, list[float]] = {what: [] for what in turns}
    for _ in range(setup.rounds):
        for what, turn in turns.items():
            seconds[what].append(turn())
    return rows_of(case.name, {what: Timing.of(values) for what, values in seconds.items()}, floor=FLOOR)
