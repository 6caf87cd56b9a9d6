"""The audit log of a site: one line of JSON for everything that left it, chained so that a later change shows.

    left.jsonl                the active file; append only
    left-0001.jsonl, ...      full files, oldest first; left-0000.jsonl: lines from before there was a chain
    left.head                 where the chain stands: number of lines, last chain value, rounds, bytes
    left.begun                written with the first line: without lines beside it, or with lines without a chain, the
                              log was changed
    left.lock                 held during an append

A line holds its number `n`, `time`, what the caller says, and at its end
`chain` = sha256(`chain` of the line before + this line without `chain`). The first line of a file names the file
before (`before`). A line that follows a torn line (disk full, power loss) holds the sha256 of the torn part (`torn`):
that answer never left, because an answer leaves only after its whole line and the head were written.

The chain shows changes by anybody who does not compute it anew, remove all files, or put back an old copy. Against an
intruder with write access, note the last chain value elsewhere, and ask `verify` later whether the log contains it.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from fedbilevel.sites.summary import AuditReport, count, is_count

LEFT, HEAD, LOCK, OLD, BEGUN = "left.jsonl", "left.head", "left.lock", "left-0000.jsonl", "left.begun"
CALLERS = 20  # that a report names
SIZE = 2**24  # bytes of a file before the next is begun
START = "0" * 64  # the chain before the first line
TORN = "the disk was full or the power went, and that answer never left."
_ROTATED = re.compile(r"left-(\d{4,})\.jsonl")


@dataclass(frozen=True)
class Head:
    """Where the chain stands. bytes: of all answers; size: of the active file; files: number of the last full file."""

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


@dataclass
class _Place:
    """Where the next line goes. marks: what it must mention; ahead: the head must be written first; unended: the file
    lacks a line break."""

    head: Head
    marks: dict[str, str] = field(default_factory=dict)
    ahead: bool = False
    unended: bool = False


class AuditLog:
    """Appends lines. Several processes may: each append takes the lock and reads the head. It reads the log only where
    the head does not fit its size."""

    def __init__(self, folder: Path | str, *, size: int = SIZE) -> None:
        self.folder, self._size = Path(folder), size

    @property
    def rounds(self) -> int:
        """Phases and measurements that were computed, over all runs and all files."""
        with _locked(self.folder):
            return _place(self.folder).head.rounds

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a line and the head. After an OSError nothing may leave."""
        from fedbilevel.runs.record import finite  # imports torch, which a reader of the log does not need

        given = json.loads(json.dumps(finite(line)))
        with _locked(self.folder):
            if _is_old(self.folder):
                os.rename(self.folder / LEFT, self.folder / OLD)
            place = _place(self.folder)
            head = place.head
            if place.ahead:  # the append before was cut off between line and head, and two lines ahead is tampering
                self._write_head(head)
            if head.size >= self._size and "torn" not in place.marks:  # a torn part and the next line share a file
                os.rename(self.folder / LEFT, self.folder / rotated(head.files + 1))
                head, place.unended = dataclasses.replace(head, size=0, files=head.files + 1), False
            first = _first(self.folder, head) if head.size == 0 else {}
            body = {"n": head.n + 1, "time": round(time.time(), 3), **given, **place.marks, **first}
            body["chain"] = _chained(head.chain, body)
            size = self._write((b"\n" if place.unended else b"") + json.dumps(body).encode() + b"\n")
            (self.folder / BEGUN).touch(0o600)  # before the head: a crash between leaves no marker without a line
            self._write_head(head.after(body, size))

    def _write(self, content: bytes) -> int:
        """Size of the active file after it."""
        file = os.open(self.folder / LEFT, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if os.write(file, content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder / LEFT))
            return os.fstat(file).st_size
        finally:
            os.close(file)

    def _write_head(self, head: Head) -> None:
        """Whole, but without waiting for the disk: an append happens for every answer."""
        beside = self.folder / f"{HEAD}.part"
        with open(os.open(beside, os.O_WRONLY | os.O_TRUNC | os.O_CREAT, 0o600), "w") as file:
            file.write(json.dumps(vars(head)) + "\n")
        os.replace(beside, self.folder / HEAD)


