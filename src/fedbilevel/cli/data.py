"""`fedbilevel data`: datasets in files."""

from __future__ import annotations

import click

from fedbilevel.cli import terminal
from fedbilevel.data import catalogue, fetch, locations
from fedbilevel.errors import DataError


@click.group("data")
def data() -> None:
    """List, locate and download datasets. Only datasets with a known checksum can be downloaded."""


@data.command("list")
@click.option("--data-dir", default=None, help="folder to look into first")
def data_list(data_dir: str | None) -> None:
    """List all datasets, with the folder of each or how to download it."""
    for name, entry in catalogue.SETS.items():
        try:
            state = f"in {catalogue.where(name, data_dir)[0]}"
        except DataError:
            state = f"missing; fedbilevel data fetch {name}" if name in fetch.KNOWN else "missing"
        terminal.say(f"{name:<12} {entry.about} ({state})")


@data.command("where")
@click.argument("name", required=False)
@click.option("--data-dir", default=None, help="folder to look into first")
def data_where(name: str | None, data_dir: str | None) -> None:
    """List the folders that are searched, in order; with a NAME, the files of that dataset."""
    for place in locations.folders(data_dir) if name is None else catalogue.where(name, data_dir):
        terminal.say(str(place))


@data.command("fetch")
@click.argument("name")
@click.option("--data-dir", default=None, help="target folder (default: $FEDBILEVEL_DATA, or the cache)")
def data_fetch(name: str, data_dir: str | None) -> None:
    """Download the dataset NAME from its public source and verify its checksum.

    An existing dataset is not downloaded again.
    """
    with terminal.console.status("") as status:
        show = lambda file, done, total: status.update(
            f"{file}: {done / 1e6:.1f} MB" + (f" of {total / 1e6:.1f} MB" if total else "")
        )
        found = fetch.ensure(name, data_dir, show)
    for place in found:
        terminal.say(str(place))
