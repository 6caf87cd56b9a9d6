"""The file in which a job writes the progress of its run for the lead."""

from __future__ import annotations

import json
import threading
from collections import deque
from pathlib import Path
from typing import Any

from fedbilevel.runs.record import write_whole

KEPT = 20  # the last outer iterations that the file holds


class ProgressFile:
    """The last outer iterations of a job, and its outcome. The lead reads the file during the job
    and afterwards."""

    def __init__(self, path: Path, job: str, sites: list[str]) -> None:
        self._path, self._lock = path, threading.Lock()
        self._content: dict[str, Any] = {
            "job": job,
            "sites": sites,
            "outcome": "running",
            "why": "",
            "waiting": "",
            "warning": "",
            "result": "",
            "count": 0,
        }
        self._latest: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._write()

    def say(self, progress: dict[str, Any]) -> None:
        with self._lock:
            told: dict[str, Any] = {
                name: progress[name] for name in ("waiting", "warning", "result") if name in progress
            }
            if told:
                self._content |= told
            else:
                self._content |= {"waiting": "", "count": self._content["count"] + 1}
                self._latest.append(progress)
            self._write()

    def end(self, outcome: str, why: str) -> None:
        with self._lock:
            self._content |= {"outcome": outcome, "why": why}
            self._write()

    def _write(self) -> None:
        content = {**self._content, "latest": list(self._latest)}
        write_whole(self._path, json.dumps(content).encode())  # a reader never sees a part of it
