"""The command line: thin. Flags come from the settings of the task and the algorithm that are named."""

from __future__ import annotations

import dataclasses
import io
import os
import sys
import typing
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import fedbilevel
from fedbilevel import discovery, experiment, influence, pictures, report, reproduce, tune
from fedbilevel.averaging import Averaging
from fedbilevel.checks import check_algorithm, check_hypergradient, check_problem
from fedbilevel.compare import Target, compare
from fedbilevel.data import catalogue, fetch, places
from fedbilevel.engines import distributed, group_of
from fedbilevel.engines.group import Group
from fedbilevel.errors import CheckpointError, DataError, FedBilevelError, RankLostError, SettingError, UnknownNameError
from fedbilevel.federation import Algorithm, PeerAlgorithm
from fedbilevel.federation_cli import federation
from fedbilevel.hypergradient import SOLVERS
from fedbilevel.network import Network
from fedbilevel.options import BETWEEN_PEERS, DEFAULTS, DTYPES, keywords, torch_device
from fedbilevel.oracle import Strategy
from fedbilevel.peer_cli import peer
from fedbilevel.personalisation import METHODS, NETWORKS, PAPER, Plan, personalise
from fedbilevel.record import Record
from fedbilevel.run import Progress as RunProgress
from fedbilevel.run import Result, run
from fedbilevel.settings import Settings, kinds
from fedbilevel.steps import check_timescales, suggest
from fedbilevel.tasks.influence import Influence
from fedbilevel.tasks.personalisation import Personalisation
from fedbilevel.tasks.task import Task

console = Console()
if not console.is_terminal:
    console = Console(width=120)  # a file or a pipe has no width of its own
complaints = Console(stderr=True)


# ---- flags from dataclass fields -----------------------------------------------------------------------------------------


