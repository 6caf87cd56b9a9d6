"""What a phase sees: the clients of the cohort that are hosted in this process, one row each, and everything it may ask of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fedbilevel.errors import NonFiniteError, SettingError
from fedbilevel.federation.algorithm import Algorithm, Sparse
from fedbilevel.federation.ledger import Ledger
from fedbilevel.oracle.population import Population
from fedbilevel.problem.client_data import Batch, Holdings
from fedbilevel.problem.draws import Address, Stream
from fedbilevel.problem.layout import one_row
from fedbilevel.problem.problem import Problem

Rows = Tensor | tuple[Tensor, ...]
BatchSize = int | None | Mapping[str, int | None]
Sampling = Literal["replacement", "epochs"]
OUTSIDE = "outside"  # the name in a mapping of batch sizes for batches that belong to no local step
_CHUNK, _CHUNK_THERE = (
    16,
    128,
)  # steps drawn at once, here and on a GPU: a draw costs the same for one step as for this many


@dataclass
class _Shelf:
    """The rows of one name: those of all clients in order, or of those who have written, in the order in which they first did, with room for more."""

    rows: Tensor
    slots: Tensor | None = (
        None  # (n,) where a client's row lies, -1: nowhere; None: rows are those of all clients in order
    )
    count: int = 0  # slots taken
    common: Tensor | None = None  # (d,) the row of everybody without a slot
    lent: bool = False  # somebody else may hold `rows`


class Store:
    """Rows by name, for hosted clients. Takes memory for those who have written and for nobody else; copies only when a part is written over shared rows."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.changes = 0  # so that somebody who saves it can see whether there is anything new
        self._shelves: dict[str, _Shelf] = {}

    @property
    def written(self) -> dict[str, Tensor]:
        """(n,) bool by name: who has written."""
        everybody = torch.ones(self.num_rows, dtype=torch.bool)
        return {
            name: everybody if shelf.slots is None or shelf.common is not None else shelf.slots >= 0
            for name, shelf in self._shelves.items()
        }

    @property
    def rows(self) -> dict[str, Tensor]:
        """(n, d) by name, zeros for those who have not written. To look at: a matrix may be made for it."""
        return {name: self._whole(shelf) for name, shelf in self._shelves.items()}

    def read(self, name: str, positions: Tensor, default: Tensor) -> Tensor:
        if name not in self._shelves:
            return default
        shelf = self._shelves[name]
        if self._is_all(positions):
            if shelf.slots is None:
                shelf.lent = True
                return shelf.rows
            if shelf.common is not None and shelf.count == 0:
                return shelf.common.expand(self.num_rows, -1)
        return self._taken(shelf, positions, default)

    def own(self, name: str, positions: Tensor) -> Tensor:
        """A copy of what the clients at `positions`, in any order, have written; all of them must have."""
        shelf = self._shelves[name]
        return self._taken(shelf, positions, shelf.rows[:0])

    def write(self, name: str, positions: Tensor, rows: Tensor) -> None:
        self.changes += 1
        if self._is_all(positions):
            if rows.stride(0) == 0 and self.num_rows > 1:  # views of one vector
                self._shelves[name] = _Shelf(
                    rows.new_empty(0, rows.shape[1]), torch.full((self.num_rows,), -1), common=rows[0].clone()
                )
            else:
                self._shelves[name] = _Shelf(rows.contiguous(), lent=True)  # the phase may go on using what it wrote
            return
        shelf = self._shelves.setdefault(
            name, _Shelf(rows.new_empty(0, rows.shape[1]), torch.full((self.num_rows,), -1))
        )
        if shelf.slots is None:
            if shelf.lent:
                shelf.rows, shelf.lent = shelf.rows.clone(), False
            slots = positions
        else:
            new = positions[shelf.slots[positions] < 0]
            self._make_room(shelf, shelf.count + len(new))
            shelf.slots[new] = torch.arange(shelf.count, shelf.count + len(new))
            shelf.count += len(new)
            slots = shelf.slots[positions]
        shelf.rows.index_copy_(0, slots.to(rows.device), rows)

    def clear(self) -> None:
        self.changes += 1
        self._shelves.clear()

    def _make_room(self, shelf: _Shelf, count: int) -> None:
        """Twice as much as before, so that rows are moved about once each."""
        if count > len(shelf.rows):
            rows = shelf.rows.new_empty(max(count, min(2 * len(shelf.rows), self.num_rows)), shelf.rows.shape[1])
            rows[: shelf.count] = shelf.rows[: shelf.count]
            shelf.rows = rows

    def _taken(self, shelf: _Shelf, positions: Tensor, default: Tensor) -> Tensor:
        if shelf.slots is None:
            return shelf.rows[positions.to(shelf.rows.device)]
        slots, rest = (
            shelf.slots[positions],
            default if shelf.common is None else shelf.common.expand(len(positions), -1),
        )
        has, place = slots >= 0, slots.clamp(min=0).to(shelf.rows.device)
        if bool(has.all()):
            return shelf.rows[place]
        return (
            torch.where(has.to(place.device)[:, None], shelf.rows[place], rest)
            if bool(has.any())
            else rest.contiguous()
        )

    def _whole(self, shelf: _Shelf) -> Tensor:
        zeros = shelf.rows.new_zeros(shelf.rows.shape[1]).expand(self.num_rows, -1)
        return shelf.rows if shelf.slots is None else self._taken(shelf, torch.arange(self.num_rows), zeros)

    def _is_all(self, positions: Tensor) -> bool:
        return len(positions) == self.num_rows  # positions are distinct and sorted


