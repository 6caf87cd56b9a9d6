"""`fedbilevel mix`: weights of sources of text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, get_args

import click
from rich.table import Table

from fedbilevel.cli import terminal
from fedbilevel.cli.flags import chosen
from fedbilevel.cli.personalise import StudyCommand
from fedbilevel.data.tokens import read_texts
from fedbilevel.oracle.precision import Precision
from fedbilevel.runs.options import torch_device
from fedbilevel.runs.record import make_folder, write_whole
from fedbilevel.studies.mixed_texts import MixedTexts, choose
from fedbilevel.studies.texts import TextMixing, TextStudy


class MixCommand(StudyCommand):
    owners = ((TextMixing, "Model and training"),)


@click.command("mix", cls=MixCommand)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--num-clients",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="clients among which files are divided, where clients have no folders of their own",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="seed of all draws")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:1")
@click.option(
    "--precision",
    type=click.Choice(get_args(Precision)),
    default="full",
    show_default=True,
    help="bf16, fp16: losses of derivatives in bfloat16 or float16",
)
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="folder of the result (default: under runs/)"
)
def mix_command(
    folder: Path, num_clients: int, seed: int, device: str, precision: Precision, out: Path | None, **values: Any
) -> None:
    """Learn how much each source of text in FOLDER should count for a language model.

    FOLDER holds one file or folder of text per source, and target.txt: text of the kind that the model
    is for. Or it holds one such folder per client. Sources on which a short training raises the
    loss on target text ("alone") are cut. A model is trained on the learned mixture and on the prior one,
    and held-out target text chooses.
    """
    texts = read_texts(folder, num_clients=num_clients)
    options = {"device": torch_device(device), "precision": precision}
    place = out or terminal.new_folder("mix")
    with terminal.console.status("learning weights of the sources"):
        try:
            found = choose(TextStudy(texts, chosen(TextMixing, values, {}), seed, options))
        except KeyboardInterrupt:
            terminal.say("Stopped before anything was saved.")
            sys.exit(130)
    terminal.console.print(_table(found))
    terminal.say_line(f"{found.sentence[:1].upper()}{found.sentence[1:]}.")
    make_folder(place)
    write_whole(place / "mixture.json", json.dumps(_plain(found), indent=1).encode())
    terminal.say(f"Saved in {place / 'mixture.json'}")


def _table(found: MixedTexts) -> Table:
    table = Table("source", "weight", "prior", "bilevel", "alone", "tokens", title="Sources")
    for row in found.table():
        weights = (f"{row[name]:.3f}" for name in ("weight", "prior", "bilevel"))
        table.add_row(row["source"], *weights, f"{row['alone']:+.3f}", str(row["tokens"]))
    return table


def _plain(found: MixedTexts) -> dict[str, Any]:
    names = ("answer", "difference", "error", "held_losses", "test_losses")
    return {"sources": found.table(), "mixture": found.mixture, **{name: getattr(found, name) for name in names}}
