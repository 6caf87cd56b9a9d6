"""Runs behind two pictures: `python -m website.facts` writes facts.json.

heterogeneity: x has two entries, so that a picture can show the paths of runs. FedBiO shares one u;
LFedNest averages hypergradients that every client computes with its own Hessian. Both start at the
same point, with clients that differ. Also the distance of the end from the solution, for increasing
differences between clients. push_sum: six peers on a directed network that changes at every step
compute the mean of their six numbers.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedbilevel
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.lfednest import LFedNest
from fedbilevel.algorithms.sgp import SGP
from fedbilevel.engines import simulate
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.errors import ScopeWarning
from fedbilevel.federation.network import Network
from fedbilevel.tasks.quadratic import Quadratic

PLACE = Path(__file__).with_name("facts.json")
COMMAND = "python -m website.facts"
TASK: dict[str, Any] = {"dim_upper": 2, "num_clients": 4, "data_seed": 3}
STEPS: dict[str, Any] = {"lr_upper": 0.03, "lr_lower": 0.15, "lr_system": 0.15, "num_local_steps": 1}
METHODS: dict[str, Any] = {"fedbio": FedBiO(**STEPS), "lfednest": LFedNest(**STEPS, num_factors=40)}
LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
SHOWN = (0, 1, 2, 3, 4, 6, 8, 10, 13, 16, 20, 25, 32, 40, 50, 64, 80, 100, 140, 200, 300, 400)


def path(name: str, num_iterations: int, **task: Any) -> np.ndarray:
    """x after every outer iteration, from the initial point on."""
    built = Quadratic(**{**TASK, **task}).build()
    fed: Any = simulate(METHODS[name], built.problem, built.clients, dtype=torch.float64)
    fed.begin(0)
    state = METHODS[name].init(fed)
    points = [fed.trees(state.x, upper=True)["x"].numpy().copy()]
    for iteration in range(1, num_iterations + 1):
        fed.begin(iteration)
        with torch.no_grad():
            state = METHODS[name].round(fed, state)
        points.append(fed.trees(state.x, upper=True)["x"].numpy().copy())
    return np.array(points)


def apart(name: str, num_iterations: int, level: float) -> float:
    """How far from the solution a run ends."""
    solution = Quadratic(**{**TASK, "heterogeneity": level}).closed_form().solution()
    return float(np.linalg.norm(path(name, num_iterations, heterogeneity=level)[-1] - solution))


def heterogeneity(num_iterations: int = 400) -> dict[str, Any]:
    closed = Quadratic(**TASK).closed_form()
    start = np.zeros(2)
    columns = [closed.hypergradient(unit) - closed.hypergradient(start) for unit in np.eye(2)]
    own = Quadratic(**TASK, lower="local").closed_form()  # each with its own y and u
    alone = own._replace(private=True).hypergradient(np.broadcast_to(start, (TASK["num_clients"], 2)))
    away = {name: [apart(name, num_iterations, level) for level in LEVELS] for name in METHODS}
    return {
        "task": TASK,
        "steps": STEPS,
        "num_iterations": num_iterations,
        "solution": closed.solution().tolist(),
        "curvature": np.stack(columns, 1).tolist(),
        "true": (-closed.hypergradient(start)).tolist(),
        "local": (-alone).tolist(),
        "paths": {
            name: path(name, num_iterations)[[at for at in SHOWN if at <= num_iterations]].tolist() for name in METHODS
        },
        "levels": list(LEVELS),
        "distance": away,
    }


def push_sum(num_steps: int = 14) -> dict[str, Any]:
    network = Network(kind="random_directed", lowest=0.2, highest=0.5, seed=2)
    task = Quadratic(num_clients=6, dim_lower=1, dim_upper=1)
    built = task.build()
    peers: Any = PeerSimulation(SGP(), built.problem, built.clients, network=network, dtype=torch.float64)
    rows, weights = (
        torch.tensor([[1.0], [9.0], [3.0], [7.0], [2.0], [5.0]], dtype=torch.float64),
        torch.ones(6, 1, dtype=torch.float64),
    )
    steps = [(rows, weights)]
    peers.begin(1)
    for _ in range(num_steps):
        weights, rows = peers.push(weights, y=rows)
        steps.append((rows, weights))
    return {
        "network": network.asdict(),
        "mean": float(steps[0][0].mean()),
        "rows": [row[:, 0].tolist() for row, _ in steps],
        "weights": [weight[:, 0].tolist() for _, weight in steps],
    }


def recorded() -> dict[str, Any]:
    return json.loads(PLACE.read_text())


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ScopeWarning)
    content = {
        "version": fedbilevel.__version__,
        "command": COMMAND,
        "heterogeneity": heterogeneity(),
        "push_sum": push_sum(),
    }
    PLACE.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
