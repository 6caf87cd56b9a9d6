"""`python -m benchmarks.footprint`: memory, CPU time and processes of `fedbilevel federation try`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.clock import Row, Setup
from benchmarks.federation import environment, skipped

TITLE = "Footprint"
ABOUT = """`fedbilevel federation try` with {sites} sites, from its start to its end, looked at every {every:g} s:
of every process the most that it held in memory (RSS), the most where pages that processes share are divided among
them (PSS), its processor time, its life in seconds, and the number of modules it had imported. The row of the
command itself has the seconds of the whole; `heavy` names packages that take long to import. All processes have one
thread. Aims: {job:.0f} MB for the job process of a site, {whole:.0f} s for the whole on two cores with nothing else
to do; `load` is the load average before and after, as the machine is not alone."""
HEADINGS = {
    "rss": "RSS, MB",
    "pss": "PSS, MB",
    "cpu": "CPU, s",
    "aim": "aim, MB",
    "load_before": "load before",
    "load_after": "load after",
}
EVERY = 0.5  # seconds between looks
JOB_AIM, WHOLE_AIM = 300.0, 15.0  # megabytes, seconds
HEAVY = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.onnx",
    "sympy",
    "networkx",
    "pandas",
    "scipy",
    "sklearn",
    "matplotlib",
    "rich",
)
MODULES = "FEDBILEVEL_FOOTPRINT"  # environment: the folder in which every process notes what it has imported
NOTES = """
import json, os, sys, threading, time

def note(folder=os.environ["FEDBILEVEL_FOOTPRINT"]):
    place = os.path.join(folder, f"{os.getpid()}.json")
    while True:
        time.sleep(0.5)
        with open(place + ".new", "w") as file:
            json.dump(sorted(sys.modules), file)
        os.replace(place + ".new", place)

threading.Thread(target=note, daemon=True).start()
"""


def role_of(words: Sequence[str]) -> str:
    """The role of a process of `try`, from its command line."""
    line = " ".join(words)
    if "nvflare.lighter" in line:
        return "provision"
    for part, role in (
        ("server.server_train", "server, parent"),
        ("runner_process", "server, job"),
        ("client.client_train", "parent"),
        ("worker_process", "job"),
    ):
        if part in line:
            site = next((word.removeprefix("uid=") for word in words if word.startswith("uid=")), "")
            return f"{site}, {role}" if site else role
    return "other"


class Watch:
    """The peak figures of a process and its children."""

    def __init__(self, pid: int, notes: Path) -> None:
        import psutil

        self._root, self._notes = psutil.Process(pid), notes
        self.found: dict[int, dict[str, Any]] = {}

    def look(self) -> None:
        import psutil

        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.Error:  # the command has just ended
            return
        for process in processes:
            try:
                with process.oneshot():
                    memory, times, words = process.memory_full_info(), process.cpu_times(), process.cmdline()
            except psutil.Error:  # this process has just ended
                continue
            if words:
                self._keep(process, memory, times, words)

    def _keep(self, process: Any, memory: Any, times: Any, words: Sequence[str]) -> None:
        entry = self.found.setdefault(process.pid, {"rss": 0.0, "pss": 0.0, "modules": []})
        note = self._notes / f"{process.pid}.json"
        entry |= {
            "name": "the command" if process == self._root else role_of(words),
            "cpu": times.user + times.system,
            "seconds": time.time() - process.create_time(),
            "rss": max(entry["rss"], memory.rss / 1e6),
            "pss": max(entry["pss"], memory.pss / 1e6),
            "modules": json.loads(note.read_text()) if note.exists() else entry["modules"],
        }


def heavy(modules: Sequence[str]) -> str:
    return ", ".join(name for name in HEAVY if name in modules)


def rows_of(found: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows of the command and of its processes.

    Unnamed processes that last under a second are omitted.
    """
    lasting = [entry for entry in found if entry["name"] != "other" or entry["seconds"] > 1]
    figures = lambda entry: {name: entry[name] for name in ("seconds", "cpu", "rss", "pss")}
    return [
        {"name": entry["name"], **figures(entry), "modules": len(entry["modules"]), "heavy": heavy(entry["modules"]),
         **({"aim": JOB_AIM} if entry["name"].endswith(", job") and not entry["name"].startswith("server") else {})}
        for entry in sorted(lasting, key=lambda entry: (entry["name"] != "the command", entry["name"]))
    ]  # fmt: skip


def footprint(sites: int) -> dict[str, Any]:
    where, before = results.circumstances(Setup(threads=1, rounds=1)), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="fedbilevel-footprint-") as folder:
        notes = Path(folder) / "notes"
        notes.mkdir()
        (notes / "sitecustomize.py").write_text(NOTES)
        ours = environment()["PYTHONPATH"]
        threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        variables = {**os.environ, **threads, "PYTHONPATH": os.pathsep.join([str(notes), ours]), MODULES: str(notes)}
        words = [
            sys.executable,
            "-m",
            "fedbilevel",
            "federation",
            "try",
            "--sites",
            str(sites),
            "--folder",
            str(Path(folder) / "try"),
        ]
        with subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, text=True) as command:
            watch = Watch(command.pid, notes)
            while command.poll() is None:
                watch.look()
                time.sleep(EVERY)
            said = command.stdout.read() if command.stdout else ""
        if command.returncode:
            raise SystemExit(f"the command ended with {command.returncode}: {said}")
    found = rows_of(list(watch.found.values()))
    found[0] |= {"load_before": before, "load_after": os.getloadavg()[0]}
    about = ABOUT.format(sites=sites, every=EVERY, job=JOB_AIM, whole=WHOLE_AIM)
    return {"title": TITLE, "about": about, "where": where, "headings": HEADINGS, "rows": found}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.footprint",
        description="Memory, processor time and processes of `fedbilevel federation try`.",
    )
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument(
        "--save",
        nargs="?",
        const="footprint",
        default=None,
        metavar="NAME",
        help="write results/NAME.json (default: footprint) and RESULTS.md",
    )
    parser.add_argument(
        "--folder", type=Path, default=results.FOLDER, help="where results are saved (default benchmarks/results)"
    )
    given = parser.parse_args(words)
    why = skipped(Setup())
    if why:
        parser.error(why)
    section = footprint(given.sites)
    print(
        f"\n{section['title']}\n{section['about']}\n\n{results.table(section['rows'], section['headings'])}", flush=True
    )
    if given.save is not None:
        results.save(given.save, {"footprint": section}, given.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
