"""Results of checks, with a line per check and a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Check:
    """One check: its name, whether it passed, and the figures behind it."""

    name: str
    ok: bool
    text: str


@dataclass(frozen=True, repr=False)
class Report:
    """All checks of one contract; `ok` is True if all passed, and printing shows a table."""

    title: str
    checks: list[Check]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def __repr__(self) -> str:
        return f"<{self.title.rstrip(':.')}: {self.verdict}>"

    @property
    def verdict(self) -> str:
        num, failed = len(self.checks), sum(not check.ok for check in self.checks)
        if num == 1:
            return f"the check {'passed' if self.ok else 'failed'}"
        return f"all {num} checks passed" if self.ok else f"{failed} of {num} checks failed"

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = [f"  {'ok  ' if check.ok else 'FAIL'}  {check.name:<{width}}  {check.text}" for check in self.checks]
        return "\n".join([self.title, *lines, f"Verdict: {self.verdict}."])

    def _repr_html_(self) -> str:
        cells = ((check.name, "ok" if check.ok else "FAIL", check.text) for check in self.checks)
        rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
        head = "<tr><th>check</th><th>result</th><th>details</th></tr>"
        return f"<p>{escape(self.title)}: {self.verdict}.</p><table>{head}{rows}</table>"

    def shown(self, show: bool) -> Report:
        """Print this report if `show` is true, and return it."""
        if show:
            print(self)
        return self
