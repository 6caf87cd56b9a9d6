"""SimFBO: local steps on x, y and u at once, with separate step sizes for clients and server.

Use it when you want FedBiO with separate steps of the server, or a cohort of the clients in each
round. It works for all scopes. It costs one round of d_x + 2 d_y floats per outer iteration. With
unequal numbers of local steps take ShroFBO instead.

Client i, from the broadcast (x, y, u), takes tau_i simultaneous local steps, k = 0..tau_i-1:

    d_x = f_x,i - J_i u_i,   d_y = g_y,i,   d_u = H_i u_i - f_y,i       at its own (x_i, y_i, u_i)
    x_i <- x_i - eta_x d_x,   y_i <- y_i - eta_y d_y,   u_i <- u_i - eta_u d_u

and sends q_x, q_y, q_u: the sums over k of d_x, d_y, d_u. Then one round:

    x <- x - gamma_x mean q_x,   y <- y - gamma_y mean q_y,   u <- P_r(u - gamma_u mean q_u)

Reference: Yang, Xiao, Ji, "SimFBO: Towards Simple, Flexible and Communication-efficient Federated
Bilevel Learning", NeurIPS 2023. The update is written from memory of the literature, not from the
paper's text: no faithful reproduction is claimed.

Deviations: (1) The weights a_i^(k) of the local directions are all one. (2) The server's steps are
given as factors of the local ones, gamma / eta. With factors of one, equal tau and no radius this
is FedBiO. (3) The server's step is computed at the clients, as their start minus gamma q: the mean
of these rows is the same number, and the same source serves variables that stay at their clients.
P_r is therefore applied to the mean at its next use, so the u of the state is not projected yet.
(4) A cohort is drawn in proportion to weight, and its mean is unbiased for the weighted mean; the
paper draws uniformly and weighs by (m/|S|) p_i. (5) With a private x the factor 1/m is dropped; with a
local lower level y_i and u_i stay at their client.

Bias: with unequal tau_i the means weigh client i by tau_i, so the limit solves that weighted
problem for every step size (see ShroFBO). With tau > 1 and constant steps the clients drift: the
distance to the limit is proportional to the local step.

Cost per outer iteration: 1 round; d_x + 2 d_y floats each way; per client tau_i of each of g_y,
f_x, f_y, H u, J u.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms.fedbio import step_directions
from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, Variable, most_steps, phase
from fedbilevel.federation.clients import Clients, Step
from fedbilevel.federation.probing import Found
from fedbilevel.oracle.hypergradient import project
from fedbilevel.settings import StepSize, setting, step_size


@dataclass(frozen=True, kw_only=True)
class SimFBO(ServerAlgorithm):
    lr_upper: StepSize = step_size(0.01, "local step of x", symbol="eta_x")
    lr_lower: StepSize = step_size(0.1, "local step of y", symbol="eta_y")
    lr_system: StepSize = step_size(0.1, "local step of u", symbol="eta_u")
    server_lr_upper: float = setting(
        1.0, "the server's step of x as a multiple of the local one", symbol="gamma_x / eta_x", above=0
    )
    server_lr_lower: float = setting(
        1.0, "the server's step of y as a multiple of the local one", symbol="gamma_y / eta_y", above=0
    )
    server_lr_system: float = setting(
        1.0, "the server's step of u as a multiple of the local one", symbol="gamma_u / eta_u", above=0
    )
    num_local_steps: int | tuple[int, ...] = setting(
        1, "local steps between rounds, or one number per client", symbol="tau", least=1
    )
    radius: float | None = setting(
        None, "u is projected on the ball of this radius after averaging; at least |u*|", symbol="r", above=0
    )
    minibatches: Literal["independent", "shared"] = setting("independent", "five minibatches per local step, or two")

    upper_space: ClassVar[tuple[str, ...]] = ("x",)
    lower_space: ClassVar[tuple[str, ...]] = ("y", "u")

    class State(NamedTuple):
        x: Variable
        y: Variable
        u: Variable

    def auto_steps(self, found: Found) -> dict[str, float]:
        return {
            "lr_upper": found.upper / (most_steps(self.num_local_steps) * self.server_lr_upper),
            "lr_lower": found.between(self.num_local_steps) / max(1.0, self.server_lr_lower),
            "lr_system": found.between(self.num_local_steps) / max(1.0, self.server_lr_system),
        }

    def init(self, fed: Federation) -> State:
        return self.State(*fed.initial(), fed.zeros("u"))

    def round(self, fed: Federation, state: State) -> State:
        new = fed.mean(self.local_steps, x=state.x, y=state.y, u=state.u)
        return self.State(new.x, new.y, new.u)

    def share(self, step: Step) -> Tensor | float:
        """Return the weight of a local direction in the sums that are sent."""
        return 1.0

    @phase
    def local_steps(self, clients: Clients, x: Tensor, y: Tensor, u: Tensor) -> dict[str, Tensor]:
        start, q = self.sums(clients, x, y, u)
        return {name: v - gamma * total for name, v, gamma, total in zip("xyu", start, self.gammas(), q, strict=True)}

    def gammas(self) -> tuple[float, float, float]:
        """Return the server's step sizes of x, y and u."""
        return (
            self.server_lr_upper * self.lr_upper,
            self.server_lr_lower * self.lr_lower,
            self.server_lr_system * self.lr_system,
        )

    def sums(self, clients: Clients, x: Tensor, y: Tensor, u: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return each client's initial point, and the sums of directions over its local steps."""
        x, y, u = start = clients.rows(x, y, project(u, self.radius))
        q = tuple(torch.zeros_like(v) for v in start)
        for step in clients.steps(self.num_local_steps):
            dx, dy, du = step_directions(clients, step, x, y, u, self.minibatches)
            q = step.where(tuple(total + self.share(step) * d for total, d in zip(q, (dx, dy, du), strict=True)), q)
            x, y, u = step.where((x - self.lr_upper * dx, y - self.lr_lower * dy, u - self.lr_system * du), (x, y, u))
        return start, q
