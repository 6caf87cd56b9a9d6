"""The command line: thin. Here is what has to do with one run; other commands lie in the modules whose names end in _cli."""

from __future__ import annotations

import dataclasses
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import get_completion_class

from fedbilevel import discovery
from fedbilevel._version import __version__
from fedbilevel.checks import check_algorithm, check_hypergradient, check_problem
from fedbilevel.cli import operator, terminal
from fedbilevel.cli.data import data
from fedbilevel.cli.federation import federation
from fedbilevel.cli.flags import TaskCommand, chosen, fitting, names_of, with_looks, with_run_options
from fedbilevel.cli.new import new
from fedbilevel.cli.peer import peer
from fedbilevel.cli.report import report as report_page
from fedbilevel.cli.report import watch as watch_page
from fedbilevel.cli.studies import COMMANDS
from fedbilevel.engines import distributed, group_of
from fedbilevel.engines.ranks import Group
from fedbilevel.errors import CheckpointError, FedBilevelError, RankLostError, SettingError
from fedbilevel.escapes import printable
from fedbilevel.federation.algorithm import PeerAlgorithm
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.network import Network
from fedbilevel.report import tables
from fedbilevel.report.page import write_report
from fedbilevel.runs import logs
from fedbilevel.runs.loop import run
from fedbilevel.runs.options import DEFAULTS, keywords, torch_device
from fedbilevel.runs.record import Record
from fedbilevel.runs.result import Result
from fedbilevel.runs.runfile import PLAN, Recipe, written
from fedbilevel.runs.step_sizes import check_timescales, suggest
from fedbilevel.tasks.task import Task

ENGINE_OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "--engine",
        type=click.Choice(["simulation", "distributed"]),
        default=None,
        help="all clients in this process, or divided among those that torchrun started (default: distributed under torchrun)",
    ),
    click.option(
        "--timeout",
        type=float,
        default=distributed.TIMEOUT,
        show_default=True,
        help="seconds after which a rank that does not answer is given up",
    ),
]


def _log_option(help: str) -> Callable[[Any], Any]:
    return click.option("--log", "log", multiple=True, type=click.Choice(list(logs.LOGS)), help=help)


def with_engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(ENGINE_OPTIONS):
        command = option(command)
    return command


def _group(engine: Any, device: str, timeout: float) -> Group:
    """The processes of this command: all that torchrun started, which would otherwise write the same record each for itself."""
    several = os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")
    if engine == "simulation" and several:
        raise SettingError(
            "torchrun started several processes, and the engine 'simulation' is one: leave out torchrun, or use --engine distributed."
        )
    return group_of(engine or ("distributed" if several else "simulation"), torch_device(device), timeout)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 140})
@click.version_option(__version__, prog_name="fedbilevel")
def cli() -> None:
    """Federated bilevel optimisation: clean labels, tune hyper-parameters, learn representations across clients that share no data."""


