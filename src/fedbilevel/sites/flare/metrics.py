"""Health and metrics of a server or a site over HTTP, for Prometheus and for service managers.

GET /healthz answers 200 while the supervised process runs and its certificate is valid, otherwise
503. GET /metrics returns figures in the text format 0.0.4, read from the kit's files at each
request. Both requests need a Host header with a name of this endpoint, so that no foreign web page
can read the figures (DNS rebinding).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from fedbilevel.errors import SettingError
from fedbilevel.sites import chain
from fedbilevel.sites.flare import certificates
from fedbilevel.sites.flare.job import PROGRESS, RUNS, SITE
from fedbilevel.sites.flare.processes import Supervised
from fedbilevel.sites.status import STATUS

log = logging.getLogger(__name__)
HOST = "127.0.0.1"
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # in a Host header
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OUTCOMES = ("running", "finished", "stopped", "failed", "interrupted")
STATES = ("idle", "computing", "waiting for approval", "paused", "left", "finished")


class Sample(NamedTuple):
    name: str
    value: float
    labels: Mapping[str, str] = {}


# name without the prefix: type and help
FAMILIES = {
    "up": ("gauge", "Whether the supervised process lives."),
    "starts_total": ("counter", "How often the process was started since this supervisor began."),
    "certificate_remaining_seconds": ("gauge", "Seconds until the certificate ends, negative after that."),
    "run_outcome": ("gauge", "1 for the outcome of the run as its job wrote it last, 0 for the others."),
    "run_iteration": ("gauge", "Outer iterations that are done."),
    "run_iterations": ("gauge", "Outer iterations that the run has."),
    "run_rounds": ("gauge", "Rounds so far."),
    "run_bytes": ("gauge", "Bytes of arrays so far, both ways."),
    "run_figure": ("gauge", "A figure of the last measurement."),
    "run_waits": ("gauge", "Whether the run waits for sites or for an approval."),
    "run_site_seconds": ("gauge", "Seconds that a site computed in the last outer iteration."),
    "run_site_missing": ("gauge", "1 for a site that was missing in the last outer iteration."),
    "site_state": ("gauge", "1 for the state of the site, 0 for the others."),
    "site_status_timestamp_seconds": ("gauge", "When the state was written."),
    "site_iteration": ("gauge", "Outer iteration that the site works on."),
    "site_iterations": ("gauge", "Outer iterations that the run has."),
    "site_answers": ("gauge", "Answers of this job."),
    "site_bytes": ("gauge", "Bytes of the answers of this job."),
    "site_rounds_run": ("gauge", "Phases and measurements that were computed in this run."),
    "site_max_rounds": ("gauge", "Phases and measurements that the policy allows."),
    "site_left_answers_total": ("counter", "Lines in the log of what left, over all runs."),
    "site_left_rounds_total": (
        "counter",
        "Phases and measurements that were computed over all runs, which the policy counts.",
    ),
    "site_left_bytes_total": ("counter", "Bytes of the answers over all runs."),
    "site_norm": ("gauge", "Norm of the array that left last, by its name."),
    "site_last_error_timestamp_seconds": ("gauge", "When something went wrong last at the site."),
}


def text(samples: list[Sample]) -> str:
    """Write samples in the text format of Prometheus, grouped by family."""
    lines = []
    for name, (kind, help_text) in FAMILIES.items():
        found = [one for one in samples if one.name == name and math.isfinite(one.value)]
        if found:
            lines += [f"# HELP fedbilevel_{name} {help_text}", f"# TYPE fedbilevel_{name} {kind}"]
            lines += [f"fedbilevel_{name}{_labels(one.labels)} {one.value!r}" for one in found]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    parts = [f'{name}="{_escaped(value)}"' for name, value in labels.items()]
    return f"{{{','.join(parts)}}}" if parts else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _read(path: Path) -> dict[str, Any]:
    """Read a file that a job writes, or return {} if the file is missing or not JSON."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _numbers(values: Mapping[str, Any], names: Mapping[str, str], **labels: str) -> Iterator[Sample]:
    """Yield a sample for each number, and skip other values and integers that are too large.

    names: the family of samples for each key of `values`.
    """
    for key, family in names.items():
        if isinstance(value := values.get(key), int | float):
            with contextlib.suppress(OverflowError):
                yield Sample(family, float(value), labels)


def _one_of(family: str, known: tuple[str, ...], value: Any, **labels: str) -> Iterator[Sample]:
    key = family.rpartition("_")[2]
    for one in known:
        yield Sample(family, float(one == value), {**labels, key: one})


def of_process(supervised: Supervised) -> Iterator[Sample]:
    yield Sample("up", float(supervised.pid is not None))
    yield Sample("starts_total", float(supervised.num_starts))
    with contextlib.suppress(SettingError):  # the certificate is missing, which /healthz reports
        yield Sample("certificate_remaining_seconds", certificates.ends(supervised.kit).timestamp() - time.time())


