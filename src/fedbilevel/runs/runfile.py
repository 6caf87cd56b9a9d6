"""A whole run as a file, for `fedbilevel run --config FILE`; every run from the command line writes its own into its record, as run.toml.

iterations = 400             # outer iterations; nothing: what the task suggests
rounds = 500                 # ends the run at so many communication rounds; nothing: no such end
measure_every = 20           # outer iterations between measurements; nothing: about twenty in the run
checkpoint_every = 10
log = ["tensorboard"]        # logs besides the record
residuals = true             # measure also how far y and u are from solving their parts
stationarity = false         # measure also how long the hypergradient is, which takes long
[task]                       # name and settings; what is left out has its default
[algorithm]                  # name and settings; what is left out is what the task suggests, or its default
[options]                    # seed, fraction, replacement, redraw, schedule_power, schedule_offset, batch_size, sampling, dtype, device, strategy, chunk_size
[options.network]            # between peers: who sends to whom
[options.averaging]          # and how averages are made
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import tomlkit

from fedbilevel import discovery
from fedbilevel.errors import PlanError, UnknownNameError
from fedbilevel.federation.algorithm import Algorithm, PeerAlgorithm
from fedbilevel.federation.clients import Sampling
from fedbilevel.oracle.oracle import Strategy
from fedbilevel.runs.options import BETWEEN_PEERS, DEFAULTS, keywords
from fedbilevel.settings import check_plain, made
from fedbilevel.tasks.task import Task

PLAN = {
    "iterations": "count",
    "rounds": "maybe",
    "measure_every": "maybe",
    "checkpoint_every": "whole",
    "residuals": "flag",
    "stationarity": "flag",
}
_KINDS = {**PLAN, "log": "names", "task": "table", "algorithm": "table", "options": "table"}


@dataclass(frozen=True)
class Recipe:
    """What a file says, and nothing of what it leaves out. task, algorithm: names, and their settings."""

    task: str | None = None
    algorithm: str | None = None
    task_settings: Mapping[str, Any] = field(default_factory=dict)
    algorithm_settings: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    log: tuple[str, ...] = ()


def read_recipe(path: Path) -> Recipe:
    """Every name and every value in it is checked here, so that flags can take its place one by one."""
    content = read_toml(path)
    where = f"of {path}"
    for name, value in content.items():
        if name not in _KINDS:
            raise UnknownNameError(f"entry of a run in {path}", name, _KINDS)
        check_plain(f"{name} {where}", value, _KINDS[name], PlanError)
    for part in ("task", "algorithm"):
        if part in content and not isinstance(content[part].get("name"), str):
            raise PlanError(f'the table {part} {where} does not say which one: add name = "..." to it.')
    task = _task(content["task"]["name"]) if "task" in content else None
    own = {part: without_name(content.get(part, {})) for part in ("task", "algorithm")}
    if task is not None:
        made(task, own["task"])
    algorithm = discovery.algorithm(content["algorithm"]["name"]) if "algorithm" in content else None
    if algorithm is not None:
        made(algorithm, own["algorithm"])
    options = content.get("options", {})
    check_options(keywords(options))
    if algorithm is not None and not issubclass(algorithm, PeerAlgorithm):
        for name in BETWEEN_PEERS:
            if name in options:
                raise PlanError(
                    f"options.{name} {where} is for algorithms between peers, and {algorithm.name()} has a server: leave it out."
                )
    tuples = {
        f"{part}_settings": {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        for part, values in own.items()
    }
    names = [None if kind is None else kind.name() for kind in (task, algorithm)]
    plan = {name: content[name] for name in PLAN if name in content}
    return Recipe(names[0], names[1], **tuples, plan=plan, options=options, log=tuple(content.get("log", ())))


def _task(name: str) -> type[Task]:
    try:
        return discovery.task(name)
    except UnknownNameError:
        if Path(f"{name}.py").is_file():
            raise PlanError(
                f"the task {name} is not installed, but {name}.py is here: run pip install -e . in the folder of its project."
            ) from None
        raise


def written(
    task: Task, algorithm: Algorithm, plan: Mapping[str, Any], options: Mapping[str, Any], log: Sequence[str] = ()
) -> str:
    """The file of a run with these settings: all of them, so that it means the same when defaults and suggestions change. TOML has no word for nothing."""
    document = tomlkit.document()
    document.add(
        tomlkit.comment(
            "fedbilevel run --config THIS_FILE does this run again; flags take the place of what is written here."
        )
    )
    for name in PLAN:
        if plan.get(name) is not None:
            document.add(name, tomlkit.item(plan[name]))
    if log:
        document.add("log", tomlkit.item(list(log)))
    for part, owner in (("task", task), ("algorithm", algorithm)):
        document.add(part, tomlkit.item({"name": owner.name(), **_given(owner.asdict())}))
    among = {name: value for name, value in options.items() if name in DEFAULTS or name in BETWEEN_PEERS}
    document.add("options", tomlkit.item(_given(among)))
    return tomlkit.dumps(document)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    plain = {
        name: list(value) if isinstance(value, tuple) else _given(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
    }
    return {name: value for name, value in plain.items() if value is not None}


# ---- what the files of runs in one process, between sites and between peers have in common ---------------------------

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")  # becomes that of a folder


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
        raise PlanError(
            f"the name of the run is {content['name']!r}, expected letters, digits, '_' and '-', as it becomes that of a folder."
        )
    task, algorithm = discovery.task(content["task"]["name"]), discovery.algorithm(content["algorithm"]["name"])
    known_settings = {spec.name for spec in dataclasses.fields(algorithm)}
    suggested = {name: value for name, value in task.suggestions(algorithm.name()).items() if name in known_settings}
    options = dict(content.get("options") or {})
    for name in own:
        if name in options:
            raise PlanError(
                f"the plan sets {name}, which is each participant's own affair or means nothing here: leave it out."
            )
    if content["task"].get("data_dir"):  # some tasks say "" for nowhere
        raise PlanError(
            "the plan sets data_dir, but where data lie is each participant's own affair and does not travel: leave it out."
        )
    return {
        "name": content["name"],
        "num_iterations": content.get("num_iterations") or task.iterations(algorithm.name()),
        "task": {"name": task.name(), **_plain(made(task, without_name(content["task"])).asdict())},
        "algorithm": {
            "name": algorithm.name(),
            **_plain(made(algorithm, {**suggested, **without_name(content["algorithm"])}).asdict()),
        },
        "options": options,
        "measure_every": content.get("measure_every"),
        "num_classes": content.get("num_classes"),
    }


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise PlanError(f"{path} cannot be read ({error.strerror}): give the TOML file of a run.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} is not readable as TOML ({error}): mend it there.") from error


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
