"""The processes that run one federation together, and which clients live in which of them.

Every process (a rank) runs the same loop and the same server algorithm on the same numbers; only clients are divided. What a rank does not know by itself
passes through a `Group`. The group here is that of one process, which has nobody to ask; `distributed` has the one of several.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from fedbilevel.columns import CALLS
from fedbilevel.errors import ProblemError, SettingError
from fedbilevel.federation.algorithm import Algorithm
from fedbilevel.federation.clients import BatchSize, Host
from fedbilevel.federation.ledger import Ledger
from fedbilevel.oracle.population import Points
from fedbilevel.oracle.stationarity import measured
from fedbilevel.problem.client_data import ClientData, Holdings
from fedbilevel.problem.problem import Problem

EngineName = Literal["simulation", "distributed"]
_MOST_CLASSES = 1000  # more of them are not shown


class Group:
    """One process. All of these are asked by every rank at the same place of the program."""

    rank, size = 0, 1
    engine: EngineName = "simulation"

    def shares(self, num_clients: int) -> list[range]:
        """The places of the clients that each rank hosts."""
        return [range(num_clients)]

    def only(self, clients: Sequence[Holdings]) -> Sequence[Holdings]:
        """Those that this rank hosts, at their places; the others are let go."""
        return clients

    def device(self, asked: torch.device | str) -> torch.device | str:
        return asked

    def sum(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Float64 vectors, added over the ranks."""
        return parts

    def joined(self, part: Tensor, lengths: Sequence[int], *, everywhere: bool = True) -> Tensor:
        """Flat parts of the ranks one after the other; with `everywhere=False` only rank 0 gets them and the others nothing."""
        return part

    def swapped(self, parts: Sequence[Tensor], lengths: Sequence[int]) -> Sequence[Tensor]:
        """Flat bytes for every rank, for those of the given lengths from every rank; nothing passes where they are empty."""
        return parts

    def largest(self, value: int) -> int:
        return value

    def told(self, make: Callable[[], Any]) -> Any:
        """What rank 0 makes, plain enough for JSON. The others do not make it."""
        return make()

    def told_tensors(self, make: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        return make()

    def check_same(self, what: bytes, complaint: str) -> None:
        """An error with that complaint at all ranks unless all were given the same."""

    def meet(self) -> None:
        """Go on when everybody is here."""

    def together(self) -> AbstractContextManager[None]:
        """What fails inside at one rank fails at all of them, with the same message."""
        return nullcontext()


def hosted(
    group: Group,
    algorithm: Algorithm,
    problem: Problem,
    clients: Sequence[Holdings],
    ids: Sequence[int] | None,
    **options: Any,
) -> tuple[Host, Roster]:
    """A host of those clients that live in this process, and the roster of all."""
    if group.size == 1 or not isinstance(clients, Sequence):
        host = Host(algorithm, problem, clients, ids=ids, **options)
        return host, Roster(host, group)
    mine = group.shares(len(clients))[group.rank]
    numbers = list(mine) if ids is None else [ids[place] for place in mine]
    try:
        host = Host(
            algorithm, problem, [clients[place] for place in mine], ids=numbers, num_clients=len(clients), **options
        )
    except ProblemError as error:  # a host counts its clients from 0
        note = (
            f" (this rank hosts the clients from {mine.start} on, and calls the first of them 0)" if mine.start else ""
        )
        raise ProblemError(f"{str(error).removesuffix('.')}{note}.") from error
    return host, Roster(host, group)


class Roster:
    """All clients by number and by place, and which of them are hosted here.

    Numbers address draws, the ledger and checkpoints. Places are the order in which clients were given; every rank hosts a run of them. What is known of
    all clients is kept by place here, so that an engine can think of all of them and act on its own.
    """

    def __init__(self, host: Host, group: Group) -> None:
        self.host, self.group = host, group
        self.counts = [len(share) for share in group.shares(host.num_clients)]
        self.first = sum(self.counts[: group.rank])
        shared = host.x0 if host.x_sizes is None else host.x0.new_zeros(0)
        given = (
            host.algorithm,
            host.num_clients,
            host.stream.seed,
            host.dtype,
            host.batch_size,
            host.layout_x.describe(),
            host.layout_y.describe(),
        )
        group.check_same(
            repr(given).encode() + b"".join(vector.cpu().numpy().tobytes() for vector in (shared, host.y0)),
            "the ranks were not given the same run: algorithm, settings, seed, number of clients or initial point differ; start all with the same "
            "command, and call torch.manual_seed before a model is made.",
        )
        ragged = torch.zeros(len(host), dtype=torch.int64) if host.x_sizes is None else host.x_sizes
        self.ids, self.weights, sizes = self.rows(
            torch.stack([host.ids, host.weights(host.data.positions), ragged], dim=1)
        ).unbind(1)
        self.x_sizes = None if host.x_sizes is None else sizes
        self.place_of = self.ids.argsort()  # by number
        if not torch.equal(self.ids[self.place_of], torch.arange(len(self.ids))):
            raise SettingError(
                f"ids must number the {len(self.ids)} clients from 0, each once, got {self.ids.tolist()}."
            )

    def here(self, places: Tensor) -> Tensor:
        """Those of the places (sorted) that are hosted in this process, as positions of the host."""
        if self.group.size == 1:
            return places
        return self.within(places, places) - self.first

    def within(self, places: Tensor, values: Tensor) -> Tensor:
        """Of values at the places, those of clients hosted here."""
        return (
            values if self.group.size == 1 else values[(places >= self.first) & (places < self.first + len(self.host))]
        )

    def rows(self, rows: Tensor) -> Tensor:
        """One row per client hosted here, of all clients in the order of their places."""
        if self.group.size == 1:
            return rows
        width = rows[0].numel()
        return self.group.joined(rows.reshape(-1), [count * width for count in self.counts]).view(-1, *rows.shape[1:])

    def trees(self, rows: Tensor, *, upper: bool) -> Any:
        """One dict per client, by place, of rows of those hosted here."""
        if self.group.size == 1:
            return self.host.trees(rows, upper=upper)
        layout, ragged = (self.host.layout_x if upper else self.host.layout_y), upper and self.x_sizes is not None
        return [layout.unravel(row) for row in self._apart(self._flat(rows, ragged), ragged)]

    # ---- checkpoints: by number, without padding -----------------------------------------------------------------------

    def stored(self, rows: Tensor, written: Tensor | None = None, *, upper: bool) -> Tensor:
        """Rows by number of those clients (by place; None: all) that have `written` some; of them, `rows` are those hosted here. Only rank 0, which writes
        them to disk, gets them."""
        written = torch.ones(len(self.ids), dtype=torch.bool) if written is None else written
        here, ragged = (
            self.within(torch.arange(len(written)), written).nonzero()[:, 0],
            upper and self.x_sizes is not None,
        )
        width = rows.shape[1:].numel()
        sizes = (self.x_sizes if ragged and self.x_sizes is not None else torch.full((len(written),), width)) * written
        flat = self.host.unpad(rows, here) if ragged else rows.reshape(-1)
        if self.group.size > 1:
            flat = self.group.joined(flat, [int(part.sum()) for part in sizes.split(self.counts)], everywhere=False)
            if self.group.rank > 0:
                return flat
        order = self.ids[written].argsort()
        if ragged:
            parts = flat.split(sizes[written].tolist())
            return torch.cat([parts[place] for place in order.tolist()])
        return flat.view(-1, *rows.shape[1:])[order.to(flat.device)]

    def restored(self, stored: Tensor, written: Tensor | None = None, *, upper: bool) -> tuple[Tensor, Tensor]:
        """Positions and rows of those hosted here that had written, from what `stored` gave; `written` is by number here."""
        written = torch.ones(len(self.ids), dtype=torch.bool) if written is None else written
        here = written[self.host.ids].nonzero()[:, 0]
        ragged = upper and self.x_sizes is not None
        sizes = (
            self.x_sizes[self.place_of]
            if ragged and self.x_sizes is not None
            else torch.ones(len(written), dtype=torch.int64)
        )
        numbers = written.nonzero()[:, 0]
        if len(stored) > int(
            sizes[numbers].sum()
        ):  # older checkpoints hold rows of those, too, who had written nothing
            numbers = torch.arange(len(written))
        chosen = torch.searchsorted(numbers, self.host.ids[here])
        if not ragged:
            return here, stored[chosen.to(stored.device)]
        parts = stored.split(sizes[numbers].tolist())
        return here, self.host.pad(torch.cat([stored[:0], *(parts[place] for place in chosen.tolist())]), here)

    def bill(self) -> Ledger:
        """What all clients paid. A client's own rank knows all of it; messages between others are known to everybody, their oracle calls are not."""
        mine = self.host.ledger
        if self.group.size == 1:
            return mine
        whole = Ledger(mine.num_clients)
        whole.load_state_dict(mine.state_dict())
        table = self.rows(torch.stack(list(mine.columns.values()), dim=1)[self.host.ids])[self.place_of]
        whole.columns = {name: column.clone() for name, column in zip(mine.columns, table.unbind(1), strict=True)}
        own = torch.tensor(
            [[paid[name] for name in CALLS] for paid in mine.since.values()], dtype=torch.float64
        )  # whole numbers: sums are exact
        [summed] = self.group.sum([own.reshape(-1)])
        for phase, others in zip(mine.since, (summed.reshape(own.shape) - own).long().tolist(), strict=True):
            whole.since.setdefault(phase, Counter()).update(dict(zip(CALLS, others, strict=True)))
        return whole

    def overview(self) -> dict[str, Any]:
        """Who has what, by number: how many samples of every role and, where they have labels that are classes, of every class."""
        data, labels = self.host.data, {}
        sizes = {role: self.rows(data.sizes[role][:, None])[self.place_of, 0].tolist() for role in data.sizes}
        for role, fields in data.fields.items():
            label = fields.get("label")
            if label is None or label.ndim != 1 or label.is_floating_point():
                continue
            own = label.cpu().long()
            lowest, highest = (
                -self.group.largest(-int(own.min()) if len(own) else 0),
                self.group.largest(int(own.max()) if len(own) else 0),
            )
            if lowest >= 0 and highest < _MOST_CLASSES:
                counts = torch.stack(
                    [part.bincount(minlength=highest + 1) for part in own.split(data.sizes[role].tolist())]
                )
                counts = self.rows(counts)[self.place_of].T
                values = counts.sum(1).nonzero()[:, 0]
                labels[role] = {"values": values.tolist(), "counts": counts[values].tolist()}
        return {"num_clients": self.host.num_clients, "sizes": sizes, "labels": labels}

    def fingerprint(self) -> str:
        """Of all data: every client's own, by number, so that no data need to travel."""
        own = [list(digest(self.host.data, position)) for position in range(len(self.host))]
        table = self.rows(torch.tensor(own, dtype=torch.uint8))[self.place_of]
        return hashlib.blake2b(bytes(table.flatten().tolist()), digest_size=16).hexdigest()

    def _flat(self, rows: Tensor, ragged: bool) -> Tensor:
        flat = self.host.unpad(rows, self.host.data.positions) if ragged else rows.reshape(-1)
        if self.group.size == 1:
            return flat
        if ragged:
            assert self.x_sizes is not None
            lengths = [int(sizes.sum()) for sizes in self.x_sizes.split(self.counts)]
        else:
            lengths = [count * rows[0].numel() for count in self.counts]
        return self.group.joined(flat, lengths)

    def _apart(self, flat: Tensor, ragged: bool) -> Sequence[Tensor]:
        return flat.split(self.x_sizes.tolist() if ragged and self.x_sizes is not None else len(flat) // len(self.ids))


class Hosting:
    """What the run loop asks of an engine whose clients live in processes that it is itself part of."""

    host: Host
    roster: Roster

    @property
    def sampling(self) -> str:
        return self.host.sampling

    @property
    def batch_size(self) -> BatchSize:
        return self.host.batch_size

    @property
    def dtype(self) -> torch.dtype:
        return self.host.dtype

    @property
    def ways(self) -> dict[str, Any]:
        """How derivatives are computed, where that was measured: measured again, another way might be chosen, which rounds otherwise."""
        return self.host.oracle.choices

    def bill(self) -> Ledger:
        return self.roster.bill()

    def residuals(self, state: Any) -> dict[str, float]:
        """How far the state is from solving its lower level and, where it holds a solution u of the linear system, from solving that. Not charged."""
        u = getattr(state, "u", None)
        return self.host.residuals(
            self._points(state.x), self._points(state.y), None if u is None else self._points(u), self.roster.group.sum
        )

    def stationarity(self, state: Any) -> dict[str, float]:
        """How long the hypergradient is where the state is. Not charged."""
        return {
            "hypergradient": measured(self.host, self._points(state.x), self._points(state.y), self.roster.group.sum)
        }

    def _points(self, value: Any) -> Points:
        """A value of the state as a look at it takes it."""
        return value

    def overview(self) -> dict[str, Any]:
        """Who has what."""
        return self.roster.overview()

    def check(self) -> None:
        """After an outer iteration."""
        self.host.check()

    def commit(self) -> None:
        """Before a checkpoint is written. It holds all that clients keep."""

    def finish(self, state: Any) -> None:
        """After the last outer iteration. All that clients keep is at hand."""

    def stop_asked(self) -> bool:
        """Nobody can ask from outside."""
        return False

    def fingerprint(self) -> str:
        """Of all data that are at hand."""
        return self.roster.fingerprint()

    def of_data(self) -> dict[str, Any]:
        """What tells this problem and these data from others."""
        host = self.host
        layouts = {"x": host.layout_x.describe(), "y": host.layout_y.describe()}
        return {**layouts, "data": self.fingerprint(), "losses": host.losses_away()}


def digest(data: ClientData, position: int) -> bytes:
    """Of the data of one client."""
    state = hashlib.blake2b(digest_size=16)
    for role in sorted(data.fields):
        start, size = int(data.offsets[role][position]), int(data.sizes[role][position])
        state.update(role.encode())
        for name in sorted(data.fields[role]):
            tensor = data.fields[role][name][start : start + size].cpu().contiguous()
            state.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
            state.update(tensor.numpy().tobytes())
    return state.digest()
