"""Commands of `fedbilevel federation` for the operator of a site: audit, approval and pauses."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import sys
import time
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fedbilevel.cli.terminal import console, say
from fedbilevel.errors import SettingError
from fedbilevel.escapes import printable
from fedbilevel.sites import operator, telling, verification, view
from fedbilevel.sites.summary import AuditReport

KIT = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group()
def site() -> None:
    """Commands for the operator of a site, which `fedbilevel federation` offers."""


def with_kit(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--kit", type=KIT, required=True, help="this site's startup kit")(command)


@site.command("audit")
@with_kit
@click.option(
    "--contains",
    default="",
    metavar="VALUE",
    help="fail if the log does not contain this chain value of an earlier audit",
)
@click.option("--json", "as_json", is_flag=True, help="print the report as JSON")
def audit_command(kit: Path, contains: str, as_json: bool) -> None:
    """Verify and summarise the log of everything that left this site.

    Exit code 1: the log was changed.
    """
    if contains and not re.fullmatch("[0-9a-f]{16,64}", contains):
        shape = "expected the last chain value of an earlier audit, or at least its first 16 characters"
        raise SettingError(f"--contains is {contains!r:.80}, {shape}.")
    report = verification.verify(operator.site_folder(kit), contains)
    if as_json:
        click.echo(json.dumps(report.asdict(), indent=2))
    else:
        _show_audit(report)
    if not report.ok:
        sys.exit(1)


def _show_audit(report: AuditReport) -> None:
    span = f", from {telling.clock(report.first)} to {telling.clock(report.last)}" if report.first is not None else ""
    if report.ok:
        before = f", {report.num_unchained} of them from before there was a chain" if report.num_unchained else ""
        say(f"The log is whole: {report.num_lines} lines{before}{span}.")
    else:
        say(f"The log is broken: {printable(report.problem)}")
        say(f"{report.num_lines} lines can be read{span}; the summary below includes all of them.")
    for note in report.notes:
        say(f"Note: {printable(note)}")
    if report.runs:
        console.print(_by_run(report))
    for caller, count in report.callers.items():
        say(f"{printable(caller)} was refused {view.plural(count, 'time')}: it is not the server's job of a run here.")
    if report.others:
        say(f"Others were refused {view.plural(report.others, 'time')}.")
    if report.num_lines:
        say(f"Last chain value: {report.chain}")


def _by_run(report: AuditReport) -> Table:
    table = Table("run", "from", "to")
    for name in ("answers", "rounds", "MB", "refusals"):
        table.add_column(name, justify="right")
    table.add_column("arrays that left: count, largest norm")
    for name, run in report.runs.items():
        arrays = [f"{part}: {one['count']}, {_norm(one['largest_norm'])}" for part, one in run.arrays.items()]
        figures = (str(run.answers), str(run.rounds), f"{run.bytes / 1e6:.2f}", str(run.refusals))
        about = Text("\n".join(map(printable, arrays)))
        span = (telling.clock(run.first), telling.clock(run.last))
        table.add_row(Text(printable(name) or "(none)"), *span, *figures, about)
    return table


def _norm(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


@site.command("requests")
@with_kit
@click.option("--wait", type=click.FloatRange(min=0), default=0.0, help="maximum seconds to wait for a plan")
def requests_command(kit: Path, wait: float) -> None:
    """List plans that await this site's approval."""
    folder, end = operator.site_folder(kit), time.monotonic() + wait
    while not (waiting := operator.pending(folder)) and time.monotonic() < end:
        time.sleep(0.2)
    if not waiting:
        say("Nothing waits for approval.")
    for one in waiting:
        say(printable(telling.waiting(one, kit)))


@site.command("approve")
@click.argument("digest")
@with_kit
@click.option("--yes", is_flag=True, help="approve without a prompt")
def approve_command(digest: str, kit: Path, yes: bool) -> None:
    """Show the plan with this DIGEST (at least its first 8 characters) in full, and approve it."""
    folder = operator.site_folder(kit)
    request = operator.request(folder, digest)
    _show_rows(telling.plan_rows(request))
    if request["decision"]:
        say(f"So far it is {request['decision']}, by {printable(str(request['by']))}.")
    if not yes and not _is_asked("Approve this plan?"):
        say("Nothing was decided.")
        return
    operator.approve(folder, request["digest"], user())
    say(f"{printable(request['run'])} is approved.")


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _is_asked(question: str) -> bool:
    if not _is_terminal():
        raise SettingError("approve asks a person, and there is no terminal here: read the plan, then add --yes.")
    return click.confirm(question, default=False)


