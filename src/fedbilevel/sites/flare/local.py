"""A whole federation on this machine, over loopback, with the same kind of kits and certificates as
between organisations."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from fedbilevel.errors import FedBilevelError
from fedbilevel.sites import policy
from fedbilevel.sites.flare import connection, follow, job, jobs, kits, processes

THREADS = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
LEAD = "lead@example.org"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Loopback:
    """A server and sites as supervised processes below `folder`. No process remains after the
    context ends.

    auto_approve: whether plans run without an operator, for trials with data that are not
        confidential.
    """

    def __init__(
        self,
        folder: Path,
        sites: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        data: Mapping[str, Path] | None = None,
        allow: list[str] | None = None,
        auto_approve: bool = False,
        pause: float = 0.5,
        patience: float = 60.0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.folder, self.sites, self._patience, self._say = folder.resolve(), sorted(sites), patience, say
        self._environment, self._allow, self._pause = {**THREADS, **(environment or {})}, allow, pause
        self._data, self._auto_approve = dict(data or {}), auto_approve
        self.supervised: dict[str, processes.Supervised] = {}

    def __enter__(self) -> Loopback:
        self.folder.mkdir(parents=True, exist_ok=True)
        toml = self.folder / "federation.toml"
        if not toml.exists():
            kits.init(toml, sites=self.sites, port=free_port(), lead=LEAD)
        self.kits = kits.provision(toml, self.folder / "kits", allow=self._allow)
        self.lead = self.kits[LEAD]
        for site in self.sites if self._auto_approve else ():
            settings = self.kits[site] / job.SITE / policy.FILE
            settings.write_text(settings.read_text().replace("auto_approve = false", "auto_approve = true "))
        try:
            for name in (kits.SERVER, *self.sites):
                self.start(name)
            self.wait_for(self.sites)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for one in self.supervised.values():
            one.ask_to_stop()
        # each waits a second or two for processes that do not end by themselves
        with ThreadPoolExecutor(max(1, len(self.supervised))) as threads:
            list(threads.map(processes.Supervised.stop, self.supervised.values()))

    def start(self, name: str) -> None:
        mine = {policy.DATA: str(self._data[name].resolve())} if name in self._data else {}
        self.supervised[name] = processes.Supervised(
            self.kits[name], environment={**self._environment, **mine}, pause=self._pause, say=self._say
        )
        self.supervised[name].start()

    def stop(self, name: str) -> None:
        self.supervised.pop(name).stop()

    def wait_for(self, sites: Sequence[str]) -> None:
        """Wait until these sites are connected to the server."""
        end, link = time.monotonic() + self._patience, connection.Link(self.lead, lambda _: None)
        try:
            while time.monotonic() < end:
                connected = link.ask(lambda opened: [one.name for one in opened.get_connected_client_list()])
                if set(sites) <= set(connected or []):
                    return
                time.sleep(0.2)
        finally:
            link.close()
        late = f"the sites {', '.join(sites)} were not connected after {self._patience:.0f} s"
        raise FedBilevelError(f"{late}: see log.txt and console.txt in {self.folder / 'kits'}.")

    def pids(self, name: str) -> dict[str, list[int]]:
        """Return the ids of the server's or a site's processes, as `parent` and `job`."""
        found: dict[str, list[int]] = {"parent": [], "job": []}
        for pid, kind in processes.running(self.kits[name]).items():
            found["parent" if kind == "parent" else "job"].append(pid)
        return found

    def kill(self, name: str, which: str = "all", *, number: int = signal.SIGKILL) -> list[int]:
        """Send a signal to the `job` processes, the `parent` process or `all` processes of the
        server or a site, and return their ids."""
        pids = [pid for kind, some in self.pids(name).items() if which in (kind, "all") for pid in some]
        for pid in pids:
            os.kill(pid, number)
        return pids

    def submit(self, plan: dict[str, Any], **classes: str) -> str:
        return jobs.submit(self.lead, plan, **classes)

    def watch(
        self, plan: dict[str, Any], say: Callable[[dict[str, Any]], None] = lambda _: None, **options: Any
    ) -> str:
        return follow.watch(self.lead, plan, say, **options)
