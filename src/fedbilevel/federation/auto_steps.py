"""Rounds that measure a problem at its start, for step sizes of "auto"; `probing` has their phases."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedbilevel.errors import NonFiniteError, SettingError
from fedbilevel.federation.probing import FAR, LOWER, MOVE, NORM, SAFE, SAFE_UPPER, STEPS, Found
from fedbilevel.oracle.lanczos import lanczos

_WARM, _WARM_AGAIN, _TWIN = 2, 3, 3  # rounds
_PRODUCTS_OF_MEAN = 6


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
        gradient, residual = (square**0.5 / (first * STEPS) for square in self.squares[2:])
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
            largest, negative = (unit * (self.fed.num_clients * power) ** (1 / NORM) for power in powers)
            if largest < FAR * unit:
                return largest, negative
            unit, fresh = largest, False  # the values were cut off


def _square(vector: Tensor) -> float:
    return float(vector.double().square().mean())
