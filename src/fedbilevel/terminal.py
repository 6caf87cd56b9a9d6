"""What the commands share of the terminal: where they print, how a run shows how far it is, and folders for records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedbilevel.figures import DIAGNOSTICS
from fedbilevel.run import Progress as RunProgress

console = Console()
if not console.is_terminal:
    console = Console(width=120)  # a file or a pipe has no width of its own
complaints = Console(stderr=True)


def say(text: str) -> None:
    """A plain line, however long."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def complain(text: str) -> None:
    complaints.print(text, highlight=False, soft_wrap=True, markup=False)


class Bar:
    """A bar on a terminal, with what was paid, the first figures, how exact it is and the time that is left; one line per measurement elsewhere."""

    def __init__(self, name: str, headline: Sequence[str]) -> None:
        self.headline, self.name = headline, name
        columns = (
            *(TextColumn(text) for text in ("{task.fields[cost]}", "{task.fields[figures]}")),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        self.bar = Progress(TextColumn(f"{name:<12}"), BarColumn(20), *columns, console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task(name, total=1.0, cost="", figures="")
        self.figures = ""

    def __enter__(self) -> Callable[[RunProgress], None]:
        self.bar.start()
        return self.show

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, now: RunProgress) -> None:
        cost = f"{now.rounds} rounds, {now.megabytes:.1f} MB"
        where = f"{now.iteration}/{now.num_iterations}" if now.num_rounds is None else f"{now.iteration}"
        if now.row is not None:
            shown = [*(name for name in self.headline if name in now.row)][:2]
            shown += [name for name in DIAGNOSTICS if name in now.row and name not in shown][:1]
            self.figures = ", ".join(f"{name} {now.row[name]:.4g}" for name in shown)
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
