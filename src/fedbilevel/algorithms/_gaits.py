"""Gaits of the candidates of `self_tuned`."""

from __future__ import annotations

from typing import NamedTuple


class Gait(NamedTuple):
    """How fast one candidate moves.

    lower, system: share of the step 1 / curvature that y and u take.
    momentum: largest share of the last step that is added to the next.
    promise: largest share of the range of losses by which a step of x promises to lower the loss.
    brake: lag of y and u above which the steps of x are shortened.
    wait: outer iterations after which x moves although y is not warmed up.
    fits: whether y minimises g + r f, with an r that grows while held-out samples surely gain; x is
        that of the safe candidate.
    weight: r of a candidate whose y minimises g + r f with its own x, as a share of |g_y| / |f_y| at
        the start.
    """

    lower: float = 0.9
    system: float = 0.9
    momentum: float = 0.9
    promise: float = 0.05
    brake: float = 0.15
    wait: int = 10
    fits: bool = False
    weight: float = 0.0


GAITS = {  # by the ending of the names of a candidate's variables
    "": Gait(),
    "_slow": Gait(lower=0.2, system=0.2, momentum=0.0, promise=0.1, weight=0.1),
    "_eager": Gait(promise=0.2, brake=0.5, wait=3),
    "_fit": Gait(fits=True),
}
SAFE = "_slow"  # the answer, unless another candidate is surely better; slow steps fit noise last
