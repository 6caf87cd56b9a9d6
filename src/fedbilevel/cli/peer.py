"""`fedbilevel peer`: keys, a roster, and the part of one peer in a run."""

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
from fedbilevel.peers.plan import PeerPlan, read_plan
from fedbilevel.problem.client_data import Holdings
from fedbilevel.report import tables
from fedbilevel.runs.result import Progress

FILE = click.Path(dir_okay=False, path_type=Path)


@click.group("peer")
def peer() -> None:
    """Run between machines without a server.

    Each peer has its own data and exchanges encrypted messages with the other peers directly.
    """


@peer.command("keygen")
@click.argument("name")
@click.option("--address", required=True, help="host:port of this peer for the other peers")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("."),
    show_default=True,
    help="folder for both files",
)
def keygen_command(name: str, address: str, folder: Path) -> None:
    """Make a key pair for the peer NAME.

    The private key stays on this machine. Send the public part to the other peers.
    """
    secret = folder / f"{name}.key.toml"
    public = rosters.keygen(secret, name=name, address=address)
    say(f"Private, stays here: {secret}")
    say(f"Public, for the roster: {public}")


@peer.command("roster")
@click.argument("public", nargs=-1, required=True, type=FILE)
@click.option(
    "--out",
    type=FILE,
    default=Path("roster.toml"),
    show_default=True,
    help="file for the roster, which all peers share",
)
def roster_command(public: tuple[Path, ...], out: Path) -> None:
    """Combine the public parts of all peers into a roster. Their order numbers the peers."""
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
    help="the roster, the same file on all peers",
)
@click.option(
    "--key",
    type=FILE,
    default=None,
    help="this peer's private key; give --name instead if all addresses are on this machine",
)
@click.option("--name", default=None, help="name of this peer, if there is no key")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    default=None,
    help="folder with this peer's train.npz and val.npz (or .csv, .safetensors)",
)
@click.option("--simulated", is_flag=True, help="use the task's own data for this peer instead, to learn or to test")
@click.option(
    "--record",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="this peer's record (default: runs/RUN-NAME); an existing record is resumed",
)
@click.option("--bind", default=None, help="host:port to listen on, if the address in the roster belongs to a router")
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
    """Take part in the run in the TOML file PLAN, which is the same on all peers.

    The same command resumes an interrupted run.
    """
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
            f"{roster_file} has another key for {entry.name} than {key}: "
            "put the roster together again, with this peer's public part."
        )
    ours = read_plan(plan, len(roster.peers))
    holdings = _simulated(ours, me, entry.name) if data is None else read_folder(data, num_classes=ours.num_classes)
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
    ends = {"stopped": ", and was stopped; the same command resumes it", "failed": f", and failed: {result.ending.why}"}
    again = ends.get(result.ending.state, "").removesuffix(".")
    say(f"{entry.name} has done {result.iteration} outer iterations{again}. Its record is in {place}.")


def _simulated(plan: PeerPlan, me: int, name: str) -> Holdings:
    """Return the task's own data for peer number `me`."""
    clients = plan.built_task().build().clients
    if me >= len(clients):
        raise click.UsageError(
            f"the task has {len(clients)} clients, and {name} is number {me}: "
            "raise num_clients of the task in the plan."
        )
    return clients[me]


@peer.command("collect")
@click.argument(
    "records", nargs=-1, required=True, type=click.Path(file_okay=False, path_type=Path), metavar="RECORD..."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="folder of the combined record, which must not hold a run yet",
)
@click.option(
    "--num-listed",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="number of the most harmful and of the most helpful instances to show",
)
def collect_command(records: tuple[Path, ...], out: Path, num_listed: int) -> None:
    """Combine the records of the peers of one run into one record, as of a simulation.

    Copy each RECORD from its peer's machine first.
    """
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
        say_line(f"The combined record lacks {', '.join(done.missing)}, whose records were not given.")
    for name, iteration in done.behind.items():
        say_line(
            f"The record of {name} ends with outer iteration {iteration}, before the other records: "
            "there is no combined solution."
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
    help="folder for all files, which is kept (default: a temporary folder)",
)
def try_command(num_peers: int, folder: Path | None) -> None:
    """Try a whole run between peers on this machine.

    Makes keys and a roster, starts peers as separate processes that exchange encrypted messages
    over loopback, and shows the most harmful training instances.
    """
    from fedbilevel.peers.local import Local
    from fedbilevel.peers.trial import prepare

    with tempfile.TemporaryDirectory(prefix="fedbilevel-") as temporary:
        place = folder or Path(temporary)
        began = time.monotonic()
        with Local(place, *prepare(num_peers)) as peers:
            for name in peers.names:
                peers.start(name)
            numbers = ", ".join(str(process.pid) for process in peers.processes.values())
            say(f"{num_peers} peers run as processes {numbers}, in {place}.")
            peers.wait(600.0)
            say(f"All peers finished after {time.monotonic() - began:.0f} s. Their combined record:")
            _show(collect([peers.record(name) for name in peers.names], place / "together"), 5)
