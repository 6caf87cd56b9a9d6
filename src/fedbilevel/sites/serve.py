"""The server's side of a run between sites: ask them to join, begin or go on, and try again when too few answer."""

from __future__ import annotations

import itertools
import json
import re
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel._version import __version__
from fedbilevel.errors import FedBilevelError, PlanError, ProblemError, QuorumError, SuspendedError
from fedbilevel.runs.loop import run_between
from fedbilevel.runs.record import Record, shorten
from fedbilevel.runs.result import Progress
from fedbilevel.sites.engine import Member, Sites, are_counts, is_free
from fedbilevel.sites.mailbox import Desk, Message
from fedbilevel.sites.plan import Plan, plan_of
from fedbilevel.sites.pulse import Pulse
from fedbilevel.sites.transport import Transport
from fedbilevel.tasks.task import Shapes

_BETWEEN = 1.0  # seconds between questions whether enough sites are there
Say = Callable[[dict[str, Any]], None]


def serve(plan: Mapping[str, Any], transport: Transport, folder: Path, say: Say) -> str:
    """Run or go on with what `plan` describes; `folder` is its record. "finished", or "stopped" when somebody asked for that."""
    ours, book = plan_of(plan), Record(folder)
    with Pulse() as pulse:
        waiting = _Waiting(ours, transport, book, say, pulse)
        there: Sequence[str] = [name for name in ours.sites if name in transport.sites]
        while True:
            try:
                return _attempt(ours, transport, there, book, say, pulse)
            except QuorumError as error:
                if transport.stop_asked():
                    return "stopped"
                say({"run": ours.name, "waiting": str(error)})
                there = waiting.until_enough(error)
                if transport.stop_asked():
                    return "stopped"


def _attempt(plan: Plan, transport: Transport, there: Sequence[str], book: Record, say: Say, pulse: Pulse) -> str:
    resume = book.checkpoint.exists()
    if resume and book.read_config().get("plan", {}).get("sites") != list(plan.sites):
        raise PlanError(
            f"the run {plan.name} began with the sites {', '.join(book.read_config()['plan']['sites'])}: use another name for one with others."
        )
    desk = Desk(transport, plan.name, pulse.lost)
    fed, capped = _federation(plan, desk, there, everyone=not resume)
    if resume:
        capped = _Capped(book.read_config().get("max_weight", capped.most), {}, {})  # weights come with the checkpoint
    if not resume:
        fed.back_to_versions(range(len(plan.sites)))
    diary = book.path / "sites.jsonl"
    if resume:
        shorten(diary, book.load()[1]["iteration"])
        for before in map(json.loads, diary.read_text().splitlines() if diary.exists() else ()):
            for site in before.get("flagged", {}):
                fed.watch.remember(site, before["iteration"])

    headline = ("upper_loss", *plan.built_task().headline)

    def tell(now: Progress) -> bool:
        fed.commit()  # before the line is written, which then names a site that could not save; the checkpoint has nothing left to commit
        line: dict[str, Any] = {
            "run": plan.name,
            "iteration": now.iteration,
            "num_iterations": now.num_iterations,
            "rounds": now.rounds,
            "megabytes": now.megabytes,
            "sites": {name: round(seconds, 4) for name, seconds in sorted(fed.seconds.items())},
            "missing": fed.who_was_missing(),
            "wire_megabytes": (desk.sent + desk.received) / 1e6,
            "figures": {name: value for name, value in (now.row or {}).items() if name in headline},
            "flagged": fed.who_was_flagged(),
            "capped": dict(capped.sites),
            "strangers": desk.strangers(),
        }
        if capped.stated:
            line["weights"] = dict(capped.stated)
        capped.sites.clear()  # said once, as are the weights
        capped.stated.clear()
        with open(diary, "a") as file:
            file.write(json.dumps(line) + "\n")
        say(line)
        return False

    options = plan.keywords()
    result = run_between(
        fed.settings,
        fed,
        engine="federation",
        num_iterations=plan.num_iterations,
        num_rounds=plan.num_rounds,
        measure_every=plan.measure_every,
        schedule=options["schedule"],
        record=book,
        resume=resume,
        callbacks=[tell],
        describe={"plan": plan.asdict(), "max_weight": capped.most},
    )
    if result.stopped == "interrupted":
        return "stopped"
    if fed.without_solution:
        named = ", ".join(fed.without_solution)
        say(
            {
                "run": plan.name,
                "warning": f"{named} could not write the private part of the solution: resume the run when all sites are there.",
            }
        )
    return "finished"


