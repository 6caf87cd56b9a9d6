"""Time per round and peak memory against numbers of clients, cohort, model size and local steps."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.clock import Row, Setup, Timing, seconds_of
from benchmarks.problems import random
from fedbilevel import plots
from fedbilevel.algorithms.fbo_aggitd import FBOAggITD
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import FedBilevelError
from fedbilevel.federation.algorithm import Cohort

TITLE = "Growth"
ABOUT = """Outer iterations of FBO-AggITD (N = 1) on random images of 784 pixels, four for training and two for
validation per client, with a network of 100 hidden units, 5 local steps and a cohort of 100 where nothing else is
said; seconds are per round. Each size is run in a process of its own. Peak memory is what the run adds to the
process: on a CPU the growth of its largest resident size, on CUDA the most that was allocated; `data` is the size
of the clients' arrays, of which the library keeps a copy. The parameters of both levels are counted, with four
clients. Clients: the ratio is to 100 clients; aims: at 10,000 at
most 1.2 times the time, and at most 1.5 times the memory of 100 clients plus the data. Elsewhere the ratio is to
growth in proportion from the smallest size: below one is better than that."""

HEADINGS = {"floor_seconds": "reference, s", "ratio": "x reference", "memory_ratio": "memory, x reference"}
BASE = {"clients": 100, "cohort": 100, "hidden": 100, "steps": 5}
PANELS = {
    "clients": ("clients, cohort of 100", [10, 100, 1000, 10_000, 100_000]),
    "cohort": ("cohort, of 1000 clients", [10, 30, 100, 300, 1000]),
    "hidden": ("hidden units", [50, 100, 200, 400, 800]),
    "steps": ("local steps", [1, 5, 10, 20, 40]),
    "parameters": ("parameters, 4 clients", [10**6, 10**7, 10**8]),
}
SMALL = {"clients": [2, 4], "cohort": [1, 2], "hidden": [2, 4], "steps": [1, 2], "parameters": [100, 200]}
PIXELS, FEW_PIXELS, CLASSES = 784, 16, 10

_STATUS = Path("/proc/self/status")


def rows(setup: Setup) -> list[Row]:
    found: list[Row] = []
    for panel, (label, sizes) in PANELS.items():
        if setup.cases and panel not in setup.cases:
            continue
        mine: list[Row] = []
        for size in SMALL[panel] if setup.small else sizes:
            asked = {**BASE, **({"clients": 1000} if panel == "cohort" else {}), panel: size}
            if setup.small:
                asked = {"clients": 4, "cohort": 2, "hidden": 4, "steps": 1, panel: size}
            if panel == "parameters":
                pixels = FEW_PIXELS if setup.small else PIXELS
                asked |= {"clients": 4, "hidden": -(-asked.pop(panel) // (pixels + CLASSES))}
            asked["cohort"] = min(asked["cohort"], asked["clients"])
            got = (measure if setup.small else in_a_process)(
                {
                    **asked,
                    "device": setup.device,
                    "threads": setup.threads,
                    "rounds": setup.rounds,
                    "small": setup.small,
                }
            )
            mine.append({"name": label, "what": f"{panel} = {size}", "size": size, **got})
        first = (
            mine[0] if panel != "clients" else next((row for row in mine if row["size"] == BASE["clients"]), mine[0])
        )
        for row in mine:
            grown = 1.0 if panel == "clients" else row["size"] / first["size"]
            memory = first["memory_mb"] + row["data_mb"] if panel == "clients" else first["memory_mb"] * grown
            row["floor_seconds"], row["ratio"] = first["seconds"] * grown, row["seconds"] / (first["seconds"] * grown)
            row["memory_ratio"] = row["memory_mb"] / memory
        found += mine
    return found


def in_a_process(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure in a new process, because the peak memory of a process never decreases."""
    here = os.pathsep.join([str(Path(__file__).resolve().parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.growth", json.dumps(asked)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": here},
    )
    if done.returncode:
        raise FedBilevelError(
            f"the process for {asked} ended with {done.stderr.strip().splitlines()[-1:] or done.returncode}: "
            "run it by hand to see more."
        )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    """One size, in this process."""
    torch.set_num_threads(asked["threads"])
    setup = Setup(device=asked["device"], threads=asked["threads"], rounds=asked["rounds"], small=asked["small"])
    pixels = FEW_PIXELS if setup.small else PIXELS
    _Running(
        setup, {"clients": 2, "cohort": 2, "hidden": 4, "steps": 1}, FEW_PIXELS
    ).advance()  # loads code on first use
    built = random(asked["clients"], 4, 2, pixels=pixels, hidden=asked["hidden"])
    num_bytes = sum(value.nbytes for client in built.clients for role in client.values() for value in role.values())
    before = _start(setup)
    running = _Running(setup, asked, pixels, built)
    running.advance()
    bill = running.fed.ledger.rounds
    timing = Timing.of(seconds_of(running.advance, setup) for _ in range(setup.rounds))
    memory = max(_peak(setup) - before, 1)
    return {
        "seconds": timing.median / bill,
        "spread": timing.spread,
        "memory_mb": memory / 1e6,
        "data_mb": num_bytes / 1e6,
    }


class _Running:
    def __init__(self, setup: Setup, asked: dict[str, Any], pixels: int, built: Any = None) -> None:
        built = built or random(asked["clients"], 4, 2, pixels=pixels, hidden=asked["hidden"])
        self.algorithm = FBOAggITD(num_lower_rounds=1, num_local_steps=asked["steps"], num_upper_steps=1)
        share = Cohort(asked["cohort"] / asked["clients"])
        self.fed = Simulation(
            self.algorithm,
            *built,
            cohort=share,
            batch_size={"train": 2, "val": 2, "outside": None},
            device=setup.device,
        )
        self.state, self.iteration = self.algorithm.init(self.fed), 0

    def advance(self) -> None:
        self.iteration += 1
        self.fed.begin(self.iteration)
        self.state = self.algorithm.round(self.fed, self.state)


def _start(setup: Setup) -> int:
    """Bytes in use. Resets the peak."""
    if setup.cuda:
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())
    if not _STATUS.exists():
        return _peak(setup)
    with suppress(OSError):  # where this is forbidden, an earlier peak may hide that of the run
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(setup: Setup) -> int:
    """Peak memory in bytes.

    `ru_maxrss` is the last choice: on Linux a new process inherits the value of its parent.
    """
    if setup.cuda:
        return int(torch.cuda.max_memory_allocated())
    if _STATUS.exists():
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _status(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


# ---- the picture ---------------------------------------------------------------------------------------------------


def draw(found: list[Row], path: Path) -> str:
    """Draw one panel per quantity: time on the left axis, memory on the right.

    A thin line through the last point shows proportional growth.
    """
    if not plots.available():
        return ""
    from matplotlib.figure import Figure  # draws into a file and needs no display
    from matplotlib.ticker import NullFormatter, NullLocator, ScalarFormatter

    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(10.5, 10.6), dpi=130, layout="constrained")
    *places, last = figure.subplots(3, 2).flat
    last.set_axis_off()
    for axes, (label, _) in zip(places, PANELS.values(), strict=True):
        mine = [row for row in found if row["name"] == label]
        sizes = [row["size"] for row in mine]
        beside = axes.twinx()
        for own, key, factor, colour, mark, side in (
            (axes, "seconds", 1e3, "C0", "o", "milliseconds per round"),
            (beside, "memory_mb", 1, "C1", "s", "peak memory, MB"),
        ):
            values = [factor * row[key] for row in mine]
            own.plot(sizes, values, color=colour, marker=mark, linewidth=1.6, markersize=5, label=side)
            own.plot(
                sizes,
                [values[-1] * size / sizes[-1] for size in sizes],
                color=colour,
                linewidth=0.8,
                linestyle=":",
                alpha=0.8,
            )
            own.set(xscale="log", yscale="log", ylim=(min(values) / 3, max(values) * 3))
            own.set_ylabel(side, color=colour)
            own.tick_params(axis="y", colors=colour, which="both")
            own.yaxis.set_major_formatter("{x:g}")
            own.yaxis.set_minor_formatter(NullFormatter())
        if label.startswith("clients"):
            data = [row["data_mb"] for row in mine]
            beside.plot(sizes, data, color="0.5", linewidth=0.8, linestyle="--")
            beside.annotate(
                "data",
                (sizes[-1], data[-1]),
                textcoords="offset points",
                xytext=(-14, 0),
                ha="right",
                fontsize=8,
                color="0.4",
            )
        axes.set_xticks(sizes)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(label)
        axes.grid(color="0.92", linewidth=0.6)
        axes.spines["top"].set_visible(False)
        beside.spines["top"].set_visible(False)
    figure.suptitle("Time per round (circles) and peak memory (squares); dotted: growth in proportion", fontsize=11)
    figure.savefig(path)
    return path.name


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
