"""FedBiOAcc-Local: FedBiO-Local with variance-reduced (STORM) directions; x and nu are averaged.

Use it when every client has its own lower level, x is shared, and minibatches are noisy. It costs
two rounds of d_x floats per outer iteration and twice the derivatives of FedBiO-Local.

For t = 1, 2, ..., counted in local steps, with a = delta / (u0 + t)^(1/3) and Phi_i as in
FedBiO-Local, every client computes

    x_i+ = x_i - eta a nu_i;   y_i+ = y_i - gamma a om_i
    R1, every I steps:   x+ <- mean
    nu_i+ = Phi_i(new) + (1 - c_nu a^2) (nu_i - Phi_i(old))
    om_i+ = g_y,i(new) + (1 - c_om a^2) (om_i - g_y,i(old))
    R2, every I steps:   nu <- mean

The new point has the averaged x if there was a round. The old point is the client's own before the
step. Both use the same minibatches (in the Neumann series the same xi_1, ..., xi_Q). `u="local"`
takes u_i+ = P_r(u_i - tau a q_i) with its own estimate q_i, and keeps both at the client.

Reference: Li, Huang, Huang, "Communication-Efficient Federated Bilevel Optimization with Global and
Local Lower Level Problems", NeurIPS 2023, Algorithm 4 and eq. (11).

Deviations: (1) Line 4 of Algorithm 4 steps a u that the algorithm never initialises or uses.
`neumann`, which the proof treats, leaves it out, and `local` completes it. (2) The initial nu is
averaged like all later ones. (3) Clients with fewer local steps wait: t counts the steps of the
longest. (4) A client that missed R1 skips R2. (5) With a private x nothing is sent.

Bias: that of the Neumann series as in FedBiO-Local; with I > 2 the clients drift as in FedBiOAcc.
A client that was absent resumes with its last om_i and q_i (zero if it never took part); their
error decays by the factor 1 - c a^2 per step.

Cost per outer iteration: 2 rounds; 2 d_x floats each way; per client 2 I of each of g_y, f_x, f_y,
J v, and 2 Q I products H v (`local`: 2 I). Once, before the first: 1 round; d_x floats each way;
per client one of each and Q (or one) products H v, on batches of I times the size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from fedbilevel.algorithms import fedbio_local, fedbioacc
from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, Variable
from fedbilevel.settings import StepSize, setting, step_size


@dataclass(frozen=True, kw_only=True)
class FedBiOAccLocal(ServerAlgorithm):
    lr_upper: StepSize = step_size(0.01, "step of x, times a", symbol="eta")
    lr_lower: StepSize = step_size(0.1, "step of y, times a", symbol="gamma")
    lr_system: StepSize = step_size(0.1, "step of the Neumann series, at most 1/L; or of u, times a", symbol="tau")
    num_local_steps: int | tuple[int, ...] = setting(5, "local steps between rounds", symbol="I", least=1)
    num_factors: int = setting(5, "products H v of the Neumann series, which has one term more", symbol="Q", least=0)
    u: Literal["neumann", "local"] = setting(
        "neumann", "a Neumann series in every step, or one step on a u that the client keeps"
    )
    delta: float = setting(30.0, "a = delta / (offset + t)^(1/3) scales every step", symbol="delta", above=0)
    offset: float = setting(1e4, "how late a begins to fall", symbol="u0", least=0)
    momentum_upper: float = setting(0.2, "weight of the newest direction of x, times a^2", symbol="c_nu", above=0)
    momentum_lower: float = setting(0.2, "weight of the newest direction of y, times a^2", symbol="c_om", above=0)
    momentum_system: float = setting(
        0.2, "with u=local, weight of the newest direction of u, times a^2", symbol="c_u", above=0
    )
    radius: float | None = setting(
        None, "with u=local, u is projected on the ball of this radius; at least max|f_y| / mu", symbol="r", above=0
    )

    decays = ("lr_upper", "lr_lower")  # tau is the step of a series, not of a descent
    upper_space = ("x", "nu")
    lower_space = ("y", "u", "om", "q")
    refuses = fedbio_local.REFUSES

    class State(NamedTuple):
        x: Variable
        y: Variable
        u: Variable | None
        nu: Variable
        om: Variable
        q: Variable | None

    def __post_init__(self) -> None:
        super().__post_init__()
        fedbioacc.check_momenta(self)

    auto_steps = fedbioacc.accelerated_steps

    def init(self, fed: Federation) -> State:
        (x, y), u = fed.initial(), fed.zeros("u") if self.u == "local" else None
        first = fed.mean(self.initial_momenta, x=x, y=y, u=u)
        return self.State(x, y, u, first.nu, first.om, first.q)

    def round(self, fed: Federation, state: State) -> State:
        new = fed.mean(self.local_steps, **state._asdict())
        est = fed.mean(self.momenta, **{**state._asdict(), **vars(new)})
        return self.State(new.x, new.y, new.u, est.nu, est.om, est.q)

    initial_momenta, local_steps, momenta = fedbioacc.initial_momenta, fedbioacc.local_steps, fedbioacc.momenta
    directions = fedbio_local.local_directions
