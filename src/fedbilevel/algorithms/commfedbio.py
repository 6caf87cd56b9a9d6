"""CommFedBiO: clients compress the vectors that they send to solve the linear system.

Use it when the uplink is slow and d_y is large: while the linear system is solved, a client sends k
entries (`top_k`) or r^2 + r numbers (`sketch`) instead of d_y floats. It works for a global lower
level. It costs E + R + 1 rounds per outer iteration (sketch: E + 2).

From x, y and u, with D_i = H_i u - f_y,i at (x, y):

    E times       local SGD on y, then mean                                             1 round each
    `top_k`       R times: v_i = D_i + e_i;  c_i: the k entries of v_i largest in size
                  e_i <- v_i - c_i;  u <- u - tau mean c_i                              1 round each
    `sketch`      S: r random orthonormal rows.  M = mean S H_i S',  b = mean S D_i
                  u <- u - S' M^-1 b                                                    1 round
    then          x <- x - eta mean (f_x,i - J_i u)                                     1 round

e_i is the part that client i has not sent yet (error feedback). All sides draw S from one number of
the server, so S itself is never sent.

Reference: Li, Pei, Huang, "Communication-Efficient Robust Federated Learning with Noisy Labels",
KDD 2022. The updates are written from memory of the literature, not from the paper's text: no
faithful reproduction is claimed.

Deviations: (1) u and e_i persist from one outer iteration to the next (e_i in the client's memory,
zero when a client first takes part). (2) The sketch is the same on both sides (M stays positive
definite) and corrects the last u instead of solving from zero, so that u becomes exact over the
outer iterations also for r < d_y. From u = 0 it is the plain sketched solution. (3) With a private
x, x_i stays at its client and the factor 1/m is dropped. (4) `error_feedback=False` and
`compression="none"` exist for comparison.

Bias: `top_k` at a constant step leaves u at a distance proportional to tau, because clients
disagree at the solution. Without error feedback the distance does not vanish with tau. More than
one local step on y adds a drift proportional to `lr_lower`.

Cost per outer iteration: E + R + 1 rounds (sketch: E + 2). Floats up: E d_y + R k + d_x, plus four
bytes for the position of each of the k entries (none: R d_y instead of R k; sketch: r^2 + r instead
of R k). Floats down: (E + R) d_y + d_x (sketch: (E + 1) d_y + d_x). Per client: g_y: E times
`num_local_steps`, f_x: 1, J v: 1, f_y: R, H v: R (sketch: f_y: 1, H v: r + 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms import fbo_aggitd, fedmbo
from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, Sparse, Variable, linear_phase, phase
from fedbilevel.federation.clients import Clients
from fedbilevel.settings import StepSize, setting, step_size


def top_k(rows: Tensor, k: int) -> Tensor:
    """Set all but the k largest entries of each row, by absolute value, to zero."""
    places = rows.abs().topk(k, dim=1).indices
    return torch.zeros_like(rows).scatter(1, places, rows.gather(1, places))


def orthonormal_rows(seed: int, num: int, like: Tensor) -> Tensor:
    """Return `num` rows of a random rotation, or all d rows if num exceeds d.

    The rows depend on the seed only, so that all parties generate the same rows.
    """
    width = like.shape[-1]
    normal = torch.randn(width, min(num, width), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(normal).Q.T.to(like)


@dataclass(frozen=True, kw_only=True)
class CommFedBiO(ServerAlgorithm):
    lr_upper: StepSize = step_size(0.01, "step of x", symbol="eta")
    lr_lower: StepSize = step_size(0.1, "step of y, divided among the local steps", symbol="gamma")
    lr_system: StepSize = step_size(0.1, "step of u", symbol="tau")
    num_lower_rounds: int = setting(1, "rounds of local SGD on y", symbol="E", least=0)
    num_local_steps: int | tuple[int, ...] = setting(5, "local steps on y", least=1)
    num_system_rounds: int = setting(5, "rounds on u, for top_k and none", symbol="R", least=0)
    compression: Literal["top_k", "sketch", "none"] = setting(
        "top_k", "largest entries of the direction of u, a sketched Hessian, or nothing"
    )
    num_kept: int = setting(100, "entries kept by top_k; all if u is shorter", symbol="k", least=1)
    error_feedback: bool = setting(True, "top_k: clients remember what they left out and add it the next time")
    num_sketch: int = setting(20, "rows of the sketch; at most the length of u", symbol="r", least=1)

    upper_space = ("x",)
    lower_space = ("y", "u", "p")
    refuses = {
        "local": "each client then solves its own linear system, nothing of it travels and there is nothing "
        "to compress; fedbio solves such problems"
    }

    class State(NamedTuple):
        x: Variable
        y: Tensor  # a local lower level is refused, so that y and u are at the server
        u: Tensor

    auto_steps = fbo_aggitd.nested_steps

    def init(self, fed: Federation) -> State:
        return self.State(*fed.initial(), fed.zeros("u"))

    def round(self, fed: Federation, state: State) -> State:
        x, y, u = state
        seed = fed.draw("sketch", 2**31) if self.compression == "sketch" else 0
        for _ in range(self.num_lower_rounds):
            fed.resample()
            y = fed.mean(self.lower_steps, x=x, y=y, q=None).y
        if self.compression == "sketch":
            fed.resample()
            found = fed.mean(self.sketched_system, x=x, y=y, u=u, seed=seed)
            S = orthonormal_rows(seed, self.num_sketch, like=u)
            u = u - torch.linalg.solve(found.M.view(len(S), len(S)), found.b) @ S
        else:
            for _ in range(self.num_system_rounds):
                fed.resample()
                u = u - self.lr_system * fed.mean(self.system_direction, x=x, y=y, u=u).c
        fed.resample()
        return self.State(fed.mean(self.upper_step, x=x, y=y, p=u).x, y, u)

    lower_steps = fbo_aggitd.lower_steps

    @phase
    def system_direction(self, clients: Clients, x: Tensor, y: Tensor, u: Tensor) -> dict[str, Tensor | Sparse]:
        v = clients.hessian_product(x, y, u, clients.batch("train", "u")) - clients.upper_grad_y(
            x, y, clients.batch("val", "u")
        )
        if self.compression == "none":
            return {"c": v}
        if self.error_feedback:
            v = v + clients.memory.read("e", default=torch.zeros_like(v))
        k = min(self.num_kept, v.shape[1])
        c = top_k(v, k)
        if self.error_feedback:
            clients.memory.write(e=v - c)
        return {"c": Sparse(c, k)}

    @linear_phase
    def sketched_system(self, clients: Clients, x: Tensor, y: Tensor, u: Tensor, seed: int) -> dict[str, Tensor]:
        S = orthonormal_rows(seed, self.num_sketch, like=u)
        batch = clients.batch("train", "u")
        D = clients.hessian_product(x, y, u, batch) - clients.upper_grad_y(x, y, clients.batch("val", "u"))
        M = torch.stack([clients.hessian_product(x, y, row, batch) @ S.T for row in S], dim=1)
        return {"M": M.flatten(1), "b": D @ S.T}

    upper_step = fedmbo.upper_step