@cli.command("run", cls=TaskCommand)
@click.argument("task", required=False, shell_complete=names_of(discovery.tasks))
@click.option(
    "--algorithm",
    "-a",
    default=None,
    help="name of an algorithm (see: fedbilevel list)",
    shell_complete=names_of(discovery.algorithms),
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    default=None,
    help="a whole run as a TOML file, e.g. run.toml of a record; flags come before it",
)
@click.option(
    "--rounds", type=int, default=None, help="end at so many communication rounds, with --iterations or instead of it"
)
@with_looks
@click.option(
    "--check-steps",
    is_flag=True,
    help="estimate curvatures first and warn if lr_upper is too long against lr_lower and lr_system",
)
@_log_option("also write every measurement into such a log in the folder of the record; may be given several times")
@with_engine_options
@with_run_options
@click.pass_context
def run_command(
    ctx: click.Context,
    /,
    task: str | None,
    algorithm: str | None,
    check_steps: bool,
    engine: str | None,
    timeout: float,
    log: tuple[str, ...],
    **values: Any,
) -> None:
    """Run an algorithm on a TASK. Name both and add --help to see their flags, with their symbols."""
    recipe: Recipe = ctx.meta["recipe"] or Recipe()
    task, algorithm = task or recipe.task, algorithm or recipe.algorithm
    if not task or not algorithm:
        missing = "task, e.g. fedbilevel run data_cleaning" if not task else "algorithm, e.g. --algorithm fedbio"
        raise SettingError(
            f"there is no {missing}: name it, or give a whole run by --config FILE (fedbilevel list says what there is)."
        )
    kind, method = discovery.task(task), discovery.algorithm(algorithm)
    theirs, own = (
        (recipe.task_settings if task == recipe.task else {}),
        (recipe.algorithm_settings if algorithm == recipe.algorithm else {}),
    )
    chosen_task = chosen(kind, values, dict(theirs))
    settings = chosen(method, values, {**kind.suggestions(algorithm), **own})
    if check_steps:
        check_timescales(settings, *chosen_task.build())
    written_there = {
        name: value
        for name, value in {**recipe.options, **recipe.plan}.items()
        if ctx.get_parameter_source(name) is ParameterSource.DEFAULT
    }
    given = {**values, **written_there}
    options = {name: given[name] for name in DEFAULTS}
    if isinstance(settings, PeerAlgorithm):
        network = chosen(
            Network, values, {**kind.suggestions("network"), **recipe.options.get("network", {})}, "network"
        )
        averaging = chosen(
            Averaging,
            values,
            {**fitting(network, kind.suggestions("averaging")), **recipe.options.get("averaging", {})},
            "averaging",
        )
        options |= {"network": network.asdict(), "averaging": averaging.asdict()}
    plan = {name: given[name] for name in PLAN}
    if plan["iterations"] is None and plan["rounds"] is None:
        plan["iterations"] = kind.iterations(algorithm)
    group = _group(engine, options["device"], timeout)
    folder = Path(group.told(lambda: str(values["out"] or terminal.new_folder(f"{task}-{algorithm}"))))
    _go(chosen_task, settings, plan, options, folder, group=group, timeout=timeout, log=log or recipe.log)


@cli.command("resume")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--iterations", type=int, default=None, help="outer iterations in all (default: as planned)")
@click.option(
    "--rounds",
    type=int,
    default=None,
    help="communication rounds in all; if one of the two is given, the other no longer counts",
)
@_log_option("go on with these logs (default: those that the run was started with)")
@with_engine_options
def resume_command(
    path: Path, iterations: int | None, rounds: int | None, engine: str | None, timeout: float, log: tuple[str, ...]
) -> None:
    """Go on with the run recorded in the folder PATH, from its last checkpoint. It need not be the engine that began it, nor as many ranks."""
    group = _group(engine, "cpu", timeout)
    with group.together():
        config = group.told(Record(path).read_config)
    if config.get("engine") == "federation":
        raise CheckpointError(
            f"{path} is the server's part of a run between sites: go on with it by fedbilevel federation resume {path.name} --kit KIT."
        )
    if config.get("engine") == "peers":
        how = (
            "it was collected from those of several peers"
            if "collected" in config
            else "it is one peer's part of a run between peers"
        )
        raise CheckpointError(
            f"{path} cannot be gone on with alone, as {how}: start the peers again with fedbilevel peer run PLAN, each with its own record."
        )
    try:
        task_name, task_settings, plan = config["task"], config["task_settings"], dict(config["run"])
        options = {**DEFAULTS, **config["options"]}
        name, settings = config["identity"]["algorithm"], config["identity"]["settings"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} holds a run that was not started on the command line ({error!r}): resume it from Python with run(..., record=..., resume=True)."
        ) from None
    task, algorithm = _rebuilt(discovery.task(task_name), task_settings), _rebuilt(discovery.algorithm(name), settings)
    before = {name: plan.get(recorded) for name, recorded in _RECORDED.items()}
    before |= {name: bool(before[name]) for name in ("residuals", "stationarity")}
    if iterations is not None or rounds is not None:
        before |= {"iterations": iterations, "rounds": rounds}
    elif before["iterations"] == before["rounds"]:  # nobody gave the first
        before["iterations"] = None
    _go(
        task,
        algorithm,
        before,
        options,
        path,
        resume=True,
        group=_group(engine, options["device"], timeout),
        timeout=timeout,
        log=log or tuple(config.get("log", ())),
    )


