"""What a site counts before an answer of a run with noise leaves it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedbilevel.aggregation.layer import Layer
from fedbilevel.engines.layered import account_of, events
from fedbilevel.errors import BudgetError
from fedbilevel.runs.privacy_account import attach


class Spending:
    """The account of one run at a site, whatever the server counts.

    A phase may store values at the site before its releases are counted. If they do not fit into the
    budget, nothing computed from them may leave, so every later phase is refused until the site has
    loaded a version, which holds values that were counted.
    """

    def __init__(self, layer: Layer | None, run_folder: Path) -> None:
        self._layer, self._refusal = layer, ""
        self.account = account_of(layer)
        if self.account is not None:
            attach(self.account, run_folder)

    def check(self) -> None:
        """Raise if values of the site hold releases that were not counted."""
        if self._refusal:
            raise BudgetError(self._refusal)

    def spend(self, num_sums: int, derived: Mapping[int, int]) -> None:
        """Count the releases of a call, or raise so that nothing leaves.

        num_sums: sequences that leave.
        derived: noisy derivatives, by the number of their sums.
        """
        if self.account is None or self._layer is None:
            return
        found = events(self._layer.settings, num_sums, derived)
        if not found:
            return
        try:
            self.account.spend(found)
        except BaseException as error:
            self._refusal = f"an earlier answer was not allowed: {str(error).removesuffix('.')}."
            raise

    def loaded(self) -> None:
        """Note that the values of the site are those of a version."""
        self._refusal = ""
