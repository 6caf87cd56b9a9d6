"""Training, and training again without single instances.

With gradient push, all retrainings run side by side in one simulation. Every removal is an island:
a copy of the clients with one mask entry at zero. No message passes between islands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms.sgp import SGP, Schedule, gradient_push
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import debiased
from fedbilevel.federation.clients import BatchSize
from fedbilevel.federation.network import AnyNetwork, Network, given
from fedbilevel.oracle.hypergradient import lower_solution
from fedbilevel.oracle.population import Population
from fedbilevel.problem.draws import Stream
from fedbilevel.settings import Settings, setting
from fedbilevel.studies.influence.predict import check_scopes
from fedbilevel.tasks.task import Built

_PEERS = 1000  # limit of one simulation of islands: networks between peers are matrices
_COPIES = 2**30  # bytes of copied data in one simulation of islands

Place = tuple[int, int]  # client, sample


@dataclass(frozen=True, kw_only=True)
class Training(Settings):
    """Training of y at a fixed x.

    The kind `newton` computes y*(x) to machine precision, for convex lower levels. The kind `push`
    takes a fixed number of steps of gradient push on the network, from the initial point.
    """

    kind: Literal["newton", "push"] = setting(
        "newton", "how the model is trained, and trained again without an instance"
    )
    lr: float = setting(0.1, "push: step of y", symbol="gamma", above=0)
    num_steps: int = setting(1000, "push: steps of y", symbol="T", least=1)
    schedule: Schedule = setting(
        "milestones", "push: the step falls tenfold at 5/6 and at 11/12 of the steps, or not at all"
    )


class Trained(NamedTuple):
    """Models after each removal (None: no removal): y with one row per client, and sum_k f_k."""

    y: Tensor  # (removals, n, d_y)
    loss: Tensor  # (removals,) float64


def train(
    built: Built,
    training: Training,
    removals: Sequence[Place | None] = (None,),
    *,
    start: Tensor | None = None,
    network: AnyNetwork | None = None,
    seed: int = 0,
    batch_size: BatchSize = None,
    **options: Any,
) -> Trained:
    """Train at x = 1 without one instance, for each of `removals`.

    start: initial point of Newton's method; gradient push starts at the problem's initial point.
    """
    check_scopes(built.problem)
    with torch.no_grad():
        if training.kind == "push":
            network = network if network is not None else Network()
            return _pushed(built, training, removals, network, seed, batch_size, options)
        population = Population(built.problem, built.clients, **options)
        val = population.data.batch(torch.arange(len(population)), "val")
        ys, losses = [], []
        for place in removals:
            x = _masked(population.x0, [place])
            y = lower_solution(population, x, start)
            ys.append(y.expand(len(population), -1))
            losses.append(population.oracle.evaluate(built.problem.upper, x, y, val).double().sum().cpu())
        return Trained(torch.stack(ys), torch.stack(losses))


def _masked(x: Tensor, removals: Sequence[Place | None]) -> Tensor:
    """Return the rows of x of all islands in sequence, each without its instance."""
    n = len(x) // len(removals)
    x = x.clone()
    for island, place in enumerate(removals):
        if place is not None:
            x[island * n + place[0], place[1]] = 0
    return x


class _IslandStream(Stream):
    """A stream that gives each client of an island the draws of the original client.

    So all islands use the same minibatches.
    """

    def __init__(self, seed: int, num_clients: int) -> None:
        super().__init__(seed)
        self.num_clients = num_clients

    def _drawn(self, purpose: str, ids: Tensor, *rest: Any) -> Tensor:
        return super()._drawn(purpose, ids % self.num_clients, *rest)


def _pushed(
    built: Built,
    training: Training,
    removals: Sequence[Place | None],
    network: AnyNetwork,
    seed: int,
    batch_size: BatchSize,
    options: Mapping[str, Any],
) -> Trained:
    num, steps = len(removals), training.num_steps
    sgp = SGP(lr_lower=training.lr, num_lower_steps=steps, lower_schedule=training.schedule)
    n, links = len(built.clients), network.between(len(built.clients))
    peers: Any = PeerSimulation(
        sgp,
        built.problem,
        list(built.clients) * num,
        network=_islands(links, num, faulty=network.faulty),
        check_connected=False,
        seed=seed,
        batch_size=batch_size,
        **options,
    )
    peers.links.period = links.period
    peers.host.stream = _IslandStream(seed, n)
    x = _masked(peers.host.x0, removals)
    _, y = peers.initial()
    z, w = gradient_push(peers, x, y, peers.weights, lr=training.lr, num_steps=steps, schedule=training.schedule)
    y = debiased(z, w)
    val = peers.host.data.batch(peers.host.data.positions, "val")
    losses = peers.host.oracle.evaluate(built.problem.upper, x, y, val).double().cpu()
    return Trained(y.view(num, n, -1), losses.view(num, n).sum(1))


def _islands(links: Any, num: int, *, faulty: bool) -> AnyNetwork:
    """Return a network of `num` copies of the clients, without links between copies."""
    if links.shares == "base" or (links.shares == "fastest" and num > 1):
        raise SettingError(
            f"{links.shares} shares of islands differ from those of one island, so retraining would differ from "
            "training: use a network with metropolis shares."
        )
    if faulty:
        raise SettingError(
            "training by gradient push loses the mass of a lost message: use a network without loss and delay, "
            "or training 'newton'."
        )
    _ = links.connected_within  # raises an error if the clients of one island are not connected
    same = torch.eye(num, dtype=torch.bool)
    adjacency = lambda step: torch.kron(same, links.adjacency(step))
    return given(links.num_peers * num, adjacency, directed=links.directed, shares=links.shares)


class Retrained(NamedTuple):
    """Actual changes of sum_k f_k by each removal, and their numerical noise.

    noise: the largest difference between trainings without any removal. Rounding differs with the
    number of islands, so changes below the noise mean nothing.
    """

    changes: Tensor
    noise: float


def retrain(
    built: Built,
    training: Training,
    base: Trained,
    removals: Sequence[Place],
    *,
    at_once: int | None = None,
    **options: Any,
) -> Retrained:
    """Return the changes of the loss by each removal, and their noise.

    A change is the difference from training without removal in the same simulation.

    at_once: removals per simulation; by default as many as fit into 1 GiB and 1000 peers.
    """
    if training.kind == "newton":
        again = train(built, training, [None, *removals], start=base.y[0, 0], **options)
        return Retrained(again.loss[1:] - again.loss[0], float((again.loss[0] - base.loss[0]).abs()))
    changes, noise = [], 0.0
    for some in _chunks(removals, at_once or _fitting(built)):
        again = train(built, training, [None, *some], **options)
        changes.append(again.loss[1:] - again.loss[0])
        noise = max(noise, float((again.loss[0] - base.loss[0]).abs()))
    return Retrained(torch.cat(changes) if changes else torch.zeros(0, dtype=torch.float64), noise)


def _chunks(removals: Sequence[Place], size: int) -> Iterator[Sequence[Place]]:
    if size < 1:
        raise SettingError(f"at_once is {size}, expected at least 1 removal per simulation.")
    return (removals[i : i + size] for i in range(0, len(removals), size))


def _fitting(built: Built) -> int:
    """Return the number of removals whose islands fit into one simulation."""
    values = (value for client in built.clients for role in client.values() for value in role.values())
    size = sum(torch.as_tensor(value).nbytes for value in values)
    return max(1, min(_COPIES // size, _PEERS // len(built.clients)) - 1)
