"""FedBiO with one client and one local step is SOBA, whose v is -u.

SOBA is Algorithm 1 of Dagreou, Ablin, Vaiter, Moreau, "A framework for bilevel optimization that
enables stochastic and global variance reduction algorithms", NeurIPS 2022:

    z <- z - rho * grad_z G(z, x)
    v <- v - rho * (H v + grad_z F)
    x <- x - gamma * (J v + grad_x F)
"""

from __future__ import annotations

import numpy as np
import pytest

from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.by_hand import Samples, states


@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_fedbio_is_soba(batch_size: int | None) -> None:
    rho, gamma = 0.21, 0.06
    task = Quadratic(num_clients=1, dim_upper=3, dim_lower=4, num_samples=5, cross=0.4)
    samples = Samples(task, seed=11, batch_size=batch_size)
    algorithm = FedBiO(lr_upper=gamma, lr_lower=rho, lr_system=rho, num_local_steps=1, minibatches="shared")
    z, v, x = np.zeros(4), np.zeros(4), np.zeros(3)
    for k, (_, state) in enumerate(states(algorithm, task.build(), 8, seed=11, batch_size=batch_size)):
        if k > 0:
            inner, outer = samples.drawn(0, "train", "B_g", (k, 1, 0)), samples.drawn(0, "val", "B_f", (k, 1, 0))
            H, B, c = (np.mean(inner[name], axis=0) for name in "ABc")
            E = np.mean(outer["E"], axis=0)
            grad_z = np.mean([D @ (z - t) for D, t in zip(outer["D"], outer["t"], strict=True)], axis=0) + E @ x
            grad_x = np.mean(outer["R"], axis=0) @ x - np.mean(outer["r"], axis=0) + E.T @ z
            D_z, D_v, D_x = H @ z - B @ x - c, H @ v + grad_z, -B.T @ v + grad_x
            z, v, x = z - rho * D_z, v - rho * D_v, x - gamma * D_x
        for value, target in ((state.y, z), (state.u, -v), (state.x, x)):
            np.testing.assert_allclose(value.numpy(), target, rtol=1e-12, atol=1e-14)
    assert min(np.linalg.norm(x), np.linalg.norm(z), np.linalg.norm(v)) > 0.1
