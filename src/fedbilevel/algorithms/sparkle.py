"""SPARKLE: one loop over x, y and u between peers, with a correction for heterogeneous clients.

Use it when there is no server and the network is undirected (with `exchange="push"` also directed).
It works for all scopes and, with a correction, converges to the exact solution. It costs one
exchange with the neighbours per outer iteration.

Every peer computes the directions d = (f_x,i - J_i u_i, g_y,i, H_i u_i - f_y,i) at its own
(x_i, y_i, u_i). With W one exchange, and for each sequence s in {x, y, u} with its step a > 0:

    `none`                s <- W (s - a d)                                           (D-SOBA)
    `gradient_tracking`   t <- W t_before + d - d_before;   s <- W (s - a t)
    `exact_diffusion`     p <- s - a d;   s <- (I + W)/2 (p + s - p_before)
    `extra`               s <- s + W s - (I + W_before)/2 s_before - (a d - a_before d_before)

The first iterations have t = d, p_before = s and s <- W s - a d.

`exchange="gossip"` uses the doubly stochastic W of an undirected network. `exchange="push"` is for
directed networks: s and t are pushed with the weights w, and directions are taken at s / w
(gradient tracking as in Push-DIGing; this project's own for bilevel problems).

Reference: Zhu, Kong, Lu, Li, Lu, Fang, Yuan, "SPARKLE: A Unified Single-Loop Primal-Dual Framework
for Decentralized Bilevel Optimization", NeurIPS 2024; Kong, Zhu, Lu, Huang, Yuan, "Decentralized
Bilevel Optimization over Graphs: Loopless Algorithmic Update and Transient Iteration Complexity",
2024 (D-SOBA); Nedic, Olshevsky, Shi, "Achieving geometric convergence for distributed optimization
over time-varying graphs", SIAM J. Optim. 2017 (Push-DIGing).

Deviations: written from the abstracts and the known recursions, not from the authors' code. (1) No
moving average of the hypergradient. (2) Gradient tracking exchanges s and t in one message (t one
step behind), so that an iteration is one round. (3) Clients count by the problem's weights. (4) A
private x is not exchanged and takes plain gradient steps. (5) `exact_diffusion` and `extra` need
gossip.

Bias: without a correction and with constant steps the peers converge to points at a distance
proportional to the step; with a correction they reach the solution.

Cost per outer iteration: 1 round; per out-edge d_x + 2 d_y floats, twice as many for sequences with
gradient tracking, one more with push; per client 1 of each of g_y, f_x, f_y, H u, J u.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms.fedbio import step_directions
from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import PeerAlgorithm, Peers, debiased
from fedbilevel.federation.probing import Found
from fedbilevel.oracle.hypergradient import project
from fedbilevel.settings import StepSize, setting, step_size

Correction = Literal["none", "gradient_tracking", "exact_diffusion", "extra"]

# A recursion takes (s, d, a) and its memory (p, q). It returns a message, and the new (s, p, q) as a function of W
# times the message.
Recursion = tuple[tuple[Tensor, ...], Callable[..., tuple[Tensor, Tensor, Tensor]]]


def none(s: Tensor, d: Tensor, a: float, p: Tensor, q: Tensor) -> Recursion:
    return (s - a * d,), lambda mixed: (mixed, p, q)


def gradient_tracking(s: Tensor, d: Tensor, a: float, d_before: Tensor, mixed_t: Tensor) -> Recursion:
    t = mixed_t + d - d_before
    return (s - a * t, t), lambda mixed, mixed_t: (mixed, d, mixed_t)


def exact_diffusion(s: Tensor, d: Tensor, a: float, p_before: Tensor, q: Tensor) -> Recursion:
    p = s - a * d
    ahead = p + s - p_before
    return (ahead,), lambda mixed: ((ahead + mixed) / 2, p, q)


def extra(s: Tensor, d: Tensor, a: float, half_before: Tensor, step_before: Tensor) -> Recursion:
    """Return the recursion of EXTRA, which stores the previous step a d instead of the direction d.

    With the direction, the sum of (a - a_before) d would stay in s permanently if a falls.
    """
    return (s,), lambda mixed: (s + mixed - half_before - (a * d - step_before), (s + mixed) / 2, a * d)


RECURSIONS = {"none": none, "gradient_tracking": gradient_tracking, "exact_diffusion": exact_diffusion, "extra": extra}


@dataclass(frozen=True, kw_only=True)
class Sparkle(PeerAlgorithm):
    lr_upper: StepSize = step_size(0.01, "step of x")
    lr_lower: StepSize = step_size(0.1, "step of y")
    lr_system: StepSize = step_size(0.1, "step of u")
    correction: Correction = setting("gradient_tracking", "of y and u")
    correction_upper: Literal["same", "none", "gradient_tracking", "exact_diffusion", "extra"] = setting("same", "of x")
    exchange: Literal["gossip", "push"] = setting(
        "gossip", "doubly stochastic steps on undirected networks, or Push-Sum on directed ones"
    )
    radius: float | None = setting(
        None, "u is projected on the ball of this radius before its direction is taken", symbol="r", above=0
    )
    minibatches: Literal["independent", "shared"] = setting("independent", "five minibatches per iteration, or two")

    upper_space = ("x", "x_t", "x_p", "x_q")
    lower_space = ("y", "u", "y_t", "u_t", "y_p", "u_p", "y_q", "u_q")

    class State(NamedTuple):
        """Variables, weights, and the values p and q that a correction stores between iterations.

        The recursions name the meanings of p and q.
        """

        x: Tensor
        y: Tensor
        u: Tensor
        w: Tensor
        x_p: Tensor
        y_p: Tensor
        u_p: Tensor
        x_q: Tensor
        y_q: Tensor
        u_q: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exchange == "push" and not {self.kind("x"), self.kind("y")} <= {"none", "gradient_tracking"}:
            raise SettingError(
                "exact_diffusion and extra need a doubly stochastic exchange: use gossip, or "
                "gradient_tracking with push."
            )

    def auto_steps(self, found: Found) -> dict[str, float]:
        """Return half of the plain steps, because the corrections lag behind by an exchange."""
        return {name: step / 2 for name, step in super().auto_steps(found).items()}

    def verbs(self) -> tuple[str, ...]:
        return (self.exchange,)

    def kind(self, name: str) -> str:
        return self.correction if name != "x" or self.correction_upper == "same" else self.correction_upper

    def used(self, peers: Peers, name: str) -> str:
        """Return the correction of a variable, or "none" for a variable that stays at its peer.

        A correction of such a variable would only add rounding errors.
        """
        return self.kind(name) if peers.travels(name) else "none"

    def init(self, peers: Peers) -> State:
        x, y = peers.initial()
        start = {"x": x, "y": y, "u": peers.zeros("u")}
        p = {
            f"{name}_p": rows if self.used(peers, name) in ("exact_diffusion", "extra") else torch.zeros_like(rows)
            for name, rows in start.items()
        }
        q = {f"{name}_q": torch.zeros_like(rows) for name, rows in start.items()}
        return self.State(**start, w=torch.ones_like(peers.weights), **p, **q)

    def round(self, peers: Peers, state: State) -> State:
        [step] = peers.steps(1)
        u = project(state.u, self.radius)
        directions = step_directions(peers.clients, step, state.x, state.y, u, self.minibatches)
        before = {**state._asdict(), "u": u}
        sent, answers, new = {}, {}, {}
        for name, d, a in zip("xyu", directions, (self.lr_upper, self.lr_lower, self.lr_system), strict=True):
            s = before[name]
            if peers.travels(name):  # what is exchanged is the numerator of s = z / w; without push, w = 1
                s, d = s * state.w.to(s.dtype), d * peers.weights.to(d.dtype)
            sent[name], answers[name] = RECURSIONS[self.used(peers, name)](
                s, d, a, before[f"{name}_p"], before[f"{name}_q"]
            )
        w, mixed = self.exchanged(peers, state.w, sent)
        for name, answer in answers.items():
            s, new[f"{name}_p"], new[f"{name}_q"] = answer(*mixed[name])
            new[name] = debiased(s, w) if peers.travels(name) else s
        return self.State(**new, w=w)

    def exchanged(
        self, peers: Peers, w: Tensor, sent: dict[str, tuple[Tensor, ...]]
    ) -> tuple[Tensor, dict[str, list[Tensor]]]:
        """Return the new weights and W times all sent values, from a single message."""
        rows = {
            f"{name}{suffix}": value
            for name, values in sent.items()
            for suffix, value in zip(("", "_t"), values, strict=False)
        }
        if self.exchange == "push":
            w, *mixed = peers.push(w, **rows)
        else:
            mixed = peers.gossip(**rows)
        arrived = iter(mixed)
        return w, {name: [next(arrived) for _ in values] for name, values in sent.items()}
