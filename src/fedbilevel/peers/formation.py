"""Formation of a group: its members, its initial state, and the checks before it starts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedbilevel.errors import PlanError
from fedbilevel.peers.wire import Introduction, Version


@dataclass(frozen=True)
class Formation:
    """Peers that start an outer iteration together.

    iteration: outer iteration of the stored state that they start from; -1 is the initial point.
    changed: whether another group produced that state.
    run: mark of this run, which differs between runs of the same plan.
    """

    members: tuple[int, ...]
    weights: tuple[float, ...]
    epoch: int
    iteration: int
    changed: bool
    run: int


def mark(numbers: Sequence[int]) -> int:
    """Return a digest of a list of members or of a view; it is never 0."""
    return int.from_bytes(hashlib.blake2b(np.array(numbers, "<u8").tobytes(), digest_size=8).digest(), "little") | 1


def agreed(introductions: Mapping[int, Introduction]) -> tuple[int, bool]:
    """Return the outer iteration to resume from, and whether the peers resume as a new group.

    Every peer that was present at the end has finished the last outer iteration or the one before
    it. A peer that is further behind was absent and joins the others. A peer that is one iteration
    behind also joins the others if some peer cannot go back, because that peer has just joined or
    gone back.
    """
    newest = [one.versions[0].iteration for one in introductions.values()]
    most = max(newest)
    can_go_back = all(
        most - 1 in (version.iteration for version in one.versions)
        for one in introductions.values()
        if one.versions[0].iteration == most
    )
    iteration = most - 1 if most >= 0 and most - 1 in newest and can_go_back else most
    wanted = Version(iteration, mark(sorted(introductions)))
    return iteration, iteration >= 0 and not all(wanted in one.versions for one in introductions.values())


def difference(mine: Introduction, theirs: Introduction) -> str:
    """Return the reason why two peers cannot compute together, or an empty string."""
    if theirs.roster != mine.roster:
        return "another roster: give all peers the same file"
    if theirs.plan != mine.plan:
        return "another plan: give all peers the same file"
    if theirs.start != mine.start:
        return "another version of fedbilevel, data of another form, or another start of x and y: compare them"
    return ""


def check_one_run(introductions: Mapping[int, Introduction], names: Sequence[str], quorum: int) -> None:
    """Raise if stored states come from different runs, or if too few peers have a stored state."""
    have = {peer: one.mark for peer, one in sorted(introductions.items()) if one.versions[0].iteration >= 0}
    named = ", ".join(names[peer] for peer in have)
    if all(one.versions[0].iteration <= 0 for one in introductions.values()):
        return
    if len(set(have.values())) > 1:
        raise PlanError(
            f"the records of {named} are of different runs of the same plan: "
            "remove those that do not belong, or name other folders."
        )
    if len(have) < quorum <= len(introductions):
        others = ", ".join(names[peer] for peer in introductions if peer not in have)
        raise PlanError(
            f"{named} would resume a run of which {others} have no record: "
            "remove that record, restore the others, or lower the quorum."
        )
