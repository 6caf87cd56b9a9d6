"""The server's side of a run between sites: starting or resuming the run, and waiting if too few
sites answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbilevel.errors import FedBilevelError, PlanError, QuorumError, SuspendedError
from fedbilevel.runs.loop import run_between
from fedbilevel.runs.privacy_account import attach
from fedbilevel.runs.record import Record, shorten
from fedbilevel.runs.result import Progress
from fedbilevel.sites.answers import is_free
from fedbilevel.sites.cleaned import write_verdict
from fedbilevel.sites.engine import Sites
from fedbilevel.sites.joining import Weights, joined, waiting_sentence
from fedbilevel.sites.mailbox import Mailbox, SiteMessage
from fedbilevel.sites.plan import SitePlan, plan_of
from fedbilevel.sites.pulse import Pulse
from fedbilevel.sites.transport import SiteTransport

if TYPE_CHECKING:
    from fedbilevel.secure.messages import PartyOf

_BETWEEN = 1.0  # seconds between pings while too few sites answer
Say = Callable[[dict[str, Any]], None]


def serve(
    plan: Mapping[str, Any], transport: SiteTransport, folder: Path, say: Say, party_of: PartyOf | None = None
) -> str:
    """Run or resume the plan. Return "finished", or "stopped" if a stop was requested or the privacy
    budget is spent.

    folder: the folder of the run's record.
    party_of: reads a certificate of the federation, for secure sums.
    """
    ours, record = plan_of(plan), Record(folder)
    with Pulse() as pulse:
        waiting = _Waiting(ours, transport, record, say, pulse)
        there: Sequence[str] = [name for name in ours.sites if name in transport.sites]
        while True:
            try:
                return _attempt(ours, Mailbox(transport, ours.name, pulse.lost), there, record, say, party_of)
            except QuorumError as error:
                if transport.stop_asked():
                    return "stopped"
                say({"run": ours.name, "waiting": str(error)})
                there = waiting.until_enough(error)
                if transport.stop_asked():
                    return "stopped"


def _attempt(
    plan: SitePlan, mailbox: Mailbox, there: Sequence[str], record: Record, say: Say, party_of: PartyOf | None
) -> str:
    resume = record.checkpoint.exists()
    if resume and (before := record.read_config().get("plan", {}).get("sites")) != list(plan.sites):
        raise PlanError(
            f"the run {plan.name} began with the sites {', '.join(before)}: use another name for a run with others."
        )
    fed, weights = joined(plan, mailbox, there, everyone=not resume, party_of=party_of)
    if fed.account is not None:
        attach(fed.account, record.path)
    diary = _Diary(record.path / "sites.jsonl", plan, fed, mailbox, say)
    most = weights.most
    if resume:  # weights come with the checkpoint
        most = record.read_config().get("max_weight", most)
        diary.resume(record.load()[1]["iteration"])
    else:
        diary.mention(weights)
        fed.back_to_versions(range(len(plan.sites)))
    result = run_between(
        fed.settings,
        fed,
        engine="federation",
        num_iterations=plan.num_iterations,
        num_rounds=plan.num_rounds,
        measure_every=plan.measure_every,
        schedule=plan.keywords()["schedule"],
        record=record,
        resume=resume,
        callbacks=[diary.add],
        describe={"plan": plan.asdict(), "max_weight": most},
        recover=True,
    )
    if result.stopped == "budget":
        say({"run": plan.name, "warning": result.ending.why})
    if result.ending.state == "stopped":
        return "stopped"
    if result.stopped == "failed":
        raise FedBilevelError(fed.suspects.blame(result.iteration) or result.ending.why)
    if sentence := write_verdict(fed.settings, result, fed.num_clients, record):
        say({"run": plan.name, "result": sentence})
    if fed.without_solution:
        named = ", ".join(fed.without_solution)
        fix = "resume the run when all sites are there"
        say({"run": plan.name, "warning": f"{named} could not write the private part of the solution: {fix}."})
    return "finished"


class _Diary:
    """Writes sites.jsonl in the record: a line for each outer iteration about sites, times, bytes
    and refusals."""

    def __init__(self, path: Path, plan: SitePlan, fed: Sites, mailbox: Mailbox, say: Say) -> None:
        self._path, self._plan, self._fed, self._mailbox, self._say = path, plan, fed, mailbox, say
        self._headline = ("upper_loss", *plan.built_task().headline)
        self._once: dict[str, Any] = {}  # for the next line only

    def mention(self, weights: Weights) -> None:
        self._once = {"capped": weights.cut, **({"weights": weights.stated} if weights.stated else {})}

    def resume(self, iteration: int) -> None:
        """Drop the lines after this outer iteration, and remember the flags in the lines before
        it."""
        shorten(self._path, iteration)
        for line in map(json.loads, self._path.read_text().splitlines() if self._path.exists() else ()):
            for site in line.get("flagged", {}):
                self._fed.suspects.watch.remember(site, line["iteration"])

    def add(self, now: Progress) -> bool:
        """Write the line of an outer iteration, and return False so that the run continues."""
        fed, mailbox = self._fed, self._mailbox
        fed.commit()  # before the line is written, so that the line names sites that could not save
        line: dict[str, Any] = {
            "run": self._plan.name,
            "iteration": now.iteration,
            "num_iterations": now.num_iterations,
            "rounds": now.rounds,
            "megabytes": now.megabytes,
            "sites": {name: round(seconds, 4) for name, seconds in sorted(fed.seconds.items())},
            "missing": fed.who_was_missing(),
            "wire_megabytes": (mailbox.sent + mailbox.received) / 1e6,
            "figures": {name: value for name, value in (now.row or {}).items() if name in self._headline},
            "flagged": fed.suspects.taken(),
            "capped": {},
            "strangers": mailbox.strangers(),
            **({} if fed.account is None else {"epsilon": fed.account.epsilon()}),
            **self._once,
        }
        self._once = {}
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")
        self._say(line)
        return False


class _Waiting:
    """Waits until enough sites answer.

    Silent sites get `patience` seconds in every outer iteration, and operators get `approval_wait`
    seconds. Time in which the server itself was suspended does not count.
    """

    def __init__(self, plan: SitePlan, transport: SiteTransport, record: Record, say: Say, pulse: Pulse) -> None:
        self.plan, self.transport, self.record, self.say, self.pulse = plan, transport, record, say, pulse
        self._stuck, self._until = -1, 0.0  # the outer iteration that patience is for, and when it ends
        self._approval = plan.approval_wait  # seconds left
        self._said = ""

    def until_enough(self, error: QuorumError) -> list[str]:
        """Ping the sites until enough of them answer, and return those. Raise the error again when
        the patience ends. Return an empty list if the run should stop."""
        begun = self.record.checkpoint.exists()
        now, done = self.pulse.awake(), self.record.load()[1]["iteration"] if begun else 0
        if done != self._stuck or isinstance(error, SuspendedError):  # then only the server was late
            self._stuck, self._until = done, now + self.plan.patience
        needs_all = not begun or self.plan.built_algorithm().needs_everyone
        needed = len(self.plan.sites) if needs_all else self.plan.quorum
        mailbox = Mailbox(self.transport, self.plan.name, self.pulse.lost)
        while True:
            time.sleep(_BETWEEN)
            if self.transport.stop_asked():
                return []
            if now > self._until:
                raise error
            asked = [name for name in self.plan.sites if name in self.transport.sites]
            pings = {name: SiteMessage({"kind": "ping"}) for name in asked}
            try:
                answers, _ = mailbox.exchange(pings, deadline=min(2.0, self.plan.deadline))
            except SuspendedError:
                continue
            there = [name for name in asked if name in answers and is_free(answers[name])]
            waits = {name: answer.header["wait"] for name, answer in answers.items() if "wait" in answer.header}
            if len(there) >= needed:
                self._approval, self._said = self.plan.approval_wait, ""
                return there
            before, now = now, self.pulse.awake()
            if waits:
                self._wait_for_operators(waits, now - before)

    def _wait_for_operators(self, waits: Mapping[str, str], took: float) -> None:
        """Report that sites wait for their operators, and raise if they wait too long.

        took: seconds since the last ping, which do not count against the patience.
        """
        self._approval -= took
        self._until += took
        text = waiting_sentence(waits)
        if self._approval < 0:
            limit = f"for longer than the {self.plan.approval_wait:g} s of approval_wait"
            raise FedBilevelError(f"{text.removesuffix('.')}, {limit}: ask there, then resume the run.")
        if text != self._said:
            self._said = text
            self.say({"run": self.plan.name, "waiting": text})
