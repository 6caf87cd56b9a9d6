"""`fedbilevel compare`: several algorithms on one task."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from fedbilevel import discovery
from fedbilevel.cli import terminal
from fedbilevel.cli.flags import chosen, fitting, flags, with_looks, with_run_options
from fedbilevel.errors import SettingError, UnknownNameError
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.network import Network
from fedbilevel.report import tables
from fedbilevel.runs.choice import choose
from fedbilevel.runs.options import BETWEEN_PEERS, DEFAULTS, keywords
from fedbilevel.runs.result import Progress
from fedbilevel.studies.compare import compare
from fedbilevel.studies.comparison import Target
from fedbilevel.tasks.task import Task


class CompareCommand(click.Command):
    """A command that accepts `--algorithms a b c`, which options of click do not support."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, joined(args))


def joined(args: list[str]) -> list[str]:
    """Join the names after --algorithms by commas."""
    if "--algorithms" not in args:
        return args
    at = args.index("--algorithms") + 1
    end = next((i for i in range(at, len(args)) if args[i].startswith("-")), len(args))
    return [*args[:at], ",".join(args[at:end]), *args[end:]]


def _changes(changes: Sequence[str], owners: dict[str, type[Any]]) -> dict[str, dict[str, Any]]:
    """Return settings such as `fedbio.lr_upper=3` by owner, in the types of their flags."""
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


def run_options(kind: type[Task], given: dict[str, dict[str, Any]], values: dict[str, Any]) -> dict[str, Any]:
    """Return the options of all runs in the form of a run file."""
    network = chosen(Network, given.get("network", {}), kind.suggestions("network"))
    averaging = chosen(Averaging, given.get("averaging", {}), fitting(network, kind.suggestions("averaging")))
    own = {name: values[name] for name in DEFAULTS}
    return {**own, "network": network.asdict(), "averaging": averaging.asdict()}


@click.command("compare", cls=CompareCommand)
@click.argument("task")
@click.option("--algorithms", required=True, metavar="A B C", help="names of the algorithms to compare")
@click.option(
    "--target",
    default=None,
    metavar="METRIC=VALUE",
    help="report the cost of reaching this value, e.g. test_accuracy=0.94",
)
@click.option(
    "--repetitions",
    type=int,
    default=3,
    show_default=True,
    help="number of repetitions; each has its own run seed and data seed, equal for all algorithms",
)
@click.option("--num-rounds", type=int, default=None, help="end every run at this number of communication rounds")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="NAME.SETTING=VALUE",
    help="change a setting of an algorithm, or of the task, network or averaging (task.SETTING=VALUE, ...)",
)
@click.option(
    "--rivals/--no-rivals",
    default=True,
    show_default=True,
    help="also run the plain ways to the same end that the task knows, each with all runs by which it is tuned",
)
@with_looks
@with_run_options
def compare_command(
    task: str,
    algorithms: str,
    target: str | None,
    repetitions: int,
    num_rounds: int | None,
    changes: tuple[str, ...],
    rivals: bool,
    baseline: bool | None,
    **values: Any,
) -> None:
    """Compare algorithms on the same data with the same seeds.

    Shows the rounds, megabytes, oracle calls and seconds to a target, and the final metrics.
    """
    kind = discovery.task(task)
    peers = any(one.partition(".")[0] in BETWEEN_PEERS for one in changes)
    found = [choose(name, between_peers=peers) for name in algorithms.split(",") if name]
    choices = {one.name: one for one in found}
    methods = {name: discovery.algorithm(name) for name in choices}
    given = _changes(changes, {"task": kind, **BETWEEN_PEERS, **methods})
    options = run_options(kind, given, values)
    for one in choices.values():
        one.say()
    settings = {
        name: chosen(method, given.get(name, {}), {**kind.suggestions(name), **choices[name].settings})
        for name, method in methods.items()
    }
    asked = values["num_iterations"]
    iterations = {name: asked if asked is not None else kind.iterations(name) for name in methods}
    every = values["measure_every"]
    every = every if every is not None else max(1, min(iterations.values(), default=1) // 50)
    folder = values["out"] or terminal.new_folder(f"compare-{task}")
    goal = Target.parse(target) if target is not None else None
    with terminal.console.status("") as status:

        def show(name: str, r: int, now: Progress) -> None:
            where = f"outer iteration {now.iteration}, {now.rounds} rounds"
            status.update(f"{name}, repetition {r + 1} of {repetitions}: {where}")

        try:
            result = compare(
                kind(**given.get("task", {})),
                settings,
                num_iterations=iterations,
                target=goal,
                repetitions=repetitions,
                num_rounds=num_rounds,
                record=folder,
                progress=show,
                measure_every=every,
                baseline=baseline,
                rivals=rivals,
                **{name: values[name] for name in ("residuals", "stationarity")},
                **keywords(options),
            )
        except KeyboardInterrupt:
            saved = folder / "comparison.json"
            some, none = f"Stopped. Finished runs are in {saved}.", "Stopped before any run was finished."
            terminal.say(some if saved.exists() else none)
            sys.exit(130)
    terminal.console.print(tables.comparison(result, kind.headline))
    terminal.say(f"Saved in {folder / 'comparison.json'}; for a page with curves: fedbilevel report {folder}")
