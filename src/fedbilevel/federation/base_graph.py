"""Base-(k+1) graphs: a short cycle of sparse steps that averages exactly, for any number of peers.

Reference: Takezawa, Sato, Bao, Niwa, Yamada, "Beyond Exponential Graph: Communication-Efficient
Topologies for Decentralized Learning via Finite-time Convergence", NeurIPS 2023. Written from the
definitions of the paper, not from its code.

A peer exchanges with at most k others at a step, and every step is a symmetric doubly stochastic
matrix. The product of the steps of one cycle is the average. There are three constructions:

cube: n is a product of factors of at most k + 1. In the step of a factor, all peers that differ
    only in that digit average.
simple: n = a_1 (k+1)^p_1 + a_2 (k+1)^p_2 + ... in base k + 1. Each part V_l, of size
    a_l (k+1)^p_l, averages as a cube. Then, part after part, every peer of the later parts
    exchanges with one peer of each of the a_l blocks of V_l. The mean of every block is now the
    average, so each block ends as a cube.
base: n = p q, where p has only factors of at most k + 1. Groups of q peers run `simple`, then p
    peers of different groups run `cube`; or `simple` on all peers, if this is shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations

import torch
from torch import Tensor

Edges = list[tuple[int, int, float]]  # two peers and the share that they exchange


@lru_cache
def base_graph(num_peers: int, degree: int) -> tuple[Tensor, ...]:
    """Return the matrices (n, n) of one cycle in float64, in the order in which they are applied."""
    return tuple(_matrix(num_peers, edges) for edges in _base(num_peers, degree)) or (
        torch.ones(1, 1, dtype=torch.float64),
    )


def _matrix(num_peers: int, edges: Edges) -> Tensor:
    matrix = torch.eye(num_peers, dtype=torch.float64)
    for a, b, share in edges:
        matrix[a, b] = matrix[b, a] = share
    return matrix - torch.diag(matrix.sum(1) - 1)


def _base(num_peers: int, degree: int) -> list[Edges]:
    whole, peers = _simple(range(num_peers), degree), range(num_peers)
    smooth = max(p for p in range(1, num_peers + 1) if num_peers % p == 0 and _factors(p, degree + 1) is not None)
    size = num_peers // smooth
    split = [
        *_side_by_side([_simple(peers[start : start + size], degree) for start in range(0, num_peers, size)]),
        *_side_by_side([_cube(peers[start::size], degree) for start in range(size)]),
    ]
    return min(whole, split, key=len)


def _simple(peers: Sequence[int], degree: int) -> list[Edges]:
    if _factors(len(peers), degree + 1) is not None:
        return _cube(peers, degree)
    runs, delay, rest = [], 0, peers
    start = len(_cube(peers[: _leading(len(peers), degree + 1)[1]], degree))
    while rest:
        block, length = _leading(len(rest), degree + 1)
        part, later = rest[:length], rest[length:]
        runs.append(_cube(part, degree))
        if later:
            share = block / len(rest)
            blocks = [part[place : place + block] for place in range(0, length, block)]
            bridge = [(peer, one[place], share) for place, peer in enumerate(later) for one in blocks]
            runs.append([*_idle(start + delay), bridge])
            runs += [[*_idle(start + delay + 1), *_cube(one, degree)] for one in blocks]
        rest, delay = later, delay + 1
    return _side_by_side(runs)


def _leading(num: int, base: int) -> tuple[int, int]:
    """Return the largest power of the base that is at most `num`, and its largest such multiple."""
    block = 1
    while block * base <= num:
        block *= base
    return block, num // block * block


def _cube(peers: Sequence[int], degree: int) -> list[Edges]:
    factors, steps, stride = _factors(len(peers), degree + 1), [], 1
    assert factors is not None
    for size in factors:
        groups = [
            [peers[place + digit * stride] for digit in range(size)]
            for place in range(len(peers))
            if place // stride % size == 0
        ]
        steps.append([(a, b, 1 / size) for group in groups for a, b in combinations(group, 2)])
        stride *= size
    return steps


@lru_cache
def _factors(num: int, most: int) -> tuple[int, ...] | None:
    """Return the fewest factors of at most `most` whose product is `num`, or None."""
    if num == 1:
        return ()
    found = [
        (*rest, factor)
        for factor in range(min(most, num), 1, -1)
        if num % factor == 0 and (rest := _factors(num // factor, most)) is not None
    ]
    return min(found, key=len, default=None)


def _idle(num: int) -> list[Edges]:
    return [[] for _ in range(num)]


def _side_by_side(runs: Sequence[list[Edges]]) -> list[Edges]:
    """Return the steps of several runs between different peers, taken at the same time."""
    num = max(map(len, runs), default=0)
    return [[edge for run in runs if step < len(run) for edge in run[step]] for step in range(num)]
