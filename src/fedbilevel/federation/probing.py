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

from fedbilevel.errors import NonFiniteError, SettingError
from fedbilevel.federation.phases import linear_phase, phase
from fedbilevel.oracle.hypergradient import start_vector

if TYPE_CHECKING:
    from fedbilevel.federation.clients import Clients

LOWER, UPPER = ("probe_y", "probe_u", "probe_v", "near_y", "near_u"), ("near_x",)  # arrays of the probe, by space
PHASES = ("probe_curvature", "probe_product", "probe_steps")
SAFE, SAFE_UPPER, MOVE = 0.8, 0.1, 0.1
NESTED = 5.0  # longer steps of x for methods in which y and u follow x before it moves again
SAMPLED = 2.0  # the same for methods that draw one term of a series, whose estimates vary
_NORM, _FAR = 32, 8.0  # 8^32 fits float32
_PRODUCTS, _PRODUCTS_OF_MEAN, _BATCHES, _STEPS = 12, 6, 3, 5
ADAPTIVE = 0.03  # the step of an entry of x in Adam's steps, relative to the size of x
_WARM, _WARM_AGAIN, _TWIN = 2, 3, 3  # rounds


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
        return {"power": (found / unit).clamp(max=_FAR).pow(_NORM)}

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
        for one in clients.steps(_STEPS):
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


def lanczos(product: Any, like: Tensor, num_products: int = _PRODUCTS) -> tuple[Tensor, Tensor]:
    """Return estimates (k,) of the smallest and the largest eigenvalue of each row's matrix.

    The recursion stores three vectors per row; without reorthogonalisation, copies of converged
    eigenvalues appear, which do not change the extremes.
    """
    v = start_vector(like).expand_as(like)
    v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True)
    before, beta = torch.zeros_like(v), v.new_zeros(len(v), 1)
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    tiny = 100 * torch.finfo(v.dtype).eps
    for _ in range(num_products):
        w = product(v)
        alpha = (w * v).sum(1, keepdim=True)
        size = torch.linalg.vector_norm(w, dim=1, keepdim=True)
        w = w - alpha * v - beta * before
        beta = torch.linalg.vector_norm(w, dim=1, keepdim=True)
        ended = (beta <= tiny * size) | (beta == 0)  # the Krylov space is complete: repeat the first entry
        diagonal.append(alpha if not diagonal else torch.where((v == 0).all(1, keepdim=True), diagonal[0], alpha))
        beta = torch.where(ended, torch.zeros_like(beta), beta)
        before, v = v, torch.where(ended, torch.zeros_like(w), w / torch.where(ended, torch.ones_like(beta), beta))
        beside.append(beta)
    matrix = torch.diag_embed(torch.cat(diagonal, dim=1))
    off = torch.cat(beside, dim=1)[:, :-1]
    matrix = matrix + torch.diag_embed(off, offset=1) + torch.diag_embed(off, offset=-1)
    values = torch.linalg.eigvalsh(matrix)
    return values[:, 0], values[:, -1]


def resolved(algorithm: Any, fed: Any) -> dict[str, float]:
    """Return values for the step sizes of "auto", measured through the verbs of a federation."""
    names = algorithm.auto_names()
    steps = algorithm.auto_steps(measured(algorithm, fed, upper=hasattr(algorithm, "lr_upper")))
    return {name: float(steps[name]) for name in names}


def measured(algorithm: Any, fed: Any, *, upper: bool) -> Found:
    """Measure a problem at its start through the verbs of a federation.

    upper: whether steps of x are needed, which takes more rounds.
    """
    try:
        return _Probe(algorithm, fed, upper).found()
    except NonFiniteError as error:
        raise SettingError(
            f"step sizes of 'auto' cannot be measured, because the problem is not finite near its start ({error}): "
            "scale the losses or the data, or give numbers."
        ) from error


