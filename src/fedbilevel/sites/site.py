"""A site: its own data, memory and disk. It answers messages about phases that its installed
version knows.

Files in its folder:

    site.toml             settings and policy, never sent
    left.jsonl            audit log: one line for everything that left, see `chain`
    requests, approvals   submitted plans, and the operator's decisions, see `operator`
    privacy.json          releases over all runs, if the policy has `max_epsilon`, see `spending`
    status.json           the site's state now, for `fedbilevel federation watch`
    log.txt               errors in full
    runs/NAME/version-K   memory and private values after outer iteration K, the last two
    runs/NAME/order.json  the latest outer iteration, and how many were repeated, see `order`
    runs/NAME/solution    private parts of the solution
    runs/NAME/suspects    labels of the site after a detector, see `cleaned`; cleaning: the estimates

An answer carries the turn of its message. A site refuses a message of an earlier turn than the last
one answered: the server has given up on it, and carrying it out now would spoil what has been
agreed since.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedbilevel._version import __version__
from fedbilevel.errors import (
    AwaitingOperatorError,
    NonFiniteError,
    PlanError,
    PolicyError,
    RangeError,
    UnknownNameError,
    WireError,
)
from fedbilevel.escapes import printable
from fedbilevel.sites import wire
from fedbilevel.sites.audit import AuditLog
from fedbilevel.sites.consent import Consent, Submitted
from fedbilevel.sites.membership import Papers
from fedbilevel.sites.policy import Policy, read_settings
from fedbilevel.sites.session import Content, Session
from fedbilevel.sites.status import STATUS, StatusFile
from fedbilevel.sites.tally import Tally, is_due, since_last

LOG = "log.txt"
LONGEST = 500  # characters of a refusal: it may quote the message
SAYABLE = (
    WireError,
    PolicyError,
    NonFiniteError,
    RangeError,
)  # errors whose texts hold nothing of this site but names and shapes
_LONGEST_LOG = 2**22  # bytes of log.txt before it is renamed to log-before.txt
_BETWEEN = 16  # messages between two checks of the disk's use
_KNOWN = 1000  # refusals whose repetitions are merged in the audit log
_CALLERS = 50  # refused callers that are counted separately
log = logging.getLogger(__name__)


class Site:
    """A site that answers the messages of a server.

    submitted: the only plan that this site answers to; None, for trials in one process, allows any
        approved plan.
    papers: the site's certificate, for secure sums.
    """

    def __init__(
        self, name: str, folder: Path | str, submitted: Submitted | None = None, papers: Papers | None = None
    ) -> None:
        self.name, self.folder, self._papers = name, Path(folder), papers
        self.audit = AuditLog(self.folder)
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._turn: list[int] = []
        self._strangers: Counter[str] = Counter()  # refused callers not yet reported to the server
        self._refused: Tally[str] = Tally(_CALLERS, "others")
        self._refusals: Counter[str] = Counter()
        self._handled, self._full = 0, ""  # why nothing may be written, if so
        digest, job = (submitted.digest, submitted.job) if submitted else ("", "")
        self._status = StatusFile(self.folder / STATUS, job=job, digest=digest)
        self._consent = Consent(name, self.folder, submitted, self._status)

    def handle(self, message: bytes) -> bytes:
        """Answer a message with the result, or with one sentence that gives the reason for a
        refusal. Details of a failure, such as paths and values, stay in this site's own log."""
        if full := self._disk_full():
            return wire.pack({"error": full})
        try:
            header, arrays = wire.unpack(message)
            if header.get("kind") == "ping":  # answered while a phase is computed
                return wire.pack(self._consent.availability(self._lock.locked()))
            with self._lock:
                if self._session is not None:
                    self._session.ran = False
                try:
                    return self._answer(header, arrays)
                except Exception as error:  # noqa: BLE001 - a loss or a loader may raise anything; it is logged
                    return self._failed(error, ran=self._session is not None and self._session.ran)
        except Exception as error:  # noqa: BLE001 - no message may end the site's job
            return self._failed(error)

    def refuse_caller(self, caller: str, reason: str) -> str:
        """Log a call that is not from the server of the run, and report the caller to that server
        with the next answer."""
        caller, times = self._refused.add(printable(caller)[:100])
        self._strangers[caller] += 1
        if is_due(times) and not self._full:
            log.warning("refused call number %d of %s: %s", times, caller, reason)
            with contextlib.suppress(OSError):
                line = {"run": None, "kind": "error", "caller": caller, "times": since_last(times), "text": reason}
                self.audit.append({**line, "bytes": 0, "arrays": []})
        return reason

    def note(self, text: str) -> None:
        """Write an error to this site's own log."""
        text = printable(text, lines=True)
        log.error("a message could not be answered:\n%s", text)
        place = self.folder / LOG
        if self._full:
            return
        with contextlib.suppress(OSError):
            if place.exists() and place.stat().st_size > _LONGEST_LOG:
                place.replace(self.folder / "log-before.txt")
            with open(place, "a") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}\n")

    def close(self) -> None:
        if self._session is not None:
            self._session.leave()

    # ---- answers -------------------------------------------------------------------------------------------------

    def _answer(self, header: Mapping[str, Any], arrays: list[Tensor]) -> bytes:
        kind, turn = header.get("kind"), header.get("turn")
        if not isinstance(turn, list) or len(turn) != 3 or not all(type(part) is int for part in turn):
            raise WireError(f"a message says that its turn is {turn!r:.40}, expected three whole numbers.")
        if turn <= self._turn:
            raise WireError(
                f"the message of turn {turn} arrived after turn {self._turn} was answered, so it is too late."
            )
        self._turn = turn
        self._consent.check_unpaused()
        if kind == "join":
            before, self._session = self._session, None
            self._session = self._joined(before, header)
            return self._sent(self._session.introduce())
        session = self._session
        if session is None or session.plan.name != header.get("run"):
            raise WireError(
                f"this site takes no part in the run {header.get('run')!r:.80}: it must be asked to join first."
            )
        self._consent.check_approved(session.plan.name)
        answers = {name: getattr(session, name) for name in ("phase", "measure", "secure", "commit", "load", "finish")}
        if kind not in answers:
            raise WireError(
                f"a message has kind {kind!r:.40}, which fedbilevel {__version__} at this site does not know."
            )
        self._status.write(state="computing", **session.named(header))
        content = answers[kind](header, arrays)
        if kind == "finish" and session.summary:
            log.info("%s: %s", session.plan.name, session.summary)
            self._status.write(summary=session.summary)
        return self._sent(content, state="finished" if kind == "finish" else "idle")

    def _joined(self, before: Session | None, header: Mapping[str, Any]) -> Session:
        """Admit a plan and return its session. The previous session is used again for the same run,
        so that data are read once."""
        if before is not None:
            before.leave()
        plan, settings = self._consent.admitted(header)
        if before is not None and (before.plan, before.settings) == (plan, settings):
            before.enter()
            session = before
        else:
            settings.policy.check_runs(self.folder / "runs", plan.name)
            session = Session(self.name, self.folder, settings, plan, self.audit, self._papers)
        self._status.write(
            state="idle",
            run=plan.name,
            digest=self._consent.digest,
            iteration=None,
            num_iterations=plan.num_iterations,
            phase=None,
            max_rounds=settings.policy.max_rounds,
            rounds_total=self.audit.rounds,
            last_error=None,
            summary=None,
            **session.spending.figures(),
        )
        return session

    def _sent(self, content: Content, state: str = "idle") -> bytes:
        """Log an answer, then return it as bytes. Every answer except that to a ping passes through
        this method."""
        assert self._session is not None
        header, sent, when = content
        order = {name: len(arrays) for name, arrays in sent.items()}
        message = wire.pack(
            {**header, "order": order, **self._reported()}, [array for arrays in sent.values() for array in arrays]
        )
        self._session.policy.check_answer(len(message))
        self._consent.check_unpaused()  # the operator may have decided during the computation
        self._consent.check_approved(self._session.plan.name)
        what: list[dict[str, Any]] = [
            {
                "name": name,
                "shape": list(array.shape),
                "dtype": str(array.dtype).removeprefix("torch."),
                "norm": float(array.double().norm()),
            }
            for name, arrays in sent.items()
            for array in arrays
        ]
        self.audit.append({"run": self._session.plan.name, **when, "bytes": len(message), "arrays": what})
        self._status.answered(len(message), {one["name"]: one["norm"] for one in what})
        spent = self._session.spending.figures()
        self._status.write(state=state, rounds_total=self.audit.rounds, rounds_run=self._session.rounds, **spent)
        return message

    def _reported(self) -> dict[str, Any]:
        """Return refused callers that the server of the run has not received yet."""
        if not self._strangers:
            return {}
        reported, self._strangers = dict(self._strangers), Counter()
        return {"strangers": reported}

    # ---- refusals ------------------------------------------------------------------------------------------------

    def _failed(self, error: Exception, *, ran: bool = False) -> bytes:
        """Turn an error into an answer.

        ran: whether something was computed, which counts as a round.
        """
        if isinstance(error, AwaitingOperatorError):
            return self._refusal(str(error), wait=True, ran=ran)
        if isinstance(error, SAYABLE):
            return self._refusal(str(error), ran=ran)
        if _is_memory(error):
            return self._refusal(str(read_settings(self.folder).policy.memory_error()), ran=ran)
        self.note("".join(traceback.format_exception(error)))
        return self._refusal(f"it failed with {type(error).__name__}; its own log says more.", ran=ran)

    def _refusal(self, reason: str, *, wait: bool = False, ran: bool = False) -> bytes:
        reason = reason if len(reason) <= LONGEST else f"{reason[: LONGEST - 4]} ..."
        message = wire.pack({"error": reason, **({"wait": True} if wait else {})})
        run = self._session.plan.name if self._session else None
        self._status.failed(reason)
        if wait and not ran:  # repeated until the operator decides, and holds nothing of this site
            return message
        line: dict[str, Any] = {"run": run, "kind": "error", "text": reason}
        if ran:
            line |= {"round": True, "bytes": len(message)}
        else:
            if len(self._refusals) >= _KNOWN:
                self._refusals.clear()
            self._refusals[reason] += 1
            if not is_due(self._refusals[reason]):
                return message
            times = since_last(self._refusals[reason])
            line |= {**({"times": times} if times > 1 else {}), "bytes": times * len(message)}
        try:
            self.audit.append({**line, "arrays": []})
        except OSError:
            return wire.pack({"error": "it cannot write to its audit log, so nothing leaves it."})
        return message

    def _disk_full(self) -> str:
        """Return the reason why nothing may be written, or an empty text. If nothing may be
        written, not even logs, nothing may leave either. The disk is checked every few messages."""
        self._handled += 1
        if self._full or self._handled % _BETWEEN == 1:
            try:
                _policy(self.folder).check_disk(self.folder)
                self._full = ""
            except PolicyError as error:
                self._full = str(error)
            except OSError:  # a file was removed during the check
                pass
        return self._full


def _policy(folder: Path) -> Policy:
    """Read the site's policy, or return the default if the file cannot be read, which joining a run
    reports."""
    try:
        return read_settings(folder).policy
    except (PlanError, UnknownNameError):
        return Policy()


def _is_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error))
