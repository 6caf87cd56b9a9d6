"""Peers as processes over encrypted loopback, forked from one process that has imported the library."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.federation.algorithm import PeerAlgorithm, Peers
from fedbilevel.peers import participant
from fedbilevel.peers.local import free_ports
from fedbilevel.peers.plan import PeerPlan, plan_of
from fedbilevel.peers.roster import assemble, keygen, read_roster, read_secret
from fedbilevel.peers.sockets import Sockets
from fedbilevel.peers.wire import KINDS
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.runs.result import Progress
from fedbilevel.tasks.quadratic import Quadratic

forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(
    ["support.peers.processes", "torch._dynamo"]
)  # imported by the first derivative in a process


@dataclass(frozen=True, kw_only=True)
class Averages(PeerAlgorithm):
    """Every outer iteration averages the initial rows of all peers."""

    uses = ("mix",)
    lower_space = ("y", "own")

    class State(NamedTuple):
        x: Tensor
        y: Tensor

    def init(self, peers: Peers) -> State:
        return self.State(*peers.initial())

    def round(self, peers: Peers, state: State) -> State:
        return self.State(state.x, peers.mix(y=own_rows(peers.clients.ids, state.y)))


def own_rows(ids: Tensor, like: Tensor) -> Tensor:
    return torch.stack(
        [torch.randn(like.shape[1], generator=torch.Generator().manual_seed(int(i) + 1)) + 1 for i in ids]
    ).to(like.dtype)


def lower(x: Any, y: Any, batch: Any) -> Tensor:
    return (batch["weight"] * (batch["k"] * (y["w"] - batch["a"]) ** 2).sum(1)).sum() / 2 + (
        torch.exp(x["log_penalty"]) * y["w"] ** 2
    ).sum()


def upper(x: Any, y: Any, batch: Any) -> Tensor:
    return (batch["weight"] * ((y["w"] - batch["a"]) ** 2).sum(1)).sum() / 2


def wide_problem(width: int) -> Problem:
    """A problem with many entries at low cost: they are coupled only by the penalty."""
    return Problem(
        upper=upper, lower=lower, x0={"log_penalty": torch.zeros(3)[:1]}, y0={"w": torch.zeros(width)}, name="wide"
    )


def wide_clients(num: int, width: int) -> list[Holdings]:
    made = []
    for number in range(num):
        draw = torch.Generator().manual_seed(number)
        a, k, b = torch.randn(3, 2, width, generator=draw) + number
        made.append({"train": {"a": a, "k": 1 + k.abs()}, "val": {"a": b}})
    return made


@dataclass(frozen=True)
class WidePlan(PeerPlan):
    """A plan whose problem has `width` entries (0: that of the task)."""

    width: int = 0
    averages: bool = False

    def built_task(self) -> Any:
        return _Wide(self.width) if self.width else super().built_task()

    def built_algorithm(self) -> PeerAlgorithm:
        return Averages() if self.averages else super().built_algorithm()


class _Wide(NamedTuple):
    width: int

    def problem(self, _shapes: Any) -> Problem:
        return wide_problem(self.width)


def wide_plan(content: dict[str, Any], num: int, width: int = 0, averages: bool = False) -> WidePlan:
    plan = plan_of({"name": "t", "task": {"name": "quadratic", "num_clients": num}, **content}, num)
    return WidePlan(**vars(plan), width=width, averages=averages)


class Processes:
    """Peers as processes, killed at the end of the block. Their log lines go to files."""

    def __init__(self, folder: Path, plan: WidePlan, num: int) -> None:
        self.folder, self.plan, self.num = folder, plan, num
        self.names = [f"p{number}" for number in range(num)]
        publics = [
            keygen(folder / f"{name}.key", name=name, address=f"127.0.0.1:{port}")
            for name, port in zip(self.names, free_ports(num), strict=True)
        ]
        assemble(publics, folder / "roster.toml")
        self.running: dict[int, Any] = {}

    def start(self, *numbers: int, stops: Mapping[int, int] | None = None) -> None:
        """Start processes. stops: data messages after which a peer stops itself (SIGSTOP)."""
        for number in numbers:
            after = (stops or {}).get(number, 0)
            self.running[number] = forked.Process(
                target=_peer, args=(str(self.folder), self.plan, number, self.num, after), daemon=True
            )
            self.running[number].start()

    def signal(self, number: int, what: signal.Signals) -> None:
        os.kill(self.running[number].pid, what)

    def wait_for_stop(self, number: int, timeout: float = 30.0) -> None:
        until = time.monotonic() + timeout
        while Path(f"/proc/{self.running[number].pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < until, self.log(number)
            time.sleep(0.01)

    def log(self, number: int) -> str:
        place = self.folder / f"p{number}.log"
        return place.read_text() if place.exists() else ""

    def wait_for(self, text: str, number: int, timeout: float = 30.0) -> None:
        until = time.monotonic() + timeout
        while text not in self.log(number):
            assert time.monotonic() < until, f"no {text!r} in {self.log(number)}"
            time.sleep(0.02)

    def join(self, numbers: Sequence[int] | None = None, timeout: float = 60.0) -> list[dict[str, Tensor]]:
        """Wait for the processes and return their last states."""
        chosen = range(self.num) if numbers is None else numbers
        until = time.monotonic() + timeout
        for number in chosen:
            self.running[number].join(max(0.1, until - time.monotonic()))
            assert self.running[number].exitcode == 0, f"{self.running[number].exitcode}: " + "\n".join(
                self.log(each)[-1500:] for each in range(self.num)
            )
        return [torch.load(self.folder / f"p{number}.pt", weights_only=True) for number in chosen]

    def sent(self, number: int) -> int:
        return int(json.loads((self.folder / f"p{number}.sent").read_text()))

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            if process.is_alive():
                process.kill()
            process.join()


def _peer(place: str, plan: WidePlan, number: int, num: int, stops: int) -> None:
    torch.set_num_threads(1)
    folder = Path(place)
    began = time.monotonic()
    roster, secret = read_roster(folder / "roster.toml"), read_secret(folder / f"p{number}.key")
    clients = wide_clients(num, plan.width) if plan.width else Quadratic(num_clients=num).build().clients
    sockets: list[Stopping] = []

    def connect(most: int) -> Sockets:
        sockets.append(Stopping(roster, number, secret, max_bytes=most, log=say))
        sockets[0].after = stops
        return sockets[0]

    with open(folder / f"p{number}.log", "a", buffering=1) as log:
        log.write(f"{began:.2f} started\n")

        def say(line: str) -> None:
            log.write(f"{time.monotonic():.2f} {line}\n")

        def tell(now: Progress) -> None:
            say(f"done {now.iteration}")
            if now.iteration == now.num_iterations:  # no peer has left yet, so all connections exist
                until = time.monotonic() + 2.0  # messages for a lost peer wait forever
                while not sockets[0].queues.empty() and time.monotonic() < until:
                    time.sleep(0.01)
                time.sleep(0.2)
                (folder / f"p{number}.sent").write_text(json.dumps(sum(_sent_by(os.getpid()))))

        result = participant.take_part(
            plan,
            [one.name for one in roster.peers],
            number,
            connect,
            clients[number],
            folder / f"run{number}",
            roster=roster.digest(),
            say=say,
            callbacks=[tell],
            beat=0.1,
            interval=0.03,
        )
        torch.save(
            {
                **result.state._asdict(),
                **{f"ledger {key}": torch.tensor(value) for key, value in result.ledger.items()},
            },
            folder / f"p{number}.pt",
        )


class Stopping(Sockets):
    after = 0

    def send(self, to: int, head: bytes, body: bytes | memoryview = b"", *, newest: Any = None) -> None:
        super().send(to, head, body, newest=newest)
        if KINDS[head[4]] == "data":
            self.after -= 1
            if self.after == 0:
                os.kill(os.getpid(), signal.SIGSTOP)


def _sent_by(pid: int) -> list[int]:
    """Acknowledged bytes of every TCP connection of a process, from TCP_INFO."""
    found = []
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            if not os.readlink(f"/proc/{pid}/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as one:
                if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    found.append(struct.unpack_from("<Q", info, 120)[0])  # tcpi_bytes_acked
        except OSError:
            continue
    return found
