"""The commands `compare`, `personalise`, `influence`, `reproduce` and `tune`: several runs that belong together."""

from __future__ import annotations

import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from fedbilevel import discovery, plots
from fedbilevel.cli import terminal
from fedbilevel.cli.flags import TaskCommand, chosen, fitting, flags, value_of, with_looks, with_run_options
from fedbilevel.errors import SettingError, UnknownNameError
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.network import Network
from fedbilevel.oracle.hypergradient import SOLVERS
from fedbilevel.report import tables
from fedbilevel.runs.options import BETWEEN_PEERS, DEFAULTS, DTYPES, keywords, torch_device
from fedbilevel.runs.result import Progress
from fedbilevel.settings import Settings
from fedbilevel.studies import experiment, influence, reproduce, tune
from fedbilevel.studies.compare import Target, compare
from fedbilevel.studies.personalisation import METHODS, NETWORKS, PAPER, Plan, personalise
from fedbilevel.tasks.influence import Influence
from fedbilevel.tasks.personalisation import Personalisation


class CompareCommand(click.Command):
    """Takes `--algorithms a b c` as it is written, which click's options cannot."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--algorithms" in args:
            at = args.index("--algorithms") + 1
            end = next((i for i in range(at, len(args)) if args[i].startswith("-")), len(args))
            args = [*args[:at], ",".join(args[at:end]), *args[end:]]
        return super().parse_args(ctx, args)


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


@click.command("compare", cls=CompareCommand)
@click.argument("task")
@click.option("--algorithms", required=True, metavar="A B C", help="names of algorithms")
@click.option(
    "--target", default=None, metavar="METRIC=VALUE", help="report the cost of reaching this, e.g. test_accuracy=0.94"
)
@click.option(
    "--repetitions",
    type=int,
    default=3,
    show_default=True,
    help="each with its own run seed and data seed, the same for all algorithms",
)
@click.option("--num-rounds", type=int, default=None, help="end every run at this number of communication rounds")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="NAME.SETTING=VALUE",
    help="a setting of one algorithm, or task.SETTING=VALUE, network.SETTING=VALUE, averaging.SETTING=VALUE",
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
    **values: Any,
) -> None:
    """Several algorithms on the same data with the same seeds: rounds, megabytes, oracle calls and seconds to a target, and final figures."""
    kind = discovery.task(task)
    names = list(dict.fromkeys(name for name in algorithms.split(",") if name))
    methods = {name: discovery.algorithm(name) for name in names}
    given = _changes(changes, {"task": kind, **BETWEEN_PEERS, **methods})
    network = chosen(Network, given.get("network", {}), kind.suggestions("network"))
    averaging = chosen(Averaging, given.get("averaging", {}), fitting(network, kind.suggestions("averaging")))
    options = {
        **{name: values[name] for name in DEFAULTS},
        "network": network.asdict(),
        "averaging": averaging.asdict(),
    }
    settings = {name: chosen(method, given.get(name, {}), kind.suggestions(name)) for name, method in methods.items()}
    iterations = {
        name: values["num_iterations"] if values["num_iterations"] is not None else kind.iterations(name)
        for name in names
    }
    every = (
        values["measure_every"]
        if values["measure_every"] is not None
        else max(1, min(iterations.values(), default=1) // 50)
    )
    folder = values["out"] or terminal.new_folder(f"compare-{task}")
    goal = Target.parse(target) if target is not None else None
    with terminal.console.status("") as status:

        def show(name: str, r: int, now: Progress) -> None:
            status.update(
                f"{name}, repetition {r + 1} of {repetitions}: outer iteration {now.iteration}, {now.rounds} rounds"
            )

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
                **{name: values[name] for name in ("residuals", "stationarity")},
                **keywords(options),
            )
        except KeyboardInterrupt:
            saved = folder / "comparison.json"
            terminal.say(
                f"Stopped. The runs that were finished are in {saved}."
                if saved.exists()
                else "Stopped before any run was finished."
            )
            sys.exit(130)
    terminal.console.print(tables.comparison(result, kind.headline))
    terminal.say(f"Saved in {folder / 'comparison.json'}")


class StudyCommand(click.Command):
    """Flags from the settings of `owners`, less those that the study itself decides."""

    owners: tuple[tuple[type[Settings], str], ...] = ()
    decided: tuple[str, ...] = ()

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        theirs = [
            option
            for owner, section in self.owners
            for option in flags(owner, section, {})
            if option.name not in self.decided
        ]
        return [*super().get_params(ctx), *theirs]

    format_options = TaskCommand.format_options


class PersonaliseCommand(StudyCommand):
    owners = ((Personalisation, "Task"), (Plan, "Plan"))
    decided = ("personalise", "lower")


@click.command("personalise", cls=PersonaliseCommand)
@click.option(
    "--methods",
    default="local,sgp,hgp_pl",
    show_default=True,
    help=f"with commas between, of {', '.join(METHODS)}; or all",
)
@click.option("--networks", default=",".join(NETWORKS), show_default=True, help="with commas between")
@click.option("--seed", type=int, default=0, show_default=True, help="seed of everything the runs draw")
@click.option(
    "--batch-size",
    type=int,
    default=None,
    help="training samples per minibatch (default: all of a client's; the paper: 128)",
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:1")
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="folder of the record; one that exists is gone on with"
)
def personalise_command(
    methods: str, networks: str, seed: int, batch_size: int | None, device: str, out: Path | None, **values: Any
) -> None:
    """Personalised models on every network, as Table 2 of Terashita and Hara, 2023: mean and bottom-decile accuracy over clients."""
    folder = out or terminal.new_folder("personalise")
    names = list(METHODS) if methods == "all" else [name for name in methods.split(",") if name]
    with terminal.console.status("") as status:
        outcomes = personalise(
            chosen(Personalisation, values, {}),
            chosen(Plan, values, {}),
            methods=names,
            networks=[name for name in networks.split(",") if name],
            record=folder,
            seed=seed,
            batch_size=None if batch_size is None else {"train": batch_size},
            device=torch_device(device),
            progress=status.update,
        )
    terminal.console.print(tables.personalisation(outcomes, PAPER))
    terminal.say(f"Saved in {folder / 'personalisation.json'}")


class InfluenceCommand(TaskCommand):
    """Reads the data, the model and the method first, then adds the flags of the task, of training, of the method, and of the network if it needs one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        peeked = {name: value_of(f"--{name}", args) for name in ("data", "model", "method")}
        known = {
            name: peeked[name]
            for name in ("data", "model")
            if peeked[name] in typing.get_args(typing.get_type_hints(Influence)[name])
        }
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
    return [
        training,
        *([] if method in SOLVERS else [(discovery.algorithm(method), f"Method {method}", method, "")]),
        *peers,
    ]


