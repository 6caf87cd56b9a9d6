"""Roster of the clients in each rank of a group, and the engine members that depend on it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedbilevel.columns import CALLS
from fedbilevel.engines.ranks import Group
from fedbilevel.errors import ProblemError, SettingError
from fedbilevel.federation.algorithm import Algorithm
from fedbilevel.federation.clients import BatchSize
from fedbilevel.federation.host import Host
from fedbilevel.federation.ledger import Ledger
from fedbilevel.oracle.population import Points
from fedbilevel.oracle.stationarity import measured
from fedbilevel.problem.client_data import ClientData, Holdings
from fedbilevel.problem.problem import Problem

_MOST_CLASSES = 1000  # more of them are not shown


def hosted(
    group: Group,
    algorithm: Algorithm,
    problem: Problem,
    clients: Sequence[Holdings],
    ids: Sequence[int] | None,
    **options: Any,
) -> tuple[Host, Roster]:
    """Return the host of the clients of this process, and the roster of all clients."""
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
    """All clients by number and by place, and the clients that are hosted here.

    Numbers address draws, the ledger and checkpoints. Places are the order in which clients were
    given; every rank hosts consecutive places. Facts about all clients are stored by place.
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
        points = (shared, host.y0) if group.size > 1 else ()  # a large y takes seconds
        group.check_same(
            repr(given).encode() + b"".join(vector.cpu().numpy().tobytes() for vector in points),
            "the ranks were not given the same run: algorithm, settings, seed, number of clients or initial "
            "point differ; start all with the same "
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
        """Return the positions in the host of those sorted places that are hosted in this process."""
        if self.group.size == 1:
            return places
        return self.within(places, places) - self.first

    def within(self, places: Tensor, values: Tensor) -> Tensor:
        """Return the values of the clients hosted here, from one value per place."""
        return (
            values if self.group.size == 1 else values[(places >= self.first) & (places < self.first + len(self.host))]
        )

    def rows(self, rows: Tensor) -> Tensor:
        """Return rows of all clients by place, from rows of the clients hosted here."""
        if self.group.size == 1:
            return rows
        width = rows[0].numel()
        return self.group.joined(rows.reshape(-1), [count * width for count in self.counts]).view(-1, *rows.shape[1:])

    def rows_at(self, rows: Tensor, places: Tensor) -> Tensor:
        """Return the rows of all clients at sorted places, from the rows of those hosted here."""
        if self.group.size == 1:
            return rows
        ends = torch.tensor(self.counts).cumsum(0)
        numbers = torch.bucketize(places, ends, right=True).bincount(minlength=len(ends)).tolist()
        width = rows.shape[1]
        return self.group.joined(rows.reshape(-1), [number * width for number in numbers]).view(-1, width)

    def trees(self, rows: Tensor, *, upper: bool) -> Any:
        """Return one dict per client, by place, from rows of the clients hosted here."""
        if self.group.size == 1:
            return self.host.trees(rows, upper=upper)
        layout, ragged = (self.host.layout_x if upper else self.host.layout_y), upper and self.x_sizes is not None
        return [layout.unravel(row) for row in self._apart(self._flat(rows, ragged), ragged)]

    # ---- checkpoints: by number, without padding ------------------------------------------------------------------

    def stored(self, rows: Tensor, written: Tensor | None = None, *, upper: bool) -> Tensor:
        """Return rows by number for a checkpoint, from rows of the clients hosted here.

        Only rank 0, which writes the rows to disk, receives them.

        written: flags by place of the clients that have written; None means all clients.
        """
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
        """Return positions and rows of hosted clients that had written, from stored rows.

        stored: rows that `stored` returned.
        written: flags by number, not by place, of the clients that had written; None means all
            clients.
        """
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
        ):  # older checkpoints also hold rows of clients that had written nothing
            numbers = torch.arange(len(written))
        chosen = torch.searchsorted(numbers, self.host.ids[here])
        if not ragged:
            return here, stored[chosen.to(stored.device)]
        parts = stored.split(sizes[numbers].tolist())
        return here, self.host.pad(torch.cat([stored[:0], *(parts[place] for place in chosen.tolist())]), here)

    def bill(self) -> Ledger:
        """Return the ledger of all clients.

        Every rank knows all messages, but knows oracle calls only of the clients that it hosts.
        """
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
        """Return the sample counts of every client, by role and, if labels are classes, by class."""
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
        """Return a digest of all data.

        It is computed from one digest per client, by number, so that no data leave a process.
        """
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
    """Members of an engine that hosts clients in its own processes."""

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
        """Method of computing each derivative, as chosen by timing.

        A second timing could choose differently, which would change the rounding.
        """
        return self.host.oracle.choices

    def bill(self) -> Ledger:
        return self.roster.bill()

    def residuals(self, state: Any) -> dict[str, float]:
        """Return the residual norms of the lower level and the linear system, without a charge.

        The norm of the linear system is omitted if the state has no u.
        """
        u = getattr(state, "u", None)
        return self.host.residuals(
            self._points(state.x), self._points(state.y), None if u is None else self._points(u), self.roster.group.sum
        )

    def stationarity(self, state: Any) -> dict[str, float]:
        """Return the norm of the hypergradient at the state, without a charge."""
        return {
            "hypergradient": measured(self.host, self._points(state.x), self._points(state.y), self.roster.group.sum)
        }

    def judged(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the measurement as it is, because no client is suspect."""
        return row

    def _points(self, value: Any) -> Points:
        """Return a value of the state in the form that measurements use."""
        return value

    def overview(self) -> dict[str, Any]:
        """Return the numbers of samples of every client."""
        return self.roster.overview()

    def check(self) -> None:
        """Raise an error if a value of the outer iteration is not finite."""
        self.host.check()

    def commit(self) -> None:
        """Do nothing, because the checkpoint holds all values that clients keep."""

    def finish(self, state: Any) -> None:
        """Do nothing, because the result holds all values that clients keep."""

    def stop_asked(self) -> bool:
        """Return False, because this engine cannot be stopped from outside."""
        return False

    def fingerprint(self) -> str:
        """Return a digest of all data."""
        return self.roster.fingerprint()

    def of_data(self) -> dict[str, Any]:
        """Return facts that distinguish this problem and these data from others."""
        host = self.host
        layouts = {"x": host.layout_x.describe(), "y": host.layout_y.describe()}
        low = {} if host.precision == "full" else {"precision": host.precision}
        return {**layouts, "data": self.fingerprint(), "losses": host.losses_away(), **low}


def digest(data: ClientData, position: int) -> bytes:
    """Return a digest of the data of one client."""
    state = hashlib.blake2b(digest_size=16)
    for role in sorted(data.fields):
        start, size = int(data.offsets[role][position]), int(data.sizes[role][position])
        state.update(role.encode())
        for name in sorted(data.fields[role]):
            tensor = data.fields[role][name][start : start + size].cpu().contiguous()
            state.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
            state.update(tensor.numpy().tobytes())
    return state.digest()
