"""Costs, counted from messages through the verbs and from calls of the oracle.

Every column is one int64 count per client. A round is one aggregation up and the broadcast that
follows it; a message down without an aggregation belongs to the previous round. Between peers a
round is one step in which messages pass; every message is charged once, to its sender and to its
edge. Values that never leave a client are never charged.

Costs are also kept by phase, summed over clients: every charge belongs to the running phase or,
between peers, to the current exchange. Computations of peers outside an exchange belong to "local".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbilevel.columns import CALLS, COLUMNS
from fedbilevel.federation.standing import Standing

_MOST_OPEN = 64  # kinds of messages that are counted before they are added up,
_OPEN_CELLS = 2**25  # and entries of their matrices
_MOST_DUE = 64  # groups of clients whose charges wait to be added to the columns
EDGES = ("messages", "floats", "bytes")
LOCAL, EARLIER = (
    "local",
    "earlier",
)  # phases: charges outside of any phase, and charges of older checkpoints without phases


@dataclass
class _Sent:
    """Number of messages along the same links and of the same size."""

    sent: Tensor  # held, so that its id is not given to another tensor
    version: int
    counts: Tensor
    degrees: Tensor
    each: int  # how many messages that is
    times: int = 0


class Totals(dict[str, int]):
    """Costs summed over clients.

    phases: the same costs by phase.
    """

    def __init__(
        self,
        amounts: Mapping[str, int] | Iterable[tuple[str, int]] = (),
        phases: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
    ) -> None:
        super().__init__(amounts)
        self.phases = {name: dict(paid) for name, paid in phases.items()}

    def __repr__(self) -> str:
        calls = ", ".join(f"{name} {self[name]}" for name in CALLS if self.get(name))
        megabytes = (self["bytes_up"] + self["bytes_down"]) / 1e6
        sent = f"{megabytes:.3g} MB ({self['floats_up']} floats up, {self['floats_down']} down)"
        return f"<{self['rounds']} rounds, {sent}; {calls}>"

    def _repr_html_(self) -> str:
        from fedbilevel import displays  # notebooks only

        return displays.ledger(self, self.phases)


class Ledger:
    """Costs of one run.

    The columns are floats and bytes up and down, calls of grad_y g, grad_x g, grad_x f, grad_y f, H
    v and J v, and samples evaluated. Each evaluation of a batch counts its samples once, for any
    number of derivatives.
    """

    def __init__(self, num_clients: int) -> None:
        self.num_clients = num_clients
        self.rounds = 0
        self._columns = {name: torch.zeros(num_clients, dtype=torch.int64) for name in COLUMNS}
        # by id of a tensor of clients: the tensor and its charges, which are added when columns are read
        self._due: dict[int, tuple[Tensor, Counter[str]]] = {}
        # the same for charges that differ between clients: clients, column, charges of one time, their sum, times
        self._due_each: dict[tuple[int, int, str], tuple[Tensor, str, Tensor, int, list[int]]] = {}
        # charges that recur, by id: what they are, and the clients of each time
        self._recurring: dict[int, tuple[Standing, list[Sequence[np.ndarray]]]] = {}
        self.since: dict[str, Counter[str]] = {LOCAL: Counter()}  # by phase, since this ledger was made or loaded
        self._before: dict[str, Counter[str]] = {}  # by phase, as loaded
        self._phase = LOCAL
        self._edges: dict[str, Tensor] = {}
        self._open: dict[
            tuple[int, int, int], _Sent
        ] = {}  # by links, floats and bytes: networks that repeat use the same ones over and over

    @property
    def columns(self) -> dict[str, Tensor]:
        """Counts by client."""
        for ids, amounts in self._due.values():
            clients = ids.cpu().numpy()
            for column, amount in amounts.items():
                np.add.at(self._columns[column].numpy(), clients, amount)
        for ids, column, each, _, (times,) in self._due_each.values():
            np.add.at(self._columns[column].numpy(), ids.cpu().numpy(), times * each.cpu().numpy())
        for standing, all_times in self._recurring.values():
            standing.settle(all_times, self._columns, self.num_clients)
        self._forget()
        return self._columns

    @columns.setter
    def columns(self, columns: dict[str, Tensor]) -> None:
        self._columns = columns
        self._forget()

    def _forget(self) -> None:
        """Drop charges that wait to be added to the columns."""
        self._due.clear()
        self._due_each.clear()
        self._recurring.clear()

    @property
    def edges(self) -> dict[str, Tensor]:
        """Counts by (sender, receiver), only if peers send to each other."""
        for floats, num_bytes in dict.fromkeys(key[1:] for key in self._open):
            self._edges = self._edges or {
                name: torch.zeros(self.num_clients, self.num_clients, dtype=torch.int64) for name in EDGES
            }
            messages = torch.zeros(self.num_clients, self.num_clients, dtype=torch.int64)
            for key, sent in self._open.items():
                if key[1:] == (floats, num_bytes):
                    messages += sent.counts.to(torch.int64) * sent.times
            for name, each in zip(EDGES, (1, floats, num_bytes), strict=True):
                self._edges[name] += messages * each
        self._open.clear()
        return self._edges

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Charge costs to the phase of that name within this context."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.leave(before)

    def enter(self, phase: str) -> str:
        """Charge costs to a phase from now on; return the phase before it, for `leave`."""
        before, self._phase = self._phase, phase
        if phase not in self.since:
            self.since[phase] = Counter()  # also at a rank that has no client in it
        return before

    def leave(self, before: str) -> None:
        self._phase = before

    def count_round(self, times: int = 1) -> None:
        self.rounds += times
        self._add("rounds", times)

    def _add(self, column: str, amount: int) -> None:
        self.since[self._phase][column] += amount

    @property
    def phases(self) -> dict[str, Counter[str]]:
        """Costs by phase, in the order of first runs, without phases that cost nothing."""
        both = {
            name: self._before.get(name, Counter()) + self.since.get(name, Counter())
            for name in (*self._before, *self.since)
        }
        return {name: paid for name, paid in both.items() if paid}

    def charge(self, column: str, ids: Tensor, amount: int | Tensor = 1) -> None:
        """Charge some clients.

        ids: numbers of the clients; the tensor must not be changed later.
        """
        if isinstance(amount, Tensor):
            self._add(column, int(amount.sum()))
            np.add.at(self._columns[column].numpy(), ids.cpu().numpy(), amount.cpu().numpy())
        else:
            self.charge_all(ids, {column: amount})

    def charge_all(self, ids: Tensor, amounts: Mapping[str, int]) -> None:
        """Charge some clients in several columns, the same amounts for each of them."""
        num, since = ids.shape[0], self.since[self._phase]
        due = self._due.get(id(ids))
        if due is None:
            if len(self._due) >= _MOST_DUE:
                _ = self.columns
            due = self._due[id(ids)] = (ids, Counter())
        for column, amount in amounts.items():
            since[column] += amount * num
            due[1][column] += amount

    def charge_each(self, column: str, ids: Tensor, each: Tensor, times: int) -> None:
        """Charge some clients `times` times, each its own amount; neither tensor may change later."""
        key = (id(ids), id(each), column)
        due = self._due_each.get(key)
        if due is None:
            if len(self._due_each) >= _MOST_DUE:
                _ = self.columns
            due = self._due_each[key] = (ids, column, each, int(each.sum()), [0])
        due[4][0] += times
        self._add(column, times * due[3])

    def charge_standing(self, standing: Standing, groups: Sequence[np.ndarray]) -> None:
        """Charge groups of clients what recurs; sums by phase are added by `add`.

        groups: numbers of the clients by group; the arrays must not be changed later.
        """
        _, times = self._recurring.setdefault(id(standing), (standing, []))
        times.append(groups)
        if len(times) >= _MOST_DUE:
            _ = self.columns

    def charge_once(self, column: str, clients: np.ndarray | slice, amounts: np.ndarray) -> None:
        """Charge each of some different clients its own amount; sums by phase are added by `add`."""
        self._columns[column].numpy()[clients] += amounts

    def add(self, phase: str, amounts: Mapping[str, int]) -> None:
        """Add sums over clients to the costs of a phase."""
        since = self.since.get(phase)
        if since is None:
            since = self.since[phase] = Counter()
        for column, amount in amounts.items():
            if amount:
                since[column] += amount

    def charge_message(self, direction: str, ids: Tensor, floats: int | Tensor, itemsize: int) -> None:
        if isinstance(floats, Tensor):
            self.charge(f"floats_{direction}", ids, floats)
            self.charge(f"bytes_{direction}", ids, floats * itemsize)
        else:
            self.charge_all(ids, {f"floats_{direction}": floats, f"bytes_{direction}": floats * itemsize})

    def charge_edges(self, sent: Tensor, floats: int, num_bytes: int, times: int = 1) -> None:
        """Charge messages, which are added up when `edges` is read.

        sent: matrix of messages; `sent[i, j]` is a message from i to j.
        floats: number of floats in each message.
        num_bytes: number of bytes in each message.
        times: how often they are sent.
        """
        key = (id(sent), floats, num_bytes)
        known = self._open.get(key)
        if known is None or known.version != sent._version:
            if known is not None or len(self._open) >= min(_MOST_OPEN, max(1, _OPEN_CELLS // self.num_clients**2)):
                _ = self.edges
            counts = sent.to("cpu", copy=True)  # the caller may change it later
            degrees = counts.sum(1, dtype=torch.int64)
            known = self._open[key] = _Sent(sent, sent._version, counts, degrees, int(degrees.sum()))
        known.times += times
        for column, amount in (("floats_up", floats * times), ("bytes_up", num_bytes * times)):
            self._add(column, known.each * amount)
            self._columns[column] += known.degrees * amount

    def totals(self) -> Totals:
        edges = self.edges
        messages = {"messages": int(edges["messages"].sum())} if edges else {}
        amounts = {
            "rounds": self.rounds,
            **messages,
            **{name: int(column.sum()) for name, column in self.columns.items()},
        }
        return Totals(
            amounts,
            {name: {column: paid[column] for column in ("rounds", *COLUMNS)} for name, paid in self.phases.items()},
        )

    def _repr_html_(self) -> str:
        return self.totals()._repr_html_()

    def asdict(self) -> dict[str, Any]:
        """Return all costs as plain numbers.

        Costs are summed over clients, by phase, by client and, between peers, by sender and
        receiver.
        """
        totals, by_client = self.totals(), {name: column.tolist() for name, column in self.columns.items()}
        return {
            "totals": totals,
            "phases": totals.phases,
            "clients": by_client,
            "edges": {name: counts.tolist() for name, counts in self.edges.items()},
        }

    @property
    def megabytes(self) -> float:
        paid = (*self._before.values(), *self.since.values())
        return sum(one["bytes_up"] + one["bytes_down"] for one in paid) / 1e6

    def state_dict(self) -> dict[str, Tensor]:
        edges = {f"edges-{name}": counts.clone() for name, counts in self.edges.items()}
        phases = {
            f"phase-{name}": torch.tensor([paid[column] for column in ("rounds", *COLUMNS)])
            for name, paid in self.phases.items()
        }
        return {
            "rounds": torch.tensor(self.rounds),
            **{name: column.clone() for name, column in self.columns.items()},
            **edges,
            **phases,
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.rounds = int(state["rounds"])
        self.columns = {name: state[name].clone() for name in COLUMNS}
        self._open.clear()
        self._edges = {name: state[f"edges-{name}"].clone() for name in EDGES if f"edges-{name}" in state}
        stored = {
            name.removeprefix("phase-"): paid.tolist() for name, paid in state.items() if name.startswith("phase-")
        }
        if not stored and (self.rounds or any(int(column.sum()) for column in self.columns.values())):
            stored = {EARLIER: [self.rounds, *(int(column.sum()) for column in self.columns.values())]}
        self._before = {
            name: Counter(dict(zip(("rounds", *COLUMNS), paid, strict=True))) for name, paid in stored.items()
        }
        self.since = {LOCAL: Counter()}
