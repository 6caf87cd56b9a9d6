"""MDBO: momentum and gradient tracking of x and y between peers; hypergradients of each peer alone.

Use it when there is no server, the network is undirected and every client has its own lower level,
or as the baseline that papers on decentralised bilevel optimisation compare with. Do not use it for
one model across clients that differ: it is biased there. It costs one exchange of 2 d_x + 2 d_y
floats per out-edge in an outer iteration.

With W one exchange, every peer takes

    m_i <- (1 - a eta) m_i + a eta h_i(x_i, y_i)        momentum of x
    n_i <- (1 - b eta) n_i + b eta g_y,i(x_i, y_i)      momentum of y
    z_i <- (W z)_i + m_i - m_i,before;      v_i <- (W v)_i + n_i - n_i,before     gradient tracking
    x_i <- x_i + eta ((W x)_i - beta z_i - x_i);        y_i <- y_i + eta ((W y)_i - gamma v_i - y_i)
    h_i = f_x,i - J_i K theta prod_{j=1..k} (I - theta H_i) f_y,i,   k uniform in {0..K-1}

Reference: Gao, Gu, Thai, "On the Convergence of Distributed Stochastic Bilevel Optimization
Algorithms over a Network", AISTATS 2023, Algorithm 1 (MDBO). The update is written from memory of
the literature, and does not claim a faithful reproduction.

Deviations: (1) W x, W y, W z and W v are one message, because all four are known when an iteration
begins. (2) The momenta start at zero and not at the first directions.
(3) `hypergradient="local-neumann-sum"` is this project's own: the mean over k. (4) Clients count by
the problem's weights. (5) Values that a scope keeps at the peer are not exchanged, and the factor
1/m of a private x is dropped.

Bias: every peer inverts its own Hessian. So with a global lower level and heterogeneous clients the
peers converge to the point where the mean of local hypergradients vanishes. With a local lower
level, or identical clients, only the truncation after K terms remains. Tracking removes the
influence of the network: the limit does not depend on it.

Cost per outer iteration: 1 round; 2 d_x + 2 d_y floats per out-edge; per client 1 of each of g_y,
f_x, f_y, J v and k of H v (sum: K - 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms import _local_neumann
from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import PeerAlgorithm, Peers
from fedbilevel.federation.probing import Found
from fedbilevel.settings import StepSize, setting, step_size


@dataclass(frozen=True, kw_only=True)
class MDBO(PeerAlgorithm):
    lr_upper: StepSize = step_size(0.02, "step of x, before eta", symbol="beta")
    lr_lower: StepSize = step_size(0.2, "step of y, before eta", symbol="gamma")
    lr_system: StepSize = step_size(0.1, "step of the Neumann series; at most 1/L", symbol="theta")
    num_terms: int = setting(10, "terms of the Neumann series", symbol="K", least=1)
    hypergradient: Literal["local-neumann", "local-neumann-sum"] = setting(
        "local-neumann", "one random number of factors, or the mean over that number"
    )
    relaxation: float = setting(
        0.5, "share of the way to the exchanged point, and unit of the momenta", symbol="eta", above=0, most=1
    )
    momentum_upper: float = setting(1.0, "times eta: weight of a new hypergradient", symbol="a", above=0)
    momentum_lower: float = setting(1.0, "times eta: weight of a new g_y", symbol="b", above=0)

    uses = ("gossip",)
    decays = ("lr_upper", "lr_lower")  # theta is the step of a series, not of a descent
    upper_space = ("x", "m", "z")
    lower_space = ("y", "n", "v")
    warns = {"global": _local_neumann.BIAS}

    class State(NamedTuple):
        x: Tensor
        y: Tensor
        m: Tensor
        n: Tensor
        z: Tensor
        v: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        largest = self.relaxation * max(self.momentum_upper, self.momentum_lower)
        if largest > 1:
            raise SettingError(
                f"MDBO: the largest momentum times relaxation is {largest:g}, expected at most 1: lower one of them."
            )

    def auto_steps(self, found: Found) -> dict[str, float]:
        """Return half of the plain steps, which eta shortens, because tracking lags by an exchange."""
        plain = super().auto_steps(found)
        return {name: plain[name] / (2 * self.relaxation) for name in self.decays} | {"lr_system": found.lower}

    def init(self, peers: Peers) -> State:
        x, y = peers.initial()
        return self.State(x, y, *(torch.zeros_like(rows) for rows in (x, y, x, y)))

    def round(self, peers: Peers, state: State) -> State:
        [step] = peers.steps(1)
        estimate = _local_neumann.sampled if self.hypergradient == "local-neumann" else _local_neumann.summed
        h = estimate(peers.clients, step, state.x, state.y, self.num_terms, self.lr_system)
        g = peers.clients.lower_grad(state.x, state.y, step.batch("train", "zeta"))
        h, g = (d * peers.weights.to(d.dtype) if peers.travels(name) else d for name, d in (("x", h), ("y", g)))
        x, y, z, v = peers.gossip(x=state.x, y=state.y, z=state.z, v=state.v)
        eta = self.relaxation
        m = state.m + self.momentum_upper * eta * (h - state.m)
        n = state.n + self.momentum_lower * eta * (g - state.n)
        z, v = z + m - state.m, v + n - state.n
        x = state.x + eta * (x - self.lr_upper * z - state.x)
        y = state.y + eta * (y - self.lr_lower * v - state.y)
        return self.State(x, y, m, n, z, v)
