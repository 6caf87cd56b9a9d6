"""Engines: who computes and who talks to whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedbilevel.data.clients import Holdings
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import SettingError
from fedbilevel.federation import Algorithm, Cohort, PeerAlgorithm
from fedbilevel.problem import Problem

SERVER_ONLY, PEERS_ONLY = ("cohort", "drops"), ("network", "averaging")


def simulate(algorithm: Algorithm, problem: Problem, clients: Sequence[Holdings], **options: Any) -> Simulation | PeerSimulation:
    """All clients in this process: with a server, or as peers, as the algorithm asks for."""
    peers = isinstance(algorithm, PeerAlgorithm)
    other = SERVER_ONLY if peers else PEERS_ONLY
    given = {name: value for name, value in options.items() if name not in (*SERVER_ONLY, *PEERS_ONLY) or value not in (None, Cohort())}
    wrong = [name for name in other if name in given]
    if wrong:
        kind = "runs between peers without a server" if peers else "has a server"
        raise SettingError(f"{algorithm.name()} {kind}, so {wrong[0]} means nothing to it: leave it out.")
    if isinstance(algorithm, PeerAlgorithm):
        return PeerSimulation(algorithm, problem, clients, **given)
    return Simulation(algorithm, problem, clients, **given)
