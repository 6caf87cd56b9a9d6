"""The result of a run, and its progress during the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel.columns import figures_of
from fedbilevel.errors import UnknownNameError
from fedbilevel.federation.ledger import Totals
from fedbilevel.runs.baseline import Baseline


class Progress(NamedTuple):
    """The argument of a callback after every outer iteration.

    row: the measurement, or None if this outer iteration was not measured.
    num_rounds: the number of rounds at which the run ends, or None if it has no such limit.
    """

    iteration: int
    num_iterations: int
    rounds: int
    megabytes: float
    row: Mapping[str, Any] | None
    num_rounds: int | None = None

    @property
    def share(self) -> float:
        """Return the completed share of the run, from 0 to 1."""
        by_rounds = self.rounds / self.num_rounds if self.num_rounds else 0.0
        return min(1.0, max(self.iteration / max(1, self.num_iterations), by_rounds))


class Ending(NamedTuple):
    """The way in which a run ended.

    how: "finished" (its length is reached), "converged" (its figures no longer change), "callback"
        or "interrupted" (a callback or Ctrl-C stopped it), "budget" (its privacy budget is spent), or
        "failed".
    why: a remark; the reason of a failure, as one sentence.
    """

    how: str = "finished"
    why: str = ""

    @property
    def state(self) -> str:
        """Return finished, converged, stopped or failed."""
        return "stopped" if self.how in ("callback", "interrupted", "budget") else self.how

    def __str__(self) -> str:
        who = {"callback": " by a callback", "interrupted": " by Ctrl-C", "budget": " by the privacy budget"}
        by = who.get(self.how, "")
        return f"{self.state}{by}{': ' if self.why else ''}{self.why.removesuffix('.')}"


@dataclass(frozen=True)
class Result:
    """The result of a run.

    x, y: dicts of tensors; a private x, a local y and, between peers, both are lists of one dict
        per client.
    rows: the measurements, one dict each; `history` is the same as a table.
    ledger: the cost, summed over clients; `ledger.phases` has the cost by phase.
    steps: the measured values of step sizes that were "auto".
    ending: how the run ended, and why. A run that failed returns its best state.
    baseline: comparison with y trained at a fixed x on data that no run used, if requested.
    returned: the outer iteration of x and y, if they are the best state of a run that failed.
    uncaptured: why the outer iteration, or on a GPU a phase, was not replayed, by name.
    """

    x: Any
    y: Any
    rows: list[dict[str, Any]]
    ledger: Totals
    iteration: int
    ending: Ending = Ending()
    path: Path | None = None
    state: Any = None
    name: str = ""
    steps: dict[str, float] = field(default_factory=dict)
    baseline: Baseline | None = None
    returned: int | None = None
    uncaptured: dict[str, str] = field(default_factory=dict)

    @property
    def final(self) -> dict[str, Any]:
        """Return the figures of x and y, with the costs of the whole run.

        They are the last measurement, except in a run that failed and returned its best state.
        """
        best = next((row for row in self.rows if row["iteration"] == self.returned), {})
        last = self.rows[-1] if self.rows else {}
        return {**last, **{name: best[name] for name in figures_of(best)}}

    @property
    def stopped(self) -> str:
        """Return the first word of the ending, e.g. "finished" or "interrupted"."""
        return self.ending.how

    @property
    def history(self) -> Any:
        """Return the measurements as a pandas DataFrame, indexed by outer iteration.

        Without pandas, return the list of rows.
        """
        if find_spec("pandas") is None:
            return self.rows
        import pandas  # type: ignore[import-untyped]

        return pandas.DataFrame(self.rows).set_index("iteration")

    def plot(self, metric: str | None = None, *, against: str = "rounds") -> Any:
        """Draw a metric (default: the upper loss) as a matplotlib figure.

        against: the column on the horizontal axis, e.g. rounds, megabytes, seconds or iteration.
        """
        from fedbilevel import plots  # needs an extra

        chosen = metric or "upper_loss"
        for name in map(str, (chosen, against)):
            if not self.rows or name not in self.rows[-1]:
                raise UnknownNameError("column in the history", name, self.rows[-1] if self.rows else ())
        return plots.curve({self.name or chosen: [self.rows]}, x=against, y=chosen, title="", shown=True)

    def __repr__(self) -> str:
        last = self.final
        figures = ", ".join(f"{name} {last[name]:.4g}" for name in figures_of(last)[:3])
        end = "" if self.ending == Ending() else f" ({self.ending})"
        cost = f"{self.ledger['rounds']} rounds, {last.get('megabytes', 0.0):.3g} MB"
        gain = "" if self.baseline is None else f"; {self.baseline.sentence}"
        return f"<{self.name or 'run'}: {self.iteration} outer iterations{end}, {cost}; {figures}{gain}>"

    def _repr_html_(self) -> str:
        from fedbilevel import displays  # notebooks only

        return displays.result(self)
