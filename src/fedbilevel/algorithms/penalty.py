"""First-order penalty method: two lower variables replace second derivatives.

Use it when second derivatives are unavailable or expensive. It works for all scopes and for clients
that differ, and its error is proportional to 1/lam. It costs one round of d_x + 2 d_y floats per
outer iteration and six gradients per local step.

With y_lam(x) = argmin_y f + lam g and z(x) = argmin_y g, the gradient of
min_y [f + lam (g - min_z g)] is

    f_x(x, y_lam) + lam (g_x(x, y_lam) - g_x(x, z))

and tends to the hypergradient as the penalty weight lam grows. Every client takes I local steps at
its own (x_i, y_i, z_i) (simultaneous update), then one round: x, y, z <- means.

    y_i <- y_i - gamma / (1 + lam) * (f_y,i(x_i, y_i) + lam g_y,i(x_i, y_i))
    z_i <- z_i - gamma * g_y,i(x_i, z_i)
    x_i <- x_i - eta * (f_x,i(x_i, y_i) + lam (g_x,i(x_i, y_i) - g_x,i(x_i, z_i)))

In outer iteration t = 0, 1, ... the weight is lam = min(lam_max, lam_0 r^t + b t) with
`penalty_growth` r and `penalty_increment` b; by default it is constant.

Reference: Kwon, Kwon, Wright, Nowak, "A Fully First-Order Method for Stochastic Bilevel
Optimization", ICML 2023 (F2SA), in the federated single-loop form of its followers (MemFBO,
FedBOB). The update is written from memory of the literature and does not claim a faithful
reproduction of any of them.

Deviations: (1) The step of y is divided by 1 + lam, so that one gamma serves every lam. (2) g_y at
y and z, and g_x at y and z, share their samples: their differences are of the order of 1/lam and
are multiplied by lam. (3) z is sent as d = z - y, so that a client which joins late and finds d = 0
starts z at y. (4) With a private x the step is without the factor 1/m of the stacked problem and x
stays; with a local lower level y_i and z_i stay at their client.

Bias: a constant lam converges to a point at a distance O(1/lam) from the solution. With I > 1 and
constant steps the clients drift.

Cost per outer iteration: 1 round; d_x + 2 d_y floats each way; per client and step 2 of g_y, 2 of
g_x, 1 of f_x and f_y, no H v, no J v.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, Variable, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.settings import StepSize, setting, step_size


@dataclass(frozen=True, kw_only=True)
class Penalty(ServerAlgorithm):
    lr_upper: StepSize = step_size(0.01, "step of x", symbol="eta")
    lr_lower: StepSize = step_size(0.1, "step of z, and of y on (f + lam g) / (1 + lam)", symbol="gamma")
    num_local_steps: int | tuple[int, ...] = setting(5, "local steps between rounds", symbol="I", least=1)
    penalty: float = setting(
        10.0, "weight of the lower level at the start; the bias is of the order of its inverse", symbol="lam_0", above=0
    )
    penalty_growth: float = setting(
        1.0, "factor of the weight per outer iteration; above 1 it needs max_penalty", least=1
    )
    penalty_increment: float = setting(0.0, "what is added to the weight per outer iteration", least=0)
    max_penalty: float | None = setting(None, "the weight grows no further", symbol="lam_max", above=0)

    upper_space = ("x",)
    lower_space = ("y", "d")

    class State(NamedTuple):
        x: Variable
        y: Variable
        d: Variable

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_penalty is None and self.penalty_growth > 1:
            raise SettingError(
                f"Penalty: penalty_growth is {self.penalty_growth} and max_penalty is not set, so the weight "
                "would overflow: set max_penalty."
            )
        if self.max_penalty is not None and self.max_penalty < self.penalty:
            raise SettingError(
                f"Penalty: max_penalty is {self.max_penalty}, expected at least penalty, which is {self.penalty}."
            )

    def weight(self, t: int) -> float:
        """Return lam in outer iteration t, counted from 0."""
        grown = self.penalty * math.exp(min(t * math.log(self.penalty_growth), 600.0)) + self.penalty_increment * t
        return grown if self.max_penalty is None else min(self.max_penalty, grown)

    def init(self, fed: Federation) -> State:
        return self.State(*fed.initial(), fed.zeros("d"))

    def round(self, fed: Federation, state: State) -> State:
        new = fed.mean(self.local_steps, x=state.x, y=state.y, d=state.d, lam=self.weight(fed.iteration - 1))
        return self.State(new.x, new.y, new.d)

    @phase
    def local_steps(self, clients: Clients, x: Tensor, y: Tensor, d: Tensor, lam: float) -> dict[str, Tensor]:
        x, y, z = clients.rows(x, y, y + d)
        for step in clients.steps(self.num_local_steps):
            lower, cross = step.batch("train", "B_g"), step.batch("train", "B_x")
            fx, fy = clients.upper_grads(x, y, step.batch("val", "B_f"))
            dx = fx + lam * (clients.lower_grad_x(x, y, cross) - clients.lower_grad_x(x, z, cross))
            dy = (fy + lam * clients.lower_grad(x, y, lower)) / (1 + lam)
            dz = clients.lower_grad(x, z, lower)
            x, y, z = step.where((x - self.lr_upper * dx, y - self.lr_lower * dy, z - self.lr_lower * dz), (x, y, z))
        return {"x": x, "y": y, "d": z - y}
