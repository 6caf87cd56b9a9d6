"""The records of the peers of one run, each copied from its own machine, as one record like that of a simulation.

Nobody sees all peers while they run. Afterwards their records say enough: every measurement holds what a look at all of them adds up (`seen`), and every
checkpoint holds a peer's own row of the state and its own bill. Below the folder that is written are config.json, metrics.jsonl and

    solution.safetensors        x and y of every peer, as x.client<number>.<name> and y.client<number>.<name>
    ledger.json                 what all of them paid, and messages, floats and bytes by sender and receiver
    hypergradient.safetensors   h.client<number>.<name>, where the algorithm has an estimate
    influences.json             what removing each training instance would add to the summed validation loss, where h says that (tasks/influence.py)

There is no checkpoint: to go on with a run is the affair of its peers. Solution and hypergradient come from the peers' last checkpoints and not from their own
files of these names, which are of an earlier outer iteration where a run was interrupted, resumed and then lost. They need checkpoints of the same one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from fedbilevel.columns import COLUMNS
from fedbilevel.errors import CheckpointError, PlanError
from fedbilevel.federation.averaging import spread
from fedbilevel.federation.ledger import EDGES, Ledger
from fedbilevel.oracle.population import figures
from fedbilevel.peers.participant import HYPERGRADIENT
from fedbilevel.peers.plan import PeerPlan, plan_of
from fedbilevel.problem.layout import Layout
from fedbilevel.problem.problem import Problem
from fedbilevel.runs.record import Record, make_folder, write_whole
from fedbilevel.runs.resume import versions
from fedbilevel.tasks.task import Shapes

INFLUENCES = "influences.json"
_OWN = ("data", "losses", "peer")  # what of a record's identity is one peer's alone
_LOOKS = ("upper", "lower", "weight")  # what every look at a peer begins with


class Removal(NamedTuple):
    """change: what removing the sample is predicted to add to the validation loss summed over peers; negative: it harms."""

    client: int
    peer: str
    sample: int
    change: float


class Collected(NamedTuple):
    """peers: those whose records were there, by number; missing: the others of the run. behind: those whose record ends before that of the others, with
    their last outer iteration; then there is no solution. removals: the most harmful instances first; None where the records do not hold influences."""

    path: Path
    plan: PeerPlan
    peers: tuple[str, ...]
    missing: tuple[str, ...]
    behind: dict[str, int]
    rows: list[dict[str, Any]]
    ledger: Ledger
    removals: list[Removal] | None

    def harmful(self, num: int) -> list[Removal]:
        return [one for one in (self.removals or ())[:num] if one.change < 0]

    def helpful(self, num: int) -> list[Removal]:
        return [one for one in (self.removals or ())[::-1][:num] if one.change > 0]


class _Part(NamedTuple):
    """One peer's record."""

    path: Path
    number: int
    config: dict[str, Any]
    iteration: int  # of the checkpoint
    tensors: dict[str, Tensor]
    plain: dict[str, Any]
    rows: dict[int, dict[str, Any]]  # by outer iteration

    @property
    def name(self) -> str:
        return str(self.config["peer"])

    @property
    def data(self) -> bytes:
        return bytes.fromhex(self.config["identity"]["data"])


def collect(folders: Sequence[Path], out: Path) -> Collected:
    """Of all the peers of a run, or of some of them. Nothing is written before everything is read and fits together."""
    if not folders:
        raise PlanError("there are no records to collect: name the folder of at least one peer.")
    if (out / "config.json").exists():
        raise CheckpointError(f"{out} already holds a run: name another folder to collect into.")
    parts = sorted(map(_read, folders), key=lambda part: part.number)
    _check_together(parts)
    names = parts[0].config["peers"]
    plan = plan_of(parts[0].config["plan"], len(names))
    shapes = _shared([Shapes.from_dict(part.config["shapes"]) for part in parts])
    problem = plan.built_task().problem(shapes)
    rows, ledger = _rows(parts, problem), _ledger(parts, len(names))
    last = max(part.iteration for part in parts)
    behind = {part.name: part.iteration for part in parts if part.iteration < last}
    solution, estimate, removals = {}, {}, None
    if not behind:
        states = [_state(part, plan) for part in parts]
        layout_x, layout_y = _layout_x(parts[0], problem, shapes), Layout(problem.y0)
        for part, state in zip(parts, states, strict=True):
            for label, layout, row in (("x", layout_x, state.x), ("y", layout_y, state.y)):
                solution.update(_named(label, part.number, layout.unravel(row[0])))
        if problem.scopes.lower == "global" and rows[-1]["iteration"] == last:
            y = torch.cat([state.y for state in states])
            rows[-1]["disagreement"] = spread(y, torch.linalg.vector_norm(y.mean(0)))
        if all(
            bool(getattr(state, "h", torch.zeros(1)).any()) for state in states
        ):  # before its first estimate a peer has zeros
            for part, state in zip(parts, states, strict=True):
                estimate.update(_named("h", part.number, layout_x.unravel(state.h[0])))
            if is_mask(problem, shapes.fields) and (
                last == 1 or all(bool((state.x == 1).all()) for state in states)
            ):  # h was taken where no sample is removed
                removals = _removals(parts, [state.h[0] for state in states])
    found = [part.name for part in parts]
    missing = [name for name in names if name not in found]
    make_folder(out)
    book = Record(out)
    write_whole(book.metrics, "".join(json.dumps(row) + "\n" for row in rows).encode())
    Record(out).write_ledger(ledger.asdict())
    if solution:
        book.save_solution(solution)
    if estimate:
        write_whole(out / HYPERGRADIENT, save(estimate))
    if removals is not None:
        write_whole(
            out / INFLUENCES, ("[\n" + ",\n".join(json.dumps(one._asdict()) for one in removals) + "\n]\n").encode()
        )
    book.write_config(_config(parts, found, missing))  # the last file: what has one is whole
    return Collected(out, plan, tuple(found), tuple(missing), behind, rows, ledger, removals)


