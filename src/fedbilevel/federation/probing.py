"""Measurements for step sizes of "auto", in a few rounds before the first outer iteration.

A step size of "auto" is found from three figures of the problem at its start (x0, y0):

    L      the largest |eigenvalue| of any client's Hessian H_i, by Lanczos, before and after a warm-up of y
    |h|    the root mean square of the hypergradient estimate h = f_x - J u after a warm-up of y and u
    L_Phi  the curvature of Phi along h: |h(x0) - h(x0 - d h)| / |d h|, with y and u warmed up at both points

The plain steps are

    lower = 0.8 / L                  of y and u
    upper = min(0.1 / L_Phi, 0.1 s / |h|)   of x: s is the root mean square of x0, or 1 if x0 is zero

so that one step of x moves it by at most a tenth of its size. Every algorithm converts these steps
to its own settings in `Algorithm.auto_steps`. Only means over clients are sent: a largest value is
a 32-norm of the clients' values, which is too large by a factor of at most num_clients^(1/32).
With minibatches, Hessians and directions are those of minibatches of the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.federation.phases import linear_phase, phase
from fedbilevel.oracle.lanczos import lanczos

if TYPE_CHECKING:
    from fedbilevel.federation.clients import Clients

LOWER, UPPER = ("probe_y", "probe_u", "probe_v", "near_y", "near_u"), ("near_x",)  # arrays of the probe, by space
PHASES = ("probe_curvature", "probe_product", "probe_steps")
SAFE, SAFE_UPPER, MOVE = 0.8, 0.1, 0.1
NESTED = 5.0  # longer steps of x for methods in which y and u follow x before it moves again
SAMPLED = 2.0  # the same for methods that draw one term of a series, whose estimates vary
NORM, FAR = 32, 8.0  # 8^32 fits float32
STEPS = 5  # local steps of y and u in a round
_BATCHES = 3
ADAPTIVE = 0.03  # the step of an entry of x in Adam's steps, relative to the size of x


class Found(NamedTuple):
    """Figures of a problem at its start, and the plain steps that follow from them.

    lower: step of gradient descent on y, and of u, at every client alone: 0.8 / L.
    averaged: the same if the steps of all clients are averaged at once: 0.8 / L of the mean Hessian.
    upper: step of gradient descent on x, one step per outer iteration.
    curvature: L, the largest absolute eigenvalue of any client's Hessian.
    negative: the largest absolute value of a negative eigenvalue, or 0.
    size, h: root mean squares of x0 (1 if x0 is zero) and of the hypergradient.
    y, u: root mean squares of the displacement of y in the warm-up, and of u.
    gradient, residual: root mean squares of g_y and H u - f_y in the first round.
    num_clients, width: the number of clients in the run, and the length of y.
    """

    lower: float
    averaged: float
    upper: float
    curvature: float
    negative: float
    size: float
    h: float
    y: float
    u: float
    gradient: float
    residual: float
    num_clients: int
    width: int

    def between(self, num_local_steps: int | tuple[int, ...]) -> float:
        """Return the step of y or u with this number of local steps between averages."""
        return self.averaged if num_local_steps == 1 else self.lower


class Probing:
    """Phases that measure a problem, which every algorithm with a server inherits."""

    @phase
    def probe_curvature(
        self, clients: Clients, x: Tensor, unit: float | None, fresh: bool, probe_y: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return powers of each client's largest and most negative curvature, relative to `unit`.

        The sum of 32nd powers is dominated by the largest value. Without a unit the powers are
        squares, in which the size of x is included.

        fresh: whether to measure again instead of reading the last values.
        """
        if fresh:
            y = _own(clients, "probe_y", probe_y, clients.host.y0)
            clients.scratch.write(probe_curvature=_extremes(clients, *clients.rows(x, y)))
        found = clients.scratch.read("probe_curvature", default=torch.zeros(len(clients), 2).to(clients.rows(x)))
        if unit is None:
            return {"power": torch.cat([found.square(), _mean_square(clients, x)], dim=1)}
        return {"power": (found / unit).clamp(max=FAR).pow(NORM)}

    @linear_phase
    def probe_product(
        self, clients: Clients, x: Tensor, probe_v: Tensor, probe_y: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return H_i v, whose mean is the product with the mean Hessian."""
        y = _own(clients, "probe_y", probe_y, clients.host.y0)
        return {"product": clients.hessian_product(x, y, probe_v, clients.batch("train", "probe_curvature"))}

    @phase
    def probe_steps(
        self,
        clients: Clients,
        x: Tensor,
        step: float,
        system: bool,
        length: float = 0.0,
        probe_y: Tensor | None = None,
        probe_u: Tensor | None = None,
        near_x: Tensor | None = None,
        near_y: Tensor | None = None,
        near_u: Tensor | None = None,
    ) -> dict[str, Tensor | None]:
        """Take local steps on y and u at x, and at a second point x - length * h if length > 0.

        Variables that stay at the client are kept in its scratch. The mean squares of h, of the
        difference of h between the points, of the displacement of y, and of u are returned; h and
        the difference are also returned themselves if x is shared.

        system: whether u takes steps, too.
        """
        x, start = clients.rows(x, clients.host.y0)
        y, u = _own(clients, "probe_y", probe_y, start), _own(clients, "probe_u", probe_u, torch.zeros_like(start))
        twin = length > 0
        if twin:
            h = clients.scratch.read("probe_h", default=torch.zeros_like(x))
            x_2 = clients.rows(near_x) if near_x is not None else x - length * h
            y_2, u_2 = _own(clients, "near_y", near_y, y), _own(clients, "near_u", near_u, u)
        h = difference = torch.zeros_like(x)
        for one in clients.steps(STEPS):
            h, y, u = _step(clients, one, x, y, u, step, system)
            if twin:
                h_2, y_2, u_2 = _step(clients, one, x_2, y_2, u_2, step, system)
                difference = h - h_2
        squares = [_mean_square(clients, rows) for rows in (h, difference)]
        squares += [_mean_square(clients, rows, upper=False) for rows in (y - start, u)]
        found: dict[str, Tensor | None] = {"squares": torch.cat(squares, dim=1)}
        lower = {"probe_y": y, **({"probe_u": u} if system else {}), **({"near_y": y_2, "near_u": u_2} if twin else {})}
        scopes = clients.host.problem.scopes
        if scopes.lower == "local":
            clients.scratch.write(**lower)
        else:
            found.update(lower)
        if scopes.upper == "private":
            if not twin:
                clients.scratch.write(probe_h=h)
        elif system:
            found.update(h=h, difference=difference if twin else None)
        return found


def _step(
    clients: Clients, one: Any, x: Tensor, y: Tensor, u: Tensor, step: float, system: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return h at a point, and y and u after one local step."""
    train = one.batch("train", "probe")
    if not system:
        return torch.zeros_like(x), y - step * clients.lower_grad(x, y, train), u
    val = one.batch("val", "probe")
    h, gradient, residual = clients.directions(x, y, u, gy=train, fx=val, fy=val, ju=train, hu=train)
    return h, y - step * gradient, u - step * residual


def _own(clients: Clients, name: str, sent: Tensor | None, start: Tensor) -> Tensor:
    """Return the rows that were sent, or the rows that the clients kept, or the start."""
    if clients.host.problem.scopes.lower == "local":
        return clients.scratch.read(name, default=clients.rows(start))
    return clients.rows(start if sent is None else sent)


def _mean_square(clients: Clients, rows: Tensor, upper: bool = True) -> Tensor:
    """Return (k, 1) mean squares of rows; a private x counts without its padding."""
    sizes = clients.host.x_sizes if upper else None
    width = rows.shape[-1] if sizes is None else sizes[clients.positions].to(rows)[:, None].clamp(min=1)
    return clients.rows(rows).square().sum(1, keepdim=True) / width


def _extremes(clients: Clients, x: Tensor, y: Tensor) -> Tensor:
    """Return (k, 2): the largest |eigenvalue| and the size of the most negative one of each client."""
    whole = clients.batch_size("train") is None
    found = torch.zeros(len(clients), 2).to(y)
    for one in clients.steps(1 if whole else _BATCHES):
        batch = one.batch("train", "probe_curvature")
        low, high = lanczos(lambda v, batch=batch: clients.hessian_product(x, y, v, batch), y)
        found = torch.maximum(found, torch.stack([torch.maximum(high, -low), -low], dim=1))
    return found
