"""Masks of the rows of one call."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from fedbilevel.secure import streams
from fedbilevel.secure.epoch import Roster
from fedbilevel.secure.messages import Call
from fedbilevel.secure.terms import Groups


def partners(roster: Roster, members: Collection[str], name: str, groups: Groups | None) -> list[str]:
    """Return the members whose masks a member shares in one call.

    These are its neighbours in the graph. In a call by groups these are the others of its group, so
    that the masks of each group cancel.
    """
    if groups is None:
        return [other for other in roster.graph[name] if other in members]
    return [other for other in members if other != name and groups.get(other) == groups[name]]


def pair_seed(roster: Roster, call: Call, private: X25519PrivateKey, owner: str, other: str) -> bytes:
    """Return the secret of the masks of two members in one slot. It is the same for both."""
    public = roster.keys[other].masking_at(call.slot)
    return streams.agreed(private, public, "pair", roster.digest, str(call.slot), *sorted((owner, other)))


def add_masks(rows: Mapping[str, Tensor], call: Call, masks: Sequence[tuple[bytes, int]]) -> None:
    """Add the masks of seeds to rows in place, each with its sign."""
    for name, row in rows.items():
        words = row.view(-1).numpy()
        for seed, sign in masks:
            streams.add_mask(words, streams.derived(seed, "mask", *call.parts(), name), sign)
