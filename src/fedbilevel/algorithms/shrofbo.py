"""ShroFBO: SimFBO for clients with unequal amounts of local work; every client counts the same.

Use it when clients take different numbers of local steps, with a server and for all scopes. It
costs the same as SimFBO, one round of d_x + 2 d_y floats per outer iteration, and removes SimFBO's
bias towards clients that do more work.

The method is SimFBO, but the sums of directions are divided by the client's own amount of work and
multiplied by the average amount:

    q_x <- (rho / |a_i|_1) q_x,   and likewise q_y and q_u
    |a_i|_1 = tau_i,   rho = mean of |a_i|_1 over all clients

so that the means no longer weigh client i by tau_i. rho is a constant: it does not depend on the
cohort.

Reference: Yang, Xiao, Ji, "SimFBO: Towards Simple, Flexible and Communication-efficient Federated
Bilevel Learning", NeurIPS 2023. The update is written from memory of the literature, not from the
paper's text: no faithful reproduction is claimed.

Deviations: those of SimFBO, and (6) rho counts every client the same, also where the problem weighs
clients by samples: it is one factor of the server's steps, not a weight.

Bias: with tau > 1 and constant steps the clients drift. The distance to the solution is
proportional to the local step, also for unequal tau_i, where SimFBO's is not.

Cost per outer iteration: 1 round; d_x + 2 d_y floats each way; per client tau_i of each of g_y,
f_x, f_y, H u, J u.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbilevel.algorithms.simfbo import SimFBO
from fedbilevel.federation.clients import Step


@dataclass(frozen=True, kw_only=True)
class ShroFBO(SimFBO):
    """The same paper's second method: one factor differs."""

    def share(self, step: Step) -> Tensor | float:
        taus = self.num_local_steps
        rho = sum(taus) / len(taus) if isinstance(taus, tuple) else taus
        return rho / step.count
