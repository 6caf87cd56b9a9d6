"""`python -m benchmarks.peer_soak`: a long run of peers that lose messages, die and pause."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks import results
from benchmarks.clock import Row, Setup
from benchmarks.federation import lines
from benchmarks.peer_steps import forked, row_of
from fedbilevel.federation.algorithm import PeerAlgorithm, Peers
from fedbilevel.peers import participant
from fedbilevel.peers.local import free_ports
from fedbilevel.peers.plan import PeerPlan, plan_of
from fedbilevel.peers.roster import assemble, keygen, read_roster, read_secret
from fedbilevel.peers.sockets import Sockets
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.runs.result import Progress

WIDTH = 1000  # numbers in a row
PER_SECOND = 1.0  # outer iterations that begin in a second, if nothing happens
SUSPECT = 3.0  # seconds of silence
BETWEEN = 4.0  # seconds between two events, in the mean
LONGEST = 7.0  # seconds of the longest absence of a peer
QUIET = 15.0  # seconds without events at the end
CLOSE = 1e-5  # relative error of an average that passes
CEILING = 50.0  # megabytes that a process may grow by
LOOK = 2.0  # seconds between looks at the memory
ABOUT = """One robust average of rows of {width} float32 in every outer iteration, {iterations} of them paced over
{minutes:g} minutes, between {peers} peers over encrypted loopback, which lose {loss:.0%} of all messages on purpose
(on_change '{on_change}', silent for {suspect:g} s is gone, seed {seed}). Meanwhile peers are killed (SIGKILL) and
started again, or stopped (SIGSTOP) and woken, at times drawn from the seed: up to {most} at once, each for up to
{longest:g} s. {spared} is spared from kills and from stops that are as long as the silence. Every value is compared
with the exact means of all groups that there could be."""
RUN = """`formations` is how often a group began, at the peer that saw most. `repeated` are outer iterations that
the peer's diary has more than once, as they were begun again after their end. `other members` are values that are
the exact mean of another group than the diary names. A failure is a peer that did not finish, a record of the
spared peer without each outer iteration exactly once, one of another peer that does not grow to the last, a value
that is no mean of any group, peers that count each other in but have different values, last averages that are not
the exact one of all peers, a process left over, or one that grew by {ceiling:.0f} MB or more."""
MEMORY = """Of every process that was looked at for 10 s or longer: resident memory at the first look and the last;
the first is after an outer iteration of its own."""
HEADINGS = {
    "megabytes_first": "RSS first, MB",
    "megabytes_last": "RSS last, MB",
    "growth": "growth, MB",
    "lived": "looked at for, s",
    "per_minute": "growth per minute, MB",
    "error": "largest error",
    "ceiling": "ceiling, MB",
}


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
            weights="by_samples",
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


# ---- summing up ----------------------------------------------------------------------------------------------------


def last_values(values: Iterable[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """The last value of every outer iteration, which may have begun again after its end."""
    return {line["iteration"]: line for line in values}


def failures_in(
    values: Sequence[Sequence[Mapping[str, Any]]], records: Sequence[Sequence[int]], spared: int, num_iterations: int
) -> list[str]:
    """One sentence per failure.

    values: lines of the book of every peer; records: outer iterations that every peer measured.
    """
    found, last = [], [last_values(each) for each in values]
    for peer, record in enumerate(records):
        if peer == spared and list(record) != list(range(num_iterations + 1)):
            odd = sorted(
                (set(range(num_iterations + 1)) - set(record))
                | {number for number, times in Counter(record).items() if times > 1}
            )
            found.append(
                f"the record of p{peer}, which was always there, lacks or repeats outer iterations {odd[:10]}."
            )
        if any(after <= before for before, after in pairwise(record)) or list(record[-1:]) != [num_iterations]:
            found.append(f"the record of p{peer} does not grow to outer iteration {num_iterations}.")
    for peer, each in enumerate(values):
        bad = [line for line in each if line["error"] > CLOSE]
        if bad:
            found.append(
                f"{len(bad)} values of p{peer} are not the mean of any group, the first in outer iteration "
                f"{bad[0]['iteration']}: off by {bad[0]['error']:.1e}."
            )
    for one, other in combinations(range(len(values)), 2):
        for iteration in sorted(set(last[one]) & set(last[other])):
            groups = [last[peer][iteration]["group"] for peer in (one, other)]
            if groups[0] != groups[1] and all(peer in group for peer in (one, other) for group in groups):
                found.append(
                    f"in outer iteration {iteration} p{one} has the mean of {groups[0]} "
                    f"and p{other} that of {groups[1]}."
                )
    everybody = list(range(len(values)))
    for peer, newest in enumerate(last):
        if num_iterations in newest and newest[num_iterations]["group"] != everybody:
            found.append(f"the last average of p{peer} is that of {newest[num_iterations]['group']}.")
    return found


def memory_rows(looks: Mapping[tuple[int, int], Sequence[tuple[float, float]]]) -> list[Row]:
    found = []
    for (peer, pid), each in looks.items():
        (begun, first), (ended, last) = each[0], each[-1]
        if ended - begun >= 10:
            found.append(
                {
                    "name": f"p{peer}, process {pid}",
                    "what": "memory",
                    "lived": ended - begun,
                    "megabytes_first": first,
                    "megabytes_last": last,
                    "growth": last - first,
                    "per_minute": (last - first) / (ended - begun) * 60,
                    "ceiling": CEILING,
                }
            )
    return found


def peer_row(folder: Path, peer: int, values: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> Row:
    said = (folder / f"p{peer}.log").read_text().splitlines()
    diary = lines(folder / f"run{peer}" / participant.DIARY)
    seen = Counter(line["iteration"] for line in diary)
    refused: Counter[str] = Counter()
    for line, after in pairwise([*diary, {"refused": {}}]):  # counts begin anew with a process
        if sum(after["refused"].values()) < sum(line["refused"].values()):
            refused.update(line["refused"])
    kinds = Counter(event["kind"] for event in events if event["peer"] == peer)
    return {
        "name": f"p{peer}",
        "what": "peer",
        "kills": kinds["kill"],
        "stops": kinds["stop"],
        "formations": sum(" peers begin " in line for line in said),
        "iterations": len(seen),
        "repeated": sum(times > 1 for times in seen.values()),
        "other_members": sum(line["group"] != line["members"] for line in values),
        "error": max((line["error"] for line in values), default=float("inf")),
        "refused": ", ".join(f"{reason} {number}" for reason, number in sorted(refused.items())) or "none",
    }


# ---- the command ---------------------------------------------------------------------------------------------------


def soak(
    folder: Path, num: int, minutes: float, loss: float, seed: int, on_change: str, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Sections of a page of results."""
    begun, before = datetime.now(UTC), os.getloadavg()[0]
    iterations = round(60 * minutes * PER_SECOND)
    publics = [
        keygen(folder / f"p{peer}.key", name=f"p{peer}", address=f"127.0.0.1:{port}")
        for peer, port in enumerate(free_ports(num))
    ]
    assemble(publics, folder / "roster.toml")
    content = {
        "name": "soak",
        "num_iterations": iterations,
        "measure_every": 1,
        "suspect": SUSPECT,
        "join_deadline": 60.0,
        "on_change": on_change,
        "task": {"name": "quadratic", "num_clients": num},
        "algorithm": {"name": "hgp", "lower_solver": "mix"},
        "options": {
            "seed": seed,
            "network": {"kind": "random_directed", "loss": loss, "seed": seed},
            "averaging": {"kind": "robust"},
        },
    }
    start = time.monotonic() + 3
    plan = SoakPlan(**vars(plan_of(content, num)), start=start, each=60 * minutes / iterations)
    chaos = Chaos(folder, plan, num, seed, say)
    try:
        chaos.run(start + 60 * minutes - QUIET, start + 120 * minutes + 120)
    finally:
        chaos.stop()
    took = time.monotonic() - start
    values = [lines(place) if (place := folder / f"p{peer}.values").exists() else [] for peer in range(num)]
    records = [[line["iteration"] for line in lines(folder / f"run{peer}" / "metrics.jsonl")] for peer in range(num)]
    memory = memory_rows(chaos.looks)
    failures = [*chaos.failures, *failures_in(values, records, chaos.spared, iterations)]
    failures += [f"process {pid} is left." for pid in chaos.left_over()]
    failures += [f"{row['name']} grew by {row['growth']:.0f} MB." for row in memory if row["growth"] >= CEILING]
    where = {**results.circumstances(Setup(threads=1, rounds=iterations)), "time": begun.isoformat(timespec="seconds")}
    about = ABOUT.format(
        width=WIDTH,
        iterations=iterations,
        minutes=minutes,
        peers=num,
        loss=loss,
        on_change=on_change,
        suspect=SUSPECT,
        seed=seed,
        most=chaos.most,
        longest=LONGEST,
        spared=f"p{chaos.spared}",
    )
    head = {"where": where, "headings": HEADINGS}
    table = [peer_row(folder, peer, values[peer], chaos.events) for peer in range(num)]
    whole: Row = {
        "name": "all",
        "what": "run",
        "seconds": took,
        "kills": sum(row["kills"] for row in table),
        "stops": sum(row["stops"] for row in table),
        "formations": max(row["formations"] for row in table),
        "iterations": iterations,
        "failures": len(failures),
        "load_before": before,
        "load_after": os.getloadavg()[0],
    }
    return {
        "peer_soak": {
            "title": "Soak of peers",
            "about": f"{about} {RUN.format(ceiling=CEILING)}",
            **head,
            "rows": [whole, *table],
            "failures": failures,
            "events": chaos.events,
        },
        "peer_memory": {"title": "Soak of peers: memory", "about": f"{about} {MEMORY}", **head, "rows": memory},
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peer_soak",
        description="Peers that are killed, stopped and lose messages; see benchmarks/README.md.",
    )
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=5.0, help="for which outer iterations are paced (default 5)")
    parser.add_argument("--loss", type=float, default=0.3, help="share of messages that are lost (default 0.3)")
    parser.add_argument(
        "--seed", type=int, default=1, help="of what is lost, and of what happens when to whom (default 1)"
    )
    parser.add_argument(
        "--on-change",
        choices=("continue", "restart"),
        default="continue",
        help="what an average makes of a loss (default continue)",
    )
    parser.add_argument(
        "--save",
        nargs="?",
        const="peer_soak",
        default=None,
        metavar="NAME",
        help="write results/NAME.json (default: peer_soak) and RESULTS.md",
    )
    parser.add_argument(
        "--folder", type=Path, default=results.FOLDER, help="where results are saved (default benchmarks/results)"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        default=None,
        help="a new folder for logs and records, which stays (default: a temporary one)",
    )
    given = parser.parse_args(words)
    if not 3 <= given.peers <= 8 or given.minutes < 0.5:
        parser.error(
            f"{given.peers} peers for {given.minutes:g} minutes, expected 3 to 8 for at least 0.5: "
            "with fewer peers none can be spared."
        )
    if given.keep is not None:
        given.keep.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="fedbilevel-soak-") as temporary:
        place = given.keep or Path(temporary)
        sections = soak(
            place,
            given.peers,
            given.minutes,
            given.loss,
            given.seed,
            given.on_change,
            lambda text: print(text, flush=True),
        )
    for section in sections.values():
        print(
            f"\n{section['title']}\n{section['about']}\n\n{results.table(section['rows'], section['headings'])}",
            flush=True,
        )
    failures = sections["peer_soak"]["failures"]
    for text in failures:
        print(text)
    if given.save is not None:
        results.save(given.save, sections, given.folder)
    return 1 if failures else 0


if __name__ == "__main__":
    from benchmarks.peer_soak import main as run  # a process finds what it runs in the module by its name

    sys.exit(run())