class StoreView:
    """A store as the phase sees it: the rows of its own clients. Reading needs a default, because a client may be new."""

    def __init__(self, store: Store, positions: Tensor) -> None:
        self._store, self._positions = store, positions

    def read(self, name: str, *, default: Any) -> Any:
        if isinstance(default, tuple):
            return tuple(self._store.read(f"{name}.{i}", self._positions, part) for i, part in enumerate(default))
        return self._store.read(name, self._positions, default)

    def write(self, **values: Rows) -> None:
        for name, rows in values.items():
            if isinstance(rows, tuple):
                for i, part in enumerate(rows):
                    self._store.write(f"{name}.{i}", self._positions, part)
            else:
                self._store.write(name, self._positions, rows)


class Step:
    """One local step. With unequal numbers of steps some clients are done before others: `where` keeps their values."""

    def __init__(self, clients: Clients, schedule: _Schedule, index: int) -> None:
        self._clients, self._schedule, self.index = clients, schedule, index
        self.count: Tensor = schedule.count  # (k, 1) local steps of each client in this phase
        self._batches: dict[tuple[str, str, int], Batch] = {}

    @property
    def active(self) -> Tensor | None:
        """(k,) on the host: who still steps; None: everybody."""
        return None if self._schedule.equal else self._schedule.taus > self.index

    def batch(self, role: str, purpose: str, *, times: int = 1) -> Batch:
        """Samples of `role` from the stream `purpose`: the same object when asked again, so that two evaluations share their samples. `times`: that
        many batches in one."""
        size = self._clients.batch_size(role)
        key = (role, "", 1) if size is None else (role, purpose, times)  # all samples: one batch, whatever it is for
        if key not in self._batches:
            self._batches[key] = self._schedule.batch(role, purpose, self.index, size, times, self.active)
        return self._batches[key]

    def draw(self, purpose: str, high: int) -> Tensor:
        return self._clients.draw(purpose, high, step=self.index)

    def where(self, new: Any, old: Any) -> Any:
        if self._schedule.equal:
            return new
        if isinstance(new, tuple):
            return tuple(self.where(a, b) for a, b in zip(new, old, strict=True))
        mask = (self._schedule.taus > self.index).to(new.device)[:, None]
        return torch.where(mask, new, old)


class _Schedule:
    """The steps of one phase; indices are drawn a chunk of steps at a time."""

    def __init__(self, clients: Clients, taus: Tensor, longest: int) -> None:
        self.clients, self.taus = clients, taus
        self.num = (
            int(taus.max()) if len(taus) else longest
        )  # a process that hosts nobody of the cohort goes through the same motions
        self.equal = bool((taus == self.num).all())
        if self.equal:
            self.count: Tensor = torch.full((len(taus), 1), self.num, dtype=clients.dtype, device=clients.device)
        else:
            self.count = taus.to(clients.dtype).to(clients.device)[:, None]
        self._drawn: dict[tuple[str, str, int], tuple[int, Tensor]] = {}

    def batch(self, role: str, purpose: str, index: int, size: int | None, times: int, active: Tensor | None) -> Batch:
        clients = self.clients
        if size is None:
            return clients.host.data.batch(clients.positions, role, None, active)
        chunk = _CHUNK if clients.device.type == "cpu" else _CHUNK_THERE
        start = index - index % chunk
        key = (role, purpose, times)
        if key not in self._drawn or self._drawn[key][0] != start:
            steps = range(start, min(start + chunk, max(self.num, index + 1)))
            self._drawn[key] = (start, clients.sample_indices(role, purpose, steps, size * times))
        return clients.host.data.batch(clients.positions, role, self._drawn[key][1][:, index - start], active)


