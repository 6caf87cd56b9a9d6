"""`fedbilevel clean`: wrong labels of all clients, found by sums only."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from fedbilevel import discovery
from fedbilevel.cleaning.clean import clean_labels
from fedbilevel.cleaning.parts import Parts
from fedbilevel.cli import terminal
from fedbilevel.cli.flags import chosen, names_of
from fedbilevel.cli.personalise import StudyCommand
from fedbilevel.cli.run import ENGINE_OPTIONS, group_for
from fedbilevel.data.image_folders import read_clients
from fedbilevel.engines.distributed import TIMEOUT
from fedbilevel.engines.ranks import Group
from fedbilevel.errors import SettingError
from fedbilevel.report.cleaning_tables import cleaning
from fedbilevel.report.page import write_report
from fedbilevel.runs.options import torch_device
from fedbilevel.runs.record import Record
from fedbilevel.tasks.data_cleaning import DataCleaning


class CleanCommand(StudyCommand):
    owners = ((DataCleaning, "Built-in data, without folders"),)
    decided = ("learn", "features", "model", "num_hidden", "l2")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["words"] = [*args]  # the command that resumes repeats them
        return super().parse_args(ctx, args)


@click.command("clean", cls=CleanCommand)
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--detector",
    default="label_em",
    show_default=True,
    shell_complete=names_of(discovery.detectors),
    help="detector of wrong labels; fedbilevel list shows all",
)
@click.option(
    "--features",
    type=click.Choice(["auto", "given", "convolutional", "trained", "out_of_fold", "refined"]),
    default="auto",
    show_default=True,
    help="rows as they are given, random convolutional features, a small network that all clients train first, larger "
    "networks that have not seen the sample, or these in two passes; auto: convolutional for images",
)
@click.option(
    "--retrain",
    is_flag=True,
    help="with --features out_of_fold or refined: train last networks with and without the flagged labels, and let the "
    "guard choose",
)
@click.option(
    "--num-classes",
    type=click.IntRange(min=2),
    default=None,
    help="number of classes in files of arrays (default: the largest label plus one)",
)
@click.option("--size", type=click.IntRange(min=6), default=None, help="resize images to squares of this side")
@click.option(
    "--flag",
    type=click.Choice(["half", "rate"]),
    default="half",
    show_default=True,
    help="flag labels that are wrong with a probability above one half, or at a false-discovery rate",
)
@click.option("--rate", type=float, default=0.05, show_default=True, help="target of the false-discovery rate")
@click.option("--own-noise", is_flag=True, help="label_em: one transition matrix per client, which stays there")
@click.option("--num-listed", type=click.IntRange(min=0), default=10, show_default=True, help="suspects to show")
@click.option("--seed", type=int, default=0, show_default=True, help="seed of the held-out clean samples")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:1")
@ENGINE_OPTIONS[0]
@click.option("--resume", is_flag=True, help="continue the run in --out from its last checkpoint")
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="folder of the record (default: a new one under runs/)"
)
@click.pass_context
def clean_command(
    ctx: click.Context,
    /,
    folders: tuple[Path, ...],
    detector: str,
    features: Any,
    retrain: bool,
    num_classes: int | None,
    size: int | None,
    flag: Any,
    rate: float,
    own_noise: bool,
    num_listed: int,
    seed: int,
    device: str,
    engine: Any,
    resume: bool,
    out: Path | None,
    **values: Any,
) -> None:
    """Find wrong labels in FOLDERS, one per client, and say what cleaning is worth.

    A client's folder holds images, train/CLASS/*.png with the labels to check and val/CLASS/*.png with
    labels that were checked, or files train.npz and val.npz with the fields image and label. A folder
    of such folders holds several clients. Without folders, labels of built-in data are corrupted.
    """
    group = group_for(engine, device, TIMEOUT)
    folder = Path(group.told(lambda: str(out or terminal.new_folder("clean"))))
    if resume and out is None:
        raise SettingError("--resume needs the folder of the run to resume: add --out FOLDER.")
    named: dict[str, Any] = {}
    if folders:
        given = [name for name in values if values[name] is not None]
        if given:
            raise SettingError(
                f"--{given[0].replace('_', '-')} corrupts built-in data, but folders are given: leave one of both out."
            )
        read = read_clients(folders, size=size)
        clients: Any = read.clients
        named = {"names": read.names, "class_names": read.class_names, "files": read.files}
    else:
        task = chosen(DataCleaning, values, {})
        clients = task.build().clients
        features = "convolutional" if features == "auto" else features
    if num_classes is not None and (not folders or named["class_names"] is not None):
        raise SettingError(
            f"--num-classes is {num_classes}, but {'folders of images' if folders else 'built-in data'} say how many "
            "classes there are: leave it out, or give folders with files of arrays."
        )
    settings: dict[str, Any] = {"transition": "own"} if own_noise else {}
    clean_and_show(
        clients, folder, num_listed, detector=detector, features=features, flag=flag, rate=rate, retrain=retrain,
        num_classes=num_classes, resume=resume, seed=seed, device=torch_device(device), group=group,
        command=_to_resume(ctx.meta["words"], None if out is not None else folder), **named, **settings,
    )  # fmt: skip


def _to_resume(words: list[str], folder: Path | None) -> str:
    """Return the command that resumes a cleaning.

    folder: that of the record, unless the words name it.
    """
    named = [] if folder is None else ["--out", str(folder)]
    return shlex.join(["fedbilevel", "clean", *(word for word in words if word != "--resume"), *named, "--resume"])


def clean_and_show(
    clients: Any, folder: Path, num_listed: int, *, detector: str, command: str | None = None,
    group: Group | None = None, **how: Any,
) -> None:  # fmt: skip
    """Clean labels; print what was found and what it is worth; write files of clients and a page.

    command: what resumes the cleaning on the command line, if it can be resumed.
    group: the processes that clean together, of which one prints and writes; None: this one alone.
    how: keywords of `clean_labels`.
    """
    group = group or Group()
    with terminal.Bar(detector, ("test_accuracy", "f1")) as bar:
        try:
            found = clean_labels(
                clients, detector=detector, record=folder, progress=bar.part,
                describe=None if command is None else {"command": command}, engine=group.engine, **how,
            )  # fmt: skip
        except KeyboardInterrupt:
            said = "Stopped." if command is None else f"Stopped. To resume: {command}"
            saved = Record(folder).checkpoint.exists() or Parts(record=folder).begun
            terminal.say(said if saved else "Stopped before anything was saved.")
            sys.exit(130)
    if group.rank > 0:
        return
    for table in cleaning(found, num_listed):
        terminal.console.print(table)
    for text in found.sentences:
        terminal.say_line(text)
    found.write_csv(folder / "suspects")
    page = write_report(folder, folder / "report.html", title="Cleaning of labels")
    terminal.say(f"Saved in {folder}; suspects of every client in {folder / 'suspects'}, pictures in {page}")
