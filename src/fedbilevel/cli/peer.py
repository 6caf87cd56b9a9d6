"""`fedbilevel peer`: keys, a roster, and one peer's part in a run. Thin: what is done lies in fedbilevel.peers."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import click

from fedbilevel.cli import terminal
from fedbilevel.cli.terminal import say, say_line
from fedbilevel.data.folders import read_folder
from fedbilevel.errors import RosterError
from fedbilevel.peers import roster as rosters
from fedbilevel.peers.collect import Collected, collect
from fedbilevel.peers.participant import say_how_far, take_part
from fedbilevel.peers.plan import read_plan
from fedbilevel.report import tables
from fedbilevel.runs.result import Progress

FILE = click.Path(dir_okay=False, path_type=Path)


@click.group("peer")
def peer() -> None:
    """Between machines without a server: every peer has its own data and talks to the others directly, encrypted."""


@peer.command("keygen")
@click.argument("name")
@click.option("--address", required=True, help="host:port by which the others reach this peer")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("."),
    show_default=True,
    help="where both files go",
)
def keygen_command(name: str, address: str, folder: Path) -> None:
    """Make a pair of keys for the peer NAME: a private one that stays here, and a public part to send to the others."""
    secret = folder / f"{name}.key.toml"
    public = rosters.keygen(secret, name=name, address=address)
    say(f"Private, stays here: {secret}")
    say(f"Public, for the roster: {public}")


@peer.command("roster")
@click.argument("public", nargs=-1, required=True, type=FILE)
@click.option(
    "--out", type=FILE, default=Path("roster.toml"), show_default=True, help="the roster, the same file for all peers"
)
def roster_command(public: tuple[Path, ...], out: Path) -> None:
    """Put the public parts of all peers together. Their order is their numbering."""
    made = rosters.assemble(public, out)
    for entry in made.peers:
        say(f"{entry.name:<24} {entry.address}")
    say(f"Written: {out}. Give it to all of them, unchanged.")


@peer.command("run")
@click.argument("plan", type=FILE)
@click.option(
    "--roster",
    "roster_file",
    type=FILE,
    default=Path("roster.toml"),
    show_default=True,
    help="the roster, the same file at all peers",
)
@click.option(
    "--key",
    type=FILE,
    default=None,
    help="this peer's private key; may be left out where all addresses are of this machine alone, with --name",
)
@click.option("--name", default=None, help="without a key: which peer this is")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    default=None,
    help="folder with this peer's train.npz and val.npz (or .csv, .safetensors)",
)
@click.option("--simulated", is_flag=True, help="the task's own data of this peer instead, to learn and to test")
@click.option(
    "--record",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="this peer's record (default: runs/RUN-NAME); goes on with one",
)
@click.option(
    "--bind", default=None, help="host:port to listen at, where the others' address of this peer is a router's"
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N")
def run_command(
    plan: Path,
    roster_file: Path,
    key: Path | None,
    name: str | None,
    data: Path | None,
    simulated: bool,
    record: Path | None,
    bind: str | None,
    device: str,
) -> None:
    """Take part in the run that PLAN (a TOML file, the same at all peers) describes, and go on with it where this peer left."""
    roster = rosters.read_roster(roster_file)
    secret = None if key is None else rosters.read_secret(key)
    if (secret is None) == (name is None):
        raise click.UsageError("give --key, or, where all addresses are of this machine alone, --name.")
    if (data is None) == (not simulated):
        raise click.UsageError("give --data, or --simulated.")
    me = roster.number(secret.name if secret is not None else str(name))
    entry = roster.peers[me]
    if secret is not None and secret.key != entry.key:
        raise RosterError(
            f"{roster_file} has another key for {entry.name} than {key}: put the roster together again, with this peer's public part."
        )
    ours = read_plan(plan, len(roster.peers))
    if simulated:
        clients = ours.built_task().build().clients
        if me >= len(clients):
            raise click.UsageError(
                f"the task has {len(clients)} clients, and {entry.name} is number {me}: raise num_clients of the task in the plan."
            )
        holdings = clients[me]
    else:
        assert data is not None
        holdings = read_folder(data, num_classes=ours.num_classes)
    from fedbilevel.peers.sockets import Sockets  # needs pyzmq

    place = record if record is not None else Path("runs") / f"{ours.name}-{entry.name}"
    headline = ("upper_loss", *ours.built_task().headline)

    def tell(now: Progress) -> bool:
        say(say_how_far(now, headline))
        return False

    result = take_part(
        ours,
        [one.name for one in roster.peers],
        me,
        lambda most: Sockets(roster, me, secret, max_bytes=most, bind=bind, log=say_line),
        holdings,
        place,
        roster=roster.digest(),
        device=device,
        say=say_line,
        callbacks=[tell],
    )
    again = "" if result.stopped == "finished" else ", stopped; the same command goes on with it"
    say(f"{entry.name} has done {result.iteration} outer iterations{again}. Its record is in {place}.")


@peer.command("collect")
@click.argument(
    "records", nargs=-1, required=True, type=click.Path(file_okay=False, path_type=Path), metavar="RECORD..."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="folder of the record of all, which must not hold a run yet",
)
@click.option(
    "--num-listed",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="instances shown of those that harm and of those that help most",
)
def collect_command(records: tuple[Path, ...], out: Path, num_listed: int) -> None:
    """Put the records of the peers of one run, each copied from its own machine, together as one record like that of a simulation."""
    _show(collect(records, out), num_listed)


def _show(done: Collected, num_listed: int) -> None:
    last, task = done.rows[-1], done.plan.built_task()
    title = f"{done.plan.name}: {task.name()}, {len(done.peers)} peers after outer iteration {last['iteration']}"
    terminal.console.print(tables.outcomes(title, {done.plan.algorithm["name"]: last}, task.headline))
    if num_listed and done.removals is not None:
        for kind, does, some in (("harmful", "lowers", done.harmful), ("helpful", "raises", done.helpful)):
            terminal.console.print(
                tables.removals(f"Most {kind}: removal {does} the summed validation loss", some(num_listed))
            )
    if done.missing:
        say_line(f"Without {', '.join(done.missing)}, whose records were not given.")
    for name, iteration in done.behind.items():
        say_line(
            f"The record of {name} ends with outer iteration {iteration}, before those of the others: there is no solution of all."
        )
    say(f"Written: {done.path}")


@peer.command("try")
@click.option(
    "--peers", "num_peers", type=click.IntRange(min=2, max=16), default=3, show_default=True, help="number of peers"
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=None,
    help="folder for all of it, which stays (default: a temporary one)",
)
def try_command(num_peers: int, folder: Path | None) -> None:
    """All of it on this machine: keys, a roster, peers as processes of their own that talk over encrypted loopback, and which instances harm most."""
    from fedbilevel.peers.local import Local
    from fedbilevel.peers.trial import prepare

    with tempfile.TemporaryDirectory(prefix="fedbilevel-") as temporary:
        place = folder or Path(temporary)
        began = time.monotonic()
        with Local(place, *prepare(num_peers)) as peers:
            for name in peers.names:
                peers.start(name)
            say(
                f"{num_peers} peers run as processes {', '.join(str(process.pid) for process in peers.processes.values())}, in {place}."
            )
            peers.wait(600.0)
            say(f"All have finished after {time.monotonic() - began:.0f} s. Their records, put together:")
            _show(collect([peers.record(name) for name in peers.names], place / "together"), 5)
