"""Run an algorithm for a few outer iterations in float64, and find its fixed points."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from fedbilevel.engines import simulate
from fedbilevel.engines.peer_simulation import PeerSimulation
from fedbilevel.engines.simulation import Simulation
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.task import Built


def drive(
    algorithm: Any, built: Built, num_iterations: int, *, engine: Any = simulate, **options: Any
) -> tuple[Any, Any]:
    """The simulation (with a server or of peers) and the state after `num_iterations` iterations."""
    fed = engine(algorithm, built.problem, built.clients, **{"dtype": torch.float64, **options})
    state = algorithm.init(fed)
    for iteration in range(1, num_iterations + 1):
        fed.begin(iteration)
        state = algorithm.round(fed, state)
    return fed, state


def brief(kind: Any) -> Any:
    """An algorithm that does twice what it would do often."""
    return kind(**fewer(kind))


def fewer(kind: Any) -> dict[str, int]:
    """Settings with two steps or terms: a contract that holds for two holds for more."""
    often = {"num_local_steps", "num_terms", "num_factors", "num_lower_rounds", "num_lower_steps"}
    return dict.fromkeys(often & {spec.name for spec in dataclasses.fields(kind)}, 2)


def start_at(task: Quadratic, x: Any, y: Any) -> Built:
    """The task with another initial point."""
    built = task.build()
    x0, y0 = {"x": torch.as_tensor(x)}, {"y": torch.as_tensor(y)}
    return Built(
        dataclasses.replace(built.problem, x0=(lambda sizes: x0) if task.upper == "private" else x0, y0=y0),
        built.clients,
    )


def relative(value: Any, target: Any) -> float:
    """|value - target| / |target|."""
    value, target = torch.as_tensor(value, dtype=torch.float64), torch.as_tensor(target, dtype=torch.float64)
    return float(torch.linalg.vector_norm(value - target) / torch.linalg.vector_norm(target))


def fixed_point(algorithm: Any, built: Any) -> tuple[dict[str, torch.Tensor], float]:
    """The fixed point and the spectral radius of an outer iteration on a quadratic.

    There the outer iteration is an affine map of the state. The radius is below one if and only if
    the algorithm converges to the fixed point from every start.
    """
    fed = Simulation(algorithm, built.problem, built.clients, dtype=torch.float64)
    first = algorithm.init(fed)
    given = {name: value for name, value in first._asdict().items() if value is not None}
    shapes = {name: fed.collect(value).shape for name, value in given.items()}
    sizes = [shape.numel() for shape in shapes.values()]

    def outer(vector: torch.Tensor) -> torch.Tensor:
        parts = zip(shapes.items(), vector.split(sizes), strict=True)
        state = first._replace(**{name: fed.place(name, part.reshape(shape)) for (name, shape), part in parts})
        fed.begin(1)
        new = algorithm.round(fed, state)._asdict()
        return torch.cat([fed.collect(new[name]).flatten() for name in shapes])

    eye = torch.eye(sum(sizes), dtype=torch.float64)
    constant = outer(torch.zeros(sum(sizes), dtype=torch.float64))
    matrix = torch.stack([outer(unit) - constant for unit in eye], dim=1)
    fixed = torch.linalg.solve(eye - matrix, constant)
    points = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), fixed.split(sizes), strict=True)}
    return points, float(torch.linalg.eigvals(matrix).abs().max())


def check_continues(algorithm: Any, built: Built, **where: Any) -> None:
    """Assert that resuming from a checkpoint changes nothing.

    Two outer iterations, a checkpoint and three more in a new simulation give the same checkpoint
    as five.
    """
    where = where or {"cohort": Cohort() if algorithm.needs_everyone else Cohort(0.5)}
    options = {"seed": 3, "batch_size": 2, "dtype": torch.float64, **where}
    whole, state = drive(algorithm, built, 5, **options)
    tensors, plain = whole.state_dict(state)
    half, middle = drive(algorithm, built, 2, **options)
    saved = half.state_dict(middle)
    resumed = simulate(algorithm, built.problem, built.clients, **options)
    state = resumed.load_state_dict(
        {name: value.clone() for name, value in saved[0].items()}, saved[1], algorithm.State
    )
    for iteration in (3, 4, 5):
        resumed.begin(iteration)
        state = algorithm.round(resumed, state)
    again, plain_again = resumed.state_dict(state)
    assert plain_again == plain
    assert again.keys() == tensors.keys()
    for name, value in tensors.items():
        assert torch.equal(again[name], value), name


# ---- peers without a server ----------------------------------------------------------------------------------------


def settled_peers(
    algorithm: Any, built: Built, network: Any, **held: torch.Tensor
) -> tuple[dict[str, torch.Tensor], float]:
    """The fixed point of peers on a constant network and a quadratic, and the spectral radius.

    The outer iteration is an affine map of the state, but not every state can occur: the memory of
    a correction depends on past states (the memories of the peers have a constant sum), and in the
    other directions the map is the identity. So the map is restricted to the subspace that is
    reachable from all starts of `init`. held: parts of the state that keep their value, in which
    the map is not affine.
    """
    peers = PeerSimulation(algorithm, built.problem, built.clients, network=network, dtype=torch.float64)
    shapes = {name: value.shape for name, value in algorithm.init(peers)._asdict().items() if name not in held}
    sizes = [shape.numel() for shape in shapes.values()]

    def flat(state: Any) -> torch.Tensor:
        return torch.cat([getattr(state, name).flatten() for name in shapes])

    def named(vector: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), vector.split(sizes), strict=True)
        }

    def outer(vector: torch.Tensor) -> torch.Tensor:
        peers.begin(1)
        return flat(algorithm.round(peers, algorithm.State(**named(vector), **held)))

    def started(point: torch.Tensor) -> torch.Tensor:
        x, y = (
            part.reshape(rows.shape)
            for part, rows in zip(point.split([rows.numel() for rows in zero]), zero, strict=True)
        )
        peers.initial = lambda: (x, y)  # type: ignore[method-assign]
        return flat(algorithm.init(peers))

    zero = peers.initial()
    start = started(torch.zeros(sum(rows.numel() for rows in zero), dtype=torch.float64))
    units = [started(unit) - start for unit in torch.eye(sum(rows.numel() for rows in zero), dtype=torch.float64)]
    constant = outer(torch.zeros(sum(sizes), dtype=torch.float64))
    matrix = torch.stack([outer(unit) - constant for unit in torch.eye(sum(sizes), dtype=torch.float64)], dim=1)
    moved = matrix @ start + constant - start
    reached, fresh = matrix[:, :0], torch.stack([*units, moved], dim=1)
    while fresh.shape[1]:
        for _ in range(2):  # once is not enough for 1e-9
            fresh = fresh - reached @ (reached.T @ fresh)
        directions, lengths, _ = torch.linalg.svd(fresh, full_matrices=False)
        fresh = directions[:, lengths > 1e-9]
        reached, fresh = torch.cat([reached, fresh], dim=1), matrix @ fresh
    inside = reached.T @ matrix @ reached
    fixed = start + reached @ torch.linalg.solve(
        torch.eye(len(inside), dtype=torch.float64) - inside, reached.T @ moved
    )
    return named(fixed), float(torch.linalg.eigvals(inside).abs().max())


# ---- small quadratics for methods that train the lower level alone -------------------------------------------------

X0, Y0 = np.array([0.7, -1.1]), np.array([1.5, -0.4, 0.8])


def small(**settings: Any) -> Quadratic:
    return Quadratic(**{"num_clients": 3, "dim_upper": 2, "dim_lower": 3, **settings})


class Drawing(Simulation):
    """A server that draws what the test says, so that a test can go through every value of Q."""

    drawn = 0

    def draw(self, purpose: str, high: int) -> int:
        assert 0 <= self.drawn < high
        return self.drawn
