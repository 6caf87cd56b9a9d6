"""Findings: results of a task besides figures, as plain lists and dicts that a page can draw.

Every finding has a `kind`, a `title` and a sentence `about` it:

    histogram   x (what is counted), edges (k + 1 numbers), groups: [{name, counts (k)}]
    images      shape ([height, width] or [height, width, 3]), items: [{pixels, facts}]; pixels are
                base64 of 8-bit grey or RGB, row by row, facts {name: number, word or flag}
    ranking     columns (names), rows (one number, word or flag per column), best first
    by_client   values: {name: one number per client, or None for a client without a number}
    matrix      rows (what their names are), columns (the same), names, values (a share for every pair)
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbilevel.problem.client_data import ClientData, Holdings
from fedbilevel.problem.contraction import counted as sums
from fedbilevel.problem.problem import Problem, with_features

Finding = dict[str, Any]


def histogram(
    title: str,
    about: str,
    x: str,
    groups: Mapping[str, Sequence[float] | np.ndarray],
    edges: Sequence[float] | np.ndarray,
) -> Finding:
    """Count values by group; values outside the edges count in the first and the last bin."""
    counted = [
        {"name": name, "counts": np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0].tolist()}
        for name, values in groups.items()
    ]
    return {
        "kind": "histogram",
        "title": title,
        "about": about,
        "x": x,
        "edges": [float(edge) for edge in edges],
        "groups": counted,
    }


def ranking(title: str, about: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Finding:
    return {
        "kind": "ranking",
        "title": title,
        "about": about,
        "columns": list(columns),
        "rows": [list(row) for row in rows],
    }


def by_client(title: str, about: str, values: Mapping[str, Sequence[float | None]]) -> Finding:
    return {
        "kind": "by_client",
        "title": title,
        "about": about,
        "values": {name: list(some) for name, some in values.items()},
    }


def matrix(
    title: str, about: str, names: Sequence[str], values: Sequence[Sequence[float]], *, rows: str, columns: str
) -> Finding:
    """Show a share for every pair of names.

    rows, columns: what the names stand for there.
    """
    return {
        "kind": "matrix",
        "title": title,
        "about": about,
        "rows": rows,
        "columns": columns,
        "names": list(names),
        "values": [[float(value) for value in row] for row in values],
    }


def shape_of(num_pixels: int) -> tuple[int, ...] | None:
    """Return the shape of a square image, or None if a sample is not an image.

    Images are grey or have three channels.
    """
    side, coloured = math.isqrt(num_pixels), math.isqrt(num_pixels // 3)
    if side * side == num_pixels and side > 1:
        return side, side
    return (coloured, coloured, 3) if 3 * coloured * coloured == num_pixels and coloured > 1 else None


def images(title: str, about: str, pictures: np.ndarray, facts: Sequence[Mapping[str, Any]]) -> Finding | None:
    """Show rows of pixels or (height, width) images, all on one scale.

    The scale is from 0 to 1. If values lie outside, it is from the smallest to the largest value.
    """
    flat = np.asarray(pictures, np.float64).reshape(len(pictures), -1)
    shape = shape_of(flat.shape[1]) if len(flat) else None
    if shape is None:
        return None
    low, high = (0.0, 1.0) if flat.min() >= 0 and flat.max() <= 1 else (flat.min(), flat.max())
    grey = np.rint(255 * (flat - low) / ((high - low) or 1.0)).astype(np.uint8)
    if len(shape) == 3:  # channels last
        grey = grey.reshape(len(grey), 3, -1).swapaxes(1, 2).reshape(len(grey), -1)
    items = [
        {"pixels": base64.b64encode(row.tobytes()).decode(), "facts": dict(own)}
        for row, own in zip(grey, facts, strict=True)
    ]
    return {"kind": "images", "title": title, "about": about, "shape": list(shape), "items": items}


def of_client(solution: Any, i: int) -> dict[str, Tensor]:
    """Return the solution of client i."""
    tree = solution if isinstance(solution, Mapping) else solution[i]
    return {name: leaf.detach().cpu() for name, leaf in tree.items()}


def counted(problem: Problem, clients: Sequence[Holdings], result: Any, role: str) -> list[dict[str, float]]:
    """Return the problem's statistics of a role by client.

    The list is empty if the role has no statistics, if a client has no such role, or if the
    solution never left the sites.
    """
    if (
        result.x is None
        or result.y is None
        or role not in problem.statistics
        or any(role not in client for client in clients)
    ):
        return []
    like = next(iter(of_client(result.y, 0).values()))
    data, found = ClientData(clients, dtype=like.dtype), []
    with torch.no_grad():
        for i in range(len(clients)):
            x, fields = of_client(result.x, i), data.batch(torch.tensor([i]), role).row(0)
            some = problem.statistics[role](x, of_client(result.y, i), with_features(problem, x, fields))
            found.append({name: float(value) for name, value in sums(some, fields["weight"]).items()})
    return found


def share(part: float, whole: float) -> float | None:
    """Return a ratio, or None for a zero divisor, because a file of findings cannot hold NaN."""
    return part / whole if whole else None


def accuracies(
    problem: Problem,
    clients: Sequence[Holdings],
    result: Any,
    *,
    role: str,
    right: str,
    of: str,
    name: str = "test_accuracy",
) -> list[Finding]:
    """Return a list with one finding, the share of right answers of every client.

    The list is empty if the role has no statistics.

    right: name of the statistic that is divided.
    of: name of the statistic that is the divisor.
    """
    shares = [share(one[right], one[of]) for one in counted(problem, clients, result, role)]
    title = f"{name.replace('_', ' ').capitalize()} of every client"
    return [by_client(title, "On the samples that the client itself holds.", {name: shares})] if shares else []
