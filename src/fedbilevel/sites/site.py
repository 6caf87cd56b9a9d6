"""A site: its own data, memory and disk. It answers messages about phases that its installed version knows.

Files in its folder:  site.toml              settings and policy, never sent
                      left.jsonl             audit log: one line for everything that left, see `audit`
                      requests, approvals    plans that were submitted, and what the operator decided, see `operator`
                      status.json            the site's state now, for `fedbilevel federation watch`
                      log.txt                errors in full
                      runs/NAME/version-K    memory and private values after outer iteration K, the last two
                      runs/NAME/order.json   the latest outer iteration, and how many were done again, see `order`
                      runs/NAME/solution     private parts of the solution

An answer carries the turn of its message. A message of an earlier turn than the last one answered is refused: the
server has given up on it, and carrying it out now would spoil what has been agreed since.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fedbilevel._version import __version__
from fedbilevel.errors import (
    AwaitingOperatorError,
    NonFiniteError,
    PlanError,
    PolicyError,
    SettingError,
    UnknownNameError,
    WireError,
)
from fedbilevel.escapes import printable
from fedbilevel.sites import operator, wire
from fedbilevel.sites.audit import AuditLog
from fedbilevel.sites.plan import Plan, plan_digest, plan_of
from fedbilevel.sites.policy import Policy, SiteSettings, read_settings
from fedbilevel.sites.preview import preview
from fedbilevel.sites.session import Session

LOG, STATUS = "log.txt", "status.json"
LONGEST = 500  # letters of a refusal: it may quote the message
SAYABLE = (WireError, PolicyError, NonFiniteError)  # errors whose texts hold nothing of this site but names and shapes
_LONGEST_LOG = 2**22  # bytes of log.txt before it is renamed to log-before.txt
_BETWEEN = 16  # messages between two looks at how full the disk is
_KNOWN = 1000  # refusals that are remembered, to write repeated ones down less often
PAUSED = "the site is paused: `fedbilevel federation unpause` there ends the pause."
_CALLERS = 50  # refused callers that are told apart
log = logging.getLogger(__name__)


class Submitted(NamedTuple):
    """The plan of the job that a site takes part in, as the job's signed configuration states it."""

    digest: str
    who: str  # the lead's name, from the certificate that signed the plan
    job: str = ""


