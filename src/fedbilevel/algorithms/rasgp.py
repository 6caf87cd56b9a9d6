"""Robust stochastic gradient push: SGP through running sums, on networks that lose or delay messages.

Use it when there is only a model y to train, no server, and messages are lost, late or reordered.
Without faults it computes what `sgp` computes. It costs T pushes of d_y + 1 floats per out-edge in
an outer iteration, each in float64. It works in simulations only.

Every peer holds (z_i, w_i) and reads y_i = z_i / w_i:

    z_i <- z_i - gamma * p_i * g_y,i(x_0, y_i);   then one push of (z_i, w_i) through running sums

An edge carries the sum of everything that was pushed along it, and the receiver adds what it has
not received before. So the mass of a lost message waits on its edge until the next message that
arrives.

Reference: Spiridonoff, Olshevsky, Paschalidis, "Robust Asynchronous Stochastic Gradient-Push:
Asymptotically Optimal and Network-Independent Performance for Strongly Convex Functions", JMLR
2020. The update is written from memory of the literature, and does not claim a faithful
reproduction.

Deviations: (1) Every peer takes one gradient step per step of the network, also while it sleeps; in
the paper a node that wakes makes up for the steps that it missed. (2) Receivers may change from
step to step, so every edge has its own sum. (3) Clients count by the problem's weights p_i.
(4) `lower_schedule="milestones"` is that of SGP. (5) With a local lower level nothing is pushed.

Bias: with constant steps and heterogeneous clients, the y_i stay at a distance from y* that falls
with the step. Faults enlarge it, and it varies from step to step.

Cost per outer iteration: T pushes of d_y + 1 floats per out-edge, lost messages included; per
client T of g_y.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedbilevel.algorithms.sgp import SGP
from fedbilevel.federation.algorithm import Peers


@dataclass(frozen=True, kw_only=True)
class RASGP(SGP):
    uses = ("running_push",)

    def round(self, peers: Peers, state: SGP.State) -> SGP.State:
        return self.pushed(peers, state, peers.running_push)
