"""A run between sites as a file: what everybody agrees on before it begins. Nothing in it is a path, and nothing is code.

    name = "cleaning"                 # also that of its folder at the server and at every site
    sites = ["north", "south"]        # nothing: all of the federation
    num_iterations = 50               # nothing: what the task suggests
    measure_every = 5                 # outer iterations between measurements
    quorum = 2                        # sites that must answer, or the outer iteration is tried again; nothing: more than half
    deadline = 60.0                   # seconds that a site has for one answer
    join_deadline = 300.0             # seconds that a site has to read its data, before the first
    patience = 30.0                   # seconds to wait for a quorum before the job is given up (it is then submitted again)
    num_classes = 10                  # where labels are classes: a site may lack some
    max_weight = 5000                 # most that one client counts in a mean; nothing: 10 times the median of the other sites' clients
    exclude_outliers = true           # leave out answers whose norm is far from the others'; nothing: name them only
    approval_wait = 86400.0           # seconds to wait for the operators of the sites
    clients = {north = 2}             # clients that a site hosts; nothing: 1
    [task]                            # name and settings; those of the data do not matter, as every site has its own
    [algorithm]                       # name and settings
    [options]                         # seed, batch_size, dtype, fraction ..., as of a run in one process

What is left out of `options` has the same default as in a run in one process.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from fedbilevel import discovery
from fedbilevel.clients import Sampling
from fedbilevel.errors import PlanError, UnknownNameError
from fedbilevel.federation import ServerAlgorithm
from fedbilevel.options import BETWEEN_PEERS, keywords
from fedbilevel.oracle import Strategy
from fedbilevel.settings import check_plain, made
from fedbilevel.tasks.task import Task

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")  # becomes that of a folder
_KINDS = {
    "name": "text", "sites": "names", "num_iterations": "whole", "measure_every": "maybe", "quorum": "maybe", "deadline": "number",
    "join_deadline": "number", "patience": "number", "num_classes": "maybe", "task": "table", "algorithm": "table", "options": "table",
    "max_weight": "maybe", "exclude_outliers": "flag", "approval_wait": "number", "clients": "table",
}  # fmt: skip
SECONDS = ("deadline", "join_deadline", "patience", "approval_wait")
_NOT_AT_SITES = ("device", "chunk_size", *BETWEEN_PEERS)  # every site computes where and how it likes


@dataclass(frozen=True)
class Plan:
    name: str
    sites: tuple[str, ...]
    num_iterations: int
    task: dict[str, Any]  # with its name
    algorithm: dict[str, Any]
    options: dict[str, Any]
    measure_every: int | None = None
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

    def numbers(self, site: str) -> range:
        """Numbers of the clients that `site` hosts: they run through the sites in the order of the plan."""
        first = sum(self.clients.get(other, 1) for other in self.sites[: self.sites.index(site)])
        return range(first, first + self.clients.get(site, 1))

    def asdict(self) -> dict[str, Any]:
        return {**vars(self), "sites": list(self.sites)}

    def built_task(self) -> Task:
        return made(discovery.task(self.task["name"]), without_name(self.task))

    def built_algorithm(self) -> ServerAlgorithm:
        algorithm = made(discovery.algorithm(self.algorithm["name"]), without_name(self.algorithm))
        if not isinstance(algorithm, ServerAlgorithm):
            raise PlanError(f"{algorithm.name()} runs between peers without a server, so there is nothing for sites to answer: choose another algorithm.")
        return algorithm

    def keywords(self) -> dict[str, Any]:
        return keywords(self.options)


def plan_digest(plan: Mapping[str, Any]) -> str:
    """Name a plan by its content: any other plan has another digest."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def parts_of(content: Mapping[str, Any], kinds: Mapping[str, str], own: Sequence[str]) -> dict[str, Any]:
    """What a plan says that has nothing to do with who takes part: name, task, algorithm with what the task suggests for it, options and so on. `kinds`: of
    its entries. `own`: options that are each participant's own affair, or mean nothing here."""
    if not isinstance(content, Mapping):
        raise PlanError("this plan is none, expected a table with name, task and algorithm.")
    for name, value in content.items():
        if name not in kinds:
            raise UnknownNameError("entry of a plan", name, kinds)
        if value is not None:
            check_plain(f"{name} of the plan", value, kinds[name], PlanError)
    for name in ("name", "task", "algorithm"):
        if content.get(name) is None:
            raise PlanError(f"the plan has no {name}: give one.")
    for part in ("task", "algorithm"):
        if not isinstance(content[part].get("name"), str):
            raise PlanError(f'the table {part} of the plan does not say which one: add name = "..." to it.')
    if not NAME.fullmatch(content["name"]):
        raise PlanError(f"the name of the run is {content['name']!r}, expected letters, digits, '_' and '-', as it becomes that of a folder.")
    task, algorithm = discovery.task(content["task"]["name"]), discovery.algorithm(content["algorithm"]["name"])
    known_settings = {spec.name for spec in dataclasses.fields(algorithm)}
    suggested = {name: value for name, value in task.suggestions(algorithm.name()).items() if name in known_settings}
    options = dict(content.get("options") or {})
    for name in own:
        if name in options:
            raise PlanError(f"the plan sets {name}, which is each participant's own affair or means nothing here: leave it out.")
    if content["task"].get("data_dir"):  # some tasks say "" for nowhere
        raise PlanError("the plan sets data_dir, but where data lie is each participant's own affair and does not travel: leave it out.")
    return {
        "name": content["name"],
        "num_iterations": content.get("num_iterations") or task.iterations(algorithm.name()),
        "task": {"name": task.name(), **_plain(made(task, without_name(content["task"])).asdict())},
        "algorithm": {"name": algorithm.name(), **_plain(made(algorithm, {**suggested, **without_name(content["algorithm"])}).asdict())},
        "options": options,
        "measure_every": content.get("measure_every"),
        "num_classes": content.get("num_classes"),
    }


