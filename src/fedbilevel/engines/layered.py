"""Means of a server through the layer of `aggregation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fedbilevel.aggregation import ring
from fedbilevel.aggregation.layer import Encoded, Layer
from fedbilevel.aggregation.robust import robust_mean
from fedbilevel.oracle.population import figures
from fedbilevel.problem.problem import Problem


class Adds(Protocol):
    """What the layer needs of an engine whose clients may be in several processes."""

    def add(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return sums over all processes."""

    def rows(self, rows: Tensor) -> Tensor:
        """Return the rows of all clients that answered, by client number."""


def means(
    layer: Layer, sent: Mapping[str, Encoded], mine: Tensor, weights: Tensor, most: int, engine: Adds
) -> dict[str, Tensor]:
    """Return the mean of every sequence.

    mine: weights of the clients in this process, in the order of the rows.
    weights: weights of all clients that answered, by client number.
    most: largest sum of weights that any cohort of this run can have.
    """
    whole = int(weights.sum())
    bits = {name: ring.bits_for(most, one.way.settings.fixed_point) for name, one in sent.items()}
    plain = [name for name, one in sent.items() if one.way.settings.rule is None]
    totals = dict(zip(plain, engine.add([layer.integers(sent[name], mine, bits[name]) for name in plain]), strict=True))
    found = {}
    for name, one in sent.items():
        rule, base = one.way.settings.rule, one.way.base
        if rule is None:
            mean = layer.mean(one, totals[name], whole, bits[name])
        else:
            mean = robust_mean(rule, engine.rows(one.rows), weights, one.way.settings.outside)
        dtype = one.rows.dtype if base is None else base.dtype
        found[name] = (mean if base is None else base.double() + mean).to(dtype)
    return found


def layered_figures(problem: Problem, names: Sequence[str], table: Tensor) -> dict[str, float]:
    """Return losses and metrics from a table of all clients, from sums of integers.

    Figures that do not fit are added as usual: they come from a run that has diverged.
    """
    weights = table[:, 2:3]
    whole = torch.cat([table[:, :2] * weights, table[:, 2:]], dim=1)
    integers = ring.limbs(whole)
    if integers is None:
        return figures(problem, names, table)
    sums = ring.figures_of(ring.summed(integers))
    sums[:2] /= sums[2]
    return figures(problem, names, sums[None], table)
