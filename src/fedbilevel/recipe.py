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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit

from fedbilevel import discovery
from fedbilevel.errors import PlanError, UnknownNameError
from fedbilevel.federation import Algorithm, PeerAlgorithm
from fedbilevel.options import BETWEEN_PEERS, DEFAULTS, keywords
from fedbilevel.settings import check_plain, made
from fedbilevel.sites.plan import check_options, read_toml, without_name
from fedbilevel.tasks.task import Task

PLAN = {"iterations": "count", "rounds": "maybe", "measure_every": "maybe", "checkpoint_every": "whole", "residuals": "flag", "stationarity": "flag"}
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
                raise PlanError(f"options.{name} {where} is for algorithms between peers, and {algorithm.name()} has a server: leave it out.")
    tuples = {f"{part}_settings": {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()} for part, values in own.items()}
    names = [None if kind is None else kind.name() for kind in (task, algorithm)]
    plan = {name: content[name] for name in PLAN if name in content}
    return Recipe(names[0], names[1], **tuples, plan=plan, options=options, log=tuple(content.get("log", ())))


def _task(name: str) -> type[Task]:
    try:
        return discovery.task(name)
    except UnknownNameError:
        if Path(f"{name}.py").is_file():
            raise PlanError(f"the task {name} is not installed, but {name}.py is here: run pip install -e . in the folder of its project.") from None
        raise


def written(task: Task, algorithm: Algorithm, plan: Mapping[str, Any], options: Mapping[str, Any], log: Sequence[str] = ()) -> str:
    """The file of a run with these settings: all of them, so that it means the same when defaults and suggestions change. TOML has no word for nothing."""
    document = tomlkit.document()
    document.add(tomlkit.comment("fedbilevel run --config THIS_FILE does this run again; flags take the place of what is written here."))
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
    plain = {name: list(value) if isinstance(value, tuple) else _given(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    return {name: value for name, value in plain.items() if value is not None}
