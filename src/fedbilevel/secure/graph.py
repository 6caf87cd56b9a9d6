"""The graph of members that mask each other's rows and hold shares of each other's seeds.

Up to 30 members the graph is complete. Above, it is the sparse graph of SecAgg+ (Bell et al. 2020):
a ring in a random order, where each member is joined to the same number of members on either side.
The order follows from the digest of all signed keys, so each member computes the graph itself, and
the server cannot choose it. The server can draw it again by leaving members out of a key epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from math import comb

from fedbilevel.secure.terms import COMPLETE, digest

_DROPS = _COLLUDES = 5  # a fifth of the members
_FAILS = 20  # bits: a sum with these drops fails with a probability below 2^-20
_LEAKS = 40  # bits: the colluding members hold enough shares of some member with a probability below 2^-40

Graph = Mapping[str, tuple[str, ...]]  # sorted neighbours of each member


def graph(names: Sequence[str], seed: bytes, degree: int | None) -> Graph:
    """Return the neighbours of every member."""
    names = sorted(names)
    num = len(names)
    degree = (num - 1 if num <= COMPLETE else usual_degree(num)) if degree is None else degree + degree % 2
    if degree >= num - 1:
        return {name: tuple(other for other in names if other != name) for name in names}
    order = sorted(names, key=lambda name: digest(seed, name))
    sides = [step for near in range(1, degree // 2 + 1) for step in (near, -near)]
    return {
        name: tuple(sorted({order[(place + step) % num] for step in sides} - {name}))
        for place, name in enumerate(order)
    }


def threshold(degree: int, num_members: int, quorum: int) -> int:
    """Return the number of shares that restore a seed.

    In a complete graph, as many members as the quorum can always restore it. In a sparse graph it
    takes more than half of the neighbours.
    """
    return min(quorum, degree) if degree == num_members - 1 else degree // 2 + 1


def is_connected(found: Graph, names: Collection[str]) -> bool:
    """Check whether the graph of these members alone is connected, so that only their total can be
    unmasked."""
    inside, ahead = {*names}, [*names][:1]
    seen = {*ahead}
    while ahead:
        new = inside.intersection(found[ahead.pop()]) - seen
        seen |= new
        ahead += new
    return seen == inside


@cache
def usual_degree(num_members: int) -> int:
    """Return the smallest degree that suffices if a fifth of the members drop out and a fifth
    collude with the server.

    Both probabilities are those of a random set of neighbours, times the number of members.
    """
    others = num_members - 1
    drop, collude = -(-num_members // _DROPS), -(-num_members // _COLLUDES)
    for degree in range(4, others, 2):
        needed = degree // 2 + 1
        fails = num_members * _tail(others, drop, degree, degree - needed + 1)
        leaks = num_members * _tail(others, collude, degree, needed)
        if fails << _FAILS <= comb(others, degree) and leaks << _LEAKS <= comb(others, degree):
            return degree
    return others


def _tail(others: int, marked: int, drawn: int, least: int) -> int:
    """Count the sets of `drawn` of the others that hold at least `least` of the marked ones."""
    return sum(comb(marked, some) * comb(others - marked, drawn - some) for some in range(least, drawn + 1))
