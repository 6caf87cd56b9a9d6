"""What runs inside the job processes of FLARE: one Server where the server is, one Client at each site."""

from __future__ import annotations

import base64
import fcntl
import gc
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from nvflare.collab import CollabCallError, collab
from nvflare.collab.api.exceptions import RunAborted

from fedbilevel.errors import FedBilevelError, QuorumError
from fedbilevel.record import write_whole
from fedbilevel.sites.transport import Failure, Reply, Transport

RUNS = "runs"  # folder of a kit: records of the runs on the server, plans of the runs with the lead
PROGRESS = "progress.json"  # in the folder of a run; the lead reads it through the server
SITE = "site"  # folder of a site's kit: its settings, its state, and the log of what left it
KEPT = 20  # the last outer iterations that PROGRESS holds
LONGEST = 500  # letters of a refusal
PASSED = 2**25  # bytes of messages between two collections of garbage
ASKED = "asked"  # by a person
STOP = "fedbilevel_stop"  # the command by which the lead asks a running job to stop after the current outer iteration

log = logging.getLogger(__name__)


class Handler(Protocol):
    def handle(self, message: bytes) -> bytes: ...


class Tidy:
    """FLARE leaves every message that it sent in a circle of references (TxTask and its StreamFuture), which only a full collection frees; with all that a
    process has imported, Python makes one too seldom: a site's process grew by 50 MB in 1000 rounds."""

    def __init__(self) -> None:
        self._passed, self._lock = 0, threading.Lock()

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self._passed += num_bytes
            due, self._passed = self._passed > PASSED, 0 if self._passed > PASSED else self._passed
        if due:
            gc.collect()


class Client:
    """Lives in the job process of a site as long as the job."""

    def __init__(self) -> None:
        self._site: Handler | None = None
        self._lock = threading.Lock()
        self._tidy = Tidy()

    def site(self, name: str, folder: Path) -> Handler:
        from fedbilevel.sites.site import Site

        return Site(name, folder)

    @collab.publish
    def handle(self, message: bytes) -> dict[str, Any]:
        """Refusals are answers. Of an error that is no refusal only the kind leaves the site: its text may quote data."""
        try:
            with self._lock:  # made at the first message: FLARE allows initialisation a minute, and reading data may take longer
                if self._site is None:
                    self._site = self.site(collab.site_name, Path(collab.workspace.get_root_dir()) / SITE)
            answer = self._site.handle(message)
            self._tidy(len(message) + len(answer))
            return {"content": answer}
        except FedBilevelError as error:
            log.warning("refused: %s", error)
            return {"refusal": str(error)}
        except Exception as error:
            log.exception("a phase failed")
            return {"refusal": f"the site failed with {type(error).__name__}; its own log says more."}


class FlareTransport:
    """Sends to the sites of the running job. For the thread in which FLARE runs the server."""

    def __init__(self) -> None:
        self._context = collab.context
        self.sites: Sequence[str] = sorted(client.name for client in collab.clients)
        self._threads = ThreadPoolExecutor(max(1, len(self.sites)), thread_name_prefix="exchange")
        self.stopping: str = ""  # why, once somebody asked
        self._tidy = Tidy()

    def stop_asked(self) -> bool:
        if self._context.is_aborted():
            raise RunAborted("the job was ended from outside.")
        return bool(self.stopping)

    def ask_to_stop(self, why: str) -> None:
        """What a person asked for is not overruled."""
        if self.stopping != ASKED:
            self.stopping = why

    def exchange(self, messages: Mapping[str, bytes], *, deadline: float) -> tuple[dict[str, Reply], dict[str, Failure]]:
        replies, failures, calls = {}, {}, {}
        for name in sorted(messages):
            if name in self.sites:  # a call for each: FLARE sends one message per site also where a group shares it, and so each has its own time
                group = collab.get_clients([name])(timeout=deadline)  # bound to the job here: a thread of ours belongs to none
                calls[name] = self._threads.submit(self._call, group, name, messages[name])
        for name in sorted(messages):
            outcome = calls[name].result() if name in calls else Failure(True, f"{name} is not part of this job.", 0.0)
            if isinstance(outcome, Reply):
                replies[name] = outcome
            else:
                failures[name] = outcome
        self._tidy(sum(map(len, messages.values())) + sum(len(reply.content) for reply in replies.values()))
        if self._context.is_aborted():  # then calls end early and say that they timed out
            raise RunAborted("the job was ended from outside.")
        return replies, failures

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    @staticmethod
    def _call(group: Any, name: str, message: bytes) -> Reply | Failure:
        start = time.monotonic()
        answers = group.handle(message)
        seconds = time.monotonic() - start
        if name in answers.failures:
            return failure_of(name, answers.failures[name], seconds)
        return outcome_of(name, next(iter(answers))[1], seconds)


