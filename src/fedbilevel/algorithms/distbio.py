"""DistBiO: FedBiO-Local with a round after every step, a reference for methods with local steps.

Use it when every client has its own lower level and you want a distributed baseline without drift.
It costs one round of d_x floats per step; FedBiO-Local takes several steps per round.

    y_i <- y_i - gamma * g_y,i;   x <- x - eta * mean Phi_i

It is FedBiO-Local with I = 1, hence a subclass.

Reference: Li, Huang, Huang, "Communication-Efficient Federated Bilevel Optimization with Global and
Local Lower Level Problems", NeurIPS 2023, section 5.2.

Deviations: those of FedBiO-Local.

Bias: only that of the Neumann series. x is the same at all clients before every step, so there is
no drift.

Cost per outer iteration: 1 round; d_x floats each way; per client one of each of g_y, f_x, f_y,
J v, and Q products H v (`local`: one).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedbilevel.algorithms.fedbio_local import FedBiOLocal


@dataclass(frozen=True, kw_only=True)
class DistBiO(FedBiOLocal):
    num_local_steps: ClassVar[int] = 1  # type: ignore[misc]  # no setting any more
