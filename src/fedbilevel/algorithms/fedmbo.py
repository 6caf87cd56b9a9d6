"""FedMBO: minibatch lower steps at the server, then a Neumann series with fresh cohorts.

Use it when few clients take part in each round and the hypergradient must be unbiased for the mean
over all clients. It works for all scopes and takes no local steps. It costs T + N' + 2 rounds per
outer iteration, each with a new cohort.

From x and y, with N' uniform in {0..N-1} and a fresh cohort S at every line:

    T times       y <- y - beta mean_S g_y,i(x, y)            1 round each
    once          p = lam N mean_S f_y,i(x, y)                1 round
    N' times      p <- mean_S (p - lam H_i p)                 1 round each
    once          x <- x - alpha mean_S (f_x,i - J_i p)       1 round

Cohorts are independent, so the expectation of the product is the product of the expectations:
E p = lam sum_{j<N} (I - lam H)^j f_y with the mean Hessian H, however few clients take part.

Reference: Huang, Zhang, Ji, "Achieving Linear Speedup in Non-IID Federated Bilevel Learning", ICML
2023. The update is written from memory of the literature, not from the paper's text: no faithful
reproduction is claimed.

Deviations: (1) The paper runs n Neumann chains in parallel, each with one fresh client per factor,
and averages their ends. Here a server sees averages only, so there is one chain, and each of its
factors is the mean of a cohort. This is unbiased for the same series, and for given N' its variance
is at most that of as many chains as the cohort has clients. A cohort of one client is one chain of
the paper. (2) N' is the same for the whole cohort. (3) x takes no local steps. (4) With a private
x, x_i stays at its client and the factor 1/m is dropped; with a local lower level y_i and p_i stay,
and the series is that of the client's own Hessian.

Bias: (I - lam H)^N H^-1 f_y from the length of the series. A cohort that is kept for the whole
outer iteration (`redraw="per_iteration"`) multiplies Hessians of the same clients, which is biased
for the mean Hessian.

Cost per outer iteration: T + N' + 2 rounds. Floats up: (T + N' + 1) d_y + d_x, down as many. Per
client of the cohort: g_y: T, f_y: 1, H v: N', f_x: 1, J v: 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fedbilevel.federation.algorithm import Federation, ServerAlgorithm, Variable, linear_phase
from fedbilevel.federation.clients import Clients
from fedbilevel.federation.probing import SAMPLED, Found
from fedbilevel.settings import StepSize, setting, step_size


def local_hypergradient(clients: Clients, x: Tensor, y: Tensor, p: Tensor) -> Tensor:
    """Return f_x,i - J_i p of every client.

    If p solves the mean system, the mean of these rows is the hypergradient.
    """
    fx = clients.upper_grad_x(x, y, clients.batch("val", "h"))
    return fx - clients.jacobian_product(x, y, p, clients.batch("train", "h"))


@linear_phase
def upper_step(self: Any, clients: Clients, x: Tensor, y: Tensor, p: Tensor) -> dict[str, Tensor]:
    """Take the step of x at every client; the mean of the rows is the server's step."""
    return {"x": clients.rows(x) - self.lr_upper * local_hypergradient(clients, x, y, p)}


@dataclass(frozen=True, kw_only=True)
class FedMBO(ServerAlgorithm):
    lr_upper: StepSize = step_size(0.01, "step of x", symbol="alpha")
    lr_lower: StepSize = step_size(0.1, "step of y", symbol="beta")
    lr_system: StepSize = step_size(0.1, "step of the Neumann series; at most 1/L", symbol="lambda")
    num_lower_rounds: int = setting(5, "lower steps per outer iteration", symbol="T", least=0)
    num_terms: int = setting(5, "terms of the Neumann series", symbol="N", least=1)

    upper_space = ("x", "h")
    lower_space = ("y", "p")

    class State(NamedTuple):
        x: Variable
        y: Variable

    def auto_steps(self, found: Found) -> dict[str, float]:
        return {"lr_upper": SAMPLED * found.upper, "lr_lower": found.averaged, "lr_system": found.lower}

    def init(self, fed: Federation) -> State:
        return self.State(*fed.initial())

    def round(self, fed: Federation, state: State) -> State:
        y, p = self.chain(fed, state.x, state.y)
        return self.State(fed.mean(self.upper_step, x=state.x, y=y, p=p).x, y)

    def estimate(self, fed: Federation, x: Any, y: Any) -> tuple[Any, Any]:
        """Return the hypergradient at x and the lower iterate behind it.

        The lower level starts at y.
        """
        y, p = self.chain(fed, x, y)
        return fed.mean(self.hypergradient, x=x, y=y, p=p).h, y

    def chain(self, fed: Federation, x: Any, y: Any) -> tuple[Any, Any]:
        """Return the lower iterate and the end of the chain.

        The cohort is drawn again for every phase, including the phase after this call.
        """
        num_factors = fed.draw("N'", self.num_terms)
        for _ in range(self.num_lower_rounds):
            fed.resample()
            y = fed.mean(self.lower_step, x=x, y=y).y
        fed.resample()
        p = fed.mean(self.system_start, x=x, y=y).p
        for _ in range(num_factors):
            fed.resample()
            p = fed.mean(self.system_factor, x=x, y=y, p=p).p
        fed.resample()
        return y, p

    @linear_phase
    def lower_step(self, clients: Clients, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"y": clients.rows(y) - self.lr_lower * clients.lower_grad(x, y, clients.batch("train", "y"))}

    @linear_phase
    def system_start(self, clients: Clients, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"p": self.lr_system * self.num_terms * clients.upper_grad_y(x, y, clients.batch("val", "p"))}

    @linear_phase
    def system_factor(self, clients: Clients, x: Tensor, y: Tensor, p: Tensor) -> dict[str, Tensor]:
        return {"p": clients.rows(p) - self.lr_system * clients.hessian_product(x, y, p, clients.batch("train", "p"))}

    @linear_phase
    def hypergradient(self, clients: Clients, x: Tensor, y: Tensor, p: Tensor) -> dict[str, Tensor]:
        return {"h": local_hypergradient(clients, x, y, p)}

    upper_step = upper_step
