"""Test whether the levels of a problem depend on each other, on a few samples of a few clients.

The hypergradient is f_x - J u with H u = f_y. If f_y or J is zero everywhere, the lower level has
no effect on x; if f_x is zero as well, x cannot be learned. A derivative that is zero at one point
may differ elsewhere (a ReLU that is off, a model that starts at 0), so several random points are
tried, and a suspicion is tested again on more samples.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedbilevel.errors import ProblemError
from fedbilevel.oracle.population import Population
from fedbilevel.problem.client_data import Batch

_SIZES = ((4, 16), (32, 256))  # clients and samples of each, at first and to confirm a suspicion
_DISTANCES = (0.1, 0.5, 2.0)  # of the points from the start, relative to its size


class Fault(NamedTuple):
    """A sentence on a meaningless problem, and whether x cannot be learned at all."""

    text: str
    is_fatal: bool = False


def dependence_faults(population: Population, seed: int = 0) -> list[Fault]:
    """Return the faults of the losses; the random numbers of a run are not used."""
    used: set[str] | None = None
    for num_clients, num_samples in _SIZES:
        found = _Samples(population, num_clients, num_samples)
        if infinite := found.infinite():
            return [Fault(infinite, is_fatal=True)]
        used = found.used(torch.Generator().manual_seed(seed))
        if used is None or {"fy", "J"} <= used:
            return []
    return [] if used is None else _faults(used)


def _faults(used: set[str]) -> list[Fault]:
    if "fx" not in used and "fy" not in used:
        text = "upper() depends on neither x nor y, so there is nothing to learn: use y in the upper loss"
        return [Fault(text, is_fatal=True)]
    if "gy" not in used and "J" not in used:
        text = "lower() does not change with y, so y stays at its initial value: use y in the lower loss"
        return [Fault(text, is_fatal="fx" not in used)]
    if "J" not in used and "fx" not in used:
        text = (
            "neither y*(x) nor upper() depends on x, so x cannot be learned: use x in the lower loss, "
            "in a term that also holds y"
        )
        return [Fault(text, is_fatal=True)]
    if "fy" not in used:
        return [Fault("upper() does not depend on y, so the lower level has no effect on x: use y in the upper loss")]
    return [
        Fault(
            "y*(x) does not depend on x, because lower() has no term that holds both x and y, so upper() is minimised "
            "over x directly: use x in the lower loss"
        )
    ]


class _Samples:
    """Samples of clients that are spread over the population, with their initial points."""

    def __init__(self, population: Population, num_clients: int, num_samples: int) -> None:
        self.population, self.oracle = population, population.separate_oracle()
        self.positions = _spread(len(population), num_clients)
        self.train, self.val = (self._batch(role, num_samples) for role in ("train", "val"))
        self.x = population.x0 if population.x0.ndim == 1 else population.x0[self.positions]
        self.y = population.y0

    def _batch(self, role: str, num_samples: int) -> Batch:
        sizes = self.population.data.sizes[role][self.positions]
        steps = torch.arange(min(num_samples, int(sizes.max())))
        index = (steps * sizes[:, None]) // len(steps)
        return self.population.data.batch(self.positions, role, index.to(self.population.device))

    def infinite(self) -> str:
        """Return a sentence on a loss that is not finite at the initial point, or an empty one."""
        problem = self.population.problem
        for label, loss, batch in (("lower", problem.lower, self.train), ("upper", problem.upper, self.val)):
            with torch.no_grad():
                values = self.oracle.evaluate(loss, self.x, self.y, batch)
            for position, value in zip(self.positions.tolist(), values.tolist(), strict=True):
                if not abs(value) < float("inf"):
                    return (
                        f"{label}() is {value} at the initial point on client {position}: "
                        "check its data and the initial values"
                    )
        return ""

    def used(self, draw: torch.Generator) -> set[str] | None:
        """Return the derivatives that are not zero at some point, or None if they cannot be known."""
        found: set[str] | None = None
        for distance in _DISTANCES:
            x, y, v = (_near(one, distance, draw) for one in (self.x, self.y, torch.zeros_like(self.y)))
            try:
                derivatives = self._derivatives(x, y, v)
            except ProblemError:  # torch has no second derivative of the loss
                return None
            if all(bool(torch.isfinite(one).all()) for one in derivatives.values()):
                found = (found or set()) | {name for name, one in derivatives.items() if bool(one.any())}
            if found is not None and {"fy", "J"} <= found:
                break
        return found

    @torch.no_grad()
    def _derivatives(self, x: Tensor, y: Tensor, v: Tensor) -> dict[str, Tensor]:
        fx, fy = self.oracle.upper_grads(x, y, self.val)
        found = {"fx": fx, "fy": fy, "J": self._cross(x, y, v)}
        if not bool(found["J"].any()):
            found["gy"] = self.oracle.lower_grad(x, y, self.train)
        return found

    def _cross(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Return J v, or for an algorithm without second derivatives a difference of g_x."""
        if self.population.second:
            return self.oracle.jacobian_product(x, y, v, self.train)
        gradient = lambda at: self.oracle.lower_grad_x(x, at, self.train)
        return gradient(y + v) - gradient(y)


def _spread(number: int, most: int) -> Tensor:
    """Return at most `most` whole numbers below `number`, at equal distances."""
    return torch.arange(min(number, most)) * number // min(number, most)


def _near(vector: Tensor, distance: float, draw: torch.Generator) -> Tensor:
    size = max(1.0, float(vector.square().mean().sqrt())) if vector.numel() else 1.0
    noise = torch.randn(vector.shape, generator=draw, dtype=torch.float64)
    return vector + distance * size * noise.to(vector)
