"""FedMSA: local steps of x, y and u along mean directions that each client corrects; two rounds.

Use it when clients differ and several local steps per round must leave no drift, without a memory
at the clients. It works for all scopes. It costs as much as FedBiOAcc: two rounds and 2 d_x + 4 d_y
floats per outer iteration.

The three sequences s = (x, y, u) have the directions d_i = (f_x,i - J_i u, g_y,i, H_i u - f_y,i).
The server keeps estimates e = (nu, om, q) of their means. From s_i = s and e_i = e every client
takes I local steps with the steps a = (alpha, beta, tau), where the second line is left out before
the first step and both points of a line use the same minibatches:

    s_i <- s_i - a e_i
    e_i <- e_i + d_i(s_i) - d_i(s_i before its last step)                 SARAH, at the client
    R1:  s+ = mean s_i
    R2:  e+ = mean [ d_i(s+) + (1 - rho) (e - d_i(s)) ]                   STORM, between rounds

With whole batches and all clients e is the mean direction at s, for every rho. Then e_i is the mean
direction plus the change of the client's own direction since the round began, and at the solution
e = 0: no client moves, for any I.

Reference: Tarzanagh, Li, Sharma, Oymak, "Federated Multi-Sequence Stochastic Approximation with
Local Hypergradient Estimation", arXiv 2306.01648, 2023. The recursions follow the authors' public
program for bilevel problems; of the paper only the abstract was read.

Deviations: (1) R2 ends an outer iteration instead of beginning the next, so both rounds have one
cohort; the public program estimates e with all clients and takes local steps with a cohort. (2) The
public program uses whole batches and keeps d_i(s) at the clients; here d_i(s) is evaluated again on
the minibatch of d_i(s+). (3) y and u begin at their initial values, where the public program takes
five rounds of FedInn and a Neumann series first. (4) beta and tau are two settings. (5) With a
private x, x and nu stay at their client, without the factor 1/m; with a local lower level y, u, om,
q stay. (6) A client that missed R1 uses s+ as s.

Bias: none with whole batches and all clients. With cohorts e keeps an error of the order of
rho^(1/2) times the spread of the clients' directions, which a small rho reduces, and a client
corrects with its own direction only.

Cost per outer iteration: 2 rounds; 2 d_x + 4 d_y floats each way; per client 2 I of each of g_y,
f_x, f_y, H u, J u. Once, before the first: 1 round; d_x + 2 d_y floats each way; per client one of
each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from fedbilevel.algorithms.fedbio import step_directions
from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, Variable, phase
from fedbilevel.federation.clients import Clients, Step
from fedbilevel.settings import StepSize, setting, step_size

Rows = tuple[Tensor, ...]  # of x, y, u, or of their estimates nu, om, q


@dataclass(frozen=True, kw_only=True)
class FedMSA(ServerAlgorithm):
    lr_upper: StepSize = step_size(0.01, "step of x", symbol="alpha")
    lr_lower: StepSize = step_size(0.1, "step of y", symbol="beta")
    lr_system: StepSize = step_size(0.1, "step of u", symbol="tau")
    num_local_steps: int | tuple[int, ...] = setting(5, "local steps between rounds", symbol="I", least=1)
    momentum: float = setting(0.5, "weight of the newest direction in a round", symbol="rho", above=0, most=1)
    minibatches: Literal["independent", "shared"] = setting(
        "independent", "five minibatches per local step as in FedBiO, or two"
    )

    upper_space = ("x", "nu")
    lower_space = ("y", "u", "om", "q")

    class State(NamedTuple):
        x: Variable
        y: Variable
        u: Variable
        nu: Variable
        om: Variable
        q: Variable

    def init(self, fed: Federation) -> State:
        (x, y), u = fed.initial(), fed.zeros("u")
        first = fed.mean(self.initial_estimates, x=x, y=y, u=u)
        return self.State(x, y, u, first.nu, first.om, first.q)

    def round(self, fed: Federation, state: State) -> State:
        new = fed.mean(self.local_steps, **state._asdict())
        est = fed.mean(self.estimates, **{**state._asdict(), **vars(new)})
        return self.State(new.x, new.y, new.u, est.nu, est.om, est.q)

    @phase
    def initial_estimates(self, clients: Clients, x: Tensor, y: Tensor, u: Tensor) -> dict[str, Tensor]:
        point = est = clients.rows(x, y, u)
        for step in clients.steps(1):  # none in a process that hosts no client of the cohort
            est = self.directions(clients, step, point)
        return dict(zip(("nu", "om", "q"), est, strict=True))

    @phase
    def local_steps(
        self, clients: Clients, x: Tensor, y: Tensor, u: Tensor, nu: Tensor, om: Tensor, q: Tensor
    ) -> dict[str, Tensor]:
        start = old = point = clients.rows(x, y, u)
        est = clients.rows(nu, om, q)
        rates = (self.lr_upper, self.lr_lower, self.lr_system)
        for step in clients.steps(self.num_local_steps):
            if step.index > 0:
                here, before = (self.directions(clients, step, rows) for rows in (point, old))
                est = step.where(tuple(e + d - b for e, d, b in zip(est, here, before, strict=True)), est)
            new = tuple(s - a * e for s, a, e in zip(point, rates, est, strict=True))
            old, point = step.where((point, new), (old, point))
        clients.scratch.write(start=start)
        return dict(zip(("x", "y", "u"), point, strict=True))

    @phase
    def estimates(
        self, clients: Clients, x: Tensor, y: Tensor, u: Tensor, nu: Tensor, om: Tensor, q: Tensor
    ) -> dict[str, Tensor]:
        point, est = clients.rows(x, y, u), clients.rows(nu, om, q)
        start = clients.scratch.read("start", default=point)
        for step in clients.steps(1):
            here, before = (self.directions(clients, step, rows) for rows in (point, start))
            est = tuple(d + (1 - self.momentum) * (e - b) for d, e, b in zip(here, est, before, strict=True))
        return dict(zip(("nu", "om", "q"), est, strict=True))

    def directions(self, clients: Clients, step: Step, point: Rows) -> Rows:
        x, y, u = point
        return step_directions(clients, step, x, y, u, self.minibatches)
