"""Deliberate corruption of data."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedbilevel.errors import ProblemError

Flip = Literal["wrong", "uniform", "asymmetric", "instance"]


def flip_labels(
    labels: np.ndarray,
    rate: float,
    num_classes: int,
    rng: np.random.Generator,
    *,
    to: Flip = "wrong",
    rows: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Replace a random share `rate` of the labels; return the labels and a mask of wrong labels.

    to: `wrong` draws from the other labels, `uniform` from all labels, so that some labels stay
        right, `asymmetric` takes the next label, and `instance` depends on the sample (see
        `instance_flips`).
    rows: one row of numbers per sample, for `instance`.
    """
    if to == "instance":
        if rows is None or len(rows) != len(labels):
            raise ProblemError(
                f"noise that depends on the sample was requested for {len(labels)} labels without their samples: "
                "give rows, with one row of numbers per label."
            )
        spoiled = instance_flips(labels, rate, num_classes, rng, rows)
        return spoiled, spoiled != labels
    hit = np.zeros(len(labels), dtype=bool)
    hit[rng.choice(len(labels), round(rate * len(labels)), replace=False)] = True
    least, most = {"wrong": (1, num_classes), "uniform": (0, num_classes), "asymmetric": (1, 2)}[to]
    shift = rng.integers(least, most, size=len(labels))
    spoiled = np.where(hit, (labels + shift) % num_classes, labels)
    return spoiled, spoiled != labels


def instance_flips(
    labels: np.ndarray, rate: float, num_classes: int, rng: np.random.Generator, rows: np.ndarray
) -> np.ndarray:
    """Return labels with noise that depends on the sample.

    A sample of class k is flipped with its own probability, normal around `rate` with deviation 0.1
    and cut to [0, 1]. The new label is drawn by the softmax of row @ w_k over the other classes, with
    a random matrix w_k per class, so that similar samples get the same wrong label. After Xia et
    al., "Part-dependent label noise", 2020; written from memory of the literature.
    """
    own = np.clip(rng.normal(rate, 0.1, len(labels)), 0, 1) if rate > 0 else np.zeros(len(labels))
    flat = rows.reshape(len(rows), -1).astype(np.float64)
    flat = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12) * np.sqrt(flat.shape[1])
    spoiled = labels.copy()
    for label in range(num_classes):
        mine = np.flatnonzero(labels == label)
        logits = flat[mine] @ rng.standard_normal((flat.shape[1], num_classes)) / np.sqrt(flat.shape[1]) * 3
        logits[:, label] = -np.inf
        logits = logits - logits.max(1, keepdims=True) if len(mine) else logits
        cumulative = np.cumsum(np.exp(logits), axis=1)
        drawn = (cumulative < rng.random((len(mine), 1)) * cumulative[:, -1:]).sum(1)
        spoiled[mine] = np.where(rng.random(len(mine)) < own[mine], np.minimum(drawn, num_classes - 1), label)
    return spoiled


def flip_by_client(
    labels: np.ndarray,
    parts: list[np.ndarray],
    rates: tuple[float, float],
    num_classes: int,
    rng: np.random.Generator,
    *,
    to: Flip,
    rows: np.ndarray,
    chance: float = 1.0,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Corrupt the labels of every client at a rate of its own; return the labels and the parts.

    rates: least and largest rate; the rate of a client is uniform between them.
    chance: probability of a client to have wrong labels at all. With to="uniform", this is the noise
        of FedCorr (Xu et al., CVPR 2022), with rho = chance and tau = the least rate.
    """
    least, most = rates
    if not 0 <= least <= most <= 1:
        raise ProblemError(
            f"noise rates of clients between {least} and {most} were requested, expected 0 <= least <= most <= 1: "
            "raise the largest rate."
        )
    spoiled = labels.copy()
    drawn = rng.uniform(least, most, len(parts))
    drawn = drawn if chance == 1 else np.where(rng.random(len(parts)) < chance, drawn, 0.0)
    for own, rate in zip(parts, drawn, strict=True):
        spoiled[own] = flip_labels(labels[own], float(rate), num_classes, rng, to=to, rows=rows[own])[0]
    return spoiled, parts
