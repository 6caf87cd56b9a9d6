"""The order of messages that a site answers: each outer iteration once, calls in order, and start
values only at the start.

A server that chose iterations and calls freely could repeat a computation with one value changed,
until the differences reveal single samples. A run may return to a saved version, for example after
a crash. The number of repeated outer iterations is counted on disk and bounded by the site's
policy.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fedbilevel.errors import WireError
from fedbilevel.sites.policy import Policy

FILE = "order.json"
_MEASUREMENTS = 2  # in one outer iteration


class Order:
    """Checks the order of the messages of one run. A plan with another digest has a new approval,
    so its count starts at zero.

    folder: the folder of the run.
    """

    def __init__(self, folder: Path, digest: str, num_iterations: int, policy: Policy) -> None:
        self._place, self._num_iterations, self._policy = folder / FILE, num_iterations, policy
        before = json.loads(self._place.read_bytes()) if self._place.exists() else {}
        mine = before.get("digest") == digest
        self._digest = digest
        self._latest, self._repeats = (int(before["latest"]), int(before["repeats"])) if mine else (-1, 0)
        self.back_to(None)

    def back_to(self, version: int | None) -> None:
        """Continue from a version that the site has loaded. None stands for the state before the
        first outer iteration."""
        self.version, self._iteration = version, -1 if version is None else version
        self._call = self._measured = 0
        self._begun = False  # whether anything was computed since

    def check(self, iteration: Any, call: int | None = None) -> None:
        """Raise if a message is out of order.

        call: number of the call of a phase; None stands for a measurement.
        """
        if type(iteration) is not int:
            raise WireError(f"a message is about outer iteration {iteration!r:.20}, expected a whole number.")
        first = self._iteration if self._begun else self._iteration + 1
        if not first <= iteration <= self._num_iterations:
            expected = f"{first} to {self._num_iterations}"
            raise WireError(
                f"a message is about outer iteration {str(iteration)[:20]}, expected {expected}: "
                "a site runs the outer iterations of the plan in their order."
            )
        same = self._begun and iteration == self._iteration
        if call is not None and same and call <= self._call:
            number = f"call {str(call)[:20]} of outer iteration {iteration}"
            raise WireError(f"a message is about {number}, expected a call after {self._call}.")
        if call is None and same and self._measured >= _MEASUREMENTS:
            raise WireError(
                f"a message asks for more than {_MEASUREMENTS} measurements of outer iteration {iteration}."
            )
        if not same and iteration <= self._latest:
            self._policy.check_repeats(self._repeats + 1)

    def begin(self, iteration: int, call: int | None = None) -> None:
        """Count a checked message before its computation."""
        if not (self._begun and iteration == self._iteration):
            self._repeats += iteration <= self._latest
            self._latest = max(self._latest, iteration)
            self._write()
            self._iteration, self._call, self._measured, self._begun = iteration, 0, 0, True
        if call is None:
            self._measured += 1
        else:
            self._call = call

    def reached(self, iteration: int) -> bool:
        """Return whether the site has begun this outer iteration, or has loaded a version after it."""
        return self._iteration >= iteration

    def at_start(self, iteration: int) -> bool:
        """Check whether a message may place start values, which requires that no version is loaded
        and no phase of outer iteration 1 has run."""
        return self.version is None and iteration <= 1 and (self._iteration < 1 or self._call == 0)

    def _write(self) -> None:
        beside = self._place.with_name(f"{FILE}.part")
        beside.write_text(json.dumps({"digest": self._digest, "latest": self._latest, "repeats": self._repeats}))
        os.replace(beside, self._place)
