"""`python -m benchmarks.peer_soak`: a long run of peers that lose messages, die and pause."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.clock import Row, Setup
from benchmarks.federation import lines
from benchmarks.peer_chaos import LONGEST, PER_SECOND, SUSPECT, WIDTH, Chaos, SoakPlan
from fedbilevel.peers import participant
from fedbilevel.peers.local import free_ports
from fedbilevel.peers.plan import plan_of
from fedbilevel.peers.roster import assemble, keygen

QUIET = 15.0  # seconds without events at the end
CLOSE = 1e-5  # relative error of an average that passes
CEILING = 50.0  # megabytes that a process may grow by
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


def whole_row(table: Sequence[Row], took: float, iterations: int, num_failures: int, load: Mapping[str, float]) -> Row:
    """The row of the run, from the rows of its peers."""
    return {
        "name": "all",
        "what": "run",
        "seconds": took,
        "kills": sum(row["kills"] for row in table),
        "stops": sum(row["stops"] for row in table),
        "formations": max(row["formations"] for row in table),
        "iterations": iterations,
        "failures": num_failures,
        **load,
    }


# ---- the command ---------------------------------------------------------------------------------------------------


def plan_for(
    folder: Path, num: int, minutes: float, start: float, *, loss: float, seed: int, on_change: str
) -> SoakPlan:
    """Write the keys and the roster of all peers into the folder, and return the plan of their run."""
    publics = [
        keygen(folder / f"p{peer}.key", name=f"p{peer}", address=f"127.0.0.1:{port}")
        for peer, port in enumerate(free_ports(num))
    ]
    assemble(publics, folder / "roster.toml")
    iterations = round(60 * minutes * PER_SECOND)
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
    return SoakPlan(**vars(plan_of(content, num)), start=start, each=60 * minutes / iterations)


def soak(
    folder: Path, num: int, minutes: float, loss: float, seed: int, on_change: str, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Run the soak, and return the sections of its page of results."""
    begun, before = datetime.now(UTC), os.getloadavg()[0]
    start = time.monotonic() + 3
    plan = plan_for(folder, num, minutes, start, loss=loss, seed=seed, on_change=on_change)
    iterations = plan.num_iterations
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
    load = {"load_before": before, "load_after": os.getloadavg()[0]}
    whole = whole_row(table, took, iterations, len(failures), load)
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


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peer_soak",
        description="Peers that are killed, stopped and lose messages; see benchmarks/README.md.",
    )
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="minutes over which outer iterations are paced (default 5)"
    )
    parser.add_argument("--loss", type=float, default=0.3, help="share of messages that are lost (default 0.3)")
    parser.add_argument("--seed", type=int, default=1, help="seed of lost messages and of events (default 1)")
    parser.add_argument(
        "--on-change",
        choices=("continue", "restart"),
        default="continue",
        help="reaction of an average when peers leave or join (default continue)",
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
        help="keep logs and records in this new folder (default: a temporary folder)",
    )
    given = parser.parse_args(words)
    if not 3 <= given.peers <= 8 or given.minutes < 0.5:
        parser.error(
            f"{given.peers} peers for {given.minutes:g} minutes, expected 3 to 8 for at least 0.5: "
            "with fewer peers none can be spared."
        )
    return given


def main(words: Sequence[str] | None = None) -> int:
    given = _arguments(words)
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
    sys.exit(main())
