"""Engines, which run phases at clients and carry the messages.

There is one engine for algorithms with a server and one for peers. Each runs all clients in this
process, or the clients of one rank of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch

from fedbilevel.engines import distributed
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.engines.ranks import EngineName, Group
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import Algorithm, Cohort, PeerAlgorithm
from fedbilevel.federation.stragglers import Stragglers
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem

SERVER_ONLY, PEERS_ONLY = ("cohort", "drops", "stragglers", "attack"), ("network", "averaging")


def group_of(engine: EngineName, device: torch.device | str = "cpu", timeout: float = distributed.TIMEOUT) -> Group:
    """Return the group of processes that run together.

    timeout: seconds after which a silent rank counts as lost.
    """
    if engine not in get_args(EngineName):
        raise SettingError(f"engine is {engine!r}, expected {' or '.join(map(repr, get_args(EngineName)))}.")
    distributed.check_timeout(timeout)
    return distributed.join(device, timeout) if engine == "distributed" else Group()


def simulate(
    algorithm: Algorithm, problem: Problem, clients: Sequence[Holdings], **options: Any
) -> Simulation | PeerSimulation:
    """Make an engine for all clients, or for the clients of this rank of a `group`.

    The algorithm determines whether the engine has a server or runs between peers.
    """
    peers = isinstance(algorithm, PeerAlgorithm)
    other = SERVER_ONLY if peers else PEERS_ONLY
    given = {
        name: value
        for name, value in options.items()
        if name not in (*SERVER_ONLY, *PEERS_ONLY, "aggregation") or value not in (None, Cohort(), Stragglers())
    }
    wrong = [name for name in other if name in given]
    if wrong:
        kind = "runs between peers without a server" if peers else "has a server"
        raise SettingError(f"{algorithm.name()} {kind} and does not use {wrong[0]}: leave {wrong[0]} out.")
    if isinstance(algorithm, PeerAlgorithm):
        return PeerSimulation(algorithm, problem, clients, **given)
    return Simulation(algorithm, problem, clients, **given)
