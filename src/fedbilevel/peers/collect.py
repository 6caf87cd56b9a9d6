"""Collection of the records of all peers of a run into one record like that of a simulation.

No peer sees all others during a run. Afterwards their records suffice: every measurement holds
sums that add up over peers (`seen`), and every checkpoint holds a peer's own row of the state and
its own ledger. The collected folder holds config.json, metrics.jsonl and

    solution.safetensors        x and y of every peer, as x.client<number>.<name> and y.client...
    ledger.json                 total costs, and messages, floats and bytes by sender and receiver
    hypergradient.safetensors   h.client<number>.<name>, if the algorithm has an estimate
    influences.json             predicted change of the summed validation loss when a training
                                sample is removed, if h gives it (tasks/influence.py)

There is no checkpoint: only the peers can resume their run. Solution and hypergradient come from
the peers' last checkpoints, which must be of the same outer iteration. The peers' own files of
these names can be older, if a run was interrupted, resumed and then lost.
"""

from __future__ import annotations

import hashlib
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
from fedbilevel.peers.records import OWN, PeerRecord, check_together, read_record, shared_shapes
from fedbilevel.problem.layout import Layout
from fedbilevel.problem.problem import Problem
from fedbilevel.runs.record import Record, make_folder, write_whole
from fedbilevel.runs.resume import versions
from fedbilevel.tasks.task import Shapes

INFLUENCES = "influences.json"
_LOOKS = ("upper", "lower", "weight")  # first entries of every measurement


class _Final(NamedTuple):
    """Results from the last checkpoints, which are all of the same outer iteration."""

    solution: dict[str, Tensor]
    estimate: dict[str, Tensor]
    disagreement: float | None
    removals: list[Removal] | None


class Removal(NamedTuple):
    """Predicted effect of removing one training sample.

    change: change of the validation loss summed over peers; it is negative if the sample is
        harmful.
    """

    client: int
    peer: str
    sample: int
    change: float


class Collected(NamedTuple):
    """Result of a collection.

    peers: names of the collected peers, by number.
    missing: names of the other peers of the run.
    behind: peers whose record ends earlier, with their last outer iteration; if there are any,
        there is no solution.
    removals: predicted effects of removing samples, the most harmful samples first; None if the
        records hold no influences.
    """

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


def collect(folders: Sequence[Path], out: Path) -> Collected:
    """Collect the records of some or all peers; write files only after all records are checked."""
    if not folders:
        raise PlanError("there are no records to collect: name the folder of at least one peer.")
    if (out / "config.json").exists():
        raise CheckpointError(f"{out} already holds a run: name another folder to collect into.")
    parts = sorted(map(read_record, folders), key=lambda part: part.number)
    check_together(parts)
    names = parts[0].config["peers"]
    plan = plan_of(parts[0].config["plan"], len(names))
    shapes = shared_shapes([Shapes.from_dict(part.config["shapes"]) for part in parts])
    problem = plan.built_task().problem(shapes)
    rows, ledger = _rows(parts, problem), _ledger(parts, len(names))
    last = max(part.iteration for part in parts)
    behind = {part.name: part.iteration for part in parts if part.iteration < last}
    final = _Final({}, {}, None, None) if behind else _final(parts, plan, problem, shapes)
    if final.disagreement is not None and rows[-1]["iteration"] == last:
        rows[-1]["disagreement"] = final.disagreement
    found = [part.name for part in parts]
    missing = [name for name in names if name not in found]
    make_folder(out)
    book = Record(out)
    write_whole(book.metrics, "".join(json.dumps(row) + "\n" for row in rows).encode())
    book.write_ledger(ledger.asdict())
    if final.solution:
        book.save_solution(final.solution)
    if final.estimate:
        write_whole(out / HYPERGRADIENT, save(final.estimate))
    if final.removals is not None:
        lines = ",\n".join(json.dumps(one._asdict()) for one in final.removals)
        write_whole(out / INFLUENCES, f"[\n{lines}\n]\n".encode())
    book.write_config(_config(parts, found, missing))  # written last, so that a folder with one is complete
    return Collected(out, plan, tuple(found), tuple(missing), behind, rows, ledger, final.removals)