# ---- reading -----------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> _Part:
    book = Record(path)
    config = book.read_config()
    if config.get("engine") != "peers":
        raise CheckpointError(
            f"{path} holds a run of the engine {config.get('engine')!r:.40}, not the record of one peer: give the folders that peers wrote."
        )
    if "collected" in config:
        raise CheckpointError(
            f"{path} was collected from the records of several peers already: give the folders that the peers wrote themselves."
        )
    try:
        number, names = config["identity"]["peer"], config["peers"]
        whole = names[number] == config["peer"] and len(set(names)) == len(names) and "x" in config["identity"]
        whole = whole and {"shapes", "run", "versions"} <= config.keys() and isinstance(config["plan"], dict)
        bytes.fromhex(config["identity"]["data"])
    except (KeyError, TypeError, IndexError, ValueError):
        whole = False
    if not whole:
        raise CheckpointError(
            f"{path / 'config.json'} does not say whose record it is: copy the folder from the peer again."
        )
    tensors, about = book.load()
    stored = {
        row["iteration"]: row for row in book.rows() if row["iteration"] <= about["iteration"]
    }  # later ones were to be run again
    return _Part(path, number, config, about["iteration"], tensors, about["state"], stored)


def _check_together(parts: Sequence[_Part]) -> None:
    first = parts[0]
    for before, part in itertools.pairwise(parts):
        mine, theirs = _common(first), _common(part)
        for name in sorted({*mine, *theirs}):
            if mine.get(name) != theirs.get(name):
                raise PlanError(
                    f"{part.path} is of another run than {first.path}: its {name} is {theirs.get(name)!r:.200}, there {mine.get(name)!r:.200}; "
                    "give the records of one run."
                )
        if part.number == before.number:
            raise PlanError(
                f"{before.path} and {part.path} are both records of the peer {part.name}: give each peer's record once."
            )


def _common(part: _Part) -> dict[str, Any]:
    """What all records of one run say alike."""
    config = part.config
    return {
        "list of peers": config["peers"],
        **{f"plan's {name}": value for name, value in config["plan"].items()},
        **{name: value for name, value in config["identity"].items() if name not in _OWN},
    }


def _shared(all_shapes: Sequence[Shapes]) -> Shapes:
    """What every peer has: figures of roles that some lack are left out, as they are where all lack them."""
    first, *others = all_shapes
    fields = {
        role: {name: sample for name, sample in own.items() if all(other.has(role, name) for other in others)}
        for role, own in first.fields.items()
    }
    return Shapes({role: own for role, own in fields.items() if own}, first.num_classes)


# ---- merging -----------------------------------------------------------------------------------------------------------------


def _config(parts: Sequence[_Part], found: Sequence[str], missing: Sequence[str]) -> dict[str, Any]:
    config = parts[0].config
    data = hashlib.blake2b(
        b"".join(part.data for part in parts), digest_size=16
    ).hexdigest()  # of all peers: as a simulation has it
    identity = {**{name: value for name, value in config["identity"].items() if name not in _OWN}, "data": data}
    kept = {name: config[name] for name in ("run", "engine", "plan", "peers", "shapes")}
    return {
        "identity": identity,
        **kept,
        "ranks": 1,
        "versions": versions(),
        "versions_of_peers": {part.name: part.config["versions"] for part in parts},
        "collected": list(found),
        "missing": list(missing),
    }


