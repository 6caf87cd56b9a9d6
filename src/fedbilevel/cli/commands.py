"""A group of commands that are found by reading the files of this folder.

The module of a command is imported when the command runs. Help, completion of names and errors of
spelling import nothing, because loading torch takes seconds.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import click
from click.shell_completion import CompletionItem

from fedbilevel.errors import UnknownNameError

_HERE = Path(__file__).parent
_COMMAND = re.compile(
    r'^@click\.(?:command|group)\("([\w-]+)".*?^def (\w+)\(.*?^    """(.*?)"""', re.MULTILINE | re.DOTALL
)


class Place(NamedTuple):
    """The module and the function of a command, and its help text."""

    module: str
    function: str
    text: str

    def short(self, limit: int = 45) -> str:
        return click.Command(None, help=self.text).get_short_help_str(limit)


@cache
def places() -> dict[str, Place]:
    """Return the commands of this folder by name."""
    return {
        name: Place(path.stem, function, text)
        for path in sorted(_HERE.glob("*.py"))
        for name, function, text in _COMMAND.findall(path.read_text())
    }


class Commands(click.Group):
    """A group that imports a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(places())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in places():
            return None
        place = places()[cmd_name]
        command = getattr(import_module(f"{__package__}.{place.module}"), place.function)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in places() and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise UnknownNameError("command", args[0], places())
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        limit = formatter.width - 6 - max(map(len, places()))
        with formatter.section("Commands"):
            formatter.write_dl([(name, places()[name].short(limit)) for name in self.list_commands(ctx)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        names = [CompletionItem(name, help=places()[name].short()) for name in found]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]
