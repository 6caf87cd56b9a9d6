"""Members and a server of a secure sum in one process, with the bytes that pass the server."""

from __future__ import annotations

import json

import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedbilevel.errors import PolicyError
from fedbilevel.secure import Member, Nonce, Nonces, Tally, Terms
from fedbilevel.secure.terms import digest
from fedbilevel.sites import wire

STAGES = ("keys", "shares", "handout", "rows", "confirm", "unmask")


class Card:
    """A stand-in for a certificate: a name and a key, signed by an authority."""

    def __init__(self, name, authority):
        self._key = Ed25519PrivateKey.generate()
        body = self._key.public_key().public_bytes_raw() + name.encode()
        self.certificate = authority.sign(body) + body

    def sign(self, purpose, *parts):
        return self._key.sign(digest(purpose, *parts))


class Owner:
    """Whom a card names."""

    def __init__(self, certificate, authority):
        try:
            authority.public_key().verify(certificate[:64], certificate[64:])
        except InvalidSignature:
            raise PolicyError("the certificate is from another authority: use another kit.") from None
        self.name, self._key = certificate[96:].decode(), Ed25519PublicKey.from_public_bytes(certificate[64:96])

    def signed(self, signature, purpose, *parts):
        try:
            self._key.verify(signature, digest(purpose, *parts))
        except InvalidSignature:
            return False
        return True


class Group:
    """Members with a server between them. Each message goes through the project's wire format."""

    def __init__(self, folder, num, quorum, *, floor=2, neighbours=None, slots=3, run="run"):
        self.authority = Ed25519PrivateKey.generate()
        self.terms = Terms(run, quorum, neighbours, slots)
        self.names = [f"site{i:03}" for i in range(num)]
        self.cards = {name: Card(name, self.authority) for name in self.names}
        self.folder, self.floor = folder, floor
        self.members = {name: self.member(name) for name in self.names}
        self.tally = Tally(self.terms, self.party_of)
        self.seen = []  # every message that the server sends or receives, as bytes
        self.time = 0

    def party_of(self, certificate):
        return Owner(certificate, self.authority)

    def member(self, name, **given):
        """A member in a new process, with the nonces that are on the disk."""
        nonces = Nonces(self.folder / f"{name}.json")
        return Member(self.terms, name, self.cards[name], self.party_of, nonces, **{"floor": self.floor, **given})

    def carry(self, header, arrays=None):
        arrays = arrays or {}
        message = wire.pack({"names": list(arrays), **header}, list(arrays.values()))
        self.seen.append(message)
        header, tensors = wire.unpack(message)
        return header, dict(zip(header.pop("names"), tensors, strict=True))

    def is_gone(self, name, stage, drops):
        return name in (drops or {}) and STAGES.index(drops[name]) <= STAGES.index(stage)

    def agree(self, epoch=1, drops=None):
        """Keys and shares; `drops` names the stage before which a member leaves."""
        gone = lambda name, stage: self.is_gone(name, stage, drops)
        begin = self.carry(self.tally.begin(epoch))[0]
        for name in self.names:
            if not gone(name, "keys"):
                self.tally.take_keys(name, self.carry(self.members[name].keys(begin))[0])
        roster = self.carry(self.tally.roster())[0]
        for name in self.names:
            if not gone(name, "shares"):
                self.tally.take_shares(name, self.carry(self.members[name].share(roster))[0])
        for name, message in self.tally.handout().items():
            if not gone(name, "handout"):
                self.members[name].receive(self.carry(message)[0])

    def nonce(self):
        self.time += 1
        return Nonce((7, 0, self.time), 3, 1)

    def total(self, rows, drops=None, nonce=None):
        """One call; a member that drops out before a stage does not come back."""
        gone = lambda name, stage: name not in self.tally.members or self.is_gone(name, stage, drops)
        sizes = {name: row.numel() for name, row in next(iter(rows.values())).items()}
        call = self.carry(self.tally.call(nonce or self.nonce(), sizes))[0]
        for name in self.names:
            if not gone(name, "rows"):
                self.tally.take_rows(name, *self.carry(*self.members[name].mask(call, rows[name])))
        listed = self.carry(self.tally.survivors())[0]
        for name in listed["survivors"]:
            if not gone(name, "confirm"):
                self.tally.take_confirmation(name, self.carry(self.members[name].confirm(listed))[0])
        opening = self.carry(self.tally.opening())[0]
        for name in listed["survivors"]:
            if not gone(name, "unmask"):
                self.tally.take_unmask(name, self.carry(self.members[name].unmask(opening))[0])
        return self.tally.total()

    def rows(self, length=100, seed=0):
        """Rows of all sizes of numbers, so that sums wrap."""
        generator = torch.Generator().manual_seed(seed)
        whole = lambda: torch.randint(-(2**63), 2**63 - 1, (length,), generator=generator)
        return {name: {"y": whole(), "u": whole()[: length // 3]} for name in self.names}


def plain_sum(rows, names):
    """The sum of the rows of some members without masks, in Python's integers."""
    wrap = lambda value: (value + 2**63) % 2**64 - 2**63
    first = rows[names[0]]
    return {
        key: torch.tensor([wrap(sum(column)) for column in zip(*(rows[n][key].tolist() for n in names), strict=True)])
        for key in first
    }


def altered(message, **changes):
    """A message as its receiver would read it, with other values."""
    return {**json.loads(json.dumps(message)), **changes}
