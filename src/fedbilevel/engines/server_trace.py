"""The federation of a captured outer iteration: a server whose cohorts are tensors on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.engines.addressed import Addressed, NotCapturable, Partly, Whereabouts
from fedbilevel.engines.arenas import Setting, Traced
from fedbilevel.engines.cuda_graphs import addressed
from fedbilevel.engines.server_books import Book, Call
from fedbilevel.federation.algorithm import Kept, Sparse
from fedbilevel.federation.clients import Bill
from fedbilevel.federation.store import ROOM, Store
from fedbilevel.problem.layout import one_row


class Later(Kept):
    """Rows that a replay keeps at the clients."""


def all_ones(weights: Tensor) -> bool:
    return bool((weights == 1).all())


class _Place(NamedTuple):
    """One cohort on the device."""

    where: tuple[Tensor, Tensor]  # positions and numbers
    ones: bool
    weights: Tensor | None  # (k,) float64
    whole: Any  # their sum: a number or a tensor
    shares: Tensor | None


class _Rows:
    """Rows of a store in a captured outer iteration, for the clients of one cohort."""

    def __init__(self, server: TracedServer, store: Store) -> None:
        self._server, self._store = server, store

    def read(self, name: str, *, default: Any) -> Any:
        if isinstance(default, tuple):
            return tuple(self.read(f"{name}.{i}", default=part) for i, part in enumerate(default))
        server, store, cohort = self._server, self._store, self._server.cohort
        rows = server.fixed(store, name, default)
        here = server.setting.ints.take(
            server.setting.walk, lambda walk: store.slots(name, walk.cohorts[cohort].positions)
        )
        return torch.where((here >= 0)[:, None], rows.index_select(0, here.clamp(min=0)), default)

    def write(self, **values: Any) -> None:
        for name, value in values.items():
            if isinstance(value, tuple):
                self.write(**{f"{name}.{i}": part for i, part in enumerate(value)})
                continue
            server, store, cohort = self._server, self._store, self._server.cohort
            rows = server.fixed(store, name, value)
            here = server.setting.ints.take(server.setting.walk, partial(_claimed, store, name, cohort))
            server.save(rows, here)
            rows.index_copy_(0, here, value)


class _Scratch:
    """Rows that clients keep until the outer iteration ends: tensors of the capture."""

    def __init__(self, server: TracedServer) -> None:
        self._server, self._kept = server, dict[str, tuple[int, Any]]()

    def read(self, name: str, *, default: Any) -> Any:
        cohort, value = self._kept.get(name, (self._server.cohort, default))
        if cohort != self._server.cohort:
            raise NotCapturable("it reads scratch of another cohort")
        return self._server.scratch_rows(value)

    def write(self, **values: Any) -> None:
        self._kept.update({name: (self._server.cohort, value) for name, value in values.items()})


class TracedServer:
    """The federation of a captured outer iteration."""

    def __init__(self, fed: Any, setting: Setting, given: Mapping[str, Any]) -> None:
        self.fed, self.host, self.setting = fed, fed.host, setting
        self.num_clients, self.weights, self.num_answers = self.fed.num_clients, self.fed.weights, self.fed.num_answers
        self._number = setting.number(lambda walk: walk.iteration)
        self._draws = iter(setting.walk.draws)
        self.cohort, self._call, self._offset = 0, 0, 0
        self._arrays: dict[int, tuple[int, Tensor, int]] = {}  # by id: number, array, version
        self._num_arrays = 0
        for value in given.values():
            if isinstance(value, Tensor):
                self._array(value)
        self._num_given = self._num_arrays
        self._calls: list[Call] = []
        self._finite: list[Tensor] = []  # numbers that must be finite
        self._means: list[Tensor] = []
        self._partly: list[tuple[Any, Partly]] = []
        self._saved: list[tuple[Tensor, Tensor, str]] = []
        self._results: dict[str, Tensor] = {}
        self._fixed: dict[tuple[Store, str], Tensor] = {}
        self.memory, self.kept = _Rows(self, self.host.memory), _Rows(self, self.host.kept)
        self.scratch = _Scratch(self)

    def __enter__(self) -> TracedServer:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _leave(self) -> None:
        """Leave the present cohort."""
        self._stack.close()

    def _open(self) -> None:
        """Enter the present cohort: its data and features are those of the device's numbers."""
        setting, number, host = self.setting, self.cohort, self.host
        members, walk = setting.walk.cohorts[number], setting.walk
        of_ints, of_floats = partial(setting.of_cohort, setting.ints), partial(setting.of_cohort, setting.floats)
        here = of_ints(lambda walk: walk.cohorts[number].positions)
        ids = of_ints(lambda walk: host.ids[walk.cohorts[number].positions])
        ones, weights, shares = all_ones(members.weights), None, None
        whole: Any = float(members.weights.sum())
        if not ones:
            weights = of_floats(lambda walk: walk.cohorts[number].weights.double())
            whole = of_floats(lambda walk: walk.cohorts[number].weights.sum().double()[None])
            shares = of_floats(lambda walk: _portions(walk.cohorts[number].weights)).to(host.dtype)
        else:
            shares = host._shares(members.weights)
        self._place = _Place((here, ids), ones, weights, whole, shares)
        self._stack = ExitStack()
        self._stack.enter_context(addressed(host, members.positions, here, walk.rooms))
        self._enter_oracle()

    def _enter_oracle(self) -> None:
        """Compute features of the present cohort alone."""
        setting = self.setting
        setting.asked[self.cohort] = self._stack.enter_context(
            self.host.oracle.alone(setting.buys.get(self.cohort, ()), frozen=setting.frozen, keeps_backs=setting.exact)
        )

    def _clients(self, shares: Tensor | None, bill: Bill, partly: list[Partly]) -> Addressed:
        """Return the clients of a call."""
        where = Whereabouts(*self._place.where, self._number, self._call)
        positions = self.setting.walk.cohorts[self.cohort].positions
        return Addressed(
            self.host, positions, where, shares, bill, partly=partly, memory=self.memory, scratch=self.scratch
        )

    def begin(self, offset: int) -> None:
        """Begin a later outer iteration of the same capture.

        offset: number of outer iterations before it.
        """
        self._stack.close()
        self.cohort, self._call, self._offset, self.scratch = self.cohort + 1, 0, offset, _Scratch(self)
        self._number = self.setting.number(lambda walk: walk.iteration + offset)
        self._open()

    # ---- verbs ----------------------------------------------------------------------------------------------------

    @property
    def iteration(self) -> Any:
        return self._number.view(()).double()

    def draw(self, purpose: str, high: int) -> int:
        value = next(self._draws, None)
        if value is None:
            raise NotCapturable("it draws another number of integers than before")
        return value

    def resample(self) -> None:
        before = self.cohort
        if self.fed.cohort.redraw == "per_factor" and self.fed.problem.scopes.lower == "global":
            self._leave()
            self.cohort = before + 1
            self._open()

    def initial(self) -> tuple[Any, Any]:
        return self.start("x"), self.start("y")

    def start(self, name: str) -> Any:
        self._check_at_server(name)
        return self.fed.start(name)

    def zeros(self, name: str) -> Any:
        self._check_at_server(name)
        return self.fed.zeros(name)

    def _check_at_server(self, name: str) -> None:
        if name in self.fed.kept_names:
            raise NotCapturable(f"it places {name!r} at the clients")

    def mean(self, phase: Callable[..., Any], /, **broadcast: Any) -> SimpleNamespace:
        return self._called(phase, broadcast, self._mean)

    def gather(self, phase: Callable[..., Any], /, **broadcast: Any) -> SimpleNamespace:
        if len(self._place.where[0]) < self.num_clients:
            raise NotCapturable("it gathers rows of some clients only")
        return self._called(phase, broadcast, self._by_client)

    def __getattr__(self, name: str) -> Any:
        raise NotCapturable(f"it uses {name!r} of the federation")

    def _called(self, phase: Any, broadcast: Mapping[str, Any], join: Callable[[Tensor], Tensor]) -> SimpleNamespace:
        self._call += 1
        place, call = self._place, Call(phase.__name__, self.cohort, self._offset)
        self._calls.append(call)
        given = {name: self._sent(value, call) for name, value in broadcast.items()}
        linear = getattr(phase, "__is_linear__", False) and not self.fed.kept_names and join == self._mean
        partly: list[Partly] = []
        clients = self._clients(place.shares if linear else None, call.bill, partly)
        found = phase(clients, **given)
        call.bill = deepcopy(call.bill)
        self._partly += [((call.phase, self.cohort), one) for one in partly]
        self.num_answers = len(clients)
        results: dict[str, Any] = dict.fromkeys(found)
        for name, value in found.items():
            if value is None:
                continue
            rows = value.rows if isinstance(value, Sparse) else value
            if name in self.fed.kept_names:
                self._finite.append(one_row(rows).sum(dtype=torch.float64).view(1))
                self.kept.write(**{name: rows})
                call.kept.append(name)
                results[name] = Later(name, 0)
                continue
            floats, places = (value.num_kept, 4) if isinstance(value, Sparse) else (rows.shape[1], 0)
            call.up.append((floats, rows.element_size() + places))
            results[name] = join(rows)
            self._means.append(results[name])
            self._finite.append(results[name].flatten())  # a mean is finite if its rows are
        return SimpleNamespace(**results)

    def _sent(self, value: Any, call: Call) -> Any:
        if isinstance(value, Kept):
            host, k = self.host, len(self._place.where[0])
            zeros = torch.zeros(host.width(value.name), dtype=host.dtype, device=host.device)
            return self.kept.read(value.name, default=zeros.expand(k, -1))
        if isinstance(value, Tensor) and value.ndim > 0:  # a number travels in the header
            call.down.append((self._array(value), value.shape[-1], value.element_size()))
            return value[self._place.where[1]] if value.ndim == 2 else value
        return value

    def _array(self, value: Tensor) -> int:
        """Return the number of an array, by which clients know whether they hold it."""
        known = self._arrays.get(id(value))
        if known is None or known[2] != value._version:
            known = self._arrays[id(value)] = (self._num_arrays, value, value._version)
            self._num_arrays += 1
        return known[0]

    def _mean(self, rows: Tensor) -> Tensor:
        """Return the weighted mean with the operations of an engine, and so with its bits."""
        place = self._place
        if rows.stride(0) == 0 and len(rows) > 0:
            total = rows[0].double() * place.whole
        elif place.ones:
            total = rows.sum(0, dtype=torch.float64)
        else:
            assert place.weights is not None
            total = (rows.double() * place.weights[:, None]).sum(0)
        if isinstance(place.whole, Tensor) and total.is_cuda:  # a GPU divides by a number by multiplying
            return (total * place.whole.reciprocal()).to(rows.dtype)
        return (total / place.whole).to(rows.dtype)

    def _by_client(self, rows: Tensor) -> Tensor:
        order = self.setting.ints.take(self.setting.walk, lambda walk: self.fed.place_of)
        return rows[order]

    def scratch_rows(self, value: Any) -> Any:
        """Return rows of scratch as a phase sees them."""
        return value

    # ---- inside ---------------------------------------------------------------------------------------------------

    def fixed(self, store: Store, name: str, like: Tensor) -> Tensor:
        if store.num_rows * like.shape[1] * like.element_size() > ROOM:
            raise NotCapturable("rows that clients keep are too large to stay in place")
        rows = self._fixed[store, name] = store.fixed(name, like)
        return rows

    def save(self, rows: Tensor, here: Tensor) -> None:
        """Keep rows as they were, for the search of a client whose value is not finite."""
        label = f"saved.{len(self._saved)}"
        self._results[label] = rows.index_select(0, here)
        self._saved.append((rows, here, label))

    def traced(self, state: Any) -> Traced:
        values = state._asdict()
        for name, value in values.items():
            if isinstance(value, Tensor):
                if value.device.type != self.host.device.type:
                    raise NotCapturable(f"{name!r} is not on the device")
                self._results[f"state.{name}"] = value
                if value.is_floating_point() and not any(value is mean for mean in self._means):
                    self._finite.append(one_row(value).flatten())  # numbers that the server has computed
        whole = torch.cat([torch.zeros(1, device=self.host.device), *self._finite]).sum(dtype=torch.float64)
        finite = whole - whole == 0  # infinity minus infinity is not a number
        self._results["flags"] = torch.cat([finite.view(1), *(one.flags for _, one in self._partly)])
        arrays = {key: number for key, (number, _, _) in self._arrays.items()}
        sizes = [len(one.places) for one in self.setting.walk.cohorts]
        book = Book(self.fed, self._calls, arrays, self._num_given, sizes)
        return Traced(values, book, self._results, self._partly, self._saved, self._fixed)


def _portions(weights: Tensor) -> Tensor:
    return weights.double() / weights.sum()


def _claimed(store: Store, name: str, cohort: int, walk: Any) -> Tensor:
    return store.claim(name, walk.cohorts[cohort].positions)
