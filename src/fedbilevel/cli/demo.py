"""`fedbilevel demo`: the command `clean` on built-in digits with labels corrupted on purpose."""

from __future__ import annotations

from pathlib import Path

import click

from fedbilevel.cli import terminal
from fedbilevel.cli.clean import clean_and_show
from fedbilevel.tasks.data_cleaning import DataCleaning

_NUM_LISTED = 5


@click.command("demo")
@click.option("--seed", type=int, default=0, show_default=True, help="seed of the split and of the wrong labels")
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="folder of the record (default: a new one under runs/)"
)
def demo_command(seed: int, out: Path | None) -> None:
    """Clients find each other's wrong labels in built-in digits without sharing data."""
    task = DataCleaning(noise=0.2, data_seed=seed)
    clients = task.build().clients
    num = sum(len(client["train"]["label"]) for client in clients)
    terminal.say(
        f"{len(clients)} clients hold {num:,} handwritten digits, and {task.noise:.0%} of the labels were replaced by "
        f"wrong ones on purpose.\nThe clients find them together, with the help of {task.num_clean} checked digits per "
        "client: they send sums, and keep images, labels and suspects.\n"
    )
    folder = out or terminal.new_folder("demo")
    clean_and_show(clients, folder, _NUM_LISTED, detector="label_em", features="convolutional", seed=seed)
    terminal.say("\nTo clean labels of your own, with one folder per client in FOLDER: fedbilevel clean FOLDER")
