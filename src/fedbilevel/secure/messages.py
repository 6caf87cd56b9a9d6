"""Messages of a secure sum: tables of plain values for the header of the project's messages, bytes
as base64.

Reading checks the kind and the length of every value and executes nothing. A row travels beside the
header, as an array of 64-bit integers.

    keys      epoch, name, certificate, sealing, signing, masking, commitments, signature
    roster    epoch, keys: list of the messages above
    shares    epoch, sealed: by receiver
    handout   epoch, members, sealed: by sender
    call      epoch, slot, turn, iteration, call
    list      epoch, slot, survivors
    confirm   epoch, slot, signature
    opening   epoch, slot, signatures: by member
    unmask    epoch, slot, own, selves: by member, pairs: by member
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedbilevel.errors import WireError
from fedbilevel.secure.streams import KEY
from fedbilevel.secure.terms import LONGEST_NAME, MOST_MEMBERS, MOST_SLOTS, Groups, Nonce, Terms, digest

Message = dict[str, Any]
PURPOSE = "secure sum keys"
SIGNATURE = 64  # bytes of a confirmation
_HIGHEST = 2**62
_CERTIFICATE = 2**14  # most bytes


class Identity(Protocol):
    """Signs as a site; `sites.flare.identity.Signer` is one."""

    certificate: bytes

    def sign(self, purpose: str, *parts: bytes | str) -> bytes: ...


class Party(Protocol):
    """The owner of a certificate from the federation's authority, as in `sites.flare.identity`."""

    name: str

    def signed(self, signature: bytes, purpose: str, *parts: bytes | str) -> bool: ...


def text(content: bytes) -> str:
    return base64.b64encode(content).decode()


class Reader:
    """Reads one message of one kind, and refuses everything that has another form."""

    def __init__(self, message: Any, kind: str) -> None:
        self.kind = kind
        self._message = message if isinstance(message, dict) else self._refuse("form")

    def _refuse(self, what: str) -> Any:
        raise WireError(f"a message {self.kind!r} of the secure sum has an invalid {what}.")

    def integer(self, key: str, least: int = 0, most: int = _HIGHEST) -> int:
        value = self._message.get(key)
        return value if type(value) is int and least <= value <= most else self._refuse(key)

    def name(self, key: str) -> str:
        return self._name(self._message.get(key), key)

    def _name(self, value: Any, key: str) -> str:
        fits = isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and value.isprintable()
        return value if fits else self._refuse(key)

    def content(self, key: str, least: int, most: int | None = None) -> bytes:
        return self._bytes(self._message.get(key), key, least, most)

    def _bytes(self, value: Any, key: str, least: int, most: int | None = None) -> bytes:
        most = least if most is None else most
        if not isinstance(value, str) or len(value) > 4 * (most // 3 + 1):
            return self._refuse(key)
        try:
            found = base64.b64decode(value.encode("ascii"), validate=True)
        except (binascii.Error, UnicodeEncodeError):
            return self._refuse(key)
        return found if least <= len(found) <= most else self._refuse(key)

    def entries(self, key: str, most: int = MOST_MEMBERS) -> list[Any]:
        value = self._message.get(key)
        return value if isinstance(value, list) and len(value) <= most else self._refuse(key)

    def names(self, key: str) -> list[str]:
        """Read names, each once and in order, so that a set of names has one form only."""
        found = [self._name(value, key) for value in self.entries(key)]
        return found if found == sorted({*found}) else self._refuse(key)

    def table(self, key: str, size: int) -> dict[str, bytes]:
        value = self._message.get(key)
        if not isinstance(value, dict) or len(value) > MOST_MEMBERS:
            return self._refuse(key)
        return {self._name(name, key): self._bytes(one, key, size) for name, one in value.items()}

    def nonce(self) -> Nonce:
        turn = self.entries("turn", 8)
        if not turn or not all(type(one) is int and 0 <= one <= _HIGHEST for one in turn):
            self._refuse("turn")
        return Nonce(tuple(turn), self.integer("iteration"), self.integer("call"))


class Keys(NamedTuple):
    """Public keys of one member for one epoch, with a key and a commitment for each slot."""

    epoch: int
    name: str
    sealing: bytes
    signing: bytes
    masking: bytes
    commitments: bytes

    def parts(self, terms: Terms) -> tuple[bytes | str, ...]:
        """Return what the member's certificate signs."""
        return (*terms.parts(), str(self.epoch), self.name, *self[2:])

    def masking_at(self, slot: int) -> bytes:
        return self.masking[KEY * slot : KEY * (slot + 1)]

    def commitment_at(self, slot: int) -> bytes:
        return self.commitments[KEY * slot : KEY * (slot + 1)]

    def message(self, terms: Terms, identity: Identity) -> Message:
        return {
            "epoch": self.epoch,
            "name": self.name,
            "certificate": text(identity.certificate),
            **{name: text(getattr(self, name)) for name in self._fields[2:]},
            "signature": text(identity.sign(PURPOSE, *self.parts(terms))),
        }


class PartyOf(Protocol):
    """Reads a certificate and raises PolicyError unless the federation's authority issued it."""

    def __call__(self, certificate: bytes) -> Party: ...


def read_keys(message: Any, terms: Terms, epoch: int, party_of: PartyOf) -> Keys:
    """Read the keys of a member and check the signature of the member's certificate."""
    reader, size = Reader(message, "keys"), KEY * terms.slots
    keys = Keys(
        reader.integer("epoch", 1),
        reader.name("name"),
        reader.content("sealing", KEY),
        reader.content("signing", KEY),
        reader.content("masking", size),
        reader.content("commitments", size),
    )
    party = party_of(reader.content("certificate", 1, _CERTIFICATE))
    if keys.epoch != epoch:
        raise WireError(f"the keys of {keys.name} are of epoch {keys.epoch}, expected epoch {epoch}.")
    if party.name != keys.name or not party.signed(
        reader.content("signature", 1, _CERTIFICATE), PURPOSE, *keys.parts(terms)
    ):
        raise WireError(f"the keys of {keys.name} are not signed by its certificate for these terms.")
    return keys


def roster_digest(terms: Terms, roster: Mapping[str, Keys]) -> bytes:
    """Hash the terms and all keys of an epoch, in the order of names."""
    return digest(*(digest(*roster[name].parts(terms)) for name in sorted(roster)))


class Call(NamedTuple):
    """One call of an epoch: its slot and its nonce."""

    epoch: int
    slot: int
    nonce: Nonce

    def message(self) -> Message:
        turn, iteration, call = self.nonce
        return {"epoch": self.epoch, "slot": self.slot, "turn": list(turn), "iteration": iteration, "call": call}

    def parts(self) -> tuple[str, ...]:
        return (str(self.epoch), str(self.slot), repr(tuple(self.nonce)))


def read_call(message: Any) -> Call:
    reader = Reader(message, "call")
    return Call(reader.integer("epoch", 1), reader.integer("slot", 0, MOST_SLOTS), reader.nonce())


def confirmed(
    setup: bytes, call: Call, sizes: Mapping[str, int], survivors: list[str], groups: Groups | None = None
) -> bytes:
    """Return what members sign before they unmask: the call, the form of its rows, whose rows are
    summed, and in which groups."""
    form = digest(*(part for name in sorted(sizes) for part in (name, str(sizes[name]))))
    split = [] if groups is None else [digest("groups", *(f"{name} {groups[name]}" for name in survivors))]
    return digest("confirm", setup, *call.parts(), form, *split, *survivors)


def is_signed(key: bytes, signature: bytes, content: bytes) -> bool:
    """Check a confirmation by the signing key of an epoch."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True
