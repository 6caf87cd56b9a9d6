"""The server of a secure sum, without transport: it collects messages, and learns one sum per call.

    begin -> take_keys -> roster -> take_shares -> handout                              once per epoch
    call -> expect -> take_rows -> survivors -> take_confirmation -> opening -> take_unmask -> total   per call

`take_*` raise WireError or PolicyError for an unusable message; its sender then counts as dropped out. QuorumError
says that too few members are left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedbilevel.aggregation.groups import LEAST, NONE
from fedbilevel.errors import QuorumError, WireError
from fedbilevel.secure import streams
from fedbilevel.secure.epoch import Roster
from fedbilevel.secure.masks import add_masks, pair_seed, partners
from fedbilevel.secure.messages import (
    SIGNATURE,
    Call,
    Keys,
    Message,
    PartyOf,
    Reader,
    confirmed,
    is_signed,
    read_keys,
    text,
)
from fedbilevel.secure.streams import SEALED, SEED, Share
from fedbilevel.secure.terms import Groups, Nonce, Terms


class Tally:
    """The server's side of a secure sum. It keeps the sum of the masked rows, and no row."""

    def __init__(self, terms: Terms, party_of: PartyOf) -> None:
        self.terms, self._party_of = terms, party_of
        self.epoch, self.slot = 0, 0
        self._keys: dict[str, Keys] = {}
        self._messages: dict[str, Message] = {}
        self._sealed: dict[str, dict[str, bytes]] = {}
        self._roster: Roster | None = None
        self.members: list[str] = []
        self._call: _Sum | None = None

    # ---- once per epoch --------------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> Message:
        """Ask for keys of a new epoch, whose number is above all before it, as the time in milliseconds
        is."""
        self.epoch, self.slot, self.members = epoch, 0, []
        self._keys, self._messages, self._sealed, self._roster, self._call = {}, {}, {}, None, None
        return {"epoch": epoch}

    @property
    def is_exhausted(self) -> bool:
        """Whether the next call needs a new epoch."""
        return not self.members or self.slot >= self.terms.slots

    def take_keys(self, name: str, message: Any) -> None:
        keys = read_keys(message, self.terms, self.epoch, self._party_of)
        _check(keys.name == name and name not in self._keys and self._roster is None, name, "keys")
        self._keys[name], self._messages[name] = keys, message

    def roster(self) -> Message:
        """Return the signed keys of all members, for all of them."""
        self._need(len(self._keys), "sent keys")
        self._roster = Roster(self.terms, self._keys)
        return {"epoch": self.epoch, "keys": [self._messages[name] for name in sorted(self._messages)]}

    def take_shares(self, name: str, message: Any) -> None:
        reader, roster = Reader(message, "shares"), self._found()
        sealed = reader.table("sealed", SEALED + 2 * SEED * self.terms.slots)
        fits = reader.integer("epoch") == self.epoch and name in roster.graph and name not in self._sealed
        _check(fits and not self.members and {*sealed} == {*roster.graph[name]}, name, "shares")
        self._sealed[name] = sealed

    def handout(self) -> dict[str, Message]:
        """Return the sealed shares by receiver. Members that sent none are out of the epoch."""
        self._need(len(self._sealed), "shared their seeds")
        self.members, roster = sorted(self._sealed), self._found()
        return {
            name: {
                "epoch": self.epoch,
                "members": self.members,
                "sealed": {one: text(self._sealed[one][name]) for one in roster.graph[name] if one in self._sealed},
            }
            for name in self.members
        }

    # ---- for each call ---------------------------------------------------------------------------------------------

    def call(self, nonce: Nonce, sizes: Mapping[str, int] | None = None, groups: Groups | None = None) -> Message:
        """Ask for masked rows. Each call takes the next slot of the epoch.

        sizes: numbers of entries of the rows by name; None: `expect` gives them before the first row.
        groups: groups with a sum each, as the members know them themselves; None: one sum.
        """
        if self.is_exhausted:
            raise QuorumError("the epoch of the secure sum has no members or no slots left: begin a new epoch.")
        call = Call(self.epoch, self.slot, nonce)
        self.slot += 1
        self._call = _Sum(self._found(), self.members, call, groups)
        if sizes is not None:
            self.expect(sizes)
        return call.message()

    def expect(self, sizes: Mapping[str, int]) -> None:
        """Set the form of the rows, which all of them must have."""
        self._current().expect(sizes)

    def take_rows(self, name: str, message: Any, rows: Mapping[str, Tensor]) -> None:
        self._summing(message, "rows").take_rows(name, rows)

    def survivors(self) -> Message:
        """Fix whose rows are summed. A row that comes later is refused."""
        return self._current().close()

    def take_confirmation(self, name: str, message: Any) -> None:
        self._summing(message, "confirm").take_confirmation(name, message)

    def opening(self) -> Message:
        """Show every survivor that enough survivors confirmed the same list."""
        return self._current().opening()

    def take_unmask(self, name: str, message: Any) -> None:
        self._summing(message, "unmask").take_unmask(name, message)

    def total(self) -> tuple[list[str], dict[str, Tensor]]:
        """Return the survivors, and the sums of their rows by name, with a row for each group."""
        found, self._call = self._current().total(), None
        return found

    def _need(self, num: int, did: str) -> None:
        quorum = self.terms.quorum if self._roster is None else self._roster.quorum
        if num < quorum:
            raise QuorumError(f"{num} members {did}, expected at least {quorum}: wait for more members.")

    def _found(self) -> Roster:
        if self._roster is None:
            raise WireError("the secure sum has no roster yet.")
        return self._roster

    def _current(self) -> _Sum:
        if self._call is None:
            raise WireError("the secure sum has no call in progress.")
        return self._call

    def _summing(self, message: Any, kind: str) -> _Sum:
        reader, found = Reader(message, kind), self._current()
        if (reader.integer("epoch"), reader.integer("slot")) != found.call[:2]:
            raise WireError(f"a message {kind!r} of the secure sum belongs to another call.")
        return found


