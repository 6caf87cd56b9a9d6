"""The file in which a site's job writes the site's state for its operator."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATUS = "status.json"  # in the site's folder


class StatusFile:
    """Writes the status without waiting for the disk. A failure to write the status does not stop
    the site."""

    def __init__(self, path: Path, **facts: Any) -> None:
        self._path, self._lock = path, threading.Lock()
        self._facts: dict[str, Any] = {
            "state": "idle",
            "run": None,
            "iteration": None,
            "num_iterations": None,
            "phase": None,
            "answers": 0,
            "bytes": 0,
            "rounds_run": 0,
            "rounds_total": None,
            "max_rounds": None,
            "norms": {},
            "last_error": None,
            "summary": None,
            **facts,
            "started": time.time(),
            "pid": os.getpid(),
        }

    def answered(self, num_bytes: int, norms: Mapping[str, float]) -> None:
        self._facts["answers"] += 1
        self._facts["bytes"] += num_bytes
        self._facts["norms"] = {**self._facts["norms"], **norms}

    def failed(self, reason: str) -> None:
        self.write(last_error={"time": time.time(), "text": reason})

    def write(self, **facts: Any) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._facts |= facts
            beside = self._path.with_name(f"{self._path.name}.part")
            beside.write_text(json.dumps({"time": time.time(), **self._facts}, allow_nan=True))
            os.replace(beside, self._path)
