"""Terminal output of all commands: messages, the progress bar, and names of record folders."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedbilevel.columns import DIAGNOSTICS
from fedbilevel.escapes import printable

if TYPE_CHECKING:
    from fedbilevel.runs.result import Progress as RunProgress

console = Console()
if not console.is_terminal:
    console = Console(width=120)  # a file or a pipe has no width
complaints = Console(stderr=True)


def say(text: str) -> None:
    """Print plain lines of any length.

    Text of another party must go through `say_line` or `printable`, so that it cannot add lines.
    """
    console.print(printable(text, lines=True), highlight=False, soft_wrap=True, markup=False, emoji=False)


def say_line(text: str) -> None:
    """Print a sentence on one line, even if it quotes text of another party."""
    say(printable(text))


def complain(text: str) -> None:
    """Print an error or a warning on one line, even if it quotes text of another party."""
    complaints.print(printable(text), highlight=False, soft_wrap=True, markup=False, emoji=False)


class Bar:
    """A progress bar with cost, metrics and remaining time.

    Without a terminal, it prints one line per measurement.
    """

    skips = True

    def __init__(self, name: str, headline: Sequence[str]) -> None:
        self.headline, self.name = headline, printable(name)
        named, *texts = (
            TextColumn(text, markup=False)
            for text in ("{task.description}", "{task.fields[cost]}", "{task.fields[figures]}")
        )
        columns = (
            *texts,
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        self.bar = Progress(named, BarColumn(20), *columns, console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task(f"{self.name:<12}", total=1.0, cost="", figures="")
        self.figures = ""

    def __enter__(self) -> Bar:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def part(self, name: str) -> Bar:
        """Begin with another part of the work, and return the callback for it."""
        before, self.name, self.figures = self.name, printable(name), ""
        self.bar.reset(self.task, description=f"{self.name:<12}", cost="", figures="")
        if not console.is_terminal and self.name != before:
            say(f"{self.name}: begins")
        return self

    def __call__(self, now: RunProgress) -> None:
        cost = f"{now.rounds} rounds, {now.megabytes:.1f} MB"
        where = f"{now.iteration}/{now.num_iterations}" if now.num_rounds is None else f"{now.iteration}"
        if now.row is not None:
            shown = [*(name for name in self.headline if name in now.row)][:2]
            shown += [name for name in DIAGNOSTICS if name in now.row and name not in shown][:1]
            self.figures = printable(", ".join(f"{name} {now.row[name]:.4g}" for name in shown))
            if not console.is_terminal:
                say(f"{self.name}: outer iteration {where}, {cost}, {self.figures}")
        self.bar.update(self.task, completed=now.share, cost=f"{where}, {cost}", figures=self.figures)


def new_folder(name: str) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    folder, number = Path("runs") / f"{name}-{stamp}", 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{stamp}-{number}"
    return folder
