"""`python -m benchmarks.soak`: a long run between sites: failures, and growth of memory and disk."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.clock import Row, Setup
from benchmarks.federation import environment, gaps, lines, real_run, skipped, slowest, spread_out
from fedbilevel.errors import FedBilevelError

EVERY = 100  # rounds between looks at the processes; the first look is after as many
CEILING = 250.0  # megabytes that a process may grow by
RUN = "soak"
ABOUT = """FedBiO on hyper-representation of embedded digits (batches of 32, I = 1) between {sites} sites over
loopback with mutual TLS, {rounds} outer iterations of one communication round, with a checkpoint after each and a
measurement every {every}, in one job. """
ROUNDS = """Seconds are between two answers of site-1, by its log of what left; `slowest answer` is what the server
waited for the slowest site, by its diary. A failure is a site that was missing in an outer iteration, an answer
that was an error, a sentence about a fault to who follows the run, a job beyond the first, a process that was
replaced, or an outer iteration that is not in the diary exactly once. The aim is none."""
MEMORY = """Of every process, looked at after {every} rounds and then every {every}: what it holds in memory (RSS),
and what of it remains where pages that processes share are divided among them (PSS). `late` is the growth in the
second half of the run for 1000 rounds: what it would go on growing by. The ceiling is a growth of {ceiling:.0f} MB
by RSS."""
DISK = """Megabytes below every kit and their growth from the first look to the last, of which logs of FLARE, our
own lists of what happened (`left.jsonl` at a site: one line for every answer, kept for ever; `sites.jsonl` at the
server: one line for every outer iteration), and the rest. `per 1000` is the growth for 1000 rounds."""
HEADINGS = {
    "p10": "p10, s",
    "p90": "p90, s",
    "max": "max, s",
    "slowest_answer": "slowest answer, s",
    "rss_first": "RSS first, MB",
    "rss_last": "RSS last, MB",
    "rss_growth": "growth, MB",
    "rss_most": "RSS most, MB",
    "late": "late, MB per 1000",
    "pss_first": "PSS first, MB",
    "pss_last": "PSS last, MB",
    "pss_growth": "PSS growth, MB",
    "ceiling": "ceiling, MB",
    "first": "first, MB",
    "last": "last, MB",
    "growth": "growth, MB",
    "logs": "logs, MB",
    "lists": "lists, MB",
    "rest": "rest, MB",
    "per_thousand": "per 1000, MB",
}

Look = dict[str, Any]  # round, time, memory: {process: {rss, pss}}, disk: {kit: {logs, lists, rest}}, in megabytes


# ---- looking -------------------------------------------------------------------------------------------------------


def kind_of(name: str) -> str:
    """The category of a file: logs, lists or the rest."""
    if name.endswith(".jsonl"):
        return "lists"
    return "logs" if name.endswith((".txt", ".log")) or ".txt." in name else "rest"


def disk_of(kit: Path) -> dict[str, float]:
    sizes = dict.fromkeys(("logs", "lists", "rest"), 0.0)
    for path in kit.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # the file was replaced
            if path.is_file():
                sizes[kind_of(path.name)] += path.stat().st_size / 1e6
    return sizes


def memory_of(pid: int) -> dict[str, float]:
    import psutil

    process = psutil.Process(pid)
    found = {"rss": process.memory_info().rss / 1e6}
    with contextlib.suppress(psutil.AccessDenied, AttributeError):
        found["pss"] = process.memory_full_info().pss / 1e6
    return found


class Watch:
    """Measures all processes and kits of a federation after every `every` rounds."""

    def __init__(self, federation: Any, every: int, say: Callable[[str], None]) -> None:
        self._federation, self._every, self._say, self._next = federation, every, say, every
        self.pids: dict[str, int] = {}
        self.looks: list[Look] = []

    def __call__(self, progress: Mapping[str, Any]) -> None:
        if progress["rounds"] < self._next:
            return
        self._next = (progress["rounds"] // self._every + 1) * self._every
        kits = ("server", *self._federation.sites)
        if not self.pids:
            for name in kits:
                for kind, pids in self._federation.pids(name).items():
                    self.pids |= {f"{name}, {kind}": pid for pid in pids}
        memory = self._memory()
        if memory is None:
            return
        disk = {name: disk_of(self._federation.kits[name]) for name in kits}
        self.looks.append(
            {
                "round": progress["rounds"],
                "time": round(time.time(), 1),
                "load": os.getloadavg()[0],
                "memory": memory,
                "disk": disk,
            }
        )
        largest = max(memory, key=lambda name: memory[name]["rss"])
        self._say(f"{progress['rounds']} rounds, {memory[largest]['rss']:.0f} MB in {largest}")

    def _memory(self) -> dict[str, dict[str, float]] | None:
        """Memory of all processes, or None if one has ended, because figures would not be comparable."""
        import psutil

        try:
            return {name: memory_of(pid) for name, pid in self.pids.items()}
        except psutil.NoSuchProcess:
            return None

    def replaced(self) -> list[str]:
        """Processes that are not those of the first look."""
        now = {
            pid
            for name in ("server", *self._federation.sites)
            for pids in self._federation.pids(name).values()
            for pid in pids
        }
        return [name for name, pid in self.pids.items() if pid not in now]


# ---- summing up ----------------------------------------------------------------------------------------------------


def memory_rows(looks: Sequence[Look]) -> list[Row]:
    first, last, middle = looks[0], looks[-1], looks[len(looks) // 2]
    found = []
    for name in first["memory"]:
        row: Row = {"name": name, "what": "memory"}
        for kind in ("rss", "pss"):
            if kind in first["memory"][name]:
                one, other = (look["memory"][name][kind] for look in (first, last))
                row |= {f"{kind}_first": one, f"{kind}_last": other, f"{kind}_growth": other - one}
            if kind == "rss":
                since = last["round"] - middle["round"]
                late = (last["memory"][name]["rss"] - middle["memory"][name]["rss"]) / since * 1000 if since else None
                row |= {
                    "rss_most": max(look["memory"][name]["rss"] for look in looks),
                    "late": late,
                    "ceiling": CEILING,
                }
        found.append(row)
    return found


def disk_rows(looks: Sequence[Look]) -> list[Row]:
    first, last = looks[0], looks[-1]
    since = last["round"] - first["round"]
    found = []
    for name in first["disk"]:
        parts = {kind: last["disk"][name][kind] - first["disk"][name][kind] for kind in ("logs", "lists", "rest")}
        one, other = (sum(look["disk"][name].values()) for look in (first, last))
        per = (other - one) / since * 1000 if since else None
        found.append(
            {
                "name": name,
                "what": "disk",
                "first": one,
                "last": other,
                "growth": other - one,
                **parts,
                "per_thousand": per,
            }
        )
    return found


def failures_in(
    diary: Iterable[Mapping[str, Any]],
    left: Mapping[str, Iterable[Mapping[str, Any]]],
    num_iterations: int,
    notices: Sequence[str],
    jobs: int,
    replaced: Sequence[str],
) -> list[str]:
    """One sentence per failure."""
    diary = list(diary)
    found = [
        f"outer iteration {line['iteration']} was without {site}: {why}"
        for line in diary
        for site, why in line["missing"].items()
    ]
    counted = [line["iteration"] for line in diary]
    if counted != list(range(1, num_iterations + 1)):
        found.append(
            f"the diary has {len(counted)} outer iterations, {len(set(counted))} of them different, "
            f"where {num_iterations} were requested."
        )
    found += [
        f"{site} answered with an error: {line['text']}"
        for site, answers in left.items()
        for line in answers
        if line["kind"] == "error"
    ]
    found += [f"{name} was replaced." for name in replaced]
    return [*found, *notices, *([f"{jobs} jobs were needed."] if jobs != 1 else [])]


def above(rows: Sequence[Row]) -> list[str]:
    """Processes that grew beyond the ceiling."""
    return [row["name"] for row in rows if row["rss_growth"] >= CEILING]


# ---- the command ---------------------------------------------------------------------------------------------------


def soak(
    folder: Path, number: int, num_iterations: int, limit: float, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Sections of a page of results."""
    from fedbilevel.sites.chain import LEFT
    from fedbilevel.sites.flare.job import RUNS, SITE
    from fedbilevel.sites.flare.jobs import RunEntry, stop
    from fedbilevel.sites.flare.local import Loopback

    begun, before, notices = datetime.now(UTC), os.getloadavg()[0], []  # type: datetime, float, list[str]
    real = real_run(folder / "data", RUN, number, num_iterations, measure_every=EVERY)

    def fault(text: str) -> None:
        notices.append(text)
        say(text)

    with Loopback(
        folder / "federation",
        real.plan["sites"],
        data=real.data,
        auto_approve=True,
        environment=environment(),
        say=fault,
    ) as federation:
        watch = Watch(federation, EVERY, say)
        timer = threading.Timer(limit, lambda: stop(federation.lead, RUN))
        timer.start()
        try:
            outcome = federation.watch(real.plan, watch, notice=fault)
        finally:
            timer.cancel()
        diary = lines(federation.kits["server"] / RUNS / RUN / "sites.jsonl")
        left = {site: lines(federation.kits[site] / SITE / LEFT) for site in federation.sites}
        jobs = len(RunEntry(federation.lead, RUN).read()["jobs"])
        replaced = [name for name in watch.replaced() if name.endswith("parent")]  # job processes end with the run
    if not watch.looks:
        raise FedBilevelError(
            f"the run ended before {EVERY} rounds, so there is nothing to compare: give it a higher --limit."
        )
    if outcome == "stopped":
        notices.append(f"the run was stopped after {limit:.0f} s.")
    failures = failures_in(diary, left, num_iterations, notices, jobs, replaced)
    setup = Setup(threads=1, rounds=num_iterations)
    where = {**results.circumstances(setup), "time": begun.isoformat(timespec="seconds")}
    row: Row = {
        "name": f"FedBiO on digits, {number} sites",
        "what": "outer iteration",
        **spread_out(gaps(left[federation.sites[0]], RUN)),
        "slowest_answer": spread_out(slowest(diary))["seconds"],
        "failures": len(failures),
        "megabytes": diary[-1]["wire_megabytes"],
        "load_before": before,
        "load_after": os.getloadavg()[0],
    }
    about = ABOUT.format(sites=number, rounds=num_iterations, every=EVERY)
    return sections_of(row, watch.looks, failures, about, {"where": where, "headings": HEADINGS})


