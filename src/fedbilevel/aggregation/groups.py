"""Groups of clients for robust means under secure sums.

A secure sum shows the server no single row, so a rule cannot compare rows. With groups, the server
learns the sum of each group, and the rule compares the means of groups. One attacker spoils its
whole group. Groups are drawn anew in every outer iteration, by address, so that every engine and
every site computes the same groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedbilevel.errors import QuorumError
from fedbilevel.problem.draws import SERVER, Stream

LEAST = 3  # clients of a group whose sum may be seen, and groups that a rule compares
NONE = -1  # the group of clients that are not in the cohort


def drawn(stream: Stream, cohort: Tensor, num_clients: int, size: int, iteration: int) -> Tensor:
    """Return the group of each client by its number, in groups of at least `size` members.

    cohort: numbers of the clients that are in a group, in any order.
    """
    order = stream.order("groups", SERVER, num_clients, iteration=iteration)
    order = order[torch.isin(order, cohort)]
    groups = torch.full((num_clients,), NONE)
    groups[order] = torch.arange(len(order)) * (len(order) // size) // max(1, len(order))
    return groups


def is_whole(groups: Tensor, iteration: int) -> Tensor:
    """Return flags of the clients whose group has enough members among these clients.

    groups: the group of each client that answered.
    """
    left = groups.bincount()
    num = int((left >= LEAST).sum())
    if num < LEAST:
        raise QuorumError(
            f"{num} groups of outer iteration {iteration} have {LEAST} clients that answered, and a robust mean needs "
            f"{LEAST} groups: wait for more clients and resume."
        )
    return left[groups] >= LEAST
