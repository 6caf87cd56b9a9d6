"""A secure sum of ten sites, against the key streams that its masks must have."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.clock import Row, Setup, Timing, compare, rows_of

TITLE = "Secure sums"
ABOUT = """One call of a secure sum of 1,000,000 64-bit integers of 3 and 10 sites, in one process and one thread:
`all sites and the server` is the work of everybody, one after the other; `one site` is what a single site does beside
its own computing, and `server` what the server does. `with a drop` leaves one site out after the keys, so that the
others restore its pairwise masks. `processor time` leaves out other load and waiting for the disk. `keys and shares`
is the start of an epoch of 64 calls at all sites, divided by 64. Nothing travels: FLARE's own time comes on top, and
8 bytes per number. The floor is the AES key stream of all masks of all sites and the server and their addition, from
and into memory."""
HEADINGS = {"sites": "sites"}
SLOTS = 64
PROCESSOR = "all, processor time"


def skipped(setup: Setup) -> str | None:
    if setup.cuda:
        return "Masks are made on a CPU: use --device cpu."
    missing = [name for name in ("cryptography", "Crypto") if find_spec(name) is None]
    return "Secure sums need cryptography and PyCryptodome: pip install 'fedbilevel[secure]'." if missing else None


def rows(setup: Setup) -> list[Row]:
    sizes, length = ((3, 10), 10**6) if not setup.small else ((3,), 500)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return [row for num in sizes for row in _case(setup, num, length, Path(folder))]
    finally:
        torch.set_num_threads(threads)


def _case(setup: Setup, num: int, length: int, folder: Path) -> list[Row]:
    from fedbilevel.secure import streams

    group = _Sites(num, length, folder)
    group.agree()
    words, keys = np.zeros(length, np.int64), [os.urandom(32) for _ in range(num * num + num)]

    def floor() -> None:
        for key in keys:
            streams.add_mask(words, key, 1)

    contestants: dict[str, Callable[[], object]] = {
        "all sites and the server": group.call,
        "with a drop": lambda: group.call(group.names[:1]),
        "keys and shares": group.agree,
        "floor": floor,
    }
    found = compare(contestants, setup, rounds=5, repeats=1)
    share = found["keys and shares"]
    found["keys and shares"] = share._replace(median=share.median / SLOTS)
    alone = {what: Timing.of(seconds[1:]) for what, seconds in group.seconds.items()}
    rows = rows_of(f"{num} sites, {length:,} numbers", {**found, **alone}, sites=num)
    for row in rows:
        if row["what"] == PROCESSOR:  # the floor is in seconds of the clock
            del row["ratio"], row["floor_seconds"]
    return rows


class _Card:
    """Signs like a site's certificate, at the speed of Ed25519."""

    def __init__(self, name: str) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key = Ed25519PrivateKey.generate()
        self.certificate = self._key.public_key().public_bytes_raw() + name.encode()

    def sign(self, purpose: str, *parts: bytes | str) -> bytes:
        from fedbilevel.secure.terms import digest

        return self._key.sign(digest(purpose, *parts))


class _Owner:
    def __init__(self, certificate: bytes) -> None:
        self.name, self._key = certificate[32:].decode(), certificate[:32]

    def signed(self, signature: bytes, purpose: str, *parts: bytes | str) -> bool:
        from fedbilevel.secure.messages import is_signed
        from fedbilevel.secure.terms import digest

        return is_signed(self._key, signature, digest(purpose, *parts))


class _Sites:
    """All parties of a secure sum; calls begin a new epoch when the slots are used up."""

    def __init__(self, num: int, length: int, folder: Path) -> None:
        from fedbilevel.secure import Member, Nonces, Tally, Terms, usual_quorum

        self.names = [f"site{i:02}" for i in range(num)]
        terms = Terms("benchmark", min(num - 1, usual_quorum(num)), None, SLOTS)
        place = lambda name: folder / f"{num}-{name}.json"
        self.members = {
            name: Member(terms, name, _Card(name), _Owner, Nonces(place(name)), floor=2) for name in self.names
        }
        self.tally = Tally(terms, _Owner)
        self.row, self.turn, self.epoch = {"y": torch.arange(length)}, 0, 0
        self.seconds: dict[str, list[float]] = {"one site": [], "server": [], PROCESSOR: []}

    def agree(self) -> None:
        self.epoch += 1
        begin = self.tally.begin(self.epoch)
        for name, member in self.members.items():
            self.tally.take_keys(name, member.keys(begin))
        roster = self.tally.roster()
        for name, member in self.members.items():
            self.tally.take_shares(name, member.share(roster))
        for name, message in self.tally.handout().items():
            self.members[name].receive(message)

    def call(self, gone: Sequence[str] = ()) -> None:
        from fedbilevel.secure import Nonce

        self.turn += 1
        begun = time.process_time()
        here, tally = [name for name in self.names if name not in gone], self.tally
        seconds = {"one site": 0.0, "server": 0.0}  # of the last site

        def timed(what: str, function: Callable[..., Any], *given: Any) -> Any:
            start = time.perf_counter()
            found = function(*given)
            seconds[what] += (time.perf_counter() - start) if what == "server" or name == here[-1] else 0.0
            return found

        name = here[-1]
        asked = timed("server", tally.call, Nonce((self.turn,), 0, 0), {"y": self.row["y"].numel()})
        for name in here:
            timed("server", tally.take_rows, name, *timed("one site", self.members[name].mask, asked, self.row))
        listed = timed("server", tally.survivors)
        for name in here:
            timed("server", tally.take_confirmation, name, timed("one site", self.members[name].confirm, listed))
        opening = timed("server", tally.opening)
        for name in here:
            timed("server", tally.take_unmask, name, timed("one site", self.members[name].unmask, opening))
        _, sums = timed("server", tally.total)
        if not torch.equal(sums["y"], len(here) * self.row["y"]):
            raise ArithmeticError("the secure sum is not the sum.")
        seconds[PROCESSOR] = time.process_time() - begun
        if not gone:
            for what, took in seconds.items():
                self.seconds[what].append(took)