def plan_of(content: Mapping[str, Any], known: Sequence[str] | None = None) -> Plan:
    """A plan from a file or a message, checked; what is left out is filled in. known: the sites of the federation."""
    parts = parts_of(content, _KINDS, _NOT_AT_SITES)
    seconds: dict[str, Any] = {name: float(value) for name in SECONDS if (value := content.get(name)) is not None}
    sites = tuple((known or ()) if content.get("sites") is None else content["sites"])
    quorum = content.get("quorum")
    more = {name: content[name] for name in ("max_weight", "exclude_outliers") if content.get(name) is not None}
    clients = _clients(content.get("clients") or {}, sites)
    plan = Plan(**parts, sites=sites, quorum=len(sites) // 2 + 1 if quorum is None else quorum, clients=clients, **seconds, **more)
    _check(plan, known)
    return plan


def _clients(given: Mapping[str, Any], sites: Sequence[str]) -> dict[str, int]:
    for site, number in given.items():
        if site not in sites:
            raise UnknownNameError("site of this plan", site, sites)
        check_plain(f"clients.{site} of the plan", number, "whole", PlanError)
    return {site: given[site] for site in sites if given.get(site, 1) > 1}


def read_plan(path: Path, known: Sequence[str] | None = None) -> Plan:
    return plan_of(read_toml(path), known)


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise PlanError(f"{path} cannot be read ({error.strerror}): give the TOML file of a run.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} is not readable as TOML ({error}): mend it there.") from error


def _check(plan: Plan, known: Sequence[str] | None) -> None:
    if not plan.sites or len(set(plan.sites)) < len(plan.sites):
        raise PlanError(f"the sites of the plan are {', '.join(plan.sites) or 'none'}, expected at least one, each once.")
    for site in plan.sites:
        if not NAME.fullmatch(site):
            raise PlanError(f"a site is called {site!r}, expected letters, digits, '_' and '-'.")
        if known is not None and site not in known:
            raise UnknownNameError("site of this federation", site, known)
    if plan.quorum > len(plan.sites):
        raise PlanError(f"the quorum is {plan.quorum}, but there are {len(plan.sites)} sites: lower it.")
    check_seconds(plan, SECONDS)
    check_options(plan.keywords())
    for name, value in plan.built_algorithm().asdict().items():
        if isinstance(value, tuple) and len(value) != plan.num_clients:
            raise PlanError(f"{name} of the plan has {len(value)} numbers for {plan.num_clients} clients: give one number, or one per client.")


def check_seconds(plan: Any, names: Sequence[str]) -> None:
    for name in names:
        if not 0 < getattr(plan, name) < float("inf"):
            raise PlanError(f"{name} is {getattr(plan, name)}, expected seconds above 0.")


def check_options(options: Mapping[str, Any]) -> None:
    """As `run` takes them."""
    options["cohort"].checked()
    options["schedule"].checked()
    for name, choices in (("sampling", get_args(Sampling)), ("strategy", get_args(Strategy))):
        if options[name] not in choices:
            raise PlanError(f"{name} of the plan is {options[name]!r}, expected {' or '.join(map(repr, choices))}.")


def without_name(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != "name"}


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
