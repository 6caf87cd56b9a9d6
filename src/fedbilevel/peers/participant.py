"""One peer's part in a run: read its own data, find the others, run with them, and begin again with those who are there whenever that changes.

Below its folder is a record like that of any run, with the last two checkpoints, and

    peers.jsonl                 one line per outer iteration: who took part, in every average where that changed, and what was refused
    hypergradient.safetensors   this peer's part of the last estimate, where the algorithm has one
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
from fedbilevel.federation.host import Host
from fedbilevel.federation.ledger import Ledger
from fedbilevel.peers.engine import Peer
from fedbilevel.peers.office import Formation, Office, mark
from fedbilevel.peers.plan import PeerPlan
from fedbilevel.peers.transport import Faults, Lossy, Transport
from fedbilevel.peers.wire import Introduction, Version
from fedbilevel.problem.client_data import Holdings
from fedbilevel.runs.callbacks import Callback
from fedbilevel.runs.loop import run_between
from fedbilevel.runs.options import torch_device
from fedbilevel.runs.record import Record, make_folder, shorten, write_whole
from fedbilevel.runs.result import Progress, Result
from fedbilevel.tasks.task import Shapes

DIARY, HYPERGRADIENT = "peers.jsonl", "hypergradient.safetensors"
_ONLY = torch.tensor([0])
Say = Callable[[str], None]


def take_part(
    plan: PeerPlan,
    names: Sequence[str],
    me: int,
    connect: Callable[[int], Transport],
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
    """Run, or go on with what is in `folder`.

    connect: gives what carries messages of up to so many bytes. roster: a digest of who the peers are. interval: longest time between two wakes of a robust
    average.
    """
    options = plan.keywords()
    algorithm, shapes = plan.built_algorithm(), Shapes.of(holdings, plan.num_classes)
    problem = plan.built_task().problem(shapes)
    for warning in algorithm.check_scopes(problem.scopes):
        warnings.warn(warning, stacklevel=2)
    own = {
        name: value
        for name, value in options.items()
        if name not in ("cohort", "schedule", "device", "network", "averaging")
    }
    host = Host(algorithm, problem, [holdings], ids=[me], num_clients=len(names), device=torch_device(device), **own)
    one = host.data.batch(_ONLY, "train", torch.zeros(1, 1, dtype=torch.int64, device=host.device))
    host.oracle.lower_grad(host.x0, host.y0, one)  # the first derivative in a process takes seconds
    book = Record(folder, keeps_before=True)
    make_folder(folder)
    _check_own(book, host, me, names)
    most = longest(host, len(names))
    transport = connect(most)
    if options["network"].loss:
        transport = Lossy(transport, me, len(names), Faults(loss=options["network"].loss, seed=options["network"].seed))
    office = Office(
        transport,
        me,
        names,
        plan.name,
        quorum=plan.quorum,
        goes_on=plan.on_change == "continue",
        suspect=plan.suspect,
        beat=beat,
        max_bytes=most,
        say=say,
    )
    describe = {"plan": plan.asdict(), "peers": list(names), "peer": names[me], "shapes": shapes.asdict()}
    with office.opened():
        while True:
            formation = _formed(office, _introduction(plan, host, book, roster), plan)
            say(_begins(formation, names))
            resume = _ready(book, formation)
            shorten(book.path / DIARY, max(0, formation.iteration))
            host.ledger = Ledger(len(names))
            fed = Peer(
                algorithm,
                host,
                office,
                formation,
                network=options["network"],
                averaging=options["averaging"],
                on_crash=plan.on_crash,
                interval=interval,
            )
            try:
                result = run_between(
                    algorithm,
                    fed,
                    engine="peers",
                    num_iterations=plan.num_iterations,
                    measure_every=plan.measure_every,
                    schedule=options["schedule"],
                    record=book,
                    resume=resume,
                    begin_at=0 if resume else max(0, formation.iteration),
                    describe=describe,
                    callbacks=[_diary(book.path / DIARY, fed, names, transport), *callbacks],
                )
            except Regrouped:
                say("who takes part has changed: the outer iteration begins again.")
                continue
            office.goes = result.stopped == "interrupted"
            break
    if hasattr(result.state, "h"):
        tree = fed.trees(result.state.h, upper=True)
        write_whole(
            folder / HYPERGRADIENT,
            save({name: leaf.detach().cpu().contiguous().clone() for name, leaf in tree.items()}),
        )
    return result


def _formed(office: Office, about: Introduction, plan: PeerPlan) -> Formation:
    try:
        return office.form(about, deadline=plan.join_deadline)
    except QuorumError as error:
        if about.versions[0].iteration < plan.num_iterations:
            raise
        raise QuorumError(
            f"{str(error).removesuffix('.')}; this one has done all {plan.num_iterations} outer iterations, so perhaps all have: "
            "peer collect takes its record as it is."
        ) from None


def longest(host: Host, num_peers: int) -> int:
    """Bytes of a message that is longer than any that a verb or a view of so many peers needs."""
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
    """Stored states, the newest first."""
    found = [Version(about["iteration"], mark(about["state"]["members"]["value"])) for about in _stored(book)]
    newest, before, *_ = [*found, Version(), Version()]
    return newest, before if before.iteration < newest.iteration else Version()


def run_of(book: Record) -> int:
    """The mark of the run that the stored states belong to."""
    return next((int(about["state"]["run"]["value"]) for about in _stored(book)), 0)


def _stored(book: Record) -> list[dict[str, Any]]:
    found = [book.load(place)[1] for place in (book.checkpoint, book.before) if place.exists()]
    if any(part not in about["state"] for about in found for part in ("members", "run")):
        raise CheckpointError(
            f"{book.path} holds a run that was not between peers: name another folder for this one's record."
        )
    return found


def _check_own(book: Record, host: Host, me: int, names: Sequence[str]) -> None:
    """Before anybody counts on it: that the record is this peer's own."""
    for about in _stored(book)[:1]:
        theirs = about["identity"]
        if theirs["peer"] != me:
            whose = names[theirs["peer"]] if 0 <= theirs["peer"] < len(names) else f"number {theirs['peer']}"
            raise CheckpointError(
                f"{book.path} is the record of {whose}, not of {names[me]}: name this peer's own folder."
            )
        if theirs["data"] != digest(host.data, 0).hex():
            raise CheckpointError(
                f"{book.path} is the record of a run with other data: use the same, or name another folder."
            )