class _Probe:
    """The rounds of a measurement."""

    def __init__(self, algorithm: Any, fed: Any, upper: bool) -> None:
        self.algorithm, self.fed, self.upper = algorithm, fed, upper
        scopes = fed.problem.scopes
        self.private = scopes.upper == "private"
        self.x, self.width = fed.start("x"), len(fed.zeros("probe_u"))
        self.lower: dict[str, Any] = {}
        if scopes.lower == "global":
            self.lower = {"probe_y": fed.start("probe_y"), **({"probe_u": fed.zeros("probe_u")} if upper else {})}
        self.start = self.lower.get("probe_y")
        self.h: Any = None
        self.squares: list[float] = []

    def found(self) -> Found:
        squares = self._powers(None, fresh=True)
        size = squares[2] ** 0.5 or 1.0
        largest, negative = self._largest(squares[0] ** 0.5, fresh=False)
        first = 0.6 * SAFE / largest  # shorter: the curvature often grows first
        self._warm(first, 1)
        gradient, residual = (square**0.5 / (first * _STEPS) for square in self.squares[2:])
        self._warm(first, _WARM - 1)
        largest, negative = self._larger(largest)
        self._warm(SAFE / largest, _WARM_AGAIN)
        largest, negative = self._larger(largest)
        mean = self._of_mean() if self.lower else largest
        h, _, y, u = (square**0.5 for square in self.squares)
        step = self._upper(size, h, SAFE / largest) if self.upper else 0.0
        return Found(
            SAFE / largest, SAFE / mean, step, largest, negative, size, h, y, u, gradient, residual,
            self.fed.num_clients, self.width,
        )  # fmt: skip

    def _upper(self, size: float, h: float, lower: float) -> float:
        """Return the step of x, from the size of the hypergradient and its change along itself."""
        if h == 0:
            raise SettingError(
                "lr_upper = 'auto' needs a hypergradient, but it is zero at the start, so that x would not move: "
                "start elsewhere, or give a number."
            )
        step = MOVE * size / h
        self._warm(lower, _TWIN, step)
        change = self.squares[1] ** 0.5  # step * h * L_Phi
        return min(step, SAFE_UPPER * step * h / change) if change > 0 else step

    def _warm(self, step: float, num_rounds: int, length: float = 0.0) -> None:
        """Take rounds of local steps on y and u; with a length also at a second point."""
        near = {"near_x": self.x - length * self.h} if length and not self.private else {}
        for _ in range(num_rounds):
            self.fed.resample()
            new = vars(
                self.fed.mean(
                    self.algorithm.probe_steps, x=self.x, step=step, system=self.upper, length=length,
                    **self.lower, **near,
                )
            )  # fmt: skip
            self.squares = new["squares"].tolist()
            if "h" in new:  # of the means of shared variables instead of means over clients
                self.h = self.h if length else new["h"]
                self.squares[:2] = [_square(new["h"]), _square(new["difference"]) if length else 0.0]
            self.lower = {name: new[name] for name in LOWER if name in new}
            if self.lower:
                self.squares[2] = _square(self.lower["probe_y"] - self.start)
            if "probe_u" in self.lower:
                self.squares[3] = _square(self.lower["probe_u"])

    def _of_mean(self) -> float:
        """Return the largest |eigenvalue| of the mean Hessian."""
        y = self.lower["probe_y"]

        def product(v: Tensor) -> Tensor:
            new = self.fed.mean(self.algorithm.probe_product, x=self.x, probe_v=v[0], probe_y=y)
            return new.product[None]

        low, high = lanczos(product, y[None], _PRODUCTS_OF_MEAN)
        return max(float(high), -float(low))

    def _powers(self, unit: float | None, fresh: bool) -> list[float]:
        y = {"probe_y": self.lower["probe_y"]} if self.lower and fresh else {}
        new = self.fed.mean(self.algorithm.probe_curvature, x=self.x, unit=unit, fresh=fresh, **y)
        return [float(one) for one in new.power.tolist()]

    def _larger(self, before: float) -> tuple[float, float]:
        """Measure again after a warm-up; return the larger value, and the newest negative one."""
        largest, negative = self._largest(before, fresh=True)
        return max(before, largest), negative

    def _largest(self, unit: float, fresh: bool) -> tuple[float, float]:
        """Return the 32-norms over clients of the largest and the most negative curvature."""
        while True:
            if not unit > 0:
                raise SettingError(
                    "step sizes of 'auto' need a curvature, but the Hessian of the lower loss is zero at the start: "
                    "start elsewhere, or give numbers."
                )
            powers = self._powers(unit, fresh)
            largest, negative = (unit * (self.fed.num_clients * power) ** (1 / _NORM) for power in powers)
            if largest < _FAR * unit:
                return largest, negative
            unit, fresh = largest, False  # the values were cut off


def _square(vector: Tensor) -> float:
    return float(vector.double().square().mean())