def whole_numbers(text: str) -> int | tuple[int, ...]:
    """`3`, or `1,2,3` for one number per client."""
    try:
        numbers = tuple(int(part) for part in str(text).split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither a whole number nor several with commas between.") from None
    return numbers if len(numbers) > 1 else numbers[0]


class SettingOption(click.Option):
    """A flag that knows its section of the help page."""

    section = ""


def flag_name(name: str, prefix: str) -> str:
    """`--ring` would say little: settings of the network are --network-..., its kind is --network."""
    return name if not prefix else prefix if name == "kind" else f"{prefix}_{name}"


def flags(owner: type[Settings], section: str, suggested: dict[str, Any], prefix: str = "") -> list[SettingOption]:
    hints = typing.get_type_hints(owner)
    options = []
    for spec in dataclasses.fields(owner):
        name, choices = flag_name(spec.name, prefix).replace("_", "-"), [kind for kind in kinds(hints[spec.name]) if kind is not type(None)]
        symbol = f" [{spec.metadata['symbol']}]" if spec.metadata.get("symbol") else ""
        default = f"default {suggested[spec.name]} on this task" if spec.name in suggested else f"default {spec.default}"
        kind = choices[0]
        is_switch = kind is bool
        if typing.get_origin(kind) is Literal:
            type_: Any = click.Choice(typing.get_args(kind))
        elif len(choices) > 1:
            type_ = whole_numbers
        else:
            type_ = kind
        option = SettingOption(
            [f"--{name}/--no-{name}" if is_switch else f"--{name}", flag_name(spec.name, prefix)],
            default=None,
            type=bool if is_switch else type_,
            metavar="N|N,N,..." if type_ is whole_numbers else None,
            help=f"{spec.metadata.get('help', '')}{symbol} ({default})",
        )
        option.section = section
        options.append(option)
    return options


def chosen(owner: type[Settings], values: dict[str, Any], suggested: dict[str, Any], prefix: str = "") -> Any:
    """Settings: what the user gave, else what the task suggests, else the default."""
    names = {spec.name for spec in dataclasses.fields(owner)}
    flagged = {name: values.get(flag_name(name, prefix)) for name in names}
    given = {name: value for name, value in flagged.items() if value is not None}
    return owner(**{**{name: value for name, value in suggested.items() if name in names}, **given})


def fitting(network: Network, suggested: dict[str, Any]) -> dict[str, Any]:
    """What to suggest for the averaging: only the robust kind recovers what a network loses."""
    return {**suggested, **({"kind": "robust"} if network.faulty else {})}


class TaskCommand(click.Command):
    """Reads the names of the task and the algorithm first, then adds their flags."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = discovery.tasks()
        names = [arg for i, arg in enumerate(args) if not arg.startswith("-") and (i == 0 or arg in known)]
        if names:
            task, found = discovery.task(names[0]), _algorithm_named(args)
            theirs = flags(found, f"Algorithm {found.name()}", task.suggestions(found.name())) if found else []
            if found and issubclass(found, PeerAlgorithm) and self.name == "run":  # check has networks of its own
                theirs += [option for name, kind in BETWEEN_PEERS.items() for option in flags(kind, name.capitalize(), task.suggestions(name), name)]
            ctx.meta["settings"] = [*flags(task, f"Task {names[0]}", {}), *theirs]
        return super().parse_args(ctx, args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *ctx.meta.get("settings", [])]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            entry = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if entry is not None:
                sections.setdefault(getattr(param, "section", "") or "Options", []).append(entry)
        for title, entries in sections.items():
            with formatter.section(title):
                formatter.write_dl(entries)


def _algorithm_named(args: Sequence[str]) -> type[Algorithm] | None:
    for i, arg in enumerate(args):
        if arg in ("--algorithm", "-a") and i + 1 < len(args):
            return discovery.algorithm(args[i + 1])
        if arg.startswith("--algorithm="):
            return discovery.algorithm(arg.removeprefix("--algorithm="))
    return None


RUN_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--iterations", type=int, default=None, help="outer iterations (default: what the task suggests)"),
    click.option("--seed", type=int, default=DEFAULTS["seed"], show_default=True, help="seed of everything the run draws"),
    click.option("--fraction", type=float, default=DEFAULTS["fraction"], show_default=True, help="share of the clients in a cohort"),
    click.option("--replacement/--no-replacement", default=DEFAULTS["replacement"], help="draw cohorts with replacement"),
    click.option(
        "--redraw", type=click.Choice(["per_factor", "per_iteration"]), default=DEFAULTS["redraw"], show_default=True, help="when a new cohort is drawn"
    ),
    click.option(
        "--schedule-power",
        type=float,
        default=DEFAULTS["schedule_power"],
        show_default=True,
        help="steps fall like (offset + t)^-power over outer iterations t; 0: constant",
    ),
    click.option("--schedule-offset", type=float, default=DEFAULTS["schedule_offset"], show_default=True, help="offset of the schedule"),
    click.option("--batch-size", type=int, default=None, help="samples per minibatch (default: all of a client's samples)"),
    click.option(
        "--sampling",
        type=click.Choice(["replacement", "epochs"]),
        default=DEFAULTS["sampling"],
        show_default=True,
        help="minibatches: each sample drawn from all, or one pass after the other through a shuffled order",
    ),
    click.option("--dtype", type=click.Choice(list(DTYPES)), default=DEFAULTS["dtype"], show_default=True),
    click.option("--device", default=DEFAULTS["device"], show_default=True, help="cpu, cuda or cuda:1"),
    click.option(
        "--strategy", type=click.Choice(get_args(Strategy)), default=DEFAULTS["strategy"], show_default=True, help="how clients are evaluated at once"
    ),
    click.option("--chunk-size", type=int, default=None, help="clients evaluated at once under vmap (default: as many as fit a memory budget)"),
    click.option("--measure-every", type=int, default=None, help="outer iterations between measurements"),
    click.option("--checkpoint-every", type=int, default=10, show_default=True, help="outer iterations between checkpoints"),
    click.option("--out", type=click.Path(path_type=Path), default=None, help="folder of the record (default: a new one under runs/)"),
]


ENGINE_OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "--engine",
        type=click.Choice(["simulation", "distributed"]),
        default=None,
        help="all clients in this process, or divided among those that torchrun started (default: distributed under torchrun)",
    ),
    click.option("--timeout", type=float, default=distributed.TIMEOUT, show_default=True, help="seconds after which a rank that does not answer is given up"),
]


def with_engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(ENGINE_OPTIONS):
        command = option(command)
    return command


def _group(engine: Any, device: str, timeout: float) -> Group:
    """The processes of this command: all that torchrun started, which would otherwise write the same record each for itself."""
    several = os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")
    if engine == "simulation" and several:
        raise SettingError("torchrun started several processes, and the engine 'simulation' is one: leave out torchrun, or use --engine distributed.")
    return group_of(engine or ("distributed" if several else "simulation"), torch_device(device), timeout)


def with_run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(RUN_OPTIONS):
        command = option(command)
    return command


# ---- commands --------------------------------------------------------------------------------------------------------------


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 140})
@click.version_option(fedbilevel.__version__, prog_name="fedbilevel")
def cli() -> None:
    """Federated bilevel optimisation: clean labels, tune hyper-parameters, learn representations across clients that share no data."""


@cli.command("run", cls=TaskCommand)
@click.argument("task")
@click.option("--algorithm", "-a", required=True, help="name of an algorithm (see: fedbilevel list)")
@click.option("--check-steps", is_flag=True, help="estimate curvatures first and warn if lr_upper is too long against lr_lower and lr_system")
@with_engine_options
@with_run_options
def run_command(task: str, algorithm: str, check_steps: bool, engine: str | None, timeout: float, **values: Any) -> None:
    """Run an algorithm on a TASK. Name both and add --help to see their flags, with the symbols of the papers."""
    kind, method = discovery.task(task), discovery.algorithm(algorithm)
    chosen_task = chosen(kind, values, {})
    settings = chosen(method, values, kind.suggestions(algorithm))
    iterations = values["iterations"] if values["iterations"] is not None else kind.iterations(algorithm)
    if check_steps:
        check_timescales(settings, *chosen_task.build())
    options = {name: values[name] for name in DEFAULTS}
    if isinstance(settings, PeerAlgorithm):
        network = chosen(Network, values, kind.suggestions("network"), "network")
        averaging = chosen(Averaging, values, fitting(network, kind.suggestions("averaging")), "averaging")
        options |= {"network": network.asdict(), "averaging": averaging.asdict()}
    group = _group(engine, options["device"], timeout)
    folder = Path(group.told(lambda: str(values["out"] or _new_folder(f"{task}-{algorithm}"))))
    _go(chosen_task, settings, iterations, options, values["measure_every"], values["checkpoint_every"], folder, group=group, timeout=timeout)


@cli.command("resume")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--iterations", type=int, default=None, help="outer iterations in all (default: as planned)")
@with_engine_options
def resume_command(path: Path, iterations: int | None, engine: str | None, timeout: float) -> None:
    """Go on with the run recorded in the folder PATH, from its last checkpoint. It need not be the engine that began it, nor as many ranks."""
    group = _group(engine, "cpu", timeout)
    with group.together():
        config = group.told(Record(path).read_config)
    if config.get("engine") == "federation":
        raise CheckpointError(f"{path} is the server's part of a run between sites: go on with it by fedbilevel federation resume {path.name} --kit KIT.")
    if config.get("engine") == "peers":
        how = "it was collected from those of several peers" if "collected" in config else "it is one peer's part of a run between peers"
        raise CheckpointError(f"{path} cannot be gone on with alone, as {how}: start the peers again with fedbilevel peer run PLAN, each with its own record.")
    try:
        task_name, task_settings, plan = config["task"], config["task_settings"], config["run"]
        options = {**DEFAULTS, **config["options"]}
        name, settings = config["identity"]["algorithm"], config["identity"]["settings"]
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} holds a run that was not started on the command line (no {error}): resume it from Python with run(..., record=..., resume=True)."
        ) from None
    task, algorithm = _rebuilt(discovery.task(task_name), task_settings), _rebuilt(discovery.algorithm(name), settings)
    _go(
        task,
        algorithm,
        plan["num_iterations"] if iterations is None else iterations,
        options,
        plan["measure_every"],
        plan["checkpoint_every"],
        path,
        resume=True,
        group=_group(engine, options["device"], timeout),
        timeout=timeout,
    )


@cli.command("demo")
@click.option("--seed", type=int, default=0, show_default=True, help="seed of the split, the noise and the runs")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="folder of the record (default: a new one under runs/)")
def demo_command(seed: int, out: Path | None) -> None:
    """Ten clients clean each other's noisy labels without sharing data."""
    kind = discovery.task("data_cleaning")
    task: Any = kind(data_seed=seed)  # type: ignore[call-arg]
    folder = out or _new_folder("demo")
    console.print(
        f"Ten clients hold handwritten digits; {task.noise:.0%} of the training labels are wrong. Each has {task.num_clean} clean images of a single class."
    )
    console.print("FedAvg trains on the labels as they are. The others learn a weight for every sample; the weights never leave their client.\n")
    outcomes = {}
    for name in ("fedavg", "fedbio", "fednest", "fbo_aggitd"):
        settings = chosen(discovery.algorithm(name), {}, kind.suggestions(name))
        options = DEFAULTS | {"seed": seed}
        outcomes[name] = _go(task, settings, kind.iterations(name), options, None, 50, folder / name, quiet=True)
        if outcomes[name].stopped == "interrupted":
            sys.exit(130)
    console.print(report.outcomes("Label cleaning on embedded digits", {name: result.rows[-1] for name, result in outcomes.items()}, task.headline))
    console.print(report.cleaning_sentence(outcomes["fedavg"].rows[-1], {name: result.rows[-1] for name, result in outcomes.items() if name != "fedavg"}))
    console.print(f"\nSaved in {folder} (settings, metrics, checkpoints, solutions).", soft_wrap=True)


@cli.command("list")
def list_command() -> None:
    """All algorithms and tasks, each with its first line."""
    console.print(report.names("Algorithms", discovery.algorithms()))
    console.print(report.names("Tasks", discovery.tasks()))
    console.print("Flags of one: fedbilevel run TASK --algorithm NAME --help")


@cli.command("check", cls=TaskCommand)
@click.argument("task")
@click.option("--algorithm", "-a", default=None, help="also check the contract of this algorithm, and its estimate of the hypergradient where it has one")
@click.option("--steps", is_flag=True, help="also estimate curvatures and say which steps are safe for single-loop methods (slower)")
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
        console.print(str(one), highlight=False, soft_wrap=True)
    if steps:
        found = ", ".join(f"{name} {value:.3g}" for name, value in suggest(built.problem, built.clients).items())
        console.print(f"Safe steps for single-loop methods, from the curvatures at the initial point: {found}.", highlight=False, soft_wrap=True)
    sys.exit(0 if all(one.ok for one in reports) else 1)


class CompareCommand(click.Command):
    """Takes `--algorithms a b c` as it is written, which click's options cannot."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--algorithms" in args:
            at = args.index("--algorithms") + 1
            end = next((i for i in range(at, len(args)) if args[i].startswith("-")), len(args))
            args = [*args[:at], ",".join(args[at:end]), *args[end:]]
        return super().parse_args(ctx, args)


@cli.command("compare", cls=CompareCommand)
@click.argument("task")
@click.option("--algorithms", required=True, metavar="A B C", help="names of algorithms")
@click.option("--target", default=None, metavar="METRIC=VALUE", help="report the cost of reaching this, e.g. test_accuracy=0.94")
@click.option("--repetitions", type=int, default=3, show_default=True, help="each with its own run seed and data seed, the same for all algorithms")
@click.option("--max-rounds", type=int, default=None, help="stop every run at so many communication rounds")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="NAME.SETTING=VALUE",
    help="a setting of one algorithm, or task.SETTING=VALUE, network.SETTING=VALUE, averaging.SETTING=VALUE",
)
@with_run_options
def compare_command(task: str, algorithms: str, target: str | None, repetitions: int, max_rounds: int | None, changes: tuple[str, ...], **values: Any) -> None:
    """Several algorithms on the same data with the same seeds: rounds, megabytes, oracle calls and seconds to a target, and final figures."""
    kind = discovery.task(task)
    names = list(dict.fromkeys(name for name in algorithms.split(",") if name))
    methods = {name: discovery.algorithm(name) for name in names}
    given = _changes(changes, {"task": kind, **BETWEEN_PEERS, **methods})
    network = chosen(Network, given.get("network", {}), kind.suggestions("network"))
    averaging = chosen(Averaging, given.get("averaging", {}), fitting(network, kind.suggestions("averaging")))
    options = {**{name: values[name] for name in DEFAULTS}, "network": network.asdict(), "averaging": averaging.asdict()}
    settings = {name: chosen(method, given.get(name, {}), kind.suggestions(name)) for name, method in methods.items()}
    iterations = {name: values["iterations"] if values["iterations"] is not None else kind.iterations(name) for name in names}
    every = values["measure_every"] or max(1, min(iterations.values(), default=1) // 50)
    folder = values["out"] or _new_folder(f"compare-{task}")
    goal = Target.parse(target) if target is not None else None
    with console.status("") as status:

        def show(name: str, r: int, now: RunProgress) -> None:
            status.update(f"{name}, repetition {r + 1} of {repetitions}: outer iteration {now.iteration}, {now.rounds} rounds")

        try:
            result = compare(
                kind(**given.get("task", {})), settings, num_iterations=iterations, target=goal, repetitions=repetitions,
                max_rounds=max_rounds, record=folder, progress=show, measure_every=every, **keywords(options),
            )  # fmt: skip
        except KeyboardInterrupt:
            saved = folder / "comparison.json"
            console.print(f"Stopped. The runs that were finished are in {saved}." if saved.exists() else "Stopped before any run was finished.", soft_wrap=True)
            sys.exit(130)
    console.print(report.comparison(result, kind.headline))
    console.print(f"Saved in {folder / 'comparison.json'}", soft_wrap=True)


class StudyCommand(click.Command):
    """Flags from the settings of `owners`, less those that the study itself decides."""

    owners: tuple[tuple[type[Settings], str], ...] = ()
    decided: tuple[str, ...] = ()

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        theirs = [option for owner, section in self.owners for option in flags(owner, section, {}) if option.name not in self.decided]
        return [*super().get_params(ctx), *theirs]

    format_options = TaskCommand.format_options


class PersonaliseCommand(StudyCommand):
    owners = ((Personalisation, "Task"), (Plan, "Plan"))
    decided = ("personalise", "lower")


@cli.command("personalise", cls=PersonaliseCommand)
@click.option("--methods", default="local,sgp,hgp_pl", show_default=True, help=f"with commas between, of {', '.join(METHODS)}; or all")
@click.option("--networks", default=",".join(NETWORKS), show_default=True, help="with commas between")
@click.option("--seed", type=int, default=0, show_default=True, help="seed of everything the runs draw")
@click.option("--batch-size", type=int, default=None, help="training samples per minibatch (default: all of a client's; the paper: 128)")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:1")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="folder of the record; one that exists is gone on with")
def personalise_command(methods: str, networks: str, seed: int, batch_size: int | None, device: str, out: Path | None, **values: Any) -> None:
    """Personalised models on every network, as Table 2 of Terashita and Hara, 2023: mean and bottom-decile accuracy over clients."""
    folder = out or _new_folder("personalise")
    names = list(METHODS) if methods == "all" else [name for name in methods.split(",") if name]
    with console.status("") as status:
        outcomes = personalise(
            chosen(Personalisation, values, {}), chosen(Plan, values, {}), methods=names, networks=[name for name in networks.split(",") if name],
            record=folder, seed=seed, batch_size=None if batch_size is None else {"train": batch_size}, device=torch_device(device), progress=status.update,
        )  # fmt: skip
    console.print(report.personalisation(outcomes, PAPER))
    console.print(f"Saved in {folder / 'personalisation.json'}", soft_wrap=True)


class InfluenceCommand(TaskCommand):
    """Reads the data, the model and the method first, then adds the flags of the task, of training, of the method, and of the network if it needs one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        peeked = {name: _value_of(f"--{name}", args) for name in ("data", "model", "method")}
        known = {name: peeked[name] for name in ("data", "model") if peeked[name] in typing.get_args(typing.get_type_hints(Influence)[name])}
        task = chosen(Influence, known, {})
        ctx.meta["settings"] = flags(Influence, "Task influence", {})
        for owner, section, name, prefix in _owners(peeked["method"] or "hgp"):
            theirs = flags(owner, section, task.suggests(name), prefix)
            ctx.meta["settings"] += [option for option in theirs if name != "hgp" or option.name in influence.ESTIMATES]
        return click.Command.parse_args(self, ctx, args)


def _owners(method: str) -> list[tuple[type[Settings], str, str, str]]:
    """Whose settings are flags: class, section of the help page, name under which the task suggests values, prefix."""
    training = (influence.Training, "Training", "training", "training")
    peers = [(owner, name.capitalize(), name, name) for name, owner in BETWEEN_PEERS.items()]
    return [training, *([] if method in SOLVERS else [(discovery.algorithm(method), f"Method {method}", method, "")]), *peers]


def _value_of(flag: str, args: Sequence[str]) -> str | None:
    """What stands behind a flag, before click has read the line."""
    for i, arg in enumerate(args):
        if arg == flag and i + 1 < len(args):
            return args[i + 1]
        if arg.startswith(f"{flag}="):
            return arg.removeprefix(f"{flag}=")
    return None


@cli.command("influence", cls=InfluenceCommand)
@click.option("--method", default="hgp", show_default=True, help=f"hgp, {', '.join(SOLVERS)}, or a server algorithm with an estimate, e.g. fbo_aggitd")
@click.option("--num-removed", type=int, default=50, show_default=True, help="instances that are really removed, those of the largest predictions")
@click.option("--at-once", type=int, default=None, help="training push: retrainings side by side (default: as many as 1 GiB of data holds)")
@click.option("--num-listed", type=int, default=5, show_default=True, help="instances shown of those that harm and of those that help most")
@click.option("--pictures/--no-pictures", "draw", default=None, help="draw removals and images (default: if matplotlib is installed)")
@click.option("--seed", type=int, default=0, show_default=True, help="seed of the minibatches")
@click.option("--batch-size", type=int, default=None, help="samples per minibatch of training and prediction (default: all of a client's samples)")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float64", show_default=True)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:1")
@click.option("--chunk-size", type=int, default=None, help="clients evaluated at once under vmap (default: as many as fit a memory budget)")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="folder of the record (default: a new one under runs/)")
def influence_command(method: str, num_removed: int, num_listed: int, draw: bool | None, out: Path | None, **values: Any) -> None:
    """Which training instances help or harm all clients: one hypergradient predicts every removal, and real retraining checks the largest."""
    task = chosen(Influence, values, {})
    settings = {name: chosen(owner, values, task.suggests(name), prefix) for owner, _, name, prefix in _owners(method)}
    settings["averaging"] = chosen(Averaging, values, fitting(settings["network"], task.suggests("averaging")), "averaging")
    folder = out or _new_folder(f"influence-{task.data}-{task.model}")
    with console.status("") as status:
        result = influence.study(
            task, method=settings.pop(method, method), num_removed=num_removed, at_once=values["at_once"], record=folder,
            draw=pictures.available() if draw is None else draw, progress=status.update, **settings,
            **{name: values[name] for name in ("seed", "batch_size", "chunk_size")}, dtype=DTYPES[values["dtype"]], device=torch_device(values["device"]),
        )  # fmt: skip
    for table in report.influence(result, num_listed):
        console.print(table)
    console.print(f"Saved in {folder}", soft_wrap=True)


