"""Masks of the rows of one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from fedbilevel.secure import streams
from fedbilevel.secure.epoch import Roster
from fedbilevel.secure.messages import Call


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
