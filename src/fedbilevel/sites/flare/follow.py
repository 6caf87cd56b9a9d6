"""Following a run from the lead: a state machine that waits for sites, starts jobs, and watches
them until the run ends."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from nvflare.fuel.flare_api.flare_api import Session
from nvflare.fuel.hci.proto import MetaStatusValue

from fedbilevel.errors import FedBilevelError
from fedbilevel.escapes import printable
from fedbilevel.sites.flare.configuration import CLIENT, SERVER
from fedbilevel.sites.flare.connection import Link, session
from fedbilevel.sites.flare.job import STOP
from fedbilevel.sites.flare.jobs import RunEntry, active_job, progress_of, sites_needed, submit_job
from fedbilevel.sites.flare.production import MAX_JOBS

REJOIN = "rejoin"  # why a job is asked to stop: another job with more sites follows
APART = 30.0  # seconds between two jobs for the sake of left-out sites; doubled each time
GRACE = 15.0  # seconds for which a job may be listed as running without a process: while it starts and ends
START_TIMEOUT = 600.0  # seconds in which a run has to begin while the server answers
FRUITLESS = 3  # give up after so many jobs in a row without one outer iteration


def watch(kit: Path, plan: dict[str, Any], say: Callable[[dict[str, Any]], None], **options: Any) -> str:
    """Follow a run to its end. Return `finished`, or `stopped` if a stop was requested."""
    return Follow(kit, plan, say, **options).run()


def resume(kit: Path, run: str, say: Callable[[dict[str, Any]], None], **options: Any) -> str:
    """Follow a run that is running, or resume a run that was stopped or interrupted."""
    entry = RunEntry(kit, run).read()
    with session(kit) as opened:
        while True:
            job, progress = active_job(opened, kit, run), progress_of(opened, run)
            if (
                progress.get("outcome") == "finished"
                and progress.get("job") in entry["jobs"]
                and not progress.get("warning")
            ):
                if progress.get("result"):
                    options.get("notice", lambda _: None)(progress["result"])
                return "finished"
            if progress.get("warning"):
                break
            if job is None or progress.get("job") != job or progress.get("outcome") == "running":
                break
            time.sleep(0.5)  # it was stopped a moment ago, and its processes are ending
    return watch(kit, entry["plan"], say, job=job, server=entry["server"], client=entry["client"], **options)


class Follow:
    """Follows a run through as many jobs as the run needs. Each `step` either waits for sites or
    checks the current job, once.

    Another job resumes the run after a job that failed, that ended with its server, or that left
    out a site of the plan.

    say: function that receives every line of progress.
    notice: function that receives a sentence for every fault.
    gather: seconds after which a connected quorum does not wait for more sites.
    start_timeout: seconds in which a job must start while the server could start one; after that
        the run is given up.
    """

    def __init__(
        self, kit: Path, plan: dict[str, Any], say: Callable[[dict[str, Any]], None], *, job: str | None = None,
        notice: Callable[[str], None] = lambda _: None, max_restarts: int = 20, start_timeout: float = START_TIMEOUT,
        poll: float = 0.5, check_every: float = 3.0, gather: float = 10.0, server: str = SERVER, client: str = CLIENT,
    ) -> None:  # fmt: skip
        self._kit, self._plan, self._say, self._notice = kit, plan, say, notice
        self._max_restarts, self._poll, self._check_every, self._gather = max_restarts, poll, check_every, gather
        self._classes = {"server": server, "client": client}
        self._link, self._entry = Link(kit, notice), RunEntry(kit, plan["name"])
        self.current = None if job is None else Current(job)
        self._restarts, self._fruitless = 0, 0
        self._told = ""  # why the run waits, as last reported
        self._quiet_until, self._apart = 0.0, APART  # between two jobs for the sake of left-out sites
        self._enough_since: float | None = None  # when a quorum was connected while there is no job
        self._has_named_missing = False
        self._start_timeout = start_timeout
        self._idle_since: float | None = time.monotonic()  # None once the run has begun

    def run(self) -> str:
        self._entry.write(plan=self._plan, **self._classes, outcome="running", stop=False)
        try:
            while True:
                outcome = self.step()
                if outcome is not None:
                    self._entry.write(outcome=outcome)
                    return outcome
        finally:
            self.close()

    def close(self) -> None:
        self._link.close()

    def step(self) -> str | None:
        """Wait or check once. Return the outcome of the run, or None while the run continues."""
        return self._begin() if self.current is None else self._look(self.current)

    # ---- without a job ------------------------------------------------------------------------------------------

    def _begin(self) -> str | None:
        """Start the next job when all sites are connected, or when a quorum has been connected for
        a while. A run that has not begun needs all sites. If another follower has started a job,
        follow that job instead."""
        if self._entry.read().get("stop"):
            return "stopped"
        connected = self._link.ask(_connected, self._plan)
        needed = sites_needed(self._kit, self._plan)
        if connected is None:
            self._excuse()
        elif len(connected) < needed:
            self._wait_for([site for site in self._plan["sites"] if site not in connected], needed)
        else:
            self._enough_since = self._enough_since or time.monotonic()
            if len(connected) == len(self._plan["sites"]) or time.monotonic() - self._enough_since > self._gather:
                job = self._link.ask(active_job, self._kit, self._plan["name"])
                job = job or self._link.ask(submit_job, self._kit, self._plan, *self._classes.values())
                if job is not None:
                    self.current, self._enough_since, self._has_named_missing = Current(job), None, False
                    return None
        time.sleep(self._poll)
        return None

    def _wait_for(self, missing: list[str], needed: int) -> None:
        self._enough_since = None
        names = ", ".join(missing)
        if not self._has_named_missing:
            verb = "is" if len(missing) == 1 else "are"
            self._notice(f"waiting for sites: {needed} are needed, {names} {verb} not connected.")
        self._has_named_missing = True
        if self._is_late():
            there = "start it there, or leave it" if len(missing) == 1 else "start them there, or leave them"
            self._give_up(f"{names} did not connect within {self._start_timeout:.0f} s: {there} out of `sites`.")

    # ---- with a job ---------------------------------------------------------------------------------------------

    def _look(self, now: Current) -> str | None:
        look = self._link.ask(Look.at, self._plan, now.job)
        if look is None:
            self._excuse()
            time.sleep(self._poll)
            return None
        self._tell(look, now)
        outcome = self._outcome(look)
        if outcome is not None:
            return outcome
        if self._is_over(look, now):
            self._count(look, now)
            self.current = None
            return None
        self._check_start(look, now)
        self._take_in(look, now)
        time.sleep(self._poll)
        return None

    def _tell(self, look: Look, now: Current) -> None:
        """Report new progress, and the reason if the run waits."""
        if look.progress:  # the server's part has started; it may wait for an operator's approval now
            self._idle_since = None
        fresh = look.progress.get("count", 0) - now.seen
        if fresh > 0 and now.seen == 0:
            self._entry.write(begun=True)
        for progress in look.progress.get("latest", [])[-fresh:] if fresh > 0 else []:
            self._say(progress)
        now.seen += max(fresh, 0)
        waiting = look.progress.get("waiting", "")
        if waiting and waiting != self._told:
            self._notice(waiting)
        self._told = waiting

    def _outcome(self, look: Look) -> str | None:
        outcome, why = look.progress.get("outcome", "running"), look.progress.get("why", "")
        if outcome == "failed":
            self._give_up(why, "failed")
        if outcome == "finished" or (outcome == "stopped" and why != REJOIN):
            for told in ("result", "warning"):
                if look.progress.get(told):
                    self._notice(look.progress[told])
            return str(outcome)
        if look.status == "FINISHED:ABORTED":
            self._notice("the job was ended through FLARE itself.")
            return "stopped"
        return None

    def _is_over(self, look: Look, now: Current) -> bool:
        """Check whether the job has ended, so that another job must follow."""
        now.server = now.server or look.server
        is_lost = not look.alive and look.status == "RUNNING"
        now.lost_since = (now.lost_since or time.monotonic()) if is_lost else None
        died = now.lost_since is not None and (look.server != now.server or time.monotonic() - now.lost_since > GRACE)
        # FLARE keeps waiting for restarted sites that know nothing of the job
        is_left = look.progress.get("outcome") == "stopped" and not look.alive
        return look.status.startswith("FINISHED") or died or is_left

    def _count(self, look: Look, now: Current) -> None:
        """Count a job that ended. Give up after too many jobs, or after several in a row without
        one outer iteration."""
        self._restarts, self._fruitless = self._restarts + 1, 0 if now.seen else self._fruitless + 1
        if look.progress.get("outcome") == "stopped":
            return
        fault, is_fruitless = _fault(self._link, look, now.job), self._fruitless >= FRUITLESS
        if self._restarts > self._max_restarts or is_fruitless:
            times = (
                f"{self._fruitless} times without one outer iteration" if is_fruitless else f"{self._restarts} times"
            )
            self._give_up(f"the run {self._plan['name']!r} was given up after it had been started {times}: {fault}.")
        self._notice(f"{fault}; starting another job.")

    def _check_start(self, look: Look, now: Current) -> None:
        """Give up if the job does not start in time."""
        if look.is_queued:
            self._excuse()
        elif self._is_late():
            idle = self._link.ask(_left_out, look, now.job, quietly=True) or []
            self._link.ask(lambda opened: opened.abort_job(now.job), quietly=True)
            where = f"{', '.join(idle)} started no process for it" if idle else "a process for it does not answer"
            late = f"the run {self._plan['name']!r} did not start within {self._start_timeout:.0f} s ({where})"
            self._give_up(f"{late}: see log.txt in the kits there, or leave a site out of `sites`.")

    def _take_in(self, look: Look, now: Current) -> None:
        """Ask the job to stop if a connected site is not part of it, so that another job with all
        sites follows."""
        is_running = look.progress.get("outcome", "running") == "running" and look.progress
        if not is_running or time.monotonic() - now.checked <= self._check_every:
            return
        now.checked = time.monotonic()
        found = self._link.ask(_left_out, look, now.job, quietly=True) or []
        back = [
            site for site in found if site in now.suspects
        ]  # seen twice, because a job process may be starting or ending
        now.suspects = found
        if back and not now.is_rejoining and time.monotonic() > self._quiet_until:
            self._quiet_until, self._apart = time.monotonic() + self._apart, 2 * self._apart
            follows = "another job with all follows after this outer iteration"
            self._notice(f"{', '.join(back)} is connected but not part of the job; {follows}.")
            answer = self._link.ask(Session.do_app_command, now.job, STOP, {"why": REJOIN}, quietly=True)
            now.is_rejoining = answer is not None

    # ---- the time for the start -----------------------------------------------------------------------------------

    def _excuse(self) -> None:
        """Restart the clock for the start of the run, because the server is unreachable or busy
        with other runs."""
        if self._idle_since is not None:
            self._idle_since = time.monotonic()

    def _is_late(self) -> bool:
        return self._idle_since is not None and time.monotonic() - self._idle_since > self._start_timeout

    def _give_up(self, why: str, outcome: str = "interrupted") -> NoReturn:
        self._entry.write(outcome=outcome)
        raise FedBilevelError(printable(why))


@dataclass
class Current:
    """The job that is followed, and observations about it."""

    job: str
    seen: int = 0  # lines of progress that were passed on
    checked: float = field(default_factory=time.monotonic)  # when left-out sites were last looked for
    suspects: list[str] = field(default_factory=list)  # sites that seemed left out then
    is_rejoining: bool = False  # it was asked to stop; a job with all sites follows
    lost_since: float | None = None  # listed as running, without a process
    server: str = ""  # when the server that works on it was started


class Look(NamedTuple):
    """The state of a job, as the server reports it."""

    status: str  # as FLARE lists it
    alive: bool  # whether the server has a process for it
    connected: list[str]  # sites of the plan that send heart-beats
    progress: dict[str, Any]  # of this job
    server: str  # the time at which the server was started
    is_queued: bool  # behind other jobs

    @classmethod
    def at(cls, opened: Session, plan: dict[str, Any], job: str) -> Look:
        info, progress = opened.get_system_info(), progress_of(opened, plan["name"])
        names = {client.name for client in info.client_info}
        status, running = str(opened.get_job_status(job)), {one.job_id for one in info.job_info}
        return cls(
            status,
            job in running,
            [site for site in plan["sites"] if site in names],
            progress if progress.get("job") == job else {},
            str(info.server_info.start_time),
            status == "SUBMITTED" and len(running) >= MAX_JOBS,
        )


def _left_out(opened: Session, look: Look, job: str) -> list[str]:
    """List connected sites of the plan that do not work on the job, because they restarted or
    connected too late for its start."""
    if not look.connected:
        return []
    replies = opened.get_client_job_status(look.connected) or []
    answered = {
        str(reply.get("client_name"))
        for reply in replies
        if "job_id" in reply or reply.get("status") == MetaStatusValue.NO_JOBS
    }
    working = {str(reply.get("client_name")) for reply in replies if reply.get("job_id") == job}
    return [site for site in look.connected if site in answered - working]


def _connected(opened: Session, plan: dict[str, Any]) -> list[str]:
    return [one.name for one in opened.get_connected_client_list() if one.name in plan["sites"]]


def _fault(link: Link, look: Look, job: str) -> str:
    """Describe why a job ended, and name the site at fault if the server knows it."""
    if not look.status.startswith("FINISHED"):
        return "the server was started anew and the job went down with it"
    if look.progress.get("outcome") == "interrupted":
        return str(look.progress["why"])
    log = link.ask(Session.grep_target, "server", "", job, "log.txt") or ""
    meta = link.ask(Session.get_job_meta, job) or {}
    blamed = {f"{site}: {why.strip()}" for site, why in re.findall(r"due to reported failure from (\S+): (.*)", log)}
    refused = {str(detail) for detail in meta.get("job_deploy_detail") or [] if "ERROR" in str(detail)}
    return f"the job ended with {look.status}" + (
        f" ({'; '.join(sorted(blamed | refused))}; the job's log there says more)" if blamed or refused else ""
    )
