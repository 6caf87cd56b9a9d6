"""The server's side of a run between sites: ask them to join, begin or go on, and try again when too few answer."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fedbilevel
from fedbilevel.engines.sites import Member, Sites
from fedbilevel.errors import PlanError, QuorumError
from fedbilevel.record import Record, shorten
from fedbilevel.run import Progress, run_between
from fedbilevel.sites.desk import Desk, Message
from fedbilevel.sites.plan import Plan, plan_of
from fedbilevel.sites.transport import Transport
from fedbilevel.tasks.task import Shapes

_BETWEEN = 1.0  # seconds between questions whether enough sites are there
Say = Callable[[dict[str, Any]], None]


def serve(plan: Mapping[str, Any], transport: Transport, folder: Path, say: Say) -> str:
    """Run or go on with what `plan` describes; `folder` is its record. "finished", or "stopped" when somebody asked for that."""
    ours = plan_of(plan)
    book, stuck, until = Record(folder), -1, 0.0
    there: Sequence[str] = [name for name in ours.sites if name in transport.sites]
    while True:
        try:
            return _attempt(ours, transport, there, book, say)
        except QuorumError as error:
            if transport.stop_asked():
                return "stopped"
            say({"run": ours.name, "waiting": str(error)})
            done = book.load()[1]["iteration"] if book.checkpoint.exists() else 0
            if done != stuck:  # patience is for every outer iteration anew
                stuck, until = done, time.monotonic() + ours.patience
            there = _waited(ours, transport, error, until)
            if transport.stop_asked():
                return "stopped"


def _attempt(plan: Plan, transport: Transport, there: Sequence[str], book: Record, say: Say) -> str:
    resume = book.checkpoint.exists()
    if resume and book.read_config().get("plan", {}).get("sites") != list(plan.sites):
        raise PlanError(f"the run {plan.name} began with the sites {', '.join(book.read_config()['plan']['sites'])}: use another name for one with others.")
    desk = Desk(transport, plan.name)
    fed = _federation(plan, desk, there, everyone=not resume)
    if not resume:
        fed.back_to_versions(range(len(plan.sites)))
    diary = book.path / "sites.jsonl"
    if resume:
        shorten(diary, book.load()[1]["iteration"])

    headline = ("upper_loss", *plan.built_task().headline)

    def tell(now: Progress) -> bool:
        line = {
            "run": plan.name, "iteration": now.iteration, "num_iterations": now.num_iterations, "rounds": now.rounds, "megabytes": now.megabytes,
            "sites": {name: round(seconds, 4) for name, seconds in sorted(fed.seconds.items())}, "missing": fed.who_was_missing(),
            "wire_megabytes": (desk.sent + desk.received) / 1e6, "figures": {name: value for name, value in (now.row or {}).items() if name in headline},
        }  # fmt: skip
        with open(diary, "a") as file:
            file.write(json.dumps(line) + "\n")
        say(line)
        return False

    options = plan.keywords()
    result = run_between(
        fed.settings, fed, engine="federation", num_iterations=plan.num_iterations, measure_every=plan.measure_every, schedule=options["schedule"], record=book,
        resume=resume, callbacks=[tell], describe={"plan": plan.asdict()},
    )  # fmt: skip
    if result.stopped == "interrupted":
        return "stopped"
    if fed.without_solution:
        named = ", ".join(fed.without_solution)
        say({"run": plan.name, "warning": f"{named} could not write the private part of the solution: resume the run when all sites are there."})
    return "finished"


def _federation(plan: Plan, desk: Desk, there: Sequence[str], *, everyone: bool) -> Sites:
    """Ask those who are there to join. A new run needs all sites, and none that refuses; one that goes on, a quorum."""
    answers, failures = desk.exchange({name: Message({"kind": "join", "plan": plan.asdict()}) for name in there}, deadline=plan.join_deadline)
    why = {name: "it is not connected" for name in plan.sites if name not in there} | {name: failure.reason for name, failure in failures.items()}
    refused = {name: failure.reason for name, failure in failures.items() if not failure.silent}
    if refused and everyone:
        raise PlanError("; ".join(f"{name} does not join the run {plan.name}: {reason.removesuffix('.')}" for name, reason in refused.items()) + ".")
    needed = len(plan.sites) if everyone else plan.quorum
    if len(answers) < needed:
        named = "; ".join(f"{name} ({reason})" for name, reason in why.items())
        raise QuorumError(f"{len(answers)} of the {needed} sites that are needed joined the run {plan.name}; missing: {named}.")
    for name, answer in answers.items():
        _check_introduction(name, answer.header)
    newer = [name for name, answer in answers.items() if everyone and max([0, *answer.header["stored"]]) > 0]
    if newer:
        raise PlanError(f"{newer[0]} already holds a run named {plan.name}, of which this server knows nothing: give the run another name.")
    (first, answer), *others = answers.items()
    about = answer.header
    for name, other in others:
        _agree(plan, (first, about), (name, other.header))

    def welcome(name: str, header: Mapping[str, Any]) -> None:
        _check_introduction(name, header)
        _agree(plan, (first, about), (name, header))

    problem, algorithm = plan.built_task().problem(Shapes.from_dict(about["shapes"])), plan.built_algorithm()
    for warning in algorithm.check_scopes(problem.scopes):
        warnings.warn(warning, stacklevel=2)
    members = [Member(name, answers[name].header["weight"] if name in answers else 1, why.get(name)) for name in plan.sites]
    return Sites(
        algorithm, problem, members, desk, layouts=about["layouts"], quorum=plan.quorum, deadline=plan.deadline, plan=plan.asdict(), welcome=welcome,
        **plan.keywords(),
    )  # fmt: skip


def _check_introduction(name: str, header: Mapping[str, Any]) -> None:
    if header.get("version") != fedbilevel.__version__:
        raise PlanError(f"{name} has fedbilevel {header.get('version')!r:.20}, the server {fedbilevel.__version__!r}: install the same version at both.")
    weight, stored = header.get("weight"), header.get("stored")
    Shapes.from_dict(header.get("shapes", {}))
    if type(weight) is not int or not 0 < weight < 2**40 or not isinstance(stored, list) or not all(type(version) is int for version in stored):
        raise PlanError(f"{name} did not introduce itself properly: install the same version of fedbilevel there.")


def _agree(plan: Plan, one: tuple[str, Mapping[str, Any]], other: tuple[str, Mapping[str, Any]]) -> None:
    for (here, about), (there, others) in ((one, other), (other, one)):
        misfit = Shapes.from_dict(about["shapes"]).misfit(Shapes.from_dict(others["shapes"]))
        if misfit is not None:
            raise PlanError(f"the data of {there} do not look like those of {here} in the run {plan.name}: {misfit}.")
    for part, meaning in (("layouts", "shape of x and y"), ("start", "initial point")):
        mine, theirs = one[1].get(part), other[1].get(part)
        if mine != theirs:
            raise PlanError(f"{one[0]} and {other[0]} do not have the same {meaning} in the run {plan.name}: {mine!r:.200} and {theirs!r:.200}.")


def _waited(plan: Plan, transport: Transport, error: QuorumError, until: float) -> list[str]:
    """Sites that say that they are there, once they are enough for the plan; the error again when patience ends."""
    desk = Desk(transport, plan.name)
    needed = len(plan.sites) if plan.built_algorithm().needs_everyone else plan.quorum
    while True:
        time.sleep(_BETWEEN)
        if transport.stop_asked():
            return []
        if time.monotonic() > until:
            raise error
        asked = [name for name in plan.sites if name in transport.sites]
        answers, _ = desk.exchange({name: Message({"kind": "ping"}) for name in asked}, deadline=min(2.0, plan.deadline))
        there = [name for name in asked if name in answers and answers[name].header.get("busy") is False]
        if len(there) >= needed:
            return there
