"""Commands that list names: `list`, and the script that completes names in a shell."""

from __future__ import annotations

from importlib.metadata import entry_points

import click
from click.shell_completion import get_completion_class
from rich.table import Table

from fedbilevel import catalogue
from fedbilevel.cli import terminal

_TITLES = {"algorithms": "Algorithms", "detectors": "Detectors of wrong labels", "tasks": "Tasks"}


@click.command("list")
def list_command() -> None:
    """List all algorithms and tasks with a short description."""
    for kind, title in _TITLES.items():
        table = Table(title=title, title_justify="left", show_header=False)
        for name, line in sorted(_described(kind).items()):
            table.add_row(name, line)
        terminal.console.print(table)
    terminal.console.print("To see the flags of a task and an algorithm: fedbilevel run TASK --algorithm NAME --help")


def _described(kind: str) -> dict[str, str]:
    """Return the first line of each module; only classes of other packages are imported."""
    lines = catalogue.first_lines(kind)
    if entry_points(group=f"fedbilevel.{kind}"):
        from fedbilevel import discovery
        from fedbilevel.cli.flags import first_line

        lines |= {name: first_line(one) for name, one in getattr(discovery, kind)().items() if name not in lines}
    return lines


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print a completion script for SHELL.

    It completes commands, flags, tasks and algorithms. For bash, run:
    eval "$(fedbilevel completion bash)"
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(click.Command(None), {}, "fedbilevel", "_FEDBILEVEL_COMPLETE").source())
