"""Flags of commands, made from the settings of the named task and algorithm."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import click
from click.shell_completion import CompletionItem

from fedbilevel import discovery
from fedbilevel.cli.setting_values import METAVARS, by_sequence, number_or_auto, whole_numbers
from fedbilevel.federation.algorithm import PeerAlgorithm
from fedbilevel.federation.network import Network
from fedbilevel.oracle.oracle import Strategy
from fedbilevel.oracle.precision import Precision
from fedbilevel.runs.choice import Choice, choose
from fedbilevel.runs.options import BETWEEN_PEERS, DEFAULTS, DTYPES, WITH_BOTH, WITH_SERVER
from fedbilevel.runs.runfile import RunFile, read_run_file
from fedbilevel.settings import AUTO, Settings, kinds


class SettingOption(click.Option):
    """A flag with the name of its section on the help page."""

    section = ""


def flag_name(name: str, prefix: str) -> str:
    """Return the name of a flag with the prefix of its owner.

    Examples are network_SETTING, and network for the kind of the network.
    """
    return name if not prefix else prefix if name == "kind" else f"{prefix}_{name}"


def flags(owner: type[Settings], section: str, suggested: dict[str, Any], prefix: str = "") -> list[SettingOption]:
    hints = typing.get_type_hints(owner)
    options = []
    for spec in dataclasses.fields(owner):
        name, choices = (
            flag_name(spec.name, prefix).replace("_", "-"),
            [kind for kind in kinds(hints[spec.name]) if kind is not type(None)],
        )
        symbol = f" [{spec.metadata['symbol']}]" if spec.metadata.get("symbol") else ""
        default = (
            f"default {suggested[spec.name]} on this task" if spec.name in suggested else f"default {spec.default}"
        )
        kind = choices[0]
        is_switch = kind is bool
        if typing.get_origin(kind) is Literal:
            type_: Any = click.Choice(typing.get_args(kind))
        elif typing.get_origin(kind) is dict:
            type_ = by_sequence
        elif spec.metadata.get("step"):
            type_ = number_or_auto
        elif len(choices) > 1:
            type_ = whole_numbers
        else:
            type_ = kind
        option = SettingOption(
            [f"--{name}/--no-{name}" if is_switch else f"--{name}", flag_name(spec.name, prefix)],
            default=None,
            type=bool if is_switch else type_,
            metavar=METAVARS.get(type_),
            help=f"{spec.metadata.get('help', '')}{symbol} ({default})",
        )
        option.section = section
        options.append(option)
    return options


def chosen(owner: type[Settings], values: dict[str, Any], suggested: dict[str, Any], prefix: str = "") -> Any:
    """Return settings of `owner` from the user, else from the task, else from the defaults."""
    names = {spec.name for spec in dataclasses.fields(owner)}
    flagged = {name: values.get(flag_name(name, prefix)) for name in names}
    given = {name: value for name, value in flagged.items() if value is not None}
    return owner(**{**{name: value for name, value in suggested.items() if name in names}, **given})


def fitting(network: Network, suggested: dict[str, Any]) -> dict[str, Any]:
    """Return the suggested settings of the averaging.

    A faulty network needs robust averaging, because no other kind recovers lost messages. The
    task's other suggestions do not apply then, because robust averaging ends when all peers agree.
    """
    return {"kind": "robust"} if network.faulty else suggested


def names_of(
    found: Callable[[], dict[str, Any]],
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return shell completion of names, each with the first line of its docstring."""
    return lambda _ctx, _param, begun: [
        CompletionItem(name, help=first_line(kind)) for name, kind in sorted(found().items()) if name.startswith(begun)
    ]


def first_line(kind: type[Any]) -> str:
    """Return the first line of the docstring of a class's module."""
    return (inspect.getdoc(inspect.getmodule(kind)) or "").split("\n", 1)[0]


def jobs_option(what: str) -> Callable[[Any], Any]:
    """Return the flag --jobs; `what` names the things that run in parallel."""
    return click.option(
        "--jobs",
        "processes",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help=f"number of {what} in parallel, each in its own process",
    )


def value_of(flag: str, args: Sequence[str]) -> str | None:
    """Return the value of a flag in the arguments, before click parses them."""
    for i, arg in enumerate(args):
        if arg == flag and i + 1 < len(args):
            return args[i + 1]
        if arg.startswith(f"{flag}="):
            return arg.removeprefix(f"{flag}=")
    return None


def _explain(flag: str, choice: Choice | None) -> None:
    """Raise a sentence for a setting that other algorithms have, but not the choice of "auto"."""
    other = choice.other_owner(flag.removeprefix("--").replace("-", "_")) if choice is not None else ""
    if choice is not None and other:
        raise click.UsageError(
            f"{choice.name}, which auto chose, has no setting {flag}: leave it out, or name an algorithm that has it, "
            f"e.g. --algorithm {other}."
        )


