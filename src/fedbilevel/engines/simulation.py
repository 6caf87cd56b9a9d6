"""Engine of a server and its clients, with one row per client.

All clients are in this process (the default engine) or divided among the processes of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedbilevel.aggregation.attacks import Attack
from fedbilevel.aggregation.layer import Layer
from fedbilevel.aggregation.sealing import addressed, hide_examples, ring_of
from fedbilevel.aggregation.settings import Aggregation
from fedbilevel.engines.cuda_graphs import Captures
from fedbilevel.engines.engine import resent
from fedbilevel.engines.in_turn import Sums, in_turn, memory_of, pools, room
from fedbilevel.engines.layered import identity_of, layered_figures, spend
from fedbilevel.engines.layered_means import Answers
from fedbilevel.engines.planned import PlannedIterations, Refusals
from fedbilevel.engines.ranks import Group
from fedbilevel.engines.roster import Hosting, hosted
from fedbilevel.engines.server import Server, below
from fedbilevel.engines.server_graphs import ServerIterations
from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import Algorithm, Cohort, Kept, Sparse, Value
from fedbilevel.federation.clients import BatchSize
from fedbilevel.federation.store import Store
from fedbilevel.federation.stragglers import Stragglers
from fedbilevel.oracle.population import Points, figures
from fedbilevel.oracle.portions import total
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.problem.validation import own_figures


class Simulation(Hosting, Server):
    """The server and its n clients; implements `Federation`.

    With a group of several processes the server runs in each of them: its knowledge (arrays,
    cohorts, held arrays, charges of messages) is the same in every process without communication.
    Places count all clients; positions count the clients of the host.

    ids: numbers of the clients, if they are not given in order; draws and the ledger use these
        numbers, and the order in memory does not matter.
    drops: for tests of robustness, a function (outer iteration, call) -> clients that do not answer
        that call.
    stragglers: clients that do not answer, drawn by address.
    aggregation: what happens to the rows that clients send.
    attack: clients that send wrong rows, for experiments.
    options: dtype, device, strategy and chunk_size of the population; with the strategy "loop" and a
        chunk_size, so many clients work at a time, see `in_turn`.
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
        stragglers: Stragglers = Stragglers(),
        aggregation: Aggregation | None = None,
        attack: Attack | None = None,
        group: Group = Group(),
        **options: Any,
    ) -> None:
        self.attack = None if attack is None or attack.kind == "none" else attack
        if self.attack is not None:
            if group.size > 1:
                raise SettingError(
                    f"attack is {attack!r}, and attackers know the rows of all clients: leave it out, or run all "
                    "clients in one process."
                )
            clients = self.attack.poisoned(clients, range(len(clients)) if ids is None else ids, seed)
            self.attackers = self.attack.attackers(len(clients), seed)
        self.host, self.roster = hosted(
            group, algorithm, problem, clients, ids, seed=seed, batch_size=batch_size, **options
        )
        hide_examples(aggregation, self.host, addressed(self.host.stream))
        on_gpu = self.host.device.type == "cuda"
        oracle = self.host.oracle
        if oracle.strategy == "auto" and self.host.noise is None and (on_gpu or not oracle.compiles):
            self.host.captures = Captures(self.host) if on_gpu else Refusals()
        self._has_room = False  # not known before the first message, which shows how large rows are
        self._totals: dict[str, Tensor] = {}
        self.group, self.drops, self.stragglers = group, drops, stragglers.checked()
        if algorithm.needs_everyone and stragglers.dropout:
            raise SettingError(
                f"{algorithm.name()} needs every client in every round, but stragglers.dropout is "
                f"{stragglers.dropout:g}: leave it out."
            )
        super().__init__(
            algorithm,
            problem,
            seed=seed,
            cohort=cohort,
            ids=self.roster.ids,
            weights=self.roster.weights,
            ledger=self.host.ledger,
            stream=self.host.stream,
            layer=None
            if aggregation is None
            else Layer(aggregation, algorithm, self.host.stream, ring_of(aggregation, addressed(self.host.stream))),
        )
        iterations = ServerIterations if on_gpu else PlannedIterations
        self.graphs = None if self.host.captures is None else iterations(self)

    # ---- verbs ----------------------------------------------------------------------------------------------------

    def initial(self) -> tuple[Any, Any]:
        return self.place("x", self.host.x0), self.place("y", self.host.y0)

    def start(self, name: str) -> Any:
        self.host.width(name)  # a name that the algorithm does not declare has no place
        return self.place(name, self.host.x0 if name in self.algorithm.upper_space else self.host.y0)

    def zeros(self, name: str) -> Any:
        return self.place(name, torch.zeros(self.host.width(name), dtype=self.host.dtype, device=self.host.device))

    def place(self, name: str, value: Tensor) -> Any:
        if name not in self.kept_names:
            return value
        rows = value.expand(len(self.host), -1) if value.ndim == 1 else value
        self.host.kept.write(name, self.host.data.positions, rows)
        return self._keep(name, torch.arange(self.num_clients))

    def _ask(
        self, phase: str, broadcast: Mapping[str, Value], places: Tensor, times: Tensor, means: bool
    ) -> tuple[Answers, Tensor, Tensor]:
        positions = self.roster.here(places)
        for sent in broadcast.values():
            if isinstance(sent, Tensor):
                self._lacking(sent, places)
        given = lambda some: {name: self._given(one, some) for name, one in broadcast.items()}
        run = lambda values, some, weights: self.host.run_phase(phase, values, some, self.iteration, self.call, weights)
        only_means = means and self.attack is None
        weights = self.roster.within(places, self._counts(places, times)) if only_means else None
        if not self._has_room and len(positions):
            self._has_room = True
            room(self.host, broadcast, len(positions), memory_of(self.host.device))
        at_once, own = self.host.at_once, None if self.kept_names else weights
        together = self.layer is not None or self.attack is not None or pools(self.host, phase, own)
        if at_once is not None and len(positions) > at_once and not together:
            sums = Sums(self.host, self.kept_names, weights, len(positions))
            turns: Answers = {**in_turn(self.host, run, given, positions, sums)}
            self._totals = sums.totals
            return turns, places, times
        values, self._totals = given(positions), {}
        computed = run(values, positions, own)
        answers: Answers = {**computed}
        for name, value in computed.items():
            if name in self.kept_names and value is not None:
                self.host.kept.write(name, positions, value.rows if isinstance(value, Sparse) else value)
        if self.attack is not None:
            answers = self.attack.changed(answers, values, self.kept_names, self.host.ids[positions], self.attackers)
        if self.layer is None:
            return answers, places, times
        leaves = [name for name, value in answers.items() if value is not None and name not in self.kept_names]
        spend(self.account, self.layer.settings, len(leaves), self._derived())
        encoded = self.layer.encode(
            phase, answers, values, self.kept_names, self.host.feedback, positions, self.host.ids[positions],
            iteration=self.iteration, call=self.call, fixed=self._fixed(places, times),
        )  # fmt: skip
        return encoded, places, times

    def _derived(self) -> dict[int, int]:
        """Return the noisy derivatives of the call, those of the process with the most of them."""
        found = {} if self.host.noise is None else self.host.noise.taken()
        return {parts: self.group.largest(times) for parts, times in found.items()}

    def _given(self, value: Value, positions: Tensor) -> Any:
        """Return a value of a message as the clients at `positions` see it."""
        if isinstance(value, Kept):
            return self._resolve(value, positions)
        if isinstance(value, Tensor) and value.ndim == 2:
            return value[self.host.ids[positions].to(value.device)]
        return value

    def _absent(self) -> Iterable[int]:
        if self.drops is not None:
            return self.drops(self.iteration, self.call)
        if not self.stragglers.dropout:
            return ()
        return self.stragglers.absent(self.stream, self.ids[self._positions], self.iteration)

    def _summed(self, sent: Mapping[str, Tensor], places: Tensor, weights: Tensor) -> Sequence[Tensor]:
        """Return weighted sums over all processes, from one exchange."""
        mine = self.roster.within(places, weights)
        alike, sums = self._are_ones(weights), self._totals  # the sums are of clients that worked in turn
        return self.group.sum(
            [sums.pop(name) if name in sums else total(rows, mine, alike=alike) for name, rows in sent.items()]
        )

    def _of_all(self, rows: Tensor) -> Tensor:
        return self.roster.rows(rows)

    def _added(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.group.sum(parts)

    def _mine(self, places: Tensor, values: Tensor) -> Tensor:
        return self.roster.within(places, values)

    def _answered(self, rows: Tensor, places: Tensor) -> Tensor:
        return self.roster.rows_at(rows, places)

    # ---- what the run loop uses -----------------------------------------------------------------------------------

    def begin(self, iteration: int, algorithm: Algorithm | None = None) -> None:
        """Begin an outer iteration and drop scratch values."""
        self.host.check()
        self.host.scratch.clear()
        super().begin(iteration, algorithm)

    def adopt(self, algorithm: Algorithm) -> None:
        self.algorithm = self.host.algorithm = algorithm

    def measure(self, x: Any, y: Any) -> dict[str, float]:
        """Return losses and the problem's metrics over all data of all clients.

        The measurement is not charged and changes no draw.
        """
        xs, ys = self._points(x), self._points(y)
        found, diagnostics = self._figures(*self.host.looked_at(xs, ys)), self.problem.diagnostics
        if diagnostics is not None and all(isinstance(value, Tensor) and value.ndim == 1 for value in (x, y)):
            found.update(
                own_figures("diagnostics", diagnostics, self.host.layout_x.unravel(x), self.host.layout_y.unravel(y))
            )
        return found

    def judged(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the measurement, or nothing with noise: exact figures must not guide a private run."""
        return row if self.account is None else {}

    def _figures(self, names: Sequence[str], own: Tensor) -> dict[str, float]:
        table = self.roster.rows(own)
        if self.layer is None:
            return figures(self.problem, names, table)
        return layered_figures(self.problem, names, table, self.layer.settings)

    def _points(self, value: Any) -> Points:
        """Return points for a measurement, which reads kept rows a few at a time."""
        return partial(self._resolve, value) if isinstance(value, Kept) else self.collect(value)

    def collect(self, value: Any) -> Any:
        """Return the rows of a kept value, for the clients hosted here."""
        if isinstance(value, Tensor) and value.ndim == 2:  # rows by client number
            return value[self.host.ids.to(value.device)]
        return self._resolve(value, self.host.data.positions) if isinstance(value, Kept) else value

    def trees(self, value: Any, *, upper: bool) -> Any:
        rows = self.collect(value)
        return self.host.trees(rows, upper=upper) if rows.ndim == 1 else self.roster.trees(rows, upper=upper)

    def identity(self) -> dict[str, Any]:
        unequal = {"stragglers": self.stragglers._asdict()} if self.stragglers != Stragglers() else {}
        layer = identity_of(self.layer)
        layer |= {"attack": self.attack.asdict()} if self.attack is not None else {}
        return {**self.of_data(), "cohort": self.cohort._asdict(), **unequal, **layer}

    # ---- checkpoint -----------------------------------------------------------------------------------------------

    def state_dict(self, state: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state with all values that clients keep, and private rows without padding."""
        tensors, plain = super().state_dict(state)
        for label, store in self._stores():
            for name, mine in sorted(store.written.items()):
                written, rows = self.roster.rows(mine), store.own(name, mine.nonzero()[:, 0])
                tensors[f"{label}-written.{name}"] = written[self.place_of]
                tensors[f"{label}.{name}"] = self.roster.stored(rows, written, upper=name in self.algorithm.upper_space)
        tensors.update({f"ledger.{name}": value for name, value in self.bill().state_dict().items()})
        return tensors, plain

    def load_state_dict(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], state_type: Any) -> Any:
        for label, store in self._stores():
            store.clear()
            for name in below(tensors, f"{label}."):
                written, upper = tensors[f"{label}-written.{name}"], name in self.algorithm.upper_space
                store.write(
                    name, *self.roster.restored(tensors[f"{label}.{name}"].to(self.host.device), written, upper=upper)
                )
        return super().load_state_dict(tensors, plain, state_type)

    def _stores(self) -> tuple[tuple[str, Store], ...]:
        return ("memory", self.host.memory), ("kept", self.host.kept), ("feedback", self.host.feedback)

    def go_back(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], state_type: Any) -> Any:
        now = resent(tensors, self.bill())
        return self.load_state_dict(self.group.told_tensors(lambda: now), plain, state_type)

    def _received(self, stored: Tensor) -> Tensor:
        return stored.to(self.host.device, copy=True)

    def _resolve(self, kept: Kept, positions: Tensor) -> Tensor:
        self._check_kept(kept)
        zeros = torch.zeros(self.host.width(kept.name), dtype=self.host.dtype, device=self.host.device)
        return self.host.kept.read(kept.name, positions, zeros.expand(len(positions), -1))
