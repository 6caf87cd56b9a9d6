"""What a run gives back, and what it tells while it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel.columns import figures_of
from fedbilevel.errors import UnknownNameError
from fedbilevel.federation.ledger import Totals


class Progress(NamedTuple):
    """What a callback sees after every outer iteration. `row` is the measurement, if one was taken. num_rounds: where the run ends by rounds."""

    iteration: int
    num_iterations: int
    rounds: int
    megabytes: float
    row: Mapping[str, Any] | None
    num_rounds: int | None = None

    @property
    def share(self) -> float:
        """How much of the run is done, from 0 to 1."""
        by_rounds = self.rounds / self.num_rounds if self.num_rounds else 0.0
        return min(1.0, max(self.iteration / max(1, self.num_iterations), by_rounds))


@dataclass(frozen=True)
class Result:
    """x and y in the user's structure (one dict per client where they are private or local, and between peers).

    rows: the measurements, one dict each, and `history` the same as a table. ledger: what was paid, summed over clients, and by phase in `ledger.phases`.
    """

    x: Any
    y: Any
    rows: list[dict[str, Any]]
    ledger: Totals
    iteration: int
    stopped: str  # "finished", "callback" or "interrupted"
    path: Path | None = None
    state: Any = None
    name: str = ""

    @property
    def history(self) -> Any:
        """The measurements as a pandas DataFrame by outer iteration, where pandas is installed; otherwise the list of rows."""
        if find_spec("pandas") is None:
            return self.rows
        import pandas  # type: ignore[import-untyped]

        return pandas.DataFrame(self.rows).set_index("iteration")

    def plot(self, metric: str | None = None, *, against: str = "rounds") -> Any:
        """A matplotlib figure: a metric (by default the upper loss) against rounds, megabytes, seconds, iteration or another column."""
        from fedbilevel import plots  # an extra draws it

        chosen = metric or "upper_loss"
        for name in map(str, (chosen, against)):
            if not self.rows or name not in self.rows[-1]:
                raise UnknownNameError("column in the history", name, self.rows[-1] if self.rows else ())
        return plots.curve({self.name or chosen: [self.rows]}, x=against, y=chosen, title="", shown=True)

    def __repr__(self) -> str:
        last = self.rows[-1] if self.rows else {}
        figures = ", ".join(f"{name} {last[name]:.4g}" for name in figures_of(last)[:3])
        end = "" if self.stopped == "finished" else f" (stopped: {self.stopped})"
        return f"<{self.name or 'run'}: {self.iteration} outer iterations{end}, {self.ledger['rounds']} rounds, {last.get('megabytes', 0.0):.3g} MB; {figures}>"

    def _repr_html_(self) -> str:
        from fedbilevel import displays  # notebooks only

        return displays.result(self)