def _final(parts: Sequence[PeerRecord], plan: PeerPlan, problem: Problem, shapes: Shapes) -> _Final:
    states = [_state(part, plan) for part in parts]
    layout_x, layout_y = _layout_x(parts[0], problem, shapes), Layout(problem.y0)
    solution: dict[str, Tensor] = {}
    estimate: dict[str, Tensor] = {}
    disagreement = removals = None
    for part, state in zip(parts, states, strict=True):
        for label, layout, row in (("x", layout_x, state.x), ("y", layout_y, state.y)):
            solution.update(_named(label, part.number, layout.unravel(row[0])))
    if problem.scopes.lower == "global":
        y = torch.cat([state.y for state in states])
        disagreement = spread(y, torch.linalg.vector_norm(y.mean(0)))
    if all(bool(getattr(state, "h", torch.zeros(1)).any()) for state in states):  # zeros before the first estimate
        for part, state in zip(parts, states, strict=True):
            estimate.update(_named("h", part.number, layout_x.unravel(state.h[0])))
        at_ones = parts[0].iteration == 1 or all(bool((state.x == 1).all()) for state in states)
        if at_ones and is_mask(problem, shapes.fields):  # h was computed with no sample removed
            removals = _removals(parts, [state.h[0] for state in states])
    return _Final(solution, estimate, disagreement, removals)


def _config(parts: Sequence[PeerRecord], found: Sequence[str], missing: Sequence[str]) -> dict[str, Any]:
    config = parts[0].config
    # The digest of all data, as in a simulation.
    data = hashlib.blake2b(b"".join(part.data for part in parts), digest_size=16).hexdigest()
    identity = {**{name: value for name, value in config["identity"].items() if name not in OWN}, "data": data}
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


def _rows(parts: Sequence[PeerRecord], problem: Problem) -> list[dict[str, Any]]:
    """Return the rows of the outer iterations that all peers have measured in one group.

    The peers were in one group if their groups have the same size and at least as many members as
    there are records.
    """
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
            f"there is no outer iteration that all these peers have measured together ({spans}): omit some of them."
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


def _ledger(parts: Sequence[PeerRecord], num_peers: int) -> Ledger:
    """Return the sum of the ledgers.

    Every peer is charged for its own work and messages; rounds are common to all peers.
    """
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
                    f"the ledger in {Record(part.path).checkpoint} is not one between {num_peers} peers: "
                    "copy the folder again."
                )
            summed[name] = torch.maximum(before, amount) if name == "rounds" else before + amount
    for part in parts:
        for name, paid in part.tensors.items():
            if name.startswith("ledger.phase-"):
                phase = name.removeprefix("ledger.")
                before = summed.setdefault(phase, torch.zeros_like(paid))
                rounds = torch.maximum(before[:1], paid[:1])
                summed[phase] = torch.cat([rounds, (before + paid)[1:]])
    whole.load_state_dict(summed)
    return whole


def _state(part: PeerRecord, plan: PeerPlan) -> Any:
    """Return the state of the algorithm with the row of one peer."""
    both = {**part.tensors, **{name: entry["value"] for name, entry in part.plain.items()}}
    values = {name.removeprefix("state."): value for name, value in both.items() if name.startswith("state.")}
    kind = plan.built_algorithm().State
    if set(values) != set(kind._fields):
        raise CheckpointError(
            f"the checkpoint in {part.path} holds {', '.join(values)}, the algorithm has {', '.join(kind._fields)}: "
            "collect with the version that wrote it."
        )
    return kind(**values)


def _layout_x(part: PeerRecord, problem: Problem, shapes: Shapes) -> Layout:
    """Return the layout of x.

    The record names the leaf of a private x whose length differs between peers.
    """
    described = part.config["identity"]["x"]
    ragged = next((name for name, shape in described.items() if shape == "ragged"), None)
    return Layout(problem.initial_x({role: 1 for role in shapes.fields}), ragged)


def _named(label: str, number: int, tree: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{label}.client{number}.{name}": leaf.clone() for name, leaf in tree.items()}


def is_mask(problem: Problem, roles: Iterable[str]) -> bool:
    """Return whether minus an entry of h predicts the effect of removing a training sample.

    This needs a private x with one entry per training sample, initially one, a global y, and equal
    weights of the peers.
    """
    if problem.scopes.upper != "private" or problem.scopes.lower != "global" or problem.client_weights != "equal":
        return False
    leaves = list(problem.initial_x({role: 5 if role == "train" else 3 for role in roles}).values())
    return len(leaves) == 1 and leaves[0].shape == (5,) and bool((leaves[0] == 1).all())


def _removals(parts: Sequence[PeerRecord], rows: Sequence[Tensor]) -> list[Removal]:
    """Return the sorted predicted changes to first order, as in `influence.Estimate.changes`.

    Setting an entry of the mask from one to zero adds minus its derivative.
    """
    every = [
        Removal(part.number, part.name, sample, change)
        for part, row in zip(parts, rows, strict=True)
        for sample, change in enumerate((-row.double()).tolist())
    ]
    return sorted(every, key=lambda one: (one.change, one.client, one.sample))
