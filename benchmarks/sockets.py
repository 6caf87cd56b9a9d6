"""The floor of a message round: the same bytes to the same number of processes and back.

`python -m benchmarks.sockets [CERTIFICATE KEY AUTHORITY]` starts a process that echoes messages. It
prints its ports: one for plain bytes and, with a certificate, one for mutual TLS.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

HERE = Path(__file__).resolve().parents[1]  # the top of the checkout
LARGEST = 2**23  # bytes of a message
_LENGTH = 8  # bytes of the length before a message


class Papers(NamedTuple):
    """A certificate, its key, and the authority that signed all certificates."""

    certificate: str
    key: str
    authority: str

    def context(self, *, is_server: bool) -> ssl.SSLContext:
        """TLS with certificates on both sides, without host names, which loopback lacks."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode, context.minimum_version = (
            False,
            ssl.CERT_REQUIRED,
            ssl.TLSVersion.TLSv1_3,
        )
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.authority)
        return context


def papers(kit: Path, *, is_server: bool) -> Papers:
    """The papers of a startup kit."""
    kind = "server" if is_server else "client"
    return Papers(*(str(kit / "startup" / name) for name in (f"{kind}.crt", f"{kind}.key", "rootCA.pem")))


def send(line: socket.socket, message: bytes | memoryview) -> None:
    line.sendall(len(message).to_bytes(_LENGTH, "little"))
    line.sendall(message)


def receive(line: socket.socket, place: bytearray) -> memoryview:
    """The next message, at the beginning of `place`; empty if the other side has closed."""
    header = bytearray(_LENGTH)
    if not _fill(line, memoryview(header)):
        return memoryview(b"")
    length = int.from_bytes(header, "little")
    if length > len(place):
        raise ValueError(f"a message has {length} bytes, expected at most {len(place)}.")
    whole = memoryview(place)[:length]
    return whole if _fill(line, whole) else memoryview(b"")


def _fill(line: socket.socket, rest: memoryview) -> bool:
    while len(rest):
        read = line.recv_into(rest)
        if read == 0:
            return False
        rest = rest[read:]
    return True


def answer(listener: socket.socket, tls: ssl.SSLContext | None) -> None:
    """Echo every message of one caller, until it closes the connection."""
    line, _ = listener.accept()
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with line if tls is None else tls.wrap_socket(line, server_side=True) as open_line:
        place = bytearray(LARGEST)
        while len(message := receive(open_line, place)):
            send(open_line, message)


class Lines:
    """Connections to the processes on these ports. All messages are sent before any is received."""

    def __init__(self, ports: Sequence[int], tls: ssl.SSLContext | None = None) -> None:
        self._lines = []
        for port in ports:
            line = socket.create_connection(("127.0.0.1", port), timeout=60)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._lines.append(line if tls is None else tls.wrap_socket(line))
        self._places = [bytearray(LARGEST) for _ in ports]  # allocated once, as for every floor

    def exchange(self, message: bytes) -> list[memoryview]:
        for line in self._lines:
            send(line, message)
        return [receive(line, place) for line, place in zip(self._lines, self._places, strict=True)]

    def close(self) -> None:
        for line in self._lines:
            line.close()


class Echoes:
    """Processes that echo messages, one for each kit. Leaving the context ends them."""

    def __init__(self, kits: Sequence[Path | None]) -> None:
        self._kits = kits

    def __enter__(self) -> Echoes:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
        words = [[] if kit is None else list(papers(kit, is_server=False)) for kit in self._kits]
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.sockets", *some],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for some in words
        ]
        self.ports: list[dict[str, int]] = [
            json.loads(process.stdout.readline()) for process in self._processes if process.stdout
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.communicate(timeout=10)  # closes its pipes


def main(words: Sequence[str]) -> None:
    ways: dict[str, ssl.SSLContext | None] = {
        "tcp": None,
        **({"tls": Papers(*words).context(is_server=True)} if words else {}),
    }
    listeners = {way: socket.create_server(("127.0.0.1", 0)) for way in ways}
    print(json.dumps({way: listener.getsockname()[1] for way, listener in listeners.items()}), flush=True)
    for way, tls in ways.items():
        threading.Thread(target=answer, args=(listeners[way], tls), daemon=True).start()
    sys.stdin.read()  # until the parent closes the pipe or ends


if __name__ == "__main__":
    main(sys.argv[1:])
