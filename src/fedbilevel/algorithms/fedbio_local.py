"""FedBiO-Local: every client has its own lower level and its own u_i; only x is averaged.

Use it when every client has its own lower level and x is shared. It costs one round of only d_x
floats per outer iteration. The default, a short Neumann series, has a bias; `u="local"` removes it
and needs one product H v per step.

Every client takes I local steps at its own (x_i, y_i), then one round: x <- mean.

    y_i <- y_i - gamma * g_y,i
    x_i <- x_i - eta * Phi_i,      Phi_i = f_x,i - J_i u_i

`u="neumann"` solves for u_i by a series, eq. (11):

    u_i = tau * sum_{q=0..Q} prod_{j=Q-q+1..Q} (I - tau H_i(xi_j)) f_y,i

`u="local"` keeps u_i at the client from step to step:

    u_i <- P_r(u_i - tau * (H_i u_i - f_y,i))

f_x and f_y share a minibatch xi_f; the products H v use fresh minibatches (`local`: one), J v
another, and g_y its own.

Reference: Li, Huang, Huang, "Communication-Efficient Federated Bilevel Optimization with Global and
Local Lower Level Problems", NeurIPS 2023, Algorithm 3 and eq. (11).

Deviations: (1) `u="local"` is not in Algorithm 3; line 4 of Algorithm 4 suggests it. It equals
FedBiO on a local lower level except for the shared xi_f. (2) The paper gives no value for Q.
(3) With a private x nothing is sent: every client solves its own problem.

Bias: the error of the Neumann series against H_i^-1 f_y,i is at most
(1 - tau mu)^(Q+1) |f_y,i| / mu (for tau <= 1/L); `local` has no such bias. With I > 1 and constant
steps x drifts by a distance proportional to the step.

Cost per outer iteration: 1 round; d_x floats each way; per client I of each of g_y, f_x, f_y, J v,
and Q I products H v (`local`: I).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fedbilevel.algorithms import _local_neumann
from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, Variable, phase
from fedbilevel.federation.clients import Clients, Step
from fedbilevel.oracle.hypergradient import project
from fedbilevel.settings import StepSize, setting, step_size

REFUSES = {
    "global": "it solves a linear system with the Hessian of each client alone, and the mean of those "
    "hypergradients is not the hypergradient of the "
    "mean: use fedbio or fedbioacc, or scopes with a local lower level"
}


def local_directions(
    self: Any, clients: Clients, step: Step, x: Tensor, y: Tensor, u: Tensor | None = None, *, times: int = 1
) -> tuple[Tensor, ...]:
    """Return (Phi, g_y), followed by H u - f_y if u is given."""
    train, val = partial(step.batch, "train", times=times), partial(step.batch, "val", times=times)
    if u is not None:
        return clients.directions(
            x, y, u, gy=train("B_y"), fx=val("xi"), fy=val("xi"), ju=train("zeta_0"), hu=train("zeta_1")
        )
    phi = _local_neumann.summed(clients, step, x, y, self.num_factors + 1, self.lr_system, times=times)
    return phi, clients.lower_grad(x, y, train("B_y"))


@dataclass(frozen=True, kw_only=True)
class FedBiOLocal(ServerAlgorithm):
    lr_upper: StepSize = step_size(0.01, "step of x", symbol="eta")
    lr_lower: StepSize = step_size(0.1, "step of y", symbol="gamma")
    lr_system: StepSize = step_size(0.1, "step of the Neumann series or of u; at most 1/L", symbol="tau")
    num_local_steps: int | tuple[int, ...] = setting(5, "local steps between rounds", symbol="I", least=1)
    num_factors: int = setting(5, "products H v of the Neumann series, which has one term more", symbol="Q", least=0)
    u: Literal["neumann", "local"] = setting(
        "neumann", "a Neumann series in every step, or one step on a u that the client keeps"
    )
    radius: float | None = setting(
        None, "with u=local, u is projected on the ball of this radius; at least max|f_y| / mu", symbol="r", above=0
    )

    decays = ("lr_upper", "lr_lower")  # tau is the step of a series, not of a descent
    upper_space = ("x",)
    lower_space = ("y", "u")
    refuses = REFUSES

    class State(NamedTuple):
        x: Variable
        y: Variable
        u: Variable | None

    def init(self, fed: Federation) -> State:
        return self.State(*fed.initial(), fed.zeros("u") if self.u == "local" else None)

    def round(self, fed: Federation, state: State) -> State:
        new = fed.mean(self.local_steps, x=state.x, y=state.y, u=state.u)
        return self.State(new.x, new.y, new.u)

    @phase
    def local_steps(self, clients: Clients, x: Tensor, y: Tensor, u: Tensor | None) -> dict[str, Tensor | None]:
        x, y = clients.rows(x, y)
        for step in clients.steps(self.num_local_steps):
            dx, dy, *du = local_directions(self, clients, step, x, y, u)
            if u is not None:
                u = step.where(project(u - self.lr_system * du[0], self.radius), u)
            x, y = step.where((x - self.lr_upper * dx, y - self.lr_lower * dy), (x, y))
        return {"x": x, "y": y, "u": u}
