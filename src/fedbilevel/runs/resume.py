"""The identity of a run, which must equal the identity in a checkpoint for the run to resume."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from fedbilevel._version import __version__
from fedbilevel.engines.engine import Engine
from fedbilevel.errors import CheckpointError
from fedbilevel.federation.clients import BatchSize
from fedbilevel.runs.record import Record


def versions() -> dict[str, str]:
    return {
        "fedbilevel": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "platform": platform.system(),
        "machine": platform.machine(),
    }


_OPTIONAL = ("aggregation", "attack", "stragglers", "precision")  # parts of an identity that most runs do not have


def identity_of(fed: Engine, batch_size: BatchSize, dtype: torch.dtype) -> dict[str, Any]:
    """Return the values that must not change between a checkpoint and a resumed run.

    The number of outer iterations may change.
    """
    problem, algorithm = fed.problem, fed.algorithm
    return {
        "algorithm": algorithm.name(),
        "settings": {
            name: list(value) if isinstance(value, tuple) else value for name, value in algorithm.asdict().items()
        },
        "problem": problem.name,
        "scopes": problem.scopes._asdict(),
        "client_weights": problem.client_weights,
        "num_clients": fed.num_clients,
        "dtype": str(dtype).removeprefix("torch."),
        "seed": fed.seed,
        **fed.identity(),
        "batch_size": dict(batch_size) if isinstance(batch_size, Mapping) else batch_size,
        "sampling": fed.sampling,
    }


def check_same(mine: Mapping[str, Any], theirs: Mapping[str, Any], book: Record) -> None:
    fix = "use the same, or start a new run"
    for name in (*mine, *(name for name in _OPTIONAL if name in theirs and name not in mine)):
        if name == "settings" and mine["algorithm"] == theirs.get("algorithm"):
            given, stored = mine[name], theirs.get(name, {})
            for key in sorted({*given, *stored}):
                if given.get(key) != stored.get(key):
                    raise CheckpointError(
                        f"the checkpoint in {book.path} has {key} = {stored.get(key)!r}, "
                        f"here it is {given.get(key)!r}: {fix}."
                    )
        elif name == "losses" and len(theirs.get(name, ())) == 2:  # another device or strategy may round differently
            if not all(
                str(a) == str(b) or math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6)
                for a, b in zip(mine[name], theirs[name], strict=True)
            ):
                raise CheckpointError(
                    f"the checkpoint in {book.path} belongs to another problem: "
                    f"its losses at a fixed point are {theirs[name]}, here {mine[name]}; {fix}."
                )
        elif mine.get(name) != theirs.get(name, "replacement" if name == "sampling" else None):  # older ones lack it
            raise CheckpointError(
                f"the checkpoint in {book.path} belongs to another run: "
                f"its {name} is {theirs.get(name)!r}, here it is {mine.get(name)!r}; {fix}."
            )