def _rows(parts: Sequence[_Part], problem: Problem) -> list[dict[str, Any]]:
    """A row for every outer iteration that all have measured, in one group: in groups of one size, which is at least their number."""
    rows = []
    for iteration in sorted(set.intersection(*(set(part.rows) for part in parts))):
        some = [part.rows[iteration] for part in parts]
        sizes = {row.get("members", 0) for row in some}
        if len(sizes) > 1 or max(sizes) < len(some):
            continue
        try:
            rows.append(_row(some, problem))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the measurements of outer iteration {iteration} do not fit together ({error!r:.80}): "
                "copy the folders again, with each metrics.jsonl as it was written."
            ) from error
    if not rows:
        spans = ", ".join(
            f"{part.name} {min(part.rows, default=None)} to {max(part.rows, default=None)}" for part in parts
        )
        raise CheckpointError(
            f"there is no outer iteration that all these peers have measured together ({spans}): leave some of them out."
        )
    return rows


def _row(some: Sequence[Mapping[str, Any]], problem: Problem) -> dict[str, Any]:
    names = [name for name in some[0]["seen"] if name in _LOOKS or all(name in row["seen"] for row in some)]
    table = torch.tensor([[row["seen"][name] for name in names] for row in some], dtype=torch.float64)
    paid = {name: sum(row[name] for row in some) for name in ("messages", *COLUMNS)}
    return {
        "iteration": some[0]["iteration"],
        "seconds": max(row["seconds"] for row in some),
        "megabytes": float(paid["bytes_up"] + paid["bytes_down"]) / 1e6,
        "rounds": max(row["rounds"] for row in some),
        **paid,
        **figures(problem, names, table),
        "num_peers": len(some),
    }


def _ledger(parts: Sequence[_Part], num_peers: int) -> Ledger:
    """Everybody pays for what it does and sends itself, so bills add up; steps in which messages pass are the same ones for all."""
    whole = Ledger(num_peers)
    summed = {
        **whole.state_dict(),
        **{f"edges-{name}": torch.zeros(num_peers, num_peers, dtype=torch.int64) for name in EDGES},
    }
    for part in parts:
        for name, before in summed.items():
            amount = part.tensors.get(f"ledger.{name}")
            if amount is None or amount.shape != before.shape:
                raise CheckpointError(
                    f"the bill in {Record(part.path).checkpoint} is not one between {num_peers} peers: copy the folder again."
                )
            summed[name] = torch.maximum(before, amount) if name == "rounds" else before + amount
    for part in parts:
        for name, paid in part.tensors.items():
            if name.startswith("ledger.phase-"):
                before = summed.setdefault(name.removeprefix("ledger."), torch.zeros_like(paid))
                summed[name.removeprefix("ledger.")] = torch.cat(
                    [torch.maximum(before[:1], paid[:1]), (before + paid)[1:]]
                )  # rounds are everybody's
    whole.load_state_dict(summed)
    return whole


def _state(part: _Part, plan: PeerPlan) -> Any:
    """The algorithm's state, with this peer's row alone."""
    both = {**part.tensors, **{name: entry["value"] for name, entry in part.plain.items()}}
    values = {name.removeprefix("state."): value for name, value in both.items() if name.startswith("state.")}
    kind = plan.built_algorithm().State
    if set(values) != set(kind._fields):
        raise CheckpointError(
            f"the checkpoint in {part.path} holds {', '.join(values)}, the algorithm has {', '.join(kind._fields)}: collect with the version that wrote it."
        )
    return kind(**values)


def _layout_x(part: _Part, problem: Problem, shapes: Shapes) -> Layout:
    """Which leaf of a private x differs in length between peers, the record says."""
    described = part.config["identity"]["x"]
    ragged = next((name for name, shape in described.items() if shape == "ragged"), None)
    return Layout(problem.initial_x({role: 1 for role in shapes.fields}), ragged)


def _named(label: str, number: int, tree: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{label}.client{number}.{name}": leaf.clone() for name, leaf in tree.items()}


def is_mask(problem: Problem, roles: Iterable[str]) -> bool:
    """Whether x has one entry per training sample and starts at ones, y is one for all and peers count the same, so that minus an entry of h is a change."""
    if problem.scopes.upper != "private" or problem.scopes.lower != "global" or problem.client_weights != "equal":
        return False
    leaves = list(problem.initial_x({role: 5 if role == "train" else 3 for role in roles}).values())
    return len(leaves) == 1 and leaves[0].shape == (5,) and bool((leaves[0] == 1).all())


def _removals(parts: Sequence[_Part], rows: Sequence[Tensor]) -> list[Removal]:
    """As `influence.Estimate.changes`: to first order, an entry of the mask that goes from one to zero adds minus its derivative."""
    every = [
        Removal(part.number, part.name, sample, change)
        for part, row in zip(parts, rows, strict=True)
        for sample, change in enumerate((-row.double()).tolist())
    ]
    return sorted(every, key=lambda one: (one.change, one.client, one.sample))