def rotated(number: int) -> str:
    return f"left-{number:04d}.jsonl"


def is_round(line: Mapping[str, Any]) -> bool:
    """A phase or a measurement that was computed, also if nothing of it left. Lines of older versions have no "round"."""
    return line.get("round") is True or bool(line.get("arrays"))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with open(folder / LOCK, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _place(folder: Path) -> _Place:
    """Where the chain stands: what the head says, and what the log has beyond it."""
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
    if size < head.size:  # the end was cut off, and `verify` says so for ever: the next line continues what is gone
        unended = size > 0 and _from(active, size - 1) != b"\n"
        return _Place(dataclasses.replace(head, size=size), marks, unended=unended)
    return _beyond(head, marks, _from(active, head.size))


def _beyond(head: Head, marks: dict[str, str], tail: bytes) -> _Place:
    """tail: of the active file, beyond the head."""
    chain, end = _Chain(head), head.size + len(tail)
    *whole, rest = tail.split(b"\n")
    for raw in whole:
        chain.follow(raw)
    if rest and not chain.torn and parsed(rest) is not None:  # all of a line but its line break
        chain.follow(rest)
    if chain.problem:  # `verify` names it: the next line continues what the head knows
        return _Place(dataclasses.replace(head, size=end), marks, unended=bool(rest))
    if chain.head.n > head.n + 1:
        marks["head"] = "lost"
    if torn := tail[chain.head.size - head.size :]:
        marks["torn"] = _digest(torn.removesuffix(b"\n"))
    return _Place(chain.head, marks, ahead=chain.head.n > head.n, unended=bool(rest))


def _first(folder: Path, head: Head) -> dict[str, str]:
    """What the first line of a file says about the file before."""
    if head.files:
        return {"before": rotated(head.files)}
    return {"before": OLD, "sha256": _digest((folder / OLD).read_bytes())} if (folder / OLD).exists() else {}


def read_head(folder: Path) -> Head | None:
    """None: there is none, or it is damaged."""
    try:
        head = Head(**json.loads((folder / HEAD).read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return head if all(_fits(value, getattr(Head, name)) for name, value in vars(head).items()) else None


def _fits(value: Any, example: int | str) -> bool:
    return type(value) is str if isinstance(example, str) else is_count(value)


def _is_old(folder: Path) -> bool:
    """Whether the active file was begun before there was a chain."""
    if not (folder / LEFT).exists() or any((folder / name).exists() for name in (OLD, BEGUN, HEAD)):
        return False
    found = (line for raw in (folder / LEFT).read_bytes().split(b"\n") if (line := parsed(raw)) is not None)
    return "chain" not in next(found, {"chain": START})


def _counted(path: Path) -> Head:
    """Rounds and bytes of a file without a chain."""
    head = Head()
    for raw in path.read_bytes().split(b"\n") if path.exists() else []:
        head = head.plus(parsed(raw) or {})
    return head


def _recovered(folder: Path) -> Head:
    """The head from the whole log, where left.head is gone."""
    chain = _Chain(_counted(folder / OLD))
    for path, files in _files(folder):
        chain.begin(path.name, files)
        for raw in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
            chain.follow(raw)
    return chain.head


def _files(folder: Path) -> list[tuple[Path, int]]:
    """Files with a chain, oldest first, each with the number of the full file before it. The last is the active file,
    even if it is not there."""
    numbers = (int(found[1]) for path in folder.iterdir() if (found := _ROTATED.fullmatch(path.name)))
    full = sorted(number for number in numbers if number)
    return [*((folder / rotated(number), number - 1) for number in full), (folder / LEFT, max(full, default=0))]


def _from(path: Path, place: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(place)
        return file.read()


def parsed(raw: bytes) -> dict[str, Any] | None:
    """None: no JSON object, as the torn part of one is."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _chained(before: str, line: Mapping[str, Any]) -> str:
    body = {name: value for name, value in line.items() if name != "chain"}
    return _digest(before.encode() + json.dumps(body).encode())


class _Chain:
    """Follows lines from a head. `problem`: the first break. After a break it goes on from the line that is there."""

    def __init__(self, head: Head, old: str | None = None) -> None:
        self.head, self.problem = head, ""
        self.torn: list[bytes] = []  # since the last line
        self.old = old  # digest of the file from before there was a chain; None: not to be checked
        self._file, self._number, self._read = LEFT, 0, head.size

    @property
    def where(self) -> str:
        return f"line {self._number} of {self._file}"

    def begin(self, name: str, files: int) -> None:
        """The next file."""
        if self.torn:
            self.say(f"the end of {self._file} is no line of this log: it was changed.")
        self.head = dataclasses.replace(self.head, size=0, files=files)
        self.torn, self._file, self._number, self._read = [], name, 0, 0

    def follow(self, raw: bytes) -> dict[str, Any] | None:
        """A line that ended with a line break."""
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
        else:  # it counts as a round nevertheless
            self.head = self.head.plus(line)
        return line

    def say(self, problem: str) -> None:
        self.problem = self.problem or problem

    def _break(self, line: Mapping[str, Any], raw: bytes) -> str:
        if self.torn and line.get("torn") != _digest(b"\n".join(self.torn)):
            self.say(f"line {self._number - 1} of {self._file} is no line of this log: it was changed or added.")
        elif "torn" in line and not self.torn:
            return "names a torn part before it, which is not there any more."
        if json.dumps(line).encode() != raw or "chain" not in line:
            return "is not as this log writes lines: it was changed or added."
        if line.get("n") != self.head.n + 1:
            return f"has number {line.get('n')!r:.20}, expected {self.head.n + 1}: lines were removed, added or moved."
        if line["chain"] != _chained(self.head.chain, line):
            return "does not continue the chain: it was changed."
        if line.get("before") == OLD and self.old is not None and line.get("sha256") != self.old:
            return f"names {OLD} as the file before it, which is missing or was changed."
        if line.get("head") == "lost":
            how = "lost or set back, by a power loss or by somebody"
            return f"was written after {HEAD} was {how}: lines before it may have been removed."
        return ""


@dataclass
class _Snapshot:
    """The log at one moment. An open file stays what it was when the site rotates it meanwhile."""

    head: Head | None
    damaged: bool  # there is a head, but it cannot be read
    old: bool  # the active file is from before there was a chain
    begun: bool  # there was a chain
    files: Sequence[tuple[str, int, IO[bytes], int]]  # name, number of the full file before, content, size

    @staticmethod
    @contextmanager
    def of(folder: Path) -> Iterator[_Snapshot]:
        with ExitStack() as opened:
            with ExitStack() as lock:
                if (folder / LOCK).exists():
                    fcntl.flock(lock.enter_context(open(folder / LOCK)), fcntl.LOCK_SH)
                files = []
                for path, before in [(folder / OLD, 0), *_files(folder)]:
                    if path.exists():
                        file = opened.enter_context(open(path, "rb"))
                        files.append((path.name, before, file, os.fstat(file.fileno()).st_size))
                head, begun = read_head(folder), (folder / BEGUN).exists()
                damaged = head is None and (folder / HEAD).exists()
                found = _Snapshot(head, damaged, _is_old(folder), begun, files)
            yield found

    def contents(self) -> Iterator[tuple[str, int, list[bytes]]]:
        """Name, number of the full file before, and lines. The last line has no line break: it is empty or torn."""
        for name, before, file, size in self.files:
            yield name, before, file.read(size).split(b"\n")


def lines(folder: Path | str) -> Iterator[dict[str, Any]]:
    """All lines, oldest first, without torn parts."""
    with _Snapshot.of(Path(folder)) as log:
        for _, _, content in log.contents():
            yield from (line for raw in content if (line := parsed(raw)) is not None)


def verify(folder: Path | str, contains: str = "") -> AuditReport:
    """Check the whole log and summarise it. A site that appends meanwhile is not held up. contains: the beginning of a
    chain value noted earlier, which a line must have."""
    report, chain, before, is_there = AuditReport(), _Chain(Head(), old=""), Head(), not contains
    with _Snapshot.of(Path(folder)) as log:
        _check_files(log, chain)
        for name, files, content in log.contents():
            if name == OLD or log.old:
                chain.head = _add_old(content, report)
                chain.old = _digest(b"\n".join(content))
                counted = f"{name} ({report.num_unchained} lines) is from before there was a chain"
                report.notes.append(f"{counted}: changes made before that do not show.")
                continue
            chain.begin(name, files)
            for raw in content[:-1]:
                latest = chain.head
                if (line := chain.follow(raw)) is not None:
                    before = latest
                    report.add(line, is_round(line))
                    is_there = is_there or str(line.get("chain")).startswith(contains)
                    if "torn" in line:
                        report.notes.append(f"{chain.where} comes after a torn part: {TORN}")
            if content[-1] and name == LEFT:
                if log.head is None or log.head.n <= chain.head.n:  # else the end was cut off, which is said below
                    report.notes.append(f"the end of {name} is torn: {TORN}")
            elif content[-1] or chain.torn:
                chain.say(f"the end of {name} is no line of this log: it was changed or added.")
        _check_end(log, chain, before, report)
    if not is_there:
        chain.say(f"no line has the chain value {contains}: lines were removed, or an older log was put in this place.")
    report.keep_callers(CALLERS)
    report.ok, report.problem, report.chain = not chain.problem, chain.problem, chain.head.chain
    return report


def _add_old(content: list[bytes], report: AuditReport) -> Head:
    head = Head()
    for line in filter(None, map(parsed, content)):
        report.add(line, is_round(line))
        head = head.plus(line)
    report.num_unchained = report.num_lines
    return head


def _check_files(log: _Snapshot, chain: _Chain) -> None:
    names = {name for name, *_ in log.files}
    last = max([log.head.files if log.head else 0, *(before for _, before, *_ in log.files)])
    for number in range(1, last + 1):
        if rotated(number) not in names:
            chain.say(f"{rotated(number)} is missing: put it back from where it was moved to.")


def _check_end(log: _Snapshot, chain: _Chain, before: Head, report: AuditReport) -> None:
    """Compare with the head. It may be one line behind, as a crash between line and head leaves it."""
    head, found = log.head, chain.head
    if head is None:
        if log.begun and not found.n:
            chain.say(f"no line has a chain, but {BEGUN} says that lines had one: they were removed.")
        if log.damaged or found.n > 1 or found.files:
            chain.say(f"{HEAD} is missing or damaged: whether lines at the end were removed cannot be told.")
    elif head.n > found.n:
        counts = f"{HEAD} counts {head.n} lines, the log has {found.n}"
        chain.say(f"the end is missing ({counts}): it was cut off, or the power went before the disk had it.")
    elif _same(head, before) and not _same(head, found):
        report.notes.append("the last line was written when the site was cut off: its answer may not have left.")
    elif not _same(head, found):
        counts = f"it counts {head.n} lines, the log has {found.n}"
        chain.say(f"{HEAD} does not fit the log ({counts}): it was changed or set back.")


def _same(head: Head, found: Head) -> bool:
    """Up to a rotation that the head does not know yet."""
    turned = found.files == head.files + 1 and found.size == 0
    return head == (dataclasses.replace(found, files=head.files, size=head.size) if turned else found)
