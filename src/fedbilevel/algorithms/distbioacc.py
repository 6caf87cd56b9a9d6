"""DistBiOAcc: FedBiOAcc-Local with both rounds after every step, a reference for local steps.

Use it when every client has its own lower level, gradients are noisy, and you want a distributed
baseline without drift. It costs two rounds of d_x floats per step; FedBiOAcc-Local takes several
steps in as many rounds.

    y_i <- y_i - gamma a om_i;   x <- x - eta a nu
    then STORM for om_i and nu on one minibatch, and nu <- mean

It is FedBiOAcc-Local with I = 1, hence a subclass.

Reference: Li, Huang, Huang, "Communication-Efficient Federated Bilevel Optimization with Global and
Local Lower Level Problems", NeurIPS 2023, section 5.2.

Deviations: those of FedBiOAcc-Local.

Bias: only that of the Neumann series. x is the same at all clients before every step, so there is
no drift.

Cost per outer iteration: 2 rounds; 2 d_x floats each way; per client two of each of g_y, f_x, f_y,
J v, and 2 Q products H v (`local`: two). Once, before the first: 1 round; d_x floats each way; per
client one of each and Q (or one) products H v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedbilevel.algorithms.fedbioacc_local import FedBiOAccLocal


@dataclass(frozen=True, kw_only=True)
class DistBiOAcc(FedBiOAccLocal):
    num_local_steps: ClassVar[int] = 1  # type: ignore[misc]  # no setting any more