@cli.command("reproduce")
@click.argument("name", required=False)
@click.option("--quick", is_flag=True, help="a small version of it, about two minutes at most: shows that it runs, not what comes out")
@click.option("--panels", default="", help="only these, with commas between")
@click.option("--rows", default="", help="only these, with commas between")
@click.option("--repetitions", type=click.IntRange(min=1), default=None, help="instead of what the experiment says")
@click.option("--jobs", "processes", type=click.IntRange(min=1), default=1, show_default=True, help="runs side by side, each in a process of its own")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:1")
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="folder of the results; one that exists is gone on with (default: runs/reproduce-NAME)"
)
@click.option("--record", "keep", is_flag=True, help="write what came out into the experiment's own file, with commit, machine and time")
@click.option("--results", is_flag=True, help="run nothing: print what is recorded, of NAME or of all experiments, as Markdown")
def reproduce_command(
    name: str | None, results: bool, quick: bool, panels: str, rows: str, repetitions: int | None, processes: int, device: str, out: Path | None, keep: bool
) -> None:
    """A table or figure of a paper: ours beside theirs, with pictures. Without a NAME: which there are. Interrupted, it goes on where it was."""
    if results:
        for one in [name] if name is not None else sorted(experiment.known()):
            click.echo(report.recorded(experiment.read(one)))
        return
    if name is None:
        if not experiment.known():
            raise SettingError("no experiments were found: run this in a checkout, or give the path of an experiment.toml.")
        for known, path in experiment.known().items():
            console.print(f"{known:<28} {experiment.read(path).title}", highlight=False, soft_wrap=True)
        return
    if quick and keep:
        raise SettingError("--quick results are not those of the experiment, so they are not recorded: leave out --quick or --record.")
    torch_device(device)
    chosen_one = experiment.read(name)
    jobs = chosen_one.jobs(quick=quick, panels=_parts(panels), rows=_parts(rows), repetitions=repetitions)
    folder = out or Path("runs") / f"reproduce-{chosen_one.name}{'-quick' if quick else ''}"
    with console.status("") as status:
        say = status.update if console.is_terminal else lambda _: None
        try:
            found = reproduce.reproduce(jobs, folder, device=device, processes=processes, say=say)
        except KeyboardInterrupt:
            console.print("Stopped. The same command goes on where it was.")
            sys.exit(130)
    for table in report.reproduction(chosen_one, reproduce.summary(found)):
        console.print(table)
    if quick:
        console.print("A small version, on other data: it shows that all of it runs. Its figures are not to be compared with the paper's.", soft_wrap=True)
    drawn = reproduce.draw(chosen_one, found, folder)
    console.print(f"Saved in {folder}" + (f", pictures {', '.join(path.name for path in drawn)}" if drawn else ""), soft_wrap=True)
    if keep:
        reproduce.record(chosen_one, found)
        console.print(f"Recorded in {chosen_one.path}", soft_wrap=True)


