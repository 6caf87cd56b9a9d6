"""A summary of a site's audit log: what left in each run, and which callers were refused.

Lines may be damaged: a value of an unexpected type is ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard


def is_count(value: Any) -> TypeGuard[int]:
    """Check whether a value can be a number of lines or bytes."""
    return type(value) is int and 0 <= value < 2**63


def count(table: Mapping[str, Any], name: str) -> int:
    value = table.get(name)
    return value if is_count(value) else 0


@dataclass
class RunSummary:
    """Totals of what left the site in one run.

    arrays: number and largest norm of the arrays, by name.
    first, last: times of the first and the last line.
    """

    answers: int = 0
    rounds: int = 0
    bytes: int = 0
    refusals: int = 0
    arrays: dict[str, dict[str, Any]] = field(default_factory=dict)
    first: float | None = None
    last: float | None = None

    def add(self, line: Mapping[str, Any], is_round: bool) -> None:
        refused = line.get("kind") == "error"
        self.answers += not refused
        self.refusals += refused
        self.rounds += is_round
        self.bytes += count(line, "bytes")
        self.first, self.last = _span(self.first, self.last, line)
        arrays = line.get("arrays")
        for one in arrays if isinstance(arrays, list) else []:
            if isinstance(one, dict):
                entry = self.arrays.setdefault(str(one.get("name")), {"count": 0, "largest_norm": None})
                entry["count"] += 1
                norm = one.get("norm")
                if type(norm) is float and norm > (entry["largest_norm"] or 0.0):
                    entry["largest_norm"] = norm


@dataclass
class AuditReport:
    """The result of a verification.

    problem: the first break of the chain, as a sentence.
    notes: remarks about facts that do not break the chain.
    runs: summaries by name of the run, with "" for lines without a run.
    callers: number of refusals for each of the most frequent refused callers.
    others: number of refusals of all other callers.
    num_unchained: number of lines from versions without a chain.
    chain: the last chain value, which the operator should note elsewhere.
    """

    ok: bool = True
    problem: str = ""
    notes: list[str] = field(default_factory=list)
    num_lines: int = 0
    num_unchained: int = 0
    first: float | None = None
    last: float | None = None
    chain: str = ""
    runs: dict[str, RunSummary] = field(default_factory=dict)
    callers: dict[str, int] = field(default_factory=dict)
    others: int = 0

    def asdict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def add(self, line: Mapping[str, Any], is_round: bool) -> None:
        self.num_lines += 1
        self.first, self.last = _span(self.first, self.last, line)
        self.runs.setdefault(str(line.get("run") or ""), RunSummary()).add(line, is_round)
        if line.get("kind") == "error" and isinstance(caller := line.get("caller"), str):
            self.callers[caller] = self.callers.get(caller, 0) + (count(line, "times") or 1)

    def keep_callers(self, most: int) -> None:
        kept = dict(sorted(self.callers.items(), key=lambda one: -one[1])[:most])
        self.others, self.callers = sum(self.callers.values()) - sum(kept.values()), kept


def _span(first: float | None, last: float | None, line: Mapping[str, Any]) -> tuple[float | None, float | None]:
    time_ = line.get("time")
    return (first if first is not None else time_, time_) if isinstance(time_, int | float) else (first, last)
