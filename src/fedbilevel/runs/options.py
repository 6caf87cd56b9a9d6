"""Options of a run other than its task and algorithm, as plain values.

The values come from the command line, a record or an experiment file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from fedbilevel.aggregation.attacks import Attack
from fedbilevel.aggregation.settings import Aggregation
from fedbilevel.errors import SettingError, UnknownNameError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.clients import BatchSize, Sampling
from fedbilevel.federation.network import Network
from fedbilevel.federation.schedule import Schedule
from fedbilevel.federation.stragglers import Stragglers
from fedbilevel.settings import Settings, check_plain, made

BETWEEN_PEERS: dict[str, type[Settings]] = {"network": Network, "averaging": Averaging}
WITH_SERVER: dict[str, type[Settings]] = {"attack": Attack}
WITH_BOTH: dict[str, type[Settings]] = {"aggregation": Aggregation}
TABLES = {**BETWEEN_PEERS, **WITH_BOTH, **WITH_SERVER}  # options that are tables
DTYPES = {"float32": torch.float32, "float64": torch.float64}
_KINDS = {
    "seed": "seed",
    "fraction": "number",
    "replacement": "flag",
    "redraw": "text",
    "slow": "number",
    "slow_work": "number",
    "dropout": "number",
    "schedule_power": "number",
    "schedule_offset": "number",
    "schedule_end": "count",
    "batch_size": "size",
    "sampling": "text",
    "dtype": "text",
    "precision": "text",
    "device": "text",
    "strategy": "text",
    "chunk_size": "maybe",
}
DEFAULTS: dict[str, Any] = {
    "seed": 0,
    "fraction": 1.0,
    "replacement": False,
    "redraw": "per_factor",
    "slow": 0.0,
    "slow_work": 0.2,
    "dropout": 0.0,
    "schedule_power": 0.0,
    "schedule_offset": 100.0,
    "schedule_end": 0,
    "batch_size": None,
    "sampling": "replacement",
    "dtype": "float32",
    "precision": "full",
    "device": "cpu",
    "strategy": "auto",
    "chunk_size": None,
}


def keywords(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert options to keyword arguments of `solve`. Omitted options have their defaults."""
    for name in options:
        if name not in DEFAULTS and name not in TABLES:
            raise UnknownNameError("option of a run", name, [*DEFAULTS, *TABLES])
    given = {**DEFAULTS, **options}
    for name, kind in _KINDS.items():
        check_plain(name, given[name], kind)
    if given["dtype"] not in DTYPES:
        raise SettingError(f"dtype is {given['dtype']!r}, expected {' or '.join(DTYPES)}.")
    sampling: Sampling = given["sampling"]
    unequal = Stragglers(given["slow"], given["slow_work"], given["dropout"]).checked()
    return {
        **{name: given[name] for name in ("seed", "strategy", "chunk_size", "precision")},
        "batch_size": batch_size(given["batch_size"]),
        "sampling": sampling,
        "cohort": Cohort(given["fraction"], given["replacement"], given["redraw"]),
        **({"stragglers": unequal} if unequal.slow or unequal.dropout else {}),
        "schedule": Schedule(*(given[f"schedule_{name}"] for name in Schedule._fields)),
        **{name: made(owner, options[name]) for name, owner in TABLES.items() if name in options},
        "dtype": DTYPES[given["dtype"]],
        "device": torch_device(given["device"]),
    }


def batch_size(size: int | Literal["all"] | Mapping[str, Any] | None) -> BatchSize:
    """Convert "all" to None. Files use "all", because TOML has no None."""
    if isinstance(size, Mapping):
        return {role: None if one == "all" else one for role, one in size.items()}
    return None if size == "all" else size


def torch_device(name: torch.device | str) -> torch.device:
    try:
        found = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise SettingError(f"device is {name!r}, expected cpu, cuda or cuda:N.") from error
    if found.type not in ("cpu", "cuda"):
        raise SettingError(f"device is {name!r}, expected cpu, cuda or cuda:N.")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise SettingError(
            f"device is {name!r} but this torch sees no CUDA device: "
            "use --device cpu, or install a CUDA build of torch."
        )
    return found
