"""Commands of `fedbilevel federation` for the operator of a site: what left, what waits for approval, and decisions."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from fedbilevel.escapes import printable
from fedbilevel.sites import audit, operator
from fedbilevel.terminal import console, say

KIT = click.Path(exists=True, file_okay=False, path_type=Path)


def with_kit(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--kit", type=KIT, required=True, help="this site's startup kit")(command)


@click.command("audit")
@with_kit
@click.option("--json", "as_json", is_flag=True, help="print all of it as JSON")
def audit_command(kit: Path, as_json: bool) -> None:
    """Check the log of everything that left this site, and summarise it. Exit code 1: the log was changed."""
    report = audit.verify(operator.site_folder(kit))
    if as_json:
        click.echo(json.dumps(report.asdict(), indent=2))
    else:
        _show_audit(report)
    if not report.ok:
        sys.exit(1)


def _show_audit(report: audit.AuditReport) -> None:
    span = f", from {clock(report.first)} to {clock(report.last)}" if report.first is not None else ""
    if report.ok:
        say(f"The log is whole: {report.num_lines} lines{span}.")
    else:
        say(f"The log is broken: {printable(report.problem)}")
        say(f"{report.num_lines} lines can be read{span}; what follows counts all of them.")
    for note in report.notes:
        say(f"Note: {printable(note)}")
    if report.runs:
        console.print(_by_run(report))
    for caller, count in report.callers.items():
        say(f"{printable(caller)} was refused {count} times: it is not the server's job of a run here.")
    if report.num_lines:
        say(f"Last chain value: {report.chain}")


def _by_run(report: audit.AuditReport) -> Table:
    table = Table("run", "from", "to")
    for name in ("answers", "rounds", "MB", "refusals"):
        table.add_column(name, justify="right")
    table.add_column("arrays that left: how often, largest norm")
    for name, run in report.runs.items():
        arrays = [f"{part}: {one['count']}, {_norm(one['largest_norm'])}" for part, one in run.arrays.items()]
        figures = (str(run.answers), str(run.rounds), f"{run.bytes / 1e6:.2f}", str(run.refusals))
        about = Text("\n".join(map(printable, arrays)))
        table.add_row(Text(printable(name) or "(none)"), clock(run.first), clock(run.last), *figures, about)
    return table


def _norm(value: float | None) -> str:
    return "not known" if value is None else f"{value:.3g}"


def clock(moment: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) if moment is not None else ""


COMMANDS = (audit_command,)
