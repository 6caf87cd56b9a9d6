"""A server and its clients, one row each: all in this process, which is the default engine, or divided among the processes of a group."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fedbilevel.capture import Captures
from fedbilevel.clients import BatchSize
from fedbilevel.data.clients import Holdings
from fedbilevel.draws import SERVER
from fedbilevel.engines.group import Group, hosted
from fedbilevel.errors import CheckpointError, FedBilevelError, SettingError
from fedbilevel.federation import Algorithm, Cohort, Kept, Sparse, Value
from fedbilevel.problem import Problem


class Simulation:
    """The server and its n clients. Implements `Federation`.

    With a group of several processes the server is in each of them: what it knows (arrays, cohorts, who holds what, charges of messages) is the same
    everywhere, without asking. Places are those of all clients; only the host's own positions are of those that live here.

    ids: the clients' numbers, when they are not given in order: numbers address draws and the ledger, the order in memory does not matter.
    drops: for tests of robustness: a function (outer iteration, call) -> clients that do not answer that call.
    options: dtype, device, strategy and chunk_size of the population.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        problem: Problem,
        clients: Sequence[Holdings],
        *,
        seed: int = 0,
        cohort: Cohort = Cohort(),
        batch_size: BatchSize = None,
        ids: Sequence[int] | None = None,
        drops: Callable[[int, int], Iterable[int]] | None = None,
        group: Group = Group(),
        **options: Any,
    ) -> None:
        self.host, self.roster = hosted(group, algorithm, problem, clients, ids, seed=seed, batch_size=batch_size, **options)
        if self.host.device.type == "cuda" and self.host.oracle.strategy == "auto":
            self.host.captures = Captures(self.host)
        self.group, self.ids = group, self.roster.ids
        self.algorithm, self.problem, self.seed = algorithm, problem, seed
        self.num_clients, self.ledger = self.host.num_clients, self.host.ledger
        self.cohort, self.drops = cohort.checked(), drops
        self.weights = self.roster.weights[self.roster.place_of]
        if algorithm.needs_everyone and (cohort.size(self.num_clients) < self.num_clients or cohort.replacement):
            raise SettingError(f"{algorithm.name()} needs every client in every round, but the cohort is {cohort!r}: run it with all clients, Cohort().")
        self.kept_names = algorithm.kept_names(problem.scopes)
        self._versions: dict[str, int] = {}
        self._kept_in: dict[str, Tensor] = {}  # the outer iteration in which each client last wrote its row
        self._held = _Held(self.num_clients)
        self.iteration = self.call = self._draws = 0
        self._draw_cohort()

    # ---- verbs ---------------------------------------------------------------------------------------------------

    def initial(self) -> tuple[Any, Any]:
        return self.place("x", self.host.x0), self.place("y", self.host.y0)

    def start(self, name: str) -> Any:
        self.host.width(name)  # a name that the algorithm does not declare has no place
        return self.place(name, self.host.x0 if name in self.algorithm.upper_space else self.host.y0)

    def zeros(self, name: str) -> Any:
        return self.place(name, torch.zeros(self.host.width(name), dtype=self.host.dtype, device=self.host.device))

    def mean(self, phase: Callable[..., Any], /, **broadcast: Value) -> SimpleNamespace:
        return self._round(phase, broadcast, self._means)

    def gather(self, phase: Callable[..., Any], /, **broadcast: Value) -> SimpleNamespace:
        return self._round(phase, broadcast, self._by_client)

    def _means(self, sent: Mapping[str, Tensor], places: Tensor, times: Tensor) -> dict[str, Tensor]:
        """Sums of the rows of each process, added up in one exchange, divided once."""
        weights = times * self.roster.weights[places]
        mine = self.roster.within(places, weights)
        totals = self.group.sum([self.host.total(rows, mine) for rows in sent.values()])
        whole = float(weights.sum())
        return {name: (total / whole).to(rows.dtype) for (name, rows), total in zip(sent.items(), totals, strict=True)}

    def _by_client(self, sent: Mapping[str, Tensor], places: Tensor, _times: Tensor) -> dict[str, Tensor]:
        if len(places) < self.num_clients:
            missing = sorted({*range(self.num_clients)} - {*self.ids[places].tolist()})
            raise FedBilevelError(f"client {missing[0]} did not answer, but {self.algorithm.name()} needs one row from every client: run it with all clients.")
        return {name: self.roster.rows(rows)[self.roster.place_of.to(rows.device)] for name, rows in sent.items()}

    def _round(
        self, phase: Callable[..., Any], broadcast: Mapping[str, Value], join: Callable[[Mapping[str, Tensor], Tensor, Tensor], dict[str, Tensor]]
    ) -> SimpleNamespace:
        self.call += 1
        places, times = self._present(broadcast.values())
        positions = self.roster.here(places)
        values = {name: self._send(value, places, positions) for name, value in broadcast.items()}
        only_means = join == self._means and not self.kept_names
        weights = self.roster.within(places, times * self.roster.weights[places]) if only_means else None
        result = self.host.run_phase(phase.__name__, values, positions, self.iteration, self.call, weights)
        gathered: dict[str, Any] = dict.fromkeys(result)
        sent: dict[str, Tensor] = {}
        for name, value in result.items():
            rows = value.rows if isinstance(value, Sparse) else value
            if rows is None:
                continue
            if name in self.kept_names:
                gathered[name] = self._keep(name, places, positions, rows)
            else:
                floats, itemsize = (value.num_kept, rows.element_size() + 4) if isinstance(value, Sparse) else (rows.shape[1], rows.element_size())
                self.ledger.charge_message("up", self.ids[places], floats, itemsize)
                sent[name] = rows
        gathered.update(join(sent, places, times))
        self.ledger.rounds += bool(sent)
        return SimpleNamespace(**gathered)

    def resample(self) -> None:
        """Not with a local lower level: what a client computed in this outer iteration is then its own, and only it can go on with it."""
        if self.cohort.redraw == "per_factor" and self.problem.scopes.lower == "global":
            self._draw_cohort()

    def draw(self, purpose: str, high: int) -> int:
        words = self.host.stream.integers(
            purpose, torch.tensor([SERVER]), torch.tensor([high]), iteration=self.iteration, call=self.call, steps=range(1), width=1
        )
        return int(words)

    # ---- what the run loop uses --------------------------------------------------------------------------------------

    def begin(self, iteration: int, algorithm: Algorithm | None = None) -> None:
        """A new outer iteration: scratch is forgotten and a cohort is drawn. `algorithm`: the same one with other step sizes."""
        if algorithm is not None:
            self.algorithm = self.host.algorithm = algorithm
        self.host.check()
        self.iteration, self.call, self._draws = iteration, 0, 0
        self.host.scratch.clear()
        self._draw_cohort()

    def measure(self, x: Any, y: Any) -> dict[str, float]:
        """Losses and the problem's metrics over all clients and all their data. Not charged, and no draw depends on it."""
        xs, ys = (partial(self._resolve, value) if isinstance(value, Kept) else self.collect(value) for value in (x, y))  # kept ones a few at a time
        figures, diagnostics = self.host.measure(xs, ys, self.roster.rows), self.problem.diagnostics
        if diagnostics is not None and all(isinstance(value, Tensor) and value.ndim == 1 for value in (x, y)):
            figures.update(diagnostics(self.host.layout_x.unravel(x), self.host.layout_y.unravel(y)))
        return figures

    def collect(self, value: Any) -> Any:
        """A simulator can look into its clients: the rows behind a kept value, of those hosted here."""
        if isinstance(value, Tensor) and value.ndim == 2:  # rows by client number
            return value[self.host.ids.to(value.device)]
        return self._resolve(value, self.host.data.positions) if isinstance(value, Kept) else value

    def trees(self, value: Any, *, upper: bool) -> Any:
        rows = self.collect(value)
        return self.host.trees(rows, upper=upper) if rows.ndim == 1 else self.roster.trees(rows, upper=upper)

    def client_of(self, row: int) -> int:
        """Whose row it is, in a matrix of the state: rows are by number there."""
        return row

    def identity(self) -> dict[str, Any]:
        return {"cohort": self.cohort._asdict()}

    # ---- checkpoint: everything the next outer iteration depends on --------------------------------------------------

    def state_dict(self, state: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and plain values: copies, rows in the order of client numbers, private rows without their padding."""
        tensors: dict[str, Tensor] = {}
        plain: dict[str, Any] = {}
        seen: dict[int, str] = {}
        for name, value in state._asdict().items():
            if isinstance(value, Tensor) and id(value) in seen:
                plain[name] = {"same_as": seen[id(value)]}
            elif isinstance(value, Tensor):
                seen[id(value)] = name
                tensors[f"state.{name}"], tensors[f"held.{name}"] = value.clone(), self._held.mask(value)[self.roster.place_of]
            else:
                plain[name] = {"kept": value.name} if isinstance(value, Kept) else {"value": value}
        for label, store in (("memory", self.host.memory), ("kept", self.host.kept)):
            for name, mine in sorted(store.written.items()):
                written, rows = self.roster.rows(mine), store.own(name, mine.nonzero()[:, 0])
                tensors[f"{label}-written.{name}"] = written[self.roster.place_of]
                tensors[f"{label}.{name}"] = self.roster.stored(rows, written, upper=name in self.algorithm.upper_space)
        tensors.update({f"ledger.{name}": value for name, value in self.roster.bill().state_dict().items()})
        return tensors, plain

    def load_state_dict(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], state_type: Any) -> Any:
        device = self.host.device
        for label, store in (("memory", self.host.memory), ("kept", self.host.kept)):
            store.clear()
            for name in _below(tensors, f"{label}."):
                written, upper = tensors[f"{label}-written.{name}"], name in self.algorithm.upper_space
                store.write(name, *self.roster.restored(tensors[f"{label}.{name}"].to(device), written, upper=upper))
        self.ledger.load_state_dict({name: tensors[f"ledger.{name}"] for name in _below(tensors, "ledger.")})
        values: dict[str, Any] = {}
        for name in _below(tensors, "state."):
            values[name] = tensors[f"state.{name}"].to(device, copy=True)
            self._held.mask(values[name]).copy_(tensors[f"held.{name}"][self.ids])
        for name, entry in plain.items():
            if "kept" in entry:
                values[name] = Kept(entry["kept"], self._versions.get(entry["kept"], 0))
            else:
                values[name] = values[entry["same_as"]] if "same_as" in entry else entry["value"]
        if set(values) != set(state_type._fields):
            raise CheckpointError(
                f"the checkpoint holds {', '.join(values)}, the algorithm needs {', '.join(state_type._fields)}: resume with the version that wrote it."
            )
        return state_type(**values)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _draw_cohort(self) -> None:
        n, size = self.num_clients, self.cohort.size(self.num_clients)
        self._draws += 1
        if self.cohort.replacement:
            drawn = self.host.stream.integers(
                "cohort", torch.tensor([SERVER]), torch.tensor([n]), iteration=self.iteration, call=self._draws, steps=range(1), width=size
            )
            numbers, times = drawn.reshape(-1).unique(return_counts=True)
        elif size == n:
            numbers, times = torch.arange(n), torch.ones(n, dtype=torch.int64)
        else:
            numbers = self.host.stream.order("cohort", SERVER, n, iteration=self.iteration, call=self._draws, first=size)
            times = torch.ones(size, dtype=torch.int64)
        self._positions, sorting = self.roster.place_of[numbers].sort()
        self._times = times[sorting]

    def _present(self, values: Iterable[Value]) -> tuple[Tensor, Tensor]:
        """The cohort, less who drops, less who missed the call of this outer iteration that made a value it would need now."""
        here = torch.ones(len(self._positions), dtype=torch.bool)
        if self.drops is not None:
            absent = torch.tensor(sorted(self.drops(self.iteration, self.call)), dtype=torch.int64)
            here &= ~torch.isin(self.ids[self._positions], absent)
        for value in values:
            if isinstance(value, Kept) and value.iteration == self.iteration:
                here &= self._kept_in[value.name][self._positions] == self.iteration
        if not bool(here.any()):
            raise FedBilevelError(
                f"no client of the cohort answered call {self.call} of outer iteration {self.iteration}: wait for clients to return and resume."
            )
        return self._positions[here], self._times[here]

    def place(self, name: str, value: Tensor) -> Any:
        """A value where its scope says: kept at the clients, or at the server. No round."""
        if name not in self.kept_names:
            return value
        rows = value.expand(len(self.host), -1) if value.ndim == 1 else value
        return self._keep(name, torch.arange(self.num_clients), self.host.data.positions, rows)

    def _keep(self, name: str, places: Tensor, positions: Tensor, rows: Tensor) -> Kept:
        self.host.kept.write(name, positions, rows)
        self._versions[name] = self._versions.get(name, 0) + 1
        self._kept_in.setdefault(name, torch.full((self.num_clients,), -1))[places] = self.iteration
        return Kept(name, self._versions[name], self.iteration)

    def _resolve(self, kept: Kept, positions: Tensor) -> Tensor:
        if kept.version != self._versions.get(kept.name, 0):
            raise ValueError(f"clients no longer hold that version of {kept.name!r}: a later phase returned a new one.")
        zeros = torch.zeros(self.host.width(kept.name), dtype=self.host.dtype, device=self.host.device)
        return self.host.kept.read(kept.name, positions, zeros.expand(len(positions), -1))

    def _send(self, value: Value, places: Tensor, positions: Tensor) -> Any:
        if isinstance(value, Kept):
            return self._resolve(value, positions)
        if isinstance(value, Tensor):
            held = self._held.mask(value)
            lacks = places[~held[places]]
            self.ledger.charge_message("down", self.ids[lacks], value.shape[-1], value.element_size())
            held[lacks] = True
            if value.ndim == 2:
                return value[self.host.ids[positions].to(value.device)]
        return value


class _Held:
    """Which clients hold which of the server's arrays, so that an array is sent to each client once."""

    def __init__(self, num_clients: int) -> None:
        self.num_clients = num_clients
        self._masks: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def mask(self, array: Tensor) -> Tensor:
        """(n,) bool, to be changed in place. An array that was changed in place since counts as new."""
        key = id(array)
        known = self._masks.get(key)
        if known is None or known[0]() is not array or known[1] != array._version:
            known = (weakref.ref(array, self._forget(key)), array._version, torch.zeros(self.num_clients, dtype=torch.bool))
            self._masks[key] = known
        return known[2]

    def _forget(self, key: int) -> Callable[[Any], None]:
        def forget(dead: Any) -> None:
            if key in self._masks and self._masks[key][0] is dead:  # the number may have been given to a new array meanwhile
                del self._masks[key]

        return forget


def _below(tensors: Mapping[str, Tensor], prefix: str) -> list[str]:
    return [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]
