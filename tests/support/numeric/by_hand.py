"""The FedBiO family on the quadratic task in plain numpy, as the papers print it.

One client, one step and one sample at a time. The only part of the library in use is `Stream`, the
addresses of draws, so that both sides have the same minibatches. A point is {"x", "y", "u"} of
vectors; a round averages the names in `mean`, and the others stay at their client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from fedbilevel.engines.simulation import Simulation
from fedbilevel.problem.draws import Stream
from fedbilevel.tasks.quadratic import Quadratic
from fedbilevel.tasks.task import Built

Point = dict[str, np.ndarray]
Where = tuple[int, int, int]  # outer iteration, call, step


def states(algorithm: Any, built: Built, num_iterations: int, **options: Any) -> Iterator[tuple[Simulation, Any]]:
    """The simulator and the state after init and after every outer iteration."""
    fed = Simulation(algorithm, built.problem, built.clients, **{"dtype": torch.float64, **options})
    state = algorithm.init(fed)
    yield fed, state
    for iteration in range(1, num_iterations + 1):
        fed.begin(iteration)
        state = algorithm.round(fed, state)
        yield fed, state


class Samples:
    """Every client's samples, and derivatives on some of them."""

    def __init__(self, task: Quadratic, *, seed: int = 0, batch_size: int | None = None) -> None:
        self.clients = task.clients()
        for client in self.clients:
            client["val"]["E"] = task.cross * client["val"].get(
                "E", np.zeros((len(client["val"]["r"]), task.dim_lower, task.dim_upper))
            )
        self.stream, self.batch_size = Stream(seed), batch_size
        self.dx, self.dy = task.dim_upper, task.dim_lower

    def __len__(self) -> int:
        return len(self.clients)

    def drawn(self, i: int, role: str, purpose: str, where: Where, times: int = 1) -> dict[str, np.ndarray]:
        fields = self.clients[i][role]
        if self.batch_size is None:
            return fields
        iteration, call, step = where
        num = torch.tensor([len(next(iter(fields.values())))])
        width, steps = self.batch_size * times, range(step, step + 1)
        index = self.stream.integers(
            f"{role}/{purpose}", torch.tensor([i]), num, iteration=iteration, call=call, steps=steps, width=width
        )
        return {name: value[index.numpy().ravel()] for name, value in fields.items()}


