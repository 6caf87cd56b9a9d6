"""Message rounds and outer iterations of a real federation, over loopback with mutual TLS."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.clock import Row, Setup, Timing
from benchmarks.sockets import HERE, Echoes

TITLE = "Federation"
ABOUT = """A message round of NVIDIA FLARE over loopback with mutual TLS: the server's job process sends every site
the same vector of float32 and waits until all have sent it back; each site has a parent and a job process of its
own, as between organisations. The floor is the same bytes there and back over plain TCP sockets, in the same job
process, to as many processes that answer and do nothing else: no transport over sockets moves less. Beside it the
same with mutual TLS 1.3 and the kits' own certificates, without FLARE. The three take turns. Aims: 160k floats in
less than 0.2 s with 2 sites and 0.5 s with 5, on two cores. Then one outer iteration of FedBiO on
hyper-representation of embedded digits (batches of 32, I = 1, one communication round) between 3 sites, each with
its data in a folder: the time between two answers of a site; here the reference is an outer iteration of the
simulator on the same data, and beside it the same run with secure sums. All processes have one thread, and all
runs write a checkpoint after each outer iteration.
`slowest answer` is what the server waited for the slowest site, by its diary; `at the slowest site` is what the
slowest of these sites needs to read, compute and write an answer, measured with the sites in one process. `load` is
the load average of the last minute before and after: the machine is not alone, and the federation itself keeps more
processes than it has cores."""
HEADINGS = {
    "p10": "p10, s",
    "p90": "p90, s",
    "max": "max, s",
    "aim": "aim, s",
    "slowest_answer": "slowest answer, s",
    "at_the_slowest_site": "at the slowest site, s",
}
NAMES = {"flare": "FLARE", "tls": "TLS sockets", "tcp": "floor"}
PARTS = {"2k": (2_000, 100), "160k": (160_000, 100), "1M": (1_000_000, 30)}  # numbers, rounds
AIMS = {(2, "160k"): 0.2, (5, "160k"): 0.5}  # seconds
SITES = (2, 5)
ITERATIONS = 300  # of the real run; the first half is not counted
REAL_SITES = 3


def skipped(setup: Setup) -> str | None:
    if find_spec("nvflare") is None:
        return "Skipped: NVIDIA FLARE is not installed (pip install 'fedbilevel[federation]')."
    if setup.cuda:
        return "Skipped: messages do not pass through a GPU."
    return "Skipped: the small version starts no federation." if setup.small else None


def rows(setup: Setup) -> list[Row]:
    found = [row for number in SITES for row in echoed(number)]
    return [*found, *real_rows(REAL_SITES, ITERATIONS)]


def names(number: int) -> list[str]:
    return [f"site-{one}" for one in range(1, number + 1)]


def environment() -> dict[str, str]:
    """Environment of the federation's processes: they import this checkout."""
    return {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE / "src")])}


def spread_out(seconds: Sequence[float]) -> Row:
    """Median, quartiles, tenths and the longest."""
    timing = Timing.of(seconds)
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return {
        "seconds": timing.median,
        "spread": timing.spread,
        "p10": tenths[0],
        "p90": tenths[-1],
        "max": max(seconds),
        "rounds": len(seconds),
    }


# ---- messages alone ------------------------------------------------------------------------------------------------


def echoed(number: int) -> list[Row]:
    from benchmarks.echo import ROUNDS
    from fedbilevel.sites.flare.job import RUNS
    from fedbilevel.sites.flare.local import Loopback

    with tempfile.TemporaryDirectory(prefix="fedbilevel-bench-") as folder, Loopback(
        Path(folder), names(number), environment=environment(), allow=["benchmarks."]
    ) as federation, Echoes([federation.kits[site] for site in federation.sites]) as echoes:  # fmt: skip
        plan: dict[str, Any] = {
            "name": "echo",
            "sites": federation.sites,
            "parts": list(PARTS.values()),
            "ports": echoes.ports,
        }
        federation.watch(
            plan, poll=2.0, max_restarts=0, server="benchmarks.echo.EchoServer", client="benchmarks.echo.EchoClient"
        )
        measured = json.loads((federation.kits["server"] / RUNS / plan["name"] / ROUNDS).read_text())
    return [row for label, part in zip(PARTS, measured, strict=True) for row in message_rows(number, label, part)]


def message_rows(number: int, label: str, part: Mapping[str, Any]) -> list[Row]:
    """One row for FLARE and one for TLS alone, as multiples of the floor."""
    least = statistics.median(part["seconds"]["tcp"])
    found = []
    for contestant in ("flare", "tls"):
        timed = spread_out(part["seconds"][contestant])
        row = {
            "name": f"{number} sites, {label} float32",
            "what": NAMES[contestant],
            **timed,
            "floor_seconds": least,
            "ratio": timed["seconds"] / least,
        }
        aim = {"aim": AIMS[number, label]} if contestant == "flare" and (number, label) in AIMS else {}
        found.append(
            {
                **row,
                **aim,
                "floor_is": "TCP sockets",
                "load_before": part["load_before"],
                "load_after": part["load_after"],
            }
        )
    return found


# ---- a real run ----------------------------------------------------------------------------------------------------


class Real(NamedTuple):
    """FedBiO on digits; each site has its own folder of data."""

    plan: dict[str, Any]
    data: dict[str, Path]


