"""Ditto on the lower level alone: FedAvg, and personal models drawn to it; x stays as it starts.

Use it when you need a strong simple rival for personalisation: a model of every client's own, near
a common one. It trains y only, measures the personal models and never uses the upper loss. It costs
one round of d_y floats per outer iteration, as FedAvg does, and T more gradients per client.

Client i receives the common model w, and keeps its personal model v_i from round to round:

    w_i <- w_i - gamma * g_y,i(x_0, w_i)   from w_i = w, for I local steps
    v_i <- v_i - gamma * (g_y,i(x_0, v_i) + lambda (v_i - w))   for T personal steps
    w = mean of w_i

v_i never leaves its client, and no other value depends on it. lambda = 0 trains every client alone;
with a large lambda, v_i stays at w.

Reference: Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, Algorithm 1. Written from memory of the literature, not from the
paper's text: no faithful reproduction is claimed.

Deviations: (1) The solver of the common model is FedAvg. (2) Both models take steps of the same
size. (3) Clients are averaged by the problem's weights. A client outside the cohort keeps its v_i
(at first the initial point). (4) With a local lower level w is not averaged: it is a model that the
client trains alone.

Bias: w has the bias of FedAvg. Given w, v_i converges to the minimiser of
g_i(v) + lambda/2 |v - w|^2. Steps are stable for gamma (L + lambda) < 2.

Cost per outer iteration: 1 round; d_y floats up, d_y down (and d_x once, for the constant x); per
client I + T of g_y.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, Variable, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.federation.probing import Found
from fedbilevel.problem.problem import Scopes
from fedbilevel.settings import StepSize, setting, step_size


@dataclass(frozen=True, kw_only=True)
class Ditto(ServerAlgorithm):
    lr_lower: StepSize = step_size(0.1, "step of the common and of the personal models", symbol="gamma")
    prox_weight: float = setting(
        1.0, "weight of the squared distance of a personal model from the common one", symbol="lambda", least=0
    )
    num_local_steps: int | tuple[int, ...] = setting(5, "local steps of the common model", symbol="I", least=1)
    num_personal_steps: int = setting(5, "steps of the personal model between rounds", symbol="T", least=1)

    learns_x = uses_products = False
    lower_space = ("w", "v")

    class State(NamedTuple):
        x: Variable
        y: Variable  # v, which is measured
        w: Variable

    def kept_names(self, scopes: Scopes) -> set[str]:
        return {*super().kept_names(scopes), "v"}

    def auto_steps(self, found: Found) -> dict[str, float]:
        return {"lr_lower": 1 / (1 / found.lower + self.prox_weight)}

    def init(self, fed: Federation) -> State:
        return self.State(fed.start("x"), fed.start("v"), fed.start("w"))

    def round(self, fed: Federation, state: State) -> State:
        new = fed.mean(self.local_steps, x=state.x, w=state.w, v=state.y)
        return self.State(state.x, new.v, new.w)

    @phase
    def local_steps(self, clients: Clients, x: Tensor, w: Tensor, v: Tensor) -> dict[str, Tensor]:
        w = sent = clients.rows(w)
        for step in clients.steps(self.num_local_steps):
            w = step.where(w - self.lr_lower * clients.lower_grad(x, w, step.batch("train", "B")), w)
        for step in clients.steps(self.num_personal_steps):
            gradient = clients.lower_grad(x, v, step.batch("train", "personal")) + self.prox_weight * (v - sent)
            v = v - self.lr_lower * gradient
        return {"w": w, "v": v}
