"""The runs of which a cleaning consists: networks, a first detection, and last networks.

Each has a name that is shown while it runs, and a record of its own, so that a resumed cleaning does
not train it again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedbilevel.runs.callbacks import Callback
from fedbilevel.runs.endings import whole
from fedbilevel.runs.record import Record
from fedbilevel.runs.result import Result
from fedbilevel.runs.solve import solve

FOLDER = "parts"  # of the records, within the record of the cleaning


@dataclass(frozen=True)
class Parts:
    """How parts are run.

    progress: function that gets the name of a part before it begins, and returns a callback for it.
    record: folder of the record of the whole cleaning; None: nothing is kept.
    resume: continue parts from their checkpoints.
    before: what stands before the name of every part.
    """

    progress: Callable[[str], Callback] | None = None
    record: Path | None = None
    resume: bool = False
    before: str = ""

    def within(self, before: str) -> Parts:
        """Return parts whose names begin with these words."""
        return replace(self, before=f"{self.before}{before}, ")

    def folder(self, name: str) -> Path | None:
        """Return the folder of a part; None: nothing is kept."""
        return None if self.record is None else self.record / FOLDER / re.sub(r"\W+", "-", f"{self.before}{name}")

    def solve(self, name: str, *given: Any, **options: Any) -> Result:
        """Run a part to its end, or resume it; arguments as in `solve`."""
        place = self.folder(name)
        resume = self.resume and place is not None and Record(place).checkpoint.exists()
        callbacks = [] if self.progress is None else [self.progress(f"{self.before}{name}")]
        return whole(solve(*given, record=place, resume=resume, callbacks=callbacks, **options))

    @property
    def begun(self) -> bool:
        """Whether the record holds a checkpoint of a part."""
        return self.record is not None and any(self.record.glob(f"{FOLDER}/*/checkpoint.safetensors"))

    @property
    def alone(self) -> bool:
        """Whether the record holds parts, and not yet the run of the detector."""
        return self.begun and self.record is not None and not Record(self.record).checkpoint.exists()


ALONE = Parts()  # nothing is shown or kept
