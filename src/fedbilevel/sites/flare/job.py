"""What runs inside the job processes of FLARE: one Server where the server is, one Client at each site."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nvflare.collab import CollabCallError, collab
from nvflare.collab.api.exceptions import RunAborted

from fedbilevel.errors import FedBilevelError, PolicyError, QuorumError
from fedbilevel.runs.record import write_whole
from fedbilevel.sites.flare.configuration import lead_of, unpacked
from fedbilevel.sites.flare.guard import refused_by
from fedbilevel.sites.flare.identity import Party, Signer, root_of, server_of
from fedbilevel.sites.transport import Failure, Reply, SiteTransport

if TYPE_CHECKING:
    from fedbilevel.sites.consent import Submitted

RUNS = "runs"  # folder of a kit: records of the runs on the server, plans of the runs with the lead
PROGRESS = "progress.json"  # in the folder of a run; the lead reads it through the server
SITE = "site"  # folder of a site's kit: its settings, its state, and the log of what left it
KEPT = 20  # the last outer iterations that PROGRESS holds
LONGEST = 500  # letters of a refusal
PASSED = 2**25  # bytes of messages between two collections of garbage
ASKED = "asked"  # by a person
SERVER = "server"  # FLARE's name for the caller that is the server's job
CALL, ANSWER = "call", "answer"  # purposes of signatures
STOP = "fedbilevel_stop"  # the command by which the lead asks a running job to stop after the current outer iteration

log = logging.getLogger(__name__)


class Handler(Protocol):
    def handle(self, message: bytes) -> bytes: ...

    def refuse_caller(self, caller: str, reason: str) -> str: ...


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
    """The site in a job process. It answers the server of its own job, and nobody else.

    plan, seal: the submitted plan, and the lead's signature of it, from the job's configuration.
    """

    def __init__(self, plan: str = "", seal: str = "") -> None:
        self.plan, self.seal = plan, seal
        self._site: Handler | None = None
        self._signer: Signer | None = None
        self._server: Party | None = None  # whose certificate came with an earlier call
        self._lock = threading.Lock()
        self._tidy = Tidy()

    def site(self, name: str, folder: Path) -> Handler:
        from fedbilevel.sites.policy import read_settings
        from fedbilevel.sites.site import Site

        found = Site(name, folder, submitted(folder.parent, self.plan, self.seal, str(collab.fl_ctx.get_job_id())))
        with contextlib.suppress(FedBilevelError):  # joining says what is wrong with the settings
            read_settings(folder).policy.limit_memory()
        Rejections(found.refuse_caller).attach()
        return found

    @collab.publish
    def handle(self, message: bytes, signature: bytes, certificate: bytes) -> dict[str, Any]:
        """Answer the server. An error that is no refusal leaves the site by its kind alone: its text may quote data."""
        try:
            kit, job = Path(collab.workspace.get_root_dir()), str(collab.fl_ctx.get_job_id())
            with (
                self._lock
            ):  # made at the first message: FLARE allows a minute for initialisation, and data may take longer
                if self._signer is None:
                    self._signer = Signer(kit)
                if self._site is None:
                    self._site = self.site(collab.site_name, kit / SITE)
            reason = self._stranger(kit, job, message, signature, certificate)
            if reason:
                return {"refusal": self._site.refuse_caller(collab.caller, reason)}
            answer = self._site.handle(message)
            self._tidy(len(message) + len(answer))
            shown = self._signer.certificate if certificate else b""  # a server that shows its own does not know ours
            return {
                "content": answer,
                "signature": self._signer.sign(ANSWER, job, collab.site_name, message, answer),
                "certificate": shown,
            }
        except PolicyError as error:
            log.warning("refused: %s", error)
            return {"refusal": str(error)}
        except Exception as error:
            log.exception("a call failed")
            return {"refusal": f"the site failed with {type(error).__name__}; its own log says more."}

    def _stranger(self, kit: Path, job: str, message: bytes, signature: bytes, certificate: bytes) -> str:
        """Why a call is not from the server of this job; empty where it is. FLARE's word for the caller comes first, and
        the server's signature decides: a routing header could be forged, a signature cannot."""
        if collab.caller != SERVER:
            return f"this site answers the server of the run only, and not {collab.caller}."
        if certificate:
            party = Party(certificate, root_of(kit))
            if party.name != server_of(kit):
                return f"this site answers the server of the run only, and not the holder of the certificate of {party.name}."
            self._server = party
        if self._server is None or not self._server.signed(signature, CALL, job, collab.site_name, message):
            return "the message does not carry the signature of the server of the run."
        return ""


def submitted(kit: Path, plan: str, seal: str, job: str) -> Submitted:
    """The plan of a job, once the lead's signature of it has been checked."""
    from fedbilevel.sites.consent import Submitted
    from fedbilevel.sites.plan import plan_digest

    return Submitted(plan_digest(unpacked(plan)), lead_of(kit, plan, seal), job)


