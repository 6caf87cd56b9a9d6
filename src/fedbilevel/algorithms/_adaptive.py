"""Steps of Adam for the lower variable, at the clients or at the server.

    m <- beta_1 m + (1 - beta_1) q,    s <- beta_2 s + (1 - beta_2) q_y^2,    t <- t + 1
    z <- z - lr * (m / (1 - beta_1^t)) / (sqrt(s / (1 - beta_2^t)) + eps)

z is y, or the offset of another point from y; q is its direction, and q_y that of y. Every z has its
own m, and all of them share the s of y: differences of points then follow the same preconditioned
descent as y. With second moments of their own, points would differ by the noise of these moments.

`adam`: every client takes such steps; y, m and s are averaged in every round. `server_adam`: clients
take plain steps, and the server takes one step of Adam per round with the mean sum of their
directions. With a local lower level both happen at the client and nothing is averaged.

There is no decoupled weight decay: it would move y away from the minimum of the lower loss, which
hypergradients are about. Put a quadratic into the lower loss instead.

References: Kingma, Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015; at the server,
Reddi et al., "Adaptive Federated Optimization", ICLR 2021. The shared second moment is this
project's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedbilevel.federation.algorithm import Federation, Kept, most_steps
from fedbilevel.federation.clients import Clients
from fedbilevel.federation.probing import MOVE, Found

LowerOptimiser = Literal["sgd", "adam", "server_adam"]
COUNT = "t_y"  # steps of Adam so far, a sequence of length 1
SECOND = "s_y"


class Moments(NamedTuple):
    """Momenta of y and of the offsets, the second moment of y, and the number of steps."""

    momenta: tuple[Tensor, ...]
    second: Tensor
    number: Tensor


class Adaptive:
    """Moments in the state of an algorithm with these settings, and the steps that use them.

    The state has a field m_<name> for y and for every offset, and s_y and t_y; they are None
    without Adam.
    """

    lower_optimiser: LowerOptimiser
    lr_lower: Any
    server_lr: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    num_local_steps: int | tuple[int, ...]

    def lower_points(self) -> tuple[str, ...]:
        """Return the names of y and of the offsets in the state."""
        return ("y",)

    def auto_steps(self, found: Found) -> dict[str, float]:
        """Return steps of Adam by which y moves in a round by a tenth of its displacement in the warm-up."""
        steps: dict[str, float] = super().auto_steps(found)  # type: ignore[misc]
        if self.lower_optimiser == "adam" and found.y > 0:
            steps["lr_lower"] = MOVE * found.y / most_steps(self.num_local_steps)
        return steps

    def no_moments(self, fed: Federation) -> dict[str, Any]:
        """Return moments of zero, or nothing without Adam."""
        return {} if self.lower_optimiser == "sgd" else {name: fed.zeros(name) for name in self._names()}

    def sent_moments(self, state: Any) -> dict[str, Any]:
        """Return the moments that clients need."""
        held = {name: getattr(state, name) for name in self._names() if getattr(state, name) is not None}
        needed = self.lower_optimiser == "adam" or any(isinstance(value, Kept) for value in held.values())
        return held if needed else {}

    def new_lower(self, state: Any, new: Mapping[str, Any]) -> dict[str, Any]:
        """Return y, the offsets and the moments after a round with these results."""
        points = self.lower_points()
        values = {name: new[name] for name in points}
        if self.lower_optimiser == "sgd":
            return values
        if isinstance(state.y, Kept):
            return {**values, **{name: new[name] for name in self._names()}}
        if self.lower_optimiser == "adam":
            moments = {name: new[name] for name in self._names() if name != COUNT}
            return {**values, **moments, COUNT: getattr(state, COUNT) + most_steps(self.num_local_steps)}
        old = state._asdict()
        z, moved = self.server_step([old[name] for name in points], [*values.values()], self.moments(old))
        return {**dict(zip(points, z, strict=True)), **self._named(moved)}

    # ---- in a phase or at the server ------------------------------------------------------------------------------

    def moments(self, named: Mapping[str, Tensor]) -> Moments:
        return Moments(tuple(named[f"m_{name}"] for name in self.lower_points()), named[SECOND], named[COUNT])

    def client_moments(self, clients: Clients, **named: Tensor | None) -> Moments | None:
        """Return one row of moments per client, or None if clients take plain steps."""
        held = {name: clients.rows(value) for name, value in named.items() if value is not None}
        return self.moments(held) if held else None

    def answered(self, clients: Clients, moments: Moments | None) -> dict[str, Any]:
        """Return moments as results of a phase; the server counts the steps itself if it has the moments."""
        if moments is None:
            return {}
        named, is_local = self._named(moments), clients.host.problem.scopes.lower == "local"
        return named if is_local else {**named, COUNT: None}

    def adam(
        self, points: Sequence[Tensor], directions: Sequence[Tensor], moments: Moments, lr: Any
    ) -> tuple[list[Tensor], Moments]:
        """Return y and the offsets after one step of Adam; y comes first."""
        count = moments.number + 1
        momenta = tuple(
            self.adam_beta1 * m + (1 - self.adam_beta1) * q for m, q in zip(moments.momenta, directions, strict=True)
        )
        second = self.adam_beta2 * moments.second + (1 - self.adam_beta2) * directions[0].square()
        # a mean of rows that are compressed or noisy may be negative
        root = (second.clamp(min=0) / _grown(self.adam_beta2, count)).sqrt_().add_(self.adam_eps)
        root *= _grown(self.adam_beta1, count)
        return [z - lr * (m / root) for z, m in zip(points, momenta, strict=True)], Moments(momenta, second, count)

    def server_step(
        self, old: Sequence[Tensor], new: Sequence[Tensor], moments: Moments
    ) -> tuple[list[Tensor], Moments]:
        """Take the step of `server_adam` with the displacements by plain steps."""
        directions = [(before - after) / self.lr_lower for before, after in zip(old, new, strict=True)]
        return self.adam(old, directions, moments, self.server_lr)

    def _named(self, moments: Moments) -> dict[str, Tensor]:
        return dict(zip(self._names(), (*moments.momenta, moments.second, moments.number), strict=True))

    def _names(self) -> list[str]:
        return [*(f"m_{name}" for name in self.lower_points()), SECOND, COUNT]


def _grown(beta: float, count: Tensor) -> Tensor:
    """Return 1 - beta^count, also where beta is near one."""
    return -torch.expm1(count * (math.log(beta) if beta else -math.inf))
