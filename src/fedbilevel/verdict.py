"""Results of checks: a line per check, and a verdict."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One check: its name, whether it passed, and the figures behind it."""

    name: str
    ok: bool
    text: str


@dataclass(frozen=True, repr=False)
class Report:
    """All checks of one contract. `ok` tells whether all passed; printed, it is a table with a verdict."""

    title: str
    checks: list[Check]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def __repr__(self) -> str:
        return f"<{self.title.rstrip(':.')}: {self.verdict}>"

    @property
    def verdict(self) -> str:
        failed = sum(not check.ok for check in self.checks)
        return f"all {len(self.checks)} checks passed" if self.ok else f"{failed} of {len(self.checks)} checks failed"

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = [f"  {'ok  ' if check.ok else 'FAIL'}  {check.name:<{width}}  {check.text}" for check in self.checks]
        return "\n".join([self.title, *lines, f"Verdict: {self.verdict}."])
