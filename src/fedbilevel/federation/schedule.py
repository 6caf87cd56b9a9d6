"""Step sizes that fall with the outer iteration."""

from __future__ import annotations

import math
from typing import NamedTuple

from fedbilevel.errors import SettingError


class Schedule(NamedTuple):
    """Factor of the step sizes at outer iteration t: ((offset + 1) / (offset + t))^power.

    The factor is 1 at t = 1, and always 1 for power 0. Power 1/3 is the decay of the
    variance-reduced methods; 1/2 and 1 are the decays of stochastic gradient theory. The local
    drift of methods with several local steps is proportional to the step, so a decaying step
    removes it.

    With end = N > 0, the factor is multiplied by 1 - (t - 1) / N, the linear decay that is usual for
    networks: it reaches 1 / N in the last of N outer iterations and stays there.

    >>> import fedbilevel as fb
    >>> falling = fb.Schedule(power=0.5, offset=0)
    >>> [falling(t) for t in (1, 4, 100)]
    [1.0, 0.5, 0.1]
    >>> linear = fb.Schedule(end=4)
    >>> [linear(t) for t in (1, 2, 4, 9)]
    [1.0, 0.75, 0.25, 0.25]
    """

    power: float = 0.0
    offset: float = 100.0
    end: int = 0

    def __call__(self, iteration: int) -> float:
        factor = ((self.offset + 1) / (self.offset + iteration)) ** self.power
        return factor * (1 - (min(iteration, self.end) - 1) / self.end) if self.end else factor

    def checked(self) -> Schedule:
        if not isinstance(self.power, int | float) or not 0 <= self.power <= 1:
            raise SettingError(f"the schedule's power is {self.power!r}, expected a value between 0 (constant) and 1.")
        if not isinstance(self.offset, int | float) or not 0 <= self.offset < math.inf:
            raise SettingError(f"the schedule's offset is {self.offset!r}, expected a finite number of at least 0.")
        if type(self.end) is not int or self.end < 0:
            raise SettingError(
                f"the schedule's end is {self.end!r}, expected a number of outer iterations, or 0 for no linear decay."
            )
        return self