def _ready(book: Record, formation: Formation) -> bool:
    """The stored state that all go on from. False where there is none, and this peer begins where the problem does."""
    newest, before = versions(book)
    if formation.iteration < 0:
        for place in (book.checkpoint, book.before):
            place.unlink(missing_ok=True)
    elif newest.iteration > formation.iteration:
        if before.iteration != formation.iteration:
            raise CheckpointError(
                f"the others go on from outer iteration {formation.iteration}, and {book.path} holds {newest.iteration} and {before.iteration}: "
                "start this peer with another folder, as this one seems to be a copy."
            )
        book.go_back()
    elif 0 <= newest.iteration < formation.iteration:  # the others went on meanwhile: this peer's own state joins them
        tensors, about = book.load()
        state = {**about["state"], "members": {"value": []}, "run": {"value": formation.run}}  # which no group has made
        book.save(tensors, {**about, "iteration": formation.iteration, "state": state})
    return formation.iteration >= 0 and newest.iteration >= 0


def _begins(formation: Formation, names: Sequence[str]) -> str:
    who = ", ".join(names[peer] for peer in formation.members)
    where = "at the start" if formation.iteration < 0 else f"after outer iteration {formation.iteration}"
    return f"{len(formation.members)} of {len(names)} peers begin {where}: {who}."


def say_how_far(now: Progress, headline: Sequence[str]) -> str:
    """One outer iteration, for people."""
    figures = [f"{name} {value:.4g}" for name, value in (now.row or {}).items() if name in headline]
    return ", ".join(
        [
            f"outer iteration {now.iteration}/{now.num_iterations}",
            f"{now.rounds} rounds",
            f"{now.megabytes:.2f} MB sent",
            *figures,
        ]
    )


def _diary(path: Path, fed: Peer, names: Sequence[str], transport: Transport) -> Callback:
    def write(now: Progress) -> bool:
        averages = fed.members_by_averaging
        line: dict[str, Any] = {"iteration": now.iteration, "members": [names[peer] for peer in fed.members.tolist()]}
        if any(members != averages[0] for members in averages):
            line["averages"] = [[names[peer] for peer in members] for members in averages]
        refused: Mapping[str, int] = {**transport.refused(), **fed.office.counts}
        line["refused"] = {reason: number for reason, number in refused.items() if number}
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")
        return False

    return write
