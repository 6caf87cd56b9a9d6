"""Data that make a problem meaningless: constant labels, and validation on the training samples."""

from __future__ import annotations

import torch

from fedbilevel.problem.client_data import REQUIRED, ClientData
from fedbilevel.problem.problem import Problem

_MANY = 20  # samples of a role; fewer are an example, not data


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
