"""The length of a run, and the outer iterations after which it measures and saves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from fedbilevel.errors import SettingError
from fedbilevel.settings import whole_number

MEASUREMENTS = 20  # about so many in a run, unless measure_every says otherwise
Due = Callable[[int, int, int], bool]  # of an outer iteration and the rounds before and after it
MOST_ROUNDS = 500  # of a run without a given length


class Pace(NamedTuple):
    """The length of a run, and the distances between its measurements and checkpoints.

    num_rounds: number of rounds that ends the run early, or None.
    measure_every: outer iterations between measurements, or None if rounds determine them.
    until_converged: end the run when its figures no longer change, because no length was given.
    """

    num_iterations: int
    measure_every: int | None
    measure_growth: float
    checkpoint_every: int
    num_rounds: int | None = None
    residuals: bool = False
    stationarity: bool = False
    until_converged: bool = False

    def over(self, rounds: int) -> bool:
        """Return whether this number of rounds ends the run."""
        return self.num_rounds is not None and rounds >= self.num_rounds

    def due(self) -> Due:
        """Return the function that decides whether an outer iteration is measured.

        The decision depends only on the number of the iteration and the rounds before and after it,
        so that a resumed run measures the same iterations.
        """
        every, num_iterations, most = self.measure_every, self.num_iterations, self.num_rounds
        if every is None:  # measure when either end of the run is a twentieth nearer
            assert most is not None
            steps = max(1, num_iterations // MEASUREMENTS)
            return lambda iteration, before, after: (
                before * MEASUREMENTS // most < after * MEASUREMENTS // most
                or (num_iterations < most and iteration % steps == 0)
            )
        if not self.measure_growth:
            return lambda iteration, before, after: iteration % every == 0
        chosen, iteration = set(), every
        while iteration <= num_iterations:
            chosen.add(iteration)
            further = -(-math.ceil(iteration * (1 + self.measure_growth)) // every) * every
            iteration = max(iteration + every, further)
        return lambda iteration, before, after: iteration in chosen

    def unseen(self, due: Due, *, saves: bool) -> Due:
        """Return the function that decides whether a run goes on after an outer iteration without a look at it.

        due: function that decides whether an outer iteration is measured.
        saves: whether the run writes checkpoints.
        """
        every = self.checkpoint_every if saves else self.num_iterations + 1
        return lambda iteration, before, after: (
            not (
                iteration >= self.num_iterations
                or iteration % every == 0
                or self.over(after)
                or due(iteration, before, after)
            )
        )


def checked_pace(
    num_iterations: int | None,
    num_rounds: int | None = None,
    measure_every: int | None = None,
    measure_growth: float = 0.0,
    checkpoint_every: int = 1,
    residuals: bool = False,
    stationarity: bool = False,
) -> Pace:
    """Check the numbers and fill in the missing ones."""
    until_converged = num_iterations is None and num_rounds is None
    if until_converged:
        num_rounds = MOST_ROUNDS
    num_iterations, num_rounds, measure_every = (
        None if value is None else whole_number(label, value, least)
        for label, value, least in (
            ("num_iterations", num_iterations, 0),
            ("num_rounds", num_rounds, 1),
            ("measure_every", measure_every, 1),
        )
    )
    checkpoint_every = whole_number("checkpoint_every", checkpoint_every, 1)
    if not isinstance(measure_growth, int | float) or not 0 <= measure_growth <= 1:
        raise SettingError(f"measure_growth is {measure_growth!r}, expected a share between 0 and 1.")
    for label, given in (("residuals", residuals), ("stationarity", stationarity)):
        if not isinstance(given, bool):
            raise SettingError(f"{label} is {given!r}, expected True or False.")
    if measure_growth and measure_every is None and num_rounds is not None:
        raise SettingError(
            "measure_growth needs a first distance in a run that ends by rounds: give measure_every, too."
        )
    if num_iterations is None:
        assert num_rounds is not None
        num_iterations = num_rounds  # an outer iteration without a round counts as one, so that the run ends
    elif measure_every is None and num_rounds is None:
        measure_every = max(1, num_iterations // MEASUREMENTS)
    return Pace(
        num_iterations,
        measure_every,
        measure_growth,
        checkpoint_every,
        num_rounds,
        residuals,
        stationarity,
        until_converged,
    )