@click.command("influence", cls=InfluenceCommand)
@click.option(
    "--method",
    default="hgp",
    show_default=True,
    help=f"hgp, {', '.join(SOLVERS)}, or a server algorithm with an estimate, e.g. fbo_aggitd",
)
@click.option(
    "--num-removed",
    type=int,
    default=50,
    show_default=True,
    help="instances that are really removed, those of the largest predictions",
)
@click.option(
    "--at-once",
    type=int,
    default=None,
    help="training push: retrainings side by side (default: as many as 1 GiB of data holds)",
)
@click.option(
    "--num-listed",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    help="instances shown of those that harm and of those that help most",
)
@click.option(
    "--pictures/--no-pictures",
    "draw",
    default=None,
    help="draw removals and images (default: if matplotlib is installed)",
)
@click.option("--seed", type=int, default=0, show_default=True, help="seed of the minibatches")
@click.option(
    "--batch-size",
    type=int,
    default=None,
    help="samples per minibatch of training and prediction (default: all of a client's samples)",
)
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float64", show_default=True)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:1")
@click.option(
    "--chunk-size",
    type=int,
    default=None,
    help="clients evaluated at once under vmap (default: as many as fit a memory budget)",
)
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="folder of the record (default: a new one under runs/)"
)
def influence_command(
    method: str, num_removed: int, num_listed: int, draw: bool | None, out: Path | None, **values: Any
) -> None:
    """Which training instances help or harm all clients: one hypergradient predicts every removal, and real retraining checks the largest."""
    task = chosen(Influence, values, {})
    settings = {name: chosen(owner, values, task.suggests(name), prefix) for owner, _, name, prefix in _owners(method)}
    settings["averaging"] = chosen(
        Averaging, values, fitting(settings["network"], task.suggests("averaging")), "averaging"
    )
    folder = out or terminal.new_folder(f"influence-{task.data}-{task.model}")
    with terminal.console.status("") as status:
        result = influence.study(
            task,
            method=settings.pop(method, method),
            num_removed=num_removed,
            at_once=values["at_once"],
            record=folder,
            draw=plots.available() if draw is None else draw,
            progress=status.update,
            **settings,
            **{name: values[name] for name in ("seed", "batch_size", "chunk_size")},
            dtype=DTYPES[values["dtype"]],
            device=torch_device(values["device"]),
        )
    for table in tables.influence(result, num_listed):
        terminal.console.print(table)
    terminal.say(f"Saved in {folder}")


