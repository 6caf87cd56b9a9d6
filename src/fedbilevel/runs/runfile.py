"""A run as a TOML file: in one process, between sites, between peers, or as a row of an experiment.

All kinds of runs use the same keys with the same meanings. A file may be used for any kind: keys
without a meaning for this kind are ignored with a warning, and unknown keys are refused. Every run
from the command line writes its own file into its record, as run.toml.

    name = "cleaning"            # name of the run and of its folders (sites, peers)
    num_iterations = 400         # outer iterations; the task suggests an omitted number
    num_rounds = 500             # end at this number of communication rounds (not between peers)
    measure_every = 20           # outer iterations between measurements; omit it for about twenty
    measure_growth = 0.05        # let that distance grow to this share of the iterations done
    checkpoint_every = 10
    log = ["tensorboard"]        # logs besides the record
    residuals = true             # also measure how far y and u are from solving their equations
    stationarity = false         # also measure the norm of the hypergradient (slow)
    [task]                       # name and settings; omitted settings have their defaults
    [algorithm]                  # name and settings; the task suggests omitted settings; without
                                 # this table or with the name "auto", see runs/choice.py
    [options]                    # seed, fraction, batch_size, dtype, ...: see runs/options.py
    [options.network]            # links between peers
    [options.averaging]          # averages between peers
    [aggregation]                # what happens to rows that clients or peers send; a short
                                 # form of [options.aggregation]
    [options.attack]             # simulated clients that attack

Keys of sites are described in sites/plan.py, keys of peers in peers/plan.py.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import tomlkit

from fedbilevel import discovery
from fedbilevel.detectors.detector import Detector
from fedbilevel.errors import IgnoredWarning, PlanError, UnknownNameError
from fedbilevel.federation.algorithm import Algorithm, PeerAlgorithm
from fedbilevel.federation.clients import Sampling
from fedbilevel.oracle.oracle import Strategy
from fedbilevel.oracle.precision import Precision
from fedbilevel.runs.choice import choose
from fedbilevel.runs.options import BETWEEN_PEERS, DEFAULTS, TABLES, WITH_SERVER, keywords
from fedbilevel.settings import AUTO, check_plain, made
from fedbilevel.tasks.task import Task

Place = Literal["process", "sites", "peers"]
_EVERYWHERE: tuple[Place, ...] = get_args(Place)
_CALLED = {"process": "a run in one process", "sites": "a run between sites", "peers": "a run between peers"}


class Key(NamedTuple):
    """A key of a run file.

    kind: kind of the value, see settings.PLAIN.
    places: kinds of runs for which the key has a meaning.
    """

    kind: str
    places: tuple[Place, ...]


KEYS: dict[str, Key] = {
    "name": Key("text", ("sites", "peers")),
    "num_iterations": Key("count", _EVERYWHERE),
    "num_rounds": Key("maybe", ("process", "sites")),
    "measure_every": Key("maybe", _EVERYWHERE),
    "measure_growth": Key("number", ("process",)),
    "checkpoint_every": Key("whole", ("process",)),
    "residuals": Key("flag", ("process",)),
    "stationarity": Key("flag", ("process",)),
    "log": Key("names", ("process",)),
    "num_classes": Key("maybe", ("sites", "peers")),
    "quorum": Key("maybe", ("sites", "peers")),
    "join_deadline": Key("number", ("sites", "peers")),
    "sites": Key("names", ("sites",)),
    "clients": Key("table", ("sites",)),
    "deadline": Key("number", ("sites",)),
    "patience": Key("number", ("sites",)),
    "approval_wait": Key("number", ("sites",)),
    "max_weight": Key("maybe", ("sites",)),
    "exclude_outliers": Key("flag", ("sites",)),
    "suspect": Key("number", ("peers",)),
    "on_change": Key("text", ("peers",)),
    "on_crash": Key("text", ("peers",)),
    "task": Key("table", _EVERYWHERE),
    "algorithm": Key("table", _EVERYWHERE),
    "options": Key("table", _EVERYWHERE),
    "aggregation": Key("table", _EVERYWHERE),
}
LENGTH = ("num_iterations", "num_rounds", "measure_every", "measure_growth", "checkpoint_every")
PLAN = (*LENGTH, "residuals", "stationarity")  # keys that `solve` takes under the same names
_UNEQUAL = ("slow", "slow_work", "dropout")  # of simulated clients
_OPTIONS_UNUSED: dict[Place, tuple[str, ...]] = {  # every participant chooses where and how it computes
    "process": (),
    "sites": ("device", "chunk_size", "precision", *_UNEQUAL, "attack", *BETWEEN_PEERS),
    "peers": ("device", "chunk_size", "precision", "fraction", "replacement", "redraw", *_UNEQUAL, "attack"),
}


@dataclass(frozen=True)
class RunFile:
    """The content of a run file, without defaults.

    task, algorithm: names only; task_settings and algorithm_settings hold the settings.
    """

    task: str | None = None
    algorithm: str | None = None
    task_settings: Mapping[str, Any] = field(default_factory=dict)
    algorithm_settings: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    log: tuple[str, ...] = ()


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise PlanError(f"{path} cannot be read ({error.strerror}): give the TOML file of a run.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} is not readable as TOML ({error}): fix it there.") from error


def check_keys(content: Any, where: str) -> None:
    """Refuse unknown keys, values of the wrong kind, and tables without a name."""
    if not isinstance(content, Mapping):
        raise PlanError(f"{where} is not a table, expected name, task and algorithm.")
    for name, value in content.items():
        if name not in KEYS:
            raise UnknownNameError(f"key in {where}", name, KEYS)
        if value is not None:
            check_plain(f"{name} of {where}", value, KEYS[name].kind, PlanError)
    for part in ("task", "algorithm"):
        if content.get(part) is not None and not isinstance(content[part].get("name"), str):
            raise PlanError(f'the table {part} of {where} has no name: add name = "..." to it.')


def used(content: Mapping[str, Any], place: Place, where: str) -> dict[str, Any]:
    """Remove the entries that have no meaning at `place`, with a warning."""
    check_keys(content, where)
    kept = {name: value for name, value in content.items() if place in KEYS[name].places}
    dropped = [name for name in content if name not in kept]
    options = content.get("options")
    if "aggregation" in kept:
        if "aggregation" in (options or {}):
            raise PlanError(f"{where} has aggregation and options.aggregation: keep one of the two tables.")
        options = {**(options or {}), "aggregation": kept.pop("aggregation")}
    if options:
        kept["options"] = {name: value for name, value in options.items() if name not in _OPTIONS_UNUSED[place]}
        dropped += [f"options.{name}" for name in options if name not in kept["options"]]
    if place != "process" and (content.get("task") or {}).get("data_dir"):  # "" says that a task needs no folder
        kept["task"] = {name: value for name, value in content["task"].items() if name != "data_dir"}
        dropped.append("task.data_dir")
    if dropped:
        warnings.warn(f"{_CALLED[place]} does not use {', '.join(dropped)} of {where}", IgnoredWarning, stacklevel=3)
    return kept


def read_run_file(path: Path) -> RunFile:
    """Read the file of a run in one process.

    All names and values are checked before flags replace any of them.
    """
    where = str(path)
    content = used(read_toml(path), "process", where)
    task = _task(content["task"]["name"]) if "task" in content else None
    options = content.get("options", {})
    between_peers = any(name in options for name in BETWEEN_PEERS)
    called = content["algorithm"]["name"] if "algorithm" in content else None
    algorithm = discovery.algorithm(choose(called, between_peers=between_peers).name) if called is not None else None
    own = {part: without_name(content.get(part, {})) for part in ("task", "algorithm")}
    for part, kind in (("task", task), ("algorithm", algorithm)):
        if kind is not None:
            made(kind, own[part])
    check_options(keywords(options))
    if algorithm is not None and not issubclass(algorithm, PeerAlgorithm):
        for name in BETWEEN_PEERS:
            if name in options:
                raise PlanError(
                    f"options.{name} in {where} is for algorithms between peers, and {algorithm.name()} has a server: "
                    "leave it out."
                )
    for name in WITH_SERVER:
        if name in options and algorithm is not None and issubclass(algorithm, PeerAlgorithm):
            raise PlanError(
                f"options.{name} in {where} is for algorithms with a server, and {algorithm.name()} has none: leave "
                "it out."
            )
    tuples = {
        f"{part}_settings": {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        for part, values in own.items()
    }
    plan = {name: content[name] for name in PLAN if name in content}
    named = None if task is None else task.name()
    return RunFile(named, called, **tuples, plan=plan, options=options, log=tuple(content.get("log", ())))


def _task(name: str) -> type[Task]:
    try:
        return discovery.task(name)
    except UnknownNameError:
        if Path(f"{name}.py").is_file():
            raise PlanError(
                f"the task {name} is not installed, but {name}.py is here: run pip install -e . in the folder "
                "of its project."
            ) from None
        raise


def written(
    task: Task,
    algorithm: Algorithm,
    plan: Mapping[str, Any],
    options: Mapping[str, Any],
    log: Sequence[str] = (),
    name: str | None = None,
) -> str:
    """Return the file of a run as text.

    The text states all settings, so that it describes the same run when defaults change.
    """
    document = tomlkit.document()
    document.add(
        tomlkit.comment("fedbilevel run --config THIS_FILE repeats this run; flags replace what is written here.")
    )
    if name is not None:
        document.add("name", tomlkit.item(name))
    for key in PLAN:
        if plan.get(key) is not None:
            document.add(key, tomlkit.item(plan[key]))
    if log:
        document.add("log", tomlkit.item(list(log)))
    for part, owner in (("task", task), ("algorithm", algorithm)):
        document.add(part, tomlkit.item({"name": owner.name(), **_given(owner.asdict())}))
    among = {key: value for key, value in options.items() if key in DEFAULTS or key in TABLES}
    document.add("options", tomlkit.item(_given(among)))
    return tomlkit.dumps(document)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Remove entries that are None, because TOML has no None."""
    plain = {
        name: list(value) if isinstance(value, tuple) else _given(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
    }
    return {name: value for name, value in plain.items() if value is not None}


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")  # becomes the name of a folder


def parts_of(content: Any, place: Place) -> dict[str, Any]:
    """Check the entries that a plan shares with all other runs, and fill in omitted entries.

    Entries that have no meaning at `place` are refused here; `used` removes them from a file.
    """
    check_keys(content, "the plan")
    for name in content:
        if place not in KEYS[name].places:
            raise PlanError(f"the plan sets {name}, which {_CALLED[place]} does not use: leave it out.")
    for name in ("task", "algorithm") if place == "peers" else ("task",):  # peers cannot measure steps
        if content.get(name) is None:
            raise PlanError(f"the plan has no {name}: give one.")
    named = content.get("algorithm") or {"name": AUTO}
    choice = choose(named["name"], between_peers=place == "peers")
    task, algorithm = discovery.task(content["task"]["name"]), discovery.algorithm(choice.name)
    name = content.get("name") or f"{task.name()}-{algorithm.name()}"
    if not NAME.fullmatch(name):
        raise PlanError(
            f"the name of the run is {name!r}, expected letters, digits, '_' and '-', because it becomes the name "
            "of a folder."
        )
    known_settings = {spec.name for spec in dataclasses.fields(algorithm)}
    suggested = {key: value for key, value in task.suggestions(algorithm.name()).items() if key in known_settings}
    options = dict(content.get("options") or {})
    for key in _OPTIONS_UNUSED[place]:
        if key in options:
            raise PlanError(f"the plan sets {key}, which is each participant's own choice: leave it out.")
    if content["task"].get("data_dir"):  # "" says that a task needs no folder
        raise PlanError("the plan sets data_dir, but each participant chooses where its data are: leave it out.")
    settings = made(algorithm, {**suggested, **choice.settings, **without_name(named)})
    return {
        "name": name,
        "num_iterations": _iterations(content, task, settings),
        "task": {"name": task.name(), **_plain(made(task, without_name(content["task"])).asdict())},
        "algorithm": {"name": algorithm.name(), **_plain(settings.asdict())},
        "options": options,
        "measure_every": content.get("measure_every"),
        "num_classes": content.get("num_classes"),
    }


def _iterations(content: Mapping[str, Any], task: type[Task], algorithm: Algorithm) -> int:
    """Return the number of outer iterations, by default the number of rounds.

    An outer iteration needs at least one round. Without both numbers, a detector has its own, and
    otherwise the task suggests one.
    """
    if content.get("num_iterations") is not None:
        check_plain("num_iterations of the plan", content["num_iterations"], "whole", PlanError)
    rounds = content.get("num_rounds")
    own = algorithm.num_iterations() if isinstance(algorithm, Detector) else None
    return content.get("num_iterations") or rounds or own or task.iterations(algorithm.name())


def check_seconds(plan: Any, names: Sequence[str]) -> None:
    for name in names:
        if not 0 < getattr(plan, name) < float("inf"):
            raise PlanError(f"{name} is {getattr(plan, name)}, expected seconds above 0.")


def check_options(options: Mapping[str, Any]) -> None:
    """Check options in the form that `solve` accepts."""
    options["cohort"].checked()
    options["schedule"].checked()
    known = {"sampling": get_args(Sampling), "strategy": get_args(Strategy), "precision": get_args(Precision)}
    for name, choices in known.items():
        if options[name] not in choices:
            raise PlanError(f"{name} of the plan is {options[name]!r}, expected {' or '.join(map(repr, choices))}.")


def without_name(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != "name"}


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
