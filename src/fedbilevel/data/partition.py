"""Partitions of samples over clients."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from fedbilevel.errors import ProblemError


def iid(num_samples: int, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Return random indices for each client; the numbers of samples differ by at most one."""
    if num_samples < num_clients:
        raise ProblemError(
            f"{num_samples} samples cannot be split among {num_clients} clients: use fewer clients or more data."
        )
    return [np.sort(part) for part in np.array_split(rng.permutation(num_samples), num_clients)]


def take_per_class(labels: np.ndarray, num_each: int, rng: np.random.Generator) -> dict[int, np.ndarray]:
    """Return `num_each` random samples of every class."""
    taken = {}
    for label in np.unique(labels):
        places = np.flatnonzero(labels == label)
        if len(places) < num_each:
            raise ProblemError(f"class {label} has {len(places)} samples, {num_each} were requested: request fewer.")
        taken[int(label)] = np.sort(rng.choice(places, num_each, replace=False))
    return taken


def dirichlet(
    labels: np.ndarray, num_clients: int, alpha: float, rng: np.random.Generator, least: int = 1
) -> list[np.ndarray]:
    """Return indices for each client: the samples of every label in Dirichlet proportions.

    With a smaller `alpha`, fewer clients hold most samples of a label. A client with fewer than
    `least` samples receives random samples, one by one, from the client that has the most samples
    at that moment. Drawing again until all clients have enough samples might never end.
    """
    if num_clients < 1 or not alpha > 0:
        raise ProblemError(
            f"alpha is {alpha} for {num_clients} clients, expected a value greater than 0 for at least one client."
        )
    if len(labels) < least * num_clients:
        raise ProblemError(
            f"{len(labels)} samples cannot give {num_clients} clients at least {least} each: use fewer clients or "
            "more data."
        )
    parts: list[list[int]] = [[] for _ in range(num_clients)]
    for label in np.unique(labels):
        places = rng.permutation(np.flatnonzero(labels == label))
        cuts = (len(places) * np.cumsum(rng.dirichlet(np.full(num_clients, alpha)))[:-1]).round().astype(int)
        for part, some in zip(parts, np.split(places, cuts), strict=True):
            part.extend(some.tolist())
    return _filled(parts, least, rng)