@cli.command("tune")
@click.argument("name")
@click.option("--panels", default="", help="only these, with commas between")
@click.option("--rows", default="", help="only these, with commas between (default: those with ranges in [tune])")
@click.option("--jobs", "processes", type=click.IntRange(min=1), default=1, show_default=True, help="trials side by side, each in a process of its own")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:1")
@click.option("--seed", type=int, default=0, show_default=True, help="seed of the search over ranges")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="folder of the trials; those in it are not run again (default: runs/tune-NAME)")
@click.option("--write/--no-write", "keep", default=True, show_default=True, help="write the chosen values into the experiment's file")
def tune_command(name: str, panels: str, rows: str, processes: int, device: str, seed: int, out: Path | None, keep: bool) -> None:
    """Search settings of the experiment NAME over the ranges in its [tune] table, and write those chosen into its file."""
    torch_device(device)
    chosen_one = experiment.read(name)
    only, asked = chosen_one.content.get("tune", {}).get("panel"), _parts(panels)
    if only and asked not in ([], [only]):
        raise SettingError(f"[tune] searches in the panel {only!r} alone, for all panels: leave out --panels.")
    places = chosen_one.places(panels=[only] if only else asked, rows=_parts(rows))
    places = places if rows else [place for place in places if tune.ranges_of(chosen_one, *place)]
    if not places:
        raise SettingError(f"{chosen_one.path} declares no ranges: add [tune.ranges] or [tune.rows.ROW].")
    for panel, row in places:
        with console.status("") as status:
            say = status.update if console.is_terminal else lambda _: None
            found = tune.tune(
                chosen_one, out or Path("runs") / f"tune-{chosen_one.name}", panel=panel, row=row, device=device, processes=processes, seed=seed, say=say
            )
        console.print(report.tuning(found, chosen_one))
        if keep:
            tune.write(chosen_one, found)
    if keep:
        console.print(f"Written into {chosen_one.path}", soft_wrap=True)