class Site:
    """submitted: the only plan that this site answers to. None (trials in one process): any plan that is approved."""

    def __init__(self, name: str, folder: Path | str, submitted: Submitted | None = None) -> None:
        self.name, self.folder, self.submitted = name, Path(folder), submitted
        self.audit = AuditLog(self.folder)
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._digest = submitted.digest if submitted else ""
        self._run = ""  # of the plan
        self._turn: list[int] = []
        self._strangers: Counter[str] = Counter()  # refused callers that the server has not been told about
        self._refused: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._handled, self._full = 0, ""  # why nothing may be written, if so
        self._status = Status(self.folder / STATUS, job=submitted.job if submitted else "", digest=self._digest)

    def handle(self, message: bytes) -> bytes:
        """Answer always: with what was asked for, or with one sentence that says why not. Details of a failure, such
        as paths and values, stay in this site's own log."""
        if full := self._disk_full():
            return wire.pack({"error": full})
        try:
            header, arrays = wire.unpack(message)
            if header.get("kind") == "ping":  # answered while a phase is computed
                return wire.pack(self._availability())
            with self._lock:
                if self._session is not None:
                    self._session.ran = False
                try:
                    return self._answer(header, arrays)
                except Exception as error:  # noqa: BLE001 - a loss or a loader may raise anything; it is written down
                    return self._failed(error, ran=self._session is not None and self._session.ran)
        except Exception as error:  # noqa: BLE001 - nor may a message end the site's job
            return self._failed(error)

    def refuse_caller(self, caller: str, reason: str) -> str:
        """Write down a call of somebody else than the server of the run, and tell the server with the next answer."""
        caller = printable(caller)[:100]
        if caller not in self._refused and len(self._refused) >= _CALLERS:
            caller = "others"
        self._refused[caller] += 1
        self._strangers[caller] += 1
        many = self._refused[caller]
        if _is_power(many) and not self._full:  # 1, 2, 4, ...: repeated calls cannot fill the disk
            log.warning("refused call number %d of %s: %s", many, caller, reason)
            times = max(1, many // 2)  # since the line before
            with contextlib.suppress(OSError):
                line = {"run": None, "kind": "error", "caller": caller, "times": times, "text": reason}
                self.audit.append({**line, "bytes": 0, "arrays": []})
        return reason

    def note(self, text: str) -> None:
        """Write an error down for the people of this site."""
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

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _availability(self) -> dict[str, Any]:
        """Say whether the site would answer now, and otherwise whether the operator keeps it from answering."""
        if operator.is_paused(self.folder):
            return {"busy": True, "wait": PAUSED}
        busy = self._lock.locked()
        if self._digest and not busy and self._decision() is None and not self._approves_itself():
            return {"busy": False, "wait": self._waiting()}
        return {"busy": busy}

    def _answer(self, header: Mapping[str, Any], arrays: list[Tensor]) -> bytes:
        kind, turn = header.get("kind"), header.get("turn")
        if not isinstance(turn, list) or len(turn) != 3 or not all(type(part) is int for part in turn):
            raise WireError(f"a message says that its turn is {turn!r:.40}, expected three whole numbers.")
        if turn <= self._turn:
            raise WireError(
                f"the message of turn {turn} came after that of turn {self._turn} was answered, so it is too late for it."
            )
        self._turn = turn
        self._check_unpaused()
        if kind == "join":
            before, self._session = self._session, None
            self._session = self._joined(before, header)
            return self._sent(self._session.introduce())
        session = self._session
        if session is None or session.plan.name != header.get("run"):
            raise WireError(
                f"this site takes no part in the run {header.get('run')!r:.80}: it must be asked to join first."
            )
        self._check_approved(session.plan.name)
        answers = {name: getattr(session, name) for name in ("phase", "measure", "commit", "load", "finish")}
        if kind not in answers:
            raise WireError(
                f"this site does not know what to do with a message of kind {kind!r:.40}; it has fedbilevel {__version__}."
            )
        self._status.write(state="computing", **session.named(header))
        content = answers[kind](header, arrays)
        return self._sent(content, state="finished" if kind == "finish" else "idle")

    def _sent(
        self, content: tuple[dict[str, Any], Mapping[str, list[Tensor]], dict[str, Any]], state: str = "idle"
    ) -> bytes:
        """Write down what leaves, then let it leave. Every answer but to a ping goes through here."""
        assert self._session is not None
        header, sent, when = content
        order = {name: len(arrays) for name, arrays in sent.items()}
        message = wire.pack(
            {**header, "order": order, **self._reported()}, [array for arrays in sent.values() for array in arrays]
        )
        self._session.policy.check_answer(len(message))
        self._check_unpaused()  # the operator may have decided while it was computed
        self._check_approved(self._session.plan.name)
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
        self._status.write(state=state, rounds_total=self.audit.rounds, rounds_run=self._session.rounds)
        return message

    def _failed(self, error: Exception, *, ran: bool = False) -> bytes:
        """ran: whether something was computed, which counts as a round."""
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
            many = self._refusals[reason]
            if not _is_power(many):
                return message
            times = max(1, many // 2)  # since the line before
            line |= {**({"times": times} if times > 1 else {}), "bytes": times * len(message)}
        try:
            self.audit.append({**line, "arrays": []})
        except OSError:
            return wire.pack({"error": "it cannot write down what leaves it, so nothing does."})
        return message

    def _disk_full(self) -> str:
        """Say why nothing may be written any more, logs included; then nothing leaves either. Looks now and then."""
        self._handled += 1
        if self._full or self._handled % _BETWEEN == 1:
            try:
                _policy(self.folder).check_disk(self.folder)
                self._full = ""
            except PolicyError as error:
                self._full = str(error)
            except OSError:  # a file that was removed meanwhile
                pass
        return self._full

    def _reported(self) -> dict[str, Any]:
        """Tell the server of the run, once, which callers were refused."""
        if not self._strangers:
            return {}
        told, self._strangers = dict(self._strangers), Counter()
        return {"strangers": told}

    def _check_unpaused(self) -> None:
        if operator.is_paused(self.folder):
            self._status.write(state="paused")
            raise AwaitingOperatorError(PAUSED)

    # ---- joining a run -----------------------------------------------------------------------------------------------

    def _joined(self, before: Session | None, header: Mapping[str, Any]) -> Session:
        """Admit a plan. The same session as before where it is the same run: data are read once."""
        if before is not None:
            before.leave()
        _check_version(header.get("version"))
        content = header.get("plan", {})
        settings = read_settings(self.folder)
        plan = self._admitted(content, settings)
        self._check_consent(content, plan, settings)
        if before is not None and (before.plan, before.settings) == (plan, settings):
            before.enter()
            session = before
        else:
            settings.policy.check_runs(self.folder / "runs", plan.name)
            session = Session(self.name, self.folder, settings, plan, self.audit)
        self._status.write(
            state="idle",
            run=plan.name,
            digest=self._digest,
            iteration=None,
            num_iterations=plan.num_iterations,
            phase=None,
            max_rounds=settings.policy.max_rounds,
            rounds_total=self.audit.rounds,
            last_error=None,
        )
        return session

    def _admitted(self, content: Any, settings: SiteSettings) -> Plan:
        """Check a plan against the submitted one and the site's policy, before any data are read."""
        digest = plan_digest(content) if isinstance(content, Mapping) else ""
        if self.submitted is not None and digest != self.submitted.digest:
            raise PolicyError(
                f"the message has the plan {digest[:12] or 'none'}, but the plan {self.submitted.digest[:12]} was submitted "
                "for this job: submit the plan that is to run."
            )
        try:
            plan = plan_of(content)
        except (PlanError, SettingError, UnknownNameError) as error:  # without the list of what is installed here
            raise WireError(str(error).partition(" Known:")[0]) from error
        if self.name not in plan.sites:
            raise PolicyError(f"this site is not among those of the plan ({', '.join(plan.sites)}): name it there.")
        settings.policy.check_plan(plan)
        settings.policy.check_disk(self.folder)
        self._digest = digest
        return plan

    def _check_consent(self, content: Mapping[str, Any], plan: Plan, settings: SiteSettings) -> None:
        """Ask the operator about a new plan. An approval by `auto_approve` counts only as long as that is set."""
        if not settings.auto_approve:
            operator.withdraw_automatic(self.folder)
        self._run = plan.name
        if self._decision() is None:
            auto = self._approves_itself()
            leaves = {} if auto else preview(plan, self.name, settings)
            who = self.submitted.who if self.submitted else "this process"
            operator.ask(self.folder, self._digest, who, plan.name, content, leaves)
            if auto:
                operator.approve(self.folder, self._digest, "auto_approve in site.toml", "auto")
        self._check_approved(plan.name)

    def _check_approved(self, run: str) -> None:
        decision = self._decision()
        if decision is None:
            self._status.write(state="waiting for approval", run=run, digest=self._digest)
            raise AwaitingOperatorError(self._waiting())
        if decision != "approved":
            self._status.write(state="left", run=run, digest=self._digest)
            said = "has left the run" if decision == "left" else "has refused the plan"
            raise PolicyError(
                f"its operator {said}: ask there for `fedbilevel federation approve {self._digest[:12]}`."
            )

    def _decision(self) -> str | None:
        return operator.decision(self.folder, self._digest)

    def _approves_itself(self) -> bool:
        """Whether plans of this run need no operator: never where one has refused a plan of the run, or has left it."""
        with contextlib.suppress(PlanError, UnknownNameError):
            said = {one["decision"] for one in operator.requests(self.folder) if one["run"] == self._run}
            return read_settings(self.folder).auto_approve and not said & {"refused", "left"}
        return False

    def _waiting(self) -> str:
        return f"the plan is not approved there yet: `fedbilevel federation approve {self._digest[:12]}`."


class Status:
    """The state of a site in a file, for its operator. It is written without waiting for the disk."""

    def __init__(self, path: Path, **facts: Any) -> None:
        self._path, self._lock = path, threading.Lock()
        self._facts: dict[str, Any] = {
            "state": "idle",
            "run": None,
            "iteration": None,
            "num_iterations": None,
            "phase": None,
            "answers": 0,
            "bytes": 0,
            "rounds_run": 0,
            "rounds_total": None,
            "max_rounds": None,
            "norms": {},
            "last_error": None,
            **facts,
            "started": time.time(),
            "pid": os.getpid(),
        }

    def answered(self, num_bytes: int, norms: Mapping[str, float]) -> None:
        self._facts["answers"] += 1
        self._facts["bytes"] += num_bytes
        self._facts["norms"] = {**self._facts["norms"], **norms}

    def failed(self, reason: str) -> None:
        self.write(last_error={"time": time.time(), "text": reason})

    def write(self, **facts: Any) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._facts |= facts
            beside = self._path.with_name(f"{self._path.name}.part")
            beside.write_text(json.dumps({"time": time.time(), **self._facts}, allow_nan=True))
            os.replace(beside, self._path)


def _check_version(version: Any) -> None:
    mine = __version__
    if version is not None and version != mine:
        raise WireError(
            f"this site has fedbilevel {mine}, the server {version!r:.20}: install the same version at both."
        )


def _is_power(number: int) -> bool:
    """1, 2, 4, ..."""
    return number & (number - 1) == 0


def _policy(folder: Path) -> Policy:
    """The default one where the file cannot be read, which joining a run says."""
    try:
        return read_settings(folder).policy
    except (PlanError, UnknownNameError):
        return Policy()


def _is_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error))