def real_run(folder: Path, name: str, number: int, num_iterations: int, *, measure_every: int | None = None) -> Real:
    from fedbilevel.data.folders import write_folder
    from fedbilevel.sites.plan import plan_of
    from fedbilevel.tasks.hyper_representation import HyperRepresentation

    sites = names(number)
    data = {site: folder / site for site in sites}
    for site, client in zip(sites, HyperRepresentation(num_clients=number).build().clients, strict=True):
        write_folder(data[site], client)
    plan = {
        "name": name,
        "sites": sites,
        "num_iterations": num_iterations,
        "measure_every": measure_every or num_iterations,
        "num_classes": 10,
        "quorum": number,
        "task": {"name": "hyper_representation", "num_clients": number},
        "algorithm": {"name": "fedbio"},
        "options": {"seed": 1, "batch_size": 32},
    }
    return Real(plan_of(plan).asdict(), data)


def with_secure_sums(plan: Mapping[str, Any]) -> dict[str, Any] | None:
    """The same plan with secure sums, if they are installed."""
    if find_spec("Crypto") is None:
        return None
    return {**plan, "name": f"{plan['name']}-secure", "options": {**plan["options"], "aggregation": {"secure": True}}}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def gaps(left: Iterable[Mapping[str, Any]], run: str) -> list[float]:
    """Seconds between the last answers of successive outer iterations, from a site's audit log."""
    last = {line["iteration"]: line["time"] for line in left if line["run"] == run and line["kind"] == "phase"}
    times = [last[iteration] for iteration in sorted(last)]
    return [after - before for before, after in pairwise(times)]


def slowest(diary: Iterable[Mapping[str, Any]]) -> list[float]:
    """Seconds of the slowest site in every outer iteration."""
    return [max(line["sites"].values()) for line in diary if line["sites"]]


def second_half(values: Sequence[float]) -> list[float]:
    """The second half of the values, after code was loaded and traced."""
    return list(values[len(values) // 2 :])


def real_rows(number: int, num_iterations: int) -> list[Row]:
    from fedbilevel.sites.chain import LEFT
    from fedbilevel.sites.flare.job import RUNS, SITE
    from fedbilevel.sites.flare.local import Loopback

    before = os.getloadavg()[0]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="fedbilevel-bench-") as place:
            folder = Path(place)
            real = real_run(folder / "data", "fedbio", number, num_iterations)
            secure = with_secure_sums(real.plan)
            simulated, computing = (
                second_half(_simulated(real, folder / "simulated")),
                second_half(slowest(_in_one_process(real, folder / "here"))),
            )
            with Loopback(
                folder / "federation", real.plan["sites"], data=real.data, auto_approve=True, environment=environment()
            ) as federation:
                federation.watch(real.plan, poll=2.0, max_restarts=0)
                if secure is not None:
                    federation.watch(secure, poll=2.0, max_restarts=0)
                left = lines(federation.kits[real.plan["sites"][0]] / SITE / LEFT)
                diary = lines(federation.kits["server"] / RUNS / real.plan["name"] / "sites.jsonl")
    finally:
        torch.set_num_threads(threads)
    load = {"load_before": before, "load_after": os.getloadavg()[0]}
    masked = [] if secure is None else second_half(gaps(left, secure["name"]))
    plain = second_half(gaps(left, real.plan["name"]))
    return iteration_rows(number, plain, second_half(slowest(diary)), computing, simulated, load, masked)


def iteration_rows(
    number: int,
    federation: Sequence[float],
    answers: Sequence[float],
    computing: Sequence[float],
    simulated: Sequence[float],
    load: Mapping[str, float],
    secure: Sequence[float] = (),
) -> list[Row]:
    timed, base = spread_out(federation), spread_out(simulated)
    least = base["seconds"]
    name, more = f"FedBiO on digits, {number} sites", {"floor_is": "simulator", **load}
    known = {"slowest_answer": statistics.median(answers), "at_the_slowest_site": statistics.median(computing)}
    masked = spread_out(secure) if secure else {}
    ratio = {"floor_seconds": least, "ratio": masked["seconds"] / least, **more} if masked else {}
    beside = [{"name": name, "what": "outer iteration, FLARE, secure sums", **masked, **ratio}] if masked else []
    return [
        {
            "name": name,
            "what": "outer iteration, FLARE",
            **timed,
            "floor_seconds": least,
            "ratio": timed["seconds"] / least,
            **known,
            **more,
        },
        *beside,
        {"name": name, "what": "outer iteration, simulator", **base, "floor_seconds": least, "ratio": 1.0, **more},
    ]


def _simulated(real: Real, record: Path) -> list[float]:
    from fedbilevel import solve
    from fedbilevel.data.folders import read_folder
    from fedbilevel.sites.plan import plan_of

    plan = plan_of(real.plan)
    clients = [read_folder(place, num_classes=plan.num_classes) for place in real.data.values()]
    times: list[float] = []
    solve(
        plan.built_task().build().problem,
        clients,
        plan.built_algorithm(),
        residuals=False,
        num_iterations=plan.num_iterations,
        measure_every=plan.num_iterations,
        checkpoint_every=1,
        record=record,
        callbacks=[lambda _now: times.append(time.perf_counter())],
        **plan.options,
    )
    return [after - before for before, after in pairwise(times[:-1])]  # the last outer iteration includes a measurement


def _in_one_process(real: Real, folder: Path) -> list[dict[str, Any]]:
    """The diary of the same run with the sites in this process, where a site's time is its own work."""
    from fedbilevel.sites.policy import FILE
    from fedbilevel.sites.serve import serve
    from fedbilevel.sites.site import Site
    from fedbilevel.sites.transport import InProcess

    for site, data in real.data.items():
        (folder / site).mkdir(parents=True)
        (folder / site / FILE).write_text(f"data = {json.dumps(str(data))}\nauto_approve = true\n")
    sites = {site: Site(site, folder / site) for site in real.data}
    transport: Any = InProcess({site: one.handle for site, one in sites.items()})
    serve(real.plan, transport, folder / "record", lambda _: None)
    for one in sites.values():
        one.close()
    return lines(folder / "record" / "sites.jsonl")
