"""AdaSimFBO: SimFBO with Adam steps on x, y and u at the server, and averaged iterates.

Use it when few clients take part in each round and their data differ a lot. It works for all scopes
and sends the same messages as SimFBO: one round and d_x + 2 d_y floats per outer iteration. This
combination is this project's own.

Clients do the same as in SimFBO: tau_i simultaneous local steps from the broadcast iterates. They
send q_x, q_y, q_u, the sums of their directions. For each of z = z_x, z_y, u the server keeps a
momentum m and a second moment s, both zero at first. In outer iteration t, elementwise,

    m <- beta_1 m + (1 - beta_1) mean q
    s <- beta_2 s + (1 - beta_2) (mean q)^2
    z <- z - gamma m / (sqrt(s) + eps)
    x <- k x + (1 - k) z_x,    y <- k y + (1 - k) z_y,    k = min(kappa, 1 - 1/t)

With few clients per cohort and heterogeneous data, mean q depends on the drawn cohort as much as on
the problem. The second moment shortens the step in entries that change from cohort to cohort.
x and y are the result, and no other value depends on them; they average over the last cohorts.
Together this permits large steps.

Reference: for the local steps, Yang, Xiao, Ji, "SimFBO: Towards Simple, Flexible and
Communication-efficient Federated Bilevel Learning", NeurIPS 2023. For the server's step, FedAdam of
Reddi et al., "Adaptive Federated Optimization", ICLR 2021, which has one level. Both are written
from memory of the literature, not from the papers' text: no faithful reproduction is claimed.
Averages of iterates are due to Polyak and Juditsky; here their weights decay.

Deviations: those of SimFBO, except that (3) holds only for variables that stay at their clients,
with their moments and averages: such a client takes its own Adam step in the rounds in which it
takes part. (6) There is no bias correction for the zeros that m and s start with: the first step
has at most the length (1 - beta_1) / sqrt(1 - beta_2) times gamma in every entry. (7) Moments are
those of directions, not of displacements, so a schedule of the steps does not change them.

Bias: that of SimFBO, because the limits are the same points: those where the means of q vanish.
Without random draws s vanishes near them too, and the step becomes gamma / eps: this step must suit
the curvature.

Cost per outer iteration: 1 round; d_x + 2 d_y floats each way; per client tau_i of each of g_y,
f_x, f_y, H u, J u.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fedbilevel.algorithms.simfbo import SimFBO
from fedbilevel.federation.algorithm import Federation, Kept, Variable, linear_phase, most_steps, phase
from fedbilevel.federation.clients import Clients, smaller
from fedbilevel.federation.probing import ADAPTIVE, MOVE, Found
from fedbilevel.oracle.hypergradient import project
from fedbilevel.settings import setting

ITERATES = {"x": "z_x", "y": "z_y", "u": "u"}


@dataclass(frozen=True, kw_only=True)
class AdaSimFBO(SimFBO):
    server_lr_upper: float = setting(
        0.1, "the server's step of x as a multiple of the local one", symbol="gamma_x / eta_x", above=0
    )
    server_lr_lower: float = setting(
        0.1, "the server's step of y as a multiple of the local one", symbol="gamma_y / eta_y", above=0
    )
    server_lr_system: float = setting(
        0.1, "the server's step of u as a multiple of the local one", symbol="gamma_u / eta_u", above=0
    )
    server_momentum: float = setting(
        0.5, "how much of the momentum stays in a round", symbol="beta_1", least=0, most=0.9999
    )
    server_decay: float = setting(
        0.9, "how much of the second moment stays in a round", symbol="beta_2", least=0, most=0.9999
    )
    server_damping: float = setting(
        0.01, "added to the root of the second moment; q grows with the number of local steps", symbol="eps", above=0
    )
    server_averaging: float = setting(
        0.75,
        "how much of the averages of x and y stays in a round; 0: the iterates are the answer",
        symbol="kappa",
        least=0,
        most=1,
    )

    upper_space = ("x", "z_x", "m_x", "s_x")
    lower_space = ("y", "z_y", "u", "m_y", "s_y", "m_u", "s_u")

    class State(NamedTuple):
        x: Variable
        y: Variable
        z_x: Variable
        z_y: Variable
        u: Variable
        m_x: Variable
        m_y: Variable
        m_u: Variable
        s_x: Variable
        s_y: Variable
        s_u: Variable

    def auto_steps(self, found: Found) -> dict[str, float]:
        """Return steps by which every entry moves by a share of its usual size in one round.

        The step of Adam is gamma q / (|q| + eps), where q is the sum over the local steps. Several
        local steps are not longer than those of SimFBO.
        """
        tau, steps = most_steps(self.num_local_steps), super().auto_steps(found)
        for name, move, q in (
            ("lr_upper", ADAPTIVE * found.size, found.h),
            ("lr_lower", MOVE * found.y, found.gradient),
            ("lr_system", MOVE * found.u, found.residual),
        ):
            if move > 0 and q > 0:
                adam = move * (1 + self.server_damping / (tau * q)) / getattr(self, f"server_{name}")
                steps[name] = adam if tau == 1 else min(adam, steps[name])
        return steps

    def init(self, fed: Federation) -> Any:
        moments = (fed.zeros(name) for name in ("u", "m_x", "m_y", "m_u", "s_x", "s_y", "s_u"))
        return self.State(*fed.initial(), fed.start("z_x"), fed.start("z_y"), *moments)

    def round(self, fed: Federation, state: Any) -> Any:
        old = state._asdict()
        own = {
            name: value for name, value in old.items() if name not in ITERATES.values() and isinstance(value, Kept)
        }  # the server's are not sent
        alike = not own and self.num_local_steps == 1  # all clients at one point: engines may take one derivative
        phase = self.one_step if alike else self.adaptive_steps
        new = vars(fed.mean(phase, z_x=state.z_x, z_y=state.z_y, u=state.u, **own))
        if "q_u" in new:
            old["u"] = project(state.u, self.radius)
        for name, gamma in zip("xyu", self.gammas(), strict=True):
            if f"q_{name}" in new:
                new.update(self.adam(name, old[ITERATES[name]], gamma, new[f"q_{name}"], old, fed.iteration))
        return self.State(**{name: new[name] for name in self.State._fields})

    def adam(
        self, name: str, z: Tensor, gamma: float, q: Tensor, old: Mapping[str, Tensor], t: int
    ) -> dict[str, Tensor]:
        """Return one variable, its moments and its running average after a step of Adam."""
        m = self.server_momentum * old[f"m_{name}"] + (1 - self.server_momentum) * q
        s = self.server_decay * old[f"s_{name}"] + (1 - self.server_decay) * q**2
        z = z - gamma * m / (s.sqrt() + self.server_damping)
        new = {ITERATES[name]: z, f"m_{name}": m, f"s_{name}": s}
        if name != "u":
            k = smaller(self.server_averaging, 1 - 1 / t)
            new[name] = k * old[name] + (1 - k) * z
        return new

    @linear_phase
    def one_step(self, clients: Clients, z_x: Tensor, z_y: Tensor, u: Tensor) -> dict[str, Tensor]:
        """Return the directions of a single local step, which are linear in the derivatives."""
        _, q = self.sums(clients, z_x, z_y, u)
        return dict(zip(("q_x", "q_y", "q_u"), q, strict=True))

    @phase
    def adaptive_steps(self, clients: Clients, z_x: Tensor, z_y: Tensor, u: Tensor, **own: Tensor) -> dict[str, Tensor]:
        """Return the sum of directions of each variable that is sent to the server.

        For a variable that stays at the client, take the step of Adam there instead.
        """
        start, q = self.sums(clients, z_x, z_y, u)
        result: dict[str, Tensor] = {}
        for name, z, gamma, total in zip("xyu", start, self.gammas(), q, strict=True):
            result.update(
                self.adam(name, z, gamma, total, own, clients.iteration) if f"m_{name}" in own else {f"q_{name}": total}
            )
        return result