class Rejections(logging.Handler):
    """Reports calls that FLARE itself refused: of other jobs, and of strangers. FLARE says so in its log only."""

    _CALL = re.compile(r"rejected Collab call from (\S+): (.*)")

    def __init__(self, report: Callable[[str, str], str]) -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def attach(self) -> None:
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        found = self._CALL.search(record.getMessage())
        if found:
            self._report(found[1], f"FLARE refused the call: {found[2]}.")


class FlareTransport:
    """Sends to the sites of the running job. For the thread in which FLARE runs the server."""

    def __init__(self) -> None:
        self._context = collab.context
        self.sites: Sequence[str] = sorted(client.name for client in collab.clients)
        self._threads = ThreadPoolExecutor(max(1, len(self.sites)), thread_name_prefix="exchange")
        self._kit, self._job = Path(collab.workspace.get_root_dir()), str(collab.fl_ctx.get_job_id())
        self._signer = Signer(self._kit)
        self._parties: dict[str, Party] = {}  # sites whose certificates have been seen
        self._refused = refused_by(self._kit)
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

    def exchange(
        self, messages: Mapping[str, bytes], *, deadline: float
    ) -> tuple[dict[str, Reply], dict[str, Failure]]:
        replies, failures, calls = {}, {}, {}
        for name in sorted(messages):
            if (
                name in self.sites
            ):  # a call for each: FLARE sends one message per site also where a group shares it, and so each has its own time
                group = collab.get_clients([name])(
                    timeout=deadline
                )  # bound to the job here: a thread of ours belongs to none
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

    def strangers(self) -> dict[str, dict[str, int]]:
        """What the guard of the server's own processes has refused since the job began."""
        found = refused_by(self._kit)
        new = {
            name: times - self._refused.get(name, 0)
            for name, times in found.items()
            if times > self._refused.get(name, 0)
        }
        self._refused = found
        return {SERVER: new} if new else {}

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    def _call(self, group: Any, name: str, message: bytes) -> Reply | Failure:
        start = time.monotonic()
        certificate = b"" if name in self._parties else self._signer.certificate
        answers = group.handle(message, self._signer.sign(CALL, self._job, name, message), certificate)
        seconds = time.monotonic() - start
        if name in answers.failures:
            outcome: Reply | Failure = failure_of(name, answers.failures[name], seconds)
        else:
            answer = next(iter(answers))[1]
            outcome = outcome_of(name, answer, seconds)
            if isinstance(outcome, Reply):
                outcome = self._checked(name, message, outcome, answer)
        if not isinstance(outcome, Reply):
            self._parties.pop(name, None)  # its process may be new, and then does not know the server's certificate
        return outcome

    def _checked(self, name: str, message: bytes, reply: Reply, answer: Mapping[str, Any]) -> Reply | Failure:
        """An answer counts when the site it is for has signed it, for this message."""
        signature, certificate = answer.get("signature"), answer.get("certificate")
        if type(signature) is not bytes or type(certificate) is not bytes:
            return Failure(
                False, f"{name} did not sign its answer: install the same version of fedbilevel there.", reply.seconds
            )
        try:
            party = Party(certificate, root_of(self._kit)) if certificate else self._parties.get(name)
        except PolicyError as error:
            return Failure(False, f"{name} answered with a certificate that is refused: {error}", reply.seconds)
        if (
            party is None
            or party.name != name
            or not party.signed(signature, ANSWER, self._job, name, message, reply.content)
        ):
            return Failure(
                False, f"an answer for {name} does not carry its signature, so it is not used.", reply.seconds
            )
        self._parties[name] = party
        return reply


def outcome_of(name: str, answer: Any, seconds: float) -> Reply | Failure:
    """Read an answer. It comes from outside, so every part of it is checked."""
    if isinstance(answer, dict) and type(answer.get("content")) is bytes:
        return Reply(answer["content"], seconds)
    if isinstance(answer, dict) and isinstance(answer.get("refusal"), str):
        return Failure(False, answer["refusal"][:LONGEST], seconds)
    return Failure(
        False,
        f"{name} answered with something that is no message: is another version of fedbilevel installed there?",
        seconds,
    )


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
        self._content: dict[str, Any] = {
            "job": job,
            "sites": sites,
            "outcome": "running",
            "why": "",
            "waiting": "",
            "warning": "",
            "count": 0,
        }
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
        write_whole(
            self._path, json.dumps({**self._content, "latest": list(self._latest)}).encode()
        )  # a reader sees the old one or the new one, never half


class Server:
    """Runs the plan, or goes on with it where an earlier job of the same run was."""

    def __init__(self, plan: str, seal: str = "") -> None:
        self.plan, self.seal = plan, seal

    def serve(
        self, plan: dict[str, Any], transport: SiteTransport, folder: Path, say: Callable[[dict[str, Any]], None]
    ) -> str:
        from fedbilevel.sites.serve import serve

        return serve(plan, transport, folder, say)

    @collab.main
    def run(self) -> None:
        plan = unpacked(self.plan)
        lead_of(Path(collab.workspace.get_root_dir()), self.plan, self.seal)
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
