"""The hypergradient of one client by a Neumann series with its own Hessian.

Several algorithms share it.

    f_x - J p,   p ~ H_i^-1 f_y

It is exact (up to truncation) for a local lower level or identical clients, and biased for a global
lower level with heterogeneous clients. The Jacobian product uses the sample zeta_0 of the step, the
factors use zeta_1, zeta_2, ..., and f_x and f_y share xi.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fedbilevel.federation.clients import Clients, Step

BIAS = (
    "each client inverts its own Hessian, so heterogeneous clients converge to where the mean of local hypergradients "
    "vanishes, not to the solution"
)


def sampled(clients: Clients, step: Step, x: Tensor, y: Tensor, num_terms: int, theta: float) -> Tensor:
    """Return f_x - J K theta prod_{j<=k} (I - theta H_j) f_y for every client.

    Each client draws its own k uniformly from {0..K-1}. Repeated calls in a step draw the same k.
    """
    fx, p = clients.upper_grads(x, y, step.batch("val", "xi"))
    k = step.draw("k", num_terms)
    for j in range(1, clients.most(k, num_terms) + 1):
        uses = k >= j
        hp = clients.hessian_product(x, y, p, replace(step.batch("train", f"zeta_{j}"), active=uses))
        p = torch.where(uses.to(p.device)[:, None], p - theta * hp, p)
    return fx - clients.jacobian_product(x, y, num_terms * theta * p, step.batch("train", "zeta_0"))


def summed(
    clients: Clients, step: Step, x: Tensor, y: Tensor, num_terms: int, theta: float, *, times: int = 1
) -> Tensor:
    """Return f_x - J theta sum_{j<K} (I - theta H)^j f_y, the mean of `sampled` over k."""
    train = partial(step.batch, "train", times=times)
    fx, term = clients.upper_grads(x, y, step.batch("val", "xi", times=times))
    total = term
    for j in range(1, num_terms):
        term = term - theta * clients.hessian_product(x, y, term, train(f"zeta_{j}"))
        total = total + term
    return fx - clients.jacobian_product(x, y, theta * total, train("zeta_0"))
