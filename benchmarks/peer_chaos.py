"""The peers of the soak, and the events that disturb them: kills and pauses at times drawn from a seed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.peer_steps import forked, row_of
from fedbilevel.federation.algorithm import PeerAlgorithm, Peers
from fedbilevel.peers import participant
from fedbilevel.peers.plan import PeerPlan
from fedbilevel.peers.roster import read_roster, read_secret
from fedbilevel.peers.sockets import Sockets
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.runs.result import Progress

WIDTH = 1000  # numbers in a row
PER_SECOND = 1.0  # outer iterations that begin in a second, if nothing happens
SUSPECT = 3.0  # seconds of silence
BETWEEN = 4.0  # seconds between two events, in the mean
LONGEST = 7.0  # seconds of the longest absence of a peer
LOOK = 2.0  # seconds between looks at the memory


# ---- what the peers run --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Paced(PeerAlgorithm):
    """One average of new rows in every outer iteration, which begins at its scheduled time or later."""

    uses = ("mix",)
    start: float = 0.0
    each: float = 0.0
    book: str = ""

    class State(NamedTuple):
        x: Tensor
        y: Tensor

    def init(self, peers: Peers) -> State:
        return self.State(*peers.initial())

    def round(self, peers: Any, state: State) -> State:
        early = self.start + self.each * peers.iteration - time.monotonic()
        if early > 0:
            time.sleep(early)
        value = peers.mix(y=row_of(peers.me, state.y.shape[1], peers.iteration)[None].to(state.y.dtype))
        group, error = nearest(value[0].double(), peers.num_clients, peers.iteration)
        line = {
            "iteration": peers.iteration,
            "members": peers.members_by_averaging[-1],
            "group": group,
            "error": error,
            "time": time.monotonic(),
        }
        with open(self.book, "a") as file:
            file.write(json.dumps(line) + "\n")
        return self.State(state.x, value)


def counts_for(peer: int) -> int:
    """Number of samples of a peer, its weight in means."""
    return peer + 1


def nearest(value: Tensor, num: int, iteration: int) -> tuple[list[int], float]:
    """The group of peers whose mean is nearest to this value, and the relative error."""
    rows = torch.stack([row_of(peer, len(value), iteration).double() for peer in range(num)])
    weights = torch.tensor([counts_for(peer) for peer in range(num)], dtype=torch.float64)
    groups = [list(group) for size in range(1, num + 1) for group in combinations(range(num), size)]
    means = torch.stack([weights[group] @ rows[group] / weights[group].sum() for group in groups])
    apart = torch.linalg.vector_norm(means - value, dim=1) / torch.linalg.vector_norm(means, dim=1)
    best = int(apart.argmin())
    return groups[best], float(apart[best])


@dataclass(frozen=True)
class SoakPlan(PeerPlan):
    """A plan whose algorithm and problem have no names.

    Every peer has its own book, so the book is set where the plan is used.
    """

    start: float = 0.0
    each: float = 0.0

    def built_task(self) -> Any:
        return _Wide()

    def built_algorithm(self) -> PeerAlgorithm:
        return Paced(start=self.start, each=self.each, book=_book)


class _Wide:
    def problem(self, _shapes: Any) -> Problem:
        loss = lambda x, y, batch: (batch["weight"] * (y["w"].sum() - x["x"] - batch["a"][:, 0]) ** 2).sum()
        return Problem(
            upper=loss,
            lower=loss,
            x0={"x": torch.zeros(1)},
            y0={"w": torch.zeros(WIDTH)},
            client_weights="by_samples",
            name="soak",
        )


_book = ""  # of the peer in this process; the plan is the same everywhere


def _peer(place: str, plan: SoakPlan, number: int, done: Any) -> None:
    global _book
    torch.set_num_threads(1)
    folder = Path(place)
    _book = str(folder / f"p{number}.values")
    roster, secret = read_roster(folder / "roster.toml"), read_secret(folder / f"p{number}.key")
    ones = np.ones((counts_for(number), 1), np.float32)
    holdings: Holdings = {"train": {"a": ones}, "val": {"a": ones}}
    with open(folder / f"p{number}.log", "a", buffering=1) as log:
        os.dup2(log.fileno(), 2)  # tracebacks go to the log, too

        def say(line: str) -> None:
            log.write(f"{time.monotonic():.2f} {line}\n")

        def tell(now: Progress) -> None:
            done[number] = now.iteration

        say(f"started as {os.getpid()}")
        participant.take_part(
            plan,
            [one.name for one in roster.peers],
            number,
            lambda most: Sockets(roster, number, secret, max_bytes=most, log=say),
            holdings,
            folder / f"run{number}",
            roster=roster.digest(),
            say=say,
            callbacks=[tell],
            beat=0.2,
            interval=0.03,
        )
        say("finished")


# ---- what happens to them ------------------------------------------------------------------------------------------


class Chaos:
    """Starts peers, and kills or pauses them as the seed determines."""

    def __init__(self, folder: Path, plan: SoakPlan, num: int, seed: int, say: Callable[[str], None]) -> None:
        self.folder, self.plan, self.num, self._say = folder, plan, num, say
        self._draw = random.Random(seed)
        self.spared = self._draw.randrange(num)
        self.most = max(1, num - plan.quorum + 1)  # one more than the quorum allows
        self.done = forked.RawArray("i", num)  # without a lock, which a killed peer could hold
        self.running: dict[int, Any] = {}
        self.pids: list[tuple[int, int]] = []
        self.events: list[dict[str, Any]] = []
        self.looks: dict[tuple[int, int], list[tuple[float, float]]] = {}  # (peer, process) -> (time, megabytes)
        self.failures: list[str] = []
        self._back: dict[int, tuple[float, str]] = {}  # peer -> time of its return, kind of event
        self._ended: set[int] = set()
        self._before = [0] * num  # outer iterations done at the start of each process

    def start(self, peer: int) -> None:
        self.running[peer] = forked.Process(
            target=_peer, args=(str(self.folder), self.plan, peer, self.done), daemon=True
        )
        self.running[peer].start()
        self._before[peer] = self.done[peer]
        self.pids.append((peer, self.running[peer].pid))

    def run(self, until: float, limit: float) -> None:
        """Run until all peers have finished.

        until: time of the last event; limit: time after which unfinished peers are failures.
        """
        for peer in range(self.num):
            self.start(peer)
        begun = time.monotonic()
        next_event, next_look = self.plan.start + self._draw.expovariate(1 / BETWEEN), begun
        while len(self._ended) < self.num:
            now = time.monotonic()
            self._see_who_ended()
            for peer in [peer for peer, (when, _) in self._back.items() if now >= when]:
                self._return(peer)
            if now >= next_event:
                next_event = now + self._draw.expovariate(1 / BETWEEN)
                if now < until and max(self.done) < self.plan.num_iterations - 2 * PER_SECOND * LONGEST:
                    self._disturb(now)
            if now >= next_look:
                next_look = now + LOOK
                self._look(now)
            if now > limit:
                self.failures += [
                    f"p{peer} has not finished: it is at outer iteration {self.done[peer]}."
                    for peer in range(self.num)
                    if peer not in self._ended
                ]
                return
            time.sleep(0.02)

    def _see_who_ended(self) -> None:
        for peer, process in self.running.items():
            if peer in self._back or peer in self._ended or process.is_alive():
                continue
            self._ended.add(peer)
            if process.exitcode != 0:
                last = (self.folder / f"p{peer}.log").read_text().splitlines()[-3:]
                self.failures.append(f"p{peer} ended with {process.exitcode}: {' / '.join(last)}")

    def _disturb(self, now: float) -> None:
        free = [peer for peer in range(self.num) if peer not in self._back and peer not in self._ended]
        if not free or len(self._back) >= self.most:
            return
        peer, kind, seconds = (
            self._draw.choice(free),
            self._draw.choice(("kill", "stop")),
            self._draw.uniform(0.3, LONGEST),
        )
        if peer == self.spared:
            kind, seconds = "stop", min(seconds, SUSPECT / 2)
        os.kill(self.running[peer].pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        self._back[peer] = now + seconds, kind
        self.events.append(
            {"time": round(now, 2), "peer": peer, "kind": kind, "seconds": round(seconds, 2), "done": list(self.done)}
        )
        self._say(f"{now:.2f} {kind} p{peer} for {seconds:.1f} s, outer iterations {list(self.done)}")

    def _return(self, peer: int) -> None:
        _, kind = self._back.pop(peer)
        if kind == "stop":
            os.kill(self.running[peer].pid, signal.SIGCONT)
        else:
            self.running[peer].join()
            self.start(peer)

    def _look(self, now: float) -> None:
        for peer, process in self.running.items():
            busy = peer not in self._back and peer not in self._ended and self.done[peer] > self._before[peer]
            if busy and (size := resident(process.pid)):
                self.looks.setdefault((peer, process.pid), []).append((now, size))

    def stop(self) -> None:
        """End all processes."""
        for process in self.running.values():
            if process.is_alive():
                process.kill()
            process.join()

    def left_over(self) -> list[int]:
        return [pid for _, pid in self.pids if os.path.exists(f"/proc/{pid}")]


def resident(pid: int) -> float | None:
    """Resident megabytes of a process, or None if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except (OSError, IndexError):
        return None