@cli.command("demo")
@click.option("--seed", type=int, default=0, show_default=True, help="seed of the split, the noise and the runs")
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="folder of the record (default: a new one under runs/)"
)
def demo_command(seed: int, out: Path | None) -> None:
    """Ten clients clean each other's noisy labels without sharing data."""
    kind = discovery.task("data_cleaning")
    task: Any = kind(data_seed=seed)  # type: ignore[call-arg]
    folder = out or terminal.new_folder("demo")
    terminal.console.print(
        f"Ten clients hold handwritten digits; {task.noise:.0%} of the training labels are wrong. Each has {task.num_clean} clean images of a single class."
    )
    terminal.console.print(
        "FedAvg trains on the labels as they are. The others learn a weight for every sample; the weights never leave their client.\n"
    )
    outcomes = {}
    for name in ("fedavg", "fedbio", "fednest", "fbo_aggitd"):
        settings = chosen(discovery.algorithm(name), {}, kind.suggestions(name))
        options = DEFAULTS | {"seed": seed}
        plan = {"iterations": kind.iterations(name), "checkpoint_every": 50, "residuals": True}
        outcomes[name] = _go(task, settings, plan, options, folder / name, quiet=True)
        if outcomes[name].stopped == "interrupted":
            sys.exit(130)
    terminal.console.print(
        tables.outcomes(
            "Label cleaning on embedded digits",
            {name: result.rows[-1] for name, result in outcomes.items()},
            task.headline,
        )
    )
    terminal.console.print(
        tables.cleaning_sentence(
            outcomes["fedavg"].rows[-1],
            {name: result.rows[-1] for name, result in outcomes.items() if name != "fedavg"},
        )
    )
    page = write_report(
        [folder / name for name in outcomes], folder / "report.html", title="Label cleaning on embedded digits"
    )
    terminal.say(
        f"\nSaved in {folder} (settings, metrics, checkpoints, solutions). Curves, costs and the labels it found: open {page}"
    )


@cli.command("list")
def list_command() -> None:
    """All algorithms and tasks, each with its first line."""
    terminal.console.print(tables.names("Algorithms", discovery.algorithms()))
    terminal.console.print(tables.names("Tasks", discovery.tasks()))
    terminal.console.print("Flags of one: fedbilevel run TASK --algorithm NAME --help")


@cli.command("check", cls=TaskCommand)
@click.argument("task")
@click.option(
    "--algorithm",
    "-a",
    default=None,
    help="also check the contract of this algorithm, and its estimate of the hypergradient where it has one",
)
@click.option(
    "--steps",
    is_flag=True,
    help="also estimate curvatures and say which steps are safe for single-loop methods (slower)",
)
def check_command(task: str, algorithm: str | None, steps: bool, **values: Any) -> None:
    """Compare every way to the hypergradient of a TASK with the exact value and with finite differences, in float64."""
    kind = discovery.task(task)
    built = chosen(kind, values, {}).build()
    reports = [check_problem(built.problem, built.clients, show=False)]
    estimators: list[Any] = ["cg", "neumann", "fixed_point"]
    if algorithm is not None:
        settings = chosen(discovery.algorithm(algorithm), values, kind.suggestions(algorithm))
        reports.append(check_algorithm(settings, show=False))
        estimators += [settings] if hasattr(settings, "estimate") else []
    reports.append(check_hypergradient(built.problem, built.clients, estimators=estimators, show=False))
    for one in reports:
        terminal.say(str(one))
    if steps:
        found = ", ".join(f"{name} {value:.3g}" for name, value in suggest(built.problem, built.clients).items())
        terminal.say(f"Safe steps for single-loop methods, from the curvatures at the initial point: {found}.")
    sys.exit(0 if all(one.ok for one in reports) else 1)


@cli.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print what makes SHELL complete commands, flags, tasks and algorithms, e.g.: eval "$(fedbilevel completion bash)"."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "fedbilevel", "_FEDBILEVEL_COMPLETE").source())


