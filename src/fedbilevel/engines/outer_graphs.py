"""Whole outer iterations as CUDA graphs: one launch per outer iteration.

An outer iteration that occurs a third time with the same settings, shapes and draws of the server
is recorded. A replay reads its cohorts, weights, step sizes and number from two tensors, and finds
the memory of clients in rows that stay where they are. The engine repeats only its bookkeeping.

Nothing is trusted. The first replay, of a later outer iteration than the recorded one, runs beside
the usual computation, whose result is used. If both differ by more than rounding, or if recording
fails, whole outer iterations are refused: `Captures.refused` names the reason, and phases are
captured one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedbilevel.engines import cuda_graphs
from fedbilevel.engines.addressed import NotCapturable
from fedbilevel.engines.arenas import Arena, Setting, Traced, distinct, form, off, reason, shown, unchanged
from fedbilevel.engines.cuda_graphs import with_steps, without_steps
from fedbilevel.engines.partly_paid import PartlyPaid
from fedbilevel.errors import FedBilevelError
from fedbilevel.problem.layout import one_row

OUTER = "outer iteration"  # the name of a whole outer iteration in `Captures.refused`
_PATIENCE = 60  # outer iterations without a replay after which the engine captures phases instead
_FAILURES = (NotCapturable, RuntimeError, TypeError, ValueError, AttributeError, LookupError, FedBilevelError)
_MOST = 32  # recorded outer iterations that are kept
_LARGE = 2**31  # bytes of rows from which computing takes longer than launching, and a graph would double the memory


@dataclass
class _Graph:
    traced: Traced
    inputs: list[Tensor]
    ints: Arena
    floats: Arena
    replay: Callable[[], None]
    partly: PartlyPaid
    same: dict[str, int]  # values of the new state that are inputs, by the place of the input
    on_trial: bool = True


class Iterations:
    """Outer iterations of one engine, replayed where possible.

    A subclass knows its engine: what an outer iteration depends on (`_walk`), how it is traced, and
    its bookkeeping.
    """

    times = 3  # occurrences after which an outer iteration is recorded
    near = 1.0  # how far the first replay may be off, in units of what rounding explains
    exact = False  # whether a replay has the bits of the usual computation
    steady = False  # whether all cohorts of the run are the same

    def __init__(self, fed: Any) -> None:
        self.fed, self.host, self.captures = fed, fed.host, fed.host.captures
        self.replayed = self.usual = 0
        self._times: Counter[Any] = Counter()
        self._kept: dict[Any, _Graph] = {}
        self._numbers: dict[Any, int] = {}  # of algorithms, and of their settings without steps
        self._last_kind: tuple[Any, Any, int, int] | None = None  # the last algorithm and form, and their numbers
        if why := self._excluded():
            self.captures.refused[OUTER] = why

    # ---- what an engine says --------------------------------------------------------------------------------------

    def _excluded(self) -> str:
        """Return why no outer iteration of this engine can be captured, or nothing."""
        raise NotImplementedError

    def _walk(self, basic: Any) -> tuple[Any, Any] | None:
        """Return what this outer iteration depends on, and the facts that shapes depend on.

        None: nothing is known yet about outer iterations of this kind.
        """
        raise NotImplementedError

    def _trace(self, algorithm: Any, given: Mapping[str, Any], fields: Sequence[str], setting: Setting) -> Traced:
        """Run the outer iteration on tensors that a replay can change.

        given: the state and the tensors of the engine.
        fields: names of the state.
        """
        raise NotImplementedError

    def _observed(self, algorithm: Any, state: Any, basic: Any) -> Any:
        """Run the outer iteration as usual, and learn what `_walk` needs."""
        raise NotImplementedError

    def _rewind(self) -> None:
        """Begin the outer iteration again."""
        raise NotImplementedError

    def _book(self, script: Any, walk: Any, inputs: Mapping[int, Tensor], outputs: Mapping[int, Tensor]) -> Any:
        """Repeat the bookkeeping of a recorded outer iteration; return what `_finished` needs."""
        raise NotImplementedError

    def _settle(self, script: Any, results: Mapping[str, Tensor]) -> None:
        """Add to the bookkeeping what only the replay knows."""

    def _finished(self, value: Any, booked: Any) -> Any:
        """Return a value of the new state that is no tensor."""
        return value

    def _extras(self) -> dict[str, Tensor]:
        """Return tensors of the engine that belong to the state."""
        return {}

    def _adopt(self, extras: Mapping[str, Tensor]) -> None:
        """Take over new tensors of the engine."""

    def _stores(self) -> tuple[Any, ...]:
        return self.host.memory, self.host.kept

    # ---- one outer iteration --------------------------------------------------------------------------------------

    def round(self, algorithm: Any, state: Any) -> Any:
        """Return the state after this outer iteration."""
        if OUTER in self.captures.refused:
            return algorithm.round(self.fed, state)
        try:
            whole, basic = self._kind(algorithm, state)
        except TypeError as error:
            return self._refuse(f"its settings or state cannot be compared ({error})", algorithm, state)
        walked = self._walk(basic) if self.fed.iteration > 1 else None  # the first may be unlike the others
        if walked is None:
            return self._plainly(algorithm, state, basic)
        walk, facts = walked
        key, open_key = (whole, basic, facts), (basic, facts)
        graph = self._kept.get(key) or self._kept.get(open_key)
        if graph is not None and graph.traced.moved():
            self._kept = {one: kept for one, kept in self._kept.items() if kept is not graph}  # its rows have moved
            graph = None
        if graph is None:
            self._times.update((key, open_key))
            moving = self._times[key] < self.times <= self._times[open_key] - self.times
            if (self._times[key] >= self.times or moving) and len(self._kept) < _MOST:
                try:
                    self._kept[open_key if moving else key] = self._capture(algorithm, state, walk, moving)
                except _FAILURES as error:
                    return self._refuse(reason(error), algorithm, state)
            return self._plainly(algorithm, state, basic)  # the first replay is one of the next outer iterations
        if graph.on_trial:
            return self._tried(graph, algorithm, state, walk, basic)
        return self._replayed(graph, algorithm, state, walk)

    def _kind(self, algorithm: Any, state: Any) -> tuple[int, int]:
        """Return numbers of what an outer iteration depends on: with its step sizes, and without them.

        The second one depends on the form of the state as well. Numbers are compared faster than settings.
        """
        now = form({**state._asdict(), **self._extras()})
        last = self._last_kind
        if last is None or last[0] is not algorithm or last[1] != now:
            number = lambda what: self._numbers.setdefault(what, len(self._numbers))
            last = algorithm, now, number(algorithm), number((without_steps(algorithm), now))
            self._last_kind = last
        return last[2:]

    def _plainly(self, algorithm: Any, state: Any, basic: Any) -> Any:
        """Run as usual, without captured phases: their memory is better used for whole outer iterations."""
        self.usual += 1
        if self.usual > _PATIENCE + self.replayed:
            return self._refuse(
                f"of {self.usual + self.replayed} outer iterations, {self.usual} were unlike earlier ones",
                algorithm,
                state,
            )
        self._rewind()
        with self._without_captures():
            return self._observed(algorithm, state, basic)

    def _refuse(self, why: str, algorithm: Any, state: Any) -> Any:
        self.captures.refused[OUTER] = why
        self._kept.clear()
        self._rewind()
        return algorithm.round(self.fed, state)

    @contextmanager
    def _without_captures(self) -> Iterator[None]:
        self.host.captures = None
        try:
            yield
        finally:
            self.host.captures = self.captures

    def _given(self, state: Any) -> list[Tensor]:
        return distinct({**state._asdict(), **self._extras()})

    def _replay(self, graph: _Graph, given: Sequence[Tensor], walk: Any) -> None:
        graph.ints.fill(walk)
        graph.floats.fill(walk)
        for buffer, value in zip(graph.inputs, given, strict=True):
            buffer.copy_(one_row(value))
        graph.replay()

    def _replayed(self, graph: _Graph, algorithm: Any, state: Any, walk: Any) -> Any:
        walk.algorithm = algorithm
        before, given = self._before(), self._given(state)
        self._replay(graph, given, walk)
        new, outputs = self._outputs(graph, given)
        booked = self._book(graph.traced.script, walk, dict(enumerate(given)), outputs)  # while the device computes
        flags = graph.traced.results["flags"].cpu()
        if graph.traced.partly:
            graph.partly.pay(flags[1:], lambda where: self._payers(where, walk))
        self._settle(graph.traced.script, graph.traced.results)
        if not bool(flags[0]):
            return self._run_again(graph, algorithm, state, before)
        self.replayed += 1
        self._adopt({name: value for name, value in new.items() if name not in state._fields})
        return type(state)(**{name: self._finished(new[name], booked) for name in state._fields})

    def _before(self) -> Any:
        """Return what `_back` needs to begin this outer iteration again."""

    def _back(self, before: Any) -> None:
        """Return to the values of `_before`."""

    def _run_again(self, graph: _Graph, algorithm: Any, state: Any, before: Any) -> Any:
        """Run an outer iteration with a non-finite value as usual, which names the client.

        The costs of the replay stay.
        """
        for rows, places, label in reversed(graph.traced.saved):
            rows.index_copy_(0, places, graph.traced.results[label])
        ledger = self.host.ledger
        paid = ledger.state_dict()
        self._back(before)
        self._rewind()
        try:
            with self._without_captures():
                return algorithm.round(self.fed, state)
        finally:
            ledger.load_state_dict(paid)

    def _tried(self, graph: _Graph, algorithm: Any, state: Any, walk: Any, basic: Any) -> Any:
        """Run as usual and beside it the first replay; keep the graph if both agree."""
        walk.algorithm, before = algorithm, {**state._asdict(), **self._extras()}
        copies = [store.copied() for store in self._stores()]
        given = self._given(state)
        self._replay(graph, given, walk)
        got, _ = self._outputs(graph, given)
        rows = [{name: shelf.rows.clone() for name, shelf in store.copied().items()} for store in self._stores()]
        places = [{name: store.slots(name, torch.arange(store.num_rows)) for name in some}
                  for store, some in zip(self._stores(), rows, strict=True)]  # fmt: skip
        for store, copied in zip(self._stores(), copies, strict=True):
            store.restore(copied)
        new = self._plainly(algorithm, state, basic)
        after = {**new._asdict(), **self._extras()}
        worst = max((off(got[name], after[name], before[name]) for name in got if isinstance(got[name], Tensor)),
                    default=0.0)  # fmt: skip
        for store, some, where in zip(self._stores(), rows, places, strict=True):
            for name, found in some.items():
                own = (where[name] >= 0).nonzero()[:, 0]
                if len(own):
                    mine = found[where[name][own].to(found.device)]
                    worst = max(worst, off(mine, store.own(name, own), torch.zeros_like(mine)))
        if worst > self.near:
            self.captures.refused[OUTER] = f"a replay differed {worst:.3g} times as much as rounding explains"
            self._kept.clear()
        graph.on_trial = False
        return new

    def _outputs(self, graph: _Graph, given: Sequence[Tensor]) -> tuple[dict[str, Any], dict[int, Tensor]]:
        """Return copies of the new values by name and by number, because the next replay overwrites them."""
        traced, copies = graph.traced, dict[int, Tensor]()
        new: dict[str, Any] = {}
        for name, value in traced.state.items():
            if not isinstance(value, Tensor):
                new[name] = value
                continue
            if name in graph.same:
                new[name] = given[graph.same[name]]
                continue
            if id(value) not in copies:
                copies[id(value)] = cuda_graphs.copied(traced.results[f"state.{name}"])
            new[name] = copies[id(value)]
        return new, copies

    def _payers(self, where: Any, walk: Any) -> tuple[str, Tensor]:
        """Return the phase and the positions of the clients of a charge."""
        raise NotImplementedError

    # ---- recording ------------------------------------------------------------------------------------------------

    def _capture(self, algorithm: Any, state: Any, walk: Any, moving: bool) -> _Graph:
        """Record the outer iteration; it changes nothing but tensors of its own.

        moving: whether step sizes become tensors.
        """
        host, given = self.host, {**state._asdict(), **self._extras()}
        if sum(value.numel() * value.element_size() for value in distinct(given)) * self._rows() > _LARGE:
            raise NotCapturable("its rows are so large that launching does not count")
        walk.algorithm = algorithm
        ints, floats = Arena(torch.int64, host.device), Arena(torch.float64, host.device)
        inputs = [one_row(value).clone() for value in distinct(given)]
        values = shown(given, inputs)
        copies = [store.copied() for store in self._stores()]

        def run(buys: Mapping[int, Sequence[str]], *, frozen: bool) -> tuple[Traced, Mapping[int, Any]]:
            ints.begin()
            floats.begin()
            mover, setting = algorithm, Setting(walk, ints, floats, buys, frozen, self.exact, self.steady)
            if moving:
                method, steps = with_steps(algorithm.round, host.device)
                mover = method.__self__
                for name in steps:
                    step = floats.take(walk, partial(_step, name))
                    object.__setattr__(mover, name, step.view(()))  # settings are frozen
            with torch.no_grad(), self._without_captures():
                return self._trace(mover, values, state._fields, setting), setting.asked

        try:
            _, asked = run({}, frozen=False)
            buys = {place: self._bought(walk, place, wanted) for place, wanted in asked.items()}
            ints.pack()
            floats.pack()
            self._rehearse(partial(run, buys))
            kept: list[Traced] = []  # the first one: a recorder without graphs runs it again

            def last() -> dict[str, Tensor]:
                traced, _ = run(buys, frozen=True)
                kept[:] = kept or [traced]
                return traced.results

            results, replay = self._recorded(last, (ints, floats), lambda: [*inputs, *kept[0].fixed.values()])
            kept[0].results = results
            same = {name: place for name, value in kept[0].state.items() if isinstance(value, Tensor)
                    for place, buffer in enumerate(inputs) if unchanged(value, buffer)}  # fmt: skip
            return _Graph(kept[0], inputs, ints, floats, replay, PartlyPaid(host, kept[0].partly), same)
        finally:
            for store, copied in zip(self._stores(), copies, strict=True):
                store.restore(copied)

    def _rehearse(self, run: Callable[..., Any]) -> None:
        """Run the outer iteration until it can be recorded."""
        for _ in range(2):  # so that every derivative has been measured, traced and, if asked for, compiled
            run(frozen=False)
        with cuda_graphs.without_waits(self.host.device):
            run(frozen=True)

    def _recorded(
        self,
        function: Callable[[], dict[str, Tensor]],
        arenas: Sequence[Arena],
        others: Callable[[], Sequence[Tensor]],
    ) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Return the results of a function, and a replay that recomputes them in place.

        arenas: numbers that change between replays.
        others: returns the other tensors that change.
        """
        return cuda_graphs.recorded(function, self.host.device)

    def _bought(self, walk: Any, place: int, asked: Mapping[str, int]) -> list[str]:
        """Return roles of which a cohort requests as many features as it has samples."""
        positions, data_of = self._positions(walk, place), self.host.data_of
        return [role for role, number in asked.items() if number >= int(data_of(role).sizes[role][positions].sum())]

    def _positions(self, walk: Any, place: int) -> Tensor:
        """Return the positions of a cohort."""
        raise NotImplementedError

    def _rows(self) -> int:
        """Return how many rows a value of the state becomes at the clients."""
        return 1


def _step(name: str, walk: Any) -> Tensor:
    return torch.tensor([getattr(walk.algorithm, name)], dtype=torch.float64)
