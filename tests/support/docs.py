"""Run pages of the documentation: create files, run commands and compare the quoted output."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import fedbilevel

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")
CLOCK = re.compile(  # times, durations and hashes of them, which differ between runs
    r'(?<="time": )\d+(\.\d+)?|\d+\.\d\d(?= s\b)|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|(?<="chain": ")[0-9a-f]{64}'
)
PATIENCE = 120.0  # seconds for a command
ROUNDING = 1e-5  # difference between machines in a float32 run
THREADS = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}


class Block(NamedTuple):
    language: str
    file: str  # empty: a command or quoted output
    text: str


def blocks(page):
    return [Block(*found) for found in re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)]


def same(quoted, said):
    """Equal text; decimals may differ by rounding, counts of suspicious or flagged samples by a few."""
    quoted, said = CLOCK.sub("~", quoted.rstrip()), CLOCK.sub("~", said.rstrip())
    if NUMBER.sub("#", quoted) != NUMBER.sub("#", said):
        return False
    loose = 3 if re.search("suspicious|flagged", quoted) else 0
    return all(
        _close(one, other, loose) for one, other in zip(NUMBER.findall(quoted), NUMBER.findall(said), strict=True)
    )


def _close(quoted, said, loose):
    a, b = float(quoted), float(said)
    if "e" in quoted:
        return abs(a - b) <= ROUNDING
    return abs(a - b) <= (0.01 * a + 0.001 if "." in quoted else loose)


def check_quoted(quoted, said):
    """Assert that the output has the quoted lines in order. "..." matches any lines, also at the end."""
    rest, gap = said.splitlines(), False
    for line in quoted.splitlines():
        if line == "...":
            gap = True
            continue
        places = [place for place, other in enumerate(rest if gap else rest[:1]) if same(line, other)]
        assert places, f"the page quotes\n    {line}\nbut the command said\n{said}"
        rest, gap = rest[places[0] + 1 :], False


class Terminal:
    """Runs commands in `folder`. A command with & at its end runs until `close`."""

    def __init__(self, folder, environment):
        self.folder, self.environment, self.running = folder, environment, []

    def type(self, text):
        said = ""
        for command in filter(None, text.splitlines()):
            if command.endswith(" &"):
                with (self.folder / f"terminal-{len(self.running)}.txt").open("w") as screen:
                    words = shlex.split(command.removesuffix("&"))
                    self.running.append(
                        subprocess.Popen(words, cwd=self.folder, env=self.environment, stdout=screen, stderr=screen)
                    )
                continue
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.folder,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}\n{self.screens()}"
            said += done.stdout
        return said

    def screens(self):
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("terminal-*.txt")))

    def close(self):
        for one in self.running:
            one.send_signal(signal.SIGINT)  # Ctrl-C
        for one in self.running:
            try:
                one.wait(30)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()


def commands(folder):
    """An environment in which `fedbilevel` and `python` are this Python and this checkout."""
    place = folder / "bin"
    place.mkdir()
    for name, words in (
        ("fedbilevel", f"{shlex.quote(sys.executable)} -m fedbilevel"),
        ("python", shlex.quote(sys.executable)),
    ):
        (place / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (place / name).chmod(0o755)
    source = str(Path(fedbilevel.__file__).parents[1])
    return {
        **os.environ,
        **THREADS,
        "PATH": os.pathsep.join([str(place), os.environ["PATH"]]),
        "PYTHONPATH": source,
        "TMPDIR": str(folder),
    }
