"""A member of a secure sum: one site, without transport.

    keys -> share -> receive            once per key epoch
    mask -> confirm -> unmask           for each call, in one slot of the epoch

Every method takes the server's message and returns the answer. What a member refuses raises
WireError (the message is wrong) or PolicyError (the site does not do this).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.aggregation.groups import LEAST
from fedbilevel.errors import PolicyError, SettingError, WireError
from fedbilevel.secure import streams
from fedbilevel.secure.epoch import Epoch, Roster, read_roster
from fedbilevel.secure.graph import is_connected
from fedbilevel.secure.masks import add_masks, pair_seed, partners
from fedbilevel.secure.messages import (
    SIGNATURE,
    Call,
    Identity,
    Message,
    PartyOf,
    Reader,
    confirmed,
    is_signed,
    read_call,
    text,
)
from fedbilevel.secure.nonces import Nonces
from fedbilevel.secure.terms import Groups, Terms


class _Open(NamedTuple):
    """A call that was answered with a masked row and is not unmasked yet."""

    call: Call
    own: bytes  # seed of the own mask
    sizes: dict[str, int]
    groups: Groups | None
    survivors: list[str] = []
    signed: bytes = b""


class Member:
    """One site's side of a secure sum.

    floor: fewest members, this site included, in a sum to which this site contributes. With 2, the
        other member learns this site's row.
    partners: names that count for the floor, this site included; by default every member with a
        certificate counts. A site that names its partners is safe from invented members.
    """

    def __init__(
        self,
        terms: Terms,
        name: str,
        identity: Identity,
        party_of: PartyOf,
        nonces: Nonces,
        *,
        floor: int = 3,
        partners: Collection[str] | None = None,
    ) -> None:
        if floor < 2:
            raise SettingError(f"the floor of the secure sum is {floor}, expected at least 2 members.")
        if terms.quorum < floor:
            raise PolicyError(
                f"the secure sum has a quorum of {terms.quorum}, below this site's floor of {floor}: raise the quorum."
            )
        self.terms, self.name, self._identity, self._party_of, self._nonces = terms, name, identity, party_of, nonces
        self._floor, self._partners = floor, None if partners is None else {*partners, name}
        self._epoch: Epoch | None = None
        self._open: _Open | None = None

    # ---- once per epoch --------------------------------------------------------------------------------------------

    def keys(self, message: Any) -> Message:
        """Make new keys and return the public ones, signed by the site's certificate."""
        number = Reader(message, "begin").integer("epoch", 1)
        self._nonces.begin(self.terms.run, number)
        self._epoch, self._open = Epoch(self.terms, self.name, number), None
        return self._epoch.keys.message(self.terms, self._identity)

    def share(self, message: Any) -> Message:
        """Check the signed keys of all members, and return the shares of this site's seeds."""
        epoch = self._current(message, "roster")
        roster = read_roster(message, self.terms, epoch.number, self._party_of)
        self._check_floor(roster.keys)
        return epoch.share(roster)

    def receive(self, message: Any) -> None:
        """Keep the shares that the neighbours sent to this site."""
        self._current(message, "handout").receive(message)

    # ---- for each call ---------------------------------------------------------------------------------------------

    def mask(
        self, message: Any, rows: Mapping[str, Tensor], groups: Groups | None = None
    ) -> tuple[Message, dict[str, Tensor]]:
        """Return the masked rows of a call. The nonce is on the disk before this method returns.

        rows: tensors of 64-bit integers by name.
        groups: groups of which the server learns the sums, as this site knows them itself.
        """
        call = read_call(message)
        epoch, roster = self._ready(message, "call")
        if not rows or any(row.dtype != torch.int64 for row in rows.values()):
            raise SettingError("a secure sum masks rows of 64-bit integers: encode them before.")
        if not epoch.next_slot <= call.slot < self.terms.slots:
            raise PolicyError(
                f"slot {call.slot} is used, skipped or not there, expected {epoch.next_slot} to "
                f"{self.terms.slots - 1}: begin a new epoch of the secure sum."
            )
        self._nonces.use(self.terms.run, call.nonce)
        own, pair = epoch.use(call.slot)
        masks = [(own, 1)]
        private = streams.private_key(pair)
        for other in partners(roster, epoch.members, self.name, groups):
            masks.append((pair_seed(roster, call, private, self.name, other), 1 if self.name < other else -1))
        sums = {name: row.detach().cpu().clone(memory_format=torch.contiguous_format) for name, row in rows.items()}
        add_masks(sums, call, masks)
        self._open = _Open(call, own, {name: row.numel() for name, row in rows.items()}, groups)
        return {"epoch": call.epoch, "slot": call.slot}, sums

    def confirm(self, message: Any) -> Message:
        """Sign whose rows are summed, once for each call."""
        epoch, roster = self._ready(message, "list")
        opened = self._opened(message, "list")
        survivors = Reader(message, "list").names("survivors")
        if opened.survivors:
            raise PolicyError("the survivors of a call are confirmed once: repeat the call with a new turn.")
        if not {self.name} <= {*survivors} <= {*epoch.members}:
            raise PolicyError("the list of survivors lacks this site or names strangers: repeat the call.")
        if len(survivors) < roster.quorum:
            raise PolicyError(
                f"{len(survivors)} members survived, expected at least the quorum of {roster.quorum}: "
                "repeat the call when more members are there."
            )
        self._check_floor(survivors)
        self._check_parts(roster, survivors, opened.groups)
        signed = confirmed(roster.setup(epoch.members), opened.call, opened.sizes, survivors, opened.groups)
        self._open = opened._replace(survivors=survivors, signed=signed)
        return {**_place(opened.call), "signature": text(epoch.signing.sign(signed))}

    def unmask(self, message: Any) -> Message:
        """Return the seed of the own mask, and one share for every other neighbour: of the own mask
        of a survivor, or of the pairwise masks of a member that dropped out."""
        epoch, roster = self._ready(message, "opening")
        opened = self._opened(message, "opening")
        if not opened.survivors:
            raise PolicyError("a site unmasks only a list of survivors that it confirmed: ask for its confirmation.")
        signatures = Reader(message, "opening").table("signatures", SIGNATURE)
        if not {*signatures} <= {*opened.survivors} or not all(
            is_signed(roster.keys[name].signing, signature, opened.signed) for name, signature in signatures.items()
        ):
            raise WireError("a survivor did not sign the list of survivors that this site confirmed.")
        if len(signatures) < roster.quorum:
            raise PolicyError(
                f"{len(signatures)} members confirmed the survivors, expected at least the quorum of "
                f"{roster.quorum}: repeat the call when more members are there."
            )
        self._open = None  # a second request finds nothing
        halves: dict[str, dict[str, str]] = {"selves": {}, "pairs": {}}
        for other in roster.graph[self.name]:
            if other in epoch.members:
                dropped = other not in opened.survivors
                share = epoch.held(opened.call.slot, other, pair=dropped)
                halves["pairs" if dropped else "selves"][other] = text(share)
        epoch.forget(opened.call.slot + 1)
        return {**_place(opened.call), "own": text(opened.own), **halves}

    # ---- checks ----------------------------------------------------------------------------------------------------

    def _current(self, message: Any, kind: str) -> Epoch:
        number = Reader(message, kind).integer("epoch", 1)
        if self._epoch is None or self._epoch.number != number:
            raise PolicyError(f"{self.name} has no keys of epoch {number}: begin a new epoch of the secure sum.")
        return self._epoch

    def _ready(self, message: Any, kind: str) -> tuple[Epoch, Roster]:
        epoch = self._current(message, kind)
        if epoch.roster is None or not epoch.members:
            raise PolicyError(f"{self.name} has not received its shares of epoch {epoch.number}: begin a new epoch.")
        return epoch, epoch.roster

    def _opened(self, message: Any, kind: str) -> _Open:
        slot = Reader(message, kind).integer("slot")
        if self._open is None or self._open.call.slot != slot:
            raise PolicyError(f"slot {slot} is not open at {self.name}: repeat the call with a new turn.")
        return self._open

    def _check_parts(self, roster: Roster, survivors: Collection[str], groups: Groups | None) -> None:
        """Refuse survivors of whom the server would learn sums of too few members."""
        if groups is None:
            if not is_connected(roster.graph, survivors):
                raise PolicyError(
                    "the graph of the survivors falls apart, so parts of the sum would be seen: repeat the call."
                )
            return
        least = min(Counter(groups.get(name) for name in survivors).values())
        if least < LEAST or not {*survivors} <= {*groups}:
            raise PolicyError(
                f"a group of the secure sum has {least} survivors, expected at least {LEAST}: leave the group out."
            )

    def _check_floor(self, names: Collection[str]) -> None:
        counted = {*names} if self._partners is None else self._partners.intersection(names)
        if len(counted) < self._floor:
            raise PolicyError(
                f"{len(counted)} members of the secure sum count for {self.name}, below this site's floor of "
                f"{self._floor}: wait for more members."
            )


def _place(call: Call) -> Message:
    return {"epoch": call.epoch, "slot": call.slot}
