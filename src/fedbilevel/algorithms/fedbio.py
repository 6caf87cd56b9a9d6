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

With `lower_optimiser="adam"` every step of y is a step of Adam of length gamma, and with
"server_adam" the server takes one such step of length `server_lr` per round (`_adaptive` has the
equations). u takes plain steps.

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
f_y, H u, J u. "adam" sends 2 d_y more floats each way and the number of its steps down;
"server_adam" sends nothing more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from torch import Tensor

from fedbilevel.algorithms._adaptive import Adaptive, LowerOptimiser, Moments
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
class FedBiO(Adaptive, ServerAlgorithm):
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
    lower_optimiser: LowerOptimiser = setting(
        "sgd", "steps of y: plain, of Adam at the clients (lr_lower is its step), or of Adam at the server"
    )
    server_lr: float = setting(0.01, "step of server_adam", above=0)
    adam_beta1: float = setting(
        0.9, "how much of Adam's momentum stays in a step", symbol="beta_1", least=0, most=0.9999
    )
    adam_beta2: float = setting(
        0.999, "how much of Adam's second moment stays in a step", symbol="beta_2", least=0, most=0.9999
    )
    adam_eps: float = setting(1e-8, "added to the root of Adam's second moment", symbol="eps", above=0)

    decays = ("lr_upper", "lr_lower", "lr_system", "server_lr")
    upper_space = ("x",)
    lower_space = ("y", "u", "m_y", "s_y", "t_y")
    lengths = {"t_y": 1}

    class State(NamedTuple):
        """x, y and u; the moments of Adam are those of `_adaptive`."""

        x: Variable
        y: Variable
        u: Variable
        m_y: Variable | None = None
        s_y: Variable | None = None
        t_y: Variable | None = None

    def init(self, fed: Federation) -> State:
        return self.State(*fed.initial(), fed.zeros("u"), **self.no_moments(fed))

    def round(self, fed: Federation, state: State) -> State:
        given = self.sent_moments(state)
        new = vars(fed.mean(self.local_steps, x=state.x, y=state.y, u=state.u, **given))
        return self.State(x=new["x"], u=new["u"], **self.new_lower(state, new))

    @phase
    def local_steps(
        self,
        clients: Clients,
        x: Tensor,
        y: Tensor,
        u: Tensor,
        m_y: Tensor | None = None,
        s_y: Tensor | None = None,
        t_y: Tensor | None = None,
    ) -> dict[str, Tensor | None]:
        x, y, u = clients.rows(x, y, u)
        start, adam = y, self.client_moments(clients, m_y=m_y, s_y=s_y, t_y=t_y)
        for step in clients.steps(self.num_local_steps):
            dx, dy, du = step_directions(clients, step, x, y, u, self.minibatches)
            if adam is None or self.lower_optimiser == "server_adam":
                new = y - self.lr_lower * dy
            else:
                (new,), moved = self.adam([y], [dy], adam, self.lr_lower)
                adam = Moments(*step.where(moved, adam))
            x, y, u = step.where(
                (x - self.lr_upper * dx, new, project(u - self.lr_system * du, self.radius)), (x, y, u)
            )
        if adam is not None and self.lower_optimiser == "server_adam":
            (y,), adam = self.server_step([start], [y], adam)
        return {"x": x, "y": y, "u": u, **self.answered(clients, adam)}
