"""Rosters and keys: reading, refusals, and secrecy of the private key."""

import os
import stat
import sys

import pytest
import zmq
from zmq.utils import z85

from fedbilevel.errors import RosterError, SettingError, UnknownNameError
from fedbilevel.peers.addresses import is_loopback
from fedbilevel.peers.roster import (
    PeerEntry,
    PeerRoster,
    assemble,
    is_key,
    keygen,
    read_roster,
    read_secret,
)

# The same in every process that collects these tests.
KEYS = [zmq.curve_public(z85.encode(bytes([number]) * 32)).decode() for number in (1, 2, 3)]


def table(name, address, key):
    return f'[[peer]]\nname = "{name}"\naddress = "{address}"\nkey = "{key}"\n'


GOOD = table("north", "north.example.org:5555", KEYS[0]) + table("south", "[2001:db8::1]:65535", KEYS[1])


def written(tmp_path, text):
    path = tmp_path / "roster.toml"
    path.write_text(text)
    return path


def test_peers_are_numbered_in_the_order_of_the_roster(tmp_path):
    roster = read_roster(written(tmp_path, GOOD))
    assert roster.peers == (
        PeerEntry("north", "north.example.org:5555", KEYS[0]),
        PeerEntry("south", "[2001:db8::1]:65535", KEYS[1]),
    )
    assert [roster.number(name) for name in ("north", "south")] == [0, 1]
    with pytest.raises(UnknownNameError, match="Did you mean 'north'"):
        roster.number("nort")


def test_digest_covers_names_keys_and_order_but_not_addresses():
    def digest(*entries):
        return PeerRoster(tuple(PeerEntry(*entry) for entry in entries)).digest()

    same = digest(("a", "x:1", KEYS[0]), ("b", "y:1", KEYS[1]))
    assert len(same) == 16
    assert digest(("a", "z:9", KEYS[0]), ("b", "w:9", KEYS[1])) == same
    others = [
        digest(("b", "y:1", KEYS[1]), ("a", "x:1", KEYS[0])),
        digest(("a", "x:1", KEYS[0]), ("c", "y:1", KEYS[1])),
        digest(("a", "x:1", KEYS[0]), ("b", "y:1", KEYS[2])),
        digest(("a", "x:1", KEYS[0])),
    ]
    assert len({same, *others}) == 5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[peer", "not readable as TOML"),
        (table("north", "h:1", KEYS[0]), "names 1 peers, expected 2"),
        ("", "names 0 peers"),
        ('peer = "north"', "double brackets"),
        ("peer = [1, 2]", "double brackets"),
        ('[peer]\nname = "north"', "double brackets"),
        (GOOD.replace('name = "south"\n', ""), "number 2 of .* has no name"),
        (GOOD.replace(f'key = "{KEYS[1]}"\n', ""), "number 2 of .* has no key"),
        (GOOD.replace('"south"', '"north"'), "the name 'north' twice"),
        (GOOD.replace('"south"', '"North"'), "the name 'North' twice"),
        (GOOD.replace("[2001:db8::1]:65535", "NORTH.example.org:5555"), "the address 'NORTH.example.org:5555' twice"),
        (GOOD.replace(KEYS[1], KEYS[0]), "the key .* twice"),
        (GOOD.replace('"south"', '"so uth"'), "expected letters, digits"),
        (GOOD.replace('"south"', '"../south"'), "expected letters, digits"),
        (GOOD.replace('"south"', "7"), "name in .* is 7, expected text"),
        (GOOD.replace(KEYS[1], KEYS[1][:-1]), "expected a public key of 40 characters"),
        (GOOD.replace(KEYS[1], KEYS[1][:-1] + "~"), "expected a public key of 40 characters"),
        (GOOD.replace(KEYS[1], KEYS[1][:-5] + "#####"), "expected a public key of 40 characters"),
    ],
)
def test_unusable_roster_is_refused_with_the_reason(tmp_path, text, says):
    with pytest.raises(RosterError, match=says):
        read_roster(written(tmp_path, text))


