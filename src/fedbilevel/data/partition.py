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
