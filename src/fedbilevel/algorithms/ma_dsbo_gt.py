"""MA-DSBO-GT: tracked lower steps, a tracked linear system and a moving average between peers.

Use it when there is no server, the network is undirected and several exchanges per step of x are
cheap, or as a baseline of decentralised bilevel optimisation. It works for all scopes and converges
to the exact solution. It costs T + N + 1 exchanges per outer iteration.

With W one exchange, an outer iteration takes T steps of y, N steps of u and one step of x at every
peer. Each sequence s in {x, y, u} has a tracker t of the mean of its directions d:

    t_i <- (W t)_i + d_i - d_i,before;      s_i <- (W (s - a t))_i

    y: d = g_y,i(x_i, y_i), a = gamma       u: d = H_i u_i - f_y,i at (x_i, y_i), a = tau
    x: d = r_i, a = eta, after the moving average r_i <- (1 - alpha) r_i + alpha (f_x,i - J_i u_i)

Reference: Chen, Huang, Ma, Balasubramanian, "Decentralized Stochastic Bilevel Optimization with
Improved per-Iteration Complexity", ICML 2023 (MA-DSBO and its oracle HIGP for u); with gradient
tracking as in the comparisons of SPARKLE (NeurIPS 2024). The update is written from memory of the
literature, and does not claim a faithful reproduction.

Deviations: (1) Peers step first and exchange afterwards, which allows longer steps than W s - a t;
s - a t and t are one message. (2) `warm_start=True`, this project's default: u and its tracker
continue from the last outer iteration; False: they start at zero, and u is the result of N steps
alone. (3) `tracking="lower"`: x takes x <- W (x - eta r). (4) The moving average starts at zero.
(5) Clients count by the problem's weights. (6) Values that a scope keeps at the peer are not
exchanged, and the factor 1/m of a private x is dropped.

Bias: none with the default settings. With `warm_start=False` u is short of the solution by a factor
of about (1 - tau mu)^N. With `tracking="lower"` and a constant step, the peers converge to points
at a distance proportional to the step.

Cost per outer iteration: T + N + 1 rounds; 2 (T + N) d_y + 2 d_x floats per out-edge (d_x instead
of 2 d_x with `tracking="lower"`); per client T of g_y, N of each of H u and f_y, 1 of each of f_x
and J u.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedbilevel.federation.algorithm import PeerAlgorithm, Peers
from fedbilevel.federation.probing import Found
from fedbilevel.settings import StepSize, setting, step_size


class Tracked(NamedTuple):
    """Rows of a sequence, of its tracker after an exchange, and of the directions that it holds."""

    s: Tensor
    t: Tensor
    d: Tensor

    def step(self, peers: Peers, name: str, d: Tensor, a: float) -> Tracked:
        t = self.t + d - self.d
        mixed, mixed_t = peers.gossip(**{name: self.s - a * t, f"{name}_t": t})
        return Tracked(mixed, mixed_t, d)


@dataclass(frozen=True, kw_only=True)
class MADSBOGT(PeerAlgorithm):
    lr_upper: StepSize = step_size(0.02, "step of x", symbol="eta")
    lr_lower: StepSize = step_size(0.1, "step of y", symbol="gamma")
    lr_system: StepSize = step_size(0.1, "step of u", symbol="tau")
    num_lower_steps: int = setting(5, "steps of y per outer iteration", symbol="T", least=1)
    num_terms: int = setting(5, "steps of u per outer iteration", symbol="N", least=1)
    momentum: float = setting(
        0.5, "weight of a new hypergradient in the moving average", symbol="alpha", above=0, most=1
    )
    tracking: Literal["all", "lower"] = setting("all", "sequences with gradient tracking: all, or y and u")
    warm_start: bool = setting(True, "u goes on from its last value instead of from zero")

    uses = ("gossip",)
    upper_space = ("x", "x_t", "r")
    lower_space = ("y", "u", "y_t", "u_t", "y_d", "u_d")

    class State(NamedTuple):
        x: Tensor
        y: Tensor
        u: Tensor
        r: Tensor  # the moving average, which is the direction that the tracker of x holds
        x_t: Tensor
        y_t: Tensor
        u_t: Tensor
        y_d: Tensor
        u_d: Tensor

    def auto_steps(self, found: Found) -> dict[str, float]:
        """Return half of the plain steps, because tracking lags behind by an exchange."""
        return {name: step / 2 for name, step in super().auto_steps(found).items()}

    def init(self, peers: Peers) -> State:
        x, y = peers.initial()
        zero_x, zero_y = torch.zeros_like(x), torch.zeros_like(y)
        return self.State(x, y, zero_y, zero_x, zero_x, zero_y, zero_y, zero_y, zero_y)

    def round(self, peers: Peers, state: State) -> State:
        clients, x = peers.clients, state.x
        shares = {name: peers.weights.to(x.dtype) if peers.travels(name) else 1.0 for name in "xy"}
        y = Tracked(state.y, state.y_t, state.y_d)
        for step in peers.steps(self.num_lower_steps):
            y = y.step(peers, "y", shares["y"] * clients.lower_grad(x, y.s, step.batch("train", "B_y")), self.lr_lower)
        zero = torch.zeros_like(y.s)
        u = Tracked(state.u, state.u_t, state.u_d) if self.warm_start else Tracked(zero, zero, zero)
        for step in peers.steps(self.num_terms):
            d = clients.hessian_product(x, y.s, u.s, step.batch("train", "B_h"))
            d = d - clients.upper_grad_y(x, y.s, step.batch("val", "B_f"))
            u = u.step(peers, "u", shares["y"] * d, self.lr_system)
        [step] = peers.steps(1)
        h = clients.upper_grad_x(x, y.s, step.batch("val", "B_x"))
        h = h - clients.jacobian_product(x, y.s, u.s, step.batch("train", "B_j"))
        r = (1 - self.momentum) * state.r + self.momentum * shares["x"] * h
        if self.tracking == "all":
            x, x_t, _ = Tracked(x, state.x_t, state.r).step(peers, "x", r, self.lr_upper)
        else:
            x, x_t = peers.gossip(x=x - self.lr_upper * r), state.x_t
        return self.State(x, y.s, u.s, r, x_t, y.t, u.t, y.d, u.d)
