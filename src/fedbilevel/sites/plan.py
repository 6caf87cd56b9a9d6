"""The plan of a run between sites, as a file: everything that server and sites agree on before it
begins. It holds no paths and no code.

    name = "cleaning"           # also that of its folder at the server and at every site
    sites = ["north", "south"]  # omitted: all of the federation
    num_iterations = 50         # omitted: the task's suggestion
    num_rounds = 100            # end at this number of communication rounds; omitted: no such end
    measure_every = 5           # outer iterations between measurements
    quorum = 2                  # sites that must answer, or the outer iteration is repeated;
                                # omitted: more than half
    deadline = 60.0             # seconds that a site has for one answer
    join_deadline = 300.0       # seconds that a site has to read its data and join
    patience = 30.0             # seconds to wait for a quorum before another job follows
    num_classes = 10            # number of classes, because a site may lack some
    max_weight = 5000           # largest weight of a client in a mean;
                                # omitted: 10 times the median at the other sites
    exclude_outliers = true     # leave out answers whose norm is far from the others';
                                # omitted: only report them
    approval_wait = 86400.0     # seconds to wait for the operators of the sites
    clients = {north = 2}       # clients that a site hosts; omitted: 1
    [task]                      # name and settings; every site has its own data
    [algorithm]                 # name and settings
    [options]                   # seed, batch_size, dtype, fraction ..., as of a run in one process

Omitted `options` have the same defaults as in a run in one process.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbilevel import discovery
from fedbilevel.aggregation.sealing import check_batches
from fedbilevel.aggregation.settings import Aggregation
from fedbilevel.aggregation.validity import check_aggregation
from fedbilevel.errors import PlanError, UnknownNameError
from fedbilevel.federation.algorithm import Cohort, ServerAlgorithm
from fedbilevel.runs.options import keywords
from fedbilevel.runs.runfile import NAME, check_options, check_seconds, parts_of, read_toml, used, without_name
from fedbilevel.settings import check_plain, made
from fedbilevel.tasks.task import Task

SECONDS = ("deadline", "join_deadline", "patience", "approval_wait")


@dataclass(frozen=True)
class SitePlan:
    """The plan of a run between sites."""

    name: str
    sites: tuple[str, ...]
    num_iterations: int
    task: dict[str, Any]  # with its name
    algorithm: dict[str, Any]
    options: dict[str, Any]
    measure_every: int | None = None
    num_rounds: int | None = None
    quorum: int = 1
    deadline: float = 60.0
    join_deadline: float = 300.0
    patience: float = 30.0
    num_classes: int | None = None
    max_weight: int | None = None
    exclude_outliers: bool = False
    approval_wait: float = 86400.0
    clients: dict[str, int] = field(default_factory=dict)  # only sites with more than one

    @property
    def num_clients(self) -> int:
        return sum(self.clients.get(site, 1) for site in self.sites)

    @property
    def cohort_size(self) -> int:
        """Number of clients in every round."""
        return int(self.keywords()["cohort"].size(self.num_clients))

    def numbers(self, site: str) -> range:
        """Return the numbers of the clients that `site` hosts. Numbers run through the sites in the
        order of the plan."""
        first = sum(self.clients.get(other, 1) for other in self.sites[: self.sites.index(site)])
        return range(first, first + self.clients.get(site, 1))

    def asdict(self) -> dict[str, Any]:
        return {**vars(self), "sites": list(self.sites)}

    def built_task(self) -> Task:
        return made(discovery.task(self.task["name"]), without_name(self.task))

    def built_algorithm(self) -> ServerAlgorithm:
        algorithm = made(discovery.algorithm(self.algorithm["name"]), without_name(self.algorithm))
        if not isinstance(algorithm, ServerAlgorithm):
            raise PlanError(
                f"{algorithm.name()} runs between peers without a server, so sites cannot answer: "
                "choose another algorithm."
            )
        return algorithm

    def keywords(self) -> dict[str, Any]:
        return keywords(self.options)


def plan_digest(plan: Mapping[str, Any]) -> str:
    """Return the digest of a plan's content."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def plan_of(content: Mapping[str, Any], known: Sequence[str] | None = None) -> SitePlan:
    """Make a checked plan from the content of a file or message, with defaults filled in.

    known: the sites of the federation.
    """
    parts = parts_of(content, "sites")
    seconds: dict[str, Any] = {name: float(value) for name in SECONDS if (value := content.get(name)) is not None}
    sites = tuple((known or ()) if content.get("sites") is None else content["sites"])
    quorum = content.get("quorum")
    more = {
        name: content[name]
        for name in ("num_rounds", "max_weight", "exclude_outliers")
        if content.get(name) is not None
    }
    clients = _clients(content.get("clients") or {}, sites)
    plan = SitePlan(
        **parts,
        sites=sites,
        quorum=len(sites) // 2 + 1 if quorum is None else quorum,
        clients=clients,
        **seconds,
        **more,
    )
    _check(plan, known)
    return plan


