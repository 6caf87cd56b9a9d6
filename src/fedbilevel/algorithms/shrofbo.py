"""ShroFBO: SimFBO for clients that do unequal amounts of local work; every client counts the same, whatever its tau_i.

As SimFBO, but the sums of directions are divided by the client's own amount of work and multiplied by the average amount:

    q_x <- (rho / |a_i|_1) q_x, and likewise q_y and q_u,      |a_i|_1 = tau_i,      rho = mean of |a_i|_1 over all clients

so that the means no longer weigh client i by tau_i. rho is a constant: it does not depend on who is in the cohort.

Reference: Yang, Xiao, Ji, "SimFBO: Towards Simple, Flexible and Communication-efficient Federated Bilevel Learning", NeurIPS 2023. The
update is written from memory of the literature, not from the paper's text: no faithful reproduction is claimed.

Deviations: those of SimFBO, and (6) rho counts every client the same, also where the problem weighs clients by samples: it is one
factor of the server's steps, not a weight.

Bias: with tau > 1 and constant steps the clients drift: the distance to the solution is proportional to the local step, also for
unequal tau_i, where SimFBO's is not.

Cost per outer iteration: 1 round; d_x + 2 d_y floats each way; per client tau_i of each of g_y, f_x, f_y, H u, J u.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fedbilevel.algorithms.simfbo import local_work
from fedbilevel.clients import Clients
from fedbilevel.federation import Federation, ServerAlgorithm, phase
from fedbilevel.settings import setting


@dataclass(frozen=True, kw_only=True)
class ShroFBO(ServerAlgorithm):
    lr_upper: float = setting(0.01, "local step of x", symbol="eta_x", above=0)
    lr_lower: float = setting(0.1, "local step of y", symbol="eta_y", above=0)
    lr_system: float = setting(0.1, "local step of u", symbol="eta_u", above=0)
    server_lr_upper: float = setting(1.0, "the server's step of x as a multiple of the local one", symbol="gamma_x / eta_x", above=0)
    server_lr_lower: float = setting(1.0, "the server's step of y as a multiple of the local one", symbol="gamma_y / eta_y", above=0)
    server_lr_system: float = setting(1.0, "the server's step of u as a multiple of the local one", symbol="gamma_u / eta_u", above=0)
    num_local_steps: int | tuple[int, ...] = setting(1, "local steps between rounds, or one number per client", symbol="tau", least=1)
    radius: float | None = setting(None, "u is projected on the ball of this radius after averaging; at least |u*|", symbol="r", above=0)
    minibatches: Literal["independent", "shared"] = setting("independent", "five minibatches per local step, or two")

    upper_space = ("x",)
    lower_space = ("y", "u")

    class State(NamedTuple):
        x: Any
        y: Any
        u: Any

    def init(self, fed: Federation) -> State:
        return self.State(*fed.initial(), fed.zeros("u"))

    def round(self, fed: Federation, state: State) -> State:
        new = fed.mean(self.local_steps, x=state.x, y=state.y, u=state.u)
        return self.State(new.x, new.y, new.u)

    @phase
    def local_steps(self, clients: Clients, x: Tensor, y: Tensor, u: Tensor) -> dict[str, Tensor]:
        taus = self.num_local_steps
        rho = sum(taus) / len(taus) if isinstance(taus, tuple) else taus
        return local_work(self, clients, x, y, u, share=lambda step: rho / step.count)
