"""Callbacks: functions that a run calls after every outer iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from fedbilevel.columns import falls, figures_of
from fedbilevel.errors import SettingError
from fedbilevel.runs.result import Progress

# True stops the run. With a true attribute `skips`, a callback is not called between measurements and checkpoints
# where a GPU runs several outer iterations at once.
Callback = Callable[[Progress], bool | None]


@runtime_checkable
class Follower(Protocol):
    """A callback with two further methods, for the start and for the end of a run.

    begin: method called before the first outer iteration.
    end: method called when the run ends for any reason, including an error.
    rows: all measurements so far; at the start, the first measurement or, in a resumed run, every
        measurement up to the checkpoint.
    stopped: "finished", "converged", "callback", "interrupted", "budget" or "failed".
    """

    def begin(self, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None: ...

    def __call__(self, now: Progress) -> bool | None: ...

    def end(self, rows: Sequence[Mapping[str, Any]], stopped: str) -> None: ...


class EarlyStopping:
    """A callback that stops a run after `patience` measurements without a better `metric`.

    Lower is better for losses and residuals; higher is better for all other metrics. `best` is the
    best measurement so far (the first one, if several are equal).

    >>> import fedbilevel as fb
    >>> from fedbilevel.tasks.data_cleaning import DataCleaning
    >>> enough = fb.EarlyStopping("test_accuracy", patience=2)
    >>> options = {"num_iterations": 200, "measure_every": 5, "lr_lower": 1.0}
    >>> result = fb.solve(*DataCleaning().build(), "fedavg", callbacks=[enough], **options)
    >>> result.stopped, enough.best["iteration"] == result.iteration - 10
    ('callback', True)
    """

    skips = True  # it looks at measurements only

    def __init__(self, metric: str, *, patience: int) -> None:
        if not isinstance(patience, int) or patience < 1:
            raise SettingError(f"the patience of early stopping is {patience!r}, expected at least 1 measurement.")
        self.metric, self.patience, self.waited = metric, patience, 0
        self.best: Mapping[str, Any] = {}

    def __call__(self, now: Progress) -> bool:
        if now.row is not None:
            if self.metric not in now.row:
                raise SettingError(
                    f"early stopping watches {self.metric!r}, which this run does not measure: "
                    f"use one of {', '.join(figures_of(now.row))}."
                )
            value, best = (
                -row[self.metric] if falls(self.metric) else row[self.metric] for row in (now.row, self.best or now.row)
            )
            better = not self.best or value > best or (math.isnan(best) and not math.isnan(value))
            self.best, self.waited = (now.row, 0) if better else (self.best, self.waited + 1)
        return self.waited >= self.patience
