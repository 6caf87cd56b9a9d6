"""NewtonFBO: in every round a Newton step of y and u with measured curvature, and an Adam or polar step of x.

Use it when few clients take part in each round, their data differ a lot, rounds are expensive and
the lower level is a small layer, such as a linear head. It needs a shared x and a global lower
level. It costs one round of d_x + 2 d_y floats per outer iteration, and in iterations that measure
curvature c (c + 1) / 2 more floats up and c products H v per client, for a y of c columns. This
combination is this project's own.

Let y be a matrix with o rows and c columns: the outputs of a layer and its inputs. The block H_kl of
the Hessian H belongs to the rows k and l. With random signs s_k the cohort measures

    C = 1/o sum_kl s_k s_l H_kl,      one product H (s e_j') for each column j

whose expectation is the mean of the blocks H_kk. All clients evaluate at one point and send the
means of their derivatives; then the server takes, with a_t = 2 / (t + 1) and C averaged likewise,

    B   <- (1 - w) B + w C,                        w = max(1 - kappa_B, a_t)
    z_y <- z_y - max(eta_y, a_t) (B + d)^-1 g_y
    u   <- u   - max(eta_u, a_t) (B + d + e)^-1 (H u + e u - f_y)
    m   <- beta_1 m + (1 - beta_1) (f_x + rho g_x - J u)
    z_x <- z_x - eta_x min(1, t / T) D(m)
    x   <- (1 - w) x + w z_x,  y likewise,         w = max(1 - kappa, a_t)

The first step of y is a full Newton step, and a_t makes the next steps an average over the cohorts
seen so far: on a quadratic lower level y weighs all of them, and not the last one. So a cohort with
few classes does not spoil the head, and no step size of y has to be found. Steps of x start short,
because directions of x at a wrong y are wrong.

D is Adam, or `upper_direction = "polar"`: each matrix M = U S V' of m, with o rows and c columns, is
replaced by sqrt(max(o, c)) U V', so that all singular values are equal and the mean square of an
entry is 1. The idea, which was not measured by itself: gradients of a layer have few large singular
values; Adam keeps them, and the others learn slowly. Nothing more is sent, as the server has m.

With rho > 0, x also descends the lower loss: the training samples shape x too, not only the
validation samples. This is another problem, min f + rho g; see Bias.

Reference: own. Parts are due to others: curvature of a layer by one factor, Martens and Grosse,
"Optimizing Neural Networks with Kronecker-factored Approximate Curvature", ICML 2015; Adam, Kingma
and Ba, ICLR 2015; polar factors of momentum, Jordan et al., "Muon", 2024, there by an iteration and
here by singular values; u as an iterate, Dagreou et al., "A framework for bilevel optimization", NeurIPS
2022; averages with weights 2 / (t + 1), Lacoste-Julien, Schmidt, Bach, 2012.

Deviations: none, because no paper prints it. Neighbouring tensors of x or y with one first dimension, such as a
weight and its bias, are one matrix. A vector alone is a matrix of one row, and then B is its H.

Bias: with rho = 0 and e = 0 the limits are the points where the means of g_y, H u - f_y and f_x - J u
vanish, which is exact. rho > 0 minimises f + rho g at y*(x) instead of f; e > 0 solves (H + e) u =
f_y. d, B and D change the path only. Polar steps do not shrink with m, so x stays within about a
step of the limit unless a schedule decreases eta_x. A lower level that is not convex may make B + d
indefinite: increase d.

Cost per outer iteration: 1 round; d_x + 2 d_y floats each way; per client 1 of each of g_y, f_x, f_y,
H u, J u, and of g_x with `lower_share`. In the first p iterations and in every p-th, one more of H v
for every column of y, and up as many more floats as a symmetric matrix of that size has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms.fedbio import step_directions
from fedbilevel.errors import ProblemError
from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, linear_phase
from fedbilevel.federation.clients import Clients
from fedbilevel.federation.probing import ADAPTIVE, Found
from fedbilevel.settings import StepSize, setting, step_size

MOST_COLUMNS = 2000  # of a y whose curvature is measured column by column
_ALONE = "its curvature is a mean over clients that share y, and a client alone has no cohort to average over"
_PRIVATE = "its directions of x are means over clients that share x"


def matrices(start: Mapping[str, Tensor]) -> list[Tensor]:
    """Return (o, c) positions of entries in the flat x or y, for each of its matrices.

    Neighbours with one first dimension are columns of one matrix. Vectors alone are one row.
    """
    sizes = [leaf.numel() for leaf in start.values()]
    found = []
    for _, group in groupby(
        zip(start.values(), torch.arange(sum(sizes)).split(sizes), strict=True),
        key=lambda one: tuple(one[0].shape[:1]),
    ):
        leaves, where = zip(*group, strict=True)
        num_rows = leaves[0].shape[0] if any(leaf.ndim > 1 for leaf in leaves) else 1
        found.append(torch.cat([one.view(num_rows, -1) for one in where], dim=1))
    return found


def measurable(y0: Mapping[str, Tensor]) -> list[Tensor]:
    """Return `matrices` of a y that is small enough for its curvature to be measured."""
    found = matrices(y0)
    columns = sum(one.shape[1] for one in found)
    if columns > MOST_COLUMNS:
        raise ProblemError(
            f"y has {columns} columns, expected at most {MOST_COLUMNS} for newtonfbo, which measures curvature column "
            "by column: use adasimfbo."
        )
    return found


@dataclass(frozen=True, kw_only=True)
class NewtonFBO(ServerAlgorithm):
    move_upper: StepSize = step_size(0.0015, "about how far an entry of x moves in a round", symbol="eta_x")
    least_lower: float = setting(0.15, "least share of a Newton step of y", symbol="eta_y", least=0, most=1)
    least_system: float = setting(0.15, "least share of a Newton step of u", symbol="eta_u", least=0, most=1)
    damping: float = setting(0.003, "added to the measured curvature", symbol="d", above=0)
    system_damping: float = setting(0.0, "added to H in the system of u; 0: exact", symbol="e", least=0)
    lower_share: float = setting(
        0.0, "weight of the lower loss in the directions of x; 0: exact", symbol="rho", least=0
    )
    warm_up: int = setting(20, "iterations until the step of x has its full length", symbol="T", least=1)
    momentum: float = setting(
        0.9, "how much of the momentum of x stays in a round", symbol="beta_1", least=0, most=0.9999
    )
    upper_direction: Literal["adam", "polar"] = setting(
        "adam", "direction of x: Adam, or the polar factor of each matrix of the momentum", symbol="D"
    )
    decay: float = setting(
        0.99, "how much of the second moment stays in a round", symbol="beta_2", least=0, most=0.9999
    )
    eps: float = setting(1e-8, "added to the root of the second moment", symbol="eps", above=0)
    averaging: float = setting(
        0.97, "how much of the averages of x and y stays in a round; 0: the iterates are the answer",
        symbol="kappa", least=0, most=1,
    )  # fmt: skip
    curvature_averaging: float = setting(
        0.8, "how much of the curvature stays when it is measured", symbol="kappa_B", least=0, most=1
    )
    curvature_every: int = setting(
        1, "iterations from one measurement of curvature to the next, after as many with one each", symbol="p", least=1
    )

    decays = ("move_upper", "least_lower", "least_system")
    upper_space = ("x", "z_x", "m", "s")
    lower_space = ("y", "z_y", "u")
    refuses = {"local": _ALONE, "private": _PRIVATE}

    class State(NamedTuple):
        x: Tensor
        y: Tensor
        z_x: Tensor
        z_y: Tensor
        u: Tensor
        m: Tensor
        s: Tensor
        curvature: Tensor  # lower triangles of B, row by row, one matrix after another

    def auto_steps(self, found: Found) -> dict[str, float]:
        """Return a step by which every entry of x moves by a share of the usual size of x."""
        return {"move_upper": ADAPTIVE * found.size}

    def row_lengths(self, y0: Mapping[str, Tensor]) -> dict[str, int]:
        return {"curvature": sum(math.comb(one.shape[1] + 1, 2) for one in measurable(y0))}

    def init(self, fed: Federation) -> State:
        x, y = fed.initial()
        u, m, s = (fed.zeros(name) for name in ("u", "m", "s"))
        curvature = y.new_zeros(self.row_lengths(fed.problem.y0)["curvature"])
        return self.State(x, y, fed.start("z_x"), fed.start("z_y"), u, m, s, curvature)

    def round(self, fed: Federation, state: State) -> State:
        t = fed.iteration
        measures = t <= self.curvature_every or t % self.curvature_every == 0
        signs = fed.draw("signs", 2**31) if measures else None
        new = fed.mean(self.look, z_x=state.z_x, z_y=state.z_y, u=state.u, signs=signs)
        share = lambda least: max(least, 2 / (t + 1))
        average = lambda old, now, kept: old + share(1 - kept) * (now - old)
        curvature = average(state.curvature, new.curvature, self.curvature_averaging) if measures else state.curvature
        m = self.momentum * state.m + (1 - self.momentum) * new.h
        s = self.decay * state.s + (1 - self.decay) * new.h**2
        length, corrected = self.move_upper * min(1.0, t / self.warm_up), 1 - self.momentum**t
        if self.upper_direction == "adam":
            z_x = state.z_x - length * m / corrected / ((s / (1 - self.decay**t)).sqrt() + self.eps)
        else:
            z_x = state.z_x - length * polar(matrices(fed.problem.initial_x({})), m / corrected, self.eps)
        solve = lambda v, extra: solved(matrices(fed.problem.y0), curvature, v, self.damping + extra)
        e = self.system_damping
        z_y = state.z_y - share(self.least_lower) * solve(new.g_y, 0.0)
        u = state.u - share(self.least_system) * solve(new.g_u + e * state.u, e)
        x, y = average(state.x, z_x, self.averaging), average(state.y, z_y, self.averaging)
        return self.State(x, y, z_x, z_y, u, m, s, curvature)

    @linear_phase
    def look(
        self, clients: Clients, z_x: Tensor, z_y: Tensor, u: Tensor, signs: int | None
    ) -> dict[str, Tensor | None]:
        """Return the directions of x, y and u at one point and, with signs, the curvature there."""
        x, y, u = clients.rows(z_x, z_y, u)
        [step] = clients.steps(1)
        h, g_y, g_u = step_directions(clients, step, x, y, u, "shared")
        if self.lower_share:
            h = h + self.lower_share * clients.lower_grad_x(x, y, step.batch("train", "B_g"))
        found = None if signs is None else torch.cat(list(self.measured(clients, x, y, signs)), dim=1)
        return {"h": h, "g_y": g_y, "g_u": g_u, "curvature": found}

    def measured(self, clients: Clients, x: Tensor, y: Tensor, signs: int) -> Iterator[Tensor]:
        """Return the lower triangle of C of each matrix of y, row by row."""
        batch, draw = clients.batch("train", "curvature"), torch.Generator().manual_seed(signs)
        for places in matrices(clients.host.problem.y0):
            rows, size = places.shape
            s = (2 * torch.randint(2, (rows,), generator=draw) - 1).to(y)
            columns = []
            for j in range(size):
                v = y.new_zeros(y.shape[1])
                v[places[:, j]] = s
                product = clients.hessian_product(x, y, clients.rows(v), batch)
                columns.append(torch.einsum("o,koc->kc", s / rows, product[:, places[:, : j + 1]]))
            yield torch.cat(columns, dim=1)


def solved(places: Sequence[Tensor], curvature: Tensor, v: Tensor, damping: float) -> Tensor:
    """Return (B + damping)^-1 v."""
    out, start = torch.empty_like(v), 0
    for one in places:
        size = one.shape[1]
        row, column = torch.tril_indices(size, size)
        dense = curvature.new_zeros(size, size)
        dense[row, column] = dense[column, row] = curvature[start : start + len(row)]
        start += len(row)
        dense.diagonal().add_(damping)
        out[one] = torch.linalg.solve(dense, v[one].T).T
    return out


def polar(places: Sequence[Tensor], v: Tensor, eps: float) -> Tensor:
    """Return sqrt(max(o, c)) U S (S^2 + eps^2)^-1/2 V' of every matrix U S V' of v."""
    out = torch.empty_like(v)
    for one in places:
        left, values, right = torch.linalg.svd(v[one], full_matrices=False)
        out[one] = math.sqrt(max(one.shape)) * (left * (values / torch.hypot(values, values.new_tensor(eps)))) @ right
    return out