cli.add_command(federation)
cli.add_command(peer)


def _parts(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


@cli.group("data")
def data_group() -> None:
    """Sets of data that lie in files: which there are, where they lie, and download of those with a known checksum."""


@data_group.command("list")
@click.option("--data-dir", default=None, help="folder to look into first")
def data_list(data_dir: str | None) -> None:
    """Every set, where it lies, and whether it can be fetched."""
    for name, entry in catalogue.SETS.items():
        try:
            state = f"in {catalogue.where(name, data_dir)[0]}"
        except DataError:
            state = f"missing; fedbilevel data fetch {name}" if name in fetch.KNOWN else "missing"
        console.print(f"{name:<12} {entry.about} ({state})", highlight=False, soft_wrap=True)


@data_group.command("where")
@click.argument("name", required=False)
@click.option("--data-dir", default=None, help="folder to look into first")
def data_where(name: str | None, data_dir: str | None) -> None:
    """The folders that are searched, in order; with a NAME, the files of that set."""
    for place in places.folders(data_dir) if name is None else catalogue.where(name, data_dir):
        console.print(str(place), highlight=False, soft_wrap=True, markup=False)


@data_group.command("fetch")
@click.argument("name")
@click.option("--data-dir", default=None, help="folder to put it into (default: $FEDBILEVEL_DATA, or the cache)")
def data_fetch(name: str, data_dir: str | None) -> None:
    """Download the set NAME from its public home, unless it is there; its checksum is compared."""
    with console.status("") as status:
        show = lambda file, done, total: status.update(f"{file}: {done / 1e6:.1f} MB" + (f" of {total / 1e6:.1f} MB" if total else ""))
        found = fetch.ensure(name, data_dir, show)
    for place in found:
        console.print(str(place), highlight=False, soft_wrap=True, markup=False)


def _changes(changes: Sequence[str], owners: dict[str, type[Any]]) -> dict[str, dict[str, Any]]:
    """`fedbio.lr_upper=3` by owner, converted by the same types as flags are."""
    found: dict[str, dict[str, Any]] = {}
    for text in changes:
        place, sign, value = text.partition("=")
        owner, dot, name = place.partition(".")
        if not (sign and dot):
            raise SettingError(f"--set got {text!r}, expected NAME.SETTING=VALUE, e.g. fedbio.lr_upper=3.")
        if owner not in owners:
            raise UnknownNameError("algorithm in this comparison", owner, owners)
        options = {option.name: option for option in flags(owners[owner], owner, {})}
        if name not in options:
            raise UnknownNameError(f"setting of {owner}", name, [known for known in options if known])
        option = options[name]
        try:
            found.setdefault(owner, {})[name] = option.type.convert(value, None, None)
        except click.BadParameter as error:
            raise SettingError(f"--set got {text!r}: {error.message}") from None
    return found


# ---- what the commands share -------------------------------------------------------------------------------------------------


def _go(task: Task, algorithm: Any, iterations: int, options: dict[str, Any], measure_every: int | None, checkpoint_every: int, folder: Path,
        *, resume: bool = False, quiet: bool = False, group: Group = Group(), timeout: float = distributed.TIMEOUT) -> Result:  # fmt: skip
    chosen_options = keywords(options)
    with group.together():
        problem, clients = task.build()
        clients = group.only(clients)
    with _progress(algorithm.name(), iterations, task.headline) as callback:
        try:
            result = run(
                algorithm, problem, clients, num_iterations=iterations, measure_every=measure_every, checkpoint_every=checkpoint_every,
                record=folder, resume=resume, callbacks=[callback], **chosen_options, engine=group.engine, timeout=timeout,
                describe={"task": task.name(), "task_settings": task.asdict(), "options": options},
            )  # fmt: skip
        except KeyboardInterrupt:
            kept = Record(folder).checkpoint.exists()
            console.print(
                f"Stopped at once. The last checkpoint is kept: fedbilevel resume {folder}" if kept else "Stopped before anything was saved.", soft_wrap=True
            )
            sys.exit(130)
    if result.stopped == "interrupted":
        console.print(f"Stopped after outer iteration {result.iteration}. To go on: fedbilevel resume {folder}", soft_wrap=True)
        if not quiet:
            sys.exit(130)
    elif not quiet:
        console.print(report.outcomes(f"{task.name()}, {iterations} outer iterations", {algorithm.name(): result.rows[-1]}, task.headline))
        console.print(f"Saved in {folder}", soft_wrap=True)
    return result


class _progress:
    """A bar on a terminal; one line per measurement elsewhere."""

    def __init__(self, name: str, total: int, headline: Sequence[str]) -> None:
        self.headline, self.name = headline, name
        columns = (BarColumn(), *(TextColumn(text) for text in ("{task.completed}/{task.total}", "{task.fields[cost]}", "{task.fields[figures]}")))
        self.bar = Progress(TextColumn(f"{name:<12}"), *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task(name, total=total, cost="", figures="")
        self.figures = ""

    def __enter__(self) -> Callable[[RunProgress], None]:
        self.bar.start()
        return self.show

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, now: RunProgress) -> None:
        cost = f"{now.rounds} rounds, {now.megabytes:.1f} MB"
        if now.row is not None:
            self.figures = ", ".join(f"{name} {now.row[name]:.4g}" for name in self.headline[:2] if name in now.row)
            if not console.is_terminal:
                console.print(f"{self.name}: outer iteration {now.iteration}/{now.num_iterations}, {cost}, {self.figures}", highlight=False, soft_wrap=True)
        self.bar.update(self.task, completed=now.iteration, cost=cost, figures=self.figures)


def _new_folder(name: str) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    folder, number = Path("runs") / f"{name}-{stamp}", 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{stamp}-{number}"
    return folder


def _rebuilt(kind: type[Any], stored: dict[str, Any]) -> Any:
    """Settings as they were recorded; a name that no longer exists is an error that says so."""
    known = {spec.name for spec in dataclasses.fields(kind)}
    unknown = sorted(set(stored) - known)
    if unknown:
        raise CheckpointError(f"the recorded setting {unknown[0]!r} is unknown to this version of {kind.name()}: resume with the version that wrote it.")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()})


def main() -> None:
    """No traceback for what a user can mend. Of several ranks, the first speaks."""
    first = os.environ.get("WORLD_SIZE", "1") in ("", "0", "1") or os.environ.get("RANK", "0") == "0"
    console.quiet = not first
    warnings.showwarning = lambda message, *_args, **_kwargs: complaints.print(f"Warning: {message}", highlight=False, soft_wrap=True) if first else None
    try:
        if first:
            cli.main(standalone_mode=True)
        else:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                cli.main(standalone_mode=True)
    except RankLostError as error:
        if error.speaks:
            complaints.print(f"Error: {error}.", highlight=False, soft_wrap=True, markup=False)
        sys.stderr.flush()
        os._exit(2)  # nothing is left to be written, and an exchange that never ends must not hold this process
    except FedBilevelError as error:
        if first:
            complaints.print(f"Error: {error}", highlight=False, soft_wrap=True, markup=False)
        sys.exit(2)
