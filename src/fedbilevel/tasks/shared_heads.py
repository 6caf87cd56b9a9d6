"""Heads that clients share in proportions of their own: a bilevel run that begins at own heads.

A rival has trained hidden layers b that all clients share and a head h_k of each client's own. Clients
that give the same meaning to labels could use each other's heads, but nobody knows which clients these
are. So x_i holds how much client i uses the head of every client k, and y = (b, h_1, ..., h_m) is global:

    head of client i:  sum_k w_ik h_k,    w_i = softmax(a_i + x_i)
    g_i(x_i, y) = CE(b, sum_k w_ik h_k; train_i) + decay/2 |y|^2      f_i(x_i, y) = CE(...; val_i) + penalty/2 |x_i|^2

a_ik is minus half of the mean loss of client i's training samples with the head of client k at the start,
so that a client begins with heads that suit it. Its own head was fitted to these samples and counts like
the best other. Then validation samples, to which no head was fitted, say which heads serve the client,
and heads learn from all clients that use them.

Cost: y has m heads instead of one. The heads leave their clients, unlike those of FedRep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, softmax

from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem, Scopes
from fedbilevel.tasks.rival import Way, with_validation

_FIELD = "affinity"  # of every sample: log weights a_i of its client, up to a constant
_WEIGHTS = "weights"
_DECAY = 1e-3
_PENALTY = 5e-4
_WORST = 6.0  # largest mean loss that counts: other heads are all alike
_SHARPNESS = 0.5  # of weights at the start: sharper weights share less


def shared_heads(
    shared: Problem, clients: Sequence[Holdings], body: Mapping[str, Tensor], heads: Sequence[Mapping[str, Tensor]]
) -> dict[str, Any]:
    """Return the fields of a problem that begins at these hidden layers and these heads, and its clients.

    shared: the whole network is y. `refits` trains y once more, with the learned weights.
    """
    body = {name: leaf.detach().cpu().clone() for name, leaf in body.items()}
    stacked = {name: torch.stack([one[name].detach().cpu() for one in heads]) for name in heads[0]}

    def whole(x: Any, y: Any, batch: Any) -> dict[str, Tensor]:
        weights = softmax(x[_WEIGHTS] + batch[_FIELD][0], 0)
        return {name: torch.tensordot(weights, y[name], 1) if name in stacked else y[name] for name in y}

    return {
        "x0": {_WEIGHTS: torch.zeros(len(heads))},
        "y0": {**body, **stacked},
        "scopes": Scopes(upper="private"),
        "upper": lambda x, y, batch: (
            shared.upper({}, whole(x, y, batch), batch) + 0.5 * _PENALTY * (x[_WEIGHTS] ** 2).sum()
        ),
        "lower": lambda x, y, batch: (
            shared.lower({}, whole(x, y, batch), batch) + 0.5 * _DECAY * sum((leaf**2).sum() for leaf in y.values())
        ),
        "features": None,
        "statistics": {
            role: lambda x, y, batch, count=count: count({}, whole(x, y, batch), batch)
            for role, count in shared.statistics.items()
        },
        "clients": [weighted(one, affinity(shared, one, body, heads, i)) for i, one in enumerate(clients)],
        "refits": refits,
    }


@torch.no_grad()
def affinity(
    shared: Problem, client: Holdings, body: Mapping[str, Tensor], heads: Sequence[Mapping[str, Tensor]], own: int
) -> np.ndarray:
    """Return the logarithms of a client's weights of all heads at the start, zero at the largest.

    own: the place of its own head.
    """
    dtype = next(iter(body.values())).dtype
    batch = {name: torch.as_tensor(value) for name, value in client["train"].items()}
    batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
    losses = np.array([float(shared.upper({}, {**body, **_on_cpu(head)}, batch).mean()) for head in heads])
    losses = np.nan_to_num(losses, nan=_WORST).clip(max=_WORST)
    if len(heads) > 1:
        losses[own] = np.delete(losses, own).min()
    found: np.ndarray = _SHARPNESS * (losses.min() - losses)
    return found


def weighted(client: Holdings, logs: np.ndarray) -> Holdings:
    """Return a client whose samples carry the logarithms of its weights."""
    row = np.asarray(logs, np.float32)
    return {role: {**own, _FIELD: np.tile(row, (len(own["label"]), 1))} for role, own in client.items()}


def refits(problem: Problem, clients: Sequence[Holdings], x: Sequence[Mapping[str, Tensor]]) -> dict[str, Way]:
    """Return training of y on training and validation samples, with the weights of every client as learned."""
    learned = [
        weighted(one, log_softmax(own[_WEIGHTS].detach().cpu() + torch.as_tensor(one["train"][_FIELD][0]), 0).numpy())
        for one, own in zip(clients, x, strict=True)
    ]
    return {"refitted": Way(problem, with_validation(learned))}


def _on_cpu(head: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: leaf.detach().cpu() for name, leaf in head.items()}
