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

    >>> import fedbilevel as fb
    >>> falling = fb.Schedule(power=0.5, offset=0)
    >>> [falling(t) for t in (1, 4, 100)]
    [1.0, 0.5, 0.1]
    """

    power: float = 0.0
    offset: float = 100.0

    def __call__(self, iteration: int) -> float:
        return ((self.offset + 1) / (self.offset + iteration)) ** self.power

    def checked(self) -> Schedule:
        if not isinstance(self.power, int | float) or not 0 <= self.power <= 1:
            raise SettingError(f"the schedule's power is {self.power!r}, expected a value between 0 (constant) and 1.")
        if not isinstance(self.offset, int | float) or not 0 <= self.offset < math.inf:
            raise SettingError(f"the schedule's offset is {self.offset!r}, expected a finite number of at least 0.")
        return self
