"""Steps of Push-Sum and robust averages between peers: one process each, over encrypted loopback."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.clock import Row, Setup, Timing, rows_of

if TYPE_CHECKING:
    from benchmarks.peer_steps import Fleet
    from fedbilevel.engines.peer_simulation import PeerSimulation

TITLE = "Peers"
ABOUT = """One step of Push-Sum between peers that are processes of their own with one thread each, over loopback
and encrypted (CURVE): every peer sends a row of float32 along the links of random_directed and has those of all
that send to it. `engine` is `Peer.push`, with the network of the step, sums in float64, the check for finite values
and the ledger; `office` is sending and awaiting the rows alone, with heads, checks and what is kept to be sent
again. The floor is the same rows between the same processes through bare pyzmq sockets of the same kinds with
CURVE, one frame each, used by the thread that waits for them: no head, no allow-list, no office, no second thread,
no sums. `simulator` is the step of `PeerSimulation` in one process and thread. All take turns and go through the
same steps of the network; a turn lasts until the slowest peer is through. `wire` is bytes that TCP sent, by the
kernel's own count, for a byte of the ledger; CPU is of all processes and threads for 10^9 bytes of the ledger. Then
one robust average until all know that they agree, with no message lost and with 30 % of all messages lost on
purpose: wakes and messages with running sums are means over the peers, `error` is the largest distance of a peer's
value from the exact mean as a share of its length. Peers that have more processes than there are cores wait for the
system's scheduler too: read the ratios, with the load beside them."""
HEADINGS = {
    "messages": "messages in a step",
    "messages_each": "messages of a peer",
    "wakes": "wakes of a peer",
    "wire": "wire / ledger",
    "cpu_per_gb": "CPU s / GB",
    "floor_cpu_per_gb": "floor CPU s / GB",
}
PEERS = (2, 4, 8)
WIDTHS = {"1k": (1_000, 40), "160k": (160_000, 4)}  # numbers, steps in a turn
ROBUST = (4, 10_000)  # peers, numbers
LOSSES = (0.0, 0.3)


def skipped(setup: Setup) -> str | None:
    if find_spec("zmq") is None:
        return "Skipped: pyzmq is not installed (pip install 'fedbilevel[peers]')."
    return "Skipped: messages do not pass through a GPU." if setup.cuda else None


def rows(setup: Setup) -> list[Row]:
    from benchmarks.peer_steps import Fleet

    peers, widths, robust = ((2,), {"50": (50, 3)}, (2, 50)) if setup.small else (PEERS, WIDTHS, ROBUST)
    found: list[Row] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="fedbilevel-bench-") as place:
            for num in peers:
                with Fleet(Path(place) / f"steps-{num}", num, threads=setup.small) as fleet:
                    for label, (width, steps) in widths.items():
                        found += step_rows(
                            fleet, simulator(num), f"{num} peers, {label} float32", width, steps, setup.rounds
                        )
            for loss in LOSSES:
                with Fleet(Path(place) / f"robust-{loss}", robust[0], loss=loss, threads=setup.small) as fleet:
                    found.append(robust_row(fleet, robust[1], loss, setup.rounds))
    finally:
        torch.set_num_threads(threads)
    return found


def simulator(num: int) -> PeerSimulation:
    from benchmarks.peer_steps import tiny
    from fedbilevel.algorithms.sgp import SGP
    from fedbilevel.engines.peer_simulation import PeerSimulation
    from fedbilevel.federation.network import Network

    problem, holdings = tiny()
    return PeerSimulation(
        SGP(), problem, [holdings] * num, network=Network(kind="random_directed"), check_connected=False
    )


def step_rows(fleet: Fleet, simulated: PeerSimulation, name: str, width: int, steps: int, rounds: int) -> list[Row]:
    from benchmarks.peer_steps import row_of

    fleet.ask("prepare", width)
    values, before = torch.stack([row_of(peer, width) for peer in range(fleet.num)]), os.getloadavg()[0]
    seconds: dict[str, list[float]] = {what: [] for what in ("engine", "office", "simulator", "floor")}
    used: dict[str, list[dict[str, float]]] = {what: [] for what in seconds}
    for turn in range(rounds + 1):
        for what in seconds:
            if what == "simulator":
                took, spent = _simulated(simulated, values, turn * steps, steps), {}
            else:
                first = fleet.ask("used")
                took = lasted(fleet.ask(what, turn * steps, steps))
                spent = spent_between(first, fleet.ask("used"))
            if turn:  # the first is to warm up
                seconds[what].append(took / steps)
                used[what].append(spent)
    messages = sum(int(simulated.links.mixing(step).sent.sum()) for step in range(steps, (rounds + 1) * steps)) / (
        rounds * steps
    )
    load = {"load_before": before, "load_after": os.getloadavg()[0]}
    timed = rows_of(name, {what: Timing.of(values) for what, values in seconds.items()})
    return [{**row, "messages": messages, **costs(row["what"], used), "floor_is": "pyzmq", **load} for row in timed]


def costs(what: str, used: Mapping[str, Sequence[Mapping[str, float]]]) -> Row:
    """Costs per byte in the ledger of the engine; the others send the same number of rows."""
    if what == "simulator":
        return {}
    total = lambda which, kind: sum(spent[kind] for spent in used[which])
    paid = total("engine", "ledger")
    wire = {"wire": total(what, "wire") / paid} if math.isfinite(total(what, "wire")) else {}
    return {
        **wire,
        "cpu_per_gb": total(what, "cpu") / paid * 1e9,
        "floor_cpu_per_gb": total("floor", "cpu") / paid * 1e9,
    }


def robust_row(fleet: Fleet, width: int, loss: float, rounds: int) -> Row:
    before = os.getloadavg()[0]
    turns = [fleet.ask("average", width, turn) for turn in range(rounds + 1)][1:]
    timing = Timing.of([lasted(answers) for answers in turns])
    mean = lambda kind: statistics.mean(one[kind] for answers in turns for one in answers)
    return {
        "name": f"robust average, {fleet.num} peers, {width / 1000:g}k float32",
        "what": f"{loss:.0%} lost",
        "seconds": timing.median,
        "spread": timing.spread,
        "wakes": mean("wakes"),
        "messages_each": mean("messages"),
        "error": max(one["error"] for answers in turns for one in answers),
        "load_before": before,
        "load_after": os.getloadavg()[0],
    }


def lasted(answers: Sequence[Mapping[str, float]]) -> float:
    """From the first that began to the last that ended."""
    return max(one["end"] for one in answers) - min(one["begin"] for one in answers)


def spent_between(first: Sequence[Mapping[str, float]], last: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {
        kind: sum(after[kind] - before[kind] for before, after in zip(first, last, strict=True)) for kind in first[0]
    }


def _simulated(simulated: Any, values: torch.Tensor, start: int, steps: int) -> float:
    simulated.time = start
    begin = time.perf_counter()
    weights, y = simulated.weights, values
    for _ in range(steps):
        weights, y = simulated.push(weights, y=y)
    return time.perf_counter() - begin