def outcome_of(name: str, answer: Any, seconds: float) -> Reply | Failure:
    """What a site answered. It comes from outside, so it is looked at."""
    if isinstance(answer, dict) and type(answer.get("content")) is bytes:
        return Reply(answer["content"], seconds)
    if isinstance(answer, dict) and isinstance(answer.get("refusal"), str):
        return Failure(False, answer["refusal"][:LONGEST], seconds)
    return Failure(False, f"{name} answered with something that is no message: is another version of fedbilevel installed there?", seconds)


def failure_of(name: str, error: CollabCallError, seconds: float) -> Failure:
    """A site that answered sends a traceback along; everything else is a site that was not reached."""
    if error.remote_traceback is not None:
        return Failure(False, f"{name} failed with {error.cause_type}; its own log says more.", seconds)
    if isinstance(error.cause, TimeoutError):
        return Failure(True, f"{name} did not answer within {seconds:.1f} s.", seconds)
    return Failure(True, f"{name} could not be reached ({error.cause}).", seconds)


class Progress:
    """What the lead can read while the job runs, and after it: the last outer iterations, and how it ended."""

    def __init__(self, folder: Path, job: str, sites: list[str]) -> None:
        self._path, self._lock = folder / PROGRESS, threading.Lock()
        self._content: dict[str, Any] = {"job": job, "sites": sites, "outcome": "running", "why": "", "waiting": "", "warning": "", "count": 0}
        self._latest: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._write()

    def say(self, progress: dict[str, Any]) -> None:
        with self._lock:
            if "waiting" in progress or "warning" in progress:
                self._content |= {name: progress[name] for name in ("waiting", "warning") if name in progress}
            else:
                self._content |= {"waiting": "", "count": self._content["count"] + 1}
                self._latest.append(progress)
            self._write()

    def end(self, outcome: str, why: str) -> None:
        with self._lock:
            self._content |= {"outcome": outcome, "why": why}
            self._write()

    def _write(self) -> None:
        write_whole(self._path, json.dumps({**self._content, "latest": list(self._latest)}).encode())  # a reader sees the old one or the new one, never half


def packed(plan: dict[str, Any]) -> str:
    """A plan as an argument in a job's configuration, in letters only: FLARE reads braces there as names to be replaced."""
    return base64.urlsafe_b64encode(json.dumps(plan).encode()).decode()


def unpacked(plan: str) -> dict[str, Any]:
    return json.loads(base64.urlsafe_b64decode(plan))


class Server:
    """Runs the plan, or goes on with it where an earlier job of the same run was."""

    def __init__(self, plan: str) -> None:
        self.plan = plan

    def serve(self, plan: dict[str, Any], transport: Transport, folder: Path, say: Callable[[dict[str, Any]], None]) -> str:
        from fedbilevel.sites.serve import serve

        return serve(plan, transport, folder, say)

    @collab.main
    def run(self) -> None:
        plan = unpacked(self.plan)
        transport = FlareTransport()
        folder = Path(collab.workspace.get_root_dir()) / RUNS / plan["name"]
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as mine:
            try:
                fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # two followers may have started one each
                log.error("another job of the run %s is still at work", plan["name"])
                transport.close()
                return
            self._run(plan, transport, folder)

    def _run(self, plan: dict[str, Any], transport: FlareTransport, folder: Path) -> None:
        progress = Progress(folder, collab.fl_ctx.get_job_id(), list(transport.sites))

        def stop(_topic: str, data: Any, _context: Any) -> dict[str, Any]:
            transport.ask_to_stop(str((data or {}).get("why") or ASKED))
            return {"stopping": transport.stopping}

        collab.fl_ctx.get_engine().register_app_command(STOP, stop)
        try:
            outcome = self.serve(plan, transport, folder, progress.say)
        except QuorumError as error:  # another job may find more sites
            log.error("the job ended: %s", error)
            progress.end("interrupted", str(error))
        except FedBilevelError as error:
            log.error("the run ended: %s", error)
            progress.end("failed", str(error))
        else:
            progress.end(outcome, transport.stopping if outcome == "stopped" else "")
        finally:
            transport.close()
