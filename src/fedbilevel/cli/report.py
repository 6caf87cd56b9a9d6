"""`fedbilevel report` and `fedbilevel watch`: HTML pages of recorded and of current runs."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from fedbilevel.cli.terminal import say, say_line
from fedbilevel.studies.comparison import Target


@click.command("report")
@click.argument("paths", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    help="file of the page (default: report.html in the first folder)",
)
@click.option(
    "--target",
    default=None,
    metavar="METRIC=VALUE",
    help="show the cost of reaching this value, e.g. test_accuracy=0.94",
)
@click.option("--title", default=None, help="title of the page (default: the task)")
@click.option("--open", "look", is_flag=True, help="open the page in a browser")
def report(paths: tuple[Path, ...], out: Path | None, target: str | None, title: str | None, look: bool) -> None:
    """Write a self-contained HTML page about the records RUN.

    The page shows curves, costs to a target, the data of each client, findings and settings. RUN is
    the folder of a run, a comparison or a study, or a folder with several of these. Runs that
    differ only in their seeds become one curve with a band.
    """
    from fedbilevel.report.page import write_report

    place = write_report(list(paths), out, target=Target.parse(target) if target is not None else None, title=title)
    say(str(place))
    if look:
        webbrowser.open(place.resolve().as_uri())


@click.command("watch")
@click.argument("path", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--port", type=int, default=0, show_default=True, help="port on this machine; 0: any free port")
@click.option("--target", default=None, metavar="METRIC=VALUE", help="show the cost of reaching this value")
@click.option("--open/--no-open", "look", default=True, help="open the page in a browser")
def watch(path: Path, port: int, target: str | None, look: bool) -> None:
    """Show the live page of a run in a browser on this machine, until Ctrl-C."""
    from fedbilevel.report.watch import Live
    from fedbilevel.report.watch import watch as serve

    def begun(address: str) -> None:
        say(f"{path} is shown at {address} (Ctrl-C ends this).")
        if look:
            webbrowser.open(address)

    serve(Live([path], target=Target.parse(target) if target is not None else None), port, begun, say_line)
    say(f"No longer watching {path}.")
