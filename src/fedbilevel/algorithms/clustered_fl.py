"""Clustered federated learning on the lower level alone: FedAvg within clusters that split.

Use it when clients form a few groups with different models and you need a baseline for
personalisation. It trains one global lower level per cluster, x stays at its initial value, and it
needs every client in every round. It costs one round of d_y floats per outer iteration.

Client i of cluster c starts from y_c:

    y_i <- y_i - gamma * g_y,i(x_0, y_i)   for I local steps;   D_i = y_i - y_c

A cluster has converged while its clients have not if

    |mean D_i| < eps_1   and   max |D_i| > eps_2

It then splits into the two parts for which the largest cosine of (D_i, D_j), with i and j in
different parts, is smallest. After that y_c is the mean of y_i over each cluster, new clusters
included. At first all clients form one cluster.

Reference: Sattler, Mueller, Samek, "Clustered Federated Learning: Model-Agnostic Distributed
Multitask Optimization Under Privacy Constraints", IEEE Transactions on Neural Networks and Learning
Systems, 2020. Written from memory of the literature, not from the paper's text: no faithful
reproduction is claimed. The default tolerances are those of public code, from memory.

Deviations: (1) A cluster splits at most once per outer iteration and continues from its current
point. (2) No bound on the gap between the similarities within and across parts is required before a
split. (3) Norms of D_i depend on the task and on the steps: with `tolerance_unit="first"` both
tolerances are multiples of the largest |D_i| of the first outer iteration. (4) Means use the
problem's weights. (5) The server sees the D_i of every client, so it needs all clients in every
round and cannot use secure sums.

Bias: with I > 1, constant steps and clients that differ within their cluster, y_c converges to a
point at a distance proportional to the step.

Cost per outer iteration: 1 round; d_y floats up, d_y down (and d_x once, for the constant x); per
client I of g_y.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.federation.algorithm import Federation, Variable
from fedbilevel.settings import setting


@dataclass(frozen=True, kw_only=True)
class ClusteredFL(FedAvg):
    tolerance_mean: float = setting(
        0.4, "a cluster may split when its mean change is shorter than this", symbol="eps_1", above=0
    )
    tolerance_max: float = setting(
        1.6, "a cluster may split when a client's change is longer than this", symbol="eps_2", above=0
    )
    tolerance_unit: Literal["absolute", "first"] = setting(
        "absolute", "tolerances are lengths, or multiples of the longest change of the first round"
    )

    gathers = True
    needs_everyone = True
    refuses = {
        "local": "every client then has a y of its own that stays there, so there is nothing to cluster: use "
        "fedavg, which trains each client alone"
    }

    class State(NamedTuple):
        x: Variable
        y: Tensor  # (n, d_y): the y of each client's cluster, by client number
        cluster: Tensor  # (n,) the number of each client's cluster
        unit: float | None  # the length that tolerances are multiples of; None before it is known

    def init(self, fed: Federation) -> State:  # type: ignore[override]
        x, y = fed.initial()
        return self.State(
            x,
            y.repeat(fed.num_clients, 1),
            torch.zeros(fed.num_clients, dtype=torch.int64),
            1.0 if self.tolerance_unit == "absolute" else None,
        )

    def round(self, fed: Federation, state: State) -> State:  # type: ignore[override]
        rows = fed.gather(self.local_steps, x=state.x, y=state.y).y
        change = (rows - state.y).double().cpu()
        unit = float(torch.linalg.vector_norm(change, dim=1).max()) if state.unit is None else state.unit
        weights, cluster = fed.weights.double(), state.cluster.cpu().clone()
        for number in range(int(cluster.max()) + 1):
            members = (cluster == number).nonzero()[:, 0]
            if self._splits(change[members], weights[members], unit):
                cluster[members[_two_parts(change[members])]] = cluster.max() + 1
        y = torch.empty_like(state.y)
        for number in range(int(cluster.max()) + 1):
            members = (cluster == number).nonzero()[:, 0]
            total = (rows[members].double() * weights[members, None].to(rows.device)).sum(
                0
            )  # as in every mean: float64, divided once
            y[members] = (total / weights[members].sum()).to(y.dtype)
        return self.State(state.x, y, cluster, unit)

    def _splits(self, change: Tensor, weights: Tensor, unit: float) -> bool:
        mean = torch.linalg.vector_norm(weights @ change) / weights.sum()
        longest = torch.linalg.vector_norm(change, dim=1).max()
        return bool(mean < self.tolerance_mean * unit) and bool(longest > self.tolerance_max * unit)


def _two_parts(change: Tensor) -> Tensor:
    """Split clients into two parts, and return a mask (k,) of the part without the first client.

    The most similar pairs are joined until two parts are left. This split has the smallest possible
    largest similarity between the parts: any other split separates a joined pair, and the
    similarity of a joined pair is at least the largest similarity between these two parts. For a
    single client, the mask is all False.
    """
    direction = change / torch.linalg.vector_norm(change, dim=1, keepdim=True).clamp(min=torch.finfo(change.dtype).tiny)
    num = len(change)
    i, j = torch.triu_indices(num, num, offset=1)
    order = (direction @ direction.T)[i, j].argsort(descending=True, stable=True)
    part, left = torch.arange(num), num
    for a, b in zip(i[order].tolist(), j[order].tolist(), strict=True):
        if left == 2:
            break
        if part[a] != part[b]:
            part[part == part[b]] = int(part[a])
            left -= 1
    return part != part[0]
