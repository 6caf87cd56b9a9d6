"""Roster of the peers, with their addresses and public keys, and the private key of one peer.

    [[peer]]                            # one table per peer; their order is their numbering
    name = "north"
    address = "north.example.org:5555"  # for the other peers; a name means its IPv4 address, and
                                        # IPv6 is written [2001:db8::1]:5555
    key = "..."                         # public, 40 characters

Every peer makes its own pair of keys and sends only the public part (NAME.peer.toml) to the person
who assembles the roster. A peer that is not in the roster cannot connect: to exclude a peer, remove
its table from the roster of every other peer.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from fedbilevel.errors import CheckpointError, RosterError, SettingError, UnknownNameError
from fedbilevel.peers.addresses import LISTEN, is_loopback, split_address
from fedbilevel.runs.record import write_whole
from fedbilevel.runs.runfile import NAME
from fedbilevel.settings import check_plain

PUBLIC = ".peer.toml"  # suffix of public parts
NEEDS = "peers need pyzmq, which is not installed: pip install 'fedbilevel[peers]'."
ENTRIES = ("name", "address", "key")
_Z85 = {
    sign: digit
    for digit, sign in enumerate(
        "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    )
}


@dataclass(frozen=True)
class PeerEntry:
    name: str
    address: str
    key: str


@dataclass(frozen=True)
class Secret:
    name: str
    address: str
    key: str
    secret: str = field(repr=False)  # never in a log


@dataclass(frozen=True)
class PeerRoster:
    peers: tuple[PeerEntry, ...]

    def number(self, name: str) -> int:
        names = [peer.name for peer in self.peers]
        if name not in names:
            raise UnknownNameError("peer in the roster", name, names)
        return names.index(name)

    def digest(self) -> bytes:
        """Return a digest of the names, the keys and their order.

        The digest omits addresses, because they may change and may differ between networks.
        """
        return blake2b("".join(f"{peer.name} {peer.key}\n" for peer in self.peers).encode(), digest_size=16).digest()

    def check_secret(self, me: int, secret: Secret | None, listen: str) -> None:
        """Raise if the secret of peer `me`, listening at `listen`, is wrong or missing."""
        split_address(listen, LISTEN, unspecified=True)
        if secret is None:
            for address in (*(peer.address for peer in self.peers), listen):
                if not is_loopback(address):
                    raise RosterError(
                        f"{address} is not a loopback address like 127.0.0.1, so a private key is needed: "
                        "make one with keygen."
                    )
        elif secret.key != self.peers[me].key:
            name = self.peers[me].name
            raise RosterError(
                f"the private key of {secret.name!r} is not the one that {name!r} has in the roster: "
                f"use that of {name!r}."
            )


def read_roster(path: Path) -> PeerRoster:
    return _roster(_tables(_content(path), path), str(path))


def keygen(path: Path, *, name: str, address: str) -> Path:
    """Write a private key to `path` and the public part beside it, and return the public path."""
    _check_name(name, "the name of a peer")
    split_address(address, "the address of a peer")
    public = path.with_name(name + PUBLIC)
    if path == public:
        raise RosterError(f"{path} is the name of the public part: name another place for the private key.")
    for place in (path, public):
        if os.path.lexists(place):
            raise RosterError(
                f"{place} exists, and a key that other peers may know is never overwritten: "
                "name another place, or remove it first."
            )
    key, secret = (half.decode() for half in pyzmq().curve_keypair())
    public_text = f'name = "{name}"\naddress = "{address}"\nkey = "{key}"\n'
    text = f'# Private: this file stays where it is.\n{public_text}secret = "{secret}"\n'
    try:
        # Readable by the owner only from the first moment, and never an existing file.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise RosterError(f"{path} cannot be written ({error.strerror}): name another place.") from None
    try:
        with open(handle, "w") as file:
            file.write(text)
        write_whole(public, _text([PeerEntry(name, address, key)]).encode())
    except (OSError, CheckpointError) as error:  # keep both files or none
        path.unlink()
        raise RosterError(
            f"{path} and {public.name} cannot be written ({error}): make room, or name another place."
        ) from None
    return public


def read_secret(path: Path) -> Secret:
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077 and os.name == "posix":  # elsewhere these bits mean nothing
                raise RosterError(
                    f"{path} holds a private key and other users of this machine can access it (mode {mode:o}): "
                    f"type `chmod 600 {path}`."
                )
            content = _parsed(file.read(), path)
    except OSError as error:
        raise RosterError(
            f"the private key {path} cannot be read ({error.strerror}): make one with keygen, or name its place."
        ) from None
    _check_entries(content, (*ENTRIES, "secret"), f"entry of {path}", f"{path}")
    entry = _entry(content, f"{path}")
    if not is_key(content["secret"]):
        # The value is not shown, because it may be nearly right.
        raise RosterError(f"secret in {path} is not a key of 40 characters: make a new pair with keygen.")
    if pyzmq().curve_public(content["secret"].encode()).decode() != entry.key:
        raise RosterError(
            f"the secret in {path} does not belong to the public key beside it: "
            "restore the original file, or make a new pair with keygen."
        )
    return Secret(entry.name, entry.address, entry.key, content["secret"])


def assemble(public_files: Sequence[Path], out: Path) -> PeerRoster:
    """Write a roster from public files, with peers numbered in the given order."""
    entries: list[dict[str, Any]] = []
    for path in public_files:
        tables = _tables(_content(path), path)
        if len(tables) != 1:
            raise RosterError(f"{path} has {len(tables)} tables [[peer]], expected the one of a public part.")
        _check_peer(tables[0], f"[[peer]] of {path}")  # so that errors name this file
        entries += tables
    roster = _roster(entries, str(out))
    if out.exists():
        if read_roster(out) != roster:
            raise RosterError(f"{out} exists and holds another roster: remove it first, or name another place.")
        return roster
    write_whole(out, _text(roster.peers).encode())
    return roster


def is_key(value: object) -> bool:
    """Return whether a value is 32 bytes in Z85: ten groups of five characters, each below 2^32."""
    if not isinstance(value, str) or len(value) != 40 or not set(value) <= _Z85.keys():
        return False
    return all(
        sum(_Z85[sign] * 85 ** (4 - place) for place, sign in enumerate(value[start : start + 5])) < 2**32
        for start in range(0, 40, 5)
    )


def pyzmq() -> ModuleType:
    try:
        import zmq
    except ImportError:
        raise SettingError(NEEDS) from None
    return zmq


def _content(path: Path) -> dict[str, Any]:
    try:
        content = _parsed(path.read_bytes(), path)
    except OSError as error:
        raise RosterError(
            f"{path} cannot be read ({error.strerror}): name the place of a roster or of a public part."
        ) from None
    if "secret" in content:
        raise RosterError(
            f"{path} holds a private key, which no other peer may have: give the {PUBLIC} file that was made with it."
        )
    return content


def _parsed(content: bytes, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        why = error if isinstance(error, tomllib.TOMLDecodeError) else "it is not text"
        raise RosterError(f"{path} is not readable as TOML: {why}.") from None


def _tables(content: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    for name in content:
        if name != "peer":
            raise UnknownNameError(f"entry of {path}", name, ["peer"])
    tables = content.get("peer", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise RosterError(
            f"{path} has peer in another form, expected one table [[peer]] for each peer, with double brackets."
        )
    return tables


def _roster(tables: Sequence[Mapping[str, Any]], path: str) -> PeerRoster:
    entries = tuple(
        _check_peer(table, f"[[peer]] number {number} of {path}") for number, table in enumerate(tables, start=1)
    )
    if len(entries) < 2:
        raise RosterError(f"{path} names {len(entries)} peers, expected 2 or more: add a table [[peer]] for each.")
    for what in ENTRIES:
        seen: set[str] = set()
        for entry in entries:
            value = getattr(entry, what)
            # Names become file names, and hosts ignore case.
            value = value if what == "key" else value.lower()
            if value in seen:
                raise RosterError(
                    f"{path} has the {what} {getattr(entry, what)!r} twice: every peer needs one of its own."
                )
            seen.add(value)
    return PeerRoster(entries)


def _check_peer(table: Mapping[str, Any], place: str) -> PeerEntry:
    _check_entries(table, ENTRIES, f"entry of {place}", place)
    return _entry(table, place)


def _check_entries(table: Mapping[str, Any], known: Iterable[str], kind: str, place: str) -> None:
    for name in table:
        if name not in known:
            raise UnknownNameError(kind, name, known)
    for name in known:
        if name not in table:
            raise RosterError(f'{place} has no {name}: add {name} = "...", as keygen wrote it.')


def _entry(table: Mapping[str, Any], place: str) -> PeerEntry:
    for name in ENTRIES:
        check_plain(f"{name} in {place}", table[name], "text", RosterError)
    _check_name(table["name"], f"name in {place}")
    split_address(table["address"], f"address in {place}")
    if not is_key(table["key"]):
        raise RosterError(
            f"key in {place} is {table['key']!r}, expected a public key of 40 characters as keygen writes it."
        )
    return PeerEntry(table["name"], table["address"], table["key"])


def _check_name(name: str, place: str) -> None:
    if not NAME.fullmatch(name):
        raise RosterError(f"{place} is {name!r}, expected letters, digits, - and _.")


def _text(entries: Iterable[PeerEntry]) -> str:
    return "\n".join(
        f'[[peer]]\nname = "{entry.name}"\naddress = "{entry.address}"\nkey = "{entry.key}"\n' for entry in entries
    )
