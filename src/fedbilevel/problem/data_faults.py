"""Data that make a problem meaningless or fail: constant labels, validation on training samples, too large labels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fedbilevel.errors import ProblemError, reason
from fedbilevel.problem.client_data import REQUIRED, ClientData, Holdings
from fedbilevel.problem.holdings import as_array, fields_of
from fedbilevel.problem.problem import Problem
from fedbilevel.problem.windows import Windows

_SHOWN = 3  # places of a value in a message
_MANY = 20  # samples of a role; fewer are an example, not data
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_OUTSIDE = re.compile(r"Target (-?\d+) is out of bounds|index (-?\d+) is out of bounds for dimension")  # of torch


@contextmanager
def outside_named(clients: Sequence[Holdings]) -> Iterator[None]:
    """Name the clients and fields of a value that a loss cannot use as an index, such as a label."""
    try:
        yield
    except (IndexError, RuntimeError, ProblemError) as error:
        told = error.__cause__ if isinstance(error, ProblemError) else error
        found = _OUTSIDE.search(str(told))
        if found is None or not isinstance(told, Exception):
            raise
        value = int(found[1] or found[2])
        held = [f"{name!r} ({_listed(places)})" for name, places in _holders(clients, value).items()]
        if not held:
            raise
        raise ProblemError(
            f"a loss cannot use {value} as an index ({reason(told)}), which may be a value of {' or '.join(held)}: "
            "number classes from 0, and give the model one output for every class of all clients."
        ) from error


def _holders(clients: Sequence[Holdings], value: int) -> dict[str, list[str]]:
    """Return the places of a whole number, such as "client 1 in 'train'", by field."""
    found: dict[str, list[str]] = {}
    for i, client in enumerate(clients):
        for role, given in client.items():
            for name, values in fields_of(given, f"{role!r} of client {i}").items():
                if not isinstance(values, Windows) and _is_whole(values) and (as_array(values) == value).any():
                    found.setdefault(str(name), []).append(f"client {i} in {role!r}")
    return found


def _is_whole(values: Any) -> bool:
    """Return whether a field has one whole number per sample."""
    if isinstance(values, torch.Tensor):
        return values.ndim == 1 and values.dtype in _WHOLE
    return np.ndim(values) == 1 and np.asarray(values).dtype.kind in "iu"


def _listed(places: Sequence[str]) -> str:
    more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    return ", ".join(places[:_SHOWN]) + more


def data_faults(problem: Problem, data: ClientData) -> list[str]:
    """Return a sentence for each fault of the data of all clients.

    A private x may be a part of the client's own model, which both levels train on the same data.
    """
    return [*_constant(data), *(_same(data) if problem.scopes.upper == "shared" else [])]


def _constant(data: ClientData) -> list[str]:
    """Find integer fields with one value, which are useless as labels."""
    found = []
    for role in REQUIRED:
        for name, values in data.fields[role].items():
            whole = not values.is_floating_point() and values.dtype != torch.bool and values.ndim == 1
            if whole and len(values) >= _MANY and bool((values == values[0]).all()):
                found.append(
                    f"the field {name!r} is {int(values[0])} in all {len(values)} samples of {role!r}: "
                    "if it is a label, nothing can be learned from it"
                )
    return found


def _same(data: ClientData) -> list[str]:
    train, val = (data.fields[role] for role in REQUIRED)
    num = int(data.sizes["train"].sum())
    same = (
        num >= _MANY
        and not data.is_cut("train")
        and train.keys() == val.keys()
        and torch.equal(data.sizes["train"], data.sizes["val"])
        and all(torch.equal(train[name], val[name]) for name in train)
    )
    if not same:
        return []
    return [f"'train' and 'val' hold the same {num} samples, so x overfits them: give 'val' samples of its own"]
