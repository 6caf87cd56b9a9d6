"""The audit log of a site: one line of JSON for everything that left the site, in the files that
the module `chain` describes."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbilevel.sites.chain import (
    BEGUN,
    HEAD,
    LEFT,
    LOCK,
    OLD,
    Chain,
    Head,
    chained,
    chained_files,
    digest,
    is_unchained,
    parsed,
    read_head,
    rotated,
)

SIZE = 2**24  # bytes of a file before the next one is begun


class AuditLog:
    """Appends lines to the log, if necessary from several processes. Each append takes the lock and
    reads the head. It reads the log itself only if the size in the head differs from that of the
    file."""

    def __init__(self, folder: Path | str, *, size: int = SIZE) -> None:
        self.folder, self._size = Path(folder), size

    @property
    def rounds(self) -> int:
        """Number of computed phases and measurements, over all runs and all files."""
        with _locked(self.folder):
            return _place(self.folder).head.rounds

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a line, then the head. The caller must send nothing after an OSError."""
        from fedbilevel.runs.record import finite  # imports torch, which a reader of the log does not need

        given = json.loads(json.dumps(finite(line)))
        with _locked(self.folder):
            if is_unchained(self.folder):
                os.rename(self.folder / LEFT, self.folder / OLD)
            place = _place(self.folder)
            head = place.head
            if place.ahead:  # the last append was cut off between line and head; two lines ahead would be tampering
                self._write_head(head)
            if head.size >= self._size and "torn" not in place.marks:  # a torn part and the next line share a file
                os.rename(self.folder / LEFT, self.folder / rotated(head.files + 1))
                head, place.unended = dataclasses.replace(head, size=0, files=head.files + 1), False
            first = _first(self.folder, head) if head.size == 0 else {}
            body = {"n": head.n + 1, "time": round(time.time(), 3), **given, **place.marks, **first}
            body["chain"] = chained(head.chain, body)
            size = self._write((b"\n" if place.unended else b"") + json.dumps(body).encode() + b"\n")
            (self.folder / BEGUN).touch(0o600)  # before the head: a crash between leaves no marker without a line
            self._write_head(head.after(body, size))

    def _write(self, content: bytes) -> int:
        """Append to the active file and return its new size."""
        file = os.open(self.folder / LEFT, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if os.write(file, content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder / LEFT))
            return os.fstat(file).st_size
        finally:
            os.close(file)

    def _write_head(self, head: Head) -> None:
        """Replace the head without waiting for the disk, because every answer appends a line."""
        beside = self.folder / f"{HEAD}.part"
        with open(os.open(beside, os.O_WRONLY | os.O_TRUNC | os.O_CREAT, 0o600), "w") as file:
            file.write(json.dumps(vars(head)) + "\n")
        os.replace(beside, self.folder / HEAD)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with open(folder / LOCK, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass
class _Place:
    """The position at which the next line is written.

    marks: facts that the next line must mention.
    ahead: whether the log has a line beyond the head, so that the head must be written first.
    unended: whether the file does not end with a line break.
    """

    head: Head
    marks: dict[str, str] = field(default_factory=dict)
    ahead: bool = False
    unended: bool = False


def _place(folder: Path) -> _Place:
    """Find the end of the chain from the head and from any lines of the log beyond the head."""
    head, marks = read_head(folder), {}
    if head is None:
        head = _recovered(folder)
        if head.n > 1 or (head.n == 0 and (folder / BEGUN).exists()):
            marks["head"] = "lost"
    elif (folder / rotated(head.files + 1)).exists():  # cut off between a rotation and the next line
        head = dataclasses.replace(head, size=0, files=head.files + 1)
    active = folder / LEFT
    size = active.stat().st_size if active.exists() else 0
    if size == head.size:
        return _Place(head, marks)
    if size < head.size:  # the end was cut off, which `verify` always reports: the next line continues the missing one
        unended = size > 0 and _from(active, size - 1) != b"\n"
        return _Place(dataclasses.replace(head, size=size), marks, unended=unended)
    return _beyond(head, marks, _from(active, head.size))


def _beyond(head: Head, marks: dict[str, str], tail: bytes) -> _Place:
    """Follow the part of the active file that lies beyond the head."""
    chain, end = Chain(head), head.size + len(tail)
    *whole, rest = tail.split(b"\n")
    for raw in whole:
        chain.follow(raw)
    if rest and not chain.torn and parsed(rest) is not None:  # all of a line but its line break
        chain.follow(rest)
    if chain.problem:  # `verify` reports it: the next line continues the head
        return _Place(dataclasses.replace(head, size=end), marks, unended=bool(rest))
    if chain.head.n > head.n + 1:
        marks["head"] = "lost"
    if torn := tail[chain.head.size - head.size :]:
        marks["torn"] = digest(torn.removesuffix(b"\n"))
    return _Place(chain.head, marks, ahead=chain.head.n > head.n, unended=bool(rest))


def _first(folder: Path, head: Head) -> dict[str, str]:
    """Return facts about the previous file for the first line of a file."""
    if head.files:
        return {"before": rotated(head.files)}
    return {"before": OLD, "sha256": digest((folder / OLD).read_bytes())} if (folder / OLD).exists() else {}


def _counted(path: Path) -> Head:
    """Count the rounds and bytes in a file without a chain."""
    head = Head()
    for raw in path.read_bytes().split(b"\n") if path.exists() else []:
        head = head.plus(parsed(raw) or {})
    return head


def _recovered(folder: Path) -> Head:
    """Recompute the head from the whole log if left.head is missing."""
    chain = Chain(_counted(folder / OLD))
    for path, files in chained_files(folder):
        chain.begin(path.name, files)
        for raw in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
            chain.follow(raw)
    return chain.head


def _from(path: Path, place: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(place)
        return file.read()
