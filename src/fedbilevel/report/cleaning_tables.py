"""Tables of a cleaning in a terminal: clients, transitions of labels, and suspects."""

from __future__ import annotations

from rich import box
from rich.table import Table

from fedbilevel.cleaning.client_labels import SHOWN, mistakes
from fedbilevel.cleaning.outcome import Cleaning
from fedbilevel.escapes import printable

_MOST_CLIENTS = 20
_WIDEST = 60  # letters of a matrix
_NUMBERS = ("labels", "wrong, estimated", "wrong, true", "flagged", "probability", "share")


def cleaning(found: Cleaning, num_listed: int) -> list[Table]:
    """Show the noise of every client, beside the truth if it is known, T, and the most suspicious samples."""
    known = [] if found.truth is None else [f"{share:.1%}" for share in found.truth.noise.values()]
    columns = ("client", "labels", "wrong, estimated", *(["wrong, true"] if known else []), "flagged")
    clients = _table("Clients", *columns, "most frequent mistake")
    for i, name in enumerate(found.names[:_MOST_CLIENTS]):
        clients.add_row(
            printable(name), str(len(found.labels[i])), f"{found.noise[name]:.1%}", *known[i : i + 1],
            str(int(found.flags[i].sum())), printable(_mistake(found, i)),
        )  # fmt: skip
    tables, suspects = [clients, _transition(found)], found.suspects(num_listed)
    if not suspects:
        return tables
    table = _table("Most suspicious labels", "client", "sample", "label", "suggested", "probability")
    for one in suspects:
        place = one.file or str(one.sample)
        table.add_row(*map(printable, (one.client, place, one.label, one.suggested)), f"{one.probability:.3f}")
    return [*tables, table]


def _transition(found: Cleaning) -> Table:
    """Show T of all clients in percent, or the most frequent mistakes if it is too wide."""
    names = [printable(name) for name in found.class_names]
    if sum(max(5, len(name) + 2) for name in names) <= _WIDEST:
        table = _table("True class (rows), given label (columns), in %", "", *names)
        for name, row in zip(names, 100 * found.transition, strict=True):
            table.add_row(name, *(f"{value:.0f}" for value in row))
        for column in table.columns[1:]:
            column.justify = "right"
        return table
    table = _table("Most frequent mistakes", "true class", "given label", "share")
    for true, given, share in mistakes(found.transition, found.class_names)[:SHOWN]:
        table.add_row(printable(true), printable(given), f"{share:.1%}")
    return table


def _mistake(found: Cleaning, client: int) -> str:
    """Return the most frequent mistake of a client, in words."""
    true, given, share = mistakes(found.client_transition(client), found.class_names)[0]
    return f"{true} labelled {given} ({share:.0%})"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in _NUMBERS else "left")
    return table
