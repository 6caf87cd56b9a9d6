"""The beginning of a run between sites: the server asks the sites to join, and checks that their
data and settings agree."""

from __future__ import annotations

import itertools
import re
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from fedbilevel._version import __version__
from fedbilevel.errors import PlanError, ProblemError, QuorumError
from fedbilevel.sites.answers import are_counts
from fedbilevel.sites.engine import Sites
from fedbilevel.sites.exchange import Member
from fedbilevel.sites.mailbox import Answer, Mailbox, SiteMessage
from fedbilevel.sites.membership import terms_of
from fedbilevel.sites.plan import SitePlan
from fedbilevel.sites.secure_sums import SecureSums
from fedbilevel.sites.transport import Failure
from fedbilevel.tasks.task import Shapes

if TYPE_CHECKING:
    from fedbilevel.secure.messages import PartyOf


class Weights(NamedTuple):
    """Weights of clients, with large weights reduced to a limit."""

    most: dict[str, int]  # the largest weight that a client of each site may have
    cut: dict[str, str]  # the diary's sentence for each site whose weight was cut
    stated: dict[str, list[int]]  # what the sites state for their clients, unless all are equal
    counted: dict[str, list[int]]  # what they count


def joined(
    plan: SitePlan, mailbox: Mailbox, there: Sequence[str], *, everyone: bool, party_of: PartyOf | None = None
) -> tuple[Sites, Weights]:
    """Ask these sites to join the run.

    everyone: whether all sites must join without a refusal, as in a new run; a resumed run needs a
        quorum.
    party_of: reads a certificate of the federation, for secure sums.
    """
    sums = _sums(plan, party_of)
    join = SiteMessage({"kind": "join", "plan": plan.asdict(), "version": __version__})
    answers, failures = mailbox.exchange({name: join for name in there}, deadline=plan.join_deadline)
    why = {name: "it is not connected" for name in plan.sites if name not in there} | {
        name: failure.reason for name, failure in failures.items()
    }
    _check_enough(plan, answers, failures, why, everyone)
    for name, answer in answers.items():
        _check_introduction(plan, name, answer.header)
    newer = [name for name, answer in answers.items() if everyone and max([0, *answer.header["stored"]]) > 0]
    if newer:
        raise PlanError(
            f"{newer[0]} already holds a run named {plan.name}, which this server does not know: "
            "give the run another name."
        )
    usual = _agreed(plan, {name: answer.header for name, answer in answers.items()})
    about = answers[usual].header
    problem, algorithm = plan.built_task().problem(Shapes.from_dict(about["shapes"])), plan.built_algorithm()
    for warning in algorithm.check_scopes(problem.scopes):
        warnings.warn(warning, stacklevel=2)
    weights = _weights(plan, {name: answer.header["weights"] for name, answer in answers.items()})
    fed = Sites(
        algorithm,
        problem,
        [Member(name, weights.counted.get(name, [1] * len(plan.numbers(name))), why.get(name)) for name in plan.sites],
        mailbox,
        layouts=about["layouts"],
        quorum=plan.quorum,
        deadline=plan.deadline,
        plan=plan.asdict(),
        welcome=_welcome(plan, usual, about),
        exclude_outliers=plan.exclude_outliers,
        sums=sums,
        **plan.keywords(),
    )
    return fed, weights


def _sums(plan: SitePlan, party_of: PartyOf | None) -> Callable[..., SecureSums] | None:
    """Return the function that makes the secure sums of a plan, if it has any."""
    aggregation = plan.keywords().get("aggregation")
    if aggregation is None or not aggregation.secure:
        return None
    if party_of is None:
        raise PlanError("secure sums need the certificates of a federation's kits: run the plan with its kits.")
    return partial(SecureSums, terms_of(plan), party_of, cohorts=plan.cohort_size < plan.num_clients)


def _check_enough(
    plan: SitePlan,
    answers: Mapping[str, Answer],
    failures: Mapping[str, Failure],
    why: Mapping[str, str],
    everyone: bool,
) -> None:
    """Raise if too few sites joined.

    why: reasons by missing site.
    """
    refused = {name: failure.reason for name, failure in failures.items() if not (failure.silent or failure.wait)}
    if refused and everyone:
        each = (
            f"{name} does not join the run {plan.name}: {reason.removesuffix('.')}" for name, reason in refused.items()
        )
        raise PlanError("; ".join(each) + ".")
    needed = len(plan.sites) if everyone else plan.quorum
    waits = {name: failure.reason for name, failure in failures.items() if failure.wait}
    if len(answers) < needed and why.keys() == waits.keys():
        raise QuorumError(waiting_sentence(waits))
    if len(answers) < needed:
        named = "; ".join(f"{name} ({reason})" for name, reason in why.items())
        raise QuorumError(
            f"{len(answers)} of the {needed} sites that are needed joined the run {plan.name}; missing: {named}."
        )