def gy(b: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.mean([A @ y - B @ x - c for A, B, c in zip(b["A"], b["B"], b["c"], strict=True)], axis=0)


def fx(b: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.mean([R @ x - r + E.T @ y for R, r, E in zip(b["R"], b["r"], b["E"], strict=True)], axis=0)


def fy(b: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.mean([D @ (y - t) + E @ x for D, t, E in zip(b["D"], b["t"], b["E"], strict=True)], axis=0)


def hessian(b: dict[str, np.ndarray]) -> np.ndarray:
    return b["A"].mean(0)


def jacobian(b: dict[str, np.ndarray]) -> np.ndarray:
    """d/dx of g_y, transposed: (d_x, d_y)."""
    return -b["B"].mean(0).T


def global_directions(samples: Samples, i: int, p: Point, where: Where, purposes: str, times: int = 1) -> Point:
    """f_x - J u, g_y, H u - f_y; purposes: the streams of g_y, f_x, f_y, J, H."""
    b_y, b_f1, b_f2, b_g1, b_g2 = purposes.split()
    train = lambda purpose: samples.drawn(i, "train", purpose, where, times)
    val = lambda purpose: samples.drawn(i, "val", purpose, where, times)
    return {
        "x": fx(val(b_f1), p["x"], p["y"]) - jacobian(train(b_g1)) @ p["u"],
        "y": gy(train(b_y), p["x"], p["y"]),
        "u": hessian(train(b_g2)) @ p["u"] - fy(val(b_f2), p["x"], p["y"]),
    }


def neumann_directions(samples: Samples, i: int, p: Point, where: Where, tau: float, Q: int, times: int = 1) -> Point:
    """Eq. (11) letter by letter, with dense products, and g_y."""
    train = lambda purpose: samples.drawn(i, "train", purpose, where, times)
    upper = samples.drawn(i, "val", "xi", where, times)
    total = np.zeros((samples.dy, samples.dy))
    for q in range(-1, Q):
        product = np.eye(samples.dy)
        for j in range(Q - q, Q + 1):
            product = product @ (
                np.eye(samples.dy) - tau * hessian(train(f"zeta_{Q + 1 - j}"))
            )  # the library counts factors as they are applied
        total += product
    return {
        "x": fx(upper, p["x"], p["y"]) - tau * jacobian(train("zeta_0")) @ total @ fy(upper, p["x"], p["y"]),
        "y": gy(train("B_y"), p["x"], p["y"]),
    }


Directions = Callable[..., Point]  # (client, point, where, times=1)
Drops = Callable[[int, int], Iterable[int]]


def step(p: Point, directions: Point, rates: Point, radius: float | None = None) -> Point:
    new = {name: p[name] - rates[name] * directions[name] for name in p}
    if radius is not None and "u" in new and np.linalg.norm(new["u"]) > radius:
        new["u"] = radius / np.linalg.norm(new["u"]) * new["u"]
    return new


def average(rows: list[Point], names: str, present: list[int]) -> list[Point]:
    means = {name: np.mean([rows[i][name] for i in present], axis=0) for name in rows[0] if name in names}
    return [{**row, **means} for row in rows]


def plain_rounds(
    start: Point,
    num: int,
    directions: Directions,
    counts: list[int],
    rates: Any,
    mean: str,
    radius: float | None = None,
) -> Iterator[list[Point]]:
    """Algorithms 2 and 3: local steps, then means.

    Yields all points at the start and after each round.
    """
    points = [start for _ in counts]
    yield points
    for k in range(1, num + 1):
        for i, count in enumerate(counts):
            for s in range(count):
                points[i] = step(points[i], directions(i, points[i], (k, 1, s)), rates, radius)
        points = average(points, mean, list(range(len(counts))))
        yield points


def storm_rounds(
    start: Point,
    num: int,
    directions: Directions,
    counts: list[int],
    rates: Any,
    mean: str,
    *,
    delta: float,
    offset: float,
    weights: dict[str, float],
    radius: float | None = None,
    drops: Drops = lambda k, call: (),
) -> Iterator[tuple[list[Point], list[Point]]]:
    """Algorithms 1 and 4. Yields all points and estimates at the start and after each pair of rounds."""
    everyone, I = list(range(len(counts))), max(counts)
    a = lambda t: delta / (offset + t) ** (1 / 3)
    points: list[Point] = [start for _ in counts]
    est = average([directions(i, start, (0, 1, 0), times=I) for i in everyone], mean, everyone)
    yield points, est

    def storm(i: int, t: int, new: Point, old: Point, e: Point, where: Where) -> Point:
        now, before = directions(i, new, where), directions(i, old, where)
        return {name: now[name] + (1 - weights[name] * a(t) ** 2) * (e[name] - before[name]) for name in e}

    for k in range(1, num + 1):
        present = [i for i in everyone if i not in set(drops(k, 1))]
        old, hat, own = {}, list(points), list(est)
        for i in present:
            for s in range(counts[i]):
                t = (k - 1) * I + s + 1
                old[i] = hat[i]
                hat[i] = step(old[i], own[i], {name: rate * a(t) for name, rate in rates.items()}, radius)
                if s < counts[i] - 1:
                    own[i] = storm(i, t, hat[i], old[i], own[i], (k, 1, s + 1))
        points = average(hat, mean, present)
        # a client whose own x or y is part of the point has none of this round if it missed the first half
        present = [i for i in everyone if i not in set(drops(k, 2)) and (i in old or set(start) <= set(mean))]
        for i in everyone:  # one that does not answer keeps the estimates it had before the round
            est[i] = storm(i, k * I, points[i], old.get(i, points[i]), own[i], (k, 2, 0)) if i in present else est[i]
        est = average(est, mean, present)
        yield points, est
