"""`fedbilevel run` and `resume`: one run at a time."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fedbilevel import discovery
from fedbilevel.cleaning.parts import Parts
from fedbilevel.cli import terminal
from fedbilevel.cli.flags import TaskCommand, chosen, fitting, names_of, with_looks, with_run_options
from fedbilevel.engines import distributed, group_of
from fedbilevel.engines.ranks import Group
from fedbilevel.errors import CheckpointError, SettingError
from fedbilevel.federation.algorithm import PeerAlgorithm
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.network import Network
from fedbilevel.report import tables
from fedbilevel.runs import logs
from fedbilevel.runs.baseline import unseen_roles
from fedbilevel.runs.choice import Choice
from fedbilevel.runs.options import DEFAULTS, WITH_BOTH, WITH_SERVER, keywords, torch_device
from fedbilevel.runs.record import Record
from fedbilevel.runs.result import Result
from fedbilevel.runs.runfile import PLAN, RunFile, written
from fedbilevel.runs.solve import solve
from fedbilevel.settings import Settings
from fedbilevel.tasks.task import Task

ENGINE_OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "--engine",
        type=click.Choice(["simulation", "distributed"]),
        default=None,
        help="all clients in this process, or divided among the processes of torchrun (default: distributed under "
        "torchrun)",
    ),
    click.option(
        "--timeout",
        type=float,
        default=distributed.TIMEOUT,
        show_default=True,
        help="seconds without a response after which a rank counts as lost",
    ),
]


def _log_option(help: str) -> Callable[[Any], Any]:
    return click.option("--log", "log", multiple=True, type=click.Choice(list(logs.LOGS)), help=help)


def with_engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(ENGINE_OPTIONS):
        command = option(command)
    return command


def group_for(engine: Any, device: str, timeout: float) -> Group:
    """Return the group of all processes of torchrun, of which only one writes the record."""
    several = os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")
    if engine == "simulation" and several:
        raise SettingError(
            "torchrun started several processes, and the engine 'simulation' needs one: leave out torchrun, "
            "or use --engine distributed."
        )
    return group_of(engine or ("distributed" if several else "simulation"), torch_device(device), timeout)


@click.command("run", cls=TaskCommand)
@click.argument("task", required=False, shell_complete=names_of(discovery.tasks))
@click.option(
    "--algorithm",
    "-a",
    default=None,
    help="name of an algorithm (see: fedbilevel list; default: auto, which needs no settings)",
    shell_complete=names_of(discovery.algorithms),
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    default=None,
    help="TOML file of the run, e.g. run.toml of a record; flags replace its values",
)
@click.option(
    "--num-rounds",
    type=int,
    default=None,
    help="end at this number of communication rounds; may be combined with --num-iterations",
)
@with_looks
@_log_option("also write every measurement to this log in the folder of the record; may be repeated")
@with_engine_options
@with_run_options
@click.pass_context
def run_command(
    ctx: click.Context,
    /,
    task: str | None,
    algorithm: str | None,
    engine: str | None,
    timeout: float,
    log: tuple[str, ...],
    baseline: bool | None,
    **values: Any,
) -> None:
    """Run an algorithm on a TASK. Name both and add --help to see their flags and symbols."""
    file: RunFile = ctx.meta["run_file"] or RunFile()
    task = task or file.task
    if not task:
        raise SettingError(
            "there is no task, e.g. fedbilevel run data_cleaning: name it, or give a file by --config FILE "
            "(fedbilevel list shows all names)."
        )
    choice: Choice = ctx.meta["choice"]
    kind, method = discovery.task(task), discovery.algorithm(choice.name)
    chosen_task = chosen(kind, values, dict(file.task_settings) if task == file.task else {})
    own = file.algorithm_settings if algorithm in (None, file.algorithm) else {}
    settings = chosen(method, values, {**kind.suggestions(choice.name), **choice.settings, **own})
    in_file = {
        name: value
        for name, value in {**file.options, **file.plan}.items()
        if ctx.get_parameter_source(name) is ParameterSource.DEFAULT
    }
    given = {**values, **in_file}
    options = {name: given[name] for name in DEFAULTS}
    if isinstance(settings, PeerAlgorithm):
        options |= _between_peers(kind, values, file)
    else:
        options |= _if_given(WITH_SERVER, values, file)
    options |= _if_given(WITH_BOTH, values, file)
    plan = {name: given[name] for name in PLAN}
    if plan["num_iterations"] is None and plan["num_rounds"] is None:
        plan["num_iterations"] = kind.iterations(choice.name)
    group = group_for(engine, options["device"], timeout)
    if group.rank == 0:
        choice.say()
    folder = Path(group.told(lambda: str(values["out"] or terminal.new_folder(f"{task}-{choice.name}"))))
    _go(
        chosen_task, settings, plan, options, folder, group=group, timeout=timeout, log=log or file.log,
        baseline=baseline,
    )  # fmt: skip


def _between_peers(kind: type[Task], values: dict[str, Any], file: RunFile) -> dict[str, Any]:
    """Return network and averaging from flags, else from the file, else as the task suggests."""
    links = {**kind.suggestions("network"), **file.options.get("network", {})}
    network = chosen(Network, values, links, "network")
    means = {**fitting(network, kind.suggestions("averaging")), **file.options.get("averaging", {})}
    averaging = chosen(Averaging, values, means, "averaging")
    return {"network": network.asdict(), "averaging": averaging.asdict()}


def _if_given(tables: dict[str, type[Settings]], values: dict[str, Any], file: RunFile) -> dict[str, Any]:
    """Return tables of options from flags, else from the file; omitted ones are not used."""
    found = {}
    for name, owner in tables.items():
        one = chosen(owner, values, dict(file.options.get(name, {})), name)
        if name in file.options or one != owner():
            found[name] = one.asdict()
    return found


@click.command("resume")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--num-iterations", type=int, default=None, help="outer iterations in total (default: as planned)")
@click.option(
    "--num-rounds",
    type=int,
    default=None,
    help="communication rounds in total; if you give only one of the two limits, the other is dropped",
)
@_log_option("continue these logs (default: the logs of the run)")
@with_engine_options
def resume_command(
    path: Path,
    num_iterations: int | None,
    num_rounds: int | None,
    engine: str | None,
    timeout: float,
    log: tuple[str, ...],
) -> None:
    """Resume the run in the folder PATH from its last checkpoint.

    The engine and the number of ranks may differ from those of the first part.
    """
    group = group_for(engine, "cpu", timeout)
    with group.together():
        config = group.told(lambda: _config(path))
    _check_whole(path, config)
    try:
        task_name, task_settings, recorded = config["task"], config["task_settings"], dict(config["run"])
        options = {**DEFAULTS, **config["options"]}
        name, settings = config["identity"]["algorithm"], config["identity"]["settings"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} holds a run that was not started on the command line ({error!r}): resume it from Python "
            "with solve(..., record=..., resume=True)."
        ) from None
    task, algorithm = _rebuilt(discovery.task(task_name), task_settings), _rebuilt(discovery.algorithm(name), settings)
    plan = {name: recorded[name] for name in PLAN if name in recorded}
    if num_iterations is not None or num_rounds is not None:
        plan |= {"num_iterations": num_iterations, "num_rounds": num_rounds}
    elif plan["num_iterations"] == plan.get("num_rounds"):  # only num_rounds was given
        plan["num_iterations"] = None
    _go(
        task,
        algorithm,
        plan,
        options,
        path,
        resume=True,
        group=group_for(engine, options["device"], timeout),
        timeout=timeout,
        log=log or tuple(config.get("log", ())),
        baseline=config.get("baseline") is True,
    )


def _config(path: Path) -> dict[str, Any]:
    if Parts(record=path).alone:
        raise CheckpointError(
            f"{path} holds networks of a cleaning whose detector has not begun: repeat the command of the cleaning, "
            f"with --out {path} --resume."
        )
    return Record(path).read_config()


def _check_whole(path: Path, config: dict[str, Any]) -> None:
    """Refuse a record that holds only a part of a run."""
    if config.get("engine") == "federation":
        raise CheckpointError(
            f"{path} is the server's part of a run between sites: resume it by fedbilevel federation resume "
            f"{path.name} --kit KIT."
        )
    if "cleaning" in config:
        if "command" in config:
            how = f"which has a command of its own: use {config['command']}"
        else:
            how = "which was started from Python: use clean_labels(..., record=..., resume=True) there"
        raise CheckpointError(f"{path} holds a cleaning of labels, {how}.")
    if config.get("engine") == "peers":
        how = "was collected from several peers" if "collected" in config else "belongs to one of several peers"
        raise CheckpointError(
            f"{path} {how} and cannot be resumed alone: start the peers again with fedbilevel peer run PLAN, "
            "each with its own record."
        )


def _go(
    task: Task,
    algorithm: Any,
    plan: dict[str, Any],
    options: dict[str, Any],
    folder: Path,
    *,
    resume: bool = False,
    quiet: bool = False,
    group: Group = Group(),
    timeout: float = distributed.TIMEOUT,
    log: Sequence[str] = (),
    baseline: bool | None = False,
) -> Result:
    with group.together():
        followers = [logs.make(name, folder) for name in dict.fromkeys(log)]
        problem, clients = task.build()
        clients = group.only(clients)
    if baseline is None:
        baseline = group.size == 1 and algorithm.learns_x and bool(unseen_roles(problem))
    with terminal.Bar(algorithm.name(), task.headline) as callback:
        try:
            result = solve(
                problem,
                clients,
                algorithm,
                **plan,
                record=folder,
                resume=resume,
                callbacks=[callback, *followers],
                **keywords(options),
                engine=group.engine,
                timeout=timeout,
                baseline=baseline,
                describe={
                    "task": task.name(),
                    "task_settings": task.asdict(),
                    "headline": list(task.headline),
                    "options": options,
                    **({"log": list(log)} if log else {}),
                },
                run_file=written(task, algorithm, plan, options, log),
            )
        except KeyboardInterrupt:
            terminal.say(
                f"Stopped at once. To resume from the last checkpoint: fedbilevel resume {folder}"
                if Record(folder).checkpoint.exists()
                else "Stopped before anything was saved."
            )
            sys.exit(130)
    whole = group.size == 1 and result.stopped != "interrupted"  # a rank has only its own clients
    found = task.findings(problem, clients, result) if whole else []
    if found:
        Record(folder).write_findings(found)
    _say_end(task, result, folder, quiet)
    return result


def _say_end(task: Task, result: Result, folder: Path, quiet: bool) -> None:
    if result.stopped == "interrupted":
        terminal.say(f"Stopped after outer iteration {result.iteration}. To resume: fedbilevel resume {folder}")
        if not quiet:
            sys.exit(130)
    elif not quiet:
        end = "" if result.ending.state == "finished" else f", {result.ending.state}"
        title = f"{task.name()}, {result.iteration} outer iterations{end}"
        terminal.console.print(tables.outcomes(title, {result.name: result.final}, task.headline))
        if result.baseline is not None:
            sentence, costs = result.baseline.sentence, result.baseline.costs
            spent = f"{costs['rounds']} rounds and {(costs['bytes_up'] + costs['bytes_down']) / 1e6:.3g} MB of its own"
            terminal.say(f"{sentence[:1].upper()}{sentence[1:]}. The run with x fixed at x0 took {spent}.")
        terminal.say(f"Saved in {folder}")
        if result.stopped == "failed":
            sys.exit(1)


def _rebuilt(kind: type[Any], stored: dict[str, Any]) -> Any:
    """Build recorded settings; raise CheckpointError for a setting that no longer exists."""
    known = {spec.name for spec in dataclasses.fields(kind)}
    unknown = sorted(set(stored) - known)
    if unknown:
        raise CheckpointError(
            f"the recorded setting {unknown[0]!r} is unknown to this version of {kind.name()}: resume with the "
            "version that wrote it."
        )
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()})