def _parts(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


@click.command("reproduce")
@click.argument("name", required=False)
@click.option(
    "--quick",
    is_flag=True,
    help="a small version of it, about two minutes at most: shows that it runs, not what comes out",
)
@click.option("--panels", default="", help="only these, with commas between")
@click.option("--rows", default="", help="only these, with commas between")
@click.option("--repetitions", type=click.IntRange(min=1), default=None, help="instead of what the experiment says")
@click.option(
    "--jobs",
    "processes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="runs side by side, each in a process of its own",
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:1")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    help="folder of the results; one that exists is gone on with (default: runs/reproduce-NAME)",
)
@click.option(
    "--record",
    "keep",
    is_flag=True,
    help="write what came out into the experiment's own file, with commit, machine and time",
)
@click.option(
    "--results", is_flag=True, help="run nothing: print what is recorded, of NAME or of all experiments, as Markdown"
)
def reproduce_command(
    name: str | None,
    results: bool,
    quick: bool,
    panels: str,
    rows: str,
    repetitions: int | None,
    processes: int,
    device: str,
    out: Path | None,
    keep: bool,
) -> None:
    """A table or figure of a paper: ours beside theirs, with pictures. Without a NAME: which there are. Interrupted, it goes on where it was."""
    if results:
        for one in [name] if name is not None else sorted(experiment.known()):
            terminal.say(tables.recorded(experiment.read(one)))
        return
    if name is None:
        if not experiment.known():
            raise SettingError(
                "no experiments were found: run this in a checkout, or give the path of an experiment.toml."
            )
        for known, path in experiment.known().items():
            terminal.say(f"{known:<28} {experiment.read(path).title}")
        return
    if quick and keep:
        raise SettingError(
            "--quick results are not those of the experiment, so they are not recorded: leave out --quick or --record."
        )
    torch_device(device)
    chosen_one = experiment.read(name)
    jobs = chosen_one.jobs(quick=quick, panels=_parts(panels), rows=_parts(rows), repetitions=repetitions)
    folder = out or Path("runs") / f"reproduce-{chosen_one.name}{'-quick' if quick else ''}"
    with terminal.console.status("") as status:
        say = status.update if terminal.console.is_terminal else lambda _: None
        try:
            found = reproduce.reproduce(jobs, folder, device=device, processes=processes, say=say)
        except KeyboardInterrupt:
            terminal.console.print("Stopped. The same command goes on where it was.")
            sys.exit(130)
    for table in tables.reproduction(chosen_one, reproduce.summary(found)):
        terminal.console.print(table)
    if quick:
        terminal.say(
            "A small version, on other data: it shows that all of it runs. Its figures are not to be compared with the paper's."
        )
    drawn = reproduce.draw(chosen_one, found, folder)
    terminal.say(f"Saved in {folder}" + (f", pictures {', '.join(path.name for path in drawn)}" if drawn else ""))
    if keep:
        reproduce.record(chosen_one, found)
        terminal.say(f"Recorded in {chosen_one.path}")


@click.command("tune")
@click.argument("name")
@click.option("--panels", default="", help="only these, with commas between")
@click.option("--rows", default="", help="only these, with commas between (default: those with ranges in [tune])")
@click.option(
    "--jobs",
    "processes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="trials side by side, each in a process of its own",
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:1")
@click.option("--seed", type=int, default=0, show_default=True, help="seed of the search over ranges")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    help="folder of the trials; those in it are not run again (default: runs/tune-NAME)",
)
@click.option(
    "--write/--no-write",
    "keep",
    default=True,
    show_default=True,
    help="write the chosen values into the experiment's file",
)
def tune_command(
    name: str, panels: str, rows: str, processes: int, device: str, seed: int, out: Path | None, keep: bool
) -> None:
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
        with terminal.console.status("") as status:
            say = status.update if terminal.console.is_terminal else lambda _: None
            found = tune.tune(
                chosen_one,
                out or Path("runs") / f"tune-{chosen_one.name}",
                panel=panel,
                row=row,
                device=device,
                processes=processes,
                seed=seed,
                say=say,
            )
        terminal.console.print(tables.tuning(found, chosen_one))
        if keep:
            tune.write(chosen_one, found)
    if keep:
        terminal.say(f"Written into {chosen_one.path}")


COMMANDS = (compare_command, personalise_command, influence_command, reproduce_command, tune_command)
