"""Charges of a replay to the clients whose flags it computes, in a few operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fedbilevel.engines.addressed import Partly


class PartlyPaid:
    """Charges of one recorded outer iteration.

    charges: where each belongs, and what it is; flags of a replay come in their order.
    """

    def __init__(self, host: Any, charges: Sequence[tuple[Any, Partly]]) -> None:
        self._host, self._groups = host, dict[Any, list[tuple[slice, Partly]]]()
        start = 0
        for where, one in charges:
            end = start + len(one.flags)
            self._groups.setdefault(where, []).append((slice(start, end), one))
            start = end
        self._tables = {where: self._table(group) for where, group in self._groups.items()}

    @staticmethod
    def _table(group: list[tuple[slice, Partly]]) -> tuple[list[str], np.ndarray]:
        """Return columns, and by charge and column what a client pays; all samples of a role come later."""
        columns = ["samples", *dict.fromkeys(column for _, one in group for column in one.columns)]
        table = np.zeros((len(group), len(columns)), dtype=np.int64)
        for row, (_, one) in zip(table, group, strict=True):
            for column in one.columns:
                row[columns.index(column)] += 1
            row[0] += one.size or 0
        return columns, table

    def pay(self, flags: Tensor, payers: Callable[[Any], tuple[str, Tensor]]) -> None:
        """Charge a replay.

        payers: function that returns the phase and the positions of the clients of a place.
        """
        found, host = flags.numpy(), self._host
        for where, group in self._groups.items():
            phase, positions = payers(where)
            columns, table = self._tables[where]
            active = np.stack([found[part] for part, _ in group]).astype(np.int64)
            paid = active.T @ table  # by client and column
            for row, (_, one) in zip(active, group, strict=True):
                if one.size is None:
                    paid[:, 0] += row * host.data_of(one.role).sizes[one.role][positions].numpy()
            ids = host.ids[positions].numpy()
            host.ledger.add(phase, dict(zip(columns, paid.sum(0).tolist(), strict=True)))
            for column, amounts in zip(columns, paid.T, strict=True):
                host.ledger.charge_once(column, ids, amounts)
