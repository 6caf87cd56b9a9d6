"""Wall time against the time in which the GPU computes, for an outer iteration of every algorithm."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.algorithms import suggested
from benchmarks.clock import Row, Setup, seconds_of
from fedbilevel import discovery
from fedbilevel.engines import simulate
from fedbilevel.engines.rounds import expect, reached, several_rounds
from fedbilevel.errors import ScopeError
from fedbilevel.federation.algorithm import Algorithm, Cohort, PeerAlgorithm, ServerAlgorithm
from fedbilevel.federation.network import Network
from fedbilevel.runs.recovery import check_finite
from fedbilevel.tasks.hyper_representation import HyperRepresentation
from fedbilevel.tasks.task import Built

TITLE = "Wall time against GPU time"
ABOUT = """One outer iteration on embedded digits with batches of 32 and the settings that the task suggests, with a
hundredth of their step sizes, so that hundreds of outer iterations stay finite: server algorithms with 20 clients,
half of them in a cohort where the algorithm allows it, and HGP between 100 peers. `s` is the wall time per outer
iteration of a run of 1,000 between two measurements, finite checks and costs included, `GPU` the time in which a
kernel ran during such outer iterations (torch.profiler), and their ratio is the aim. `one by one` is the wall time if
somebody looks at every state. Launches count kernels, copies and graphs that the processor starts. `uncaptured` is
the wall time without any CUDA graph, and `apart` the relative distance of both trajectories after 12 outer
iterations. `in a graph` is the number of outer iterations that one graph computes, and `replayed` counts those that a
graph computed. `refused` says why whole outer iterations were not captured."""

HEADINGS = {
    "busy_seconds": "GPU, s",
    "ratio": "x GPU",
    "single_seconds": "one by one, s",
    "uncaptured_seconds": "uncaptured, s",
}
AIM = 1.3
SECONDS = 150.0  # of the whole section
_ROW_SECONDS = 3.0  # after this a row ends its preparation and takes fewer figures
_COMPARED = 12  # outer iterations after which trajectories are compared: replays begin at the sixth
_STRETCH, _WARM = 32, 384  # outer iterations between two measurements, and before timing
_SHORT = 0.01  # of the step sizes, which cost no time
_LENGTH = 1000  # outer iterations of the whole run, which is not run to its end
_TIMED, _SINGLES, _UNCAPTURED = 5, 9, 3
_FIRST = ("fedbioacc", "adafbio", "fbo_aggitd", "fedbio", "fednest")
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
_COPIES = ("cudaMemcpyAsync", "cudaMemsetAsync")


def skipped(setup: Setup) -> str | None:
    return None if setup.cuda else "It needs a GPU."


class _Case(NamedTuple):
    name: str
    what: str
    algorithm: Algorithm
    built: Built
    options: dict[str, Any]


class _Running:
    """One run of a case; `advance` takes the next outer iteration."""

    def __init__(self, case: _Case, setup: Setup, *, captured: bool) -> None:
        self.algorithm = case.algorithm
        self.fed: Any = simulate(case.algorithm, *case.built, device=setup.device, **case.options)
        if not captured:
            self.fed.host.captures = self.fed.graphs = None
        expect(self.fed, _LENGTH)
        self.fed.begin(0)
        self.state, self.iteration = case.algorithm.init(self.fed), 0

    def advance(self, num: int = 1) -> None:
        """Run outer iterations, as the loop of a run does between two measurements."""
        end = self.iteration + num
        while self.iteration < end:
            self.fed.begin(self.iteration + 1)
            with torch.no_grad():
                self.state = several_rounds(
                    self.fed, lambda _: self.algorithm, self.state, self.iteration + 1, lambda now, *_: now < end
                )
            self.fed.check()
            self.iteration = reached(self.fed, self.iteration + 1)
            check_finite(self.fed, self.state, self.iteration)

    def points(self) -> Tensor:
        return torch.cat([self.fed.collect(one).flatten().double() for one in (self.state.x, self.state.y)])


def rows(setup: Setup) -> Iterator[Row]:
    end = time.perf_counter() + SECONDS
    for name, make in _cases(setup):
        if time.perf_counter() > end:
            yield {"name": name, "what": "", "note": "left out: the section's time is over"}
            continue
        try:
            case = make()
            if case is not None:
                yield _row(case, setup)
        except Exception:  # noqa: BLE001 - the next case goes on
            text = traceback.format_exc()
            print(text, flush=True)
            yield {"name": name, "what": "", "note": text.strip().rsplit("\n", 1)[-1][:200]}


def _cases(setup: Setup) -> Iterator[tuple[str, Callable[[], _Case | None]]]:
    few = 6 if setup.small else 20
    task = HyperRepresentation(num_clients=few)
    forms = [task.build(), HyperRepresentation(num_clients=few, lower="local").build()]
    server = [name for name, kind in discovery.algorithms().items() if issubclass(kind, ServerAlgorithm)]
    for name in (*_FIRST, "hgp", *(name for name in server if name not in _FIRST)):
        if name == "hgp":
            for kind in ("complete", "random_directed"):
                yield f"hgp, {kind}", partial(_peers, kind, 8 if setup.small else 100)
        else:
            yield name, partial(_server, name, task, forms)


def _server(name: str, task: HyperRepresentation, forms: list[Built]) -> _Case | None:
    algorithm = suggested(name, task).scaled(_SHORT)
    cohort = Cohort() if algorithm.needs_everyone or algorithm.gathers else Cohort(0.5)
    for number, built in enumerate(forms):
        try:
            algorithm.check_scopes(built.problem.scopes)
        except ScopeError:
            continue
        what = "a head per client" if number else "shared head"
        return _Case(name, what, algorithm, built, {"batch_size": 32, "cohort": cohort})
    return None


def _peers(kind: str, num_peers: int) -> _Case:
    task = HyperRepresentation(num_clients=num_peers)
    algorithm = suggested("hgp", task).scaled(_SHORT)
    assert isinstance(algorithm, PeerAlgorithm)
    network = Network(kind=kind)  # type: ignore[arg-type]
    return _Case("hgp", f"{num_peers} peers, {kind}", algorithm, task.build(), {"batch_size": 32, "network": network})


def _row(case: _Case, setup: Setup) -> Row:
    end = time.perf_counter() + _ROW_SECONDS
    runs = {captured: _Running(case, setup, captured=captured) for captured in (False, True)}
    for _ in range(_COMPARED - _UNCAPTURED):
        runs[False].advance()
    plain = statistics.median(seconds_of(runs[False].advance, setup) for _ in range(_UNCAPTURED))
    for _ in range(_COMPARED):
        runs[True].advance()
    expected, got = (runs[captured].points() for captured in (False, True))
    apart = float(torch.linalg.vector_norm(got - expected) / torch.linalg.vector_norm(expected).clamp(min=1e-300))
    run, graphs = runs[True], runs[True].fed.graphs
    few = 8 if setup.small else _STRETCH
    while run.iteration < (24 if setup.small else _WARM) and time.perf_counter() < end:
        run.advance(few)
    wall = statistics.median(seconds_of(partial(run.advance, few), setup) / few for _ in range(_TIMED))
    single = statistics.median(seconds_of(run.advance, setup) for _ in range(_SINGLES))
    busy, kernels, launches = _profiled(partial(run.advance, few), few, setup)
    spans = [span for one in graphs._kept.values() if not one.is_alone for span in one.longer]
    return {
        "name": case.name,
        "what": case.what,
        "seconds": wall,
        "busy_seconds": busy,
        "ratio": wall / busy if busy else None,
        "aim": AIM,
        "single_seconds": single,
        "kernels": kernels,
        "launches": launches,
        "uncaptured_seconds": plain,
        "apart": f"{apart:.1e}",
        "in_a_graph": max(spans, default=1 if graphs._kept else 0),
        "replayed": f"{graphs.replayed} of {run.iteration}",
        "refused": "; ".join(f"{name}: {why}" for name, why in graphs.captures.refused.items())[:300],
    }


def _profiled(call: Callable[[], None], num: int, setup: Setup) -> tuple[float, int, int]:
    """Seconds in which the GPU computes, kernels and launches of an outer iteration.

    num: outer iterations of one call.
    """
    torch.cuda.synchronize(setup.device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize(setup.device)
    events: Any = profile.profiler.kineto_results.events()
    there = [one for one in events if one.device_type().name == "CUDA" and one.duration_ns() > 0]
    end = total = 0
    for one in sorted(there, key=lambda one: one.start_ns()):  # a time in which two kernels run counts once
        stop = one.start_ns() + one.duration_ns()
        total, end = total + max(0, stop - max(end, one.start_ns())), max(end, stop)
    kernels = sum(not one.name().startswith(("Memcpy", "Memset")) for one in there)
    launches = sum(one.name() in (*_LAUNCHES, *_COPIES) for one in events)
    return total / 1e9 / num, round(kernels / num), round(launches / num)
