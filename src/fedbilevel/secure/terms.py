"""What all members of a secure sum agree on before the first message."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fedbilevel.errors import SettingError

COMPLETE = 30  # members up to which everybody is everybody's neighbour
MOST_MEMBERS = 2000
MOST_SLOTS = 4096
LONGEST_NAME = 200
Groups = Mapping[str, int]  # the group of each member, in a call of which the server learns the sum of each group


class Nonce(NamedTuple):
    """The address of one call. Each row of the call is addressed by the nonce and the row's name."""

    turn: tuple[int, ...]
    iteration: int
    call: int


@dataclass(frozen=True)
class Terms:
    """Terms of a secure sum, which every member signs together with its keys.

    run: name of the run.
    quorum: fewest members whose rows may be summed. In an epoch with more members it rises to more
        than half of them.
    neighbours: degree of the graph of masks. By default the graph is complete up to 30 members, and
        has the degree of `usual_degree` above.
    slots: calls of one key epoch. Each call uses up one slot of every member's keys.
    """

    run: str
    quorum: int
    neighbours: int | None = None
    slots: int = 64

    def __post_init__(self) -> None:
        ranges = {
            "run": (len(self.run), 1, LONGEST_NAME),
            "quorum": (self.quorum, 2, MOST_MEMBERS),
            "neighbours": (2 if self.neighbours is None else self.neighbours, 2, MOST_MEMBERS),
            "slots": (self.slots, 1, MOST_SLOTS),
        }
        for name, (value, least, most) in ranges.items():
            if not least <= value <= most:
                kind = "characters in the name of the run" if name == "run" else name
                raise SettingError(f"a secure sum has {value} {kind}, expected {least} to {most}.")

    def needed(self, num_members: int) -> int:
        """Return the quorum of an epoch with this many members."""
        return max(self.quorum, num_members // 2 + 1)

    def parts(self) -> tuple[str, ...]:
        """Return the terms as texts, for signatures."""
        return (self.run, str(self.quorum), str(self.neighbours), str(self.slots))


def usual_quorum(num_members: int) -> int:
    """Return the smallest quorum above two thirds of the members.

    A lying server then needs the help of more than a third of the members.
    """
    return max(2, 2 * num_members // 3 + 1)


def digest(*parts: bytes | str) -> bytes:
    """Hash a list of parts. Every part has its own hash, so different lists never give the same
    bytes."""
    each = (hashlib.sha256(part.encode() if isinstance(part, str) else part).digest() for part in parts)
    return hashlib.sha256(b"fedbilevel secure sum" + b"".join(each)).digest()