@site.command("refuse")
@click.argument("digest")
@with_kit
def refuse_command(digest: str, kit: Path) -> None:
    """Refuse the plan with this DIGEST (at least its first 8 characters), until you approve it."""
    run = operator.refuse(operator.site_folder(kit), digest, user())["run"]
    say(f"{printable(run)} is refused.")


@site.command("leave")
@click.argument("run")
@with_kit
def leave_command(run: str, kit: Path) -> None:
    """Leave the run RUN. To take part again, approve its digest."""
    found = operator.leave(operator.site_folder(kit), run, user())
    again = f"fedbilevel federation approve {found[-1]['digest'][: operator.SHOWN]} --kit {kit}"
    say(f"This site takes no further part in {printable(run)}. To take part again: {again}")


@site.command("pause")
@with_kit
def pause_command(kit: Path) -> None:
    """Pause this site until unpause. Runs wait for it or continue without it."""
    operator.pause(operator.site_folder(kit))
    say(f"This site is paused. To resume: fedbilevel federation unpause --kit {kit}")


@site.command("unpause")
@with_kit
def unpause_command(kit: Path) -> None:
    """End a pause."""
    operator.unpause(operator.site_folder(kit))
    say("This site answers again.")


@site.command("watch")
@with_kit
@click.option("--once", is_flag=True, help="print the state once and exit (default without a terminal)")
@click.option("--page", is_flag=True, help="serve a page with buttons for a browser on this machine")
@click.option("--port", type=int, default=0, show_default=True, help="port of the page; 0: any free port")
@click.option("--open", "opens", is_flag=True, help="open the page in a browser")
def watch_command(kit: Path, once: bool, page: bool, port: int, opens: bool) -> None:
    """Show the state of this site until Ctrl-C.

    Shows the connection, the run, the data that left, the budget, pending approvals and refusals.
    """
    folder = operator.site_folder(kit)
    running = _processes()

    def look() -> view.View:
        return view.look(folder, running(kit) if running else None)

    if page:
        from fedbilevel.report.operating import OperatorPage, serve

        def begun(address: str) -> None:
            say(f"{kit} is shown at {address} (Ctrl-C ends this). Whoever has this address can decide for this site.")
            if opens:
                webbrowser.open(shown.make_way().as_uri())

        shown = OperatorPage(kit, look, user(), port)
        serve(shown, begun)
    elif once or not console.is_terminal:
        now = look()
        say(f"{printable(now.name)}, {telling.clock(now.time)}")
        _show_rows(telling.rows(now, kit))
    else:
        _live(look, kit)


def _live(look: Callable[[], view.View], kit: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False, screen=True) as screen:
        while True:
            now = look()
            title = Text(f"{printable(now.name)}, {telling.clock(now.time)}; Ctrl-C ends this")
            screen.update(Panel(_grid(telling.rows(now, kit)), title=title, title_align="left"), refresh=True)
            time.sleep(1.0)


def _show_rows(rows: telling.Rows) -> None:
    """Print plain lines that are not cut at the width of the terminal."""
    width = max(len(heading) for heading, _ in rows)
    for heading, lines in rows:
        for number, line in enumerate(lines):
            say(f"{heading if number == 0 else '':<{width}}  {line}")


def _grid(rows: telling.Rows) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    for heading, lines in rows:
        grid.add_row(heading, Text("\n".join(lines)))
    return grid


def _processes() -> Callable[[Path], dict[int, str]] | None:
    """Return the function that lists running processes of a kit, or None if FLARE is missing."""
    try:
        from fedbilevel.sites.flare import processes
    except ModuleNotFoundError:
        return None
    return processes.running


def user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user has no name in some containers
        return f"user {os.getuid()}"
