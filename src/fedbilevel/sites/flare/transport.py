"""The server's transport over FLARE: signed calls to the sites of a running job, with checked
answers."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nvflare.collab import CollabCallError, collab
from nvflare.collab.api.exceptions import RunAborted

from fedbilevel.errors import PolicyError
from fedbilevel.sites.flare.guard import refused_by
from fedbilevel.sites.flare.identity import Party, Signer, root_of
from fedbilevel.sites.transport import Failure, Reply

LONGEST = 500  # characters of a refusal
PASSED = 2**25  # bytes of messages between two collections of garbage
ASKED = "asked"  # why a job stops: a person requested it
SERVER = "server"  # FLARE's name for the caller that is the server's job
CALL, ANSWER = "call", "answer"  # purposes of signatures


class Tidy:
    """Collects garbage after many bytes of messages.

    FLARE leaves every sent message in a cycle of references (TxTask and its StreamFuture). Only a
    full collection frees such a message, and Python runs one too seldom: without this class, a
    site's process grew by 50 MB in 1000 rounds.
    """

    def __init__(self) -> None:
        self._passed, self._lock = 0, threading.Lock()

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self._passed += num_bytes
            due, self._passed = self._passed > PASSED, 0 if self._passed > PASSED else self._passed
        if due:
            gc.collect()


class FlareTransport:
    """Sends messages to the sites of the running job. It must be created in the thread in which
    FLARE runs the server."""

    def __init__(self) -> None:
        self._context = collab.context
        self.sites: Sequence[str] = sorted(client.name for client in collab.clients)
        self._threads = ThreadPoolExecutor(max(1, len(self.sites)), thread_name_prefix="exchange")
        self._kit, self._job = Path(collab.workspace.get_root_dir()), str(collab.fl_ctx.get_job_id())
        self._signer = Signer(self._kit)
        self._parties: dict[str, Party] = {}  # sites whose certificates have been seen
        self._refused = refused_by(self._kit)
        self.stopping: str = ""  # why, once a stop was requested
        self._tidy = Tidy()

    def stop_asked(self) -> bool:
        if self._context.is_aborted():
            raise RunAborted("the job was ended from outside.")
        return bool(self.stopping)

    def ask_to_stop(self, why: str) -> None:
        """Request a stop after this outer iteration. A person's earlier request keeps its
        reason."""
        if self.stopping != ASKED:
            self.stopping = why

    def exchange(
        self, messages: Mapping[str, bytes], *, deadline: float
    ) -> tuple[dict[str, Reply], dict[str, Failure]]:
        replies, failures, calls = {}, {}, {}
        for name in sorted(messages):
            if name in self.sites:
                # one call per site, so that each has its own time; FLARE sends one message per site anyway
                group = collab.get_clients([name])(timeout=deadline)  # bound here: our threads belong to no job
                calls[name] = self._threads.submit(self._call, group, name, messages[name])
        for name in sorted(messages):
            outcome = calls[name].result() if name in calls else Failure(True, f"{name} is not part of this job.", 0.0)
            if isinstance(outcome, Reply):
                replies[name] = outcome
            else:
                failures[name] = outcome
        self._tidy(sum(map(len, messages.values())) + sum(len(reply.content) for reply in replies.values()))
        if self._context.is_aborted():  # then calls end early and report a time-out
            raise RunAborted("the job was ended from outside.")
        return replies, failures

    def strangers(self) -> dict[str, dict[str, int]]:
        """Count the messages that the guard of the server's own processes has refused since the
        last call, by sender."""
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
        """Accept an answer only if its site has signed it for this message."""
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
    """Read an answer, and check every part of it, because it comes from outside."""
    if isinstance(answer, dict) and type(answer.get("content")) is bytes:
        return Reply(answer["content"], seconds)
    if isinstance(answer, dict) and isinstance(answer.get("refusal"), str):
        return Failure(False, answer["refusal"][:LONGEST], seconds)
    return Failure(
        False,
        f"{name} answered with something that is no message: install the same version of fedbilevel there.",
        seconds,
    )


def failure_of(name: str, error: CollabCallError, seconds: float) -> Failure:
    """Describe the failure of a call. A failure with a remote traceback comes from a site that
    answered, and any other failure means that the site is unreachable."""
    if error.remote_traceback is not None:
        return Failure(False, f"{name} failed with {error.cause_type}; its own log says more.", seconds)
    if isinstance(error.cause, TimeoutError):
        return Failure(True, f"{name} did not answer within {seconds:.1f} s.", seconds)
    return Failure(True, f"{name} could not be reached ({error.cause}).", seconds)
