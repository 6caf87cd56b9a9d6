"""The keys of one member for one epoch: made, published, and shared with the neighbours.

The secrets exist only in the memory of the site's process. After a restart the site needs a new
epoch. A slot's own seeds are deleted when the slot is used or skipped, and the shares of the
neighbours' seeds after the slot is unmasked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedbilevel.errors import PolicyError, WireError
from fedbilevel.secure import streams
from fedbilevel.secure.graph import graph, threshold
from fedbilevel.secure.messages import Keys, Message, PartyOf, Reader, read_keys, roster_digest, text
from fedbilevel.secure.streams import SEALED, SEED
from fedbilevel.secure.terms import MOST_MEMBERS, Terms, digest

_RAW = 2 * SEED  # bytes of both shares of one slot


class Roster:
    """The members of an epoch with their checked keys, and the graph that follows from the keys."""

    def __init__(self, terms: Terms, keys: Mapping[str, Keys]) -> None:
        self.terms, self.keys = terms, keys
        self.digest = roster_digest(terms, keys)
        self.graph = graph([*keys], self.digest, terms.neighbours)
        self.quorum = terms.needed(len(keys))

    def threshold(self, name: str) -> int:
        """Return how many shares restore a seed of this member."""
        return threshold(len(self.graph[name]), len(self.keys), self.quorum)

    def number(self, owner: str, holder: str) -> int:
        """Return the number of the share of the owner's seeds that the holder has."""
        return self.graph[owner].index(holder) + 1

    def setup(self, members: list[str]) -> bytes:
        """Hash the keys of all, and the names of the members that shared their seeds."""
        return digest("setup", self.digest, *members)

    def context(self, sender: str, receiver: str) -> bytes:
        return digest("shares", self.digest, sender, receiver)


def read_roster(message: Any, terms: Terms, epoch: int, party_of: PartyOf) -> Roster:
    """Read the keys of all members, each with its signature."""
    found = [read_keys(one, terms, epoch, party_of) for one in Reader(message, "roster").entries("keys", MOST_MEMBERS)]
    by_name = {keys.name: keys for keys in found}
    if len(by_name) < len(found):
        raise WireError("a member appears twice in the roster of the secure sum.")
    return Roster(terms, by_name)


class Epoch:
    """One member's secrets of one epoch, and the shares that it holds for others."""

    def __init__(self, terms: Terms, name: str, number: int) -> None:
        self.terms, self.name, self.number = terms, name, number
        self._sealing, self.signing = X25519PrivateKey.generate(), Ed25519PrivateKey.generate()
        self._seeds = {slot: (streams.new_seed(), streams.new_seed()) for slot in range(terms.slots)}  # self, pairs
        privates = [streams.private_key(pair) for _, pair in self._seeds.values()]
        self.keys = Keys(
            number,
            name,
            self._sealing.public_key().public_bytes_raw(),
            self.signing.public_key().public_bytes_raw(),
            b"".join(key.public_key().public_bytes_raw() for key in privates),
            b"".join(streams.commitment(own) for own, _ in self._seeds.values()),
        )
        self.roster: Roster | None = None
        self.members: list[str] = []
        self._held: dict[str, bytearray] = {}
        self.next_slot = 0

    def share(self, roster: Roster) -> Message:
        """Split all seeds, and seal each neighbour's shares for this neighbour."""
        if self.roster is not None:
            raise PolicyError("the seeds of an epoch are shared once: begin a new epoch of the secure sum.")
        if roster.keys.get(self.name) != self.keys:
            raise WireError(f"the roster of the secure sum does not hold the keys of {self.name}.")
        if len(roster.keys) < roster.quorum:
            raise PolicyError(
                f"the secure sum has {len(roster.keys)} members, expected at least the quorum of {roster.quorum}: wait "
                "for more members."
            )
        self.roster, holders = roster, roster.graph[self.name]
        needed = roster.threshold(self.name)
        shares = [
            [
                own + pair
                for own, pair in zip(*(streams.split(seed, needed, len(holders)) for seed in both), strict=True)
            ]
            for both in self._seeds.values()
        ]
        sealed = {
            holder: streams.seal(
                self._sealing_key(self.name, holder),
                b"".join(slot[place] for slot in shares),
                roster.context(self.name, holder),
            )
            for place, holder in enumerate(holders)
        }
        return {"epoch": self.number, "sealed": {holder: text(content) for holder, content in sealed.items()}}

    def receive(self, message: Any) -> None:
        """Keep the shares of the neighbours."""
        if self.roster is None or self.members:
            raise PolicyError("a member receives shares once, after its own are sent: begin a new epoch.")
        reader = Reader(message, "handout")
        members = reader.names("members")
        sealed = reader.table("sealed", SEALED + _RAW * self.terms.slots)
        expected = {name for name in self.roster.graph[self.name] if name in members}
        if not {self.name} <= {*members} <= {*self.roster.keys} or {*sealed} != expected:
            raise WireError("the shares of the secure sum are not those of the member's neighbours.")
        if len(members) < self.roster.quorum:
            raise PolicyError(
                f"{len(members)} members shared their seeds, expected at least the quorum of {self.roster.quorum}: "
                "begin a new epoch of the secure sum."
            )
        held = {}
        for sender, content in sealed.items():
            opened = streams.unseal(
                self._sealing_key(sender, self.name), content, self.roster.context(sender, self.name)
            )
            if opened is None:
                raise WireError(f"the shares from {sender} were changed on their way, or are of another epoch.")
            held[sender] = bytearray(opened)
        self.members, self._held = members, held

    def _sealing_key(self, sender: str, receiver: str) -> bytes:
        assert self.roster is not None
        other = self.roster.keys[receiver if sender == self.name else sender].sealing
        return streams.agreed(self._sealing, other, "seal", self.roster.context(sender, receiver))

    # ---- one slot --------------------------------------------------------------------------------------------------

    def use(self, slot: int) -> tuple[bytes, bytes]:
        """Return the two seeds of a slot, and delete them and those of skipped slots."""
        found = self._seeds[slot]
        self._seeds = {other: seeds for other, seeds in self._seeds.items() if other > slot}
        self.next_slot = slot + 1
        self.forget(slot)
        return found

    def held(self, slot: int, owner: str, *, pair: bool) -> bytes:
        """Return the share of another member's seed: that of its pairwise masks or of its own mask."""
        start = _RAW * slot + SEED * pair
        return bytes(self._held[owner][start : start + SEED])

    def forget(self, end: int) -> None:
        """Overwrite the shares of all slots before this one, both halves."""
        for content in self._held.values():
            content[: _RAW * end] = bytes(_RAW * end)