def of_runs(kit: Path) -> Iterator[Sample]:
    """Yield samples at the server about every run, from the last progress that its job wrote."""
    for path in sorted((kit / RUNS).glob(f"*/{PROGRESS}")):
        run, progress = path.parent.name, _read(path)
        rows = progress.get("latest")
        latest = _table(rows[-1]) if isinstance(rows, list) and rows else {}
        yield from _one_of("run_outcome", OUTCOMES, progress.get("outcome"), run=run)
        yield Sample("run_waits", float(bool(progress.get("waiting"))), {"run": run})
        names = {"iteration": "run_iteration", "num_iterations": "run_iterations", "rounds": "run_rounds"}
        yield from _numbers(latest, names, run=run)
        for sent in _numbers(latest, {"megabytes": "run_bytes"}, run=run):
            yield sent._replace(value=1e6 * sent.value)
        for name, value in _table(latest.get("figures")).items():
            yield from _numbers({"it": value}, {"it": "run_figure"}, run=run, figure=name)
        for site, seconds in _table(latest.get("sites")).items():
            yield from _numbers({"it": seconds}, {"it": "run_site_seconds"}, run=run, site=site)
        for site in _table(latest.get("missing")):
            yield Sample("run_site_missing", 1.0, {"run": run, "site": site})


def of_site(kit: Path) -> Iterator[Sample]:
    """Yield samples at a site: the last state that its job wrote, and totals of what has left the
    site."""
    status = _read(kit / SITE / STATUS)
    yield from _one_of("site_state", STATES, status.get("state", "idle"))
    names = ("answers", "bytes", "rounds_run", "max_rounds", "iteration")
    families = {name: f"site_{name}" for name in names}
    families |= {"time": "site_status_timestamp_seconds", "num_iterations": "site_iterations"}
    yield from _numbers(status, families)
    for name, norm in _table(status.get("norms")).items():
        yield from _numbers({"it": norm}, {"it": "site_norm"}, array=name)
    if (head := chain.read_head(kit / SITE)) is not None:
        totals = {"n": "answers", "rounds": "rounds", "bytes": "bytes"}
        yield from _numbers(vars(head), {key: f"site_left_{name}_total" for key, name in totals.items()})
    yield from _numbers(_table(status.get("last_error")), {"time": "site_last_error_timestamp_seconds"})


def samples_of(supervised: Supervised) -> list[Sample]:
    own = of_runs(supervised.kit) if supervised.name == certificates.SERVER else of_site(supervised.kit)
    return [*of_process(supervised), *own]


def fault(supervised: Supervised) -> str:
    """Return the reason why the server or site is not healthy, or an empty text if it is
    healthy."""
    if supervised.pid is None:
        return f"{supervised.name} does not run"
    try:
        certificates.check(supervised.kit)
    except SettingError as error:
        return str(error)
    return ""


class Endpoint:
    """Serves /healthz and /metrics in a thread until `close` is called."""

    def __init__(self, supervised: Supervised, *, host: str = HOST, port: int = 0) -> None:
        try:
            self._server = _Server((host, port), _handler(supervised, host))
        except OSError as error:
            where = f"metrics cannot be served at {host}:{port} ({error.strerror})"
            raise SettingError(f"{where}: give another --metrics-port (0: a free one) or --metrics-host.") from None
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer asks the name service for this machine's name, which may take long

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a failed request instead of printing it, because usually a client disconnected before
        its answer."""
        log.debug("a request of %s failed", client_address, exc_info=True)


def _name_in(host: str | None) -> str | None:
    """Return the name or address in a Host header. The port is dropped, because a tunnel may use
    another one."""
    try:
        return urlsplit(f"//{host or ''}").hostname
    except ValueError:
        return None


def _handler(supervised: Supervised, host: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5.0  # seconds for a request, so that no client holds a thread

        def do_GET(self) -> None:
            if not self._is_for_us():
                self._answer(403, "Ask under this machine's address, or under the name that --metrics-host gives.\n")
            elif self.path == "/healthz":
                why = fault(supervised)
                self._answer(503 if why else 200, f"{why or 'ok'}\n")
            elif self.path == "/metrics":
                self._answer(200, text(samples_of(supervised)))
            else:
                self._answer(404, "there are /healthz and /metrics\n")

        def _is_for_us(self) -> bool:
            """Check whether the Host header names this endpoint. If the endpoint listens at
            0.0.0.0, the address that the client connected to is accepted."""
            return _name_in(self.headers.get("Host")) in (*LOOPBACK, host.lower(), self.connection.getsockname()[0])

        def _answer(self, code: int, content: str) -> None:
            body = content.encode(errors="replace")
            self.send_response(code)
            self.send_header("Content-Type", TEXT)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing, because the terminal shows the progress of runs."""

    return Handler
