"""Small example run between peers that finds training samples that harm the common model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedbilevel.problem.client_data import Holdings
from fedbilevel.tasks.influence import Influence


def prepare(num_peers: int) -> tuple[dict[str, Any], Sequence[Holdings]]:
    """Return a plan and the data of every peer."""
    task = Influence(num_clients=num_peers)
    plan = {
        "name": "trial",
        "num_iterations": 1,
        "num_classes": 2,
        "task": {"name": "influence", "num_clients": num_peers},
        "algorithm": {
            "name": "hgp",
            "optimiser": "none",
            "num_lower_steps": 400,
            "lr_lower": 1.0,
            "lr_system": 0.5,
            "num_terms": 60,
        },
        "options": {"seed": 1, "network": {"kind": "random_directed"}, "averaging": {"num_steps": 8}},
    }
    return plan, task.build().clients
