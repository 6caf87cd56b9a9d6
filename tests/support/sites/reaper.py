"""Ends the processes of a test's folder when the test process ends, even by SIGKILL.

Processes of FLARE have sessions of their own and outlive whoever started them. A watching process
holds one end of a pipe; when pytest closes the other end or dies, it ends every process group whose
command names the folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil


def processes_of(folder: Path | str) -> list[int]:
    """Processes with the folder in a word of their command."""
    found = psutil.process_iter(["cmdline"])
    return [one.pid for one in found if any(str(folder) in word for word in one.info["cmdline"] or [])]


@contextmanager
def reaped(folder: Path) -> Iterator[None]:
    """Leave no process of the folder behind."""
    watching = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, text=True, start_new_session=True)
    assert watching.stdin is not None
    watching.stdin.write(f"{folder}\n")  # not in its command, or it would end itself
    watching.stdin.flush()
    try:
        yield
    finally:
        watching.stdin.close()
        watching.wait()


def end(folder: str) -> None:
    while pids := processes_of(folder):  # a process may start another one before it ends
        for pid in pids:
            with suppress(ProcessLookupError):  # it ended meanwhile
                (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)


if __name__ == "__main__":
    place = sys.stdin.readline().strip()
    sys.stdin.read()  # until the test process has closed the pipe or is gone
    end(place)
