"""Tables of a cleaning in a terminal: clients and suspects."""

from __future__ import annotations

from rich import box
from rich.table import Table

from fedbilevel.cleaning.client_labels import mistakes
from fedbilevel.cleaning.outcome import Cleaning
from fedbilevel.escapes import printable

_MOST_CLIENTS = 20
_NUMBERS = ("labels", "wrong, estimated", "wrong, true", "flagged", "probability")


def cleaning(found: Cleaning, num_listed: int) -> list[Table]:
    """Show the noise of every client, beside the truth if it is known, and the most suspicious samples."""
    known = [] if found.truth is None else [f"{share:.1%}" for share in found.truth.noise.values()]
    columns = ("client", "labels", "wrong, estimated", *(["wrong, true"] if known else []), "flagged")
    clients = _table("Clients", *columns, "most frequent mistake")
    for i, name in enumerate(found.names[:_MOST_CLIENTS]):
        clients.add_row(
            printable(name), str(len(found.labels[i])), f"{found.noise[name]:.1%}", *known[i : i + 1],
            str(int(found.flags[i].sum())), printable(_mistake(found, i)),
        )  # fmt: skip
    suspects = found.suspects(num_listed)
    if not suspects:
        return [clients]
    table = _table("Most suspicious labels", "client", "sample", "label", "suggested", "probability")
    for one in suspects:
        place = one.file or str(one.sample)
        table.add_row(*map(printable, (one.client, place, one.label, one.suggested)), f"{one.probability:.3f}")
    return [clients, table]


def _mistake(found: Cleaning, client: int) -> str:
    """Return the most frequent mistake of a client, in words."""
    true, given, share = mistakes(found.client_transition(client), found.class_names)[0]
    return f"{true} labelled {given} ({share:.0%})"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in _NUMBERS else "left")
    return table
