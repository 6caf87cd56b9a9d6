"""One step of Push-Sum between many peers with long rows, against the bytes that must move."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.clock import Row, Setup, Timing, compare, rows_of
from benchmarks.floors import Floor
from fedbilevel.algorithms.sgp import SGP
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.federation.network import Network
from fedbilevel.problem.problem import Problem

TITLE = "Push-Sum"
ABOUT = """One step between 1000 peers with rows of 100,000 float32: `engine` is `PeerSimulation.push`, with the
network of the step, the check for finite values and the ledger; `mixing` is the exchange of the rows alone, the
network being known. Sparse networks (exponential, ring): the floor is (messages to others + peers) x length of a
row x 4 bytes at the bandwidth of a copy of all rows, which takes its turn too: every row is read once per message
and every result written once. A result in new memory costs its pages on top, as the copy to new memory shows. Dense
networks (random_directed, where a peer sends to about 600 others; complete with 100 peers): the floor is one
product of the matrix and the rows in float32; the library sums in float64, and `float64 product` is what that costs
by itself."""

DENSE = ("random_directed", "complete")


def rows(setup: Setup) -> list[Row]:
    cases = [("exponential", 1000), ("ring", 1000), ("random_directed", 1000), ("complete", 100)]
    length = 100_000
    if setup.small:
        cases, length = [(kind, 8) for kind, _ in cases], 50
    return [row for kind, n in cases for row in _case(setup, kind, n, length)]


def _case(setup: Setup, kind: Any, n: int, length: int) -> list[Row]:
    fed = _engine(setup, Network(kind=kind), n)
    values = torch.randn(n, length, generator=torch.Generator().manual_seed(0)).to(setup.device)
    mixing = fed.links.mixing(0)
    messages = int(mixing.adjacency.sum()) - n
    contestants: dict[str, Any] = {"engine": lambda: fed.push(fed.weights, y=values), "mixing": lambda: mixing(values)}
    name = f"{kind}, {n} peers"
    if kind in DENSE:
        for label, dtype in (("floor", torch.float32), ("float64 product", torch.float64)):
            floor = Floor(setup, dtype)
            floor.mm(floor.full(n, n), values.to(dtype))
            contestants[label] = floor
        return rows_of(name, compare(contestants, setup, rounds=5), messages=messages, floor_is="float32 product")
    copy, target = Floor(setup), torch.empty_like(values)
    copy.also(lambda: target.copy_(values))
    place = torch.empty_like(values)
    contestants |= {
        "mixing, into memory that is there": lambda: mixing(values, into=place),
        "copy of all rows to new memory": values.clone,
    }
    timings = compare({**contestants, "copy of all rows": copy}, setup, rounds=5)
    least = timings["copy of all rows"].median * (messages + n) / (2 * n)  # a copy reads and writes every row once
    return rows_of(name, {**timings, "floor": Timing(least, 0.0)}, messages=messages, floor_is="bytes")


def _engine(setup: Setup, network: Network, n: int) -> PeerSimulation:
    """Peers of a problem of one number: `push` takes rows of any length."""
    one = {"a": np.ones((1, 1), np.float32)}
    loss = lambda x, y, batch: (batch["weight"] * (y["y"] - x["x"] - batch["a"][:, 0]) ** 2).sum()
    problem = Problem(upper=loss, lower=loss, x0={"x": torch.zeros(1)}, y0={"y": torch.zeros(1)})
    return PeerSimulation(
        SGP(), problem, [{"train": one, "val": one}] * n, network=network, check_connected=False, device=setup.device
    )
