"""Results of checks, with a line per check and a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Check:
    """One check: its name, whether it passed, and the figures behind it.

    ok: None if the check was not done.
    """

    name: str
    ok: bool | None
    text: str

    @property
    def result(self) -> str:
        return {True: "ok", False: "FAIL", None: "--"}[self.ok]


@dataclass(frozen=True, repr=False)
class Report:
    """All checks of one contract; `ok` is True if all were done and passed, and printing shows a table."""

    title: str
    checks: list[Check]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def __repr__(self) -> str:
        return f"<{self.title.rstrip(':.')}: {self.verdict}>"

    @property
    def verdict(self) -> str:
        num, failed = len(self.checks), sum(check.ok is False for check in self.checks)
        undone = sum(check.ok is None for check in self.checks)
        if num == 1:
            return f"the check {'passed' if self.ok else 'failed' if failed else 'was not done'}"
        if self.ok:
            return f"all {num} checks passed"
        first = f"{failed} of {num} checks failed" if failed else f"{num - undone} of {num} checks passed"
        return f"{first}, {undone} not checked" if undone else first

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = [f"  {check.result:<4}  {check.name:<{width}}  {check.text}" for check in self.checks]
        return "\n".join([self.title, *lines, f"Verdict: {self.verdict}."])

    def _repr_html_(self) -> str:
        cells = ((check.name, check.result, check.text) for check in self.checks)
        rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
        head = "<tr><th>check</th><th>result</th><th>details</th></tr>"
        return f"<p>{escape(self.title)}: {self.verdict}.</p><table>{head}{rows}</table>"

    def shown(self, show: bool) -> Report:
        """Print this report if `show` is true, and return it."""
        if show:
            print(self)
        return self
