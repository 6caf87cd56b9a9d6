"""Verification of a site's audit log: every line must continue the chain, and the chain must end as
the head states."""

from __future__ import annotations

import dataclasses
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fedbilevel.sites.chain import (
    BEGUN,
    HEAD,
    LEFT,
    LOCK,
    OLD,
    Chain,
    Head,
    chained_files,
    digest,
    is_round,
    is_unchained,
    parsed,
    read_head,
    rotated,
)
from fedbilevel.sites.summary import AuditReport

CALLERS = 20  # refused callers that a report names
TORN = "the disk was full or the power went, and that answer never left."


def verify(folder: Path | str, contains: str = "") -> AuditReport:
    """Check the whole log and summarise it. The site can append lines at the same time.

    contains: the beginning of a chain value noted earlier, which a line of the log must have.
    """
    report, chain, before, is_there = AuditReport(), Chain(Head(), old=""), Head(), not contains
    with _Snapshot.of(Path(folder)) as log:
        _check_files(log, chain)
        for name, files, content in log.contents():
            if name == OLD or log.old:
                chain.head = _add_old(content, report)
                chain.old = digest(b"\n".join(content))
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
                if (
                    log.head is None or log.head.n <= chain.head.n
                ):  # otherwise the end was cut off, which is reported below
                    report.notes.append(f"the end of {name} is torn: {TORN}")
            elif content[-1] or chain.torn:
                chain.say(f"the end of {name} is no line of this log: it was changed or added.")
        _check_end(log, chain, before, report)
    if not is_there:
        chain.say(f"no line has the chain value {contains}: lines were removed, or an older log was put in this place.")
    report.keep_callers(CALLERS)
    report.ok, report.problem, report.chain = not chain.problem, chain.problem, chain.head.chain
    return report


def lines(folder: Path | str) -> Iterator[dict[str, Any]]:
    """Yield all lines of the log, oldest first, without torn parts."""
    with _Snapshot.of(Path(folder)) as log:
        for _, _, content in log.contents():
            yield from (line for raw in content if (line := parsed(raw)) is not None)


@dataclass
class _Snapshot:
    """The log at one moment. An open file keeps its content even if the site starts a new file."""

    head: Head | None
    damaged: bool  # the head exists, but cannot be read
    old: bool  # the active file has no chain
    begun: bool  # the log once had a chain
    files: Sequence[tuple[str, int, IO[bytes], int]]  # name, number of the full file before, content, size

    @staticmethod
    @contextmanager
    def of(folder: Path) -> Iterator[_Snapshot]:
        with ExitStack() as opened:
            with ExitStack() as lock:
                if (folder / LOCK).exists():
                    fcntl.flock(lock.enter_context(open(folder / LOCK)), fcntl.LOCK_SH)
                files = []
                for path, before in [(folder / OLD, 0), *chained_files(folder)]:
                    if path.exists():
                        file = opened.enter_context(open(path, "rb"))
                        files.append((path.name, before, file, os.fstat(file.fileno()).st_size))
                head, begun = read_head(folder), (folder / BEGUN).exists()
                damaged = head is None and (folder / HEAD).exists()
                found = _Snapshot(head, damaged, is_unchained(folder), begun, files)
            yield found

    def contents(self) -> Iterator[tuple[str, int, list[bytes]]]:
        """Yield the name, the number of the full file before, and the lines of each file. The last
        line has no line break and is empty or torn."""
        for name, before, file, size in self.files:
            yield name, before, file.read(size).split(b"\n")


def _add_old(content: list[bytes], report: AuditReport) -> Head:
    head = Head()
    for line in filter(None, map(parsed, content)):
        report.add(line, is_round(line))
        head = head.plus(line)
    report.num_unchained = report.num_lines
    return head


def _check_files(log: _Snapshot, chain: Chain) -> None:
    names = {name for name, *_ in log.files}
    last = max([log.head.files if log.head else 0, *(before for _, before, *_ in log.files)])
    for number in range(1, last + 1):
        if rotated(number) not in names:
            chain.say(f"{rotated(number)} is missing: put it back from where it was moved to.")


def _check_end(log: _Snapshot, chain: Chain, before: Head, report: AuditReport) -> None:
    """Compare the end of the log with the head. A crash between the two writes leaves the head one
    line behind."""
    head, found = log.head, chain.head
    if head is None:
        if log.begun and not found.n:
            chain.say(f"no line has a chain, but {BEGUN} says that lines had one: they were removed.")
        if log.damaged or found.n > 1 or found.files:
            chain.say(f"{HEAD} is missing or damaged: lines at the end may have been removed.")
    elif head.n > found.n:
        counts = f"{HEAD} counts {head.n} lines, the log has {found.n}"
        chain.say(f"the end is missing ({counts}): it was cut off, or the power went before the disk had it.")
    elif _same(head, before) and not _same(head, found):
        report.notes.append("the last line was written when the site was cut off: its answer may not have left.")
    elif not _same(head, found):
        counts = f"it counts {head.n} lines, the log has {found.n}"
        chain.say(f"{HEAD} does not fit the log ({counts}): it was changed or set back.")


def _same(head: Head, found: Head) -> bool:
    """Check whether both heads are equal, apart from a new file that the stored head does not know
    yet."""
    turned = found.files == head.files + 1 and found.size == 0
    return head == (dataclasses.replace(found, files=head.files, size=head.size) if turned else found)
