"""What many tests need: drive an algorithm for a few outer iterations in float64 and look at where it went."""

from __future__ import annotations

from typing import Any

import torch

from fedbilevel.engines.simulation import Simulation
from fedbilevel.tasks.task import Built


def drive(algorithm: Any, built: Built, num_iterations: int, **options: Any) -> tuple[Simulation, Any]:
    """The simulator after `num_iterations` outer iterations, and the state."""
    fed = Simulation(algorithm, built.problem, built.clients, **{"dtype": torch.float64, **options})
    state = algorithm.init(fed)
    for iteration in range(1, num_iterations + 1):
        fed.begin(iteration)
        state = algorithm.round(fed, state)
    return fed, state


def relative(value: Any, target: Any) -> float:
    """|value - target| / |target|."""
    value, target = torch.as_tensor(value, dtype=torch.float64), torch.as_tensor(target, dtype=torch.float64)
    return float(torch.linalg.vector_norm(value - target) / torch.linalg.vector_norm(target))