class Bill:
    """What every client of a phase owes alike: counted here, and paid once."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.whole: Counter[str] = Counter()  # evaluations of all samples of a role, where clients have unequal numbers

    def add(self, batch: Batch, columns: Sequence[str]) -> None:
        self.calls.update(columns)
        if batch.size is None:
            self.whole[batch.role] += 1
        else:
            self.calls["samples"] += batch.size

    def pay(self, host: Host, positions: Tensor) -> None:
        ids = host.ids[positions]
        for column, number in self.calls.items():
            host.ledger.charge(column, ids, number)
        for role, number in self.whole.items():
            host.ledger.charge("samples", ids, number * host.data.sizes[role][positions])


class Clients:
    """k >= 0 clients of the cohort. Vectors are `(d,)` when shared and `(k, d)` when each client has its own."""

    def __init__(
        self,
        host: Host,
        positions: Tensor,
        iteration: int,
        call: int,
        shares: Tensor | None = None,
        bill: Bill | None = None,
    ) -> None:
        self.host, self.positions = host, positions
        self.shares = shares  # (k,) summing to one where only means weighted by them are wanted: derivatives at a shared point may then all be the mean
        self.bill = bill  # what is to be paid at the end of the phase; None: at once
        self._ids = host.ids[positions]
        self.num_clients = host.num_clients
        self.dtype, self.device = host.dtype, host.device
        self._when: tuple[Address, Address] = (iteration, call)
        self._ids_there: Tensor | None = None  # on the device
        self._last: tuple[str, Tensor, Tensor, Batch, tuple[int, int], Tensor] | None = None

    @property
    def ids(self) -> Tensor:
        """The clients' numbers."""
        return self._ids

    @property
    def iteration(self) -> int:
        """The outer iteration."""
        return int(self._when[0])

    @property
    def memory(self) -> StoreView:
        """What these clients keep from one outer iteration to the next."""
        return StoreView(self.host.memory, self.positions)

    @property
    def scratch(self) -> StoreView:
        """What these clients keep until the outer iteration ends."""
        return StoreView(self.host.scratch, self.positions)

    def __len__(self) -> int:
        return len(self.positions)

    def rows(self, *vectors: Tensor) -> Any:
        """One row per client: a view of a shared vector, or the rows themselves."""
        rows = tuple(v.expand(len(self), -1) if v.ndim == 1 else v for v in vectors)
        return rows if len(rows) > 1 else rows[0]

    def steps(self, num: int | tuple[int, ...]) -> list[Step]:
        """`num` local steps each, or one number per client of the federation."""
        if isinstance(num, tuple) and len(num) != self.num_clients:
            raise SettingError(
                f"{len(num)} numbers of local steps for {self.num_clients} clients: give one number, or one per client."
            )
        taus = torch.tensor(num)[self._ids] if isinstance(num, tuple) else torch.full((len(self),), num)
        schedule = _Schedule(self, taus, max(num) if isinstance(num, tuple) else num)
        return [Step(self, schedule, index) for index in range(schedule.num)]

    def batch(self, role: str, purpose: str, *, times: int = 1) -> Batch:
        """One batch outside any local step, drawn as that of a first step."""
        return _Schedule(self, torch.ones(len(self), dtype=torch.int64), 1).batch(
            role, purpose, 0, self.batch_size(role, outside=True), times, None
        )

    def draw(self, purpose: str, high: int, *, step: int = 0) -> Tensor:
        """(k,) integers in [0, high), each from its client's own stream."""
        many = torch.full((len(self),), high)
        iteration, call = self._when
        return self.host.stream.integers(
            purpose, self._ids, many, iteration=iteration, call=call, steps=range(step, step + 1), width=1
        )[:, 0, 0]

    def batch_size(self, role: str, *, outside: bool = False) -> int | None:
        size = self.host.batch_size
        if not isinstance(size, Mapping):
            return size
        return size[OUTSIDE] if outside and OUTSIDE in size else size.get(role)

    def sample_indices(self, role: str, purpose: str, steps: range, width: int) -> Tensor:
        """(k, len(steps), width) sample numbers: each drawn from all of the client's, or one after the other in an order that is drawn anew for every pass."""
        if self._ids_there is None:
            self._ids_there = self._ids.to(self.device)
        data, stream, (iteration, call) = self.host.data, self.host.stream, self._when
        if self.host.sampling == "epochs":
            draw, sizes = stream.epochs, data.sizes[role][self.positions]
        else:
            draw, sizes = stream.integers, data.num_samples(self.positions, role)
        return draw(
            f"{role}/{purpose}", self._ids_there, sizes, iteration=iteration, call=call, steps=steps, width=width
        )

    # ---- derivatives, each charged for the rows that use it --------------------------------------------------------

    def lower_grad(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        self._charge(batch, "gy")
        return self._once("gy", x, y, batch, self.host.oracle.lower_grad)

    def lower_grad_x(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        self._charge(batch, "gx")
        return self.host.oracle.lower_grad_x(x, y, batch, shares=self.shares)

    def upper_grad_x(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        self._charge(batch, "fx")
        return self._once("fx", x, y, batch, self.host.oracle.upper_grad_x)

    def upper_grad_y(self, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        self._charge(batch, "fy")
        return self.host.oracle.upper_grad_y(x, y, batch, shares=self.shares)

    def upper_grads(self, x: Tensor, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        self._charge(batch, "fx", "fy")
        return self.host.oracle.upper_grads(x, y, batch, shares=self.shares)

    def jacobian_product(self, x: Tensor, y: Tensor, v: Tensor, batch: Batch) -> Tensor:
        self._charge(batch, "jvp")
        return self.host.oracle.jacobian_product(x, y, v, batch, shares=self.shares)

    def hessian_product(self, x: Tensor, y: Tensor, v: Tensor, batch: Batch) -> Tensor:
        self._charge(batch, "hvp")
        return self.host.oracle.hessian_product(x, y, v, batch, shares=self.shares)

    def second_order(self, x: Tensor, y: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        self._charge(batch, "jvp", "hvp")
        return self.host.oracle.second_order(x, y, v, batch, shares=self.shares)

    def directions(
        self, x: Tensor, y: Tensor, u: Tensor, *, gy: Batch, fx: Batch, fy: Batch, ju: Batch, hu: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(f_x - J u, g_y, H u - f_y), each derivative on its own batch or several on one."""
        by_batch: dict[int, tuple[Batch, list[str]]] = {}
        for batch, column in ((gy, "gy"), (fx, "fx"), (fy, "fy"), (ju, "jvp"), (hu, "hvp")):
            by_batch.setdefault(id(batch), (batch, []))[1].append(column)
        for batch, columns in by_batch.values():
            self._charge(batch, *columns)
        return self.host.oracle.directions(x, y, u, gy=gy, fx=fx, fy=fy, ju=ju, hu=hu)

    def _once(self, kind: str, x: Tensor, y: Tensor, batch: Batch, evaluate: Callable[..., Tensor]) -> Tensor:
        """In the first step of a variance-reduced phase both gradients are at the same point: they are charged twice, as in the papers, and computed once."""
        if self.bill is None:
            return evaluate(x, y, batch, shares=self.shares)
        last, versions = self._last, (x._version, y._version)
        if (
            last is None
            or last[0] != kind
            or last[3] is not batch
            or last[4] != versions
            or not (_same(last[1], x) and _same(last[2], y))
        ):
            last = self._last = (kind, x, y, batch, versions, evaluate(x, y, batch, shares=self.shares))
        return last[5]

    def _charge(self, batch: Batch, *columns: str) -> None:
        if self.host.before_derivative is not None:
            self.host.before_derivative()
        if self.bill is not None and batch.active is None:
            self.bill.add(batch, columns)
            return
        pays = slice(None) if batch.active is None else batch.active
        ids = self._ids[pays]
        for column in columns:
            self.host.ledger.charge(column, ids)
        self.host.ledger.charge("samples", ids, batch.counts[pays])


class Host(Population):
    """The clients that live in this process: their data, oracle, memory and the values they keep. Every engine runs phases through it."""

    def __init__(
        self,
        algorithm: Algorithm,
        problem: Problem,
        clients: Sequence[Holdings],
        *,
        ids: Sequence[int] | None = None,
        num_clients: int | None = None,
        seed: int = 0,
        batch_size: BatchSize = None,
        sampling: Sampling = "replacement",
        **options: Any,
    ) -> None:
        super().__init__(problem, clients, **options)
        if sampling not in get_args(Sampling):
            raise SettingError(f"sampling is {sampling!r}, expected {' or '.join(map(repr, get_args(Sampling)))}.")
        self.sampling = sampling
        self.algorithm = algorithm
        self.ids = torch.arange(len(clients)) if ids is None else torch.tensor(list(ids))
        self.num_clients = len(clients) if num_clients is None else num_clients
        self.stream = Stream(seed)
        self.batch_size = _checked_batch_size(batch_size, self.data.sizes)
        self.memory, self.scratch, self.kept = (Store(len(clients)) for _ in range(3))
        self.ledger = Ledger(self.num_clients)
        self._alike: dict[int, Tensor] = {}  # equal shares, by their number
        self.before_derivative: Callable[[], None] | None = None  # raises when no more may be computed
        self.captures: Any = None  # an engine on a GPU puts `capture.Captures` here

    def width(self, name: str) -> int:
        algorithm = self.algorithm
        if name in algorithm.upper_space:
            return self.x0.shape[-1]
        if name in algorithm.lower_space:
            return len(self.y0)
        raise KeyError(f"{algorithm.name()} declares {name!r} neither in upper_space nor in lower_space.")

    def run_phase(
        self,
        name: str,
        values: Mapping[str, Any],
        positions: Tensor,
        iteration: int,
        call: int,
        weights: Tensor | None = None,
        *,
        pays: bool = True,
    ) -> dict[str, Tensor | Sparse | None]:
        """The one executor of phases. Checks what the phase returns before anybody uses it. `weights`: only means weighted by them are wanted. `pays`: not
        what is run again to see what went wrong."""
        method = getattr(self.algorithm, name, None)
        if not getattr(method, "__is_phase__", False):
            raise ValueError(f"{self.algorithm.name()} has no phase named {name!r}.")
        shares = self._shares(weights) if weights is not None and getattr(method, "__is_linear__", False) else None
        with torch.no_grad():
            if self.captures is not None:
                replayed: dict[str, Tensor | Sparse | None] | None = self.captures.run(
                    method, values, positions, iteration, call, shares
                )
                if replayed is not None:  # it was checked when it was captured; `check` looks at its values
                    return replayed
            bill = Bill()
            result: dict[str, Tensor | Sparse | None] = method(
                Clients(self, positions, iteration, call, shares, bill), **values
            )  # type: ignore[misc]
            if pays:
                bill.pay(self, positions)
        for key, value in result.items():
            if value is None:
                continue
            rows = value.rows if isinstance(value, Sparse) else value
            if key in ("x", "y") and rows.ndim == 2 and rows.shape[1] != self.width(key):
                raise ValueError(
                    f"phase {name!r} returned {key!r} with {rows.shape[1]} entries per client, expected {self.width(key)}."
                )
            if rows.ndim != 2 or len(rows) != len(positions):
                raise ValueError(
                    f"phase {name!r} returned {key!r} of shape {tuple(rows.shape)} for {len(positions)} clients: one row per client is needed."
                )
            if not bool(
                torch.isfinite(rows.sum())
            ):  # one pass in the good case; rows are looked at only when something is wrong
                bad = ~torch.isfinite(rows).all(1)
                if bool(bad.any()) and shares is not None:  # a mean cannot say whose fault it is
                    return self.run_phase(name, values, positions, iteration, call, pays=False)
                if bool(bad.any()):
                    client = int(self.ids[positions[bad.cpu()][0]])
                    raise NonFiniteError(
                        f"client {client} returned a value of {key!r} that is not finite in phase {name!r} of outer iteration {iteration}: "
                        "the steps are too long (lower the step sizes) or the data of that client are extreme."
                    )
        return result

    def check(self) -> None:
        """Whether what replayed phases returned was finite: asked once per outer iteration, because asking waits for the device."""
        if self.captures is not None:
            suspect = self.captures.suspect()
            if suspect is not None:
                captures, self.captures = self.captures, None
                try:
                    self.run_phase(*suspect, pays=False)  # as ever, and client by client: this names the culprit
                finally:
                    self.captures = captures

    def _shares(self, weights: Tensor) -> Tensor:
        """Weights that sum to one, where the data are."""
        k = len(weights)
        if bool((weights != 1).any()) or k == 0:
            return (weights.double() / weights.sum()).to(self.device, self.dtype)
        if k not in self._alike:
            self._alike[k] = torch.full((k,), 1 / k, dtype=self.dtype, device=self.device)
        return self._alike[k]


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether both are the same memory: the same vector, as itself or as every row."""
    one, other = one_row(one), one_row(other)
    return one is other or (
        one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
    )


def _checked_batch_size(size: BatchSize, roles: Mapping[str, Any]) -> BatchSize:
    for role in size if isinstance(size, Mapping) else ():
        if role != OUTSIDE and role not in roles:
            raise SettingError(
                f"batch_size names the role {role!r}, the clients have {', '.join(roles)}; {OUTSIDE!r} is for batches outside local steps."
            )
    for value in size.values() if isinstance(size, Mapping) else (size,):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise SettingError(
                f"batch_size is {value!r}, expected at least 1 sample, or None for all of a client's samples."
            )
    return size
