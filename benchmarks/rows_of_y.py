"""Memory of a run at its peak, in rows of y per client, counted and not measured."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.clock import Row, Setup
from fedbilevel import discovery
from fedbilevel.engines.rounds import one_round
from fedbilevel.engines.simulation import Simulation
from fedbilevel.oracle.alive import Alive
from fedbilevel.problem.problem import Problem
from fedbilevel.tasks.task import Built

TITLE = "Rows of y per client at the peak"
ABOUT = """The most bytes of tensors that existed at the same time in the first outer iterations, start included,
divided by the number of clients and the bytes of y in float32. Every result of every operation is counted, so that the
figures are the same on every machine, and `auto` does not time its ways; memory that a kernel uses within an operation
is not counted. 8 clients, a network with one hidden layer and 1.06 million weights (y), weights of 10 classes (x),
batches of 4 and 2 local steps, on a CPU. `in turn`: `loop` with one client at work at a time (`chunk_size=1`); with
rows of this length, the other ways choose this by themselves. Goal: FedBiO takes at most 6 rows."""
HEADINGS = {"y_rows": "rows of y", "start_rows": "of them at the start"}

AIM = 6.0
CLIENTS, BATCH, CLASSES = 8, 4, 10
ALGORITHMS = ("fedbio", "fbo_aggitd", "fedbioacc", "penalty")
WAYS: dict[str, dict[str, Any]] = {
    "auto": {"strategy": "auto"},
    "loop": {"strategy": "loop"},
    "in turn": {"strategy": "loop", "chunk_size": 1},
}


def rows(setup: Setup) -> list[Row]:
    width = 32 if setup.small else 1024
    return [row_of(name, way, width) for name in ALGORITHMS for way in WAYS]


def row_of(name: str, way: str, width: int) -> Row:
    start, peak = peaks(name, width, **WAYS[way])
    return {
        "name": name,
        "what": way,
        "y_rows": peak,
        "start_rows": start,
        **({"aim": AIM} if name == "fedbio" else {}),
    }


def peaks(name: str, width: int, *, clients: int = CLIENTS, iterations: int = 3, **options: Any) -> tuple[float, float]:
    """Return the peaks of the start of a run and of the whole run, in rows of y per client."""
    algorithm: Any = discovery.algorithm(name)(**{"num_local_steps": 2})
    built = network(width, clients)
    with Alive() as alive:
        fed = Simulation(algorithm, *built, batch_size=BATCH, **options)
        fed.host.oracle.long = math.inf  # a timing would choose ways by the machine
        start, state = alive.peak, algorithm.init(fed)
        for iteration in range(1, iterations + 1):
            fed.begin(iteration)
            with torch.no_grad():
                state = one_round(fed, algorithm, state)
            fed.check()
    row = 4 * sum(leaf.numel() for leaf in built.problem.y0.values()) * clients
    return start / row, alive.peak / row


def network(width: int, clients: int) -> Built:
    """Return clients with random images and a network with one hidden layer."""

    def entropy(y: Any, batch: Any) -> Tensor:
        return cross_entropy((batch["image"] @ y["first"]).tanh() @ y["second"], batch["label"], reduction="none")

    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator) / shape[0] ** 0.5
    problem = Problem(
        upper=lambda x, y, batch: entropy(y, batch),
        lower=lambda x, y, batch: x["logit"].sigmoid()[batch["label"]] * entropy(y, batch),
        x0={"logit": torch.zeros(CLASSES)},
        y0={"first": normal(width, width), "second": normal(width, CLASSES)},
    )
    return Built(problem, [_client(width, client) for client in range(clients)])


def _client(width: int, client: int) -> dict[str, dict[str, np.ndarray]]:
    draw = np.random.default_rng(client)
    one = lambda: {"image": draw.standard_normal((4 * BATCH, width)), "label": draw.integers(CLASSES, size=4 * BATCH)}
    return {"train": one(), "val": one()}
