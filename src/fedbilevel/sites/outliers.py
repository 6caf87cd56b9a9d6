"""Detection of answers whose norm is far above the others': a robust z-score on the log norm of
every sent sequence.

The z-score is that of Iglewicz and Hoaglin, 0.6745 (l - median) / MAD, with their limit of 3.5.
Three honest sites often agree within a per cent, so the MAD has a floor of log(2) / 2: an answer is
flagged above 6 times the median. Honest answers of the built-in tasks stay below 2.5 times the
median, or 5.5 where clients differ strongly by design. A small answer is never flagged: it moves a
mean by less than its own share, and a site near its own optimum sends one.

Where a site starts from a model that it received, the distance that it moves it is compared, too.
It is flagged above 30 times the median, because honest sites reach 10 times.

Leaving out an honest site is worse than missing a mild attack. An answer is left out only if at
least four sites answered, or if the product of the factors by which its sequences exceed the median
is above 30. A move alone never suffices, nor does any answer while an earlier answer of another
site is suspect.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

LIMIT = 3.5
FLOOR = math.log(2) / 2
SURE = math.log(30)  # excess over the median, summed over sequences, that excludes one of three answers
_MOVED = 0.6745 * math.log(30) / LIMIT  # a floor of the MAD: a move is flagged above 30 times the median
_MEASURED = 0.6745 * math.log(1000) / LIMIT  # losses of honest sites may differ widely
# of the largest median in the run so far: shorter answers are near zero, and their ratios say little
_QUIET = math.log(1e-3)
_NEGLIGIBLE = math.log(1e-8)  # of the longest array in the message: differences of shorter answers are rounding


class Flag(NamedTuple):
    """A site's answer that is far from the others."""

    phase: str
    iteration: int
    name: str
    norm: float  # logarithm
    others: float  # logarithm of the largest norm among the others
    alone: bool  # False: there are two answers, and either may be wrong
    sure: bool = False  # whether it may be left out

    def __str__(self) -> str:
        where = f"to {self.phase} in outer iteration {self.iteration}"
        norm, others = shown(self.norm), shown(self.others)
        if not self.alone:
            return f"the two answers {where} differ, in {self.name}: norms {norm} and {others}"
        return f"its answer {where} has {self.name} of norm {norm}, the others at most {others}"

    def of(self, site: str) -> str:
        return str(self).replace("its answer", f"the answer of {site}", 1)


def log_norm(rows: Tensor) -> float:
    """Return the logarithm of the norm of the longest row, even if the norm itself overflows."""
    largest = float(rows.abs().max()) if rows.numel() else 0.0
    if not largest:
        return -math.inf
    return math.log(largest) + math.log(float(torch.linalg.vector_norm(rows.double() / largest, dim=-1).max()))


def outliers(logs: Mapping[int, float], least: float = -math.inf, floor: float = FLOOR) -> set[int]:
    """Return the keys of log norms far above the median. Of two log norms that are far apart,
    return both keys.

    least: log norm of the longest array in the message.
    floor: lower bound of the MAD.
    """
    raised = {key: max(value, least + _NEGLIGIBLE) for key, value in logs.items()}
    centre = statistics.median(raised.values()) if raised else -math.inf
    if len(raised) < 2 or centre == -math.inf:
        return set()
    if len(raised) == 2:
        low, high = sorted(raised.values())
        return set(raised) if 0.6745 * (high - low) > LIMIT * floor else set()
    spread = max(floor, statistics.median(abs(value - centre) for value in raised.values()))
    return {key for key, value in raised.items() if 0.6745 * (value - centre) > LIMIT * spread}


class OutlierWatch:
    """Compares the answers of sites, and remembers flags for the whole run."""

    def __init__(self) -> None:
        # the largest median of the log norm so far, by phase and sequence
        self._usual: dict[tuple[str, str], float] = {}
        self._flagged: dict[str, set[int]] = {}  # outer iterations, by the name of the site

    def compare(
        self, phase: str, iteration: int, sent: Mapping[str, Mapping[int, Tensor]], broadcast: Mapping[str, Any]
    ) -> dict[int, Flag]:
        """Return the worst flag of each flagged site.

        sent: rows by sequence and site.
        """
        least = max((log_norm(value) for value in broadcast.values() if isinstance(value, Tensor)), default=-math.inf)
        found: dict[int, list[Flag]] = {}
        moved: dict[int, list[Flag]] = {}
        excess: dict[int, float] = {}
        for name, rows in sent.items():
            logs = {site: log_norm(row) for site, row in rows.items()}
            for site, flag in self._flags(phase, iteration, name, logs, least=least).items():
                found.setdefault(site, []).append(flag)
                excess[site] = excess.get(site, 0.0) + logs[site] - statistics.median(logs.values())
            start = broadcast.get(name)
            if (
                isinstance(start, Tensor)
                and start.ndim == 1
                and all(row.shape[1] == len(start) for row in rows.values())
            ):
                halves = {site: row.double() / 2 - start.double() / 2 for site, row in rows.items()}  # no overflow
                moves = {site: log_norm(half) + math.log(2) for site, half in halves.items()}
                for site, flag in self._flags(phase, iteration, f"a change of {name}", moves, floor=_MOVED).items():
                    moved.setdefault(site, []).append(flag)
        sure = {site for site, much in excess.items() if len(next(iter(sent.values()))) > 3 or much > SURE}
        worst = {site: max(flags, key=lambda flag: flag.norm - flag.others) for site, flags in (moved | found).items()}
        return {site: flag._replace(sure=site in sure) for site, flag in worst.items()}

    def losses(self, iteration: int, rows: Mapping[int, Tensor]) -> dict[int, Flag]:
        """Return flags of sites whose upper or lower losses, in the first two columns of `rows`,
        are far above the others'."""
        found: dict[int, Flag] = {}
        for column, name in ((1, "a lower loss"), (0, "an upper loss")):
            logs = {site: log_norm(row[:, column : column + 1]) for site, row in rows.items()}
            found |= self._flags("the measurement", iteration, name, logs, floor=_MEASURED)
        return found

    def _flags(
        self,
        phase: str,
        iteration: int,
        name: str,
        logs: Mapping[int, float],
        *,
        least: float = -math.inf,
        floor: float = FLOOR,
    ) -> dict[int, Flag]:
        if not logs:
            return {}
        usual = max(self._usual.get((phase, name), -math.inf), statistics.median(logs.values()))
        self._usual[phase, name] = usual
        if max(logs.values()) < usual + _QUIET:
            return {}
        others = {site: max((log for other, log in logs.items() if other != site), default=-math.inf) for site in logs}
        odd = outliers(logs, least, floor)
        return {site: Flag(phase, iteration, name, logs[site], others[site], alone=len(logs) > 2) for site in odd}

    def remember(self, site: str, iteration: int) -> None:
        self._flagged.setdefault(site, set()).add(iteration)

    def last(self, site: str) -> int:
        """Return the last outer iteration in which a site was flagged, or -1 if there is none."""
        return max(self._flagged.get(site, {-1}))

    def history(self, iteration: int) -> str:
        """Return the end of a sentence about all flags of the run until this outer iteration, or an
        empty text if there are none."""
        said = [
            f"{site} was flagged in {len(times)} of {iteration} outer iterations, last in {max(times)}"
            for site, times in sorted(self._flagged.items())
        ]
        return "".join(f"; {words}" for words in said)


def shown(log: float) -> str:
    if log > 700:  # exp would overflow
        return f"1e{log / math.log(10):.0f}"
    return f"{math.exp(log):.2g}"
