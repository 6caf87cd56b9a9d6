"""The peers of the section `peers`: steps and averages through the library and bare sockets."""

from __future__ import annotations

import math
import multiprocessing
import os
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
import zmq
from torch import Tensor

from fedbilevel.algorithms.sgp import SGP
from fedbilevel.errors import FedBilevelError
from fedbilevel.federation.algorithm import PeerAlgorithm, Peers
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.host import Host
from fedbilevel.federation.network import Network
from fedbilevel.peers.engine import Peer
from fedbilevel.peers.local import free_ports
from fedbilevel.peers.office import Office
from fedbilevel.peers.roster import PeerRoster, Secret, assemble, keygen, read_roster, read_secret
from fedbilevel.peers.sockets import Sockets
from fedbilevel.peers.transport import Faults, Lossy, PeerTransport
from fedbilevel.peers.wire import Introduction, Version
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem

forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(
    ["benchmarks.peer_steps", "benchmarks.results", "fedbilevel.peers.participant", "torch._dynamo"]
)  # once, and not in every peer
MOST_BYTES = 2**23  # of a message
WAIT = 120.0  # seconds after which a peer has failed to answer
_ACKED = 120  # offset in TCP_INFO of Linux: bytes that were sent and acknowledged


@dataclass(frozen=True, kw_only=True)
class Averages(PeerAlgorithm):
    """An algorithm that only computes averages."""

    uses = ("mix",)

    class State(NamedTuple):
        x: Tensor
        y: Tensor

    def init(self, peers: Peers) -> State:
        return self.State(*peers.initial())

    def round(self, peers: Peers, state: State) -> State:
        return self.State(state.x, peers.mix(y=state.y))


def tiny() -> tuple[Problem, Holdings]:
    """A problem with one number. The verbs accept rows of any length."""
    one = {"a": np.ones((1, 1), np.float32)}
    loss = lambda x, y, batch: (batch["weight"] * (y["y"] - x["x"] - batch["a"][:, 0]) ** 2).sum()
    return Problem(upper=loss, lower=loss, x0={"x": torch.zeros(1)}, y0={"y": torch.zeros(1)}), {
        "train": one,
        "val": one,
    }


def row_of(peer: int, width: int, number: int = 0) -> Tensor:
    """A row that differs for every peer and every average."""
    draw = torch.Generator().manual_seed(1000 * number + peer)
    return torch.randn(width, generator=draw) + peer


class Bare:
    """The floor: the same number of encrypted sockets, in the thread that uses them.

    A row is one frame without a head. Rows of a sender arrive in order.
    """

    def __init__(self, roster: PeerRoster, me: int, secret: Secret, ports: Sequence[int]) -> None:
        self._context = zmq.Context()
        self._router = self._socket(zmq.ROUTER, secret)
        self._router.curve_server = True
        self._router.setsockopt(zmq.RCVTIMEO, round(WAIT * 1000))
        self._router.bind(f"tcp://127.0.0.1:{ports[me]}")
        self._dealers: dict[int, zmq.Socket[bytes]] = {}
        for number, peer in enumerate(roster.peers):
            if number != me:
                dealer = self._dealers[number] = self._socket(zmq.DEALER, secret)
                dealer.curve_serverkey = peer.key.encode()
                dealer.setsockopt(zmq.ROUTING_ID, str(me).encode())
                dealer.connect(f"tcp://127.0.0.1:{ports[number]}")
        self._arrived: dict[int, deque[Any]] = defaultdict(deque)

    def _socket(self, kind: int, secret: Secret) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.curve_publickey, made.curve_secretkey = secret.key.encode(), secret.secret.encode()
        return made

    def exchange(self, row: np.ndarray, receivers: Sequence[int], senders: Sequence[int]) -> list[memoryview]:
        for receiver in receivers:
            self._dealers[receiver].send(row.data, copy=False)
        while not all(self._arrived[sender] for sender in senders):
            who, frame = self._router.recv_multipart(copy=False)
            self._arrived[int(who.bytes)].append(frame)
        return [self._arrived[sender].popleft().buffer for sender in senders]

    def close(self) -> None:
        self._context.destroy(linger=0)