class TaskCommand(click.Command):
    """A command that reads the names of the task and the algorithm first, then adds their flags."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = discovery.tasks()
        names = [arg for i, arg in enumerate(args) if not arg.startswith("-") and (i == 0 or arg in known)]
        file = value_of("--config", args) if self.name == "run" else None
        ctx.meta["run_file"] = content = read_run_file(Path(file)) if file is not None else None
        named = names[0] if names else content.task if content is not None else None
        if named is not None:
            task, choice = discovery.task(named), self._choice(args, content)
            found = discovery.algorithm(choice.name) if choice is not None else None
            ctx.meta["choice"] = choice
            suggested = {**task.suggestions(choice.name), **choice.settings} if choice is not None else {}
            theirs = flags(found, f"Algorithm {found.name()}", suggested) if found else []
            if found and self.name == "run":  # `check` uses its own networks
                theirs += [
                    option
                    for name, kind in {
                        **(BETWEEN_PEERS if issubclass(found, PeerAlgorithm) else WITH_SERVER),
                        **WITH_BOTH,
                    }.items()
                    for option in flags(kind, name.capitalize(), task.suggestions(name), name)
                ]
            ctx.meta["settings"] = [*flags(task, f"Task {task.name()}", {}), *theirs]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            _explain(error.option_name, ctx.meta.get("choice"))
            raise

    def _choice(self, args: Sequence[str], file: RunFile | None) -> Choice | None:
        """Return the algorithm from flags, else from the file, else "auto" for a run."""
        name = value_of("--algorithm", args) or value_of("-a", args)
        if name is None and self.name == "run":
            name = file.algorithm if file is not None and file.algorithm is not None else AUTO
        flagged = any(arg.startswith(tuple(f"--{part}" for part in BETWEEN_PEERS)) for arg in args)
        filed = file is not None and not BETWEEN_PEERS.keys().isdisjoint(file.options)
        return choose(name, between_peers=flagged or filed) if name is not None else None

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


RUN_OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "--num-iterations", type=int, default=None, help="number of outer iterations (default: the task's suggestion)"
    ),
    click.option(
        "--seed", type=int, default=DEFAULTS["seed"], show_default=True, help="seed of all random draws of the run"
    ),
    click.option(
        "--fraction",
        type=float,
        default=DEFAULTS["fraction"],
        show_default=True,
        help="share of the clients in a cohort",
    ),
    click.option(
        "--replacement/--no-replacement", default=DEFAULTS["replacement"], help="draw cohorts with replacement"
    ),
    click.option(
        "--redraw",
        type=click.Choice(["per_factor", "per_iteration"]),
        default=DEFAULTS["redraw"],
        show_default=True,
        help="draw a new cohort for every factor, or once per outer iteration",
    ),
    click.option(
        "--slow", type=float, default=DEFAULTS["slow"], show_default=True, help="share of clients that are slow"
    ),
    click.option(
        "--slow-work",
        type=float,
        default=DEFAULTS["slow_work"],
        show_default=True,
        help="part of the local steps that a slow client takes",
    ),
    click.option(
        "--dropout",
        type=float,
        default=DEFAULTS["dropout"],
        show_default=True,
        help="probability that a client does not answer in an outer iteration",
    ),
    click.option(
        "--schedule-power",
        type=float,
        default=DEFAULTS["schedule_power"],
        show_default=True,
        help="step sizes decay as (offset + t)^-power in outer iteration t; 0: constant",
    ),
    click.option(
        "--schedule-offset",
        type=float,
        default=DEFAULTS["schedule_offset"],
        show_default=True,
        help="offset in the decay of step sizes",
    ),
    click.option(
        "--schedule-end",
        type=int,
        default=DEFAULTS["schedule_end"],
        show_default=True,
        help="step sizes also decay linearly over this many outer iterations; 0: they do not",
    ),
    click.option(
        "--batch-size", type=int, default=None, help="samples per minibatch (default: all of a client's samples)"
    ),
    click.option(
        "--sampling",
        type=click.Choice(["replacement", "epochs"]),
        default=DEFAULTS["sampling"],
        show_default=True,
        help="minibatches: draw every sample from all samples, or go through a shuffled order in epochs",
    ),
    click.option(
        "--dtype", type=click.Choice(list(DTYPES)), default=DEFAULTS["dtype"], show_default=True, help="number format"
    ),
    click.option(
        "--precision",
        type=click.Choice(get_args(Precision)),
        default=DEFAULTS["precision"],
        show_default=True,
        help="bf16, fp16: evaluate the losses of derivatives in bfloat16 or float16",
    ),
    click.option("--device", default=DEFAULTS["device"], show_default=True, help="cpu, cuda or cuda:1"),
    click.option(
        "--strategy",
        type=click.Choice(get_args(Strategy)),
        default=DEFAULTS["strategy"],
        show_default=True,
        help="how to evaluate several clients",
    ),
    click.option(
        "--chunk-size",
        type=int,
        default=None,
        help="number of clients evaluated at once under vmap (default: as many as fit a memory budget)",
    ),
    click.option("--measure-every", type=int, default=None, help="outer iterations between measurements"),
    click.option(
        "--measure-growth",
        type=float,
        default=0.0,
        show_default=True,
        help="increase the distance between measurements to this share of the completed iterations",
    ),
    click.option(
        "--checkpoint-every", type=int, default=10, show_default=True, help="outer iterations between checkpoints"
    ),
    click.option(
        "--out",
        type=click.Path(path_type=Path),
        default=None,
        help="folder of the record (default: a new one under runs/)",
    ),
]


def with_run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(RUN_OPTIONS):
        command = option(command)
    return command


def with_looks(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add flags for measurements in addition to the metrics of the problem."""
    exact = click.option(
        "--residuals/--no-residuals",
        default=True,
        show_default=True,
        help="also measure the residuals of the equations for y and u",
    )
    long = click.option(
        "--stationarity/--no-stationarity",
        default=False,
        help="also measure the norm of the hypergradient (slow)",
    )
    return exact(long(with_baseline(command)))


def with_baseline(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flag of the comparison with y trained at a fixed x."""
    return click.option(
        "--baseline/--no-baseline",
        default=None,
        help="also train y with x fixed at x0, and compare on data that no run used (default: if the task has test "
        "data; with --baseline, a task without test data holds out a part of its validation data)",
    )(command)
