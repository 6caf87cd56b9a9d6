"""Records of single peers as `peer collect` reads them, and checks that they belong to one run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fedbilevel.errors import CheckpointError, PlanError
from fedbilevel.runs.record import Record
from fedbilevel.tasks.task import Shapes

OWN = ("data", "losses", "peer")  # parts of a record's identity that differ between peers


class PeerRecord(NamedTuple):
    """Record of one peer."""

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


def read_record(path: Path) -> PeerRecord:
    """Read the record in the folder of one peer."""
    book = Record(path)
    config = book.read_config()
    if config.get("engine") != "peers":
        raise CheckpointError(
            f"{path} holds a run of the engine {config.get('engine')!r:.40}, not the record of one peer: "
            "give the folders that peers wrote."
        )
    if "collected" in config:
        raise CheckpointError(
            f"{path} is itself a collected record of several peers: give the folders that the peers wrote themselves."
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
    # Later rows belong to outer iterations that were to be repeated.
    stored = {row["iteration"]: row for row in book.rows() if row["iteration"] <= about["iteration"]}
    return PeerRecord(path, number, config, about["iteration"], tensors, about["state"], stored)


def check_together(parts: Sequence[PeerRecord]) -> None:
    """Raise unless the records belong to one run and to different peers."""
    first = parts[0]
    for before, part in itertools.pairwise(parts):
        mine, theirs = _common(first), _common(part)
        for name in sorted({*mine, *theirs}):
            if mine.get(name) != theirs.get(name):
                raise PlanError(
                    f"{part.path} is of another run than {first.path}: its {name} is {theirs.get(name)!r:.200}, "
                    f"there {mine.get(name)!r:.200}; give the records of one run."
                )
        if part.number == before.number:
            raise PlanError(
                f"{before.path} and {part.path} are both records of the peer {part.name}: give each peer's record once."
            )


def _common(part: PeerRecord) -> dict[str, Any]:
    """Return the entries that are equal in all records of a run."""
    config = part.config
    return {
        "list of peers": config["peers"],
        **{f"plan's {name}": value for name, value in config["plan"].items()},
        **{name: value for name, value in config["identity"].items() if name not in OWN},
    }


def shared_shapes(all_shapes: Sequence[Shapes]) -> Shapes:
    """Return the fields that every peer has.

    Figures of other fields are omitted, as if no peer had those fields.
    """
    first, *others = all_shapes
    fields = {
        role: {name: sample for name, sample in own.items() if all(other.has(role, name) for other in others)}
        for role, own in first.fields.items()
    }
    return Shapes({role: own for role, own in fields.items() if own}, first.num_classes)
