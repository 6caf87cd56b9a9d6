"""Who gets which samples."""

from __future__ import annotations

import numpy as np

from fedbilevel.errors import ProblemError


def iid(num_samples: int, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Indices for each client, at random, sizes equal to within one sample."""
    if num_samples < num_clients:
        raise ProblemError(f"{num_samples} samples cannot be split among {num_clients} clients: use fewer clients or more data.")
    return [np.sort(part) for part in np.array_split(rng.permutation(num_samples), num_clients)]


def take_per_class(labels: np.ndarray, num_each: int, rng: np.random.Generator) -> dict[int, np.ndarray]:
    """`num_each` samples of every class, at random."""
    taken = {}
    for label in np.unique(labels):
        places = np.flatnonzero(labels == label)
        if len(places) < num_each:
            raise ProblemError(f"class {label} has {len(places)} samples, {num_each} were asked for: ask for fewer.")
        taken[int(label)] = np.sort(rng.choice(places, num_each, replace=False))
    return taken


def dirichlet(labels: np.ndarray, num_clients: int, alpha: float, rng: np.random.Generator, least: int = 1) -> list[np.ndarray]:
    """Indices for each client: the samples of every label are divided in proportions drawn from a Dirichlet distribution over the clients.

    The smaller `alpha`, the fewer clients hold most of a label. Whoever then has fewer than `least` samples receives, one by one, a random
    sample of the client that has most at that moment; drawing again until all have enough could take for ever.
    """
    if len(labels) < least * num_clients:
        raise ProblemError(f"{len(labels)} samples cannot give {num_clients} clients at least {least} each: use fewer clients or more data.")
    parts: list[list[int]] = [[] for _ in range(num_clients)]
    for label in np.unique(labels):
        places = rng.permutation(np.flatnonzero(labels == label))
        cuts = (len(places) * np.cumsum(rng.dirichlet(np.full(num_clients, alpha)))[:-1]).round().astype(int)
        for part, some in zip(parts, np.split(places, cuts), strict=True):
            part.extend(some.tolist())
    for part in parts:
        while len(part) < least:
            largest = max(parts, key=len)
            part.append(largest.pop(int(rng.integers(len(largest)))))
    return [np.sort(np.array(part, dtype=np.int64)) for part in parts]
