"""A phase with a few clients at work at a time, whose rows are added up as they come.

The memory of a phase then does not grow with the number of clients: it holds the rows of the clients
at work and one sum per result. The sums are those of `Server._summed`, in float64 and in the order
of the clients, so that a run has the same bits as with all clients at once.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import Kept, Sparse
from fedbilevel.federation.host import Host
from fedbilevel.oracle import portions

Result = dict[str, Tensor | Sparse | None]
# rows at work per client and row of a message, from measurements of language models with four clients
_LOOP, _TOGETHER, _LEAST = 6, 14, 2
_SUMS = 3  # rows per row of a message that do not depend on the clients: the state, and sums in float64


class Sums:
    """Weighted sums of the rows of all clients, which may come in parts.

    Names in `kept` are written to the host's store; without weights rows are joined.
    """

    def __init__(self, host: Host, kept: set[str], weights: Tensor | None, num: int) -> None:
        self.host, self.kept, self.weights, self.num = host, kept, weights, num
        self.totals: dict[str, Tensor] = {}
        self._rows: dict[str, list[Tensor]] = {}
        self._forms: Result = {}

    def add(self, result: Result, positions: Tensor, start: int) -> None:
        for name, value in result.items():
            if value is None:
                self._forms[name] = None
                continue
            rows = value.rows if isinstance(value, Sparse) else value
            if name in self.kept:
                self.host.kept.write(name, positions, rows)
                self._forms[name] = rows.new_empty(0, rows.shape[1])  # the rows are in the store
            elif self.weights is None:
                self._rows.setdefault(name, []).append(rows)
                self._forms[name] = value
            else:
                self._sum(name, rows, self.weights[start : start + len(positions)].tolist())
                like = rows.new_full((1, 1), torch.nan).expand(self.num, rows.shape[1])  # the form of the message
                self._forms[name] = Sparse(like, value.num_kept) if isinstance(value, Sparse) else like

    def _sum(self, name: str, rows: Tensor, weights: list[int]) -> None:
        total = self.totals.get(name)
        if total is None:
            total = self.totals[name] = rows.new_zeros(rows.shape[1], dtype=torch.float64)
        for row, weight in zip(rows, weights, strict=True):
            total.add_(row if weight == 1 else row.double() * weight)  # rounded as in `portions.total`

    def answers(self) -> Result:
        """Return one row per client, or for a sum rows that only have the shape and the type."""
        joined = {name: torch.cat(self._rows.pop(name)) for name in list(self._rows)}  # parts are dropped early
        return {
            name: form._replace(rows=joined[name])
            if isinstance(form, Sparse) and name in joined
            else joined.get(name, form)
            for name, form in self._forms.items()
        }


def in_turn(
    host: Host,
    run: Callable[[Mapping[str, Any], Tensor, Tensor | None], Result],
    given: Callable[[Tensor], Mapping[str, Any]],
    positions: Tensor,
    sums: Sums,
) -> Result:
    """Run a phase for `host.at_once` clients at a time.

    run: function of values, positions and weights that runs the phase.
    given: function of positions that returns the values for these clients.
    """
    assert host.at_once is not None
    start = 0
    for part in positions.split(host.at_once):
        only_means = sums.weights is not None and not sums.kept  # kept rows are each client's own
        weights = sums.weights[start : start + len(part)] if only_means else None  # type: ignore[index]
        sums.add(run(given(part), part, weights), part, start)
        start += len(part)
    return sums.answers()


def room(host: Host, values: Mapping[str, Any], num: int, memory: int) -> None:
    """Say what a run with long rows needs, and let only some clients work at a time.

    On a GPU these are as many as fit. On a CPU it is one: with long rows it is as fast as all at
    once. Raise an error if one client surely does not fit.

    values: what the first message of a run carries.
    num: number of clients that would work at once.
    memory: bytes of the device; 0 if they are not known.
    """
    if host.device.type == "cpu" and host.has_long_rows and _may_divide(host):
        host.limit_clients(1)  # whatever their number and the message, so that ranks and resumed runs compute alike
    widths = [_width(host, value) for value in values.values()]
    if memory == 0 or sum(widths) < portions.LARGE:
        return
    row = sum(widths) * host.dtype.itemsize
    least, alone = (_SUMS + _LEAST) * row, (_SUMS + _LOOP) * row
    if least > memory:
        raise SettingError(
            f"one client at a time needs at least {least / 1e9:.3g} GB, and the device has {memory / 1e9:.3g} GB: "
            "train fewer weights (fb.lora), or use an algorithm that sends fewer rows."
        )
    each = (_LOOP if host.oracle.strategy == "loop" else _TOGETHER) * row
    need = lambda working: alone if working == 1 else _SUMS * row + working * each
    working = num if host.at_once is None else min(num, host.at_once)
    needed = need(working)
    said = (
        f"{_clients(working)} at once need{'s' * (working == 1)} about {needed / 1e9:.3g} GB beside activations, and "
        f"the device has {memory / 1e9:.3g} GB"
    )
    if needed <= memory:
        _say(f"memory: {said}, so all fit")
    elif host.device.type == "cpu":
        turn = f"; with strategy='loop', chunk_size=1 about {alone / 1e9:.3g} GB are needed" if working > 1 else ""
        _say(f"memory: {said}{turn}")
    else:
        fitting = max(1, int((memory - _SUMS * row) // each))
        host.limit_clients(fitting)
        warnings.warn(f"{said}, so {fitting} at a time will work in about {need(fitting) / 1e9:.3g} GB", stacklevel=2)


def _may_divide(host: Host) -> bool:
    """Return whether the user leaves it to the library how many clients work at a time."""
    oracle = host.oracle
    return oracle.strategy in ("auto", "loop") and oracle.chunk_size is None and not oracle.compiles


def pools(host: Host, phase: str, weights: Tensor | None) -> bool:
    """Return whether one derivative of a mean replaces those of all clients, so that none works alone.

    weights: weights of the clients, if only means are needed.
    """
    method = getattr(host.algorithm, phase, None)
    linear = weights is not None and getattr(method, "__is_linear__", False)
    return linear and host.device.type == "cpu" and host.oracle.strategy == "auto"


def memory_of(device: torch.device) -> int:
    """Return the bytes of a GPU, or of the main memory; 0 if the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on every system
        return 0


def _clients(num: int) -> str:
    return f"{num} client{'s' * (num > 1)}"


@functools.cache
def _say(text: str) -> None:
    """Print a line, once in a process: a study has many runs of one model."""
    print(text, file=sys.stderr)


def _width(host: Host, value: Any) -> int:
    """Return the length of a row of a message; rows that stay at their clients count too."""
    if isinstance(value, Kept):
        return host.width(value.name)
    return value.shape[-1] if isinstance(value, Tensor) else 0