@pytest.mark.parametrize(
    "address",
    [
        "host",
        "host:",
        ":5555",
        "host:0",
        "host:65536",
        "host:05",
        "host:port",
        "host:-1",
        "ho st:1",
        "-host:1",
        "host-:1",
        "256.1.1.1:1",
        "1.2.3:1",
        "::1:5555",
        "[::1]",
        "[host]:1",
        "[1.2.3.4:1",
        "tcp://host:1",
        'a\\"b:1',
        "0.0.0.0:1",
        "[::]:1",
        "host:1\\n",
        "h:1:2",
    ],
)
def test_unusable_address_is_refused(tmp_path, address):
    with pytest.raises(RosterError, match=r"address in .* number 2 of"):
        read_roster(written(tmp_path, GOOD.replace("[2001:db8::1]:65535", address)))


@pytest.mark.parametrize(
    "address",
    ["host:1", "a.b-c.org:65535", "peer_1:80", "10.0.0.7:5555", "[::1]:5555", "[2001:db8::1]:5555", "localhost:9"],
)
def test_host_names_ipv4_and_ipv6_are_addresses(tmp_path, address):
    assert read_roster(written(tmp_path, GOOD.replace("[2001:db8::1]:65535", address))).peers[1].address == address


@pytest.mark.parametrize(
    ("text", "hint"), [(GOOD + 'port = "1"', "Known: address, key, name"), (GOOD + "[[peers]]", "Did you mean 'peer'")]
)
def test_unknown_entry_is_refused_with_a_suggestion(tmp_path, text, hint):
    with pytest.raises(UnknownNameError, match=hint):
        read_roster(written(tmp_path, text))


def test_missing_or_binary_roster_is_refused(tmp_path):
    with pytest.raises(RosterError, match=r"cannot be read \(No such file"):
        read_roster(tmp_path / "none.toml")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(RosterError, match="not text"):
        read_roster(tmp_path / "bytes")


def test_is_key_agrees_with_libzmq():
    for key in KEYS:
        assert is_key(key)
        assert len(z85.decode(key)) == 32
    assert not is_key(KEYS[0] + "0")
    assert not is_key(12)
    assert is_key("%nSc0" * 8)  # 2^32 - 1, the greatest number of 32 bits
    assert not is_key("%nSc1" * 8)


def test_private_key_is_readable_by_its_owner_only_and_absent_from_the_public_part(tmp_path):
    before = os.umask(0)  # the mode must not depend on the umask
    try:
        public = keygen(tmp_path / "north.key", name="north", address="h:1")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "north.key").stat().st_mode) == 0o600
    assert public == tmp_path / "north.peer.toml"
    secret = read_secret(tmp_path / "north.key")
    assert (secret.name, secret.address) == ("north", "h:1")
    assert zmq.curve_public(secret.secret.encode()).decode() == secret.key
    assert secret.key in public.read_text()
    assert secret.secret not in public.read_text()
    assert secret.secret not in repr(secret)
    assert secret.secret not in f"{secret} {[secret]}"


def test_private_key_is_created_with_its_final_mode(tmp_path, monkeypatch):
    asked = []
    real = os.open

    def seen(path, flags, mode=0o777, **options):
        asked.append((flags, mode))
        return real(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", seen)
    keygen(tmp_path / "key", name="north", address="h:1")
    assert [mode for flags, mode in asked if flags & os.O_EXCL] == [0o600]


def test_existing_key_is_never_overwritten(tmp_path):
    keygen(tmp_path / "key", name="north", address="h:1")
    content = (tmp_path / "key").read_bytes()
    for path, name in (("key", "south"), ("other", "north"), ("west.peer.toml", "west")):
        with pytest.raises(RosterError, match=r"exists, and a key|name of the public part"):
            keygen(tmp_path / path, name=name, address="h:1")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RosterError, match="exists"):
        keygen(tmp_path / "link", name="east", address="h:1")
    assert (tmp_path / "key").read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "link", "north.peer.toml"]


def test_failed_keygen_leaves_no_files(tmp_path, monkeypatch):
    for name, address in (("a b", "h:1"), ("north", "h")):
        with pytest.raises(RosterError, match="expected"):
            keygen(tmp_path / "key", name=name, address=address)
    with pytest.raises(RosterError, match="cannot be written"):
        keygen(tmp_path / "no" / "key", name="north", address="h:1")
    (tmp_path / "north.peer.toml.part").mkdir()  # in the way of the public part
    with pytest.raises(RosterError, match="cannot be written"):
        keygen(tmp_path / "key", name="north", address="h:1")
    assert [path.name for path in tmp_path.iterdir()] == ["north.peer.toml.part"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o620, 0o644])
