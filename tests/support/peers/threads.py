"""Peers of one run as threads over a network in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedbilevel.peers.participant import take_part
from fedbilevel.peers.plan import plan_of
from fedbilevel.peers.transport import Faults, MemoryNetwork
from fedbilevel.problem.client_data import Holdings
from fedbilevel.runs.result import Result


class Threads:
    """One thread per peer, with `results` and `errors` by number. `start` restarts an ended peer."""

    def __init__(
        self,
        folder: Path,
        plan: dict[str, Any],
        clients: Sequence[Holdings],
        faults: Faults | None = None,
        **options: Any,
    ) -> None:
        self.folder, self.clients, self.options = folder, clients, {"beat": 0.1, "interval": 0.02, **options}
        self.names = [f"p{number}" for number in range(len(clients))]
        self.network = MemoryNetwork(len(clients), faults)
        self.plan = plan_of(plan, len(clients))
        self.results: dict[int, Result] = {}
        self.errors: dict[int, BaseException] = {}
        self.lines: list[str] = []
        self.threads: dict[int, threading.Thread] = {}

    def start(
        self, number: int, plan: dict[str, Any] | None = None, callbacks: Sequence[Callable[..., Any]] = ()
    ) -> None:
        ours = self.plan if plan is None else plan_of(plan, len(self.clients))

        def work() -> None:
            try:
                self.results[number] = take_part(
                    ours,
                    self.names,
                    number,
                    lambda _: self.network.transport(number),
                    self.clients[number],
                    self.folder / self.names[number],
                    say=lambda line: self.lines.append(f"{self.names[number]}: {line}"),
                    callbacks=callbacks,
                    **self.options,
                )
            except BaseException as error:  # noqa: BLE001 - join raises it
                self.errors[number] = error

        self.errors.pop(number, None)
        self.results.pop(number, None)
        self.threads[number] = threading.Thread(target=work, daemon=True)
        self.threads[number].start()

    def join(self, numbers: Sequence[int] | None = None, timeout: float = 60.0) -> None:
        for number in range(len(self.clients)) if numbers is None else numbers:
            self.threads[number].join(timeout)
            if self.threads[number].is_alive():
                raise AssertionError(f"peer {number} still runs after {timeout} s: {self.lines[-20:]}")
            if number in self.errors:
                raise self.errors[number]

    def run(self) -> list[Result]:
        for number in range(len(self.clients)):
            self.start(number)
        self.join()
        return [self.results[number] for number in range(len(self.clients))]