def _filled(parts: list[list[int]], least: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Give samples of the largest client to clients with fewer than `least`."""
    for part in parts:
        while len(part) < least:
            largest = max(parts, key=len)
            part.append(largest.pop(int(rng.integers(len(largest)))))
    return [np.sort(np.array(part, dtype=np.int64)) for part in parts]


def shards(labels: np.ndarray, num_clients: int, per_client: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Return indices for each client: `per_client` random shards of the samples sorted by label.

    There are num_clients * per_client shards, whose sizes differ by at most one sample. So a client
    has about `per_client` labels. The samples of a label are spread over its shards at random.

    The method is that of McMahan et al., "Communication-Efficient Learning of Deep Networks from
    Decentralized Data", 2017, who use two shards per client.
    """
    num = num_clients * per_client
    if num_clients < 1 or per_client < 1 or len(labels) < num:
        raise ProblemError(
            f"{len(labels)} samples cannot be cut into {per_client} shards for each of {num_clients} clients: use "
            "fewer shards or clients, or more data."
        )
    mixed = rng.permutation(len(labels))
    cut = np.array_split(mixed[np.argsort(labels[mixed], kind="stable")], num)
    return [
        np.sort(np.concatenate([cut[i] for i in own])) for own in rng.permutation(num).reshape(num_clients, per_client)
    ]


def presence(
    labels: np.ndarray, num_clients: int, share: float, alpha: float, rng: np.random.Generator, least: int = 1
) -> list[np.ndarray]:
    """Return indices for each client: a client may have samples of a label with probability `share`.

    A client without any label draws again. Every sample goes to one of the clients that may have its
    label, with probabilities from a Dirichlet distribution over them; a label that no client may have
    goes to all. A client with fewer than `least` samples receives some, as in `dirichlet`.

    The method is that of Xu, Chen, Quek, Chong, "FedCorr", CVPR 2022, with their p and alpha_Dir.
    """
    if num_clients < 1 or not alpha > 0 or not 0 < share <= 1:
        raise ProblemError(
            f"presence is {share} and alpha is {alpha} for {num_clients} clients, expected a share above 0 and at most "
            "1, and a value greater than 0, for at least one client."
        )
    found = np.unique(labels)
    may = rng.random((num_clients, len(found))) < share
    while not may.any(1).all():
        none = ~may.any(1)
        may[none] = rng.random((int(none.sum()), len(found))) < share
    parts: list[list[int]] = [[] for _ in range(num_clients)]
    for label, has in zip(found, may.T, strict=True):
        owners = np.flatnonzero(has) if has.any() else np.arange(num_clients)
        places = np.flatnonzero(labels == label)
        drawn = rng.choice(owners, size=len(places), p=rng.dirichlet(np.full(len(owners), alpha)))
        for owner in owners.tolist():
            parts[owner].extend(places[drawn == owner].tolist())
    return _filled(parts, least, rng)


def spread(
    labels: np.ndarray,
    num_clients: int,
    how: Literal["iid", "dirichlet", "shards", "presence"],
    rng: np.random.Generator,
    *,
    alpha: float = 0.5,
    per_client: int = 2,
    share: float = 0.7,
) -> list[np.ndarray]:
    """Return indices for each client by the name of a partition.

    alpha: concentration, for `dirichlet` and `presence`. per_client: shards of a client, for `shards`.
    share: of the labels that a client may have, for `presence`.
    """
    if how == "presence":
        return presence(labels, num_clients, share, alpha, rng, least=2)
    if how == "dirichlet":
        return dirichlet(labels, num_clients, alpha, rng, least=2)
    return shards(labels, num_clients, per_client, rng) if how == "shards" else iid(len(labels), num_clients, rng)


def by_label(labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Return indices for each client: client i has only samples of label i mod c, for c labels.

    Clients with the same label have equal parts of its samples. With fewer clients than labels,
    label k goes to client k mod num_clients, so that every sample is used.
    """
    found = np.unique(labels)
    if num_clients < 1 or not len(found):
        raise ProblemError(
            f"{len(labels)} samples cannot be split among {num_clients} clients: at least one of each is needed."
        )
    parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
    for k, label in enumerate(found):
        places = rng.permutation(np.flatnonzero(labels == label))
        owners = range(k % num_clients, num_clients, len(found))
        if len(places) < len(owners):
            raise ProblemError(
                f"label {label} has {len(places)} samples for {len(owners)} clients: use fewer clients or more data."
            )
        for owner, some in zip(owners, np.array_split(places, len(owners)), strict=True):
            parts[owner].append(some)
    return [np.sort(np.concatenate(part)) for part in parts]


def by_id(ids: np.ndarray) -> dict[Any, np.ndarray]:
    """Return the indices of the samples of every natural client in `ids` (n,), sorted by name."""
    ids = np.asarray(ids)
    if ids.ndim != 1 or not len(ids):
        raise ProblemError(
            f"the ids of clients have the shape {ids.shape}, expected (n,), one for each of at least one sample."
        )
    names, counts = np.unique(ids, return_counts=True)
    return dict(zip(names.tolist(), np.split(np.argsort(ids, kind="stable"), np.cumsum(counts)[:-1]), strict=True))


def quantity_skew(
    num_samples: int, num_clients: int, alpha: float, rng: np.random.Generator, least: int = 1
) -> list[np.ndarray]:
    """Return random indices for each client, in numbers drawn from a Dirichlet distribution.

    Every client has at least `least` samples, as in `dirichlet`.
    """
    return dirichlet(np.zeros(num_samples, np.int64), num_clients, alpha, rng, least)


def split_validation(indices: np.ndarray, share: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Split a client's indices at random into training and a share for validation.

    Each part has at least one sample, because a client needs both.
    """
    num = len(indices)
    if not 0 < share < 1 or num < 2:
        raise ProblemError(
            f"a share of {share} of {num} samples was requested, expected a share between 0 and 1 of at least two "
            "samples."
        )
    mixed = rng.permutation(indices)
    num_val = min(max(round(share * num), 1), num - 1)
    return np.sort(mixed[num_val:]), np.sort(mixed[:num_val])