def waiting_sentence(waits: Mapping[str, str]) -> str:
    """Write one sentence about all sites that wait for their operators, grouped by reason."""
    sites: dict[str, list[str]] = {}
    for name, reason in waits.items():
        sites.setdefault(reason.removesuffix("."), []).append(name)
    each = (f"waiting for the operator of {', '.join(names)}: {reason}" for reason, names in sites.items())
    return "; ".join(each) + "."


def _weights(plan: SitePlan, stated: Mapping[str, list[int]]) -> Weights:
    most = _caps(plan, stated)
    cut = {
        name: f"it states a weight of {max(weights)}, and counts with {most[name]}: "
        "set max_weight if that is too little"
        for name, weights in stated.items()
        if max(weights) > most[name]
    }
    counted = {name: [min(weight, most[name]) for weight in weights] for name, weights in stated.items()}
    unequal = len(set(itertools.chain(*stated.values()))) > 1
    return Weights(most, cut, {name: list(weights) for name, weights in stated.items()} if unequal else {}, counted)


def _caps(plan: SitePlan, stated: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the largest allowed weight for the clients of each site. It is the plan's limit, or 10
    times the median over the clients of the other sites, so that a site does not influence its own
    limit."""
    if plan.max_weight:
        return dict.fromkeys(stated, plan.max_weight)
    others = {site: [weight for name, some in stated.items() if name != site for weight in some] for site in stated}
    return {site: max(1, int(10 * statistics.median(weights or stated[site]))) for site, weights in others.items()}


def _welcome(plan: SitePlan, usual: str, about: Mapping[str, Any]) -> Callable[[str, Mapping[str, Any]], None]:
    """Make the check for a site that joins again: it must agree with the site `usual`, whose
    introduction is `about`."""

    def welcome(name: str, header: Mapping[str, Any]) -> None:
        _check_introduction(plan, name, header)
        if words := _difference(usual, about, name, header):
            raise PlanError(f"{name} is not like the other sites of the run {plan.name}: {words}.")

    return welcome


def _check_introduction(plan: SitePlan, name: str, header: Mapping[str, Any]) -> None:
    theirs, ours = str(header.get("version"))[:20], __version__
    if theirs != ours:
        older = (
            None
            if _release(theirs) == _release(ours)
            else f"at {name}"
            if _release(theirs) < _release(ours)
            else "at the server"
        )
        fix = f"upgrade fedbilevel {older}" if older else "install the same version at both"
        raise PlanError(f"{name} has fedbilevel {theirs} and the server {ours}: {fix}.")
    stored = header.get("stored")
    try:
        Shapes.from_dict(header.get("shapes", {}))
    except ProblemError as error:
        raise PlanError(f"{name} did not describe its data properly: {str(error)[:300].removesuffix('.')}.") from error
    good = isinstance(stored, list) and all(type(version) is int for version in stored)
    if not good or not are_counts(header.get("weights"), len(plan.numbers(name)), least=1):
        raise PlanError(f"{name} did not introduce itself properly: install the same version of fedbilevel there.")


def _agreed(plan: SitePlan, headers: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a site that agrees with all others on what a run needs. If sites disagree, the error
    names the odd site, or two sites if there is no majority."""
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
    """Describe the first difference between two introductions, or return None if they agree."""
    mine, theirs = Shapes.from_dict(about["shapes"]), Shapes.from_dict(others["shapes"])
    for first, second, here, there in ((one, other, mine, theirs), (other, one, theirs, mine)):
        if misfit := here.misfit(there):
            return f"the data of {second} do not look like those of {first}, {misfit[:300]}"
    for part, meaning in (("layouts", "shape of x and y"), ("start", "initial point")):
        left, right = about.get(part), others.get(part)
        if left != right:
            return f"{one} and {other} do not have the same {meaning}, {left!r:.150} and {right!r:.150}"
    return None


def _release(version: str) -> tuple[int, ...]:
    """Return (0, 2, 0) for 0.2.0 and for 0.2.0.dev1. Return an empty tuple, which sorts first, if
    the text is not a version."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
