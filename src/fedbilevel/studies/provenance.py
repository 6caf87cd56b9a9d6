"""The commit and the machine of a run."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from pathlib import Path

import torch


@functools.cache
def commit() -> str:
    """Return the commit of the source at the first call, with "+" if files have changed since.

    $FEDBILEVEL_COMMIT replaces it, because a copy of the source may have no history or another
    history.
    """
    root = Path(__file__).resolve().parents[3]
    if os.environ.get("FEDBILEVEL_COMMIT") or not (root / ".git").exists():
        return os.environ.get("FEDBILEVEL_COMMIT", "unknown")
    ask = lambda *words: subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
    ).stdout.strip()
    changed = ask("status", "--porcelain", "--untracked-files=no", "--", "src")
    return (ask("rev-parse", "--short=10", "HEAD") or "unknown") + ("+" if changed else "")


def machine(device: str) -> str:
    """Return the processor and the number of cores, or the GPU.

    Times are comparable on the same machine only.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"
