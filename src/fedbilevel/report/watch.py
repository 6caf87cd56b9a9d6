"""The report page of a run in progress, served by this machine to itself.

The server listens on 127.0.0.1 only and answers two paths. It refuses other names in the Host
header, so that no page from another host can reach it (DNS rebinding). Files are read again when
they change.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedbilevel.errors import ReportError
from fedbilevel.escapes import printable
from fedbilevel.report import page_data
from fedbilevel.report.page import as_data, policy, whole

HOST = "127.0.0.1"
_READ = (
    "*.json",
    "*.jsonl",
    "*/*.json",
    "*/*.jsonl",
    "run.toml",
    "*/run.toml",
    "solution.safetensors",
    "*/solution.safetensors",
)  # files that the content depends on


class Live:
    """The current content of records on disk."""

    def __init__(self, paths: Sequence[Path], *, target: page_data.Goal = None, title: str | None = None) -> None:
        self.paths, self.target, self.title = paths, target, title
        self._lock, self._seen, self._content = threading.Lock(), None, {}  # type: ignore[var-annotated]
        self.content()

    def content(self) -> dict[str, Any]:
        """Return the content, read again if a file has changed.

        While a file is damaged, the last content stays.
        """
        with self._lock:
            seen = self._stamps()
            if seen != self._seen:
                try:
                    self._content = page_data.read(self.paths, target=self.target, title=self.title, partial=True)
                except ReportError:
                    if not self._content:
                        raise
                self._seen = seen  # type: ignore[assignment]
            return self._content

    def _stamps(self) -> list[tuple[str, int, int]]:
        folders = [path if path.is_dir() else path.parent for path in self.paths]
        found = []
        for place in sorted({place for folder in folders for pattern in _READ for place in folder.glob(pattern)}):
            try:
                about = place.stat()
            except FileNotFoundError:  # a file is being replaced at this moment
                continue
            found.append((str(place), about.st_mtime_ns, about.st_size))
        return found


class OwnMachine(ThreadingHTTPServer):
    """An HTTP server for this machine only, which a `with` statement closes.

    port: number of the port, or 0 for any free port.
    """

    daemon_threads = True
    allow_reuse_address = False  # two watches on one port would take turns

    def __init__(self, answer: type[Answer], port: int = 0) -> None:
        try:
            super().__init__((HOST, port), answer)
        except OverflowError:
            raise ReportError(
                f"the port is {port}, expected a number from 1 to 65535, or 0 for any free port."
            ) from None
        except OSError as error:
            why = "another program uses it" if error.errno == errno.EADDRINUSE else error.strerror
            raise ReportError(
                f"the port {port} is not available ({why}): name another one with --port, or 0 for any free port."
            ) from error

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def hosts(self) -> tuple[str, ...]:
        port = self.server_address[1]
        return f"{HOST}:{port}", f"localhost:{port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that closes its connection during an answer."""


class Answer(BaseHTTPRequestHandler):
    """A request handler that checks the Host header and sends a restrictive security policy.

    The headers forbid the browser everything that the page does not need.
    """

    server: OwnMachine
    server_version, sys_version = "fedbilevel", ""
    timeout = 30

    def policy(self) -> str:
        """Return the Content-Security-Policy of every answer."""
        return policy(live=True)

    def is_for_us(self) -> bool:
        """Return whether the request names this server, and refuse other requests."""
        ours = self.headers.get("Host") in self.server.hosts()
        if not ours:
            self.say(403, "text/plain", "This server answers its own machine only, under its own name.")
        return ours

    def say(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": f"{self.policy()}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing, because the terminal belongs to the run."""


class Watch(OwnMachine):
    def __init__(self, live: Live, port: int = 0) -> None:
        self.live = live
        super().__init__(_OfRecord, port)


class _OfRecord(Answer):
    server: Watch

    def do_GET(self) -> None:
        if not self.is_for_us():
            return
        kinds: dict[str, tuple[str, Callable[[], str]]] = {
            "/": ("text/html", lambda: whole(self.server.live.content(), live=True)),
            "/data.json": ("application/json", lambda: as_data(self.server.live.content())),
        }
        if self.path not in kinds:
            return self.say(404, "text/plain", "There is only / and /data.json here.")
        kind, made = kinds[self.path]
        self.say(200, kind, made())


def watch(
    live: Live, port: int, begun: Callable[[str], None], ended: Callable[[str], None], *, every: float = 2.0
) -> None:
    """Serve the page until Ctrl-C.

    begun: function that receives the address.
    ended: function that receives, once, a sentence on how the run ended.
    """
    with Watch(live, port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)
        thread.start()
        begun(server.address)
        told = False
        try:
            while True:
                over = live.content()["over"]
                if over and not told:
                    ended(_ending(live.content()))
                told = bool(over)
                threading.Event().wait(every)
        except KeyboardInterrupt:
            pass
        finally:
            server.shutdown()
            thread.join()


def _ending(found: dict[str, Any]) -> str:
    """Return one sentence about the worst end of a run."""
    runs = found["runs"]
    for state, how in (("failed", "failed"), ("stopped", "was stopped")):
        for run in runs:
            if run["state"] == state:
                name = "run" if len(runs) == 1 else f"run in {run['path']}"
                end, planned = run["end"] or {}, run["planned"]["iteration"]
                done = end.get("iteration") or (run["columns"].get("iteration") or [0])[-1]
                why = printable(end.get("why") or "")
                length = f" of {planned}" if planned else ""
                return f"The {name} {how} after outer iteration {done}{length}{f': {why}' if why else '.'}"
    return (
        "The runs have finished." if len(runs) > 1 else "The run has finished." if runs else "The study has finished."
    )
