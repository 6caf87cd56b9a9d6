"""First-order penalty method: differences of gradients replace second derivatives.

Use it when second derivatives are unavailable or expensive, as for large networks. It works for all
scopes and for clients that differ, and its error is of the order of 1/lam^p for differences of
order p (`order`, 1, 2 or 4). By default (p = 2) it costs one round of d_x + 2 d_y floats per outer
iteration and eight gradients per local step.

With y_j(x) = argmin_y g + (j / lam) f, the gradient of g(x, y_j) + (j / lam) f(x, y_j) by x has the
hypergradient as its derivative by j / lam at j = 0. A difference over a few j is

    h = sum_j c_j (j f_x(x, y_j) + lam g_x(x, y_j))

    p = 1   j = 1, 0           c = 1, -1                      forward, F2SA
    p = 2   j = 1, -1          c = 1/2, -1/2                  central, F2SA-2
    p = 4   j = 1, -1, 2, -2   c = 2/3, -2/3, -1/12, 1/12     central, F2SA-4

Every client takes I local steps at its own points (simultaneous update), then one round: means of
x and of every y_j.

    y_j,i <- y_j,i - gamma / (|j| + lam) * (j f_y,i(x_i, y_j,i) + lam g_y,i(x_i, y_j,i))
    x_i   <- x_i - eta * h_i

In outer iteration t = 0, 1, ... the weight is lam = min(lam_max, lam_0 r^t + b t) with
`penalty_growth` r and `penalty_increment` b; by default it is constant.

Central differences need g - (j / lam) f to have a minimum: |j| / lam < mu_g / L_f for a lower loss
with curvature of at least mu_g and an upper loss with curvature of at most L_f. Otherwise y_-1
moves away without end: raise `penalty`, or use `order=1`, which needs no such condition for a
convex f.

The y of a run (`answer="lower"`) fits g alone: it is y_0 for p = 1, and otherwise the mean of y_1
and y_-1, which differs from y_0 by O(1/lam^2). `answer="penalised"` returns y_1, which has trained
on the samples of the upper level, too, so that figures on these samples say little.

With `lower_optimiser="adam"` every step of the y_j is a step of Adam of length gamma, and with
"server_adam" the server takes one such step of length `server_lr` per round: networks with
attention need it. Adam's second moment is that of the y of the run and serves all y_j, so that their
differences stay of the order of 1/lam (`_adaptive` has the equations).

Reference: Kwon, Kwon, Wright, Nowak, "A Fully First-Order Method for Stochastic Bilevel
Optimization", ICML 2023 (F2SA), in the federated single-loop form of its followers (MemFBO,
FedBOB); differences of order p are those of F2SA-p (arXiv 2509.02937, ICLR 2026). The update is
written from memory of the literature and does not claim a faithful reproduction of any of them.

Deviations: (1) The step of y_j is normalised by |j| + lam, so that one gamma serves every lam.
(2) Derivatives of g at all y_j share their samples, and so do derivatives of f: differences are of
the order of 1/lam and are multiplied by lam. (3) y is sent with the offsets of the y_j, so that a
client which joins late and finds offsets of zero starts all y_j at y. (4) With a private x the step
is without the factor 1/m of the stacked problem and x stays; with a local lower level all y_j stay
at their client.

Bias: a constant lam converges to a point at a distance O(1/lam^p) from the solution. With I > 1 and
constant steps the clients drift.

Cost per outer iteration: 1 round; d_x + 2 d_y floats each way; per client and step 2 of g_y, 2 of
g_x, 2 of f_x and f_y, no H v, no J v. `order=1` needs 1 of f_x and f_y; `order=4` needs d_x + 4 d_y
floats and 4 of every gradient. "adam" sends d_y more floats each way for every point of y and once
more, and the number of its steps down; "server_adam" sends nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fedbilevel.algorithms._adaptive import Adaptive, LowerOptimiser, Moments
from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, Variable, phase
from fedbilevel.federation.clients import Clients, smaller
from fedbilevel.settings import StepSize, setting, step_size

DIFFERENCES = {  # by order, the coefficient c_j of every j; the first is j = 1
    1: {1: 1.0, 0: -1.0},
    2: {1: 1 / 2, -1: -1 / 2},
    4: {1: 2 / 3, -1: -2 / 3, 2: -1 / 12, -2: 1 / 12},
}


@dataclass(frozen=True, kw_only=True)
class Penalty(Adaptive, ServerAlgorithm):
    lr_upper: StepSize = step_size(0.01, "step of x", symbol="eta")
    lr_lower: StepSize = step_size(0.1, "step of y_j on (j f + lam g) / (|j| + lam)", symbol="gamma")
    num_local_steps: int | tuple[int, ...] = setting(5, "local steps between rounds", symbol="I", least=1)
    order: Literal[1, 2, 4] = setting(2, "order of the differences: forward (1) or central (2, 4)", symbol="p")
    answer: Literal["lower", "penalised"] = setting(
        "lower", "y of the run: the minimum of the lower loss alone, or of g + f / lam"
    )
    penalty: float = setting(
        10.0, "weight of the lower level at the start; the bias is of the order of 1 / lam^p", symbol="lam_0", above=0
    )
    penalty_growth: float = setting(
        1.0, "factor of the weight per outer iteration; above 1 it needs max_penalty", least=1
    )
    penalty_increment: float = setting(0.0, "what is added to the weight per outer iteration", least=0)
    max_penalty: float | None = setting(None, "the weight grows no further", symbol="lam_max", above=0)
    lower_optimiser: LowerOptimiser = setting(
        "sgd", "steps of all y_j: plain, of Adam at the clients (lr_lower is its step), or of Adam at the server"
    )
    server_lr: float = setting(0.01, "step of server_adam", above=0)
    adam_beta1: float = setting(
        0.9, "how much of Adam's momentum stays in a step", symbol="beta_1", least=0, most=0.9999
    )
    adam_beta2: float = setting(
        0.999, "how much of Adam's second moment stays in a step", symbol="beta_2", least=0, most=0.9999
    )
    adam_eps: float = setting(1e-8, "added to the root of Adam's second moment", symbol="eps", above=0)

    uses_products = False
    decays = ("lr_upper", "lr_lower", "server_lr")
    upper_space = ("x",)
    lower_space = ("y", "d", "e_plus", "e_minus", "m_y", "m_d", "m_e_plus", "m_e_minus", "s_y", "t_y")
    lengths = {"t_y": 1}

    class State(NamedTuple):
        """x, the y of the run, and offsets of the y_j; e_plus and e_minus (j = 2, -2) are for p = 4.

        The moments of Adam are those of `_adaptive`.
        """

        x: Variable
        y: Variable
        d: Variable
        e_plus: Variable | None = None
        e_minus: Variable | None = None
        m_y: Variable | None = None
        m_d: Variable | None = None
        m_e_plus: Variable | None = None
        m_e_minus: Variable | None = None
        s_y: Variable | None = None
        t_y: Variable | None = None

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

    def weight(self, t: Any) -> Any:
        """Return lam in outer iteration t, counted from 0."""
        grown: Any = self.penalty
        if self.penalty_growth != 1:
            exponent = smaller(600.0, t * math.log(self.penalty_growth))
            grown *= exponent.exp() if isinstance(exponent, Tensor) else math.exp(exponent)
        if self.penalty_increment:
            grown = grown + self.penalty_increment * t
        return grown if self.max_penalty is None else smaller(self.max_penalty, grown)

    def init(self, fed: Federation) -> State:
        x, y = fed.initial()
        return self.State(x, y, **{name: fed.zeros(name) for name in self._offsets()}, **self.no_moments(fed))

    def round(self, fed: Federation, state: State) -> State:
        given = {name: getattr(state, name) for name in ("x", "y", "d", "e_plus", "e_minus")}
        lam = self.weight(fed.iteration - 1)
        new = vars(fed.mean(self.local_steps, **given, lam=lam, **self.sent_moments(state)))
        return self.State(new["x"], **self.new_lower(state, new))

    @phase
    def local_steps(
        self,
        clients: Clients,
        x: Tensor,
        y: Tensor,
        d: Tensor,
        e_plus: Tensor | None,
        e_minus: Tensor | None,
        lam: float,
        m_y: Tensor | None = None,
        m_d: Tensor | None = None,
        m_e_plus: Tensor | None = None,
        m_e_minus: Tensor | None = None,
        s_y: Tensor | None = None,
        t_y: Tensor | None = None,
    ) -> dict[str, Tensor | None]:
        offsets = [one for one in (d, e_plus, e_minus) if one is not None]
        x, *ys = clients.rows(x, *self.points(y, offsets))
        adam = self.client_moments(clients, m_y=m_y, m_d=m_d, m_e_plus=m_e_plus, m_e_minus=m_e_minus, s_y=s_y, t_y=t_y)
        for step in clients.steps(self.num_local_steps):
            lower, cross, upper = step.batch("train", "B_g"), step.batch("train", "B_x"), step.batch("val", "B_f")
            direct: Tensor | float = 0.0
            through: Tensor | float = 0.0
            directions = []
            for (j, c), y_j in zip(DIFFERENCES[self.order].items(), ys, strict=True):
                through = through + c * clients.lower_grad_x(x, y_j, cross)
                dy = clients.lower_grad(x, y_j, lower)
                if j != 0:
                    fx, fy = clients.upper_grads(x, y_j, upper)
                    direct, dy = direct + c * j * fx, (j * fy + lam * dy) / (abs(j) + lam)
                directions.append(dy)
            new, moved = self.lower_step(ys, directions, adam)
            adam = adam and Moments(*step.where(moved, adam))
            x, *ys = step.where((x - self.lr_upper * (direct + lam * through), *new), (x, *ys))
        z = self.offsets(ys)
        if adam is not None and self.lower_optimiser == "server_adam":
            z, adam = self.server_step(clients.rows(y, *offsets), z, adam)
        return {"x": x, **dict(zip(self.lower_points(), z, strict=True)), **self.answered(clients, adam)}

    def lower_step(
        self, ys: Sequence[Tensor], directions: Sequence[Tensor], adam: Moments | None
    ) -> tuple[Sequence[Tensor], Moments | None]:
        """Return all y_j after a step. Adam works on y and the offsets, which are linear in the y_j."""
        if adam is None or self.lower_optimiser == "server_adam":
            return [y - self.lr_lower * dy for y, dy in zip(ys, directions, strict=True)], adam
        (y, *offsets), adam = self.adam(self.offsets(ys), self.offsets(directions), adam, self.lr_lower)
        return self.points(y, offsets), adam

    def lower_points(self) -> tuple[str, ...]:
        return "y", *self._offsets()

    def _offsets(self) -> tuple[str, ...]:
        return ("d", "e_plus", "e_minus")[: len(DIFFERENCES[self.order]) - 1]

    def points(self, y: Tensor, offsets: Sequence[Tensor]) -> list[Tensor]:
        """Return the y_j from the y of the run and the offsets."""
        d, *rest = offsets
        if self.answer == "penalised":
            return [y, y + d, *(y + e for e in rest)]
        return [y + d, y if self.order == 1 else y - d, *(y + e for e in rest)]

    def offsets(self, points: Sequence[Tensor]) -> list[Tensor]:
        """Return the y of the run and the offsets from the y_j."""
        first, second, *rest = points
        if self.answer == "penalised":
            y, d = first, second - first
        elif self.order == 1:
            y, d = second, first - second
        else:
            y, d = (first + second) / 2, (first - second) / 2
        return [y, d, *(e - y for e in rest)]
