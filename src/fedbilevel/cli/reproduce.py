"""`fedbilevel reproduce`: experiments of papers."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from fedbilevel.cli import terminal
from fedbilevel.cli.flags import jobs_option
from fedbilevel.errors import SettingError
from fedbilevel.report import budget_tables, goal_tables, item_tables, seed_tables, tables
from fedbilevel.runs.options import torch_device
from fedbilevel.studies import experiment, extension, pictures, reproduce, verdicts


def _parts(text: str) -> list[str]:
    """Split a comma-separated list."""
    return [part for part in text.split(",") if part]


@click.command("reproduce")
@click.argument("name", required=False)
@click.option(
    "--quick",
    is_flag=True,
    help="run a small version (two minutes at most) to test that it runs; do not compare its results with the paper",
)
@click.option("--panels", default="", help="run only these panels (comma-separated list)")
@click.option("--rows", default="", help="run only these rows (comma-separated list)")
@click.option(
    "--repetitions",
    type=click.IntRange(min=1),
    default=None,
    help="number of repetitions (default: as in the experiment's file)",
)
@jobs_option("runs")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:1")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    help="folder of the results; an existing folder is resumed (default: runs/reproduce-NAME)",
)
@click.option(
    "--record",
    "keep",
    is_flag=True,
    help="write the results into the experiment's file, with commit, machine and time",
)
@click.option(
    "--extend",
    is_flag=True,
    help="leave out repetitions that the experiment's file records with these settings; --record adds the others",
)
@click.option(
    "--results",
    is_flag=True,
    help="run nothing: print the state of the papers' items, the recorded results of NAME or of all experiments as "
    "Markdown, their goals (met, not met or open), and the rows that diverged or have few repetitions",
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
    extend: bool,
) -> None:
    """Reproduce a table or figure of a paper: our results beside the paper's, with pictures.

    Without a NAME, list the experiments. The same command resumes an interrupted experiment.
    """
    if results:
        chosen = [experiment.read(one) for one in ([name] if name is not None else sorted(experiment.known()))]
        after = (goal_tables, budget_tables, seed_tables)
        parts = (item_tables.table(chosen), *map(tables.recorded, chosen), *(one.table(chosen) for one in after))
        for part in parts:
            if part:
                terminal.say(part)
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
            "--quick gives other results than the experiment, so they are not recorded: omit --quick or --record."
        )
    torch_device(device)
    chosen_one = experiment.read(name)
    jobs = chosen_one.jobs(quick=quick, panels=_parts(panels), rows=_parts(rows), repetitions=repetitions)
    if extend:
        jobs = extension.unrecorded(chosen_one, jobs)
        if not jobs:
            terminal.say(f"{chosen_one.path} records all of these repetitions: ask for more with --repetitions.")
            return
    folder = out or Path("runs") / f"reproduce-{chosen_one.name}{'-quick' if quick else ''}"
    with terminal.console.status("") as status:
        say = status.update if terminal.console.is_terminal else lambda _: None
        try:
            found = reproduce.reproduce(jobs, folder, device=device, processes=processes, say=say)
        except KeyboardInterrupt:
            terminal.console.print("Stopped. The same command resumes it.")
            sys.exit(130)
    judged = verdicts.verdicts(chosen_one, verdicts.values_of(chosen_one, found))
    for table in tables.reproduction(chosen_one, reproduce.summary(found), judged):
        terminal.console.print(table)
    if quick:
        terminal.say(
            "This was a small version, on other data: it shows that the experiment runs. "
            "Do not compare its figures with the paper's."
        )
    drawn = pictures.draw(chosen_one, found, folder)
    terminal.say(f"Saved in {folder}" + (f", pictures {', '.join(path.name for path in drawn)}" if drawn else ""))
    if keep:
        reproduce.record(chosen_one, found)
        terminal.say(f"Recorded in {chosen_one.path}")