class Worker:
    """One peer.

    Every contestant runs the steps of the network from `start`, so all send the same messages.
    """

    def __init__(self, fed: Peer, bare: Bare) -> None:
        self.fed, self.bare, self.weights = fed, bare, fed.weights

    def prepare(self, width: int) -> None:
        self.row = row_of(self.fed.me, width)[None]

    def used(self) -> dict[str, float]:
        """CPU time, bytes acknowledged by the others and bytes in the ledger, since the process began."""
        time.sleep(0.05)  # acknowledgements may be late by almost as much
        return {"cpu": time.process_time(), "wire": acked(), "ledger": float(self.fed.ledger.columns["bytes_up"].sum())}

    def engine(self, start: int, steps: int) -> dict[str, float]:
        self.fed.time = start
        begin = time.perf_counter()
        weights, rows = self.weights, self.row
        for _ in range(steps):
            weights, rows = self.fed.push(weights, y=rows)
        return {"begin": begin, "end": time.perf_counter()}

    def office(self, start: int, steps: int) -> dict[str, float]:
        row, plan, exchange, fed = self.row[0].numpy(), self._plan(start, steps), self.fed.office.exchange, self.fed
        begin = time.perf_counter()
        for receivers, senders in plan:
            number, fed._steps = fed._steps, fed._steps + 1  # an office never sees a step twice
            exchange.send_row(number, row, 1.0, receivers)
            exchange.rows(number, senders, row)
        return {"begin": begin, "end": time.perf_counter()}

    def floor(self, start: int, steps: int) -> dict[str, float]:
        row, plan = self.row[0].numpy(), self._plan(start, steps)
        begin = time.perf_counter()
        for receivers, senders in plan:
            self.bare.exchange(row, receivers, senders)
        return {"begin": begin, "end": time.perf_counter()}

    def average(self, width: int, number: int) -> dict[str, float]:
        fed = self.fed
        exact = torch.stack([row_of(peer, width, number).double() for peer in range(fed.num_clients)]).mean(0)
        own = row_of(fed.me, width, number)[None]
        wakes, messages = fed.wakes, fed.ledger.totals()["messages"]
        begin = time.perf_counter()
        value = fed.mix(y=own)[0].double()
        end = time.perf_counter()
        error = float(torch.linalg.vector_norm(value - exact) / torch.linalg.vector_norm(exact))
        return {
            "begin": begin,
            "end": end,
            "wakes": fed.wakes - wakes,
            "messages": fed.ledger.totals()["messages"] - messages,
            "error": error,
        }

    def _plan(self, start: int, steps: int) -> list[tuple[list[int], list[int]]]:
        """The receivers and the senders of this peer at every step."""
        found, me = [], self.fed.rank
        for step in range(start, start + steps):
            sent = self.fed.links.mixing(step).sent
            found.append((sent[me].nonzero()[:, 0].tolist(), sent[:, me].nonzero()[:, 0].tolist()))
        return found


def acked() -> float:
    """Bytes sent over the open TCP connections of this process and acknowledged; NaN if unknown."""
    found = 0.0
    if not hasattr(socket, "TCP_INFO") or not os.path.isdir("/proc/self/fd"):
        return math.nan
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as one:
                if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM:
                    found += struct.unpack_from("<Q", one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), _ACKED)[
                        0
                    ]
    return found


def work(folder: Path, me: int, num: int, loss: float | None, ports: Sequence[int], pipe: Connection) -> None:
    """Answer requests until one is None.

    loss: share of lost messages, for robust averages; None: steps, which need every message.
    """
    roster, secret = read_roster(folder / "roster.toml"), read_secret(folder / f"p{me}.key")
    network = Network(kind="random_directed", loss=loss or 0.0)
    algorithm: PeerAlgorithm = SGP() if loss is None else Averages()
    problem, holdings = tiny()
    host = Host(algorithm, problem, [holdings], ids=[me], num_clients=num, device=torch.device("cpu"))
    transport: PeerTransport = Sockets(roster, me, secret, max_bytes=MOST_BYTES)
    if loss:
        transport = Lossy(transport, me, num, Faults(loss=loss))
    office = Office(transport, me, [peer.name for peer in roster.peers], "benchmark", quorum=num, max_bytes=MOST_BYTES)
    bare = Bare(roster, me, secret, ports)
    nothing = bytes(16)
    with office.opened():
        formation = office.form(
            Introduction(1.0, nothing, nothing, nothing, 0, 0, (Version(), Version())), deadline=WAIT
        )
        fed = Peer(algorithm, host, office, formation, network=network, averaging=Averaging(kind="robust"))
        worker = Worker(fed, bare)
        pipe.send(None)
        while (asked := pipe.recv()) is not None:
            pipe.send(getattr(worker, asked[0])(*asked[1:]))
    bare.close()


def _process(*words: Any) -> None:
    torch.set_num_threads(1)
    work(*words)


class Fleet:
    """Peers of a run over encrypted loopback, until the block ends.

    They are processes, or threads for the small version, which must not wait for processes to
    start.
    """

    def __init__(self, folder: Path, num: int, *, loss: float | None = None, threads: bool = False) -> None:
        self.num, self._threads = num, threads
        ports = free_ports(2 * num)  # the library's, and those of the floor
        folder.mkdir(parents=True)
        publics = [
            keygen(folder / f"p{peer}.key", name=f"p{peer}", address=f"127.0.0.1:{ports[peer]}") for peer in range(num)
        ]
        assemble(publics, folder / "roster.toml")
        self._words = [(folder, peer, num, loss, ports[num:]) for peer in range(num)]
        self._pipes: list[Connection] = []
        self._running: list[Any] = []

    def __enter__(self) -> Fleet:
        for words in self._words:
            here, there = forked.Pipe()
            made: Any = (
                threading.Thread(target=work, args=(*words, there), daemon=True)
                if self._threads
                else forked.Process(target=_process, args=(*words, there), daemon=True)
            )
            made.start()
            self._pipes.append(here)
            self._running.append(made)
        self._answers()
        return self

    def ask(self, what: str, *words: Any) -> list[Any]:
        """Send one request to all peers at once, and return their answers."""
        for pipe in self._pipes:
            pipe.send((what, *words))
        return self._answers()

    def _answers(self) -> list[Any]:
        for number, pipe in enumerate(self._pipes):
            if not pipe.poll(WAIT):
                raise FedBilevelError(
                    f"peer {number} has not answered for {WAIT:g} s: run the section again on a less busy machine."
                )
        return [pipe.recv() for pipe in self._pipes]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
        for running in self._running:
            running.join(10.0)
            if not self._threads and running.is_alive():
                running.kill()
                running.join()
        for pipe in self._pipes:
            pipe.close()
