"""Hyper-Gradient Push: the hypergradient between peers without a server, from averages of vectors.

Use it when there is no server and the network is directed, changes or loses messages, or when you
want the influence of every training sample. It works for all scopes. It costs T pushes and M
averages of S steps per outer iteration, each with d_y + 1 floats per out-edge.

At (nearly) equal y_i every peer starts with u_i = f_y,i and v_i = f_x,i and repeats M times

    ubar_i = average of all u_k (the engine's operator: S steps of Push-Sum, gossip, ...)
    v_i <- v_i - eta * J_i ubar_i;          u_i <- ubar_i - eta * H_i ubar_i

Then v_i tends to f_x,i - J_i (mean H)^-1 mean f_y. With a private x_i this is the block of peer i
of the gradient of sum_k f_k. With a shared x the average of the v_i, one more averaging, is the
hypergradient of the server form. Each outer iteration takes lower steps by gradient push, computes
the estimate, and then takes a step of x_i (plain or Adam).

Reference: Terashita, Hara, "Decentralized Hyper-Gradient Computation over Time-Varying Directed
Networks", 2022/2023, Algorithms 1 and 2.

Deviations: (1) The condition 0 < alpha < 1/eta of Theorem 1 is not enough: eta * L must not exceed
1 for the L of every client. It is measured by power iteration in the first outer iteration
(`num_curvature_products`; 0 skips this), and a larger eta raises an error. (2) The product
H_i ubar_i of the last repetition is not used and not computed. (3) `minibatches="shared"` is the
paper's practical variant, one sample for both products; Algorithm 2 draws two.
(4) `weights="kept"` of the averaging carries Push-Sum weights from one average to the next; the
rows start at u_i, not at w_i u_i. (5) Clients count by the problem's weights.
(6) `lower_solver="mix"` averages y after every lower step by the same operator as u, which also
works where messages are lost. (7) With a local lower level there is no average, and every peer
solves its own system. (8) A shared x is averaged together with v: the peers' averages of v differ
slightly, and without this their x would drift apart.

Bias: the error is about tau^S + (1 - eta mu)^M times constants, where tau < 1 depends on the
network. Push-Sum without division by the weights is wrong for every S.

Cost per outer iteration: T pushes of d_y + 1 floats per out-edge for y, and M averagings of S steps
of d_y + 1 floats per out-edge (a shared x: one more, of 2 d_x + 1). Per client: T of g_y, 1 of f_x
and f_y, M of J u, M - 1 of H u (`num_curvature_products` more in the first).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms.sgp import Schedule, gradient_push
from fedbilevel.errors import UnstableStepError
from fedbilevel.federation.algorithm import PeerAlgorithm, Peers, debiased
from fedbilevel.federation.clients import is_first
from fedbilevel.federation.probing import ADAPTIVE, Found
from fedbilevel.oracle.hypergradient import start_vector
from fedbilevel.settings import StepSize, setting, step_size


@dataclass(frozen=True, kw_only=True)
class HGP(PeerAlgorithm):
    lr_upper: StepSize = step_size(0.1, "step of x")
    lr_lower: StepSize = step_size(0.1, "step of y")
    lr_system: StepSize = step_size(0.1, "step of u, at most 1/L", symbol="eta")
    num_terms: int = setting(10, "averages of u", symbol="M", least=1)
    num_lower_steps: int = setting(10, "steps of y per outer iteration", symbol="T", least=1)
    lower_schedule: Schedule = setting(
        "constant", "of the lower steps within an outer iteration: milestones falls tenfold at 5/6 and at 11/12"
    )
    lower_solver: Literal["push", "mix"] = setting(
        "push", "stochastic gradient push, or a whole average after every lower step"
    )
    warm_start: bool = setting(True, "lower steps go on from the last y instead of from the start")
    minibatches: Literal["independent", "shared"] = setting(
        "independent", "two minibatches for J u and H u as in Algorithm 2, or one"
    )
    optimiser: Literal["sgd", "adam", "none"] = setting(
        "sgd",
        "of x; adam: with 0.9, 0.999 and per-entry steps of about lr_upper; none: x stays, and h is what is asked for",
    )
    num_curvature_products: int = setting(
        20, "products H v to measure the stable range of lr_system with, once; 0: do not", least=0
    )

    decays = ("lr_upper", "lr_lower")  # eta is the step of a series, not of a descent
    upper_space = ("x", "v", "first", "second", "h")
    lower_space = ("y", "z", "u")

    class State(NamedTuple):
        x: Tensor
        z: Tensor
        w: Tensor
        first: Tensor  # Adam's moments
        second: Tensor
        h: Tensor  # the last estimate of the hypergradient

        @property
        def y(self) -> Tensor:
            return debiased(self.z, self.w)

    def auto_steps(self, found: Found) -> dict[str, float]:
        upper = ADAPTIVE * found.size if self.optimiser == "adam" else found.upper
        return {**super().auto_steps(found), "lr_upper": upper}

    def verbs(self) -> tuple[str, ...]:
        return ("mix", "push") if self.lower_solver == "push" else ("mix",)

    def init(self, peers: Peers) -> State:
        x, y = peers.initial()
        return self.State(
            x,
            y * peers.weights.to(y.dtype),
            peers.weights,
            torch.zeros_like(x),
            torch.zeros_like(x),
            torch.zeros_like(x),
        )

    def round(self, peers: Peers, state: State) -> State:
        z, w = (state.z, state.w) if self.warm_start else self.init(peers)[1:3]
        z, w = self.lower_steps(peers, state.x, z, w)
        v, _ = self.blocks(peers, state.x, debiased(z, w))
        h, x = peers.mix(v=v, x=state.x)
        if self.optimiser != "adam":
            return self.State(
                x if self.optimiser == "none" else x - self.lr_upper * h, z, w, state.first, state.second, h
            )
        first, second = 0.9 * state.first + 0.1 * h, 0.999 * state.second + 0.001 * h**2
        step = (first / (1 - 0.9**peers.iteration)) / ((second / (1 - 0.999**peers.iteration)).sqrt() + 1e-8)
        return self.State(x - self.lr_upper * step, z, w, first, second, h)

    def regrouped(self, peers: Peers, state: State) -> State:
        """Keep Adam's moments and the hypergradient, which belong to each peer alone."""
        return super().regrouped(peers, state)._replace(first=state.first, second=state.second, h=state.h)

    def lower_steps(self, peers: Peers, x: Tensor, z: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        if self.lower_solver == "push":
            return gradient_push(
                peers, x, z, w, lr=self.lr_lower, num_steps=self.num_lower_steps, schedule=self.lower_schedule
            )
        y = debiased(z, w)
        for step in peers.steps(self.num_lower_steps):
            y = peers.mix(y=y - self.lr_lower * peers.clients.lower_grad(x, y, step.batch("train", "B")))
        return y * w.to(y.dtype), w

    def estimate(self, peers: Peers, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return (v, u).

        For a private x, v is f_x,i - J_i u at every peer. For a shared x, v is the average of these
        blocks over all peers.
        """
        v, u = self.blocks(peers, x, y)
        return peers.mix(v=v), u

    def blocks(self, peers: Peers, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return (v, u) at every peer after the last repetition."""
        return deque(self.partial_sums(peers, x, y), maxlen=1)[0]

    def partial_sums(self, peers: Peers, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (v, ubar) at every peer after each repetition.

        Up to rounding, each pair equals the result of `blocks` with that number of terms.
        """
        eta, clients, names = (
            self.lr_system,
            peers.clients,
            ("B_g", "B_g") if self.minibatches == "shared" else ("B_j", "B_h"),
        )
        *inner, last = peers.steps(self.num_terms)
        if is_first(peers.iteration) and self.num_curvature_products:
            self.check_step(peers, x, y)
        v, u = clients.upper_grads(x, y, (inner[0] if inner else last).batch("val", "B_f"))
        for step in inner:
            ubar = peers.mix(u=u)
            b_j, b_h = (step.batch("train", name) for name in names)
            if b_j is b_h:
                ju, hu = clients.second_order(x, y, ubar, b_j)
            else:
                ju, hu = clients.jacobian_product(x, y, ubar, b_j), clients.hessian_product(x, y, ubar, b_h)
            v, u = v - eta * ju, ubar - eta * hu
            yield v, ubar
        u = peers.mix(u=u)
        yield v - eta * clients.jacobian_product(x, y, u, last.batch("train", names[0])), u

    def check_step(self, peers: Peers, x: Tensor, y: Tensor) -> None:
        """Raise if lr_system is too large for the largest eigenvalue of any peer's own Hessian.

        Every peer measures its eigenvalue alone; no message is sent.
        """
        clients, batch = peers.clients, peers.steps(1)[0].batch("train", "curvature").whole()
        v = start_vector(y).expand_as(y)
        for _ in range(self.num_curvature_products):
            v = clients.hessian_product(
                x, y, v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny), batch
            )
        largest = torch.linalg.vector_norm(v, dim=1)
        if self.lr_system * float(largest.max()) > 1.001:  # so that the value printed below passes
            worst = int(largest.argmax())
            raise UnstableStepError(
                f"lr_system = {self.lr_system:g} is above the stable range: client {int(clients.ids[worst])} "
                f"has curvature {float(largest[worst]):.4g}, so the "
                f"largest allowed value is {1 / float(largest[worst]):.4g} (num_curvature_products=0 turns "
                "this check off)."
            )
