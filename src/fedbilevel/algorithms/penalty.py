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
floats and 4 of every gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

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
class Penalty(ServerAlgorithm):
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

    uses_products = False
    upper_space = ("x",)
    lower_space = ("y", "d", "e_plus", "e_minus")

    class State(NamedTuple):
        """x, the y of the run, and offsets of the y_j; e_plus and e_minus (j = 2, -2) are for p = 4."""

        x: Variable
        y: Variable
        d: Variable
        e_plus: Variable | None = None
        e_minus: Variable | None = None

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
        return self.State(*fed.initial(), *(fed.zeros(name) for name in self._offsets()))

    def round(self, fed: Federation, state: State) -> State:
        new = fed.mean(self.local_steps, **state._asdict(), lam=self.weight(fed.iteration - 1))
        return self.State(new.x, new.y, *(getattr(new, name) for name in self._offsets()))

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
    ) -> dict[str, Tensor]:
        x, *ys = clients.rows(x, *self.points(y, [one for one in (d, e_plus, e_minus) if one is not None]))
        for step in clients.steps(self.num_local_steps):
            lower, cross, upper = step.batch("train", "B_g"), step.batch("train", "B_x"), step.batch("val", "B_f")
            direct: Tensor | float = 0.0
            through: Tensor | float = 0.0
            new = []
            for (j, c), y in zip(DIFFERENCES[self.order].items(), ys, strict=True):
                through = through + c * clients.lower_grad_x(x, y, cross)
                dy = clients.lower_grad(x, y, lower)
                if j != 0:
                    fx, fy = clients.upper_grads(x, y, upper)
                    direct, dy = direct + c * j * fx, (j * fy + lam * dy) / (abs(j) + lam)
                new.append(y - self.lr_lower * dy)
            x, *ys = step.where((x - self.lr_upper * (direct + lam * through), *new), (x, *ys))
        y, *offsets = self.offsets(ys)
        return {"x": x, "y": y, **dict(zip(self._offsets(), offsets, strict=True))}

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