def test_private_key_that_other_users_can_read_is_refused(tmp_path, mode):
    keygen(tmp_path / "key", name="north", address="h:1")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(RosterError, match=f"chmod 600 {tmp_path / 'key'}"):
        read_secret(tmp_path / "key")
    (tmp_path / "key").chmod(0o400)
    assert read_secret(tmp_path / "key").name == "north"


def test_error_about_a_private_key_does_not_show_it(tmp_path):
    path = tmp_path / "key"
    keygen(path, name="north", address="h:1")
    good, secret = path.read_text(), read_secret(path).secret
    other = zmq.curve_keypair()[1].decode()
    for text, says in (
        (good.replace(secret, other), "does not belong to the public key"),
        (good.replace(secret, secret[:-1]), "not a key of 40 characters"),
        (good.replace(f'"{secret}"', "5"), "not a key of 40 characters"),
        (good.replace(f'secret = "{secret}"', ""), "has no secret"),
        (good.replace('"h:1"', '"h"'), "address in"),
        (good.replace(secret, secret + '"'), "not readable as TOML"),
    ):
        path.write_text(text)
        with pytest.raises(RosterError, match=says) as caught:
            read_secret(path)
        assert secret[:-1] not in str(caught.value)
        assert other not in str(caught.value)
    path.write_text(good + "extra = 1\n")
    with pytest.raises(UnknownNameError, match="'extra'"):
        read_secret(path)
    with pytest.raises(RosterError, match="cannot be read"):
        read_secret(tmp_path / "none")


def test_assembled_roster_keeps_the_given_order(tmp_path):
    parts = [keygen(tmp_path / f"{name}.key", name=name, address=f"{name}:1") for name in ("south", "north", "east")]
    out = tmp_path / "roster.toml"
    roster = assemble(parts, out)
    assert [peer.name for peer in roster.peers] == ["south", "north", "east"]
    assert read_roster(out) == roster
    content = out.read_bytes()
    assert assemble(parts, out) == roster  # the same again
    with pytest.raises(RosterError, match="holds another roster"):
        assemble(parts[::-1], out)
    assert out.read_bytes() == content


def test_file_that_is_not_a_public_part_is_not_assembled(tmp_path):
    parts = [keygen(tmp_path / f"{name}.key", name=name, address=f"{name}:1") for name in ("south", "north")]
    out = tmp_path / "roster.toml"
    bad = tmp_path / "bad.peer.toml"
    bad.write_text(table("x", "x", KEYS[0]))
    for files, says in (
        ([parts[0], tmp_path / "north.key"], "holds a private key"),
        ([parts[0]], "names 1 peers"),
        ([parts[0], parts[0]], "the name 'south' twice"),
        ([parts[0], bad], "bad.peer.toml"),
        ([parts[0], tmp_path / "none"], "cannot be read"),
    ):
        with pytest.raises(RosterError, match=says):
            assemble(files, out)
        assert not out.exists()
    bad.write_text(GOOD)
    with pytest.raises(RosterError, match="2 tables"):
        assemble([parts[0], bad], out)


@pytest.mark.parametrize(
    ("address", "is_so"),
    [
        ("127.0.0.1:1", True),
        ("127.9.8.7:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("LocalHost:1", True),
        ("128.0.0.1:1", False),
        ("10.0.0.1:1", False),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("[::2]:1", False),
        ("localhost.example.org:1", False),
        ("north:1", False),
    ],
)
def test_is_loopback_only_for_this_machine(address, is_so):
    assert is_loopback(address) is is_so


def test_missing_pyzmq_names_the_package_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    says = r"peers need pyzmq, which is not installed: pip install 'fedbilevel\[peers\]'\."
    with pytest.raises(SettingError, match=says):
        keygen(tmp_path / "key", name="north", address="h:1")
    assert not list(tmp_path.iterdir())
    monkeypatch.delitem(sys.modules, "fedbilevel.peers.sockets", raising=False)
    with pytest.raises(SettingError, match=says):
        __import__("fedbilevel.peers.sockets")