class _Sum:
    """One call at the server."""

    def __init__(self, roster: Roster, members: list[str], call: Call, groups: Groups | None) -> None:
        self.roster, self.members, self.call, self._groups = roster, members, call, groups
        self._sizes: dict[str, int] = {}
        self._sums: dict[int, dict[str, Tensor]] = {}  # by group
        self._arrived: set[str] = set()
        self.survivors: list[str] = []
        self._signatures: dict[str, bytes] = {}
        self._own: dict[str, bytes] = {}
        self._shares: dict[str, list[Share]] = {}

    def expect(self, sizes: Mapping[str, int]) -> None:
        self._sizes, self._sums = dict(sizes), {}

    def take_rows(self, name: str, rows: Mapping[str, Tensor]) -> None:
        fits = {one: row.numel() for one, row in rows.items() if row.dtype == torch.int64} == self._sizes
        is_new = name in self.members and name not in self._arrived and not self.survivors
        is_new &= self._groups is None or name in self._groups
        _check(fits and is_new and len(rows) == len(self._sizes), name, "rows")
        sums = self._sums.setdefault(self._group(name), {})
        for one, row in rows.items():
            sums[one] = sums[one] + row.reshape(-1) if one in sums else row.reshape(-1).clone()
        self._arrived.add(name)

    def close(self) -> Message:
        self._need(len(self._arrived), "sent rows")
        self.survivors = sorted(self._arrived if self._groups is None else self._in_whole_groups())
        self._need(len(self.survivors), "sent rows in whole groups")
        return {**self._place(), "survivors": self.survivors}

    def _in_whole_groups(self) -> list[str]:
        """Leave out groups with too few rows. Their masks stay, so that nothing is learned of them."""
        sizes = Counter(map(self._group, self._arrived))
        self._sums = {group: sums for group, sums in sorted(self._sums.items()) if sizes[group] >= LEAST}
        if len(self._sums) < LEAST:
            raise QuorumError(
                f"{len(self._sums)} groups have {LEAST} members that sent rows, expected {LEAST} groups: repeat the "
                "call with a new turn."
            )
        return [name for name in self._arrived if self._group(name) in self._sums]

    def _group(self, name: str) -> int:
        return 0 if self._groups is None else self._groups.get(name, NONE)

    def take_confirmation(self, name: str, message: Any) -> None:
        signature = Reader(message, "confirm").content("signature", SIGNATURE)
        signed = confirmed(self.roster.setup(self.members), self.call, self._sizes, self.survivors, self._groups)
        fits = name in self.survivors and is_signed(self.roster.keys[name].signing, signature, signed)
        _check(fits, name, "confirmation")
        self._signatures[name] = signature

    def opening(self) -> Message:
        self._need(len(self._signatures), "confirmed the survivors")
        return {**self._place(), "signatures": {name: text(one) for name, one in self._signatures.items()}}

    def take_unmask(self, name: str, message: Any) -> None:
        reader = Reader(message, "unmask")
        own, selves, pairs = reader.content("own", SEED), reader.table("selves", SEED), reader.table("pairs", SEED)
        _check(name in self.survivors and name not in self._own and self._is_own(name, own), name, "seed")
        near = {other for other in self.roster.graph[name] if other in self.members}
        _check({*selves} == near & {*self.survivors} and {*pairs} == near - {*self.survivors}, name, "shares")
        self._own[name] = own
        for owner, share in {**selves, **pairs}.items():
            self._shares.setdefault(owner, []).append((self.roster.number(owner, name), share))

    def total(self) -> tuple[list[str], dict[str, Tensor]]:
        self._need(len(self._own), "helped to unmask")
        for group, sums in self._sums.items():
            masks = []
            for name in [name for name in self.members if self._group(name) == group]:
                if name in self._own:
                    masks.append((self._own[name], -1))
                elif name in self.survivors:
                    masks.append((self._restored(name, partial(self._is_own, name)), -1))
                else:
                    masks += self._pair_masks(name)
            add_masks(sums, self.call, masks)
        if self._groups is None:
            return self.survivors, self._sums[0]
        return self.survivors, {name: torch.stack([sums[name] for sums in self._sums.values()]) for name in self._sizes}

    def _pair_masks(self, dropped: str) -> list[tuple[bytes, int]]:
        """Return the masks that the neighbours of a member that dropped out have in their rows."""
        public = self.roster.keys[dropped].masking_at(self.call.slot)
        is_right = lambda seed: streams.private_key(seed).public_key().public_bytes_raw() == public
        private = streams.private_key(self._restored(dropped, is_right))
        return [
            (pair_seed(self.roster, self.call, private, dropped, name), -1 if name < dropped else 1)
            for name in partners(self.roster, self.survivors, dropped, self._groups)
        ]

    def _restored(self, name: str, is_right: Callable[[bytes], bool]) -> bytes:
        shares, needed = self._shares.get(name, []), self.roster.threshold(name)
        seed = streams.restored(shares, needed, is_right)
        if seed is None:
            raise QuorumError(
                f"{len(shares)} shares do not restore the seed of {name}, expected {needed} that are right: "
                "repeat the call with a new turn."
            )
        return seed

    def _is_own(self, name: str, seed: bytes) -> bool:
        return streams.commitment(seed) == self.roster.keys[name].commitment_at(self.call.slot)

    def _place(self) -> Message:
        return {"epoch": self.call.epoch, "slot": self.call.slot}

    def _need(self, num: int, did: str) -> None:
        if num < (quorum := self.roster.quorum):
            raise QuorumError(f"{num} members {did}, expected at least {quorum}: repeat the call with a new turn.")


def _check(fits: bool, name: str, what: str) -> None:
    if not fits:
        raise WireError(f"the {what} of {name} do not belong to this stage of the secure sum.")
