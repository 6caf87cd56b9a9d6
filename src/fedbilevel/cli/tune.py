"""`fedbilevel tune`: search the settings of algorithms on a task, or of the rows of an experiment."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fedbilevel import discovery
from fedbilevel.cli import terminal
from fedbilevel.cli.compare import joined, run_options
from fedbilevel.cli.flags import SettingOption, TaskCommand, chosen, flags, jobs_option, with_run_options
from fedbilevel.errors import SettingError, UnknownNameError
from fedbilevel.report import tables
from fedbilevel.runs.choice import choose
from fedbilevel.runs.options import DEFAULTS, keywords, torch_device
from fedbilevel.studies import experiment
from fedbilevel.studies import tune as rows_of_experiments
from fedbilevel.studies.search import tune
from fedbilevel.studies.tuned import Tuned

_UNUSED = ("num_iterations", "checkpoint_every", "measure_growth", "out")  # options of a single run with a record
_OF_EXPERIMENTS = ("panels", "rows", "keep")
_OF_BOTH = ("name", "processes", "device", "seed", "folder")


class TuneCommand(TaskCommand):
    """A command with the flags of the named task, and with `--algorithms a b c`."""

    def __init__(self, *, params: list[click.Parameter], **more: Any) -> None:
        super().__init__(params=[param for param in params if param.name not in _UNUSED], **more)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args = joined(args)
        known = discovery.tasks()
        named = next((known[arg] for arg in args if arg in known), None)
        if named is not None:
            ctx.meta["settings"] = flags(named, f"Task {named.name()}", {})
        return click.Command.parse_args(self, ctx, args)


@click.command("tune", cls=TuneCommand)
@click.argument("name")
@click.option("--algorithms", default="", metavar="A B C", help="names of the algorithms; each has an equal budget")
@click.option("--num-trials", type=int, default=30, show_default=True, help="number of trials of each algorithm")
@click.option("--num-rounds", type=int, default=200, show_default=True, help="communication rounds of one run")
@click.option(
    "--repetitions",
    type=int,
    default=1,
    show_default=True,
    help="runs of one trial, on data and draws that no comparison reports",
)
@click.option(
    "--metric",
    default="upper_loss",
    show_default=True,
    help="the figure to improve; it should not come from test data",
)
@click.option(
    "--range",
    "ranges",
    multiple=True,
    metavar="[NAME.]SETTING=LOW:HIGH",
    help="range of a setting of all algorithms or of NAME, or a list V,V,V (default: all step sizes, around "
    "measured scales)",
)
@click.option("--prune/--no-prune", default=True, show_default=True, help="stop runs that are behind the others early")
@click.option("--panels", default="", help="of an experiment: tune only these panels (comma-separated list)")
@click.option(
    "--rows",
    default="",
    help="of an experiment: tune only these rows (comma-separated list; default: the rows that [tune] declares)",
)
@click.option(
    "--write/--no-write",
    "keep",
    default=True,
    show_default=True,
    help="of an experiment: write the chosen values into its file",
)
@jobs_option("trials")
@click.option(
    "--out",
    "folder",
    type=click.Path(path_type=Path),
    default=None,
    help="folder of the trials; trials that are in it are not repeated (default: runs/tune-NAME)",
)
@with_run_options
@click.pass_context
def tune_command(ctx: click.Context, /, name: str, **values: Any) -> None:
    """Search settings of algorithms on the task NAME, or of the experiment NAME.

    For a task, the best settings are printed as a command that compares the algorithms. For an
    experiment, the ranges are in the [tune] table of its file, and the best settings are written
    into it.
    """
    if name in discovery.tasks():
        _check_flags(ctx, _OF_EXPERIMENTS, f"the task {name}")
        _tune_task(ctx, name, values)
        return
    if not name.endswith(".toml") and not Path(name).is_dir() and name not in experiment.known():
        raise UnknownNameError("task or experiment", name, [*discovery.tasks(), *experiment.known()])
    others = [param.name for param in ctx.command.get_params(ctx) if param.name not in _OF_BOTH]
    _check_flags(ctx, [other for other in others if other and other not in _OF_EXPERIMENTS], f"the experiment {name}")
    _tune_experiment(name, values)


def _check_flags(ctx: click.Context, names: Sequence[str], what: str) -> None:
    for name in names:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise SettingError(f"--{name.replace('_', '-')} has no meaning for {what}: omit it.")


def _tune_task(ctx: click.Context, name: str, values: dict[str, Any]) -> None:
    kind = discovery.task(name)
    choices = [choose(one, between_peers=False) for one in values["algorithms"].split(",") if one]
    names = list(dict.fromkeys(one.name for one in choices))
    if not names:
        raise SettingError(f"there are no algorithms to tune on {name}: name some, e.g. --algorithms fedbio simfbo.")
    for one in choices:
        one.say()
    folder = values["folder"] or Path("runs") / f"tune-{name}"
    try:
        found = tune(
            chosen(kind, values, {}),
            names,
            **{key: values[key] for key in ("metric", "num_rounds", "num_trials", "repetitions", "prune")},
            ranges=_ranges(values["ranges"], names),
            storage=folder,
            jobs=values["processes"],
            progress=terminal.say,
            measure_every=values["measure_every"],
            **keywords(run_options(kind, {}, values)),
        )
    except KeyboardInterrupt:
        terminal.say("Stopped. The same command resumes it.")
        sys.exit(130)
    terminal.console.print(tables.search(found, name))
    if found.algorithms:
        terminal.say(f"To compare the algorithms with these settings:\n{_comparison(ctx, name, found)}")
    terminal.say(f"Saved in {folder}; to see the trials: optuna-dashboard {folder / 'journal.log'}")


def _ranges(given: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """Parse `lr_upper=0.1:10` and `fedbio.num_local_steps=1,2,5`."""
    found: dict[str, Any] = {}
    for text in given:
        place, sign, value = text.partition("=")
        owner, dot, setting = place.rpartition(".")
        if not sign or not setting or not value or (dot and owner not in names):
            raise SettingError(
                f"--range got {text!r}, expected SETTING=LOW:HIGH or NAME.SETTING=LOW:HIGH with a NAME "
                f"among {', '.join(names)}, or a list SETTING=V,V,V."
            )
        ends = [_number(part) for part in value.split(":")]
        one = tuple(ends) if len(ends) > 1 else [_number(part) for part in value.split(",")]
        (found.setdefault(owner, {}) if dot else found)[setting] = one
    return found


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _comparison(ctx: click.Context, name: str, found: Tuned) -> str:
    """Return the command that compares the algorithms with the best settings on reported data."""
    words = ["fedbilevel", "compare", name, "--algorithms", *found.algorithms]
    # an outer iteration takes at least one round, so that rounds end every run
    words += ["--num-rounds", str(found.num_rounds), "--num-iterations", str(found.num_rounds)]
    for param in ctx.command.get_params(ctx):
        value = ctx.params.get(param.name or "")
        if ctx.get_parameter_source(param.name or "") is not ParameterSource.COMMANDLINE:
            continue
        if isinstance(param, SettingOption):
            words += ["--set", f"task.{param.name}={_text(value)}"]
        elif param.name in DEFAULTS:
            flag = str(param.name).replace("_", "-")
            words += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    best: Mapping[str, Any] = {one: search.best.settings for one, search in found.searches.items() if search.best}
    words += [
        part for one, own in best.items() for key, value in own.items() for part in ("--set", f"{one}.{key}={value}")
    ]
    return shlex.join(words)


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _tune_experiment(name: str, values: Mapping[str, Any]) -> None:
    torch_device(values["device"])
    found = experiment.read(name)
    panels, rows = ([part for part in values[key].split(",") if part] for key in ("panels", "rows"))
    for panel, row in rows_of_experiments.places(found, panels, rows):
        with terminal.console.status("") as status:
            say = status.update if terminal.console.is_terminal else lambda _: None
            best = rows_of_experiments.tune(
                found,
                values["folder"] or Path("runs") / f"tune-{found.name}",
                panel=panel,
                row=row,
                device=values["device"],
                processes=values["processes"],
                seed=values["seed"],
                say=say,
            )
        terminal.console.print(tables.tuning(best, found))
        if values["keep"]:
            rows_of_experiments.write(found, best)
    if values["keep"]:
        terminal.say(f"Written into {found.path}")
