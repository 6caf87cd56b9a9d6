"""The chain of a site's audit log: its files, its head, and the check that a line continues it.

    left.jsonl            the active file; append only
    left-0001.jsonl, ...  full files, oldest first
    left-0000.jsonl       lines without a chain, of older versions
    left.head             the end of the chain: number of lines, last chain value, rounds, bytes
    left.begun            written with the first line; without chained lines beside it, the log was
                          changed
    left.lock             held during an append

A line holds its number `n`, `time`, the caller's facts, and at its end `chain` = sha256(`chain` of
the line before + this line without `chain`). The first line of a file names the file before
(`before`). A line after a torn line (disk full, power loss) holds the sha256 of the torn part
(`torn`): that answer never left, because an answer leaves only after its whole line and the head
were written.

The chain reveals every change, except a recomputed chain, a removal of all files, or an old copy in
their place. Against an intruder with write access, note the last chain value elsewhere, and let
`verification.verify` look for it later.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbilevel.sites.summary import count, is_count

LEFT, HEAD, LOCK, OLD, BEGUN = "left.jsonl", "left.head", "left.lock", "left-0000.jsonl", "left.begun"
START = "0" * 64  # the chain before the first line
_ROTATED = re.compile(r"left-(\d{4,})\.jsonl")


@dataclass(frozen=True)
class Head:
    """The end of the chain.

    bytes: total bytes of all answers.
    size: size in bytes of the active file.
    files: number of the last full file.
    """

    n: int = 0
    chain: str = START
    rounds: int = 0
    bytes: int = 0
    size: int = 0
    files: int = 0

    def plus(self, line: Mapping[str, Any]) -> Head:
        rounds, sent = self.rounds + is_round(line), self.bytes + count(line, "bytes")
        return dataclasses.replace(self, rounds=rounds, bytes=sent)

    def after(self, line: Mapping[str, Any], size: int) -> Head:
        return dataclasses.replace(self.plus(line), n=line["n"], chain=line["chain"], size=size)


class Chain:
    """Checks line by line that the log continues the chain from a head. `problem` describes the
    first break. After a break, the check continues from the line that broke the chain."""

    def __init__(self, head: Head, old: str | None = None) -> None:
        self.head, self.problem = head, ""
        self.torn: list[bytes] = []  # since the last line
        self.old = old  # digest of the file without a chain; None: not checked
        self._file, self._number, self._read = LEFT, 0, head.size

    @property
    def where(self) -> str:
        return f"line {self._number} of {self._file}"

    def begin(self, name: str, files: int) -> None:
        """Begin the next file."""
        if self.torn:
            self.say(f"the end of {self._file} is no line of this log: it was changed.")
        self.head = dataclasses.replace(self.head, size=0, files=files)
        self.torn, self._file, self._number, self._read = [], name, 0, 0

    def follow(self, raw: bytes) -> dict[str, Any] | None:
        """Check a line that ended with a line break, and return it. Return None for a torn line."""
        self._number, self._read = self._number + 1, self._read + len(raw) + 1
        line = parsed(raw)
        if line is None:
            self.torn.append(raw)
            return None
        what = self._break(line, raw)
        if what:
            self.say(f"{self.where} {what}")
        self.torn = []
        if type(line.get("n")) is int and type(line.get("chain")) is str:
            self.head = self.head.after(line, self._read)
        else:  # it still counts as a round
            self.head = self.head.plus(line)
        return line

    def say(self, problem: str) -> None:
        self.problem = self.problem or problem

    def _break(self, line: Mapping[str, Any], raw: bytes) -> str:
        if self.torn and line.get("torn") != digest(b"\n".join(self.torn)):
            self.say(f"line {self._number - 1} of {self._file} is no line of this log: it was changed or added.")
        elif "torn" in line and not self.torn:
            return "names a torn part before it, which is not there any more."
        if json.dumps(line).encode() != raw or "chain" not in line:
            return "is not as this log writes lines: it was changed or added."
        if line.get("n") != self.head.n + 1:
            return f"has number {line.get('n')!r:.20}, expected {self.head.n + 1}: lines were removed, added or moved."
        if line["chain"] != chained(self.head.chain, line):
            return "does not continue the chain: it was changed."
        if line.get("before") == OLD and self.old is not None and line.get("sha256") != self.old:
            return f"names {OLD} as the file before it, which is missing or was changed."
        if line.get("head") == "lost":
            how = "lost or set back, by a power loss or by a person"
            return f"was written after {HEAD} was {how}: lines before it may have been removed."
        return ""


def read_head(folder: Path) -> Head | None:
    """Read the head, or return None if the file is missing or damaged."""
    try:
        head = Head(**json.loads((folder / HEAD).read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return head if all(_fits(value, getattr(Head, name)) for name, value in vars(head).items()) else None


def _fits(value: Any, example: int | str) -> bool:
    return type(value) is str if isinstance(example, str) else is_count(value)


def chained_files(folder: Path) -> list[tuple[Path, int]]:
    """List the files with a chain, oldest first, each with the number of the full file before it.
    The last entry is the active file, even if that file does not exist."""
    numbers = (int(found[1]) for path in folder.iterdir() if (found := _ROTATED.fullmatch(path.name)))
    full = sorted(number for number in numbers if number)
    return [*((folder / rotated(number), number - 1) for number in full), (folder / LEFT, max(full, default=0))]


def rotated(number: int) -> str:
    return f"left-{number:04d}.jsonl"


def is_unchained(folder: Path) -> bool:
    """Check whether an older version without a chain wrote the active file."""
    if not (folder / LEFT).exists() or any((folder / name).exists() for name in (OLD, BEGUN, HEAD)):
        return False
    found = (line for raw in (folder / LEFT).read_bytes().split(b"\n") if (line := parsed(raw)) is not None)
    return "chain" not in next(found, {"chain": START})


def is_round(line: Mapping[str, Any]) -> bool:
    """Check whether a line stands for a computed phase or measurement, even if no result left the
    site. Lines of older versions have no entry "round"."""
    return line.get("round") is True or bool(line.get("arrays"))


def parsed(raw: bytes) -> dict[str, Any] | None:
    """Parse a line, or return None if it is not a JSON object, for example if it is torn."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def chained(before: str, line: Mapping[str, Any]) -> str:
    body = {name: value for name, value in line.items() if name != "chain"}
    return digest(before.encode() + json.dumps(body).encode())
