"""`fedbilevel influence`: training instances that help or harm."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import click

from fedbilevel import plots
from fedbilevel.cli import terminal
from fedbilevel.cli.flags import TaskCommand, chosen, fitting, flags, value_of
from fedbilevel.federation.averaging import Averaging
from fedbilevel.oracle.hypergradient import SOLVERS
from fedbilevel.report import tables
from fedbilevel.runs.options import BETWEEN_PEERS, DTYPES, torch_device
from fedbilevel.settings import Settings
from fedbilevel.studies.influence.fit import default_method
from fedbilevel.studies.influence.predict import ESTIMATES, kind_of
from fedbilevel.studies.influence.retrain import Training
from fedbilevel.studies.influence.study import study
from fedbilevel.tasks.influence import Influence


class InfluenceCommand(TaskCommand):
    """A command that reads data, model and method first, then adds the flags of the study."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        peeked = {name: value_of(f"--{name}", args) for name in ("data", "model", "method")}
        known = {
            name: peeked[name]
            for name in ("data", "model")
            if peeked[name] in typing.get_args(typing.get_type_hints(Influence)[name])
        }
        task = chosen(Influence, known, {})
        ctx.meta["settings"] = flags(Influence, "Task influence", {})
        between = any(word.startswith(("--network", "--averaging")) for word in args) or None
        default = default_method(network=between, convex=task.model == "logistic")
        ctx.meta["method"] = peeked["method"] or default
        for owner, section, name, prefix in _owners(ctx.meta["method"]):
            theirs = flags(owner, section, task.suggests(name), prefix)
            ctx.meta["settings"] += [option for option in theirs if name != "hgp" or option.name in ESTIMATES]
        return click.Command.parse_args(self, ctx, args)


def _owners(method: str) -> list[tuple[type[Settings], str, str, str]]:
    """Return owners of flags as (class, section of the help page, name for suggestions, prefix)."""
    training = (Training, "Training", "training", "training")
    peers = [(owner, name.capitalize(), name, name) for name, owner in BETWEEN_PEERS.items()]
    return [
        training,
        *([] if method in SOLVERS else [(kind_of(method), f"Method {method}", method, "")]),
        *peers,
    ]


@click.command("influence", cls=InfluenceCommand)
@click.option(
    "--method",
    default=None,
    help=f"estimator: {', '.join(SOLVERS)}, series, hgp, or a server algorithm with an estimate, e.g. fbo_aggitd "
    "(default: cg, and series for --model cnn; hgp with flags of a network or of averaging)",
)
@click.option(
    "--num-removed",
    type=int,
    default=50,
    show_default=True,
    help="number of instances to remove and retrain without; the largest predictions are removed",
)
@click.option(
    "--at-once",
    type=int,
    default=None,
    help="training push: number of retrainings in parallel (default: as many as fit into 1 GiB of data)",
)
@click.option(
    "--num-listed",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    help="number of the most harmful and of the most helpful instances to show",
)
@click.option(
    "--pictures/--no-pictures",
    "draw",
    default=None,
    help="draw predicted against actual changes, and the instances (default: if matplotlib is installed)",
)
@click.option("--seed", type=int, default=0, show_default=True, help="seed of the minibatches")
@click.option(
    "--batch-size",
    type=int,
    default=None,
    help="samples per minibatch of training and prediction (default: all of a client's samples)",
)
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float64", show_default=True, help="number format")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:1")
@click.option(
    "--chunk-size",
    type=int,
    default=None,
    help="number of clients evaluated at once under vmap (default: as many as fit a memory budget)",
)
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="folder of the record (default: a new one under runs/)"
)
def influence_command(
    method: str | None, num_removed: int, num_listed: int, draw: bool | None, out: Path | None, **values: Any
) -> None:
    """Find training instances that help or harm all clients.

    One hypergradient predicts how the removal of each instance changes the validation loss.
    Retraining without the instances with the largest predictions checks the predictions.
    """
    task = chosen(Influence, values, {})
    method = str(click.get_current_context().meta["method"])
    settings = {name: chosen(owner, values, task.suggests(name), prefix) for owner, _, name, prefix in _owners(method)}
    settings["averaging"] = chosen(
        Averaging, values, fitting(settings["network"], task.suggests("averaging")), "averaging"
    )
    folder = out or terminal.new_folder(f"influence-{task.data}-{task.model}")
    with terminal.console.status("") as status:
        result = study(
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
