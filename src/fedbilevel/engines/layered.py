"""Means of a server through the layer of `aggregation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedbilevel.aggregation import ring
from fedbilevel.aggregation.layer import Encoded, Layer
from fedbilevel.aggregation.robust import robust_mean
from fedbilevel.aggregation.settings import Aggregation
from fedbilevel.oracle.population import figures
from fedbilevel.privacy.accountant import Accountant, Budget, Release, joint
from fedbilevel.privacy.noisy_oracle import releases
from fedbilevel.problem.problem import Problem


class Adds(Protocol):
    """What the layer needs of an engine whose clients may be in several processes."""

    def add(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return sums over all processes."""

    def rows(self, rows: Tensor) -> Tensor:
        """Return the rows of all clients that answered, by client number."""


class Split(NamedTuple):
    """Groups of clients.

    clients: group of each client that answered, by client number.
    rows: group of each row in this process. A row is that of a client, or the sum of a group.
    """

    clients: Tensor
    rows: Tensor


def means(
    layer: Layer,
    sent: Mapping[str, Encoded],
    mine: Tensor,
    weights: Tensor,
    bits: int,
    engine: Adds,
    split: Split | None = None,
) -> dict[str, Tensor]:
    """Return the mean of every sequence.

    mine: weights of the clients in this process, in the order of the rows.
    weights: weights of all clients that answered, by client number.
    bits: of an entry, so that no sum of a cohort of this run overflows.
    split: groups whose means a robust rule compares; None compares rows of clients.
    """
    whole = int(weights.sum())
    plain = [name for name, one in sent.items() if one.way.settings.rule is None]
    sums = [ring.summed(layer.integers(sent[name], mine, bits)) for name in plain]
    totals = dict(zip(plain, engine.add(sums), strict=True))
    found = {}
    for name, one in sent.items():
        rule, base = one.way.settings.rule, one.way.base
        if rule is None:
            mean = layer.mean(one, totals[name], whole, bits)
        elif split is None:
            mean = robust_mean(rule, engine.rows(one.rows), weights, one.way.settings.outside)
        else:
            rows, shares = group_means(layer, one, mine, weights, bits, engine, split)
            mean = robust_mean(rule, rows, shares, one.way.settings.outside)
        dtype = one.way.dtype if base is None else base.dtype
        found[name] = (mean if base is None else base.double() + mean).to(dtype)
    return found


def group_means(
    layer: Layer, one: Encoded, mine: Tensor, weights: Tensor, bits: int, engine: Adds, split: Split
) -> tuple[Tensor, Tensor]:
    """Return the mean of each group in float64, and the sum of the weights of its clients."""
    numbers, members = split.clients.unique(return_inverse=True)
    shares = torch.zeros(len(numbers), dtype=weights.dtype).index_add_(0, members, weights)
    integers = layer.integers(one, mine, bits)
    groups = torch.searchsorted(numbers, split.rows).to(integers.device)
    own = integers.new_zeros(len(numbers), integers.shape[1]).index_add_(0, groups, integers)
    [total] = engine.add([own.reshape(-1)])
    each = zip(total.view_as(own), shares.tolist(), strict=True)
    return torch.stack([layer.mean(one, row, whole, bits) for row, whole in each]), shares


def only(answers: Mapping[str, Any], stay: Tensor) -> dict[str, Any]:
    """Return the answers with the encoded rows of some clients of this process."""
    rows = lambda array: array[stay.to(array.device)]
    return {
        name: one._replace(arrays=[*map(rows, one.arrays)], rows=rows(one.rows)) if isinstance(one, Encoded) else one
        for name, one in answers.items()
    }


def account_of(layer: Layer | None) -> Accountant | None:
    """Return the account of privacy of a run with noise, which needs opacus."""
    if layer is None or layer.settings.noise is None:
        return None
    assert layer.settings.epsilon is not None
    return Accountant(Budget(layer.settings.epsilon, layer.settings.delta))


def spend(account: Accountant | None, settings: Aggregation, num_sums: int, derived: Mapping[int, int]) -> None:
    """Count what one call releases, before anything of it leaves.

    At the level of clients, the sums of a call concern the same clients. Every client counts as
    present, because a cohort of a fixed size does not lower epsilon. At the level of examples, the
    derivatives of the call are released, also if their results stay at the clients. Examples are in
    one client each, so releases of different clients do not add up.

    num_sums: sequences that leave.
    derived: noisy derivatives of the client with the most of them, by the number of their sums.
    """
    if account is not None:
        found = events(settings, num_sums, derived)
        if found:
            account.spend(found)


def events(settings: Aggregation, num_sums: int, derived: Mapping[int, int]) -> list[Release]:
    """Return the releases of one call."""
    assert settings.noise is not None
    if settings.level == "example":
        return releases(settings.noise, settings.rate, derived)
    return [joint([settings.noise] * num_sums)] if num_sums else []


def identity_of(layer: Layer | None) -> dict[str, dict[str, object]]:
    """Return the settings that a resumed run must share; the budget may change."""
    if layer is None:
        return {}
    given = layer.settings.asdict()
    return {"aggregation": {name: value for name, value in given.items() if name not in ("epsilon", "delta")}}


def layered_figures(problem: Problem, names: Sequence[str], table: Tensor, settings: Aggregation) -> dict[str, float]:
    """Return losses and metrics from a table of all clients, from sums of integers.

    Figures that do not fit are added as usual: they come from a run that has diverged. Under secure
    sums there are no figures that compare single clients.
    """
    integers = figure_integers(table)
    if integers is None:
        return figures(problem, names, table, across=not settings.secure)
    return summed_figures(problem, names, ring.summed(integers), None if settings.secure else table)


def figure_integers(table: Tensor) -> Tensor | None:
    """Return the figures of clients as integers that can be added, or None if a figure does not fit."""
    return ring.limbs(torch.cat([table[:, :2] * table[:, 2:3], table[:, 2:]], dim=1))


def summed_figures(
    problem: Problem, names: Sequence[str], total: Tensor, table: Tensor | None = None
) -> dict[str, float]:
    """Return losses and metrics from the sum of all clients' integers.

    table: figures of single clients, if they are known.
    """
    sums = ring.figures_of(total)
    sums[:2] /= sums[2]
    return figures(problem, names, sums[None], table, across=table is not None)
