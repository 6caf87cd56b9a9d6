"""Tables of a cleaning in a terminal: clients and suspects."""

from __future__ import annotations

from rich import box
from rich.table import Table

from fedbilevel.cleaning.outcome import Cleaning
from fedbilevel.escapes import printable

_MOST_CLIENTS = 20


def cleaning(found: Cleaning, num_listed: int) -> list[Table]:
    """Show the estimated noise of every client, and the most suspicious samples."""
    clients = _table("Clients", "client", "labels", "wrong, estimated", "flagged", "most frequent mistake")
    for i, name in enumerate(found.names[:_MOST_CLIENTS]):
        matrix = found.client_transition(i).copy()
        matrix[range(len(matrix)), range(len(matrix))] = 0
        true, given = divmod(int(matrix.argmax()), len(matrix))
        clients.add_row(
            printable(name), str(len(found.labels[i])), f"{found.noise[name]:.1%}", str(int(found.flags[i].sum())),
            printable(f"{found.class_names[true]} labelled {found.class_names[given]} ({matrix.max():.0%})"),
        )  # fmt: skip
    suspects = found.suspects(num_listed)
    if not suspects:
        return [clients]
    table = _table("Most suspicious labels", "client", "sample", "label", "suggested", "probability")
    for one in suspects:
        place = one.file or str(one.sample)
        table.add_row(*map(printable, (one.client, place, one.label, one.suggested)), f"{one.probability:.3f}")
    return [clients, table]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in ("labels", "flagged", "probability") else "left")
    return table