for command in (*COMMANDS, federation, peer, new, report_page, watch_page, data):
    cli.add_command(command)
for command in operator.COMMANDS:  # those of a site's operator
    federation.add_command(command)


_RECORDED = {
    "iterations": "num_iterations",
    "rounds": "num_rounds",
    "measure_every": "measure_every",
    "checkpoint_every": "checkpoint_every",
    "residuals": "residuals",
    "stationarity": "stationarity",
}  # what a plan is called on the command line, and as arguments of `run`


def _go(task: Task, algorithm: Any, plan: dict[str, Any], options: dict[str, Any], folder: Path, *, resume: bool = False, quiet: bool = False,
        group: Group = Group(), timeout: float = distributed.TIMEOUT, log: Sequence[str] = ()) -> Result:  # fmt: skip
    chosen_options = keywords(options)
    with group.together():
        followers = [logs.make(name, folder) for name in dict.fromkeys(log)]
        problem, clients = task.build()
        clients = group.only(clients)
    with terminal.Bar(algorithm.name(), task.headline) as callback:
        try:
            result = run(
                algorithm,
                problem,
                clients,
                **{_RECORDED[name]: value for name, value in plan.items()},
                record=folder,
                resume=resume,
                callbacks=[callback, *followers],
                **chosen_options,
                engine=group.engine,
                timeout=timeout,
                describe={
                    "task": task.name(),
                    "task_settings": task.asdict(),
                    "headline": list(task.headline),
                    "options": options,
                    **({"log": list(log)} if log else {}),
                },
                recipe=written(task, algorithm, plan, options, log),
            )
        except KeyboardInterrupt:
            kept = Record(folder).checkpoint.exists()
            terminal.say(
                f"Stopped at once. The last checkpoint is kept: fedbilevel resume {folder}"
                if kept
                else "Stopped before anything was saved."
            )
            sys.exit(130)
    found = (
        task.findings(problem, clients, result) if group.size == 1 and result.stopped != "interrupted" else []
    )  # a rank has only its own clients
    if found:
        Record(folder).write_findings(found)
    if result.stopped == "interrupted":
        terminal.say(f"Stopped after outer iteration {result.iteration}. To go on: fedbilevel resume {folder}")
        if not quiet:
            sys.exit(130)
    elif not quiet:
        terminal.console.print(
            tables.outcomes(
                f"{task.name()}, {result.iteration} outer iterations",
                {algorithm.name(): result.rows[-1]},
                task.headline,
            )
        )
        terminal.say(f"Saved in {folder}")
    return result


def _rebuilt(kind: type[Any], stored: dict[str, Any]) -> Any:
    """Settings as they were recorded; a name that no longer exists is an error that says so."""
    known = {spec.name for spec in dataclasses.fields(kind)}
    unknown = sorted(set(stored) - known)
    if unknown:
        raise CheckpointError(
            f"the recorded setting {unknown[0]!r} is unknown to this version of {kind.name()}: resume with the version that wrote it."
        )
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()})


def main() -> None:
    """No traceback for what a user can mend. Of several ranks, the first speaks."""
    first = os.environ.get("WORLD_SIZE", "1") in ("", "0", "1") or os.environ.get("RANK", "0") == "0"
    terminal.console.quiet = not first
    sys.excepthook = lambda *what: print(
        printable("".join(traceback.format_exception(*what)), lines=True), end="", file=sys.stderr
    )
    warnings.showwarning = lambda message, *_args, **_kwargs: (
        terminal.complain(f"Warning: {message}") if first else None
    )
    try:
        if first:
            cli.main(standalone_mode=True)
        else:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                cli.main(standalone_mode=True)
    except RankLostError as error:
        if error.speaks:
            terminal.complain(f"Error: {error}")
        sys.stderr.flush()
        os._exit(2)  # nothing is left to be written, and an exchange that never ends must not hold this process
    except FedBilevelError as error:
        if first:
            terminal.complain(f"Error: {error}")
        sys.exit(2)
