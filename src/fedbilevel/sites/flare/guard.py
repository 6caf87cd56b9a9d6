"""A guard for the FLARE processes of a kit. Without it, FLARE's own commands would let any
participant run a shell at a site.

`Guard` is a component of `local/resources.json`. FLARE builds it in every process of a kit (the
parent of a server or site, and the processes of their jobs) before that process opens a connection.
After that, a message passes only if all of these conditions hold:
- Its sender matches the certificate of its connection, which the server checks.
- It does not go from one site to another.
- Its channel and topic are needed in a run, and a run sends them from such a process.

`Validator` checks a job's configuration before FLARE uses it. The configuration must be the one
that `jobs.job_folder` writes, with a plan that a lead has signed. For these checks a site trusts
neither its server nor other sites.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

from nvflare.apis.app_validation import AppValidator
from nvflare.apis.fl_component import FLComponent
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, MessagePropKey, MessageType, ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.stream_const import STREAM_CHANNEL, STREAM_DATA_TOPIC, StreamHeaderKey
from nvflare.private.defs import RequestHeader

from fedbilevel.errors import FedBilevelError
from fedbilevel.escapes import printable
from fedbilevel.sites.flare.configuration import configurations, lead_of, unpacked
from fedbilevel.sites.tally import Tally, is_due

SERVER = "server"
REFUSED = "refused.jsonl"  # in a kit: refused messages, for its operator
_MOST = 1000  # kinds of refused messages that are counted separately
_ADMIN = {  # commands of the server to a site's parent process
    "train.deploy", "train.start_job", "train.abort", "train.check_status",
    "scheduler.check_resource", "scheduler.allocate_resource", "scheduler.cancel_resource",
}  # fmt: skip
_TASKS = {"get_task", "submit_update"}  # requests of a site's job to the server's job
_FROM_JOB = "train.notify_job_status"  # message of a job's process to its parent
_SIGNATURES = {".__nvfl_sig.json", ".__nvfl_submitter.crt"}  # FLARE adds these when a lead submits
_JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
log = logging.getLogger(__name__)


class Guard(FLComponent):  # type: ignore[misc]
    """Filters the messages of every FLARE cell (a message endpoint) that this process creates from
    now on."""

    def __init__(self) -> None:
        super().__init__()
        if not hasattr(CoreCell, "unguarded"):
            CoreCell.unguarded = made = CoreCell.__init__

            def guarded(cell: Any, *arguments: Any, **more: Any) -> None:
                made(cell, *arguments, **more)
                filters = CellFilters(cell)
                cell.add_incoming_filter("*", "*", filters.passing)
                # streams have a filter of their own, because FLARE asks only the closest match
                for channel, topic in (("*", "*"), (STREAM_CHANNEL, STREAM_DATA_TOPIC)):
                    cell.add_incoming_request_filter(channel, topic, filters.arriving)

            CoreCell.__init__ = guarded


class CellFilters:
    """The filters of one FLARE cell. `me` is the name of the cell: `north`, or `north.JOB` for the
    process of a job."""

    def __init__(self, cell: Any) -> None:
        self.me: str = cell.my_info.fqcn
        self._refused: Tally[tuple[str, ...]] = Tally(_MOST, ("others",))

    def passing(self, message: Message) -> Message | None:
        """Check every message that this cell receives, for itself or to forward. Return None if the
        message may pass, otherwise the refusal."""
        origin, destination = (
            str(message.get_header(key, "")) for key in (MessageHeaderKey.ORIGIN, MessageHeaderKey.DESTINATION)
        )
        shown = message.get_prop(MessagePropKey.COMMON_NAME)  # name in the certificate; None within a kit
        reason = why_not_forwarded(self.me, origin, destination, shown)
        if not reason and destination == self.me and message.get_header(MessageHeaderKey.MSG_TYPE) == MessageType.REQ:
            channel, topic, streamed = _meant(message)
            reason = why_not_accepted(self.me, origin, channel, topic, streamed=streamed)
        known = shown if self.me == SERVER and shown else origin  # at the server, the certificate is the sender's
        return self._answer(message, reason, known)

    def arriving(self, message: Message) -> Message | None:
        """Check every request for this cell, including each of several requests in one message.
        Return None if the request may pass, otherwise the refusal."""
        origin, (channel, topic, streamed) = str(message.get_header(MessageHeaderKey.ORIGIN, "")), _meant(message)
        if channel != CellChannel.CLIENT_MAIN or streamed:
            return self._answer(message, why_not_accepted(self.me, origin, channel, topic, streamed=streamed))
        command, job = getattr(message.payload, "topic", ""), ""
        if command:
            job = str(message.payload.get_header(RequestHeader.JOB_ID, ""))
        return self._answer(message, why_not_commanded(self.me, origin, str(command), job))

    def _answer(self, message: Message, reason: str, sender: str = "") -> Message | None:
        """Return a refusal with this reason, or None if the reason is empty.

        sender: the sender's name, if it is known more reliably than from the message.
        """
        if not reason:
            return None
        keys = (MessageHeaderKey.ORIGIN, MessageHeaderKey.DESTINATION, MessageHeaderKey.CHANNEL, MessageHeaderKey.TOPIC)
        facts = [str(message.get_header(key, "")) for key in keys]
        self._note([sender or facts[0], *facts[1:]], reason)
        if message.get_header(MessageHeaderKey.MSG_TYPE) != MessageType.REQ:
            message.set_header(MessageHeaderKey.DESTINATION, "")  # a reply that no process waits for
        return make_reply(ReturnCode.UNAUTHENTICATED, reason)

    def _note(self, facts: list[str], reason: str) -> None:
        key, times = self._refused.add(tuple(printable(fact)[:80] for fact in facts))
        if is_due(times):
            log.warning("refused %s (%d times): %s", " ".join(key), times, reason)
            line = {"time": round(time.time(), 3), "cell": self.me, "message": key, "times": times, "why": reason}
            with contextlib.suppress(OSError), open(REFUSED, "a") as file:
                file.write(json.dumps(line) + "\n")


def refused_by(kit: Path) -> dict[str, int]:
    """Count the messages that the processes of a kit have refused, by sender."""
    found: Counter[str] = Counter()
    times: dict[tuple[str, ...], int] = {}
    try:
        text = (kit / REFUSED).read_text()
    except OSError:
        return {}
    for line in text.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
            one = json.loads(line)
            key = (one["cell"], *one["message"])
            found[key[1].split(".")[0]] += one["times"] - (times.get(key, 0) if one["times"] > times.get(key, 0) else 0)
            times[key] = one["times"]
    return dict(found)


def why_not_forwarded(me: str, origin: str, destination: str, shown: str | None) -> str:
    """Return the reason why a message may not pass, or an empty text if it may."""
    sender, receiver = origin.split(".")[0], destination.split(".")[0]
    if shown is not None and me == SERVER and "@" not in shown and sender != shown:
        return f"it comes from {printable(shown)}, and says that it comes from {printable(sender)}"
    if shown is not None and me == SERVER and "@" in shown and (sender == SERVER or receiver != SERVER):
        return "a lead speaks for itself, and to the server only"
    if SERVER not in (sender, receiver) and sender != receiver:
        return "sites do not send messages to each other"
    return ""


def why_not_commanded(me: str, origin: str, command: str, job: str) -> str:
    """Return the reason why a site's parent process refuses a command, or an empty text if it
    obeys.

    job: id of a job, which FLARE uses as the name of a folder.
    """
    if origin.split(".")[0] == me and command == _FROM_JOB:
        return ""
    if origin != SERVER:
        return "a site takes commands from its server only"
    if command not in _ADMIN:
        return f"a site's process takes no command {printable(command)[:80]}"
    if job and not _JOB.fullmatch(job):
        return f"{printable(job)[:80]} is not the number of a job"
    return ""


def _meant(message: Message) -> tuple[str, str, bool]:
    """Return the channel and topic of a request, and whether it is a stream. A stream has a channel
    of its own and carries the actual channel and topic in other headers."""
    inner = message.get_header(StreamHeaderKey.CHANNEL)
    keys = (
        (StreamHeaderKey.CHANNEL, StreamHeaderKey.TOPIC)
        if inner
        else (MessageHeaderKey.CHANNEL, MessageHeaderKey.TOPIC)
    )
    channel, topic = (str(message.get_header(key, "")) for key in keys)
    return channel, topic, bool(inner)


def why_not_accepted(me: str, origin: str, channel: str, topic: str = "", *, streamed: bool = False) -> str:
    """Return the reason why a request is refused, or an empty text if it is accepted."""
    if streamed and channel == CellChannel.CLIENT_MAIN:
        return "commands to a site do not come as streams"
    home, sender = me.split(".")[0], origin.split(".")[0]
    if channel == CellChannel.SERVER_COMMAND and topic in _TASKS:
        return ""
    if (
        channel in (CellChannel.CLIENT_COMMAND, CellChannel.SERVER_COMMAND, CellChannel.SERVER_PARENT_LISTENER)
        and sender != home
    ):
        return "commands of a job come from its own parent process"
    if channel == CellChannel.HCI and me != SERVER:
        return "only the server is administered"
    if channel in _NEVER:
        return "no run needs this"
    if home != SERVER and sender not in (home, SERVER):
        return "a site answers its server only"
    return ""


_NEVER = {
    CellChannel.CLIENT_SUB_WORKER_COMMAND,
    CellChannel.MULTI_PROCESS_EXECUTOR,
    CellChannel.SIMULATOR_RUNNER,
    CellChannel.EDGE_REQUEST,
    "_net_manager",
}


class Validator(AppValidator):  # type: ignore[misc]
    """Admits a job's configuration only in the form that `jobs.job_folder` writes. FLARE calls the
    validator before it deploys a job."""

    def validate(self, app_folder: str) -> tuple[str, dict[str, Any]]:
        try:
            reason = why_not_deployed(Path(app_folder), Path.cwd())
        except (OSError, ValueError, KeyError, TypeError, IndexError, FedBilevelError) as error:
            reason = f"it cannot be read ({type(error).__name__})"
        if reason:
            log.warning("refused a job: %s", reason)
            return f"this kit runs the jobs of `fedbilevel federation submit` only: {reason}", {}
        return "", {}


def why_not_deployed(app: Path, kit: Path) -> str:
    parts = {"config_fed_server.json": "at_server", "config_fed_client.json": "at_site"}
    files = sorted(
        str(path.relative_to(app)) for path in app.rglob("*") if path.is_file() and path.name not in _SIGNATURES
    )
    name = files[0].removeprefix("config/") if len(files) == 1 else ""
    if name not in parts:
        return f"it holds {', '.join(map(printable, files))[:200] or 'nothing'}"
    content = json.loads((app / "config" / name).read_text())
    [component] = content["components"]
    plan = unpacked(component["args"]["plan"])
    wanted = configurations(plan, component["args"]["seal"], server=component["path"], client=component["path"])
    if content != wanted[f"{parts[name]}/config/{name}"]:
        return "its configuration is another one"
    allowed = json.loads((kit / "local" / "resources.json").read_text())["class_allow_list"]
    if not any(
        component["path"] == one or (one.endswith(".") and component["path"].startswith(one)) for one in allowed
    ):
        return f"it names {printable(str(component['path']))[:100]}"
    lead_of(kit, component["args"]["plan"], component["args"]["seal"])
    return ""
