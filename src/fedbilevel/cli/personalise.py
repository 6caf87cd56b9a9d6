"""`fedbilevel personalise`: methods of personalisation on several networks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from fedbilevel.cli import terminal
from fedbilevel.cli.flags import TaskCommand, chosen, flags
from fedbilevel.report import tables
from fedbilevel.runs.options import torch_device
from fedbilevel.settings import Settings
from fedbilevel.studies.personalisation import METHODS, NETWORKS, PAPER, PersonalisationPlan, personalise
from fedbilevel.tasks.personalisation import Personalisation


class StudyCommand(click.Command):
    """A command with flags for the settings of `owners`, except those that the study fixes."""

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
    owners = ((Personalisation, "Task"), (PersonalisationPlan, "Training"))
    decided = ("personalise", "lower")


@click.command("personalise", cls=PersonaliseCommand)
@click.option(
    "--methods",
    default="local,sgp,hgp_pl",
    show_default=True,
    help=f"comma-separated list of {', '.join(METHODS)}; or all",
)
@click.option("--networks", default=",".join(NETWORKS), show_default=True, help="comma-separated list of networks")
@click.option("--seed", type=int, default=0, show_default=True, help="seed of all random draws of the runs")
@click.option(
    "--batch-size",
    type=int,
    default=None,
    help="training samples per minibatch (default: all of a client's; the paper: 128)",
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:1")
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="folder of the record; an existing record is resumed"
)
def personalise_command(
    methods: str, networks: str, seed: int, batch_size: int | None, device: str, out: Path | None, **values: Any
) -> None:
    """Train personalised models on every network, as in Table 2 of Terashita and Hara, 2023.

    Shows mean and bottom-decile accuracy over clients.
    """
    folder = out or terminal.new_folder("personalise")
    names = list(METHODS) if methods == "all" else [name for name in methods.split(",") if name]
    with terminal.console.status("") as status:
        try:
            outcomes = personalise(
                chosen(Personalisation, values, {}),
                chosen(PersonalisationPlan, values, {}),
                methods=names,
                networks=[name for name in networks.split(",") if name],
                record=folder,
                seed=seed,
                batch_size=None if batch_size is None else {"train": batch_size},
                device=torch_device(device),
                progress=status.update,
            )
        except KeyboardInterrupt:
            some = f"Stopped. The same command with --out {folder} leaves out what is finished."
            terminal.say(some if (folder / "personalisation.json").exists() else "Stopped before any run was finished.")
            sys.exit(130)
    terminal.console.print(tables.personalisation(outcomes, PAPER))
    terminal.say(f"Saved in {folder / 'personalisation.json'}")