def _clients(given: Mapping[str, Any], sites: Sequence[str]) -> dict[str, int]:
    for site, number in given.items():
        if site not in sites:
            raise UnknownNameError("site of this plan", site, sites)
        check_plain(f"clients.{site} of the plan", number, "whole", PlanError)
    return {site: given[site] for site in sites if given.get(site, 1) > 1}


def read_plan(path: Path, known: Sequence[str] | None = None) -> SitePlan:
    return plan_of(used(read_toml(path), "sites", str(path)), known)


def _check_private(plan: SitePlan, aggregation: Aggregation, cohort: Cohort) -> None:
    some = plan.cohort_size < plan.num_clients or cohort.replacement
    asked = "noise" if aggregation.of_rows().noise is not None else "groups" if aggregation.groups is not None else ""
    if some and (asked == "noise" or (asked and aggregation.secure)):
        raise PlanError(f"aggregation.{asked} needs all clients in every round between sites: leave out fraction.")
    if aggregation.secure and cohort.replacement:
        raise PlanError(
            "aggregation.secure needs cohorts without replacement between sites, because a cohort could be one site: "
            "leave out replacement."
        )
    if aggregation.secure and plan.clients and (some or asked == "groups"):
        raise PlanError(
            f"a {'cohort' if some else 'group'} under secure sums needs one client per site, and "
            f"{next(iter(plan.clients))} hosts several: its clients could be those of one site; leave out "
            f"{'fraction' if some else 'groups'}."
        )
    if aggregation.secure and not len(plan.sites) / 2 < plan.quorum:
        raise PlanError(
            f"the quorum is {plan.quorum} of {len(plan.sites)} sites, and secure sums need more than half: raise it."
        )


def _check(plan: SitePlan, known: Sequence[str] | None) -> None:
    if not plan.sites or len(set(plan.sites)) < len(plan.sites):
        raise PlanError(
            f"the sites of the plan are {', '.join(plan.sites) or 'none'}, expected at least one, each once."
        )
    for site in plan.sites:
        if not NAME.fullmatch(site):
            raise PlanError(f"a site is called {site!r}, expected letters, digits, '_' and '-'.")
        if known is not None and site not in known:
            raise UnknownNameError("site of this federation", site, known)
    if plan.quorum > len(plan.sites):
        raise PlanError(f"the quorum is {plan.quorum}, but there are {len(plan.sites)} sites: lower it.")
    check_seconds(plan, SECONDS)
    given = plan.keywords()
    check_options(given)
    if given.get("aggregation") is not None:  # weights are known later, and are at least one
        num = plan.num_clients
        _check_private(plan, given["aggregation"], given["cohort"])
        check_batches(given["aggregation"], given["batch_size"])
        check_aggregation(given["aggregation"], plan.built_algorithm(), given["cohort"], num, 1)
    for name, value in plan.built_algorithm().asdict().items():
        if isinstance(value, tuple) and len(value) != plan.num_clients:
            raise PlanError(
                f"{name} of the plan has {len(value)} numbers for {plan.num_clients} clients: "
                "give one number, or one per client."
            )
