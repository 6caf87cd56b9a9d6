"""FedBiO: local SGD on x, y and u at once, one round for all three.

Use it when clients differ and you want a first method with few settings. It works for all scopes,
and with `num_local_steps=1` it converges to the exact solution. It costs one round of d_x + 2 d_y
floats per outer iteration and five derivatives per local step.

Every client takes I local steps at its own (x_i, y_i, u_i) (simultaneous update, eq. 6 of the
paper):

    y_i <- y_i - gamma * g_y,i
    x_i <- x_i - eta * (f_x,i - J_i u_i)
    u_i <- P_r(u_i - tau * (H_i u_i - f_y,i))

Then one round: x, y, u <- means. u tracks u* = (mean H)^-1 mean f_y because the hypergradient is
linear in u: one shared u is exact for heterogeneous clients.

Reference: Li, Huang, Huang, "Communication-Efficient Federated Bilevel Optimization with Global and
Local Lower Level Problems", NeurIPS 2023, Algorithm 2.

Deviations: (1) Algorithm 2 prints the u-step after the averages of x and y. It is the simultaneous
update of eq. (6), so one round is enough. (2) With a private x the step is f_x,i - J_i u without
the factor 1/m of the stacked problem. (3) With a local lower level y_i and u_i stay at their
client. (4) `minibatches="shared"` uses two minibatches per step instead of the paper's five, and a
third of the time.

Bias: with I > 1 and constant steps the clients drift; the distance to the solution is proportional
to the step.

Cost per outer iteration: 1 round; d_x + 2 d_y floats each way; per client I of each of g_y, f_x,
f_y, H u, J u.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from torch import Tensor

from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, Variable, phase
from fedbilevel.federation.clients import Clients, Step
from fedbilevel.oracle.hypergradient import project
from fedbilevel.settings import StepSize, setting, step_size

PURPOSES = {"independent": ("B_y", "B_f1", "B_f2", "B_g1", "B_g2"), "shared": ("B_g", "B_f", "B_f", "B_g", "B_g")}


def step_directions(
    clients: Clients, step: Step, x: Tensor, y: Tensor, u: Tensor, minibatches: str, *, times: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (f_x - J u, g_y, H u - f_y) of every client at the client's own point.

    The derivatives use the minibatches of this step.
    """
    b_y, b_f1, b_f2, b_g1, b_g2 = PURPOSES[minibatches]
    train, val = partial(step.batch, "train", times=times), partial(step.batch, "val", times=times)
    return clients.directions(x, y, u, gy=train(b_y), fx=val(b_f1), fy=val(b_f2), ju=train(b_g1), hu=train(b_g2))


@dataclass(frozen=True, kw_only=True)
class FedBiO(ServerAlgorithm):
    lr_upper: StepSize = step_size(0.01, "step of x", symbol="eta")
    lr_lower: StepSize = step_size(0.1, "step of y", symbol="gamma")
    lr_system: StepSize = step_size(0.1, "step of u", symbol="tau")
    num_local_steps: int | tuple[int, ...] = setting(5, "local steps between rounds", symbol="I", least=1)
    radius: float | None = setting(
        None, "u is projected on the ball of this radius; at least max|f_y| / mu", symbol="r", above=0
    )
    minibatches: Literal["independent", "shared"] = setting(
        "independent", "five minibatches per local step as in the paper, or two"
    )

    upper_space = ("x",)
    lower_space = ("y", "u")

    class State(NamedTuple):
        x: Variable
        y: Variable
        u: Variable

    def init(self, fed: Federation) -> State:
        return self.State(*fed.initial(), fed.zeros("u"))

    def round(self, fed: Federation, state: State) -> State:
        new = fed.mean(self.local_steps, x=state.x, y=state.y, u=state.u)
        return self.State(new.x, new.y, new.u)

    @phase
    def local_steps(self, clients: Clients, x: Tensor, y: Tensor, u: Tensor) -> dict[str, Tensor]:
        x, y, u = clients.rows(x, y, u)
        for step in clients.steps(self.num_local_steps):
            dx, dy, du = step_directions(clients, step, x, y, u, self.minibatches)
            x, y, u = step.where(
                (x - self.lr_upper * dx, y - self.lr_lower * dy, project(u - self.lr_system * du, self.radius)),
                (x, y, u),
            )
        return {"x": x, "y": y, "u": u}
