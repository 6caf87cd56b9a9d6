"""The command line, with one module of this folder per group of commands."""

from __future__ import annotations

import io
import os
import sys
import traceback
import warnings
from contextlib import redirect_stderr, redirect_stdout

import click

from fedbilevel._version import __version__
from fedbilevel.cli import terminal
from fedbilevel.cli.commands import Commands
from fedbilevel.errors import FedBilevelError, RankLostError
from fedbilevel.escapes import printable


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 140})
@click.version_option(__version__, prog_name="fedbilevel")
def cli() -> None:
    """Federated bilevel optimisation.

    Clean labels, tune hyperparameters and learn representations across clients that share no data.
    """


def main() -> None:
    """Run the command line; user errors have no traceback, and only the first rank prints."""
    first = os.environ.get("WORLD_SIZE", "1") in ("", "0", "1") or os.environ.get("RANK", "0") == "0"
    terminal.console.quiet = not first
    sys.excepthook = lambda *what: print(
        printable("".join(traceback.format_exception(*what)), lines=True), end="", file=sys.stderr
    )
    warnings.showwarning = lambda message, *_args, **_kwargs: (
        terminal.complain(f"Warning: {message}") if first else None
    )
    try:
        if first:
            cli.main(standalone_mode=True)
        else:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                cli.main(standalone_mode=True)
    except RankLostError as error:
        if error.speaks:
            terminal.complain(f"Error: {error}")
        sys.stderr.flush()
        os._exit(2)  # a normal exit could wait forever for the lost rank; all files are written
    except FedBilevelError as error:
        if first:
            terminal.complain(f"Error: {error}")
        sys.exit(2)
