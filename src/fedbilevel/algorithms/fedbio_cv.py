"""FedBiO-CV: FedBiO with control variates of every client, so that local steps leave no drift.

Use it when clients differ, are the same in every round or come back often, and several local steps
per round are worth twice the floats. It works for all scopes and converges to the exact solution
with constant steps and any numbers of local steps, also unequal ones. It costs one round of
2 d_x + 4 d_y floats per outer iteration.

For each sequence s in {x, y, u} client i keeps c_i, the mean of its directions in its last outer
iteration, and the server sends c, the mean of the c_i of all clients. Every client takes I local
steps at its own (x_i, y_i, u_i) with FedBiO's directions and the step a of the sequence:

    s_i <- s_i - a (d_i - c_i + c),   d_i = (f_x,i - J_i u_i, g_y,i, H_i u_i - f_y,i)

Then c_i becomes the mean of d_i over these steps. One round averages s_i and the changes of c_i,
and c moves by the mean change times the share of clients that answered. At the solution d_i = c_i
and c = 0, so no client moves: the solution is a fixed point for every I.

Reference: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled
Averaging for Federated Learning", ICML 2020, applied to the three sequences of FedBiO. This
combination is this project's own.

Deviations: (1) Control variates start at zero, so the first outer iteration is one of FedBiO. (2) A
sequence that a scope keeps at its client takes FedBiO's steps, because its c_i and c are equal.
(3) The server's step is one: s becomes the mean of the s_i.

Bias: none with full batches if c is the mean of all c_i. This holds for all clients in every round,
and for cohorts of clients that count equally. It fails for cohorts of clients with unequal weights,
for cohorts with replacement, and for ever after an answer that was lost on its way; it also holds
only as far as compressed, clipped or robust means do. With minibatches the noise of c_i adds to the
noise of the steps.

Cost per outer iteration: 1 round; 2 d_x + 4 d_y floats each way; per client I of each of g_y, f_x,
f_y, H u, J u.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms.fedbio import step_directions
from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, Variable, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.settings import StepSize, setting, step_size


@dataclass(frozen=True, kw_only=True)
class FedBiOCV(ServerAlgorithm):
    lr_upper: StepSize = step_size(0.01, "step of x", symbol="eta")
    lr_lower: StepSize = step_size(0.1, "step of y", symbol="gamma")
    lr_system: StepSize = step_size(0.1, "step of u", symbol="tau")
    num_local_steps: int | tuple[int, ...] = setting(5, "local steps between rounds", symbol="I", least=1)
    minibatches: Literal["independent", "shared"] = setting(
        "independent", "five minibatches per local step as in FedBiO, or two"
    )

    upper_space = ("x", "c_x", "change_x")
    lower_space = ("y", "u", "c_y", "c_u", "change_y", "change_u")

    class State(NamedTuple):
        x: Variable
        y: Variable
        u: Variable
        c_x: Variable
        c_y: Variable
        c_u: Variable

    def init(self, fed: Federation) -> State:
        return self.State(*fed.initial(), *(fed.zeros(name) for name in ("u", "c_x", "c_y", "c_u")))

    def round(self, fed: Federation, state: State) -> State:
        new = fed.mean(self.local_steps, **state._asdict())
        share = fed.num_answers / fed.num_clients
        c = (
            c + share * change if isinstance(change, Tensor) else c  # a sequence that stays has no use for c
            for c, change in zip(state[3:], (new.change_x, new.change_y, new.change_u), strict=True)
        )
        return self.State(new.x, new.y, new.u, *c)

    @phase
    def local_steps(
        self, clients: Clients, x: Tensor, y: Tensor, u: Tensor, c_x: Tensor, c_y: Tensor, c_u: Tensor
    ) -> dict[str, Tensor]:
        point, common = clients.rows(x, y, u), clients.rows(c_x, c_y, c_u)
        nothing = tuple(torch.zeros_like(rows) for rows in point)
        own, total = clients.memory.read("c", default=nothing), nothing
        scopes = clients.host.problem.scopes
        stays = (scopes.upper == "private", scopes.lower == "local", scopes.lower == "local")
        shift = [0 * c if kept else c - c_i for kept, c, c_i in zip(stays, common, own, strict=True)]
        rates = (self.lr_upper, self.lr_lower, self.lr_system)
        for step in clients.steps(self.num_local_steps):
            x, y, u = point
            found = step_directions(clients, step, x, y, u, self.minibatches)
            new = tuple(s - a * (d + c) for s, a, d, c in zip(point, rates, found, shift, strict=True))
            point = step.where(new, point)
            total = step.where(tuple(t + d for t, d in zip(total, found, strict=True)), total)
        new = tuple(rows / step.count for rows in total)
        clients.memory.write(c=new)
        changes = (c - c_i for c, c_i in zip(new, own, strict=True))
        return dict(zip(("x", "y", "u", "change_x", "change_y", "change_u"), (*point, *changes), strict=True))
