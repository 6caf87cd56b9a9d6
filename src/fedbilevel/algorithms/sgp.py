"""Stochastic gradient push on the lower level alone: FedAvg without a server; x stays as it starts.

Use it when there is only a model y to train and no server, on any connected network, directed or
changing. It costs T pushes of d_y + 1 floats per out-edge in an outer iteration.

Every peer holds (z_i, w_i) and reads y_i = z_i / w_i:

    z_i <- z_i - gamma * p_i * g_y,i(x_0, y_i);   then one push of (z_i, w_i)

Reference: Nedic, Olshevsky, "Stochastic gradient-push for strongly convex functions on time-varying
directed graphs", IEEE TAC 2016; Assran, Loizou, Ballas, Rabbat, "Stochastic Gradient Push for
Distributed Deep Learning", ICML 2019 (Algorithm 1, the order used here: step, then push).

Deviations: (1) Clients count by the problem's weights p_i, which are one by default.
(2) `lower_schedule="milestones"` multiplies the step by 0.1 after 5/6 and again after 11/12 of the
lower steps (500 and 550 of 600), as in the personalisation experiments of Terashita and Hara, 2023.
(3) With a local lower level nothing is pushed, so every client trains alone.

Bias: with constant steps and heterogeneous clients, the y_i converge to points at a distance
proportional to the step from y* and from each other.

Cost per outer iteration: T pushes of d_y + 1 floats per out-edge; per client T of g_y.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from fedbilevel.federation.algorithm import PeerAlgorithm, Peers, debiased
from fedbilevel.settings import StepSize, setting, step_size

Schedule = Literal["constant", "milestones"]


def gradient_push(
    peers: Peers,
    x: Tensor,
    z: Tensor,
    w: Tensor,
    *,
    lr: float,
    num_steps: int,
    schedule: Schedule = "constant",
    purpose: str = "B",
    push: Callable[..., tuple[Tensor, ...]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Take `num_steps` steps of stochastic gradient push on g(x, .) from (z, w); return (z, w).

    push: verb of the exchange; None: `peers.push`.
    """
    share = peers.weights.to(z.dtype)
    for step in peers.steps(num_steps):
        passed = (step.index >= num_steps * 5 / 6) + (step.index >= num_steps * 11 / 12)
        now = lr * 0.1**passed if schedule == "milestones" else lr
        z = z - now * share * peers.clients.lower_grad(x, debiased(z, w), step.batch("train", purpose))
        w, z = (push or peers.push)(w, y=z)
    return z, w


@dataclass(frozen=True, kw_only=True)
class SGP(PeerAlgorithm):
    lr_lower: StepSize = step_size(0.1, "step of y", symbol="gamma")
    num_lower_steps: int = setting(10, "steps of y, each with one push, per outer iteration", symbol="T", least=1)
    lower_schedule: Schedule = setting("constant", "of the lower steps within an outer iteration")

    class State(NamedTuple):
        x: Tensor
        z: Tensor
        w: Tensor

        @property
        def y(self) -> Tensor:
            return debiased(self.z, self.w)

    learns_x = uses_products = False
    lower_space = ("y", "z")

    def init(self, peers: Peers) -> State:
        x, y = peers.initial()
        return self.State(x, y * peers.weights.to(y.dtype), peers.weights)

    def round(self, peers: Peers, state: State) -> State:
        return self.pushed(peers, state, peers.push)

    def pushed(self, peers: Peers, state: State, push: Callable[..., tuple[Tensor, ...]]) -> State:
        """Return the state after the steps of an outer iteration with this verb of exchange."""
        z, w = gradient_push(
            peers,
            state.x,
            state.z,
            state.w,
            lr=self.lr_lower,
            num_steps=self.num_lower_steps,
            schedule=self.lower_schedule,
            push=push,
        )
        return self.State(state.x, z, w)
