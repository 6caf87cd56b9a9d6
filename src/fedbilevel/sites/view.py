"""The state of a site, read from its folder, for its operator's terminal and page.

`look` reads small files only. A damaged file raises nothing: `View.problems` names it. `Follower`
turns successive views into one line per change.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedbilevel.errors import PlanError
from fedbilevel.escapes import printable
from fedbilevel.sites import chain, operator
from fedbilevel.sites.status import STATUS
from fedbilevel.sites.summary import count, is_count

TAIL = 2**16  # bytes at the end of the log that are searched for refusals
REFUSALS = 5  # that a view holds
OVER = ("finished", "left", "interrupted")  # states of a run that has ended for this site


@dataclass(frozen=True)
class View:
    """The state of a site at one time.

    status: the status that the site's job wrote, or {} before the first job.
    job_alive: whether the process of that job exists.
    running: whether the site's parent process runs, or None if unknown.
    connected: whether that process is connected to the server, or None if unknown.
    head: totals of the audit log.
    refusals: the last refusals, oldest first, with time, text and, if known, caller.
    """

    name: str
    folder: Path
    time: float
    status: dict[str, Any] = field(default_factory=dict)
    job_alive: bool = False
    pid: int | None = None
    running: bool | None = None
    server: str = ""
    connected: bool | None = None
    paused: bool = False
    requests: list[dict[str, Any]] = field(default_factory=list)
    head: chain.Head = field(default_factory=chain.Head)
    refusals: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def pending(self) -> list[dict[str, Any]]:
        return [one for one in self.requests if one["decision"] is None]

    @property
    def run(self) -> str:
        return str(self.status.get("run") or "")

    @property
    def state(self) -> str:
        """State that the job wrote, with two exceptions: `idle` within a run is "waiting for the
        server", and a job that ended without writing its end is "interrupted"."""
        state = str(self.status.get("state") or "idle")
        if not self.run or state in OVER:
            return state
        if not self.job_alive:
            return "interrupted"
        return "waiting for the server" if state == "idle" else state

    @property
    def is_at_work(self) -> bool:
        return bool(self.run) and self.state not in OVER

    @property
    def iterations(self) -> tuple[int | None, int]:
        """Current outer iteration, or None if the last message concerned none, and the number of
        outer iterations, or 0 if unknown."""
        iteration = self.status.get("iteration")
        return iteration if type(iteration) is int else None, count(self.status, "num_iterations")

    def asdict(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder), "state": self.state}


def look(folder: Path, processes: Mapping[int, str] | None = None) -> View:
    """Read the state of a site.

    processes: processes of the site's kit by process id, from `flare.processes.running`, or None if
        unknown.
    """
    problems: list[str] = []

    def read(what: Any, *given: Any, default: Any) -> Any:
        try:
            return what(*given)
        except (OSError, PlanError) as error:
            problems.append(str(error))
            return default

    status = _status(folder, problems)
    pid = status.get("pid")
    alive = type(pid) is int and (pid in processes if processes is not None else _is_there(pid))
    parents = [found for found, kind in processes.items() if kind == "parent"] if processes is not None else []
    server = _server(folder.parent)
    return View(
        name=_name(folder.parent),
        folder=folder,
        time=time.time(),
        status=status,
        job_alive=alive,
        pid=parents[0] if parents else None,
        running=bool(parents) if processes is not None else None,
        server=server,
        connected=_is_connected(parents[0], server) if parents else False if processes is not None else None,
        paused=read(operator.is_paused, folder, default=True),
        requests=read(operator.requests, folder, default=[]),
        head=chain.read_head(folder) or chain.Head(),
        refusals=read(_refusals, folder, default=[]),
        problems=problems,
    )


def _is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _status(folder: Path, problems: list[str]) -> dict[str, Any]:
    """Read the status without invalid parts, and name these parts in `problems`."""
    try:
        content = json.loads((folder / STATUS).read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it holds no table")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{folder / STATUS} cannot be read ({error}).")
        return {}
    odd = [name for name, is_right in _KINDS.items() if content.get(name) is not None and not is_right(content[name])]
    if odd:
        problems.append(f"{folder / STATUS} cannot be read in part: {', '.join(odd)} is not as this site writes it.")
    return {name: value for name, value in content.items() if name not in odd}


def is_number(value: Any) -> bool:
    """Check whether a value is a float, finite or not, or an integer that fits one."""
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_error(value: Any) -> bool:
    return isinstance(value, dict) and is_number(value.get("time")) and _is_text(value.get("text"))


_COUNTS = ("iteration", "num_iterations", "answers", "bytes", "rounds_run", "rounds_total", "max_rounds", "pid")
_KINDS: dict[str, Callable[[Any], bool]] = {
    "time": is_number,
    **dict.fromkeys(_COUNTS, is_count),
    **dict.fromkeys(("epsilon", "max_epsilon"), is_number),
    **dict.fromkeys(("job", "run", "digest", "state", "phase", "summary"), _is_text),
    "norms": lambda value: isinstance(value, dict) and all(one is None or is_number(one) for one in value.values()),
    "last_error": _is_error,
}


