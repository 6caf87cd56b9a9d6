"""Peers on one machine, each in its own process, with keys and a roster of loopback ports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomlkit

from fedbilevel.data.folders import write_folder
from fedbilevel.errors import FedBilevelError
from fedbilevel.peers.roster import assemble, keygen
from fedbilevel.problem.client_data import Holdings
from fedbilevel.runs.record import make_folder, write_whole


def free_ports(number: int) -> list[int]:
    """Return different free ports of the loopback interface."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


class Local:
    """Peers with all their files in one folder, which reuse existing keys and data.

    The folder holds keys, roster.toml, plan.toml, data/NAME, runs/NAME and logs.
    """

    def __init__(
        self, folder: Path, plan: dict[str, Any], clients: Sequence[Holdings], names: Sequence[str] | None = None
    ) -> None:
        self.folder, self.names = folder, list(names or (f"peer-{number}" for number in range(1, len(clients) + 1)))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        make_folder(folder / "keys")
        publics = [folder / "keys" / f"{name}.peer.toml" for name in self.names]
        for name, public, port in zip(self.names, publics, free_ports(len(self.names)), strict=True):
            if not public.exists():
                keygen(self.key(name), name=name, address=f"127.0.0.1:{port}")
        assemble(publics, folder / "roster.toml")
        for name, client in zip(self.names, clients, strict=True):
            if not (folder / "data" / name).exists():
                write_folder(folder / "data" / name, client)
        write_whole(folder / "plan.toml", tomlkit.dumps(plan).encode())

    def key(self, name: str) -> Path:
        return self.folder / "keys" / f"{name}.key.toml"

    def record(self, name: str) -> Path:
        return self.folder / "runs" / name

    def command(self, name: str) -> list[str]:
        place = self.folder
        return [
            "peer",
            "run",
            str(place / "plan.toml"),
            "--roster",
            str(place / "roster.toml"),
            "--key",
            str(self.key(name)),
            "--data",
            str(place / "data" / name),
            "--record",
            str(self.record(name)),
        ]

    def start(self, name: str) -> None:
        threads = str(max(1, (os.cpu_count() or 1) // len(self.names)))
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "fedbilevel", *self.command(name)],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
                start_new_session=True,  # Ctrl-C reaches only the process that started them
            )

    def wait(self, timeout: float) -> None:
        """Wait for all started processes, and raise with the last log line if a process fails."""
        until = time.monotonic() + timeout
        while running := [name for name, process in self.processes.items() if process.poll() is None]:
            if time.monotonic() > until:
                raise FedBilevelError(
                    f"{', '.join(running)} still run after {timeout:g} s: see the logs in {self.folder}."
                )
            time.sleep(0.05)
            self._check()
        self._check()

    def _check(self) -> None:
        for name, process in self.processes.items():
            if process.poll() not in (None, 0):
                last = (self.folder / f"{name}.log").read_text(errors="replace").strip().splitlines()[-1:]
                raise FedBilevelError(f"{name} ended with {process.returncode}: {' '.join(last)}")

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