class _Capped(NamedTuple):
    """Weights that were cut."""

    most: dict[str, int]  # what a client of each site may count
    sites: dict[str, str]  # what the diary says of each site whose weight was cut
    stated: dict[str, list[int]]  # what the sites say of their clients, where that is not equal


def _caps(plan: Plan, stated: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The most that a client of each site counts: by the plan, or 10 times the median of the clients of the other sites,
    so that no site has a say in its own limit."""
    if plan.max_weight:
        return dict.fromkeys(stated, plan.max_weight)
    others = {site: [weight for name, some in stated.items() if name != site for weight in some] for site in stated}
    return {site: max(1, int(10 * statistics.median(weights or stated[site]))) for site, weights in others.items()}


def _federation(plan: Plan, desk: Desk, there: Sequence[str], *, everyone: bool) -> tuple[Sites, _Capped]:
    """Ask those who are there to join. A new run needs all sites, and none that refuses; one that goes on, a quorum."""
    join = Message({"kind": "join", "plan": plan.asdict(), "version": __version__})
    answers, failures = desk.exchange({name: join for name in there}, deadline=plan.join_deadline)
    why = {name: "it is not connected" for name in plan.sites if name not in there} | {
        name: failure.reason for name, failure in failures.items()
    }
    refused = {name: failure.reason for name, failure in failures.items() if not (failure.silent or failure.wait)}
    if refused and everyone:
        raise PlanError(
            "; ".join(
                f"{name} does not join the run {plan.name}: {reason.removesuffix('.')}"
                for name, reason in refused.items()
            )
            + "."
        )
    needed = len(plan.sites) if everyone else plan.quorum
    waits = {name: failure.reason for name, failure in failures.items() if failure.wait}
    if len(answers) < needed and why.keys() == waits.keys():
        raise QuorumError(_for_operators(waits))
    if len(answers) < needed:
        named = "; ".join(f"{name} ({reason})" for name, reason in why.items())
        raise QuorumError(
            f"{len(answers)} of the {needed} sites that are needed joined the run {plan.name}; missing: {named}."
        )
    for name, answer in answers.items():
        _check_introduction(plan, name, answer.header)
    newer = [name for name, answer in answers.items() if everyone and max([0, *answer.header["stored"]]) > 0]
    if newer:
        raise PlanError(
            f"{newer[0]} already holds a run named {plan.name}, of which this server knows nothing: give the run another name."
        )
    usual = _agreed(plan, {name: answer.header for name, answer in answers.items()})
    about = answers[usual].header

    def welcome(name: str, header: Mapping[str, Any]) -> None:
        _check_introduction(plan, name, header)
        if words := _difference(usual, about, name, header):
            raise PlanError(f"{name} is not like the other sites of the run {plan.name}: {words}.")

    problem, algorithm = plan.built_task().problem(Shapes.from_dict(about["shapes"])), plan.built_algorithm()
    for warning in algorithm.check_scopes(problem.scopes):
        warnings.warn(warning, stacklevel=2)
    stated = {name: answers[name].header["weights"] for name in answers}
    most = _caps(plan, stated)
    cut = {
        name: f"it says that its weight is {max(weights)}, and counts with {most[name]}: set max_weight if that is too little"
        for name, weights in stated.items()
        if max(weights) > most[name]
    }
    counted = {name: [min(weight, most[name]) for weight in weights] for name, weights in stated.items()}
    members = [Member(name, counted.get(name, [1] * len(plan.numbers(name))), why.get(name)) for name in plan.sites]
    fed = Sites(
        algorithm,
        problem,
        members,
        desk,
        layouts=about["layouts"],
        quorum=plan.quorum,
        deadline=plan.deadline,
        plan=plan.asdict(),
        welcome=welcome,
        exclude_outliers=plan.exclude_outliers,
        **plan.keywords(),
    )
    unequal = len(set(itertools.chain(*stated.values()))) > 1
    return fed, _Capped(most, cut, {name: list(weights) for name, weights in stated.items()} if unequal else {})


def _check_introduction(plan: Plan, name: str, header: Mapping[str, Any]) -> None:
    theirs, ours = str(header.get("version"))[:20], __version__
    if theirs != ours:
        older = (
            None
            if _release(theirs) == _release(ours)
            else f"at {name}"
            if _release(theirs) < _release(ours)
            else "at the server"
        )
        mend = f"upgrade fedbilevel {older}" if older else "install the same version at both"
        raise PlanError(f"{name} has fedbilevel {theirs} and the server {ours}: {mend}.")
    stored = header.get("stored")
    try:
        Shapes.from_dict(header.get("shapes", {}))
    except ProblemError as error:
        raise PlanError(f"{name} did not describe its data properly: {str(error)[:300].removesuffix('.')}.") from error
    good = isinstance(stored, list) and all(type(version) is int for version in stored)
    if not good or not are_counts(header.get("weights"), len(plan.numbers(name)), least=1):
        raise PlanError(f"{name} did not introduce itself properly: install the same version of fedbilevel there.")


def _agreed(plan: Plan, headers: Mapping[str, Mapping[str, Any]]) -> str:
    """A site that all others agree with on what a run needs. Where most sites agree, the error names the odd one; otherwise both."""
    like = {
        one: [other for other in headers if _difference(one, headers[one], other, headers[other]) is None]
        for one in headers
    }
    usual = max(like, key=lambda name: len(like[name]))
    odd = next((name for name in headers if name not in like[usual]), None)
    if odd is None:
        return usual
    words = _difference(usual, headers[usual], odd, headers[odd])
    if 2 * len(like[usual]) > len(headers):
        raise PlanError(f"{odd} is not like the other sites of the run {plan.name}: {words}.")
    raise PlanError(f"{usual} and {odd} do not agree in the run {plan.name}: {words}.")


def _difference(one: str, about: Mapping[str, Any], other: str, others: Mapping[str, Any]) -> str | None:
    """Words on the first difference between what two sites say of themselves; nothing where they agree."""
    mine, theirs = Shapes.from_dict(about["shapes"]), Shapes.from_dict(others["shapes"])
    for first, second, here, there in ((one, other, mine, theirs), (other, one, theirs, mine)):
        if misfit := here.misfit(there):
            return f"the data of {second} do not look like those of {first}, {misfit[:300]}"
    for part, meaning in (("layouts", "shape of x and y"), ("start", "initial point")):
        if about.get(part) != others.get(part):
            return f"{one} and {other} do not have the same {meaning}, {about.get(part)!r:.150} and {others.get(part)!r:.150}"
    return None


def _release(version: str) -> tuple[int, ...]:
    """(0, 2, 0) of 0.2.0 and of 0.2.0.dev1; nothing, which is before all, of what is no version."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _for_operators(waits: Mapping[str, str]) -> str:
    """One sentence for all sites that wait, by reason."""
    sites: dict[str, list[str]] = {}
    for name, reason in waits.items():
        sites.setdefault(reason.removesuffix("."), []).append(name)
    return (
        "; ".join(f"waiting for the operator of {', '.join(names)}: {reason}" for reason, names in sites.items()) + "."
    )


class _Waiting:
    """Waits for enough sites: `patience` seconds for those that are silent, for every outer iteration anew, and `approval_wait` for operators. Time in which
    the server itself was suspended does not count."""

    def __init__(self, plan: Plan, transport: Transport, book: Record, say: Say, pulse: Pulse) -> None:
        self.plan, self.transport, self.book, self.say, self.pulse = plan, transport, book, say, pulse
        self._stuck, self._until = -1, 0.0  # the outer iteration that patience is for, and when it ends
        self._approval = plan.approval_wait  # what is left of it
        self._said = ""

    def until_enough(self, error: QuorumError) -> list[str]:
        """Sites that say that they are there, once they are enough for the plan; the error again when patience ends. Nobody, when the run is to stop."""
        now, done = self.pulse.awake(), self.book.load()[1]["iteration"] if self.book.checkpoint.exists() else 0
        if done != self._stuck or isinstance(error, SuspendedError):  # nobody but the server was late then
            self._stuck, self._until = done, now + self.plan.patience
        needs_all = not self.book.checkpoint.exists() or self.plan.built_algorithm().needs_everyone
        needed = len(self.plan.sites) if needs_all else self.plan.quorum
        desk = Desk(self.transport, self.plan.name, self.pulse.lost)
        while True:
            time.sleep(_BETWEEN)
            if self.transport.stop_asked():
                return []
            if now > self._until:
                raise error
            asked = [name for name in self.plan.sites if name in self.transport.sites]
            try:
                answers, _ = desk.exchange(
                    {name: Message({"kind": "ping"}) for name in asked}, deadline=min(2.0, self.plan.deadline)
                )
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
        """took: seconds since the last question, which patience does not pay for."""
        self._approval -= took
        self._until += took
        text = _for_operators(waits)
        if self._approval < 0:
            seconds = f"{self.plan.approval_wait:g} s"
            raise FedBilevelError(
                f"{text.removesuffix('.')}, for longer than the {seconds} of approval_wait: ask there, then resume the run."
            )
        if text != self._said:
            self._said = text
            self.say({"run": self.plan.name, "waiting": text})