def _kit_settings(kit: Path) -> dict[str, Any]:
    try:
        content = json.loads((kit / "startup" / "fed_client.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _name(kit: Path) -> str:
    """Return the name by which the federation knows the site."""
    return str(_kit_settings(kit).get("client", {}).get("fqsn") or kit.resolve().name)


def _server(kit: Path) -> str:
    """Return the server's address as host:port."""
    servers = _kit_settings(kit).get("servers") or [{}]
    return str(servers[0].get("service", {}).get("target", ""))


def _is_connected(pid: int, server: str) -> bool | None:
    """Check whether the process holds an open TCP connection to the server's port, or return None
    if unknown. The connection to a server that hangs still counts."""
    port = server.rpartition(":")[2]
    if not port.isdigit():
        return None
    try:
        own = _sockets(Path(f"/proc/{pid}/fd"))
        tables = [path.read_text() for path in Path(f"/proc/{pid}/net").glob("tcp*")]  # tcp6 where IPv6 is on
    except OSError:  # not Linux, another user's process, or it has ended
        return None
    rows = [row.split() for table in tables for row in table.splitlines()[1:]]
    return any(row[2].endswith(f":{int(port):04X}") and row[3] == "01" and row[9] in own for row in rows)


def _sockets(files: Path) -> set[str]:
    """Return the inodes of a process's sockets."""
    found = set()
    for file in files.iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if link := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(file)):
                found.add(link[1])
    return found


def _refusals(folder: Path) -> list[dict[str, Any]]:
    """Return the last refusals in the active file of the audit log."""
    path = folder / chain.LEFT
    if not path.exists():
        return []
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        found = [line for raw in file.read().split(b"\n") if (line := chain.parsed(raw)) is not None]
    return [line for line in found if line.get("kind") == "error"][-REFUSALS:]


class Follower:
    """Reports one line per change for the output of `start-site`, and escapes control characters in
    foreign text."""

    def __init__(self, kit: Path) -> None:
        self.kit = kit
        self._before: View | None = None
        self._begun: tuple[Any, ...] = ()
        self._ended: tuple[Any, ...] = ()
        self._iteration: int | None = None

    def lines(self, now: View) -> list[str]:
        """Return lines about the changes since the last view, or about the waiting plans for the
        first view."""
        before, self._before = self._before, now
        said = self._of_requests(before, now)
        if before is None:
            self._of_run(now)
        else:
            said += [*_of_pause(before, now), *self._of_run(now), *_of_refusals(before, now)]
        return [printable(line) for line in said]

    def _of_requests(self, before: View | None, now: View) -> list[str]:
        known = {one["digest"]: one["decision"] for one in before.requests} if before is not None else {}
        said = []
        for one in now.requests:
            run, digest, decision = one["run"], one["digest"], one["decision"]
            if decision is None and digest not in known:
                how = f"fedbilevel federation approve {digest[: operator.SHOWN]} --kit {self.kit}"
                said.append(f"{run}, sent by {one['who']}, waits for your approval: {how}")
            elif before is not None and decision is not None and known.get(digest) != decision:
                by = "auto_approve of this site's settings" if one["how"] == "auto" else one["by"]
                said.append(f"{run}: {decision} by {by}")
        return said

    def _of_run(self, now: View) -> list[str]:
        said, job = [], (now.status.get("job"), now.status.get("pid"), now.run)
        iteration, num_iterations = now.iterations
        self._iteration = iteration if iteration is not None or self._begun != job else self._iteration
        if self._begun != job and now.run and (now.state in ("computing", "waiting for the server", "finished")):
            self._begun = job
            said.append(f"{now.run}: {_beginning(now)}")
        if self._begun == job and now.state in OVER and self._ended != (job, now.state):
            self._ended = (job, now.state)
            paid = f"{plural(count(now.status, 'answers'), 'answer')}, {megabytes(count(now.status, 'bytes'))}"
            where = f" at outer iteration {self._iteration} of {num_iterations}" if self._iteration is not None else ""
            how = f"ended{where}, not finished (stopped, or a fault)," if now.state == "interrupted" else now.state
            said.append(f"{now.run}: {how} after {paid}")
            if now.state == "finished" and (summary := now.status.get("summary")):
                said.append(f"{now.run}: {summary}")
        return said


def _beginning(now: View) -> str:
    who = next((one["who"] for one in now.requests if one["digest"] == now.status.get("digest")), None)
    by = f", submitted by {who}" if who else ""
    iteration, num_iterations = now.iterations
    if (iteration or 0) <= 1 and (iteration is not None or not count(now.status, "rounds_run")):
        return f"begins{by}, {num_iterations} outer iterations"
    return f"resumes{f' with outer iteration {iteration} of {num_iterations}' if iteration is not None else ''}{by}"


def _of_pause(before: View, now: View) -> list[str]:
    if before.paused == now.paused:
        return []
    return [
        "paused: this site answers nothing until `federation unpause`" if now.paused else "answers again after a pause"
    ]


def _of_refusals(before: View, now: View) -> list[str]:
    last = max((count(one, "n") for one in before.refusals), default=0)
    new = [one for one in now.refusals if count(one, "n") > last]
    said = [refusal(one) for one in new[-1:]]
    return said if len(new) < 2 else [f"{said[0]} (and {len(new) - 1} more before it)"]


def refusal(line: Mapping[str, Any]) -> str:
    caller, run = line.get("caller"), line.get("run")
    times = count(line, "times")
    who = f"{caller} was refused{f' {times} times' if times > 1 else ''}" if caller else "refused"
    return f"{f'{run}: ' if run else ''}{who}: {line.get('text', '')}"


def plural(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def megabytes(number: int) -> str:
    return f"{number / 1e6:.1f} MB" if number >= 50_000 else f"{number / 1e3:.1f} kB"
