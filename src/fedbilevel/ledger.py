"""What was paid, counted from what really passes through the verbs and the oracle.

Every column is one int64 count per client. A round is one aggregation up and the broadcast that follows it; a message down with
no aggregation belongs to the round before. Between peers a round is one step in which messages pass; every message is charged once, to its
sender, and to its edge. Values that never leave a client are never charged.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

EDGES = ("messages", "floats", "bytes")
COLUMNS = ("floats_up", "floats_down", "bytes_up", "bytes_down", "gy", "gx", "fx", "fy", "hvp", "jvp", "samples")


class Ledger:
    """Columns: floats and bytes up and down; calls of grad_y g, grad_x g, grad_x f, grad_y f, H v, J v; samples evaluated
    (each evaluation of a batch counts its samples once, whichever derivatives it yields)."""

    def __init__(self, num_clients: int) -> None:
        self.num_clients = num_clients
        self.rounds = 0
        self.columns = {name: torch.zeros(num_clients, dtype=torch.int64) for name in COLUMNS}
        self.edges: dict[str, Tensor] = {}  # (sender, receiver), only where peers send to each other

    def charge(self, column: str, ids: Tensor, amount: int | Tensor = 1) -> None:
        np.add.at(self.columns[column].numpy(), ids.cpu().numpy(), amount.cpu().numpy() if isinstance(amount, Tensor) else amount)

    def charge_message(self, direction: str, ids: Tensor, floats: int | Tensor, itemsize: int) -> None:
        self.charge(f"floats_{direction}", ids, floats)
        self.charge(f"bytes_{direction}", ids, floats * itemsize)

    def charge_edges(self, sent: Tensor, floats: int, num_bytes: int) -> None:
        """`sent[i, j]`: how many messages i sends to j; each carries so many floats and bytes."""
        sent = sent.to(device="cpu", dtype=torch.int64)
        if not self.edges:
            self.edges = {name: torch.zeros(self.num_clients, self.num_clients, dtype=torch.int64) for name in EDGES}
        for name, each in zip(EDGES, (1, floats, num_bytes), strict=True):
            self.edges[name] += sent * each
        self.columns["floats_up"] += sent.sum(1) * floats
        self.columns["bytes_up"] += sent.sum(1) * num_bytes

    def totals(self) -> dict[str, int]:
        messages = {"messages": int(self.edges["messages"].sum())} if self.edges else {}
        return {"rounds": self.rounds, **messages, **{name: int(column.sum()) for name, column in self.columns.items()}}

    @property
    def megabytes(self) -> float:
        return float(self.columns["bytes_up"].sum() + self.columns["bytes_down"].sum()) / 1e6

    def state_dict(self) -> dict[str, Tensor]:
        edges = {f"edges-{name}": counts.clone() for name, counts in self.edges.items()}
        return {"rounds": torch.tensor(self.rounds), **{name: column.clone() for name, column in self.columns.items()}, **edges}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.rounds = int(state["rounds"])
        self.columns = {name: state[name].clone() for name in COLUMNS}
        self.edges = {name: state[f"edges-{name}"].clone() for name in EDGES if f"edges-{name}" in state}
