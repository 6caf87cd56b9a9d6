"""Processor time until a command of the command line has answered."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial

from benchmarks.clock import Row, Setup, Timing, rows_of

TITLE = "Start of the command line"
ABOUT = """Seconds of the processor, user and system, of a whole process; the floor is an interpreter that does
nothing. Files of Python are compiled and in the page cache, because every command runs once before it is timed. Goal:
`--help` and `list` take at most 0.3 seconds."""
HEADINGS = {"floor_seconds": "python alone, s", "ratio": "x python alone"}

COMMANDS = {
    "--help": ["-m", "fedbilevel", "--help"],
    "list": ["-m", "fedbilevel", "list"],
    "import fedbilevel": ["-c", "import fedbilevel"],
    "import torch": ["-c", "import torch"],
    "floor": ["-c", "pass"],
}


def rows(setup: Setup) -> list[Row]:
    turns: dict[str, Callable[[], float]] = {what: partial(_seconds, words) for what, words in COMMANDS.items()}
    seconds: dict[str, list[float]] = {what: [] for what in turns}
    for turn in turns.values():
        turn()
    for _ in range(setup.rounds):
        for what, turn in turns.items():
            seconds[what].append(turn())
    return rows_of("start", {what: Timing.of(values) for what, values in seconds.items()})


def _seconds(words: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
