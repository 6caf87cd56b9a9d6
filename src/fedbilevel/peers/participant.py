"""One peer's part in a run: read its data, find the other peers, and compute with them.

When the group changes, the peer restarts the outer iteration with the new group. Its folder holds a
record like that of any run, with the last two checkpoints, and two more files:

    peers.jsonl                 one line per outer iteration: its members (per average if they
                                changed), and the number of refused messages
    hypergradient.safetensors   this peer's part of the last estimate, if the algorithm has one
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from fedbilevel._version import __version__
from fedbilevel.engines.engine import Regrouped
from fedbilevel.engines.roster import digest
from fedbilevel.errors import CheckpointError, QuorumError
from fedbilevel.federation.algorithm import PeerAlgorithm
from fedbilevel.federation.host import Host
from fedbilevel.federation.ledger import Ledger
from fedbilevel.peers.engine import Peer
from fedbilevel.peers.formation import Formation, mark
from fedbilevel.peers.office import Office
from fedbilevel.peers.plan import PeerPlan
from fedbilevel.peers.transport import Faults, Lossy, PeerTransport
from fedbilevel.peers.wire import Introduction, Version
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.runs.callbacks import Callback
from fedbilevel.runs.loop import run_between
from fedbilevel.runs.options import torch_device
from fedbilevel.runs.record import Record, make_folder, shorten, write_whole
from fedbilevel.runs.result import Progress, Result
from fedbilevel.tasks.task import Shapes

DIARY, HYPERGRADIENT = "peers.jsonl", "hypergradient.safetensors"
_ONLY = torch.tensor([0])
# options that a host does not take
_NOT_OF_HOST = ("cohort", "schedule", "device", "network", "averaging", "aggregation")
Say = Callable[[str], None]


def take_part(
    plan: PeerPlan,
    names: Sequence[str],
    me: int,
    connect: Callable[[int], PeerTransport],
    holdings: Holdings,
    folder: Path,
    *,
    roster: bytes = bytes(16),
    device: str = "cpu",
    say: Say = lambda line: None,
    callbacks: Sequence[Callback] = (),
    beat: float = 0.5,
    interval: float = 0.05,
) -> Result:
    """Start a run, or resume the run in `folder`.

    connect: function that returns a transport for messages of up to the given number of bytes.
    roster: digest of the roster.
    interval: longest time in seconds between two pushes of a robust average.
    """
    algorithm, shapes = plan.built_algorithm(), Shapes.of(holdings, plan.num_classes)
    problem = plan.built_task().problem(shapes)
    for warning in algorithm.check_scopes(problem.scopes):
        warnings.warn(warning, stacklevel=2)
    host = _host(plan, algorithm, problem, holdings, me, len(names), torch_device(device))
    book = Record(folder, keeps_before=True)
    make_folder(folder)
    _check_own(book, host, me, names)
    office = _office(plan, names, me, connect, longest(host, len(names)), beat=beat, say=say)
    describe = {"plan": plan.asdict(), "peers": list(names), "peer": names[me], "shapes": shapes.asdict()}
    with office.opened():
        while True:
            formation = _formed(office, _introduction(plan, host, book, roster), plan)
            say(_begins(formation, names))
            try:
                fed = _engine(plan, algorithm, host, office, formation, interval)
                result = _run_group(plan, fed, formation, book, describe, callbacks)
            except Regrouped:
                say("the group has changed: the outer iteration restarts.")
                continue
            office.interrupted = result.stopped == "interrupted"
            break
    if hasattr(result.state, "h"):
        tree = fed.trees(result.state.h, upper=True)
        write_whole(
            folder / HYPERGRADIENT,
            save({name: leaf.detach().cpu().contiguous().clone() for name, leaf in tree.items()}),
        )
    return result


def _host(
    plan: PeerPlan,
    algorithm: PeerAlgorithm,
    problem: Problem,
    holdings: Holdings,
    me: int,
    num_peers: int,
    device: torch.device,
) -> Host:
    options = {name: value for name, value in plan.keywords().items() if name not in _NOT_OF_HOST}
    host = Host(algorithm, problem, [holdings], ids=[me], num_clients=num_peers, device=device, **options)
    one = host.data.batch(_ONLY, "train", torch.zeros(1, 1, dtype=torch.int64, device=host.device))
    host.oracle.lower_grad(host.x0, host.y0, one)  # the first derivative in a process takes seconds
    return host


def _office(
    plan: PeerPlan,
    names: Sequence[str],
    me: int,
    connect: Callable[[int], PeerTransport],
    max_bytes: int,
    *,
    beat: float,
    say: Say,
) -> Office:
    transport, network = connect(max_bytes), plan.keywords()["network"]
    if network.loss:
        transport = Lossy(transport, me, len(names), Faults(loss=network.loss, seed=network.seed))
    return Office(
        transport,
        me,
        names,
        plan.name,
        quorum=plan.quorum,
        continues=plan.on_change == "continue",
        suspect=plan.suspect,
        beat=beat,
        max_bytes=max_bytes,
        say=say,
    )


def _engine(
    plan: PeerPlan, algorithm: PeerAlgorithm, host: Host, office: Office, formation: Formation, interval: float
) -> Peer:
    options = plan.keywords()
    host.ledger = Ledger(host.num_clients)
    return Peer(
        algorithm,
        host,
        office,
        formation,
        network=options["network"],
        averaging=options["averaging"],
        on_crash=plan.on_crash,
        interval=interval,
        aggregation=options.get("aggregation"),
    )


def _run_group(
    plan: PeerPlan,
    fed: Peer,
    formation: Formation,
    book: Record,
    describe: Mapping[str, Any],
    callbacks: Sequence[Callback],
) -> Result:
    """Run with one group until the end; raise Regrouped if the group changes."""
    resume = _prepared(book, formation)
    shorten(book.path / DIARY, max(0, formation.iteration))
    return run_between(
        fed.algorithm,
        fed,
        engine="peers",
        num_iterations=plan.num_iterations,
        measure_every=plan.measure_every,
        schedule=plan.keywords()["schedule"],
        record=book,
        resume=resume,
        begin_at=0 if resume else max(0, formation.iteration),
        describe=describe,
        callbacks=[_diary(book.path / DIARY, fed, fed.office.membership.names), *callbacks],
        recover=False,
    )


def _formed(office: Office, about: Introduction, plan: PeerPlan) -> Formation:
    try:
        return office.form(about, deadline=plan.join_deadline)
    except QuorumError as error:
        if about.versions[0].iteration < plan.num_iterations:
            raise
        raise QuorumError(
            f"{str(error).removesuffix('.')}; this peer has finished all {plan.num_iterations} outer iterations, "
            "so perhaps all peers have: peer collect takes its record as it is."
        ) from None


def longest(host: Host, num_peers: int) -> int:
    """Return an upper bound of the bytes of any message between this number of peers."""
    shared = 0 if host.x_sizes is not None else len(host.x0)
    return 8 * (4 * shared + 8 * len(host.y0)) + 64 * num_peers + 4096


def _introduction(plan: PeerPlan, host: Host, book: Record, roster: bytes) -> Introduction:
    shared = [host.y0, *([host.x0] if host.x_sizes is None else [])]
    form = json.dumps(
        [__version__, host.layout_y.describe(), host.layout_x.describe() if host.x_sizes is None else None], default=str
    )
    start = hashlib.blake2b(
        form.encode() + b"".join(vector.cpu().numpy().tobytes() for vector in shared), digest_size=16
    ).digest()
    return Introduction(float(host.weights(_ONLY)[0]), plan.digest(), roster, start, 0, run_of(book), versions(book))


def versions(book: Record) -> tuple[Version, Version]:
    """Return the last two stored states, the newest first."""
    found = [Version(about["iteration"], mark(about["state"]["members"]["value"])) for about in _stored(book)]
    newest, before, *_ = [*found, Version(), Version()]
    return newest, before if before.iteration < newest.iteration else Version()


def run_of(book: Record) -> int:
    """Return the mark of the run that the stored states belong to, or 0 if there are none."""
    return next((int(about["state"]["run"]["value"]) for about in _stored(book)), 0)


def _stored(book: Record) -> list[dict[str, Any]]:
    found = [book.load(place)[1] for place in (book.checkpoint, book.before) if place.exists()]
    if any(part not in about["state"] for about in found for part in ("members", "run")):
        raise CheckpointError(
            f"{book.path} holds a run that was not between peers: name another folder for this peer's record."
        )
    return found


def _check_own(book: Record, host: Host, me: int, names: Sequence[str]) -> None:
    """Raise if the record belongs to another peer or to other data.

    This check runs before other peers rely on the record.
    """
    for about in _stored(book)[:1]:
        theirs = about["identity"]
        if theirs["peer"] != me:
            whose = names[theirs["peer"]] if 0 <= theirs["peer"] < len(names) else f"number {theirs['peer']}"
            raise CheckpointError(
                f"{book.path} is the record of {whose}, not of {names[me]}: name this peer's own folder."
            )
        if theirs["data"] != digest(host.data, 0).hex():
            raise CheckpointError(
                f"{book.path} is the record of a run with other data: use the same data, or name another folder."
            )


def _prepared(book: Record, formation: Formation) -> bool:
    """Make the record hold the state that the group starts from.

    Return False if this peer has no stored state and starts at the initial point.
    """
    newest, before = versions(book)
    if formation.iteration < 0:
        for place in (book.checkpoint, book.before):
            place.unlink(missing_ok=True)
    elif newest.iteration > formation.iteration:
        if before.iteration != formation.iteration:
            raise CheckpointError(
                f"the others resume from outer iteration {formation.iteration}, and {book.path} holds "
                f"{newest.iteration} and {before.iteration}: start this peer with another folder, "
                "because this one seems to be a copy."
            )
        book.go_back()
    elif 0 <= newest.iteration < formation.iteration:  # this peer was absent: it joins with its own state
        tensors, about = book.load()
        state = {**about["state"], "members": {"value": []}, "run": {"value": formation.run}}  # made by no group
        book.save(tensors, {**about, "iteration": formation.iteration, "state": state})
    return formation.iteration >= 0 and newest.iteration >= 0


def _begins(formation: Formation, names: Sequence[str]) -> str:
    who = ", ".join(names[peer] for peer in formation.members)
    where = "at the start" if formation.iteration < 0 else f"after outer iteration {formation.iteration}"
    return f"{len(formation.members)} of {len(names)} peers begin {where}: {who}."


def say_how_far(now: Progress, headline: Sequence[str]) -> str:
    """Return the log line of one outer iteration."""
    figures = [f"{name} {value:.4g}" for name, value in (now.row or {}).items() if name in headline]
    return ", ".join(
        [
            f"outer iteration {now.iteration}/{now.num_iterations}",
            f"{now.rounds} rounds",
            f"{now.megabytes:.2f} MB sent",
            *figures,
        ]
    )


def _diary(path: Path, fed: Peer, names: Sequence[str]) -> Callback:
    def write(now: Progress) -> bool:
        averages = fed.members_by_averaging
        line: dict[str, Any] = {"iteration": now.iteration, "members": [names[peer] for peer in fed.members.tolist()]}
        if any(members != averages[0] for members in averages):
            line["averages"] = [[names[peer] for peer in members] for members in averages]
        refused: Mapping[str, int] = {**fed.office.transport.refused(), **fed.office.refusals.as_dict()}
        line["refused"] = {reason: number for reason, number in refused.items() if number}
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")
        return False

    return write