def sections_of(
    row: Row, looks: Sequence[Look], failures: Sequence[str], about: str, head: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    memory = about + MEMORY.format(every=EVERY, ceiling=CEILING)
    return {
        "soak": {"title": "Soak", "about": about + ROUNDS, **head, "rows": [row], "failures": failures},
        "memory": {"title": "Soak: memory", "about": memory, **head, "rows": memory_rows(looks), "looks": looks},
        "disk": {"title": "Soak: disk", "about": about + DISK, **head, "rows": disk_rows(looks)},
    }


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description="A long run between sites: failures, memory, disk; see benchmarks/README.md.",
    )
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument(
        "--rounds", type=int, default=2000, help="communication rounds, which are outer iterations here (default 2000)"
    )
    parser.add_argument(
        "--limit", type=float, default=1800.0, help="seconds after which the run is stopped (default 1800)"
    )
    parser.add_argument(
        "--save",
        nargs="?",
        const="soak",
        default=None,
        metavar="NAME",
        help="write results/NAME.json (default: soak) and RESULTS.md",
    )
    parser.add_argument(
        "--folder", type=Path, default=results.FOLDER, help="where results are saved (default benchmarks/results)"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        default=None,
        help="keep kits and records in this new folder (default: a temporary folder)",
    )
    given = parser.parse_args(words)
    if given.sites < 1 or given.rounds < 3 * EVERY:
        parser.error(
            f"{given.sites} sites and {given.rounds} rounds, expected at least 1 and {3 * EVERY}: "
            "fewer rounds do not show growth."
        )
    why = skipped(Setup())
    if why:
        parser.error(why)
    return given


def main(words: Sequence[str] | None = None) -> int:
    given = _arguments(words)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fedbilevel-soak-") as temporary:
        try:
            sections = soak(
                given.keep or Path(temporary),
                given.sites,
                given.rounds,
                given.limit,
                lambda text: print(text, flush=True),
            )
        except FedBilevelError as error:
            raise SystemExit(f"soak: {error}") from error
    for section in sections.values():
        print(
            f"\n{section['title']}\n{section['about']}\n\n{results.table(section['rows'], section['headings'])}",
            flush=True,
        )
    failures, grown = sections["soak"]["failures"], above(sections["memory"]["rows"])
    for text in [*failures, *(f"{name} grew by {CEILING:.0f} MB or more." for name in grown)]:
        print(text)
    if given.save is not None:
        results.save(given.save, sections, given.folder)
    return 1 if failures or grown else 0


if __name__ == "__main__":
    sys.exit(main())
