"""The command line, with one module of this folder per group of commands."""

from __future__ import annotations

import io
import os
import sys
import traceback
import warnings
from contextlib import redirect_stderr, redirect_stdout

import click
from click.shell_completion import get_completion_class

from fedbilevel import discovery
from fedbilevel._version import __version__
from fedbilevel.cli import operator, terminal
from fedbilevel.cli.check import check_command
from fedbilevel.cli.clean import clean_command
from fedbilevel.cli.compare import compare_command
from fedbilevel.cli.data import data
from fedbilevel.cli.demo import demo_command
from fedbilevel.cli.federation import federation
from fedbilevel.cli.influence import influence_command
from fedbilevel.cli.new import new
from fedbilevel.cli.peer import peer
from fedbilevel.cli.personalise import personalise_command
from fedbilevel.cli.report import report as report_page
from fedbilevel.cli.report import watch as watch_page
from fedbilevel.cli.reproduce import reproduce_command
from fedbilevel.cli.run import resume_command, run_command
from fedbilevel.cli.tune import tune_command
from fedbilevel.errors import FedBilevelError, RankLostError
from fedbilevel.escapes import printable
from fedbilevel.report import tables


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 140})
@click.version_option(__version__, prog_name="fedbilevel")
def cli() -> None:
    """Federated bilevel optimisation.

    Clean labels, tune hyperparameters and learn representations across clients that share no data.
    """


@cli.command("list")
def list_command() -> None:
    """List all algorithms and tasks with a short description."""
    terminal.console.print(tables.names("Algorithms", discovery.algorithms()))
    terminal.console.print(tables.names("Detectors of wrong labels", discovery.detectors()))
    terminal.console.print(tables.names("Tasks", discovery.tasks()))
    terminal.console.print("To see the flags of a task and an algorithm: fedbilevel run TASK --algorithm NAME --help")


@cli.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print a completion script for SHELL.

    It completes commands, flags, tasks and algorithms. For bash, run:
    eval "$(fedbilevel completion bash)"
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "fedbilevel", "_FEDBILEVEL_COMPLETE").source())


for command in (
    run_command,
    resume_command,
    demo_command,
    check_command,
    clean_command,
    compare_command,
    personalise_command,
    influence_command,
    reproduce_command,
    tune_command,
    federation,
    peer,
    new,
    report_page,
    watch_page,
    data,
):
    cli.add_command(command)
for command in operator.COMMANDS:  # for the operator of a site
    federation.add_command(command)


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
